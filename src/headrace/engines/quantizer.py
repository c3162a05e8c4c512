"""Our quantizer in Transformers: under the method name ``headrace`` for what Headrace streams, and as ``modelopt``, which Transformers does not know, for plain ``from_pretrained`` too."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import MergeModulelist, WeightConverter, WeightRenaming
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from headrace.checkpoint import open_checkpoint
from headrace.engines.installation import Installation, install_packed
from headrace.engines.renaming import Renamer
from headrace.engines.values import Assembly, Plain, Stack
from headrace.errors import UnsupportedQuantization
from headrace.quantization import CheckpointQuantization
from headrace.settings import Settings

OUR_METHOD = "headrace"
MODELOPT = "modelopt"


class Shared:
    """Holds a value that is not to be copied with the configuration that carries it."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __deepcopy__(self, memo: dict[int, Any]) -> Shared:
        return self


class HeadraceQuantizationConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """What Transformers is told of a quantized checkpoint: its own section, unchanged, and what was found out about it."""

    def __init__(
        self,
        quant_method: str = OUR_METHOD,
        section: Mapping[str, Any] | None = None,
        detected: Shared | None = None,
        weight_only: bool = False,
        key_mapping: Mapping[str, str] | None = None,
        **others: Any,
    ) -> None:
        self.quant_method = quant_method
        self.section = dict(section or others)
        self.detected = detected
        self.weight_only = weight_only
        self.key_mapping = dict(key_mapping) if key_mapping else None

    def to_dict(self) -> dict[str, Any]:
        """Return the checkpoint's own section."""
        return dict(self.section)

    def to_diff_dict(self) -> dict[str, Any]:
        return self.to_dict()


class HeadraceQuantizer(HfQuantizer):  # type: ignore[misc]
    """Puts packed layers into a model that is about to be filled, and lets their tensors through as they are stored."""

    requires_calibration = True

    def __init__(self, quantization_config: HeadraceQuantizationConfig, **options: Any) -> None:
        super().__init__(quantization_config, **options)
        self.installation = Installation()
        self._dtype: torch.dtype | None = None
        """What the model computes in; None while it has no packed layers."""

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return what to compute in: a packed type, which a configuration without ``dtype`` would leave, is none."""
        return dtype if dtype is not None and dtype.is_floating_point and dtype.itemsize > 1 else torch.bfloat16

    def get_new_dtype(self, converter: Any, param: Any, dtype: torch.dtype | None) -> torch.dtype | None:
        """Return the dtype that the parameter declares, which for packed parts is the stored one; never let codes be cast."""
        stored = param.dtype if hasattr(param, "dtype") else None
        if stored is not None and stored.is_floating_point and stored.itemsize == 1:
            return None
        new: torch.dtype | None = super().get_new_dtype(converter, param, dtype)
        return new

    def is_serializable(self) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: Sequence[str] | None = None, dtype: torch.dtype | None = None, **_: Any
    ) -> Any:
        detected = self._detected(checkpoint_files)
        if detected is not None:
            self._check_reader(model)
            config = self.quantization_config
            renamer = Renamer(model, get_model_conversion_mapping(model, config.key_mapping))
            self._dtype = model.dtype
            self.installation = install_packed(
                model, detected, renamer, weight_only=config.weight_only, dtype=self._dtype
            )
        return model

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        # Transformers makes every floating parameter trainable; E4M3 codes and scales are not.
        for module in model.modules():
            for name in getattr(module, "fixed_names", ()):
                module.get_parameter(name).requires_grad_(False)
        if self._dtype is not None and getattr(model, "_pp_stage", None) is not None:
            _put_first(model.base_model, self._dtype)
        return model

    def update_weight_conversions(self, weight_conversions: list[Any], model: Any) -> list[Any]:
        """Add what brings packed tensors to their places where Transformers reads the files itself; our own reading gives them their places' names."""
        if self.quantization_config.detected is not None:
            return weight_conversions
        renamer = Renamer(model, weight_conversions)
        converters, renamings = _conversions(self.installation.assemblies, renamer)
        return [*converters, *weight_conversions, *renamings]

    def _check_reader(self, model: Any) -> None:
        """Raise where ranks divide the model and Transformers reads the files itself: it would cut packed parts as if they were plain weights."""
        parallel = getattr(model.config, "distributed_config", None)
        if self.quantization_config.detected is None and parallel is not None and parallel.tp_size > 1:
            raise UnsupportedQuantization(
                f"{type(model).__name__} stays packed, and cannot be divided among {parallel.tp_size} ranks by from_pretrained.",
                "Transformers cuts the stored parts of packed layers as if they were plain weights. No weight byte was read.",
                "Load it with headrace.load_model, which cuts them as they are packed, or use one process.",
            )

    def _detected(self, checkpoint_files: Sequence[str] | None) -> CheckpointQuantization | None:
        detected = self.quantization_config.detected
        if detected is not None:
            value: CheckpointQuantization = detected.value
            return value
        return _detect_files(checkpoint_files or ())


