"""A real Transformers model behind the server: values against `generate` and against logits computed here.

Model and tokenizer are made here.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import re
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import openai
import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from headrace.errors import ModelError, ServingError
from headrace.progress import LoadProgress
from headrace.serving.backend import LoadedModel, ModelBackend, make_backend, make_transformers_engine
from headrace.serving.engine import SamplingOptions, Step
from headrace.serving.metrics import Metrics
from headrace.serving.server import Server, ServerSettings
from headrace.serving.text import Detokenizer
from headrace.serving.tokenizer import HubTokenizer
from headrace.serving.transformers_engine import TransformersEngine
from headrace.serving.wire import Refusal

CONTEXT = 128
TEXT = "The river runs to the sea, and the sea is deep. Žluťoučký kůň 😀 日本語 👩‍👩‍👧‍👦 naïve café. " * 4
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] not in ['system', 'user', 'assistant', 'tool'] %}"
    "{{ raise_exception('unknown role ' + message['role']) }}{% endif %}"
    "<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_tokenizer(*, template: str | None = TEMPLATE) -> Any:
    """Return a byte-level tokenizer whose merges cut characters in the middle."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator([TEXT], trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|end|>", chat_template=template)


def make_model(*, seed: int = 0, **fields: Any) -> Any:
    config = transformers.LlamaConfig(
        **{
            "vocab_size": 320,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": CONTEXT,
            "eos_token_id": None,
            "bos_token_id": None,
            **fields,
        }
    )
    torch.manual_seed(seed)
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(20)  # Away from uniform, so that greedy choices are no coin tosses.
    return model


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer()


@pytest.fixture
def engine(tokenizer: Any) -> Iterator[TransformersEngine]:
    engine = TransformersEngine(make_model(), tokenizer)
    yield engine
    assert engine.close(10)


def generate(engine: TransformersEngine, prompt: Sequence[int], **options: Any) -> list[list[Step]]:
    """Return the steps of each sample."""

    async def run() -> list[list[Step]]:
        samples: list[list[Step]] = [[] for _ in range(options.get("num_samples", 1))]
        async for batch in engine.submit(
            prompt, SamplingOptions(**{"max_tokens": 12, "temperature": 0.0, **options})
        ).steps():
            for step in batch:
                samples[step.sample].append(step)
        return samples

    return asyncio.run(run())


def tokens_of(steps: Sequence[Step]) -> list[int]:
    return [step.token for step in steps]


PROMPT = [5, 80, 200, 33]


def test_greedy_tokens_are_those_of_generate(engine: TransformersEngine) -> None:
    reference = make_model().generate(torch.tensor([PROMPT]), max_new_tokens=12, do_sample=False, eos_token_id=None)
    (steps,) = generate(engine, PROMPT)
    assert tokens_of(steps) == reference[0, 4:].tolist()
    assert [step.finish for step in steps] == [None] * 11 + ["length"]
    assert engine.num_running == engine.num_waiting == 0


def test_same_seed_same_tokens_and_no_seed_is_left_behind(engine: TransformersEngine) -> None:
    seeded = [tokens_of(generate(engine, PROMPT, temperature=1.0, seed=7)[0]) for _ in range(2)]
    free = []
    for _ in range(2):
        generate(engine, PROMPT, temperature=1.0, seed=7)
        free.append(tokens_of(generate(engine, PROMPT, temperature=1.0)[0]))
    assert seeded[0] == seeded[1]
    assert free[0] != free[1]  # 12 tokens from 320: equal by chance once in ages


def test_samples_differ_and_each_has_its_end(engine: TransformersEngine) -> None:
    samples = generate(engine, PROMPT, temperature=1.0, seed=1, num_samples=3)
    assert len({tuple(tokens_of(steps)) for steps in samples}) == 3
    assert [steps[-1].finish for steps in samples] == ["length"] * 3


def test_a_sample_that_ends_early_lets_the_others_go_on(tokenizer: Any) -> None:
    model = make_model()
    engine = TransformersEngine(model, tokenizer)
    try:
        free = generate(engine, PROMPT, temperature=1.0, seed=1, num_samples=3)
        # An end token that one sample meets early, and another one does not.
        end = next(token for token in tokens_of(free[0])[2:6] if token not in tokens_of(free[1]))
    finally:
        engine.close(10)
    model = make_model()
    model.generation_config.eos_token_id = end
    engine = TransformersEngine(model, tokenizer)
    try:
        samples = generate(engine, PROMPT, temperature=1.0, seed=1, num_samples=3)
    finally:
        engine.close(10)
    at = tokens_of(free[0]).index(end)
    assert tokens_of(samples[0]) == tokens_of(free[0])[: at + 1]
    assert (samples[0][-1].finish, samples[0][-1].hidden) == ("stop", True)
    assert tokens_of(samples[1]) == tokens_of(free[1])


