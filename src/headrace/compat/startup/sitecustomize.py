"""Puts the stand-in for Run:ai's package in place at the start of every Python process below ``python -m headrace.compat``, where the wheel's own start-up file is not there.

That command puts this folder first on ``PYTHONPATH``; Python imports ``sitecustomize`` before any program runs. A ``sitecustomize`` of somebody else is run first.
"""

import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path


def _run_next() -> None:
    """Run the ``sitecustomize`` that Python would have found without this folder, if there is one."""
    here = Path(__file__).resolve().parent
    spec = PathFinder.find_spec("sitecustomize", [place for place in sys.path if Path(place).resolve() != here])
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


try:
    _run_next()
finally:
    from headrace.compat.standin import install_if_asked

    install_if_asked()
