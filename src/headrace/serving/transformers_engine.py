"""A Transformers model as an engine: one thread, one request after the other, each with all the machine.

Batching requests together is left out on purpose: on CPU the batched path of Transformers 5.24 was slower than one by
one (three short requests of a 135M model: 22 s against 12 s, 2026-11-29), and its sampling is not per request.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from headrace.errors import MissingDependency, RankFailed, ServingError
from headrace.serving.decisions import Alone, Decision, Lead, Task
from headrace.serving.engine import Finish, Generation, SamplingOptions, Step
from headrace.serving.sampling import LogitsWatch, make_config, make_processors, take_defaults

try:
    from transformers import LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
except ImportError as error:
    raise MissingDependency(
        "Serving a model needs Transformers.",
        f"Importing it failed: {error}.",
        'Install it with: pip install "headrace[serve]"',
    ) from error

logger = logging.getLogger("headrace.serving")

_NO_LIMIT = 1 << 30
"""Tokenizers say such numbers when they do not know how long a context is."""


class TransformersEngine:
    """Continues prompts with ``model.generate`` in a thread of its own. Owns the model until `close`.

    ``lead`` is asked wherever ranks that compute the model together must go on alike.
    """

    def __init__(self, model: Any, tokenizer: Any, *, num_threads: int | None = None, lead: Lead | None = None) -> None:
        if not model.can_generate():
            raise ServingError(
                f"{type(model).__name__} cannot generate text.",
                "It has no language model head.",
                "Serve a model for text generation.",
            )
        if getattr(model.config, "is_encoder_decoder", False):
            raise ServingError(
                f"{type(model).__name__} cannot be served.",
                "It is an encoder and a decoder; completions and chats want a decoder alone.",
                "Serve a decoder-only model, or use headrace.load_model and its generate.",
            )
        model.eval()
        self._model = model
        self._end_tokens = _end_tokens(model, tokenizer)
        self._defaults = take_defaults(model.generation_config)
        self._num_threads = num_threads
        self._lead: Lead = lead or Alone()
        self.context_tokens = _context_tokens(model, tokenizer)
        self.vocabulary_size = int(model.get_input_embeddings().weight.shape[0])
        self.death: BaseException | None = None
        self._lock = threading.Condition()
        self._waiting: deque[Generation] = deque()
        self._current: Generation | None = None
        self._closed = False
        self._hooks = [layer.register_forward_pre_hook(self._check_layer) for layer in layers_of(model)]
        self._thread = threading.Thread(target=self._work, name="headrace-generate", daemon=True)
        self._thread.start()

    @property
    def num_running(self) -> int:
        return int(self._current is not None)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def submit(self, prompt: Sequence[int], options: SamplingOptions) -> Generation:
        """Queue ``prompt``. Raises `ServingError` once the engine is dead or closed."""
        generation = Generation(prompt, options, on_cancel=self._forget)
        with self._lock:
            if self.death is not None or self._closed:
                raise ServingError(
                    "The engine has stopped.", "" if self.death is None else f"It died of {type(self.death).__name__}."
                )
            self._waiting.append(generation)
            self._lock.notify()
        return generation

    def abort_all(self, error: BaseException) -> None:
        """Cancel everything; readers get ``error``."""
        with self._lock:
            generations = [*self._waiting, *([self._current] if self._current else [])]
        for generation in generations:
            generation.fail(error)
            generation.cancel()

    def close(self, timeout_s: float) -> bool:
        """Cancel everything and end the thread; see `TextEngine.close`."""
        with self._lock:
            self._closed = True
            self._lock.notify()
        self.abort_all(ServingError("The server is stopping."))
        self._thread.join(timeout_s)
        ended = not self._thread.is_alive()
        if ended:
            for hook in self._hooks:
                hook.remove()
            self._model = None
        return ended

    def _forget(self, generation: Generation) -> None:
        """Take a cancelled generation out of the queue. One that runs sees it at its next layer."""
        with self._lock:
            if generation in self._waiting:
                self._waiting.remove(generation)
                generation.finish()

    def _work(self) -> None:
        if self._num_threads:
            torch.set_num_threads(self._num_threads)
        while True:
            with self._lock:
                while not self._waiting and not self._closed:
                    self._lock.wait()
                if self._closed:
                    return
                self._current = self._waiting.popleft()
            try:
                self._generate(self._current)
            except BaseException as error:  # noqa: BLE001  A thread has nobody to raise to.
                self.die(error)
                return

    def _generate(self, generation: Generation) -> None:
        """Run one generation. Its own failure is its reader's; only one of the device is raised, and one that leaves other ranks behind."""
        failure: Exception | None = None
        try:
            with torch.inference_mode(), self._seeded(generation.options.seed):
                self._call_model(generation)
        except _Stopped:
            pass
        except Exception as error:
            if _is_fatal(error) or not self._lead.is_in_step():
                raise
            failure = error
        # Before the reader hears of the end: whoever counts then must not count it.
        self._current = None
        if failure is not None:
            generation.fail(failure)
            # Its traceback holds this frame, which would hold it: a circle with all cached keys and values in it.
            failure = None
        generation.finish()

    def _call_model(self, generation: Generation) -> None:
        options = generation.options
        watch, processors = make_processors(options, self._defaults, num_prompt=len(generation.prompt))
        prompt = torch.tensor([generation.prompt], device=self._model.device)
        self._lead.begin(Task(generation.prompt, options.num_samples, options.max_tokens))
        self._model.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            generation_config=make_config(options, self._defaults, end_tokens=self._end_tokens),
            logits_processor=LogitsProcessorList(processors),
            stopping_criteria=StoppingCriteriaList(
                [_TokenWatch(generation, watch, end_tokens=self._end_tokens, lead=self._lead)]
            ),
        )

    def _seeded(self, seed: int | None) -> AbstractContextManager[Any]:
        """Return a block in which ``seed`` holds. What comes after it draws on as if it had not been."""
        if seed is None:
            return nullcontext()
        return _Seeded(seed, self._model.device)

    def _check_layer(self, module: Any, arguments: Any) -> None:
        """Before every layer: leave a generation that nobody waits for.

        A long prompt is one forward pass, of seconds or minutes on a CPU.
        """
        current = self._current
        if current is None or threading.current_thread() is not self._thread:
            return
        if self._lead.at_layer(stop=current.cancelled):
            raise _Stopped

    def die(self, error: BaseException) -> None:
        """Generate never again, because of ``error``; who waits for an answer is told so. The first cause is kept. From any thread."""
        with self._lock:
            if self.death is not None:
                return
            self.death = error
        if isinstance(error, RankFailed):
            # No traceback: it would only show where this process waited.
            why = f"{error.what} {error.why}".strip()
            logger.critical("The engine died. %s", why)
        else:
            why = f"It died of {type(error).__name__}."
            logger.critical("The engine died.", exc_info=error)
        self.abort_all(ServingError("The engine died.", why))
        self._current = None


