"""Every type that a safetensors file can store, in one table. Pure: torch's types are named here, not imported.

Source: the ``Dtype`` enumeration of the safetensors 0.8 reader.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class StoredDtype:
    """One stored type.

    ``name`` is the spelling in the header. ``bits`` is the size of one logical value. ``torch_name`` is the attribute of the torch module (an older
    torch may lack it); None where torch has no such type, and the bytes can only be had raw. ``packed`` is how many logical values one torch
    element holds: 2 for F4, whose last dimension torch counts in pairs.
    """

    name: str
    bits: int
    torch_name: str | None
    packed: int = 1

    def size_bytes(self, shape: Sequence[int]) -> int | None:
        """Return the bytes of a tensor of ``shape`` (logical values); None where the values do not fill whole bytes."""
        bits = math.prod(shape) * self.bits
        return None if bits % 8 else bits // 8

    def torch_shape(self, shape: Sequence[int]) -> tuple[int, ...] | None:
        """Return ``shape`` as torch counts it; None where the last dimension cannot be divided so, or torch has no such type."""
        if self.torch_name is None:
            return None
        if self.packed == 1:
            return tuple(shape)
        if not shape or shape[-1] % self.packed:
            return None
        return (*shape[:-1], shape[-1] // self.packed)


_ALL = (
    StoredDtype("BOOL", 8, "bool"),
    StoredDtype("U8", 8, "uint8"),
    StoredDtype("I8", 8, "int8"),
    StoredDtype("F8_E5M2", 8, "float8_e5m2"),
    StoredDtype("F8_E4M3", 8, "float8_e4m3fn"),
    StoredDtype("F8_E8M0", 8, "float8_e8m0fnu"),
    StoredDtype("F8_E4M3FNUZ", 8, "float8_e4m3fnuz"),
    StoredDtype("F8_E5M2FNUZ", 8, "float8_e5m2fnuz"),
    StoredDtype("I16", 16, "int16"),
    StoredDtype("U16", 16, "uint16"),
    StoredDtype("F16", 16, "float16"),
    StoredDtype("BF16", 16, "bfloat16"),
    StoredDtype("I32", 32, "int32"),
    StoredDtype("U32", 32, "uint32"),
    StoredDtype("F32", 32, "float32"),
    StoredDtype("C64", 64, "complex64"),
    StoredDtype("F64", 64, "float64"),
    StoredDtype("I64", 64, "int64"),
    StoredDtype("U64", 64, "uint64"),
    StoredDtype("F4", 4, "float4_e2m1fn_x2", packed=2),
    StoredDtype("F6_E2M3", 6, None),
    StoredDtype("F6_E3M2", 6, None),
)

DTYPES: Mapping[str, StoredDtype] = MappingProxyType({dtype.name: dtype for dtype in _ALL})
"""All stored types by the spelling of the header."""