def register_quantizers() -> None:
    """Make the method ``headrace`` known to Transformers, and ``modelopt``, so that plain ``AutoModel…from_pretrained`` loads what NVIDIA ModelOpt exports. May be called twice."""
    for method in (OUR_METHOD, MODELOPT):
        AUTO_QUANTIZATION_CONFIG_MAPPING.setdefault(method, HeadraceQuantizationConfig)
        AUTO_QUANTIZER_MAPPING.setdefault(method, HeadraceQuantizer)


def _put_first(model: Any, dtype: torch.dtype) -> None:
    """Give ``model`` an empty parameter of ``dtype``, which comes before those of its layers.

    Stages of a pipeline send and receive in the type of their first parameter. In a later stage that is a part of a packed layer, and where its type is not the model's the receiver's
    buffer has another size than what is sent: gloo then ends the process.
    """
    device = next(model.parameters()).device
    model.register_parameter(
        "stage_dtype", nn.Parameter(torch.empty(0, dtype=dtype, device=device), requires_grad=False)
    )


def _detect_files(files: Sequence[str]) -> CheckpointQuantization | None:
    """Return what the local checkpoint that ``files`` belong to says of its quantization."""
    from headrace.engines.quantized import detect_quantization  # it uses this module

    if not files:
        return None
    folder = Path(files[0]).parent
    with open_checkpoint(str(folder), settings=Settings()) as checkpoint:
        return detect_quantization(folder, checkpoint.entries, source=str(folder))


def _conversions(assemblies: Sequence[Assembly], renamer: Renamer) -> tuple[list[Any], list[Any]]:
    """Return Transformers' own converters and renamings for what ``assemblies`` do to packed tensors, as patterns that leave the numbers of layers and experts open."""
    renamings: dict[tuple[str, str], Any] = {}
    converters: dict[tuple[str, str], Any] = {}
    for assembly in assemblies:
        if isinstance(assembly, Plain):
            renamed, _ = renamer(assembly.entry.name)
            if renamed != assembly.name:
                source, target = _tail(renamed, assembly.name)
                renamings.setdefault((source, target), WeightRenaming(rf"{re.escape(source)}$", target))
        elif isinstance(assembly, Stack):
            for piece in assembly.stacked:
                patterns = _stack_pattern(piece.source.name, piece.name)
                if patterns not in converters:
                    converters[patterns] = WeightConverter(*patterns, operations=[MergeModulelist(dim=0)])
    return list(converters.values()), list(renamings.values())


def _tail(source: str, target: str) -> tuple[str, str]:
    """Return what differs at the end of two names, whole dotted parts: ``k_proj.k_scale`` and ``k_scale``."""
    first, second = source.split("."), target.split(".")
    while first and second and first[0] == second[0]:
        first.pop(0)
        second.pop(0)
    return "." + ".".join(first), "." + ".".join(second)


def _stack_pattern(source: str, target: str) -> tuple[str, str]:
    """Return ``mlp.experts.*.gate_proj.weight_scale`` and ``mlp.experts.gate_proj.weight_scale``."""
    parts = target.split(".")
    own = source.split(".")
    expert = next(index for index in range(len(own) - 1, -1, -1) if own[index].isdigit())
    tail = own[expert + 1 :]
    module = own[expert - 1]
    return f"{module}.*.{'.'.join(tail)}", f"{module}.{'.'.join(parts[-len(tail) :])}"