class _Stopped(Exception):
    """The generation was cancelled."""


class _Seeded(AbstractContextManager[None]):
    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed = seed
        self._fork = torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])

    def __enter__(self) -> None:
        self._fork.__enter__()
        torch.manual_seed(self._seed)

    def __exit__(self, *exception: Any) -> None:
        self._fork.__exit__(*exception)


class _TokenWatch(StoppingCriteria):  # type: ignore[misc]
    """Called after each token: hands it on, and says which samples are done."""

    def __init__(self, generation: Generation, logits: LogitsWatch, *, end_tokens: Sequence[int], lead: Lead) -> None:
        self._generation = generation
        self._logits = logits
        self._lead = lead
        self._end_tokens = frozenset(end_tokens)
        self._done = [False] * generation.options.num_samples

    def __call__(self, input_ids: torch.Tensor, scores: Any, **unused: Any) -> torch.Tensor:
        tokens = tuple(input_ids[:, -1].tolist())
        if self._generation.cancelled:
            self._lead.at_token(Decision(True, tokens, tuple(self._done)))
            raise _Stopped
        number = input_ids.shape[1] - len(self._generation.prompt)
        steps = []
        for sample, token in enumerate(tokens):
            if not self._done[sample]:
                steps.append(self._step(sample, token, is_last=number >= self._generation.options.max_tokens))
                self._done[sample] = steps[-1].finish is not None
        self._lead.at_token(Decision(False, tokens, tuple(self._done)))
        self._generation.put(steps)
        return torch.tensor(self._done, device=input_ids.device)

    def _step(self, sample: int, token: int, *, is_last: bool) -> Step:
        logprob, top = self._logits.describe(sample, token)
        ends = token in self._end_tokens
        finish: Finish | None = "stop" if ends else "length" if is_last else None
        return Step(sample, token, logprob, top, finish, hidden=ends)


def _end_tokens(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Return every token that ends an answer.

    Chat checkpoints often name the end of a turn in the tokenizer alone, and run on without it.
    """
    found: dict[int, None] = {}
    for value in (model.generation_config.eos_token_id, getattr(tokenizer, "eos_token_id", None)):
        for token in value if isinstance(value, (list, tuple)) else [value]:
            if token is not None:
                found[int(token)] = None
    return tuple(found)


def _context_tokens(model: Any, tokenizer: Any) -> int | None:
    """Return how many tokens the model was built for: what its configuration says, else its tokenizer's limit, else
    None."""
    config = model.config.get_text_config(decoder=True)
    for value in (getattr(config, "max_position_embeddings", None), getattr(tokenizer, "model_max_length", None)):
        if isinstance(value, int) and 0 < value < _NO_LIMIT:
            return value
    return None


def layers_of(model: Any) -> list[Any]:
    """Return the model's layers: the members of every list of modules that is not within another (a layer's experts
    are)."""
    outer: list[str] = []
    layers: list[Any] = []
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.ModuleList) and not any(name.startswith(f"{other}.") for other in outer):
            outer.append(name)
            layers.extend(module)
    return layers


def _is_fatal(error: BaseException) -> bool:
    """Say whether the device is lost: after an asynchronous CUDA error every later call fails as well.

    Running out of memory is not one.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return False
    return isinstance(error, getattr(torch, "AcceleratorError", ())) or "CUDA error" in str(error)
