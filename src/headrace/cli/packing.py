"""What `headrace inspect` says of packed weights: one row for each scheme. Imports torch only where weights are packed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headrace.checkpoint import Checkpoint
from headrace.errors import UnsupportedQuantization
from headrace.quantization import QuantizationSection, find_modelopt, find_quantization
from headrace.quantization.section import MODELOPT_FILE
from headrace.units import format_bytes

_PLAIN_DTYPES = frozenset({"BF16", "F16", "F32", "F64", "I64", "BOOL"})


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemeRow:
    """Weights that are packed in one way, or plain weights of one dtype."""

    scheme: str
    inputs: str
    """How the inputs of their layers are rounded, in words."""
    num_modules: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """What can be said of a checkpoint's packed weights without reading one."""

    label: str | None = None
    """The method and algorithm that the side files name."""
    schemes: tuple[SchemeRow, ...] = ()
    """Packed ones first, each kind with the most bytes first; empty where nothing is packed, or nothing that is read here."""
    kv_cache: str | None = None
    """How keys and values are to be cached, in words; None for as they are."""
    warnings: tuple[str, ...] = ()
    """Contradictions and how they are read; or why the weights cannot be read here."""
    unused: tuple[str, ...] = ()
    """Tensors that look like scales, and that nothing takes."""

    def rows(self) -> list[tuple[str, str]]:
        """Return labels and values for what is not in the table of schemes."""
        return [("keys, values", f"cached as {self.kv_cache}")] if self.kv_cache else []

    def table(self) -> Sequence[tuple[str, str, str, str]]:
        """Return the cells of the table of schemes."""
        return [(row.scheme, row.inputs, f"{row.num_modules:,}", format_bytes(row.num_bytes)) for row in self.schemes]


def examine_packing(checkpoint: Checkpoint) -> Packing:
    """Return what is packed in ``checkpoint``, which must be open: its side files are read here. Never raises for a quantization that cannot be read."""
    try:
        content = _read_modelopt(checkpoint)
        section, modelopt = find_quantization(checkpoint.config, content), find_modelopt(content)
    except UnsupportedQuantization as error:
        return Packing(warnings=(str(error),))
    if section is None and all(entry.dtype in _PLAIN_DTYPES for entry in checkpoint.entries.values()):
        return Packing()
    return _detect(checkpoint, section, modelopt)


def _detect(
    checkpoint: Checkpoint, section: QuantizationSection | None, modelopt: QuantizationSection | None
) -> Packing:
    from headrace.quantization import detect
    from headrace.quantization.kvscales import describe_kv

    label = section.label if section else None
    dtype = checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype")
    try:
        found = detect(
            section, checkpoint.entries, modelopt_section=modelopt, dtype=str(dtype or ""), source=checkpoint.uri
        )
    except UnsupportedQuantization as error:
        return Packing(label=label, warnings=(str(error),))
    if found is None:
        return Packing(label=label)
    return Packing(
        label=label,
        schemes=tuple(
            SchemeRow(scheme=row.scheme, inputs=row.inputs, num_modules=row.num_modules, num_bytes=row.num_bytes)
            for row in found.counts
        ),
        kv_cache=describe_kv(found.kv),
        warnings=found.warnings,
        unused=found.unused,
    )


def _read_modelopt(checkpoint: Checkpoint) -> dict[str, Any]:
    if MODELOPT_FILE not in {stored.key for stored in checkpoint.side_files.objects}:
        return {}
    try:
        content = json.loads(checkpoint.side_files.read(MODELOPT_FILE))
    except (ValueError, RecursionError) as error:
        raise _invalid(f"It is not JSON: {error}.") from error
    if not isinstance(content, dict):
        raise _invalid("It is not an object.")
    return content


def _invalid(why: str) -> UnsupportedQuantization:
    return UnsupportedQuantization(f"{MODELOPT_FILE} is not a configuration.", why, "Upload the model's own again.")