def test_the_tokenizers_end_token_ends_an_answer_too(tokenizer: Any) -> None:
    model = make_model()
    engine = TransformersEngine(model, tokenizer)
    with torch.no_grad():
        model.lm_head.weight[tokenizer.eos_token_id] = (
            model.lm_head.weight[tokens_of(generate(engine, PROMPT)[0])[3]] * 2
        )
    (steps,) = generate(engine, PROMPT)
    assert engine.close(10)
    assert model.generation_config.eos_token_id is None
    assert (steps[-1].token, steps[-1].finish, steps[-1].hidden) == (tokenizer.eos_token_id, "stop", True)


def test_min_tokens_holds_the_end_back(tokenizer: Any) -> None:
    model = make_model()
    first = tokens_of(generate_with(model, tokenizer, max_tokens=1))[0]
    model = make_model()
    model.generation_config.eos_token_id = first
    assert len(generate_with(model, tokenizer, max_tokens=6)) == 1
    model = make_model()
    model.generation_config.eos_token_id = first
    assert len(generate_with(model, tokenizer, max_tokens=6, min_tokens=6)) == 6


def generate_with(model: Any, tokenizer: Any, **options: Any) -> list[Step]:
    engine = TransformersEngine(model, tokenizer)
    try:
        return generate(engine, PROMPT, **options)[0]
    finally:
        assert engine.close(10)


def test_logprobs_are_those_of_the_raw_logits(engine: TransformersEngine) -> None:
    (steps,) = generate(engine, PROMPT, num_logprobs=3, repetition_penalty=1.5, max_tokens=5)
    model, sequence = make_model(), list(PROMPT)
    for step in steps:
        with torch.no_grad():
            expected = torch.log_softmax(model(torch.tensor([sequence])).logits[0, -1].float(), -1)
        assert step.logprob == pytest.approx(float(expected[step.token]), abs=1e-4)
        assert [token for token, _ in step.top] == torch.topk(expected, 3).indices.tolist()
        sequence.append(step.token)


def test_without_logprobs_none_are_computed(engine: TransformersEngine) -> None:
    assert all(step.logprob is None and step.top == () for step in generate(engine, PROMPT)[0])


def test_penalties_and_bias_bend_the_choice(engine: TransformersEngine) -> None:
    plain = tokens_of(generate(engine, PROMPT)[0])
    biased = tokens_of(generate(engine, PROMPT, logit_bias=((plain[0], -100.0), (17, 100.0)))[0])
    assert set(biased) == {17}
    # 17 wins by 100 each time, and each time it was said costs it 2 + 2: others come in between only once it costs more
    # than the bias.
    penal = tokens_of(generate(engine, PROMPT, logit_bias=((17, 3.0),), frequency_penalty=2.0, presence_penalty=2.0)[0])
    assert len(set(penal)) > len(set(tokens_of(generate(engine, PROMPT, logit_bias=((17, 3.0),))[0])))


def test_temperature_in_a_request_samples_where_the_checkpoint_is_greedy(tokenizer: Any) -> None:
    model = make_model()
    model.generation_config.do_sample = False
    engine = TransformersEngine(model, tokenizer)
    try:
        greedy = [tokens_of(generate(engine, PROMPT, temperature=None)[0]) for _ in range(2)]
        sampled = {tuple(tokens_of(generate(engine, PROMPT, temperature=1.5, seed=seed)[0])) for seed in range(4)}
    finally:
        engine.close(10)
    assert greedy[0] == greedy[1]
    assert len(sampled) == 4


