"""Small floating codes and what they stand for: the four FP8 formats, E2M1 in half bytes, E8M0 exponents. Codes to float32 and back; knows no scales of weights.

Sources: OCP 8-bit Floating Point Specification 1.0 (E4M3 and E5M2), OCP Microscaling Formats Specification 1.0 (E2M1, E8M0), arXiv 2206.02915 (the "fnuz" formats, whose
exponent bias is one greater, which have no infinities and no negative zero, and whose only NaN is 0x80).
"""

from __future__ import annotations

import torch

FLOAT8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
"""The formats of FP8 codes; the first is the usual one."""

E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""What codes 0 to 7 stand for; 8 to 15 are their negatives, -0 among them. There is no NaN and no infinity."""

_E2M1_MIDDLES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Between each code and the next. A value in the middle goes to the even code: down at the first, up at the second, and so on."""


def byte_values(dtype: torch.dtype, device: torch.device | None = None) -> torch.Tensor:
    """Return what each of the 256 bytes stands for as a code of ``dtype`` (FP8 or int8): float32 ``[256]``."""
    return torch.arange(256, dtype=torch.uint8, device=device).view(dtype).to(torch.float32)


def nearest_bytes(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the codes of ``dtype`` (FP8 or int8) nearest to ``values`` (float32), in their shape; of two equally near ones the even one.

    What is beyond the largest code becomes that, also infinity where the format has none. NaN becomes NaN, as int8 0.
    """
    if dtype is torch.int8:
        return values.nan_to_num(nan=0.0).round_().clamp_(-128, 127).to(torch.int8)
    largest = torch.finfo(dtype).max
    bounded = values.clamp(-largest, largest)
    if dtype is torch.float8_e5m2:
        bounded = torch.where(values.isinf(), values, bounded)
    return bounded.to(dtype)


def e2m1_values(device: torch.device | None = None) -> torch.Tensor:
    """Return what each E2M1 code stands for: float32 ``[16]``."""
    magnitudes = torch.tensor(E2M1_MAGNITUDES, dtype=torch.float32, device=device)
    return torch.cat([magnitudes, -magnitudes])


def nearest_e2m1(values: torch.Tensor) -> torch.Tensor:
    """Return the E2M1 codes nearest to ``values`` (float32), in their shape: uint8 below 16; of two equally near ones the even one.

    What is beyond ±6 becomes ±6. NaN becomes 0, for E2M1 has none.
    """
    values = values.nan_to_num(nan=0.0)
    middles = torch.tensor(_E2M1_MIDDLES, dtype=torch.float32, device=values.device)
    # `bucketize` leaves a value that equals a bound below it; bounds that send theirs up are a little lower.
    middles[1::2] = torch.nextafter(middles[1::2], torch.zeros_like(middles[1::2]))
    codes = torch.bucketize(values.abs(), middles, out_int32=True).to(torch.uint8)
    return codes | (values.signbit().to(torch.uint8) << 3)


def e8m0_values(device: torch.device | None = None) -> torch.Tensor:
    """Return what each byte stands for as an E8M0 exponent: float32 ``[256]``, ``2**(byte - 127)``; 0 is the subnormal 2**-127, 255 is NaN."""
    exponents = torch.arange(256, dtype=torch.int32, device=device) << 23
    exponents[0] = 1 << 22
    exponents[255] = 0x7FC00000
    return exponents.view(torch.float32)
