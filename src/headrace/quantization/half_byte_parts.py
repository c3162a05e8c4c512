"""Stored parts of E2M1 weights whose rows are each one piece: codes uint8 ``[N, K/2]``, one scale of one byte per group of columns. What NVFP4 and MXFP4 share but values."""

from __future__ import annotations

import torch

from headrace.quantization.packed_parts import PartCheck, slice_input_parts
from headrace.quantization.scale_grid import cut_range
from headrace.quantization.scheme import Parts, Role

_CODE_DTYPES = (torch.uint8, getattr(torch, "float4_e2m1fn_x2", torch.uint8))
"""Types that hold two codes in a byte. Torch 2.7 has no name for such bytes yet."""


def check_half_bytes(
    check: PartCheck, *, group_size: int, scale_dtypes: tuple[torch.dtype, ...], scale_words: str, column_offset: int
) -> tuple[int, int]:
    """Return the logical shape of codes and scales, after checking both and the parts of the input; ``scale_words`` say what scales must be."""
    codes, scale = check.required(Role.CODES, "weight"), check.required(Role.SCALE, "weight_scale")
    is_right = codes.dtype in _CODE_DTYPES and len(codes.shape) == 2 and 0 not in codes.shape
    check.expect(codes, is_right, "uint8 [N, K / 2], two codes in a byte")
    rows, columns = codes.shape[0], 2 * codes.shape[1]
    check.expect(codes, columns % group_size == 0, f"uint8 [N, K / 2] with whole groups of {group_size} columns")
    groups = columns // group_size
    is_right = scale.dtype in scale_dtypes and scale.shape == (rows, groups)
    check.expect(scale, is_right, f"{scale_words} [{rows}, {groups}], one per {group_size} columns")
    check.expect_inputs(columns - column_offset)
    return rows, columns - column_offset


def cut_half_bytes(
    parts: Parts, rows: tuple[int, int], columns: tuple[int, int], *, group_size: int, column_offset: int
) -> dict[Role, torch.Tensor]:
    """Return the parts for ``rows`` and the groups that ``columns`` lie in: views. Parts of the input are those of ``columns``."""
    groups = cut_range(*columns, size=group_size, offset=column_offset)
    cut = slice_input_parts(parts, columns)
    octets = slice(groups.start * group_size // 2, groups.stop * group_size // 2)
    cut[Role.CODES] = parts[Role.CODES][slice(*rows), octets]
    cut[Role.SCALE] = parts[Role.SCALE][slice(*rows), groups]
    if Role.GLOBAL_SCALE in parts:
        cut[Role.GLOBAL_SCALE] = parts[Role.GLOBAL_SCALE]
    return cut