def test_the_checkpoints_lengths_and_top_k_do_not_overrule_a_request(
    tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model()
    model.generation_config.max_length = 6
    model.generation_config.top_k = 1
    engine = TransformersEngine(model, tokenizer)
    transformers.logging.enable_propagation()
    try:
        with caplog.at_level(logging.WARNING):
            steps = [
                generate(engine, PROMPT, temperature=1.0, top_k=0, min_tokens=12, seed=seed)[0] for seed in range(3)
            ]
            generate(engine, PROMPT)
    finally:
        transformers.logging.disable_propagation()
        engine.close(10)
    assert [len(each) for each in steps] == [12, 12, 12]
    assert len({tuple(tokens_of(each)) for each in steps}) == 3
    assert [record.message for record in caplog.records if record.name.startswith("transformers")] == []


def test_requests_run_in_turn(engine: TransformersEngine) -> None:
    async def run() -> list[str]:
        order: list[str] = []

        async def read(name: str) -> None:
            async for batch in generation[name].steps():
                order.extend(name for _ in batch)

        generation = {name: engine.submit(PROMPT, SamplingOptions(max_tokens=5, temperature=0.0)) for name in "abc"}
        assert engine.num_running + engine.num_waiting == 3
        await asyncio.gather(*(read(name) for name in "abc"))
        return order

    assert asyncio.run(run()) == [*"aaaaabbbbbccccc"]


class Slow:
    """A layer's companion: makes each pass of a layer take a while, as a big model's would."""

    def __init__(self, model: Any, pause_s: float) -> None:
        self.passes = 0
        self._pause_s = pause_s
        for layer in model.model.layers:
            layer.register_forward_pre_hook(self)

    def __call__(self, module: Any, arguments: Any) -> None:
        self.passes += 1
        time.sleep(self._pause_s)


def test_cancelling_stops_within_a_layer_and_frees_what_was_held(tokenizer: Any) -> None:
    model = make_model()
    slow = Slow(model, 0.2)
    engine = TransformersEngine(model, tokenizer)
    alive: list[Any] = []
    watch = model.model.norm.register_forward_hook(lambda module, given, result: alive.append(weakref.ref(result)))

    async def run() -> float:
        running = engine.submit([7] * 40, SamplingOptions(max_tokens=50))
        waiting = engine.submit(PROMPT, SamplingOptions(max_tokens=50))
        while slow.passes < 1:  # in the first layer of the prompt
            await asyncio.sleep(0.01)
        start = time.monotonic()
        waiting.cancel()
        running.cancel()
        assert engine.num_waiting == 0
        while engine.num_running:
            await asyncio.sleep(0.01)
        assert [step async for step in waiting.steps()] == []
        return time.monotonic() - start

    assert asyncio.run(run()) < 1.0
    assert slow.passes <= 2  # of three layers
    gc.collect()
    assert [ref for ref in alive if ref() is not None] == []
    watch.remove()
    assert len(generate(engine, PROMPT, max_tokens=1)[0]) == 1  # and it still works
    assert engine.close(10)


def test_a_request_that_fails_takes_nobody_with_it(engine: TransformersEngine) -> None:
    with pytest.raises(IndexError):
        generate(engine, [100_000])
    assert engine.death is None
    assert len(generate(engine, PROMPT)[0]) == 12


def test_nan_is_an_error_and_not_an_answer(tokenizer: Any) -> None:
    model = make_model()
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    engine = TransformersEngine(model, tokenizer)
    with pytest.raises(ModelError, match="NaN"):
        generate(engine, PROMPT)
    assert engine.death is None
    assert engine.close(10)


def test_an_engine_whose_device_is_lost_is_dead(tokenizer: Any) -> None:
    model = make_model()

    def lose(module: Any, arguments: Any) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    model.model.layers[0].register_forward_pre_hook(lose)
    engine = TransformersEngine(model, tokenizer)
    with pytest.raises(ServingError, match="died"):
        generate(engine, PROMPT)
    assert isinstance(engine.death, RuntimeError)
    with pytest.raises(ServingError, match="has stopped"):
        generate(engine, PROMPT)
    assert engine.close(10)


def test_closing_ends_the_thread_and_every_reader(tokenizer: Any) -> None:
    model = make_model()
    Slow(model, 0.05)
    engine = TransformersEngine(model, tokenizer)

    async def run() -> None:
        generation = engine.submit(PROMPT, SamplingOptions(max_tokens=100))
        waiting = engine.submit(PROMPT, SamplingOptions(max_tokens=100))
        await asyncio.sleep(0.1)
        assert await asyncio.to_thread(engine.close, 10)
        for each in (generation, waiting):
            with pytest.raises(ServingError, match="stopping"):
                async for _ in each.steps():
                    pass

    asyncio.run(run())
    assert "headrace-generate" not in [thread.name for thread in threading.enumerate()]
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None


def test_a_model_without_a_head_is_refused(tokenizer: Any) -> None:
    body = make_model().model
    with pytest.raises(ServingError, match="cannot generate"):
        TransformersEngine(body, tokenizer)


# The tokenizer, whose pieces must be whole.


def pieces_of(tokenizer: HubTokenizer, tokens: Sequence[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.push(token) for token in tokens), detokenizer.finish()]


@pytest.mark.parametrize("text", ["😀", "ď", "👩‍👩‍👧‍👦", "日本語 und naïve", "a  b\n\tc", " leading"])
def test_byte_level_pieces_are_whole_characters(tokenizer: Any, text: str) -> None:
    pieces = pieces_of(HubTokenizer(tokenizer), tokenizer(text)["input_ids"])
    assert "".join(pieces) == text
    assert all("�" not in piece for piece in pieces)


def test_random_byte_level_tokens_join_to_the_whole_decode(tokenizer: Any) -> None:
    ours = HubTokenizer(tokenizer)
    generator = torch.Generator().manual_seed(0)
    for _ in range(60):
        tokens = torch.randint(0, len(tokenizer), (40,), generator=generator).tolist()
        pieces = pieces_of(ours, tokens)
        assert "".join(pieces) == tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def make_fallback_tokenizer() -> Any:
    """Return a tokenizer in the manner of sentencepiece: words with a leading mark, and bytes for what it does not
    know."""
    vocabulary = {"<unk>": 0, "</s>": 1, **{f"<0x{number:02X}>": number + 2 for number in range(256)}}
    for word in ("▁", "▁the", "▁sea", "▁is", "deep", "."):
        vocabulary[word] = len(vocabulary)
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>")


def fallback_tokens(tokenizer: Any, *parts: str | bytes) -> list[int]:
    vocabulary = tokenizer.get_vocab()
    return [
        token
        for part in parts
        for token in ([vocabulary[part]] if isinstance(part, str) else [vocabulary[f"<0x{byte:02X}>"] for byte in part])
    ]


@pytest.mark.parametrize(
    "parts",
    [
        ("▁the", "▁sea", "😀😀".encode(), "▁is", "deep", "."),
        ("😀".encode(), "▁the"),
        ("▁the", "</s>", "▁sea"),
        ("日本語".encode(), "deep", "ď".encode()),
    ],
)
def test_byte_fallback_pieces_are_whole_characters(parts: tuple[str | bytes, ...]) -> None:
    tokenizer = make_fallback_tokenizer()
    tokens = fallback_tokens(tokenizer, *parts)
    pieces = pieces_of(HubTokenizer(tokenizer), tokens)
    assert "".join(pieces) == tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert all("�" not in piece for piece in pieces)


def test_a_broken_byte_does_not_undo_the_characters_before_it() -> None:
    tokenizer = make_fallback_tokenizer()
    tokens = fallback_tokens(tokenizer, "▁the", "😀".encode() + b"\xf0", "▁sea")
    assert "".join(pieces_of(HubTokenizer(tokenizer), tokens)) == "the😀� sea"


def test_text_that_looks_like_a_byte_token_is_text(tokenizer: Any) -> None:
    copy = make_tokenizer()
    copy.add_tokens(["<0x41>"])
    token = copy.convert_tokens_to_ids("<0x41>")
    assert HubTokenizer(copy).byte_of(token) is None
    assert "".join(pieces_of(HubTokenizer(copy), [token])) == "<0x41>"


def test_templates_are_the_checkpoints_own(tokenizer: Any) -> None:
    ours = HubTokenizer(tokenizer)
    messages = [{"role": "user", "content": "sea"}]
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert ours.render(messages, tools=None, variables={}) == expected
    for variables in ({"chat_template": "x"}, {"tokenize": False}, {"add_generation_prompt": False}, {"messages": []}):
        with pytest.raises(Refusal, match="must not set") as caught:
            ours.render(messages, tools=None, variables=variables)
        assert (caught.value.status, caught.value.param) == (400, "chat_template_kwargs")
    with pytest.raises(Refusal, match="unknown role nobody") as caught:
        ours.render([{"role": "nobody", "content": "x"}], tools=None, variables={})
    assert caught.value.status == 400


def test_no_template_is_a_400_that_says_so() -> None:
    with pytest.raises(Refusal, match="no chat template") as caught:
        HubTokenizer(make_tokenizer(template=None)).render([{"role": "user", "content": "x"}], tools=None, variables={})
    assert (caught.value.status, caught.value.code) == (400, "no_chat_template")


# Everything together, with OpenAI's client.


@pytest.fixture(scope="module")
def served(tokenizer: Any) -> Iterator[str]:
    def load(progress: LoadProgress, metrics: Metrics) -> ModelBackend:
        loaded = LoadedModel(model=make_model(), tokenizer=tokenizer, name="tiny")
        return make_backend(loaded, make_transformers_engine, progress=progress, metrics=metrics)

    server = Server(ServerSettings(port=0), load, say=lambda text: None)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        end = time.monotonic() + 60
        while (
            server.address is None
            or httpx.get(f"http://127.0.0.1:{server.address[1]}/ready", trust_env=False).status_code != 200
        ):
            assert time.monotonic() < end
            time.sleep(0.05)
        yield f"http://127.0.0.1:{server.address[1]}"
    finally:
        server.request_stop()
        thread.join(30)
        assert not thread.is_alive()


@pytest.fixture
def client(served: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{served}/v1", api_key="none", max_retries=0, http_client=openai.DefaultHttpxClient(trust_env=False)
    ) as client:
        yield client


def test_chat_streamed_and_whole_are_the_same(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "the sea"}],
        "temperature": 0,
        "max_tokens": 30,
    }
    whole = client.chat.completions.create(**ask)
    with client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}) as stream:
        chunks = list(stream)
    assert (
        "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        == whole.choices[0].message.content
    )
    assert chunks[-1].usage == whole.usage
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]][-1] == whole.choices[0].finish_reason
    assert {chunk.model for chunk in chunks} == {whole.model} == {"tiny"}


