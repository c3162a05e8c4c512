"""NVIDIA ModelOpt's calibrating workflow: a plain model gets quantizers around its layers, and texts that run through it give them their scales.

The only module that imports ``modelopt`` (extra ``modelopt``); tried on a CPU with 0.45.0, 0.46.1 and 0.47.0, not on a GPU. What comes out is the model that ModelOpt leaves: its
weights stay plain, and they and the inputs of their layers are rounded anew in each pass. It takes the memory of the plain model and more time. ModelOpt's own export packs it.

ModelOpt rounds to NVFP4 in a CUDA kernel alone. Where the model is elsewhere, ModelOpt is given our rounding for it, which follows the same formula (see
`headrace.quantization.rounding`); finding the scales is ModelOpt's work in any case.

Unlike SGLang's loader of the same purpose (0.5), no texts are fetched from a hub, and a workflow that fails is an error rather than a model that stays as it is.
"""

from __future__ import annotations

import copy
import importlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from headrace.engines.calibration import Calibration, CalibrationTexts, read_texts, to_sequences
from headrace.engines.collector import collector_running
from headrace.engines.construction import ModelWishes
from headrace.errors import InvalidSetting, MissingDependency, ModelError, UnsupportedQuantization
from headrace.progress import LoadProgress
from headrace.quantization.rounding import E2M1_MAX, E4M3_MAX, round_inputs
from headrace.quantization.scheme import InputQuantization

logger = logging.getLogger("headrace")

