"""Which class of Transformers builds the model that a checkpoint's config.json names. Reads side files only."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedConfig
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.models.auto import modeling_auto

from headrace.errors import ModelError, UnknownArchitecture

_MAPPINGS = (
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
    "MODEL_FOR_CAUSAL_LM_MAPPING",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "MODEL_MAPPING",
)
"""Where a class is looked for by its configuration, most specific first, when config.json names no architecture that exists."""


def load_config(
    folder: Path, *, source: str, trust_remote_code: bool, options: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Return the configuration in ``folder``, changed by those ``options`` that are fields of it, and the other options.

    Raises `UnknownArchitecture` where there is no config.json, or one of a type that neither Transformers nor trusted code of the checkpoint knows.
    """
    if not (folder / "config.json").is_file():
        raise UnknownArchitecture(
            f"{source} holds no config.json.",
            "The model's class and sizes are read from it.",
            "Upload the whole model folder, or stream the tensors alone with headrace.stream.",
        )
    given = options.pop("config", None)
    if isinstance(given, PreTrainedConfig):
        return given, options  # as from_pretrained does: what is left goes to the model's constructor
    try:
        config, rest = AutoConfig.from_pretrained(
            folder if given is None else given,
            return_unused_kwargs=True,
            trust_remote_code=trust_remote_code,
            local_files_only=True,
            **options,
        )
    except (ValueError, KeyError, OSError, TypeError, AttributeError, StrictDataclassError) as error:
        raise UnknownArchitecture(
            f"The configuration of {source} cannot be used by Transformers {transformers.__version__}.",
            _first_lines(error),
            _mend(error, trust_remote_code),
        ) from error
    return config, dict(rest)


def find_model_class(config: Any, folder: Path, *, source: str, trust_remote_code: bool, auto_class: Any = None) -> Any:
    """Return the concrete model class for ``config``: of ``auto_class`` (an Auto class or a model class), else of the checkpoint's own code, else by architecture.

    Raises `UnknownArchitecture` with the nearest known name.
    """
    if auto_class is not None and not hasattr(auto_class, "_model_mapping"):
        return auto_class
    remote = _remote_class(config, folder, auto_class, source=source, trust_remote_code=trust_remote_code)
    if remote is not None:
        return remote
    if auto_class is not None:
        return _mapped(auto_class._model_mapping, config, source=source)
    names = list(getattr(config, "architectures", None) or ())
    for name in names:
        found = getattr(transformers, str(name), None)
        if _builds_from(found, config):
            return found
    for mapping_name in _MAPPINGS:
        mapping = getattr(modeling_auto, mapping_name)
        if type(config) in mapping:
            return _one_of(mapping[type(config)], names)
    raise _unknown(names or [type(config).__name__], source)


def _builds_from(found: Any, config: Any) -> bool:
    """Whether ``found`` is a model class for configurations like ``config``: config.json may name anything that Transformers has."""
    if not (isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)):
        return False
    wanted: Any = getattr(found, "config_class", None)
    return wanted is not None and isinstance(config, wanted)


def check_tokenizer(tokenizer: Any) -> None:
    """Raise `ValueError` for a tokenizer that knows no text: Transformers makes an empty one where files are missing, and says nothing."""
    tokens = tokenizer("The answer is 42.", add_special_tokens=False)["input_ids"]
    if not [token for token in tokens if token != tokenizer.unk_token_id]:
        raise ValueError(f"{type(tokenizer).__name__} knows no token of a plain English sentence.")


def unusable_tokenizer(folder: Path, error: Exception, *, trust_remote_code: bool) -> ModelError:
    """Return the error for a tokenizer that Transformers could not make of the side files in ``folder``: of the configuration, if that is the cause."""
    if (folder / "config.json").is_file():
        try:
            load_config(folder, source=str(folder), trust_remote_code=trust_remote_code, options={})
        except UnknownArchitecture as cause:
            return cause
    found = sorted(path.name for path in folder.glob("*token*")) or ["none whose name has token in it"]
    return ModelError(
        f"The tokenizer in {folder} cannot be loaded.",
        f"{_first_lines(error)} Tokenizer files there: {', '.join(found)}.",
        "Upload tokenizer.json and tokenizer_config.json beside the weights, or what the model's own tokenizer class needs.",
    )


def _mapped(mapping: Any, config: Any, *, source: str) -> Any:
    if type(config) not in mapping:
        raise _unknown([type(config).__name__], source)
    return _one_of(mapping[type(config)], list(getattr(config, "architectures", None) or ()))


def _one_of(classes: Any, names: list[str]) -> Any:
    candidates = classes if isinstance(classes, (list, tuple)) else [classes]
    return next((candidate for candidate in candidates if candidate.__name__ in names), candidates[0])


def _remote_class(config: Any, folder: Path, auto_class: Any, *, source: str, trust_remote_code: bool) -> Any:
    """Return the class in the checkpoint's own Python code, where config.json has one and the caller trusts it."""
    auto_map = getattr(config, "auto_map", None) or {}
    wanted = (
        [auto_class.__name__]
        if auto_class is not None
        else ["AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModel"]
    )
    reference = next((auto_map[name] for name in wanted if name in auto_map), None)
    if reference is None:
        return None
    known = any(hasattr(transformers, name) for name in getattr(config, "architectures", None) or ())
    if not trust_remote_code:
        if known or type(config) in modeling_auto.MODEL_MAPPING:
            return None
        raise UnknownArchitecture(
            f"{source} brings its own model code ({reference}).",
            "It is not run unless you say that you trust it.",
            "Read the code, then pass trust_remote_code=True (--trust-remote-code).",
        )
    return get_class_from_dynamic_module(reference, str(folder), local_files_only=True)


def _unknown(names: list[str], source: str) -> UnknownArchitecture:
    near = get_close_matches(
        names[0], [name for name in dir(transformers) if name.startswith(names[0][:2])], n=1, cutoff=0.6
    )
    hint = f" The nearest known name is {near[0]}." if near else ""
    return UnknownArchitecture(
        f"{source} is a {', '.join(names)}.",
        f"Transformers {transformers.__version__} has no class of that name.{hint}",
        "Install a Transformers version that has it, or correct architectures in config.json.",
    )


def _first_lines(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 500 else f"{text[:500]} ..."


def _mend(error: Exception, trust_remote_code: bool) -> str:
    if "trust_remote_code" in str(error) and not trust_remote_code:
        return "Read the code that the checkpoint brings, then pass trust_remote_code=True (--trust-remote-code)."
    return "Install a Transformers version that knows this model type, or correct config.json."
