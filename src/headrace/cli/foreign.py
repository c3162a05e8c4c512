"""Options that people know from vLLM and SGLang and that Headrace does not have: what to say instead of "no such option". Pure."""

from __future__ import annotations

from collections.abc import Sequence

_PARALLEL = "Headrace serves a model from one process on one device so far."
_LIMITS = "How much context fits follows from the model's configuration and the device's memory."
_CHECKPOINT = "Headrace reads it from the checkpoint."
_LOADING = "Loading is set by --connections and --memory-limit; weights are always streamed."
_ENGINE = ""

FOREIGN_OPTIONS: dict[str, str] = {
    "--tensor-parallel-size": _PARALLEL,
    "-tp": _PARALLEL,
    "--tp": _PARALLEL,
    "--tp-size": _PARALLEL,
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
    "--quantization": _CHECKPOINT,
    "-q": _CHECKPOINT,
    "--tokenizer": _CHECKPOINT,
    "--tokenizer-path": _CHECKPOINT,
    "--chat-template": _CHECKPOINT,
    "--generation-config": _CHECKPOINT,
    "--load-format": _LOADING,
    "--model-loader-extra-config": _LOADING,
    "--download-dir": "Weights are not downloaded; side files go to --cache-dir.",
    "--kv-cache-dtype": _ENGINE,
    "--attention-backend": _ENGINE,
    "--enforce-eager": _ENGINE,
    "--disable-cuda-graph": _ENGINE,
    "--enable-prefix-caching": _ENGINE,
    "--enable-chunked-prefill": _ENGINE,
    "--chunked-prefill-size": _ENGINE,
    "--speculative-config": _ENGINE,
    "--speculative-algorithm": _ENGINE,
    "--enable-lora": _ENGINE,
    "--lora-modules": _ENGINE,
    "--lora-paths": _ENGINE,
    "--tool-call-parser": _ENGINE,
    "--enable-auto-tool-choice": _ENGINE,
    "--reasoning-parser": _ENGINE,
    "--seed": _ENGINE,
    "--random-seed": _ENGINE,
}
"""Option to a sentence that says what holds instead; empty where there is nothing to say."""


def find_foreign_option(arguments: Sequence[str]) -> str | None:
    """Return what to tell somebody who typed ``headrace serve`` with one of those options, or None."""
    if not arguments or arguments[0] != "serve":
        return None
    for argument in arguments[1:]:
        option = argument.partition("=")[0]
        if option == "--":
            return None
        if option in FOREIGN_OPTIONS:
            return f"{option} is known to vLLM/SGLang, not supported yet by Headrace. {FOREIGN_OPTIONS[option]}".strip()
    return None
