"""Which tensors a model takes of a checkpoint, and in which order: what `load_model` would ask for, found without asking for any of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headrace.checkpoint import Checkpoint, Entry
from headrace.errors import MissingDependency
from headrace.progress import LoadProgress
from headrace.settings import Settings
from headrace.streaming.formats import LoadFormat

try:
    from headrace.engines.collector import collector_paused
    from headrace.engines.construction import ModelWishes, prepare_construction
    from headrace.engines.conversion import LoadWeights
    from headrace.engines.parts import PartWishes
    from headrace.engines.parts_selection import Stored
    from headrace.engines.quantized import detect_quantization, read_quantization
    from headrace.engines.weights import Conditions, StreamedWeights
except ImportError as error:
    raise MissingDependency(
        "Asking which tensors a model takes needs Transformers.",
        f"Importing it failed: {error}.",
        'Install it with: pip install "headrace[transformers]"',
    ) from error


class _Placed(BaseException):
    """Carries the placement out of ``from_pretrained``, which no further step of is wanted. No `Exception`: nothing on the way may take it for a failure."""

    def __init__(self, order: tuple[Entry, ...]) -> None:
        super().__init__()
        self.order = order


class _Rehearsal(StreamedWeights):
    """Places, checks, and stops where the stream would begin."""

    def fill(self, model: Any, load_config: Any, load_weights: LoadWeights) -> tuple[Any, Any]:
        raise _Placed(self._place(model, load_config, self._assemblies(model, load_config)).order)


def rehearse_model(
    checkpoint: Checkpoint, *, settings: Settings, language_only: bool = False, **part: Any
) -> tuple[Entry, ...]:
    """Return the entries that `load_model` would read of ``checkpoint``, which must be open, in its order. Of an entry of which it reads a part, that part.

    Side files are read, and the model is built on the meta device; remote code is not run. ``part`` may hold ``encoder_only``, ``layers`` and ``experts``, as `load_model` takes
    them. Raises what `load_model` raises before the first weight byte.
    """
    source = checkpoint.uri
    folder: Path = checkpoint.side_files.folder()
    wishes = ModelWishes(part=PartWishes.of(language_only=language_only, **part))
    with collector_paused():
        section = read_quantization(folder, source=source)
        detected = detect_quantization(folder, checkpoint.entries, source=source)
        construction = prepare_construction(
            folder, section, detected, source=source, wishes=wishes, stored=Stored(checkpoint.entries)
        )
        conditions = Conditions(
            load_format=LoadFormat.HEADRACE,
            settings=settings,
            progress=LoadProgress(),
            quantization=section.method if section else None,
            selection=construction.selection,
        )
        weights = _Rehearsal(checkpoint, conditions, model_class=construction.model_class.__name__)
        try:
            construction.run(weights.values, weights.fill)
        except _Placed as placed:
            return placed.order
    raise AssertionError("from_pretrained ended without having filled the model")
