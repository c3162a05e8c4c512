"""Options that people know from vLLM and SGLang and that Headrace does not have: what to say instead of "no such option". Pure, but for the list of their names.

``foreign_options.txt`` lists the options of vLLM 0.32 and SGLang 0.5.23, and of some releases before, without those that Headrace has; a test keeps it so.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from importlib.resources import files

_PARALLEL = (
    "Headrace divides a model among processes of one machine by its layers' tensors (--tp), and not otherwise so far."
)
_LIMITS = "How much context fits follows from the model's configuration and the device's memory."
_CHECKPOINT = "Headrace reads it from the checkpoint."

REASONS: dict[str, str] = {
    "--pipeline-parallel-size": _PARALLEL,
    "-pp": _PARALLEL,
    "--pp-size": _PARALLEL,
    "--data-parallel-size": _PARALLEL,
    "-dp": _PARALLEL,
    "--dp": _PARALLEL,
    "--dp-size": _PARALLEL,
    "--ep-size": _PARALLEL,
    "--enable-expert-parallel": _PARALLEL,
    "--nnodes": _PARALLEL,
    "--node-rank": _PARALLEL,
    "--max-model-len": _LIMITS,
    "--context-length": _LIMITS,
    "--max-num-seqs": _LIMITS,
    "--max-num-batched-tokens": _LIMITS,
    "--max-running-requests": _LIMITS,
    "--gpu-memory-utilization": _LIMITS,
    "--mem-fraction-static": _LIMITS,
    "--chat-template": _CHECKPOINT,
    "--generation-config": _CHECKPOINT,
    "--tokenizer-mode": _CHECKPOINT,
    "--download-dir": "Weights are not downloaded; side files go to --cache-dir.",
    "--max-parallel-loading-workers": "Loading is set by --connections and --memory-limit.",
}
"""Option to a sentence that says what holds instead, where there is one to say."""
FOREIGN_LOAD_FORMATS = frozenset(
    [
        *("bitsandbytes", "expert_pack", "fastsafetensors", "flash_rl", "gguf", "hf", "instanttensor", "layered"),
        *("mistral", "modelexpress", "npcache", "presharded", "private", "pt", "remote", "remote_instance"),
        *("runai_streamer_sharded", "sharded_state", "tensorizer"),
    ]
)
"""Load formats of theirs that Headrace has not."""
_OPTION = re.compile(r"--?[A-Za-z][\w-]*")


@cache
def foreign_options() -> frozenset[str]:
    """Return the options that only the others have."""
    names = files("headrace.cli").joinpath("foreign_options.txt").read_text("utf-8").split()
    return frozenset([*names, *REASONS])


def find_foreign_option(arguments: Sequence[str]) -> str | None:
    """Return what to tell somebody who typed ``headrace serve`` with one of those options, in any of their spellings, or None."""
    if not arguments or arguments[0] != "serve":
        return None
    for argument in arguments[1:]:
        if argument == "--":
            return None
        typed = argument.partition("=")[0]
        option = _known_option(typed)
        if option is not None:
            return f"{typed} is known to vLLM/SGLang, not supported yet by Headrace. {REASONS.get(option, '')}".strip()
    return None


def _known_option(typed: str) -> str | None:
    """Return the option that ``typed`` is a spelling of: with underscores, as ``--no-…``, with a field after a dot (``-cc.mode``), or with a level (``-O3``)."""
    match = _OPTION.match(typed)
    if match is None:
        return None
    option = match[0].replace("_", "-")
    for candidate in (option, f"--{option.removeprefix('--no-')}", option.rstrip("0123456789")):
        if candidate in foreign_options():
            return candidate
    return None