def test_a_stop_string_ends_the_same_text_earlier(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": "tiny", "prompt": "the sea", "temperature": 0, "max_tokens": 30}
    text = client.completions.create(**ask).choices[0].text
    stop = text[7:9]
    with client.completions.create(**ask, stop=stop, stream=True) as stream:
        chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == text[: text.index(stop)]
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_a_context_is_filled_and_never_overrun(client: openai.OpenAI, tokenizer: Any) -> None:
    answer = client.completions.create(model="tiny", prompt=[7] * (CONTEXT - 3), max_tokens=100)
    assert answer.usage is not None
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (3, "length")
    with pytest.raises(openai.BadRequestError, match="context holds 128"):
        client.completions.create(model="tiny", prompt=[7] * CONTEXT, max_tokens=1)


def test_logprobs_are_finite_numbers(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "x"}],
        max_tokens=4,
        logprobs=True,
        top_logprobs=2,
        logit_bias={"7": -100},
    )
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None
    assert len(content) == 4
    assert all(len(token.top_logprobs) == 2 and -9999 <= token.logprob <= 0 for token in content)
    json.dumps(answer.model_dump(), allow_nan=False)


def test_responses_and_their_stream(client: openai.OpenAI) -> None:
    whole = client.responses.create(model="tiny", input="the sea", temperature=0, max_output_tokens=12)
    with client.responses.create(
        model="tiny", input="the sea", temperature=0, max_output_tokens=12, stream=True
    ) as stream:
        events = list(stream)
    deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert deltas == whole.output_text
    assert events[-1].type == "response.incomplete"
    assert [event.sequence_number for event in events] == list(range(len(events)))


