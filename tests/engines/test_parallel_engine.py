"""Two ranks that compute one real model, over a real group, without a server: the same tokens as one process, and what failures and cancellations leave behind."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import headrace
from headrace.errors import InvalidSetting, ModelError, RankFailed, ServingError
from headrace.serving.decisions import LONG_PROMPT_TOKENS
from headrace.serving.engine import SamplingOptions
from headrace.settings import Settings
from tests.support.quantized import QuantizedCheckpoints
from tests.support.rank_processes import RankProcesses

NUM_RANKS = 2
PROMPT = (5, 80, 200, 33)
LONG_PROMPT = tuple(token % 300 for token in range(LONG_PROMPT_TOKENS))


class GroupFollowers:
    """Tells the other ranks over the group itself what `headrace.serving.followers.Followers` tells over connections."""

    def tell(self, message: object) -> None:
        torch.distributed.broadcast_object_list([message], src=0)

    def watch(self, on_death: Any) -> None:
        pass

    def wait_for_death(self) -> RankFailed | None:
        return None

    def end(self, *, at_once: bool = False) -> None:
        if not at_once:
            self.tell(None)


def hear() -> Any:
    message: list[Any] = [None]
    torch.distributed.broadcast_object_list(message, src=0)
    return message[0]


def load(folder: str) -> Any:
    return headrace.load_model(folder, dtype=torch.float32, **divided(NUM_RANKS))


def divided(num_ranks: int) -> dict[str, Any]:
    from transformers.distributed import DistributedConfig

    return {"distributed_config": DistributedConfig(tp_size=num_ranks), "settings": Settings(progress=False)}


def with_engine(rank: int, folder: str, script: Any) -> Any:
    """Run ``script`` on rank 0's engine, which the other rank follows; return what it returned, on rank 0."""
    from headrace.serving.parallel_engine import ParallelEngine, follow
    from headrace.streaming.processgroup import GroupLink

    model = load(folder)
    if rank:
        follow(model, hear, GroupLink())
        return None
    engine = ParallelEngine(model, None, followers=GroupFollowers(), link=GroupLink(), leave=lambda: None)  # type: ignore[arg-type]
    try:
        return script(engine)
    finally:
        assert engine.close(10)


def generate(engine: Any, prompt: tuple[int, ...] = PROMPT, **options: Any) -> list[list[int]]:
    """Return the tokens of each sample."""

    async def run() -> list[list[int]]:
        samples: list[list[int]] = [[] for _ in range(options.get("num_samples", 1))]
        generation = engine.submit(prompt, SamplingOptions(**{"max_tokens": 12, "temperature": 0.0, **options}))
        async for batch in generation.steps():
            for step in batch:
                samples[step.sample].append(step.token)
        return samples

    return asyncio.run(run())


def tokens_and_samples(engine: Any) -> Any:
    sampling = {"temperature": 1.0, "seed": 3, "num_samples": 3}
    greedy = generate(engine, num_logprobs=2)
    long = generate(engine, LONG_PROMPT, max_tokens=3)
    return greedy, long, generate(engine, **sampling), generate(engine, **sampling)


def failures_of_rank_0(engine: Any) -> Any:
    """What fails on rank 0 alone, before a pass, after one, and by a client that leaves during a long prompt; a generation after each."""
    told: list[str] = []
    expected = generate(engine)

    def fails(**options: Any) -> None:
        with pytest.raises(Exception) as caught:
            generate(engine, **options)
        told.append(type(caught.value).__name__)
        assert generate(engine) == expected

    fails(num_samples=2)  # greedy samples: Transformers refuses them before the first pass
    fails(logit_bias=((10**6, 1.0),))  # no such row of the logits
    told.append(asyncio.run(cancel_in_a_long_prompt(engine)))
    assert generate(engine) == expected
    return told


async def cancel_in_a_long_prompt(engine: Any) -> str:
    generation = engine.submit(LONG_PROMPT, SamplingOptions(max_tokens=5, temperature=0.0))
    hook = engine._model.model.layers[1].register_forward_pre_hook(lambda *_: generation.cancel(), prepend=True)
    steps = [batch async for batch in generation.steps()]
    hook.remove()
    return f"{len(steps)} steps"


def failure_in_a_pass(engine: Any) -> Any:
    """A failure in the middle of a pass leaves the other rank in a collective: the engine is dead, and says so to whoever waits."""

    def fail(*_: Any) -> None:
        raise ModelError("Layer 2 failed.")

    engine._model.model.layers[2].register_forward_pre_hook(fail)
    with pytest.raises(ServingError, match=r"The engine died\. It died of ModelError"):
        generate(engine)
    return str(engine.death)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=320, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
    place: Path = tmp_path_factory.mktemp("model")
    model.save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankProcesses]:
    group = RankProcesses(NUM_RANKS, tmp_path_factory.mktemp("group"))
    yield group
    group.kill(1)  # The last test has left it in a collective that nobody comes to.
    assert group.end()[0] == 0


def test_two_ranks_say_what_one_process_says(ranks: RankProcesses, folder: Path) -> None:
    leader, follower = ranks.run(with_engine, str(folder), tokens_and_samples)
    assert (leader.error, follower.error) == (None, None)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    greedy, long, seeded, again = leader.value
    for prompt, (tokens,) in ((PROMPT, greedy), (LONG_PROMPT, long)):
        reference = model.generate(torch.tensor([prompt]), max_new_tokens=len(tokens), do_sample=False)
        assert tokens == reference[0, len(prompt) :].tolist()
    assert seeded == again and len({tuple(tokens) for tokens in seeded}) == 3


@pytest.mark.parametrize("name", ["ct-fp8-dynamic-llama", "ar-auto_gptq-llama"])
def test_two_ranks_say_it_with_packed_layers_too(
    ranks: RankProcesses, quantized: QuantizedCheckpoints, name: str
) -> None:
    folder = quantized[name].folder
    leader, follower = ranks.run(with_engine, str(folder), generate)
    assert (leader.error, follower.error) == (None, None)
    [tokens] = leader.value
    model = headrace.load_model(folder, dtype=torch.float32, settings=Settings(progress=False))
    reference = model.generate(torch.tensor([PROMPT]), max_new_tokens=len(tokens), do_sample=False)
    assert tokens == reference[0, len(PROMPT) :].tolist()


def test_what_fails_on_rank_0_alone_leaves_both_ready_for_the_next(ranks: RankProcesses, folder: Path) -> None:
    leader, follower = ranks.run(with_engine, str(folder), failures_of_rank_0)
    assert (leader.error, follower.error) == (None, None)
    assert leader.value == ["ValueError", "IndexError", "0 steps"]


def test_a_failure_within_a_pass_is_the_end(ranks: RankProcesses, folder: Path) -> None:
    ranks.start(with_engine, str(folder), failure_in_a_pass)
    leader = ranks.outcome(0)
    assert leader.error is None and "Layer 2 failed." in leader.value


def test_what_cannot_be_divided_is_refused_before_there_is_a_group(folder: Path) -> None:
    with pytest.raises(InvalidSetting, match="attention heads, 4, is no multiple of 3"):
        headrace.load_model(folder, **divided(3))
    with pytest.raises(InvalidSetting, match="cannot be quantized while it is divided"):
        headrace.load_model(folder, quantization="modelopt_fp8", **divided(2))
