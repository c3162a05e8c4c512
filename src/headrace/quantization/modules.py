"""The answer of `detect`: what each quantized module of a checkpoint is, in stored names. Values only; nothing is decided here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from headrace.checkpoint import Entry
from headrace.quantization.scheme import Role, WeightQuantization
from headrace.quantization.section import QuantizationSection


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedModule:
    """One quantized module, under the name that its tensors carry in the files."""

    name: str
    """``language_model.model.layers.3.mlp.experts.7.gate_proj``; of gpt-oss's ``…experts.gate_up_proj_blocks``: ``…experts.gate_up_proj``."""
    weight: WeightQuantization
    """Of one expert, where ``num_experts`` is given: `StoredPart` shapes are then without the first dimension."""
    entries: Mapping[Role, Entry]
    num_experts: int | None = None
    """Where the file itself stacks experts: the first dimension of every entry. Else None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvQuantization:
    """How keys and values are rounded where they are cached."""

    format: str
    """``e4m3`` or ``nvfp4``."""
    scales: Mapping[str, tuple[Entry | None, Entry | None]] = field(default_factory=dict)
    """Attention module, in stored names (``model.layers.0.self_attn``) → the entries of its key and value scales; None where there is none (its scale is then 1).
    One entry for both where the file has only one (``kv_scale``)."""
    group_size: int | None = None
    """Features per dynamic group (NVFP4: 16)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemeCount:
    """One line of `headrace inspect`."""

    scheme: str
    """`Scheme.describe`, or ``plain BF16`` for weights that are not packed."""
    inputs: str
    """How inputs are rounded, in words: ``FP8 static``, ``NVFP4``, ``as they are``."""
    num_modules: int
    num_bytes: int
    """Bytes of all parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointQuantization:
    """What is known of a checkpoint's quantization before its first weight byte."""

    section: QuantizationSection
    modules: Mapping[str, QuantizedModule]
    """By stored module name, in file order. What is not here is plain."""
    kv: KvQuantization | None = None
    counts: tuple[SchemeCount, ...] = ()
    warnings: tuple[str, ...] = ()
    """Contradictions that have one safe reading, which was taken: each a full sentence that says which."""
    unused: tuple[str, ...] = ()
    """Names of entries that look like scales or helpers of a quantized weight and belong to none (also KV scales where no attention takes them)."""

    def entry_names(self) -> frozenset[str]:
        """Return the names of all entries that belong to a module or to the KV scales."""
        names = {entry.name for module in self.modules.values() for entry in module.entries.values()}
        for pair in (self.kv.scales if self.kv else {}).values():
            names |= {entry.name for entry in pair if entry is not None}
        return frozenset(names)
