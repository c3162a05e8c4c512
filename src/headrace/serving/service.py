"""What the handlers share: the engine, the tokenizer, the model's one name, and the way from a request to a run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.serving.engine import TextEngine
from headrace.serving.metrics import Metrics
from headrace.serving.output import Choice
from headrace.serving.run import Run, Wishes, plan_jobs
from headrace.serving.tokenizer import TextTokenizer
from headrace.serving.toolcalls import ToolCallParser
from headrace.serving.wire import Refusal, refuse


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """One model that answers. Used in the event loop."""

    engine: TextEngine
    tokenizer: TextTokenizer
    model_name: str
    """The only name that the model has, in requests and in answers."""
    metrics: Metrics
    snapshot: str | None = None
    """The id of the weights' snapshot; None where they come from none."""
    max_waiting: int = 128
    """Generations that may wait for their turn; more are refused (429) rather than left to time out."""
    created: int = field(default_factory=lambda: int(time.time()))
    """When the model was loaded, in seconds of the epoch."""
    now: Callable[[], float] = time.time

    def check_model(self, name: str | None) -> None:
        """Raise `Refusal` (404) for any name but the model's. None is taken for it."""
        if name is not None and name != self.model_name:
            raise Refusal(
                404,
                f"The model {name[:200]!r} does not exist. This server has {self.model_name!r}.",
                param="model",
                code="model_not_found",
            )

    async def encode(self, prompt: str | Sequence[int]) -> list[int]:
        """Return the tokens of a plain prompt.

        Raises `Refusal` (400) for tokens that the model does not have, and for none at all.
        """
        if isinstance(prompt, str):
            tokens = await asyncio.to_thread(self.tokenizer.encode, prompt)
        else:
            tokens = list(prompt)
            if max(tokens, default=0) >= self.engine.vocabulary_size:
                raise refuse("prompt", f"prompt holds a token id that is not below {self.engine.vocabulary_size}.")
        if not tokens:
            raise refuse("prompt", "prompt has no tokens, and this model needs one to begin with.")
        return tokens

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
    ) -> list[int]:
        """Return the tokens of a chat; see `TextTokenizer.render`."""
        return await asyncio.to_thread(lambda: self.tokenizer.render(messages, tools=tools, variables=variables))

    def choice_maker(
        self, *, stops: Sequence[str] = (), with_tools: bool = False, parallel_calls: bool = True
    ) -> Callable[[], Choice]:
        """Return what makes an empty choice.

        Tool calls are looked for where tools were given and the model writes them as we read them.
        """
        parse_calls = with_tools and self.tokenizer.writes_tool_calls

        def make() -> Choice:
            parser = ToolCallParser(most_calls=None if parallel_calls else 1) if parse_calls else None
            return Choice(self.tokenizer, stops=stops, tool_calls=parser)

        return make

    def start(self, prompts: Sequence[Sequence[int]], wishes: Wishes, make_choice: Callable[[], Choice]) -> Run:
        """Check that everything fits, queue the first prompt, and return the run.

        Raises `Refusal`: 400 for what cannot be, 429 when full.
        """
        jobs = plan_jobs(prompts, wishes, self.engine)
        if self.engine.num_waiting >= self.max_waiting:
            raise Refusal(
                429, f"{self.max_waiting} requests wait already.", code="server_busy", headers={"retry-after": "1"}
            )
        return Run(self.engine, jobs, make_choice, metrics=self.metrics)
