"""Builds a model as ``from_pretrained`` does, from a local folder of side files: class, configuration, quantization, generation settings. Weights come from elsewhere.

No name of a repository and no uri is given to Transformers here, only local paths, so that nothing can be looked up on a hub.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from headrace.engines.architecture import find_model_class, load_config
from headrace.engines.conversion import Fill, PlacingClass
from headrace.engines.options import split_options
from headrace.engines.parts import PartWishes, plan_part
from headrace.engines.parts_selection import Selection, Stored, select
from headrace.engines.quantized import PackingWishes, came_from_quantizer, pass_quantization
from headrace.errors import MissingDependency, ModelError, UnsupportedQuantization
from headrace.quantization import CheckpointQuantization, QuantizationSection


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWishes:
    """How the caller wants the model built."""

    auto_class: Any = None
    """An Auto class or a model class; None lets config.json decide."""
    trust_remote_code: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    """The keywords of ``from_pretrained``."""
    packing: PackingWishes = field(default_factory=PackingWishes)
    part: PartWishes = field(default_factory=PartWishes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Construction:
    """Everything about a model but its weights."""

    source: str
    model_class: Any
    config: Any
    section: QuantizationSection | None
    """The checkpoint's quantization, which ``config`` holds at its top level."""
    options: Mapping[str, Any]
    detected: CheckpointQuantization | None = None
    """What our own readers are to do, in the names of what is built."""
    selection: Selection | None = None
    """What a part of the model takes of the checkpoint; None for the whole model."""
    cut: Callable[[Any], None] | None = None
    """Makes the part of the whole meta model, in place."""

    def run(self, values: Mapping[str, Any], fill: Fill) -> Any:
        """Return what ``from_pretrained`` returns for the state dict ``values``, the meta model having been filled by ``fill``.

        Raises `MissingDependency` where the quantizer wants a package that is not installed, and `UnsupportedQuantization` where it refuses for another reason.
        """
        try:
            return PlacingClass(self.model_class, fill, self.cut).from_pretrained(
                None, config=self.config, state_dict=values, **self.options
            )
        except (ImportError, RuntimeError, TypeError, ValueError) as error:
            if self.section is None or not came_from_quantizer(error):
                raise
            why = f"Transformers says: {' '.join(str(error).split())}"
            what = f"{self.source} is quantized with {self.section.label}, which does not load here."
            if isinstance(error, ImportError):
                raise MissingDependency(what, why, "Install what it names.") from error
            raise UnsupportedQuantization(
                what, why, "Use the unquantized form of the model, or another machine."
            ) from error


def prepare_construction(
    folder: Path,
    section: QuantizationSection | None,
    detected: CheckpointQuantization | None = None,
    *,
    source: str,
    wishes: ModelWishes,
    stored: Stored | None = None,
) -> Construction:
    """Return the construction of the model whose side files are in ``folder``, or of the part of it that is wished for, which takes some of what is ``stored``.

    Raises `UnknownArchitecture`, `UnsupportedQuantization`, and `InvalidSetting` and `PlacementError` for a part that cannot be had.
    """
    own, fields = split_options(wishes.options)
    config, rest = load_config(folder, source=source, trust_remote_code=wishes.trust_remote_code, options=fields)
    found = find_model_class(
        config, folder, source=source, trust_remote_code=wishes.trust_remote_code, auto_class=wishes.auto_class
    )
    part = plan_part(found, config, wishes.part, source=source)
    selection = None
    if part is not None:
        found, config = part.model_class, part.config
        if section is not None and detected is None and stored is not None:
            raise _foreign_part(section, source)
        if stored is not None:
            selection = select(part, stored, detected, source=source, key_mapping=own.get("key_mapping"))
            detected = selection.quantization
    pass_quantization(config, section, detected, source=source, wishes=wishes.packing)
    own.setdefault("generation_config", _generation_config(folder, found))
    return Construction(
        source=source,
        model_class=found,
        config=config,
        section=section,
        options={**own, **rest},
        detected=detected,
        selection=selection,
        cut=part.cut if part is not None else None,
    )


def _foreign_part(section: QuantizationSection, source: str) -> UnsupportedQuantization:
    return UnsupportedQuantization(
        f"A part of {source} cannot be loaded: it is quantized with {section.label}.",
        f"{section.place} says so; models of this kind are built as a whole, by Transformers' own quantizer.",
        "Load the whole model, or use its unquantized form.",
    )


def _generation_config(folder: Path, model_class: Any) -> Any:
    """Return what ``from_pretrained`` would read itself if it were given the folder: generation_config.json, else what config.json says of it."""
    if not getattr(model_class, "can_generate", lambda: False)():
        return None
    if (folder / "generation_config.json").is_file():
        try:
            return GenerationConfig.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise ModelError(
                f"The generation_config.json in {folder} cannot be used.",
                f"{' '.join(str(error).split())[:300]}",
                "Correct it, or remove it: defaults are then taken from config.json.",
            ) from error
    return GenerationConfig.from_pretrained(
        folder, config_file_name="config.json", local_files_only=True, _from_model_config=True
    )
