"""What two ways to compute the same thing may differ by: libraries of matrices sum in an order that depends on the processor, and on where in memory the numbers lie."""

from __future__ import annotations

import torch

_STEPS = 64
"""Of the type's precision at the largest number; a weight in the wrong place is thousands of them away."""


def assert_computed_alike(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Assert that ``found`` and ``expected`` are the results of the same computation with the same numbers, of one dtype and shape."""
    tolerance = _STEPS * torch.finfo(expected.dtype).eps * expected.detach().abs().max().item()
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)
