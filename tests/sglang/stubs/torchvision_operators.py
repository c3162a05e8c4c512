"""Declares the operators that torchvision names when it is imported: the wheel's compiled half is for another build of torch, and does not load into the CPU's.

They are declared just before torchvision is imported, so that a process which never does so does not pay for torch. Calling one fails.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


class Finder(MetaPathFinder):
    """Finds nothing; sees that torchvision is about to be imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            declare()
        return None


def declare() -> None:
    """Declare what is in `SCHEMAS`, for the rest of the process."""
    import torch

    library = torch.library.Library("torchvision", "DEF")
    for schema in SCHEMAS:
        library.define(schema)
    _KEPT.append(library)


_KEPT: list[object] = []
"""An operator lives as long as the library that declared it."""