PRESETS = {"modelopt_fp8": "FP8_DEFAULT_CFG", "modelopt_nvfp4": "NVFP4_DEFAULT_CFG"}
"""What can be asked for, to the name of ModelOpt's configuration for it."""
_SYNONYMS = {"modelopt_fp4": "modelopt_nvfp4"}
"""vLLM's and SGLang's name."""
_OWN_ROUNDING = "headrace_nvfp4"
_KERNEL_CAPABILITY = (8, 9)
"""The least that ModelOpt's NVFP4 kernel runs on (``tensor_quant.py`` of 0.47)."""
_NVFP4 = InputQuantization(format="nvfp4", granularity="group", group_size=16, is_dynamic=False)
_FAILURES = (RuntimeError, ValueError, TypeError, AssertionError, AttributeError, LookupError, ImportError)
"""What ModelOpt, and a model that it has rebuilt, may raise; it has no errors of its own."""
_FEW_TOKENS = 16_384
"""Fewer are worth a warning: ModelOpt's example (``hf_ptq.py`` of 0.47) takes 512 texts of up to 512 tokens, 16 times as many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptLibrary:
    """What is used of the library."""

    quantization: Any
    """The module ``modelopt.torch.quantization``."""
    layers: Any
    """The module ``modelopt.torch.quantization.nn``."""
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Workflow:
    """Everything that is to be known before the weights are read."""

    source: str
    quantization: str
    """A key of `PRESETS`."""
    library: ModelOptLibrary
    texts: CalibrationTexts
    sequences: tuple[tuple[int, ...], ...]
    """Token ids, each sequence read on its own."""

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.sequences))

    def run(self, model: Any, progress: LoadProgress) -> None:
        """Quantize ``model`` in place. Raises `UnsupportedQuantization` where ModelOpt fails or finds nothing to quantize, and `ModelError` for tokens that the model lacks."""
        with collector_running(), progress.during("calibrating"):
            self._announce()
            device = _input_device(model, self.sequences, self.source)

            def read_all(model: Any) -> None:
                with torch.no_grad():
                    for sequence in self.sequences:
                        model(input_ids=torch.tensor([sequence], device=device), use_cache=False)
                        progress.touch(0)  # a step, for who watches whether the load stands

            try:
                self.library.quantization.quantize(model, self._config(model), read_all)
            except torch.OutOfMemoryError:
                raise
            except _FAILURES as error:
                raise self._failed(f"ModelOpt says: {' '.join(str(error).split())[:500]}") from error
            self._check(model)

    def _announce(self) -> None:
        words = f"{len(self.texts.texts)} texts, {self.num_tokens:,} tokens"
        logger.info("%s: calibrating %s on %s: %s", self.source, self.quantization, self.texts.origin, words)
        if self.num_tokens < _FEW_TOKENS:
            logger.warning(
                "%s: %s tokens are few to calibrate on: the scales of inputs come from them alone, and larger values will be cut off. Give %s texts of the kind that the model is to "
                "read, with calibration in Python or --calibration FILE.",
                self.source,
                f"{self.num_tokens:,}",
                "it" if self.texts.is_own else "more",
            )

    def _config(self, model: torch.nn.Module) -> dict[str, Any]:
        """Return ModelOpt's configuration, a copy; with our rounding in it where ModelOpt has none for this model's device."""
        config: dict[str, Any] = copy.deepcopy(getattr(self.library.quantization, PRESETS[self.quantization]))
        blocks = [entry["cfg"] for entry in config["quant_cfg"] if (entry.get("cfg") or {}).get("block_sizes")]
        if blocks and not _has_kernel(model):
            if not self.library.layers.is_registered_quant_backend(_OWN_ROUNDING):
                self.library.layers.register_quant_backend(_OWN_ROUNDING, round_nvfp4)
            for attributes in blocks:
                attributes["backend"] = _OWN_ROUNDING
        return config

    def _check(self, model: torch.nn.Module) -> None:
        """See what came of it: at least one quantizer that works, and each with a scale."""
        working = dict(_working_quantizers(model, self.library.layers.TensorQuantizer))
        if not working:
            raise self._failed("ModelOpt found no layer to quantize.")
        unseen = [name for name, quantizer in working.items() if quantizer.amax is None]
        logger.info("%s: ModelOpt %s left %d quantizers", self.source, self.library.version, len(working))
        if unseen:
            logger.warning(
                "%s: no text reached %d of %d quantizers, such as %s. They take their scale from what they round, each time.",
                self.source,
                len(unseen),
                len(working),
                unseen[0],
            )

    def _failed(self, why: str) -> UnsupportedQuantization:
        return UnsupportedQuantization(
            f"{self.source} could not be quantized to {self.quantization} by ModelOpt {self.library.version}.",
            why,
            "Load the model as it is, or one that is quantized already.",
        )


def prepare_workflow(
    quantization: str | None,
    calibration: Calibration,
    *,
    source: str,
    config: Any,
    wishes: ModelWishes,
    load_tokenizer: Callable[[], Any],
) -> Workflow:
    """Return the workflow that quantizes the model of ``config`` to ``quantization`` once it is loaded; its texts are read and made tokens here.

    Raises `InvalidSetting` for another name than those of `PRESETS`, for wishes that do not go with it and for texts that cannot be used, `MissingDependency` where ModelOpt is not
    installed, and `UnsupportedQuantization` for a model that does not read text alone.
    """
    name = parse_quantization(quantization or "")
    _check_wishes(name, wishes)
    library = find_library()
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedQuantization(
            f"{source} cannot be quantized to {name} while loading.",
            "It is an encoder and a decoder; texts are run through models with a decoder alone.",
            "Quantize it with ModelOpt and a loop of your own, and load what that exports.",
        )
    texts = read_texts(calibration)
    longest = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    return Workflow(
        source=source,
        quantization=name,
        library=library,
        texts=texts,
        sequences=to_sequences(texts, load_tokenizer(), longest=longest),
    )


def refuse_calibration(calibration: Calibration) -> None:
    """Raise `InvalidSetting` for texts that a load has no use for."""
    if calibration is not None:
        raise InvalidSetting(
            "Calibration texts were given, and nothing is quantized while loading.",
            "A checkpoint that is quantized already has its scales, and one that is to stay plain needs none.",
            f"Leave them out, or give a plain local model and a quantization: {', '.join(PRESETS)}.",
        )


def parse_quantization(name: str) -> str:
    """Return the key of `PRESETS` that ``name`` means, in any letter case. `InvalidSetting` lists the known ones."""
    found = name.lower().replace("-", "_")
    found = _SYNONYMS.get(found, found)
    if found not in PRESETS:
        others = "".join(f"; {synonym} is {meant}" for synonym, meant in _SYNONYMS.items())
        raise InvalidSetting(
            f"{name!r} is nothing that a plain model can be quantized to while loading.",
            "ModelOpt's workflow was asked for by it, and that has to know the numbers to round to.",
            f"Known: {', '.join(PRESETS)}{others}.",
        )
    return found


def find_library() -> ModelOptLibrary:
    """Return the library, which takes seconds to import. Raises `MissingDependency` where it is not installed, does not import, or is too old."""
    try:
        package = importlib.import_module("modelopt")
        quantization = importlib.import_module("modelopt.torch.quantization")
        layers = importlib.import_module("modelopt.torch.quantization.nn")
    except ImportError as error:
        raise _missing(f"Importing it failed: {error}.") from error
    version = str(getattr(package, "__version__", "of an unknown version"))
    presets = [getattr(quantization, preset, {}).get("quant_cfg") for preset in PRESETS.values()]
    if not all(isinstance(entries, list) for entries in presets):
        raise _missing(f"ModelOpt {version} is installed, and its configurations are of another form.")
    return ModelOptLibrary(quantization=quantization, layers=layers, version=version)


def round_nvfp4(values: torch.Tensor, quantizer: Any) -> torch.Tensor:
    """Return ``values`` rounded to NVFP4 in groups of 16, in their own dtype: what ModelOpt's kernel does with the ``amax`` of ``quantizer``, on any device.

    A quantizer without one takes the largest magnitude of ``values``.
    """
    amax = quantizer.amax
    largest = values.abs().max() if amax is None else amax.max()
    scale = largest.float() / (E2M1_MAX * E4M3_MAX)
    return round_inputs(values, _NVFP4, scale.clamp(min=torch.finfo(torch.float32).tiny))


def _check_wishes(name: str, wishes: ModelWishes) -> None:
    other = "It is about weights that are packed already, or asks for another quantization."
    apart = "Scales are found by running texts through the model, and a part by itself sees other numbers than in the whole."
    for option, is_given, why in (
        ("dequantize", wishes.packing.dequantize, other),
        ("weight_only", wishes.packing.weight_only, other),
        ("quantization_config", wishes.options.get("quantization_config") is not None, other),
        ("encoder_only", wishes.part.encoder_only, apart),
        ("layers", wishes.part.layers is not None, apart),
        ("experts", wishes.part.experts is not None, apart),
    ):
        if is_given:
            raise InvalidSetting(
                f"{option} cannot be used where a plain model is quantized to {name} while loading.",
                why,
                "Leave one of the two out.",
            )


def _missing(why: str) -> MissingDependency:
    return MissingDependency(
        "Quantizing a model while loading needs NVIDIA ModelOpt.",
        why,
        'Install it with: pip install "headrace[modelopt]"',
    )


def _has_kernel(model: torch.nn.Module) -> bool:
    """Say whether ModelOpt's NVFP4 kernel can run wherever ``model`` has parameters."""
    devices = {parameter.device for parameter in model.parameters()}
    return all(
        device.type == "cuda" and torch.cuda.get_device_capability(device) >= _KERNEL_CAPABILITY for device in devices
    )


def _working_quantizers(model: torch.nn.Module, kind: Any) -> Iterator[tuple[str, Any]]:
    for name, module in model.named_modules():
        if isinstance(module, kind) and module.is_enabled:
            yield name, module


def _input_device(model: Any, sequences: tuple[tuple[int, ...], ...], source: str) -> torch.device:
    """Return where token ids go. Raises `InvalidSetting` for a model that is not wholly in memory, and `ModelError` for ids beyond its vocabulary, which end a CUDA process."""
    if any(parameter.is_meta for parameter in model.parameters()):
        raise InvalidSetting(
            f"{source} cannot be quantized while loading with this device_map.",
            "A part of the model is put aside on the host or the disk, where its scales cannot be found.",
            "Give a device_map that leaves nothing out, or quantize on a larger machine.",
        )
    table = model.get_input_embeddings().weight
    largest = max(map(max, sequences))
    if largest >= table.shape[0]:
        raise ModelError(
            f"The tokenizer of {source} does not fit its model.",
            f"It makes tokens up to {largest}, and the model knows {table.shape[0]}.",
            "Take the tokenizer from where the model was made.",
        )
    device: torch.device = table.device
    return device
