"""Which scheme a module's tensors make, told from their dtypes and shapes as far as these say it. What they leave open (group sizes, blocks) comes as a hint.

Nothing is checked here beyond what the choice needs: `Scheme.check` refuses what does not fit.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from headrace.errors import UnsupportedQuantization
from headrace.quantization.codes import FLOAT8_DTYPES
from headrace.quantization.fp4 import Nvfp4
from headrace.quantization.fp8 import Fp8Block, Fp8Channel, Fp8Tensor
from headrace.quantization.inputs import FP8_STATIC, INT8_STATIC, nvfp4_groups
from headrace.quantization.int4 import ModeloptInt4
from headrace.quantization.int8 import Int8Channel, Int8Group, Int8Tensor
from headrace.quantization.mx import Mxfp4, Mxfp4Blocks, Mxfp8
from headrace.quantization.scheme import InputQuantization, Role, Scheme, StoredPart

DEFAULT_BLOCK = (128, 128)
INT8_SCHEMES = (Int8Channel, Int8Tensor, Int8Group)
_EXPONENTS = (torch.uint8, torch.float8_e8m0fnu)
"""Types of scales that are powers of two."""
_MX_GROUP = 32


def scheme_of(
    module: str,
    parts: Mapping[Role, StoredPart],
    *,
    group_size: int | None = None,
    block: tuple[int, int] | None = None,
) -> Scheme:
    """Return the scheme of codes that are stored in bytes: all of ModelOpt's, block FP8, gpt-oss's, and compressed-tensors' but for packed integers.

    ``group_size`` and ``block`` are what the configuration says; a group size counts only where the tensors agree. Whether NVFP4's second scale is a factor or a divisor
    is told by its name. Raises `UnsupportedQuantization` where there is no scale, or where no layout has such codes.
    """
    codes = parts[Role.CODES]
    scale = require_scale(module, parts)
    if codes.suffix == "_blocks":
        return Mxfp4Blocks()
    if codes.dtype in FLOAT8_DTYPES:
        return float8_scheme(codes, scale, block=block)
    if codes.dtype is torch.int8:
        return int8_scheme(codes, scale, group_size=group_size)
    if codes.dtype is torch.uint8 and scale.dtype in FLOAT8_DTYPES:
        second = parts.get(Role.GLOBAL_SCALE)
        is_divisor = second.suffix == "weight_global_scale" if second else codes.suffix == "weight_packed"
        return Nvfp4(group_size=nvfp4_group(codes, scale, group_size), global_is_divisor=is_divisor)
    if codes.dtype is torch.uint8 and scale.dtype in _EXPONENTS:
        return Mxfp4()
    if codes.dtype is torch.uint8 and codes.suffix != "weight_packed":
        columns, groups = codes.shape[-1] if codes.shape else 0, scale.shape[-1] if scale.shape else 0
        return ModeloptInt4(
            group_size=group_size_of(columns, groups, group_size, usual=(128,)), fp8_scale=Role.GLOBAL_SCALE in parts
        )
    raise unreadable(module, parts)


def float8_scheme(codes: StoredPart, scale: StoredPart, *, block: tuple[int, int] | None = None) -> Scheme:
    """Return which FP8 scheme a scale of such a shape makes. ``block`` is what the configuration says; it counts where the scale could be of blocks."""
    shape, rows = scale.shape, codes.shape[0] if codes.shape else 0
    if (
        scale.dtype in _EXPONENTS
        and len(shape) == 2
        and len(codes.shape) == 2
        and shape == (rows, -(-codes.shape[1] // _MX_GROUP))
    ):
        return Mxfp8()
    if shape in ((), (1,)):
        return Fp8Tensor()
    if len(shape) == 1 or (shape == (rows, 1) and (rows > 1 or block is None)):
        return Fp8Channel()
    return Fp8Block(block=block if block is not None else block_of(codes.shape, shape))


def block_of(codes: tuple[int, ...], grid: tuple[int, ...]) -> tuple[int, int]:
    """Return the block that splits a matrix of shape ``codes`` into ``grid`` (``[n, k]``, or ModelOpt's ``[n, 1, k, 1]``), the last blocks perhaps cut.

    For a dimension of ``n >= 2`` blocks, a block size lies in [N / n, N / (n - 1)), a range that holds at most one power of two: that one. One block may
    be of any size, all of the same effect. Where no power of two fits, 128 is returned, which `Scheme.check` then refuses.
    """
    counts = grid[::2] if len(grid) == 4 else grid
    if len(codes) != 2 or len(counts) != 2:
        return DEFAULT_BLOCK
    return _block_size(codes[0], counts[0], DEFAULT_BLOCK[0]), _block_size(codes[1], counts[1], DEFAULT_BLOCK[1])


def int8_scheme(codes: StoredPart, scale: StoredPart, *, group_size: int | None = None) -> Scheme:
    """Return which INT8 scheme a scale of such a shape makes."""
    rows = codes.shape[0] if codes.shape else 0
    if scale.shape in ((), (1,)):
        return Int8Tensor()
    if len(scale.shape) == 2 and scale.shape[0] == rows and scale.shape[1] > 1 and len(codes.shape) == 2:
        return Int8Group(group_size=group_size_of(codes.shape[1], scale.shape[1], group_size, usual=(128,)))
    return Int8Channel()


def nvfp4_group(codes: StoredPart, scale: StoredPart, group_size: int | None) -> int:
    """Return the group size of NVFP4: 16, or 32 in ModelOpt's W4A8_NVFP4_FP8."""
    columns, groups = 2 * codes.shape[-1] if codes.shape else 0, scale.shape[-1] if scale.shape else 0
    return group_size_of(columns, groups, group_size, usual=(16, 32))


def group_size_of(columns: int, groups: int, said: int | None, *, usual: tuple[int, ...]) -> int:
    """Return the group size that makes ``groups`` groups of ``columns`` features: what the configuration ``said`` if it fits, else a ``usual`` one, else an even split.

    Where none fits, what was said is returned, or the first usual one; `Scheme.check` refuses it.
    """
    for size in (said, *usual):
        if size and size > 0 and -(-columns // size) == groups:
            return size
    if groups and columns % groups == 0:
        return columns // groups
    return said if said and said > 0 else usual[0]


def inputs_of(scheme: Scheme, parts: Mapping[Role, StoredPart]) -> InputQuantization | None:
    """Return how inputs are rounded as far as the tensors say it: by a stored scale, where there is one."""
    if Role.INPUT_SCALE not in parts:
        return None
    if isinstance(scheme, Nvfp4):
        return nvfp4_inputs(scheme.group_size, parts)
    return INT8_STATIC if isinstance(scheme, INT8_SCHEMES) else FP8_STATIC


def nvfp4_inputs(group_size: int, parts: Mapping[Role, StoredPart]) -> InputQuantization:
    """Return NVFP4 for inputs; the name of the stored scale says whether it is a factor or a divisor."""
    part = parts.get(Role.INPUT_SCALE)
    return nvfp4_groups(group_size, divisor=part is not None and part.suffix == "input_global_scale")


def require_scale(module: str, parts: Mapping[Role, StoredPart]) -> StoredPart:
    """Return a packed weight's scale. Raises `UnsupportedQuantization` where there is none."""
    if Role.SCALE in parts:
        return parts[Role.SCALE]
    codes = parts[Role.CODES]
    raise UnsupportedQuantization(
        f"{module} has packed values in {codes.suffix or 'its own tensor'} ({_dtype(codes)} {list(codes.shape)}), but no scale.",
        "Without the scale its values are unknown, and the plain codes are not the weight.",
        "Upload the checkpoint's files again, with the tensors that end in _scale or scales.",
    )


def unreadable(module: str, parts: Mapping[Role, StoredPart]) -> UnsupportedQuantization:
    """Return the error for parts that no known layout has."""
    listed = "; ".join(
        f"{part.suffix or 'the tensor itself'} is {_dtype(part)} {list(part.shape)}" for part in parts.values()
    )
    return UnsupportedQuantization(
        f"{module} is packed in a way that is not known here.",
        f"Its parts: {listed}.",
        "Use another quantization of the model, or its unquantized form; headrace.stream gives the tensors as they are stored.",
    )


def _block_size(size: int, count: int, usual: int) -> int:
    if -(-size // usual) == count:
        return usual
    power = 1
    while power < size and -(-size // power) > count:
        power *= 2
    return power if -(-size // power) == count else usual


def _dtype(part: StoredPart) -> str:
    return str(part.dtype).removeprefix("torch.")
