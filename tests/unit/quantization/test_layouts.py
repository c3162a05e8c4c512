"""Schemes told from dtypes and shapes alone."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import UnsupportedQuantization
from headrace.quantization.fp4 import Nvfp4
from headrace.quantization.fp8 import Fp8Block, Fp8Channel, Fp8Tensor
from headrace.quantization.int8 import Int8Channel, Int8Group, Int8Tensor
from headrace.quantization.layouts import block_of, group_size_of, inputs_of, scheme_of
from headrace.quantization.modelopt_int4 import ModeloptInt4
from headrace.quantization.mx import Mxfp4, Mxfp4Blocks, Mxfp8
from headrace.quantization.scheme import Role, Scheme, StoredPart

E4M3, U8, I8, F32, E8M0 = torch.float8_e4m3fn, torch.uint8, torch.int8, torch.float32, torch.float8_e8m0fnu


def parts(
    codes: tuple[torch.dtype, tuple[int, ...]],
    scale: tuple[torch.dtype, tuple[int, ...]] | None,
    *,
    name: str = "weight",
    **others: str,
) -> dict[Role, StoredPart]:
    found = {Role.CODES: StoredPart(name, *codes)}
    if scale is not None:
        found[Role.SCALE] = StoredPart("weight_scale", *scale)
    for role, suffix in others.items():
        found[Role[role.upper()]] = StoredPart(suffix, F32, ())
    return found


@pytest.mark.parametrize(
    ("found", "scheme"),
    [
        (parts((E4M3, (256, 320)), (F32, ())), Fp8Tensor()),
        (parts((E4M3, (256, 320)), (F32, (1,))), Fp8Tensor()),
        (parts((E4M3, (256, 320)), (F32, (256,))), Fp8Channel()),
        (parts((E4M3, (256, 320)), (F32, (256, 1))), Fp8Channel()),
        (parts((E4M3, (256, 320)), (F32, (2, 3))), Fp8Block(block=(128, 128))),
        (parts((E4M3, (256, 320)), (F32, (2, 1, 3, 1))), Fp8Block(block=(128, 128))),
        (parts((E4M3, (256, 320)), (F32, (4, 1, 5, 1))), Fp8Block(block=(64, 64))),
        (parts((E4M3, (256, 320)), (F32, (256, 3))), Fp8Block(block=(1, 128))),
        (parts((E4M3, (256, 320)), (E8M0, (2, 3))), Fp8Block(block=(128, 128))),
        (parts((torch.float8_e5m2, (256, 320)), (F32, ())), Fp8Tensor()),
        (parts((E4M3, (256, 320)), (U8, (256, 10))), Mxfp8()),
        (parts((E4M3, (256, 320)), (E8M0, (256, 10))), Mxfp8()),
        (parts((U8, (256, 160)), (E4M3, (256, 20)), global_scale="weight_scale_2"), Nvfp4(group_size=16)),
        (parts((U8, (256, 160)), (E4M3, (256, 10)), global_scale="weight_scale_2"), Nvfp4(group_size=32)),
        (
            parts((U8, (256, 160)), (E4M3, (256, 20)), global_scale="weight_global_scale", name="weight_packed"),
            Nvfp4(group_size=16, global_is_divisor=True),
        ),
        (parts((U8, (256, 160)), (U8, (256, 10))), Mxfp4()),
        (parts((U8, (256, 160)), (E8M0, (256, 10)), name="weight_packed"), Mxfp4()),
        (parts((U8, (128, 256)), (F32, (256, 2))), ModeloptInt4(group_size=128)),
        (
            parts((U8, (128, 256)), (F32, (256, 4)), global_scale="weight_scale_2"),
            ModeloptInt4(group_size=64, fp8_scale=True),
        ),
        (parts((U8, (64, 3, 16)), (U8, (64, 3)), name="_blocks"), Mxfp4Blocks()),
        (parts((I8, (256, 320)), (F32, (256,))), Int8Channel()),
        (parts((I8, (256, 320)), (F32, (256, 1))), Int8Channel()),
        (parts((I8, (256, 320)), (F32, ())), Int8Tensor()),
        (parts((I8, (256, 320)), (F32, (256, 5))), Int8Group(group_size=64)),
    ],
)
def test_a_scheme_is_told_from_its_tensors(found: Mapping[Role, StoredPart], scheme: Scheme) -> None:
    assert scheme_of("m", found) == scheme


def test_a_block_that_is_said_counts_where_a_grid_could_be_of_it() -> None:
    grid = parts((E4M3, (256, 256)), (F32, (2, 2)))
    assert scheme_of("m", grid, block=(128, 128)) == Fp8Block(block=(128, 128))
    assert scheme_of("m", parts((E4M3, (1, 64)), (F32, (1, 1))), block=(128, 128)) == Fp8Block(block=(128, 128))
    assert scheme_of("m", parts((E4M3, (256, 64)), (F32, (256, 1))), block=(128, 128)) == Fp8Channel()
    # A grid that contradicts it is refused, rather than read with another block.
    with pytest.raises(UnsupportedQuantization, match="weight_scale"):
        scheme_of("m", grid, block=(64, 64)).check(grid, module="m")


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (parts((E4M3, (256, 320)), None), "no scale"),
        (parts((U8, (256, 160)), None), "no scale"),
        (parts((torch.int32, (256, 160)), (F32, (256, 20))), "not known here.*weight is int32"),
        (parts((U8, (256, 160)), (F32, (256, 20)), name="weight_packed"), "not known here"),
    ],
)
def test_what_no_layout_has_is_refused_by_name(found: Mapping[Role, StoredPart], said: str) -> None:
    with pytest.raises(UnsupportedQuantization, match=f"model.layers.0.up_proj .*{said}"):
        scheme_of("model.layers.0.up_proj", found)


@given(
    rows=st.integers(1, 700),
    columns=st.integers(1, 700),
    block=st.tuples(*[st.sampled_from([1, 16, 32, 64, 128, 256])] * 2),
    is_flat=st.booleans(),
)
def test_blocks_are_found_again_from_ragged_grids(
    rows: int, columns: int, block: tuple[int, int], is_flat: bool
) -> None:
    grid = (-(-rows // block[0]), -(-columns // block[1]))
    found = block_of((rows, columns), grid if is_flat else (grid[0], 1, grid[1], 1))
    for size, count, true, told in zip((rows, columns), grid, block, found, strict=True):
        # One block may be of any size: it covers everything. Of several, each value must be in the same block.
        assert [at // told for at in range(size)] == [at // true for at in range(size)], (size, count)


@pytest.mark.parametrize(
    ("columns", "groups", "said", "size"),
    [(128, 8, 16, 16), (128, 8, None, 16), (128, 8, 32, 16), (128, 4, None, 32), (120, 8, None, 16), (96, 4, None, 24), (7, 3, 5, 5)],
)  # fmt: skip
def test_group_sizes_follow_the_tensors(columns: int, groups: int, said: int | None, size: int) -> None:
    assert group_size_of(columns, groups, said, usual=(16, 32)) == size


def test_inputs_are_told_from_a_stored_scale_and_its_name() -> None:
    codes = (U8, (64, 32))
    factor = parts(codes, (E4M3, (64, 4)), global_scale="weight_scale_2", input_scale="input_scale")
    divisor = parts(codes, (E4M3, (64, 4)), global_scale="weight_global_scale", input_scale="input_global_scale")
    for found, is_divisor in ((factor, False), (divisor, True)):
        inputs = inputs_of(scheme_of("m", found), found)
        assert inputs is not None and (inputs.format, inputs.group_size, inputs.divisor) == ("nvfp4", 16, is_divisor)
    plain = parts(codes, (E4M3, (64, 4)), global_scale="weight_scale_2")
    assert inputs_of(scheme_of("m", plain), plain) is None
