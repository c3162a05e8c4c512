"""The public way to a model; imports the engine only when one is asked for, since that takes seconds and needs an extra."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.streaming import Source


def load_model(source: Source, **options: Any) -> Any:
    """Load the model at ``source`` with Transformers, its weights streamed; see `headrace.engines.transformers.load_model` for the keywords.

    Raises `MissingDependency` where Transformers is not installed.
    """
    from headrace.engines.transformers import load_model as load

    return load(source, **options)


def register_quantizers() -> None:
    """Make what NVIDIA ModelOpt exports (``quant_method: modelopt``) known to Transformers, for ``AutoModel….from_pretrained`` on a local folder. May be called twice.

    Raises `MissingDependency` where Transformers is not installed.
    """
    importlib.import_module("headrace.engines.transformers")  # it says what to install
    from headrace.engines.quantizer import register_quantizers as register

    register()
