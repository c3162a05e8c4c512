"""Stands for SGLang's compiled kernels, which PyPI has for CUDA alone: every name that is asked for is there, and raises once it is called.

So SGLang can be imported on a machine without a GPU. Whatever it runs there runs on torch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__version__ = "0.4.10"
__path__: list[str] = []


class Absent:
    """A kernel, a class or a constant that is not here."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        raise NotImplementedError(f"{self.name} is a compiled kernel, and only its name is here.")

    def __getattr__(self, name: str) -> Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self.name}.{name}")


class _Finder(MetaPathFinder, Loader):
    """Finds every module below ``sgl_kernel``."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.startswith("sgl_kernel.") else None

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        module.__getattr__ = lambda attribute: _absent(name, attribute)  # type: ignore[method-assign]


def _absent(module: str, name: str) -> Absent:
    if name.startswith("__"):
        raise AttributeError(name)
    return Absent(f"{module}.{name}")


def __getattr__(name: str) -> Absent:
    return _absent(__name__, name)


sys.meta_path.append(_Finder())
