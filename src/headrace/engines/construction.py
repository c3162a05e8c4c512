"""Builds a model as ``from_pretrained`` does, from a local folder of side files: class, configuration, quantization, generation settings. Weights come from elsewhere.

No name of a repository and no uri is given to Transformers here, only local paths, so that nothing can be looked up on a hub.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from headrace.engines.architecture import find_model_class, load_config
from headrace.engines.conversion import Fill, PlacingClass
from headrace.engines.options import split_options
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Construction:
    """Everything about a model but its weights."""

    source: str
    model_class: Any
    config: Any
    section: QuantizationSection | None
    """The checkpoint's quantization, which ``config`` holds at its top level."""
    options: Mapping[str, Any]

    def run(self, values: Mapping[str, Any], fill: Fill) -> Any:
        """Return what ``from_pretrained`` returns for the state dict ``values``, the meta model having been filled by ``fill``.

        Raises `MissingDependency` where the quantizer wants a package that is not installed, and `UnsupportedQuantization` where it refuses for another reason.
        """
        try:
            return PlacingClass(self.model_class, fill).from_pretrained(
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
) -> Construction:
    """Return the construction of the model whose side files are in ``folder``. Raises `UnknownArchitecture` and `UnsupportedQuantization`."""
    own, fields = split_options(wishes.options)
    config, rest = load_config(folder, source=source, trust_remote_code=wishes.trust_remote_code, options=fields)
    pass_quantization(config, section, detected, source=source, wishes=wishes.packing)
    found = find_model_class(
        config, folder, source=source, trust_remote_code=wishes.trust_remote_code, auto_class=wishes.auto_class
    )
    own.setdefault("generation_config", _generation_config(folder, found))
    return Construction(source=source, model_class=found, config=config, section=section, options={**own, **rest})


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
