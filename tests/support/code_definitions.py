"""What small codes stand for, worked out in plain Python from the definitions of their formats: what decoders are compared with. And a comparison that sees signs of zero."""

from __future__ import annotations

import math

import torch

NAN = math.nan

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]

FLOAT8 = {
    torch.float8_e4m3fn: (4, 7, "one NaN"),
    torch.float8_e5m2: (5, 15, "IEEE"),
    torch.float8_e4m3fnuz: (4, 8, "negative zero is NaN"),
    torch.float8_e5m2fnuz: (5, 16, "negative zero is NaN"),
}
"""Bits of the exponent, its bias, and which codes are not numbers."""


def float8_value(code: int, dtype: torch.dtype) -> float:
    """Return what ``code`` stands for: sign, exponent, mantissa, from the highest bit down."""
    exponent_bits, bias, special = FLOAT8[dtype]
    mantissa_bits = 7 - exponent_bits
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code & 0x7F) >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
    if special == "one NaN" and code & 0x7F == 0x7F:
        return NAN
    if special == "negative zero is NaN" and code == 0x80:
        return NAN
    if special == "IEEE" and exponent == (1 << exponent_bits) - 1:
        return NAN if mantissa else sign * math.inf
    if exponent == 0:
        return sign * math.ldexp(mantissa, 1 - bias - mantissa_bits)
    return sign * math.ldexp((1 << mantissa_bits) + mantissa, exponent - bias - mantissa_bits)


def byte_value(code: int, dtype: torch.dtype) -> float:
    """Return what ``code`` stands for in an FP8 format or as a signed number."""
    if dtype is torch.int8:
        return float(code - 256 if code > 127 else code)
    return float8_value(code, dtype)


def byte_table(dtype: torch.dtype) -> torch.Tensor:
    """Return what all 256 codes stand for: float32 ``[256]``."""
    return torch.tensor([byte_value(code, dtype) for code in range(256)], dtype=torch.float32)


def e8m0_value(code: int) -> float:
    """Return what an exponent stands for."""
    return NAN if code == 255 else math.ldexp(1.0, code - 127)


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Assert equal dtype, shape and values, signs of zeros included; any NaN equals any other."""
    assert found.dtype is expected.dtype
    assert found.shape == expected.shape
    nan = expected.isnan()
    assert torch.equal(found.isnan(), nan)
    found, expected = found.masked_fill(nan, 0), expected.masked_fill(nan, 0)
    different = (found != expected) | (found.signbit() != expected.signbit())
    assert not bool(different.any()), (
        f"{int(different.sum())} values differ, the first at {different.nonzero()[0].tolist()}"
    )
