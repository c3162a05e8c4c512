"""What the files of a model are called, for places that cannot be listed, or only in part. Pure: takes contents, returns names.

Whoever opens a checkpoint decides by its own, stricter rules; here nothing is refused. A name that is not found, and a content that cannot be understood,
give no names.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from typing import Any

from headrace.errors import InvalidUri
from headrace.storage.uri import check_key

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

SIDE_FILES = (
    "config.json",
    "generation_config.json",
    "hf_quant_config.json",
    "quantize_config.json",
    "quantization_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "tokenizer.model.v3",
    "tekken.json",
    "tiktoken.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
    "image_processor_config.json",
    "video_preprocessor_config.json",
    "params.json",
)
"""Side files under the names that the libraries write them with."""

CODE_SOURCES = ("config.json", "tokenizer_config.json", "processor_config.json", "preprocessor_config.json")
"""Side files that may name a model's own code (``auto_map``)."""

_WEIGHTS_SUFFIX = ".safetensors"
_INDEX_SUFFIX = ".safetensors.index.json"


def is_index(key: str) -> bool:
    """Say whether a name is that of an index."""
    return key.endswith(_INDEX_SUFFIX)


def is_weights(key: str) -> bool:
    """Say whether a name is that of a safetensors file."""
    return key.lower().endswith(_WEIGHTS_SUFFIX)


def files_of_index(raw: bytes) -> tuple[str, ...]:
    """Return the safetensors files that an index names, each once, in order; those only that lie at or below its own folder."""
    content = _json_object(raw)
    weight_map = content.get("weight_map")
    names = set(weight_map.values()) if isinstance(weight_map, dict) and _all_text(weight_map.values()) else set()
    return tuple(sorted(name for name in names if is_weights(name) and _is_key(name)))


def code_of_config(raw: bytes) -> tuple[str, ...]:
    """Return the files of Python code that a configuration's ``auto_map`` names; not those of another repository (``org/name--module.Class``)."""
    found: set[str] = set()
    for value in _leaves(_json_object(raw).get("auto_map")):
        module, dot, _ = value.rpartition(".")
        if dot and "--" not in value:
            found.add(f"{module.replace('.', '/')}.py")
    return tuple(sorted(name for name in found if _is_key(name)))


def imports_of_code(raw: bytes) -> tuple[str, ...]:
    """Return the files beside it that a file of Python code imports: ``from .module import …``."""
    try:
        tree = ast.parse(raw)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ()
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            modules = [node.module] if node.module else [alias.name for alias in node.names]
            found.update(f"{module.replace('.', '/')}.py" for module in modules)
    return tuple(sorted(name for name in found if _is_key(name)))


def _json_object(raw: bytes) -> dict[str, Any]:
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _leaves(value: Any) -> Iterator[str]:
    """Yield the texts in an ``auto_map``, whose values are texts or lists of them."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _leaves(part)
    elif isinstance(value, list):
        for part in value:
            yield from _leaves(part)


def _all_text(values: Any) -> bool:
    return all(isinstance(value, str) for value in values)


def _is_key(name: str) -> bool:
    try:
        check_key(name)
    except InvalidUri:
        return False
    return "\\" not in name
