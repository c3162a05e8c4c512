"""A Transformers model that several ranks compute together: the engine of rank 0, which is the one that is asked, and the loop of the others, which follow it.

Knows the model and the group, not the server, and not how ranks are started.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from headrace.errors import RankFailed
from headrace.serving.decisions import Following, Leading, Task
from headrace.serving.followers import Followers
from headrace.serving.sampling import take_defaults
from headrace.serving.transformers_engine import TransformersEngine, layers_of
from headrace.streaming.processgroup import RankLink

_LAST_CHANCE_S = 1.0
"""How long a thread that waits for other ranks may take to end once they are gone."""


class ParallelEngine(TransformersEngine):
    """Rank 0's engine. Owns the model and the other ranks until `close`; the loss of one is its death. ``leave`` is called when no thread uses the group any more."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        followers: Followers,
        link: RankLink,
        leave: Callable[[], None],
        num_threads: int | None = None,
    ) -> None:
        self._followers = followers
        self._leave = leave
        leading = Leading(link, followers.tell)
        super().__init__(model, tokenizer, num_threads=num_threads, lead=leading)
        self._hooks += [
            model.register_forward_pre_hook(lambda module, arguments: leading.pass_begins()),
            model.register_forward_hook(lambda module, arguments, output: leading.pass_ended()),
        ]
        followers.watch(self.die)

    def die(self, error: BaseException) -> None:
        """See `TransformersEngine.die`. A collective that fails says little of why; the rank that it failed for says more."""
        if self.death is None and not isinstance(error, RankFailed):
            error = self._followers.wait_for_death() or error
        super().die(error)

    def close(self, timeout_s: float) -> bool:
        """Cancel everything and end all ranks and the thread; see `TextEngine.close`."""
        ended = super().close(timeout_s)
        self._followers.end(at_once=not ended or self.death is not None)
        if not ended:
            ended = super().close(_LAST_CHANCE_S)
        if ended:
            self._leave()
        return ended


def follow(model: Any, receive: Callable[[], Task | None], link: RankLink, *, num_threads: int | None = None) -> None:
    """Compute with rank 0 whatever it tells, until it tells None. Raises what the model raises, and RuntimeError where the group breaks: then this rank is of no use any more."""
    model.eval()
    take_defaults(model.generation_config)
    # Which tokens end an answer rank 0 knows.
    model.generation_config.eos_token_id = None
    if num_threads:
        torch.set_num_threads(num_threads)
    follower = _Follower(model, link)
    while (task := receive()) is not None:
        follower.carry_out(task)


class _Follower:
    def __init__(self, model: Any, link: RankLink) -> None:
        self._model = model
        self._link = link
        self._following: Following | None = None
        for layer in layers_of(model):
            layer.register_forward_pre_hook(self._check_layer)

    def carry_out(self, task: Task) -> None:
        self._following = Following(self._link, task)
        prompt = torch.tensor([task.prompt] * task.num_samples, device=self._model.device)
        config = GenerationConfig(
            do_sample=False, max_new_tokens=task.max_tokens, num_beams=1, pad_token_id=0, use_cache=True
        )
        with torch.inference_mode(), contextlib.suppress(_Abandoned):
            self._model.generate(
                input_ids=prompt,
                attention_mask=torch.ones_like(prompt),
                generation_config=config,
                logits_processor=LogitsProcessorList(),
                stopping_criteria=StoppingCriteriaList([_Obedience(self._following)]),
            )

    def _check_layer(self, module: Any, arguments: Any) -> None:
        if self._following is not None and self._following.at_layer():
            raise _Abandoned


class _Abandoned(Exception):
    """Rank 0 gave the generation up."""


class _Obedience(StoppingCriteria):  # type: ignore[misc]
    """Called after each pass: puts rank 0's tokens in the place of this rank's own guess, and ends where it ends."""

    def __init__(self, following: Following) -> None:
        self._following = following

    def __call__(self, input_ids: torch.Tensor, scores: Any, **unused: Any) -> torch.Tensor:
        decision = self._following.at_token()
        if decision.stop:
            raise _Abandoned
        input_ids[:, -1] = torch.tensor(decision.tokens, device=input_ids.device)
        return torch.tensor(decision.done, device=input_ids.device)
