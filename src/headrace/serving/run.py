"""From prompts to choices: what a request asks for is held to the context, generated, and gathered sample by sample."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from headrace.errors import HeadraceError, ServingError
from headrace.serving.engine import Generation, SamplingOptions, TextEngine
from headrace.serving.metrics import Metrics
from headrace.serving.output import Choice, Delta
from headrace.serving.requests import Completing
from headrace.serving.wire import Refusal, refuse

logger = logging.getLogger("headrace.serving")

_UNLIMITED_TOKENS = 1 << 20
"""What stands for no limit where a model has no context to fill."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """How a request wants its answer generated, before that is held to what there is room for."""

    options: SamplingOptions
    """Its ``max_tokens`` is not looked at."""
    most_tokens: int | None = None
    """None for as many as there is room for."""
    ignore_end: bool = False
    prompt_param: str = "messages"
    """The parameter to blame when the prompt is too long."""


def completing_wishes(
    request: Completing, *, most_tokens: int | None, num_logprobs: int | None, prompt_param: str
) -> Wishes:
    """Return what a request for completions asks for."""
    options = SamplingOptions(
        max_tokens=1,
        min_tokens=request.min_tokens or 0,
        num_samples=request.n or 1,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k if request.top_k is None else max(request.top_k, 0),
        min_p=request.min_p,
        repetition_penalty=request.repetition_penalty,
        frequency_penalty=request.frequency_penalty or 0.0,
        presence_penalty=request.presence_penalty or 0.0,
        logit_bias=tuple((request.logit_bias or {}).items()),
        seed=request.seed,
        num_logprobs=num_logprobs,
    )
    return Wishes(
        options=options, most_tokens=most_tokens, ignore_end=bool(request.ignore_eos), prompt_param=prompt_param
    )


def grant_tokens(num_prompt: int, asked: int | None, context: int | None, *, param: str) -> int:
    """Return how many tokens to generate at most: what was asked, held to the room that the prompt leaves.

    A prompt that fits is answered, whatever ``max_tokens`` says: the answer then ends with the finish reason
    ``length``. Raises `Refusal` (400) where the prompt leaves no room for even one token.
    """
    if context is None:
        return asked or _UNLIMITED_TOKENS
    room = context - num_prompt
    if room < 1:
        raise refuse(
            param,
            f"The prompt has {num_prompt} tokens, and this model's context holds {context} with the answer.",
            code="context_length_exceeded",
        )
    return room if asked is None else min(asked, room)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One prompt and how to continue it."""

    prompt: tuple[int, ...]
    options: SamplingOptions


def plan_jobs(prompts: Sequence[Sequence[int]], wishes: Wishes, engine: TextEngine) -> list[Job]:
    """Return what to generate. Raises `Refusal` (400) for what cannot be."""
    if any(token >= engine.vocabulary_size for token, _ in wishes.options.logit_bias):
        raise refuse("logit_bias", f"logit_bias names a token id that is not below {engine.vocabulary_size}.")
    jobs = []
    for prompt in prompts:
        granted = grant_tokens(len(prompt), wishes.most_tokens, engine.context_tokens, param=wishes.prompt_param)
        fewest = granted if wishes.ignore_end else min(wishes.options.min_tokens, granted)
        jobs.append(Job(prompt=tuple(prompt), options=replace(wishes.options, max_tokens=granted, min_tokens=fewest)))
    return jobs


class Run:
    """The choices of one request: for each prompt in turn, its samples together.

    The first prompt is queued when the run is made.
    """

    def __init__(
        self, engine: TextEngine, jobs: Sequence[Job], make_choice: Callable[[], Choice], *, metrics: Metrics
    ) -> None:
        self._engine = engine
        self._jobs = jobs
        self._metrics = metrics
        self._started = metrics.clock()
        self.choices = [make_choice() for job in jobs for _ in range(job.options.num_samples)]
        self._current: Generation = self._submit(0)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(job.prompt) for job in self._jobs)

    @property
    def num_output_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self.choices)

    def usage(self) -> dict[str, Any]:
        """Return the counts as the completion APIs write them."""
        prompt, output = self.num_prompt_tokens, self.num_output_tokens
        return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}

    async def finish(self) -> None:
        """Generate everything."""
        async with aclosing(self.deltas()) as deltas:
            async for _ in deltas:
                pass

    async def deltas(self) -> AsyncGenerator[tuple[int, Delta], None]:
        """Yield the index of a choice and what was added to it, as tokens come.

        What still runs is cancelled when this ends, however it ends.
        """
        base = 0
        try:
            for number, job in enumerate(self._jobs):
                if number:
                    self._current = self._submit(number)
                choices = self.choices[base : base + job.options.num_samples]
                async with aclosing(self._follow(self._current, choices)) as deltas:
                    async for sample, delta in deltas:
                        yield base + sample, delta
                self._current.cancel()
                base += len(choices)
        finally:
            self._current.cancel()

    def cancel(self) -> None:
        """Cancel what was queued or runs; does nothing after the end.

        For a run whose `deltas` may never be iterated.
        """
        self._current.cancel()

    async def _follow(
        self, generation: Generation, choices: Sequence[Choice]
    ) -> AsyncGenerator[tuple[int, Delta], None]:
        self._metrics.count_prompt_tokens(len(generation.prompt))
        async with aclosing(generation.steps()) as batches:
            async for batch in batches:
                if not self.num_output_tokens:
                    self._metrics.observe_first_token(self._metrics.clock() - self._started)
                for step in batch:
                    choice = choices[step.sample]
                    if choice.finish is None:
                        self._metrics.count_output_tokens(1)
                        yield step.sample, choice.push(step)
                if all(choice.finish for choice in choices):
                    return
        raise ServingError("The generation ended before its last token.", "The engine stopped without saying why.")

    def _submit(self, number: int) -> Generation:
        job = self._jobs[number]
        return self._engine.submit(job.prompt, job.options)


def describe_failure(error: Exception) -> Refusal:
    """Return what the client is told of an error that it did not cause: our own errors' text, of others the kind; the
    rest is in the log."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, ServingError):
        return Refusal(503, str(error), code="unavailable")
    logger.error("A request failed.", exc_info=error)
    if isinstance(error, HeadraceError):
        return Refusal(500, str(error), code="generation_failed")
    return Refusal(
        500,
        f"The model failed on this request ({type(error).__name__}). The server's log says more.",
        code="generation_failed",
    )