@pytest.mark.slow
def test_the_command_serves_a_folder(tmp_path: Any) -> None:
    """From the command to an answer and back to exit code 0, with our own loader; the probe answers while torch is
    still being imported."""
    folder = tmp_path / "tiny-model"
    make_model().save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    script = (
        "import sys; from pathlib import Path;"
        "from headrace.cli.serve import ServeOptions, serve; from headrace.settings import Settings;"
        "settings = Settings(cache_dir=Path(sys.argv[2]), progress=False);"
        "sys.exit(serve(ServeOptions(uri=sys.argv[1], port=0, settings=settings, termination_log=Path(sys.argv[3]))))"
    )
    command = [sys.executable, "-c", script, str(folder), str(tmp_path / "cache"), str(tmp_path / "log")]
    with (tmp_path / "printed").open("w+") as printed:
        process = subprocess.Popen(command, stdout=printed, stderr=subprocess.STDOUT)
        try:
            end = time.monotonic() + 120
            while not (found := re.findall(r"listening on (\S+?),", (tmp_path / "printed").read_text())):
                assert process.poll() is None and time.monotonic() < end, (tmp_path / "printed").read_text()
                time.sleep(0.02)
            assert httpx.get(f"{found[0]}/health", trust_env=False).status_code == 200
            seen = []
            while (ready := httpx.get(f"{found[0]}/ready", trust_env=False)).status_code != 200:
                seen.append(ready.json()["status"])
                assert process.poll() is None and time.monotonic() < end, (tmp_path / "printed").read_text()
                time.sleep(0.05)
            assert set(seen) == {"loading"}
            assert "wanted" in ready.json()["report"]
            body = {
                "model": "tiny-model",
                "messages": [{"role": "user", "content": "the sea"}],
                "temperature": 0,
                "max_tokens": 5,
            }
            answer = httpx.post(f"{found[0]}/v1/chat/completions", json=body, trust_env=False, timeout=60).json()
            assert (answer["model"], answer["usage"]["completion_tokens"] <= 5) == ("tiny-model", True)
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
