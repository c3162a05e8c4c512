"""Entries of checkpoints that are not there: what a header would say of each layout of a packed weight."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from headrace.checkpoint import DTYPES, Entry
from headrace.quantization import QuantizationSection

PLACE = "config.json: quantization_config"


def make_entries(tensors: Mapping[str, str]) -> dict[str, Entry]:
    """Return entries by name; each is given as its stored dtype and its sizes: ``"F8_E4M3 256 512"``, or ``"F32"`` for one number."""
    entries, position = {}, 0
    for name, text in tensors.items():
        dtype, *sizes = text.split()
        shape = tuple(map(int, sizes))
        size_bytes = math.prod(shape) * DTYPES[dtype].bits // 8
        entries[name] = Entry(name, dtype, shape, "model.safetensors", position, position + size_bytes)
        position += size_bytes
    return entries


def section(method: str, **raw: Any) -> QuantizationSection:
    return QuantizationSection(method, PLACE, {"quant_method": method, **raw})


def plain(*names: str, sizes: str = "64 64") -> dict[str, str]:
    return {f"{name}.weight": f"BF16 {sizes}" for name in names}


def fp8(name: str, rows: int = 256, columns: int = 256, *, scale: str = "F32", inputs: bool = False) -> dict[str, str]:
    """FP8 with a scale of any shape, ``weight_scale``."""
    found = {f"{name}.weight": f"F8_E4M3 {rows} {columns}", f"{name}.weight_scale": scale}
    return {**found, f"{name}.input_scale": "F32"} if inputs else found


def block_fp8(name: str, rows: int = 256, columns: int = 256, *, grid: str = "2 2") -> dict[str, str]:
    """DeepSeek's layout."""
    return {f"{name}.weight": f"F8_E4M3 {rows} {columns}", f"{name}.weight_scale_inv": f"F32 {grid}"}


def nvfp4(name: str, rows: int = 64, columns: int = 64, *, group: int = 16, inputs: bool = True) -> dict[str, str]:
    """ModelOpt's NVFP4."""
    found = {
        f"{name}.weight": f"U8 {rows} {columns // 2}",
        f"{name}.weight_scale": f"F8_E4M3 {rows} {columns // group}",
        f"{name}.weight_scale_2": "F32",
    }
    return {**found, f"{name}.input_scale": "F32"} if inputs else found


def packed_nvfp4(name: str, rows: int = 64, columns: int = 64) -> dict[str, str]:
    """compressed-tensors' NVFP4."""
    return {
        f"{name}.weight_packed": f"U8 {rows} {columns // 2}",
        f"{name}.weight_scale": f"F8_E4M3 {rows} {columns // 16}",
        f"{name}.weight_global_scale": "F32 1",
        f"{name}.input_global_scale": "F32 1",
    }


def packed_int4(name: str, rows: int = 64, columns: int = 64, *, group: int = 32) -> dict[str, str]:
    """compressed-tensors' INT4, symmetric."""
    return {
        f"{name}.weight_packed": f"I32 {rows} {columns // 8}",
        f"{name}.weight_scale": f"BF16 {rows} {columns // group}",
        f"{name}.weight_shape": "I64 2",
    }


def gptq(name: str, rows: int = 64, columns: int = 128, *, group: int = 64, bits: int = 4) -> dict[str, str]:
    return {
        f"{name}.qweight": f"I32 {columns * bits // 32} {rows}",
        f"{name}.qzeros": f"I32 {columns // group} {rows * bits // 32}",
        f"{name}.scales": f"F16 {columns // group} {rows}",
        f"{name}.g_idx": f"I32 {columns}",
    }


def awq(name: str, rows: int = 64, columns: int = 128, *, group: int = 64) -> dict[str, str]:
    return {
        f"{name}.qweight": f"I32 {columns} {rows // 8}",
        f"{name}.qzeros": f"I32 {columns // group} {rows // 8}",
        f"{name}.scales": f"F16 {columns // group} {rows}",
    }
