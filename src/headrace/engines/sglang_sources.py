"""What SGLang does by a model's name or by its arguments before weights come, and a loader must know. Pure; knows SGLang's names and imports none of it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Protocol

FORGOTTEN_FILE = "mtp.safetensors"
"""The file of an extra layer that some checkpoints of `_FORGETFUL` have and their index does not name."""
_FORGETFUL = frozenset(
    {
        "Glm4MoeForCausalLM",
        "Glm4MoeForCausalLMNextN",
        "Glm4MoeLiteForCausalLM",
        "Glm4MoeLiteForCausalLMNextN",
    }
)
"""Architectures for which SGLang 0.5.23 takes that file all the same (``maybe_add_mtp_safetensors``)."""
_MODELOPT = frozenset({"modelopt", "modelopt_fp8", "modelopt_fp4", "modelopt_mixed"})
_ROUTED_EXPERT = re.compile(r"\.experts\.\d+\.(?:w[123]|down_proj|up_proj|gate_proj)\.weight$")


class StoredTensor(Protocol):
    """As much of a stored tensor as is asked about."""

    @property
    def name(self) -> str:
        """Its name in the checkpoint."""

    @property
    def dtype(self) -> str:
        """Its dtype in the safetensors spelling."""


def forgotten_files(hf_config: Any) -> list[str]:
    """Return the files beside the index that SGLang loads for the model with this configuration, where they are there."""
    architectures = getattr(hf_config, "architectures", None) or [None]
    text = getattr(hf_config, "text_config", hf_config)
    num_layers = getattr(text, "num_nextn_predict_layers", None) or getattr(hf_config, "num_nextn_predict_layers", None)
    return [FORGOTTEN_FILE] if architectures[0] in _FORGETFUL and num_layers else []


def is_quantized_while_loading(config: Any, modelopt: Any) -> str:
    """Return the argument that asks for what a stream cannot serve: a model that is quantized from a local folder while it is loaded. Empty where none does.

    ``config`` is SGLang's of the model, ``modelopt`` its `ModelOptConfig` or None. Checkpoints that are quantized already are loaded as they are.
    """
    if getattr(config, "modelopt_quant", None):
        return f"--modelopt-quant {config.modelopt_quant}"
    asked = str(getattr(config, "quantization", None) or "")
    if asked not in _MODELOPT | {"auto-round-int8"} or config._is_already_quantized():
        return ""
    paths = ("checkpoint_restore_path", "checkpoint_save_path", "export_path")
    wants_files = any(getattr(modelopt, name, None) for name in paths)
    if asked == "modelopt_fp4" and not wants_files:
        return ""  # SGLang quantizes each tensor as it comes
    return f"--quantization {asked}"


def has_fp8_experts(entries: Iterable[StoredTensor]) -> bool:
    """Say whether the experts are stored in FP8, as SGLang decides it for a DeepSeek checkpoint that does not say: by the first expert's weight."""
    dtypes = (one.dtype for one in entries if "experts" in one.name and "weight" in one.name)
    return next(dtypes, "") == "F8_E4M3"


def routed_expert_dtype(entries: Iterable[StoredTensor]) -> str | None:
    """Return the stored dtype of a routed expert's weight, by which SGLang tells the two kinds of DeepSeek-V4 checkpoints apart; None where there is none."""
    return next((one.dtype for one in entries if _ROUTED_EXPERT.search(one.name)), None)
