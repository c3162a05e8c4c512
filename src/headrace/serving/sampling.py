"""Sampling with Transformers: a generation configuration that leaves nothing to defaults, and what watches and bends
the logits on their way.

Order, as in the OpenAI API: raw logits (which log probabilities are taken from), biases and penalties, then
temperature, top-k, top-p, min-p.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from headrace.errors import MissingDependency, ModelError
from headrace.serving.engine import SamplingOptions

try:
    from transformers import GenerationConfig, LogitsProcessor, RepetitionPenaltyLogitsProcessor
except ImportError as error:
    raise MissingDependency(
        "Serving a model needs Transformers.",
        f"Importing it failed: {error}.",
        'Install it with: pip install "headrace[serve]"',
    ) from error

LEAST_TEMPERATURE = 1e-3
"""Below it the likeliest token is taken: dividing by less overflows float32 and gives NaN."""


_LIMITS = (
    "max_length",
    "max_new_tokens",
    "min_length",
    "min_new_tokens",
    "max_time",
    "stop_strings",
    "prefill_chunk_size",
)
_OUTPUTS = ("return_dict_in_generate", "output_scores", "output_logits", "output_attentions", "output_hidden_states")
_SAMPLING_ONLY = ("min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")


def take_defaults(config: Any) -> Any:
    """Return a copy of a checkpoint's generation configuration, and take out of it what would overrule a request behind
    our back.

    What stays in ``config`` is what ``generate`` needs of the model itself (special tokens, suppressed tokens, the kind
    of cache). What goes: lengths, stop strings, beams, outputs that pile up, and all about sampling, which
    `make_config` decides for each request.
    """
    defaults = copy.deepcopy(config)
    for name in (*_LIMITS, *_SAMPLING_ONLY, "do_sample", "temperature", "top_p", "top_k", "repetition_penalty"):
        setattr(config, name, None)
    for name in _OUTPUTS:
        setattr(config, name, False)
    config.num_beams = config.num_return_sequences = 1
    return defaults


def make_config(options: SamplingOptions, defaults: Any, *, end_tokens: Sequence[int]) -> Any:
    """Return the generation configuration for one request.

    A parameter that the request names wins, then what the checkpoint's generation_config.json (``defaults``) says, then
    the OpenAI API's default, which is to sample at temperature 1 from the whole distribution. Naming any of
    temperature, top_p, top_k or min_p asks for sampling, whatever the checkpoint says; temperature 0 asks for none.
    """
    temperature = _first(options.temperature, defaults.temperature, 1.0)
    asked = any(value is not None for value in (options.temperature, options.top_p, options.top_k, options.min_p))
    do_sample = temperature >= LEAST_TEMPERATURE and (asked or defaults.do_sample is not False)
    config = GenerationConfig(
        do_sample=do_sample,
        max_new_tokens=options.max_tokens,
        min_new_tokens=options.min_tokens or None,
        num_return_sequences=options.num_samples,
        num_beams=1,
        repetition_penalty=1.0,  # Ours runs after the raw logits were seen.
        eos_token_id=list(end_tokens) or None,
        pad_token_id=end_tokens[0] if end_tokens else 0,
        use_cache=True,
    )
    if do_sample:
        for name in _SAMPLING_ONLY:
            setattr(config, name, getattr(defaults, name, None))
        config.temperature = float(temperature)
        config.top_p = float(_first(options.top_p, defaults.top_p, 1.0))
        config.top_k = int(_first(options.top_k, defaults.top_k, 0))
        config.min_p = _first(options.min_p, defaults.min_p, None)
    return config


def make_processors(options: SamplingOptions, defaults: Any, *, num_prompt: int) -> tuple[LogitsWatch, list[Any]]:
    """Return the watch on the raw logits, and all processors in order, the watch first."""
    watch = LogitsWatch(options.num_logprobs)
    processors: list[Any] = [watch]
    repetition = _first(options.repetition_penalty, defaults.repetition_penalty, 1.0)
    if repetition != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(float(repetition)))
    if options.frequency_penalty or options.presence_penalty or options.logit_bias:
        processors.append(Penalties(options, num_prompt=num_prompt))
    return watch, processors


class LogitsWatch(LogitsProcessor):  # type: ignore[misc]
    """Sees the logits before anything bends them.

    Refuses NaN, of which a GPU would die and a CPU would make garbage.
    """

    def __init__(self, num_logprobs: int | None) -> None:
        self._num_logprobs = num_logprobs
        self._logprobs: torch.Tensor | None = None  # [num_samples, vocabulary] float32, of the step at hand

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if bool(torch.isnan(scores).any()):
            raise ModelError(
                "The model computed NaN.",
                "Its weights or its dtype are not right for this prompt.",
                "Try another --dtype.",
            )
        if self._num_logprobs is not None:
            self._logprobs = torch.log_softmax(scores.float(), dim=-1)
        return scores

    def describe(self, sample: int, token: int) -> tuple[float | None, tuple[tuple[int, float], ...]]:
        """Return the log probability of ``token`` and the likeliest tokens of this step; None and nothing where nobody
        asked."""
        if self._logprobs is None:
            return None, ()
        row = self._logprobs[sample]
        top = torch.topk(row, min(self._num_logprobs or 0, row.shape[0]))
        return float(row[token]), tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True))


class Penalties(LogitsProcessor):  # type: ignore[misc]
    """Frequency and presence penalties over what was generated (not the prompt), and biases on single tokens."""

    def __init__(self, options: SamplingOptions, *, num_prompt: int) -> None:
        self._frequency = options.frequency_penalty
        self._presence = options.presence_penalty
        self._bias = dict(options.logit_bias)
        self._num_prompt = num_prompt

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        if self._frequency or self._presence:
            generated = input_ids[:, self._num_prompt :]
            counts = torch.zeros_like(scores).scatter_add_(1, generated, torch.ones_like(generated, dtype=scores.dtype))
            scores -= self._frequency * counts + self._presence * (counts > 0)
        if self._bias:
            tokens = torch.tensor(list(self._bias), device=scores.device)
            scores[:, tokens] += torch.tensor(list(self._bias.values()), device=scores.device, dtype=scores.dtype)
        return scores


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)
