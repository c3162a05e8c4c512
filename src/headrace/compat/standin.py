"""Puts Headrace in the place of the package ``runai_model_streamer`` in this process: who imports that package gets `headrace.compat.runai` under its names.

``HEADRACE_AS_RUNAI=1`` asks for it. A line that the wheel puts among the start-up files of Python (``headrace_as_runai.pth``) then calls `install_if_asked` in every process, before
any program runs; without the variable it looks at the environment and nothing else. So this module imports neither torch nor anything that does: what stands behind the names is imported
when the package is. What each of its modules holds is said in `headrace.compat.offered`.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import TYPE_CHECKING, Any

from headrace.errors import UsageError

if TYPE_CHECKING:
    from importlib.metadata import Distribution, DistributionFinder

PACKAGE = "runai_model_streamer"
"""The package that is stood in for."""
VARIABLE = "HEADRACE_AS_RUNAI"
STARTUP_FILE = "headrace_as_runai.pth"
"""In the wheel's root, and so in ``site-packages``."""

_LOG = logging.getLogger("headrace")


def install_if_asked(environment: Mapping[str, str] | None = None) -> bool:
    """Do what ``HEADRACE_AS_RUNAI`` in ``environment`` (default: the process's) says; return whether it asks for the stand-in.

    Raises `InvalidSetting` for a value that says neither yes nor no, and what `install` raises.
    """
    text = (os.environ if environment is None else environment).get(VARIABLE, "")
    if not text:
        return False
    from headrace.settings import says_yes

    wanted = says_yes(VARIABLE, text)
    if wanted:
        install()
    return wanted


def install() -> None:
    """Stand in for the package in this process from now on, before an installed one too. May be called twice.

    Raises `UsageError` where the package itself was imported before: who has its classes already would keep them.
    """
    present = sys.modules.get(PACKAGE)
    if present is not None and not is_ours(present):
        raise UsageError(
            f"Headrace cannot stand in for {PACKAGE} any more.",
            "The library itself has been imported in this process.",
            f"Set {VARIABLE}=1 before the program starts, or install the stand-in before anything imports the library.",
        )
    if not is_installed():
        sys.meta_path.insert(0, _Finder())


def is_installed() -> bool:
    """Say whether the stand-in is in place in this process."""
    return any(isinstance(finder, _Finder) for finder in sys.meta_path)


def is_ours(module: ModuleType) -> bool:
    """Say whether ``module`` is one of the stand-in's."""
    return isinstance(getattr(module.__spec__, "loader", None), _Finder)


class _Finder:
    """Finds the stand-in's modules and its entry in the list of installed distributions, and loads the modules. Stands first in `sys.meta_path`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the specification of a module of the package; None for other names. Raises `ModuleNotFoundError` that says what there is, for a module or name that is not offered."""
        if fullname != PACKAGE and not fullname.startswith(f"{PACKAGE}."):
            return None
        from headrace.compat.offered import MODULES, explain

        if fullname not in MODULES:
            # Without a name in it: the import system keeps one with the name of what a "from" looks for to itself, and says less.
            raise ModuleNotFoundError(explain(fullname))
        # All are packages, without a folder: a name that "from" does not find in a module is then looked for here, and explained.
        # No subclass of importlib.abc.Loader, which every start of Python would have to import.
        return ModuleSpec(fullname, self, origin="headrace", is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Leave it to the import system."""
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Fill a module. Raises `ImportError`, and logs it: programs take one for the absence of the package."""
        from headrace.compat.offered import fill

        try:
            fill(module)
        except ImportError as error:
            _LOG.error("Headrace cannot stand in for %s (%s): %s", PACKAGE, VARIABLE, error)
            raise
        if module.__name__ == PACKAGE:
            _say()

    def find_distributions(self, context: DistributionFinder.Context) -> Iterator[Distribution]:
        """Yield the stand-in's entry where the package is looked for by its name, so that questions for its version have an answer. It is in no list of all packages."""
        if (context.name or "").lower().replace("-", "_").replace(".", "_") == PACKAGE:
            from headrace.compat.offered import StandInDistribution

            yield StandInDistribution()


def _say() -> None:
    """Log that the stand-in is used: once in a process, since a module is loaded once."""
    beside = PathFinder.find_spec(PACKAGE)
    if beside is None:
        _LOG.info("Headrace stands in for %s (%s).", PACKAGE, VARIABLE)
    else:
        _LOG.warning("Headrace stands in for %s (%s); %s is not used.", PACKAGE, VARIABLE, _described(beside))


def _described(spec: ModuleSpec) -> str:
    from importlib.metadata import DistributionFinder, MetadataPathFinder

    found: Any = MetadataPathFinder.find_distributions(DistributionFinder.Context(name=PACKAGE))
    versions = [distribution.version for distribution in found]
    return f"the installed Run:ai Model Streamer {versions[0]}" if versions else f"{spec.origin}"
