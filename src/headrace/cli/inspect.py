"""`headrace inspect`: says what a checkpoint holds, from its headers and its configuration. Reads no weight; imports torch only where weights are packed or a model is asked what it takes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

from headrace.checkpoint import Checkpoint, Entry, open_checkpoint
from headrace.cli.console import make_console, print_json, print_rows, print_table, printable
from headrace.cli.packing import Packing, examine_packing
from headrace.settings import Settings
from headrace.units import format_bytes

CONTEXT_TOKENS = 1000
"""For how many tokens of context the cache of keys and values is given."""

_NESTED_CONFIGS = ("text_config", "language_config", "llm_config")
"""Where models that see or hear keep the configuration of their language model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """Of which load a plan is made."""

    num_ranks: int = 1
    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    as_model: bool = False
    """What Transformers takes, in its order, rather than every tensor in the order of the files."""
    language_only: bool = False
    layers: str | None = None
    """``first:stop``, half open, as Python writes slices."""
    experts: str | None = None

    @property
    def asks_model(self) -> bool:
        """Whether Transformers must be asked which tensors are wanted."""
        return self.as_model or self.language_only or self.layers is not None or self.experts is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class DtypeTotal:
    """What a checkpoint holds of one stored type. ``num_values`` counts logical values, as headers do: two to a byte for F4."""

    dtype: str
    num_tensors: int
    num_values: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """What can be said of a checkpoint without reading its weights."""

    uri: str
    snapshot_id: str
    num_files: int
    num_tensors: int
    num_parameters: int
    """Logical values in all tensors. Integers that hold several packed values count once."""
    size_bytes: int
    dtypes: tuple[DtypeTotal, ...]
    """Largest first."""
    architecture: str | None
    quantization: str | None
    """What the side files call the method, if they name one."""
    cache_bytes: int | None
    """Keys and values of `CONTEXT_TOKENS` tokens, at most; None where the configuration does not say."""
    notes: tuple[str, ...]
    packing: Packing
    """How weights are packed: one row for each scheme."""

    def rows(self) -> list[tuple[str, str]]:
        """Return what a person wants to read: label and value, in order."""
        memory = f"{format_bytes(self.size_bytes)} of weights"
        if self.cache_bytes is not None:
            memory += f", and {format_bytes(self.cache_bytes)} for each {CONTEXT_TOKENS:,} tokens of context"
        return [
            ("checkpoint", f"{self.uri} (snapshot {self.snapshot_id})"),
            ("architecture", self.architecture or "config.json names none"),
            ("quantization", self.quantization or "config.json names none"),
            *self.packing.rows(),
            ("parameters", f"{self.num_parameters:,} in {self.num_tensors:,} tensors"),
            ("size", f"{format_bytes(self.size_bytes)} in {self.num_files} file{'' if self.num_files == 1 else 's'}"),
            ("memory", memory),
            *(("note", note) for note in self.notes),
        ]


def inspect(
    uri: str,
    *,
    settings: Settings,
    snapshot: str | None = None,
    tensors: bool = False,
    json: bool = False,
    plan: PlanOptions | None = None,
) -> None:
    """Print what the checkpoint at ``uri`` holds; with ``tensors`` each of them as well, with ``plan`` what a load of it would ask for."""
    forecast = None
    with ExitStack() as stack:
        if plan is not None:
            # These import numpy, which a plain inspection need not wait for.
            from headrace.cli import planning
            from headrace.engines.collector import collector_paused

            stack.enter_context(collector_paused())
        checkpoint = stack.enter_context(open_checkpoint(uri, snapshot=snapshot, settings=settings))
        found, entries = examine(checkpoint), list(checkpoint.entries.values())
        if plan is not None:
            forecast = planning.forecast(checkpoint, plan, settings)
    if json:
        planned = {"plan": forecast.to_dict()} if forecast is not None else {}
        listed = {"tensors": [asdict(entry) for entry in entries]} if tensors else {}
        print_json({**asdict(found), **planned, **listed})
        return
    print_rows(found.rows())
    for warning in found.packing.warnings:
        # Not a row: those are cut, and of a warning every word counts.
        make_console().print(f"warning: {printable(warning)}", soft_wrap=True)
    if found.packing.schemes:
        print()
        print_table(("scheme", "inputs", "modules", "size"), found.packing.table())
    print()
    totals = [
        (row.dtype, f"{row.num_tensors:,}", f"{row.num_values:,}", format_bytes(row.size_bytes)) for row in found.dtypes
    ]
    print_table(("dtype", "tensors", "values", "size"), totals)
    if forecast is not None:
        print()
        planning.print_forecast(forecast)
    if tensors:
        print()
        rows = [
            (entry.name, entry.dtype, str(list(entry.shape)), format_bytes(entry.size_bytes), entry.file)
            for entry in entries
        ]
        print_table(("tensor", "dtype", "shape", "size", "file"), rows)


