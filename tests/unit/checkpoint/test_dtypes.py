from __future__ import annotations

import pytest
import torch

from headrace.checkpoint.dtypes import DTYPES, StoredDtype

BITS = {
    4: "F4",
    6: "F6_E2M3 F6_E3M2",
    8: "BOOL U8 I8 F8_E5M2 F8_E4M3 F8_E8M0 F8_E4M3FNUZ F8_E5M2FNUZ",
    16: "I16 U16 F16 BF16",
    32: "I32 U32 F32",
    64: "C64 F64 I64 U64",
}


def test_every_type_of_the_reference_is_there_with_its_size() -> None:
    expected = {name: bits for bits, names in BITS.items() for name in names.split()}
    assert {name: dtype.bits for name, dtype in DTYPES.items()} == expected
    assert all(name == dtype.name for name, dtype in DTYPES.items())


@pytest.mark.parametrize(
    "dtype", [dtype for dtype in DTYPES.values() if dtype.torch_name], ids=lambda dtype: dtype.name
)
def test_torch_has_the_type_with_the_same_size(dtype: StoredDtype) -> None:
    torch_type = getattr(torch, str(dtype.torch_name))
    assert isinstance(torch_type, torch.dtype)
    assert torch_type.itemsize * 8 == dtype.bits * dtype.packed


def test_torch_and_the_table_agree_with_the_reference_on_every_type() -> None:
    types = pytest.importorskip("safetensors.torch")._TYPES  # its own table, by the same spelling
    named = {name: getattr(torch, dtype.torch_name) for name, dtype in DTYPES.items() if dtype.torch_name}
    assert {name: named[name] for name in types if name in named} == {
        name: kind for name, kind in types.items() if name in named
    }
    assert set(types) <= set(DTYPES)


def test_six_bit_types_have_no_torch_type() -> None:
    assert DTYPES["F6_E2M3"].torch_name is DTYPES["F6_E3M2"].torch_name is None
    assert DTYPES["F6_E2M3"].torch_shape((4,)) is None


@pytest.mark.parametrize(
    ("name", "shape", "size"),
    [
        ("F32", (), 4),
        ("F32", (2, 3), 24),
        ("F32", (2, 0), 0),
        ("F4", (2, 8), 8),
        ("F4", (3,), None),
        ("F4", (), None),
        ("F6_E2M3", (4,), 3),
        ("F6_E3M2", (2,), None),
        ("U8", (1 << 40, 1 << 40), 1 << 80),
    ],
)
def test_size(name: str, shape: tuple[int, ...], size: int | None) -> None:
    assert DTYPES[name].size_bytes(shape) == size


@pytest.mark.parametrize(
    ("name", "shape", "torch_shape"),
    [
        ("BF16", (2, 3), (2, 3)),
        ("BF16", (), ()),
        ("F4", (2, 8), (2, 4)),
        ("F4", (2, 0), (2, 0)),
        ("F4", (8, 3), None),
        ("F4", (), None),
    ],
)
def test_torch_shape(name: str, shape: tuple[int, ...], torch_shape: tuple[int, ...] | None) -> None:
    assert DTYPES[name].torch_shape(shape) == torch_shape
