"""What generates: the protocol between the handlers and a model, and the tokens on their way from its thread to the
event loop.

It knows neither models nor HTTP. A request's own name never comes here: generations are objects, not identifiers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, Protocol

Finish = Literal["stop", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """How to choose tokens.

    None means: as the checkpoint's generation_config.json says, else as the OpenAI API does.
    """

    max_tokens: int
    min_tokens: int = 0
    num_samples: int = 1
    """Independent continuations of the one prompt."""
    temperature: float | None = None
    """0 takes the likeliest token each time."""
    top_p: float | None = None
    top_k: int | None = None
    """0 for no limit."""
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    """The same seed, prompt and options give the same tokens on the same machine."""
    num_logprobs: int | None = None
    """Likeliest tokens to name at each step; 0 for the chosen one's log probability alone, None for nothing."""


@dataclass(frozen=True, slots=True)
class Step:
    """One token of one sample."""

    sample: int
    token: int
    logprob: float | None = None
    """Natural logarithm of the probability before temperature and penalties; may be minus infinity."""
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens and their log probabilities, best first."""
    finish: Finish | None = None
    """Set on the sample's last token."""
    hidden: bool = False
    """A token that ended the text and is not part of it: counted, not shown."""


class Generation:
    """The tokens of one prompt, from the engine's thread (`put`, `finish`, `fail`) to one reader in the event loop
    (iteration, `cancel`)."""

    def __init__(
        self,
        prompt: Sequence[int],
        options: SamplingOptions,
        *,
        on_cancel: Callable[[Generation], None] = lambda generation: None,
    ) -> None:
        self.prompt = tuple(prompt)
        self.options = options
        self.cancelled = False
        self._loop = asyncio.get_running_loop()
        self._steps: asyncio.Queue[list[Step] | BaseException | None] = asyncio.Queue()
        self._on_cancel = on_cancel

    def put(self, steps: list[Step]) -> None:
        """Hand on the tokens of one forward pass. From any thread."""
        self._deliver(steps)

    def finish(self) -> None:
        """Say that no token follows. From any thread."""
        self._deliver(None)

    def fail(self, error: BaseException) -> None:
        """Let the reader raise ``error``, after the tokens that are already on their way. From any thread."""
        self._deliver(error)

    def cancel(self) -> None:
        """Stop generating, if it has not ended.

        The engine frees what it holds at its next token or layer. Does nothing the second time.
        """
        if not self.cancelled:
            self.cancelled = True
            self._on_cancel(self)

    async def steps(self) -> AsyncGenerator[list[Step], None]:
        """Yield the tokens as they come, one list for each forward pass. Raises what `fail` was given."""
        while True:
            item = await self._steps.get()
            if item is None:
                return
            if isinstance(item, BaseException):
                raise item
            yield item

    def _deliver(self, item: list[Step] | BaseException | None) -> None:
        with suppress(RuntimeError):  # The loop is closed: nobody reads any more.
            self._loop.call_soon_threadsafe(self._steps.put_nowait, item)


class TextEngine(Protocol):
    """A model that continues prompts, one after the other or several at a time: that is its own affair."""

    @property
    def context_tokens(self) -> int | None:
        """Most tokens of prompt and continuation together; None where there is no limit."""
        ...

    @property
    def vocabulary_size(self) -> int:
        """Token ids are below it."""
        ...

    @property
    def num_running(self) -> int:
        """Generations that the model works on."""
        ...

    @property
    def num_waiting(self) -> int:
        """Generations that wait for their turn."""
        ...

    @property
    def death(self) -> BaseException | None:
        """Why the engine will never generate again; None while it lives. Readable from any thread."""
        ...

    def submit(self, prompt: Sequence[int], options: SamplingOptions) -> Generation:
        """Start, or queue, the continuation of ``prompt``.

        Called in the event loop; returns at once. Raises `ServingError` when dead or closed.
        """
        ...

    def abort_all(self, error: BaseException) -> None:
        """Cancel every generation; its reader gets ``error``."""
        ...

    def close(self, timeout_s: float) -> bool:
        """Cancel everything, free the model and return whether the engine's threads have ended within ``timeout_s``."""
        ...
