"""The same tensor in other memory: what code that reads or writes blocks of memory is tried with."""

from __future__ import annotations

import torch

LAYOUTS = ["plain", "turned", "part of rows", "odd start"]


def laid_out(values: torch.Tensor, layout: str) -> torch.Tensor:
    """Return a copy of ``values`` (two dimensions): without gaps, column by column, as a part of wider rows, or beginning at an odd element of its memory."""
    if layout == "turned":
        return values.t().contiguous().t()
    if layout == "part of rows":
        wide = torch.zeros(values.shape[0], values.shape[1] + 3, dtype=values.dtype)
        wide[:, 1:-2] = values
        return wide[:, 1:-2]
    if layout == "odd start":
        flat = torch.zeros(values.numel() + 1, dtype=values.dtype)
        flat[1:] = values.reshape(-1)
        return flat[1:].view(values.shape)
    return values.clone(memory_format=torch.contiguous_format)
