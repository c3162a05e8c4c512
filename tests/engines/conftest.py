"""What tests of real models share."""

from __future__ import annotations

from tests.support.quantized import quantized

__all__ = ["quantized"]
