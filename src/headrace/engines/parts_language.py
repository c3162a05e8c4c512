"""Finds the language model inside a multimodal one, and the class that builds it alone. Asks Transformers; holds no table of families."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers.models.auto import modeling_auto

from headrace.engines.conversion import build_skeleton


@dataclass(frozen=True, slots=True)
class Language:
    """Where a multimodal model holds its language model."""

    decoder: str
    """``model.language_model``."""
    head: str | None
    """``lm_head``; None where the model has none, or holds it inside the decoder."""

    @property
    def paths(self) -> tuple[str, ...]:
        return (self.decoder,) if self.head is None else (self.decoder, self.head)


@dataclass(frozen=True, slots=True, kw_only=True)
class Alone:
    """The language model by itself."""

    model_class: Any
    config: Any
    own: Any
    """On the meta device."""
    names: Mapping[str, str]
    """Parameter of the multimodal model → its own, for all of its own."""


def find_language(whole: Any) -> Language | None:
    """Return where ``whole`` holds its language model; None where it is one itself."""
    text_config = whole.config.get_text_config(decoder=True)
    if text_config is whole.config:
        return None
    decoder = whole.get_decoder()
    path = _path_of(whole, decoder)
    if not path or type(getattr(decoder, "config", None)) is not type(text_config):
        return None
    head_module = whole.get_output_embeddings()
    head = None if head_module is None else _path_of(whole, head_module)
    return Language(path, None if head is None or head.startswith(f"{path}.") else head)


def stand_alone(whole: Any, language: Language) -> Alone | None:
    """Return the language model of ``whole`` as a model of the causal class that Transformers has for its configuration.

    None where there is no such class, or where it has other parameters than the language model in ``whole``: what is tied in one must be in the other, too.
    """
    decoder = whole.get_submodule(language.decoder)
    mapping = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING
    if type(decoder.config) not in mapping:
        return None
    model_class = mapping[type(decoder.config)]
    config = _own_config(whole, language, model_class)
    own = build_skeleton(model_class, config)
    if type(decoder) is model_class:
        inside = ""
    elif type(decoder) is type(own.base_model):
        inside = f"{own.base_model_prefix}."
    else:
        return None
    names = _names(whole, language, own, inside)
    state, whole_state = own.state_dict(), whole.state_dict()
    if set(names.values()) != set(state) or any(
        state[new].shape != whole_state[old].shape for old, new in names.items()
    ):
        return None
    return Alone(model_class=model_class, config=config, own=own, names=names)


def _own_config(whole: Any, language: Language, model_class: Any) -> Any:
    """Return the configuration of the language model: its own, with what the outer one says for it."""
    outer = whole.config
    config = copy.deepcopy(whole.config.get_text_config(decoder=True))
    config.architectures = [model_class.__name__]
    if language.head is not None:
        # The head is the outer model's, and so is the flag that ties it.
        config.tie_word_embeddings = bool(getattr(outer, "tie_word_embeddings", False))
    if getattr(config, "dtype", None) is None and getattr(outer, "dtype", None) is not None:
        config.dtype = outer.dtype
    return config


def _names(whole: Any, language: Language, own: Any, inside: str) -> dict[str, str]:
    names = {}
    head_module = own.get_output_embeddings()
    own_head = None if head_module is None else _path_of(own, head_module)
    for name in whole.state_dict():
        if name.startswith(f"{language.decoder}."):
            names[name] = inside + name.removeprefix(f"{language.decoder}.")
        elif language.head is not None and own_head is not None and name.startswith(f"{language.head}."):
            names[name] = own_head + name.removeprefix(language.head)
    return names


def _path_of(model: Any, wanted: Any) -> str | None:
    return next((path for path, module in model.named_modules() if module is wanted), None)