def examine(checkpoint: Checkpoint) -> Inspection:
    """Return what can be said of ``checkpoint``, which must be open: its configuration may be read here."""
    entries = checkpoint.entries.values()
    cache_bytes = cache_bytes_per_token(checkpoint.config)
    packing = examine_packing(checkpoint)
    return Inspection(
        uri=str(checkpoint.uri),
        snapshot_id=checkpoint.snapshot.id,
        num_files=len(checkpoint.files),
        num_tensors=len(entries),
        num_parameters=sum(math.prod(entry.shape) for entry in entries),
        size_bytes=checkpoint.total_bytes,
        dtypes=total_by_dtype(entries),
        architecture=name_architecture(checkpoint.config),
        quantization=name_quantization(checkpoint.config) or packing.label,
        cache_bytes=None if cache_bytes is None else cache_bytes * CONTEXT_TOKENS,
        notes=tuple(str(note) for note in checkpoint.notes),
        packing=packing,
    )


def total_by_dtype(entries: Iterable[Entry]) -> tuple[DtypeTotal, ...]:
    """Return tensors, values and bytes for each stored type, the type with the most bytes first."""
    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(entry.dtype, []).append(entry)
    totals = [
        DtypeTotal(
            dtype=dtype,
            num_tensors=len(group),
            num_values=sum(math.prod(entry.shape) for entry in group),
            size_bytes=sum(entry.size_bytes for entry in group),
        )
        for dtype, group in groups.items()
    ]
    return tuple(sorted(totals, key=lambda total: (-total.size_bytes, total.dtype)))


def name_architecture(config: Mapping[str, Any] | None) -> str | None:
    """Return the model's class as config.json names it, else its model type, else None."""
    if not config:
        return None
    architectures = config.get("architectures")
    if isinstance(architectures, list) and architectures:
        return str(architectures[0])
    return str(config["model_type"]) if config.get("model_type") else None


def name_quantization(config: Mapping[str, Any] | None) -> str | None:
    """Return the method that config.json names, at its top or for its language model: ``fp8``, ``modelopt NVFP4``; None without one."""
    for part in _parts(config):
        section = part.get("quantization_config") or part.get("compression_config")
        if not isinstance(section, Mapping):
            continue
        words = [section.get("quant_method"), section.get("quant_algo") or section.get("format")]
        return " ".join(str(word) for word in words if word) or "not named"
    return None


def cache_bytes_per_token(config: Mapping[str, Any] | None) -> int | None:
    """Return the bytes of keys and values that one token of context takes at most, in the model's own dtype.

    2 x layers with attention x key-value heads x head size x bytes of the dtype. None where config.json does not say these, or where the
    model stores something else (latent attention, whose cache depends on the engine).
    """
    for part in _parts(config):
        layers = _count(part, "num_hidden_layers")
        heads = _count(part, "num_attention_heads")
        kv_heads = _count(part, "num_key_value_heads") or heads
        hidden = _count(part, "hidden_size")
        head_size = _count(part, "head_dim") or (hidden // heads if hidden and heads else None)
        if not layers or not kv_heads or not head_size or part.get("kv_lora_rank"):
            continue
        types = part.get("layer_types")
        if isinstance(types, list):
            layers = sum(kind in ("full_attention", "sliding_attention", "chunked_attention") for kind in types)
        dtype = (
            part.get("dtype")
            or part.get("torch_dtype")
            or (config or {}).get("dtype")
            or (config or {}).get("torch_dtype")
        )
        return 2 * layers * kv_heads * head_size * (4 if dtype == "float32" else 2)
    return None


def _parts(config: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    if config is None:
        return
    yield config
    for name in _NESTED_CONFIGS:
        if isinstance(config.get(name), Mapping):
            yield config[name]


def _count(config: Mapping[str, Any], name: str) -> int | None:
    value = config.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
