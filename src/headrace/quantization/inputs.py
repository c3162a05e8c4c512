"""How layers' inputs are rounded, in the few ways that occur. Values only."""

from __future__ import annotations

from dataclasses import replace

from headrace.quantization.scheme import InputQuantization

FP8_STATIC = InputQuantization(format="e4m3", granularity="tensor", is_dynamic=False)
FP8_PER_TOKEN = InputQuantization(format="e4m3", granularity="token")
INT8_STATIC = InputQuantization(format="int8", granularity="tensor", is_dynamic=False)
INT8_PER_TOKEN = InputQuantization(format="int8", granularity="token")
MXFP4_GROUPS = InputQuantization(format="mxfp4", granularity="group", group_size=32)
MXFP8_GROUPS = InputQuantization(format="mxfp8", granularity="group", group_size=32)
MXFP4_GROUPS_NEAREST = replace(MXFP4_GROUPS, power_of_two="nearest")
MXFP8_GROUPS_NEAREST = replace(MXFP8_GROUPS, power_of_two="nearest")
"""As compressed-tensors finds its powers of two; the two before as ModelOpt does."""


def fp8_groups(group_size: int, *, power_of_two: str | None = None) -> InputQuantization:
    """Return FP8 with one dynamic scale for each ``group_size`` features of a row, as block FP8 has it."""
    return InputQuantization(format="e4m3", granularity="group", group_size=group_size, power_of_two=power_of_two)


def nvfp4_groups(group_size: int = 16, *, divisor: bool = False) -> InputQuantization:
    """Return NVFP4: dynamic groups under one stored scale, which is a ``divisor`` in compressed-tensors."""
    return InputQuantization(
        format="nvfp4", granularity="group", group_size=group_size, is_dynamic=False, divisor=divisor
    )
