"""The life of a server: an open port before the load, readiness after the first token, and every way to the end."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest

from headrace.errors import HeadraceError, MissingDependency, ServingError
from headrace.progress import LoadProgress
from headrace.serving.backend import LoadedModel, ModelBackend, make_backend
from headrace.serving.lifecycle import Lifecycle, LifecycleSettings, Outcome
from headrace.serving.metrics import Metrics
from headrace.serving.server import Server, ServerSettings, check_installed, open_port
from headrace.streaming.report import LoadReport, RankReport

from .fakes import NAME, PieceTokenizer, ScriptedEngine, serving

CHAT: dict[str, Any] = {"model": NAME, "messages": [{"role": "user", "content": "hi"}]}


class SteppedLoad:
    """A load that goes on when a test says so."""

    def __init__(self) -> None:
        self.engine = ScriptedEngine(PieceTokenizer())
        self.go_on = threading.Event()
        self.at_token = threading.Event()
        self.failure: BaseException | None = None

    def __call__(self, progress: LoadProgress, metrics: Metrics) -> ModelBackend:
        progress.bytes_wanted = 100
        with progress.during("weights"):
            progress.arrived(40)
            progress.describe_holdup = lambda: "model-2.safetensors on connection 3"
            self.go_on.wait(20)
        if self.failure is not None:
            raise self.failure
        loaded = LoadedModel(model=None, tokenizer=None, name=NAME)
        return make_backend(loaded, lambda _: (self.engine, self.engine.tokenizer), progress=progress, metrics=metrics)


def test_ready_only_after_the_weights_and_a_token() -> None:
    load = SteppedLoad()
    with serving(load=load, wait=False) as running:
        running.wait_for(lambda: running.server.progress.bytes_done == 40)
        for _ in range(3):
            assert running.get("/health").status_code == 200
            ready = running.get("/ready")
            assert ready.status_code == 503
        described = ready.json()
        assert described["status"] == "loading"
        assert (
            described["progress"]["phase"],
            described["progress"]["bytes_done"],
            described["progress"]["bytes_wanted"],
        ) == ("weights", 40, 100)
        assert running.post("/v1/chat/completions", CHAT).status_code == 503
        assert "headrace_ready 0.0" in running.get("/metrics").text
        assert load.engine.asked == []  # and no request has loaded anything
        load.go_on.set()
        running.wait_for(lambda: running.get("/ready").status_code == 200)
        assert [options.max_tokens for _, options in load.engine.asked] == [1]
        assert running.post("/v1/chat/completions", CHAT).status_code == 200
        assert 'headrace_load_seconds{phase="weights"}' in running.get("/metrics").text
    assert running.outcomes == [Outcome(exit_code=0)]
    assert "listening on http://127.0.0.1:" in running.said[0]


def report_of(snapshot_id: str, *, num_files: int = 1) -> LoadReport:
    sizes: dict[str, Any] = {"num_tensors": 1, "bytes_checkpoint": 8, "bytes_wanted": 8, "bytes_read": 8}
    counts: dict[str, Any] = {"num_requests": 1, "num_retries": 0, "num_connections": 1, "peak_staging_bytes": 8}
    return LoadReport(uri="s3://b/m", snapshot_id=snapshot_id, num_files=num_files, seconds=1.0, **sizes, **counts)


def loading(report: LoadReport | None) -> Callable[[LoadProgress, Metrics], ModelBackend]:
    engine = ScriptedEngine(PieceTokenizer())

    def load(progress: LoadProgress, metrics: Metrics) -> ModelBackend:
        loaded = LoadedModel(model=None, tokenizer=None, name=NAME, report=report)
        return make_backend(loaded, lambda _: (engine, engine.tokenizer), progress=progress, metrics=metrics)

    return load


def test_which_snapshot_answers_is_told() -> None:
    with serving(load=loading(report_of("0123456789ab"))) as running:
        gauge = f'headrace_model_snapshot{{model="{NAME}",snapshot="0123456789ab"}} 1.0'
        assert gauge in running.get("/metrics").text
        assert running.get("/v1/models").json()["data"][0]["snapshot"] == "0123456789ab"
        assert running.get(f"/v1/models/{NAME}").json()["snapshot"] == "0123456789ab"
        assert "snapshot 0123456789ab" in running.get("/ready").json()["report"]["checkpoint"]


def test_what_each_rank_did_for_the_load_is_told() -> None:
    ranks = (
        RankReport(rank=0, bytes_read=300, bytes_received=40, seconds_reading=2.5, seconds_waiting=0.25),
        RankReport(rank=1, bytes_read=40, bytes_received=300, seconds_reading=0.5, seconds_waiting=2.0),
    )
    with serving(load=loading(replace(report_of("0123456789ab"), ranks=ranks))) as running:
        text = running.get("/metrics").text
    assert sorted(line for line in text.splitlines() if line.startswith("headrace_load_rank_")) == [
        'headrace_load_rank_read_bytes{rank="0"} 300.0',
        'headrace_load_rank_read_bytes{rank="1"} 40.0',
        'headrace_load_rank_received_bytes{rank="0"} 40.0',
        'headrace_load_rank_received_bytes{rank="1"} 300.0',
        'headrace_load_rank_seconds{rank="0",source="ranks"} 0.25',
        'headrace_load_rank_seconds{rank="0",source="store"} 2.5',
        'headrace_load_rank_seconds{rank="1",source="ranks"} 2.0',
        'headrace_load_rank_seconds{rank="1",source="store"} 0.5',
    ]


def test_one_process_has_no_rows_for_ranks() -> None:
    with serving(load=loading(report_of("0123456789ab"))) as running:
        assert "headrace_load_rank_seconds{" not in running.get("/metrics").text


@pytest.mark.parametrize("report", [None, report_of("none", num_files=0)], ids=["no-report", "random-weights"])
def test_what_comes_from_no_snapshot_names_none(report: LoadReport | None) -> None:
    with serving(load=loading(report)) as running:
        assert "headrace_model_snapshot{" not in running.get("/metrics").text
        assert running.get("/v1/models").json()["data"][0]["snapshot"] is None


@pytest.mark.parametrize("script", [[], ["x"]], ids=["no-token", "an-error"])
def test_a_model_that_cannot_generate_is_never_ready(script: list[str | bytes]) -> None:
    engine = ScriptedEngine(PieceTokenizer(), [script], end=bool(script))
    failure = ServingError("The model computed NaN.")
    if script:
        engine.submit = lambda prompt, options: (_ for _ in ()).throw(failure)  # type: ignore[method-assign]
    else:
        engine._step = lambda sample, number, options: None  # type: ignore[method-assign]
    with serving(engine, wait=False) as running:
        running.thread.join(10)
        assert running.outcomes[0].exit_code == 1
        assert isinstance(running.outcomes[0].error, ServingError)
        assert engine.closed


def test_a_load_that_fails_ends_the_server_with_its_error() -> None:
    load = SteppedLoad()
    load.failure = HeadraceError(
        "The header of model-2.safetensors is not one.", "It begins with zeros.", "Upload it again."
    )
    with serving(load=load, wait=False) as running:
        load.go_on.set()
        running.thread.join(10)
        outcome = running.outcomes[0]
        with pytest.raises(httpx.ConnectError):
            running.get("/health")
    assert (outcome.exit_code, outcome.error, outcome.lingering) == (1, load.failure, False)


def test_a_load_that_takes_too_long_names_what_holds_it_up() -> None:
    load = SteppedLoad()
    with serving(load=load, lifecycle=LifecycleSettings(load_deadline_s=0.4), wait=False) as running:
        running.thread.join(10)
        outcome = running.outcomes[0]
        load.go_on.set()
    assert isinstance(outcome.error, ServingError)
    assert "not ready within 0.40 s (--load-deadline)" in outcome.error.what
    assert "model-2.safetensors on connection 3" in outcome.error.why
    assert "40 B of 100 B" in outcome.error.why
    assert (outcome.exit_code, outcome.lingering) == (1, True)


class Clock:
    """Time that goes on when a test says so."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_load_that_stands_still_is_told_from_a_slow_one() -> None:
    clock, stop = Clock(), threading.Event()
    progress = LoadProgress(clock=clock)

    def slow(progress: LoadProgress) -> ModelBackend:
        with progress.during("weights"):
            for _ in range(12):
                clock.now += 25
                progress.arrived(1)
                time.sleep(0.02)
            clock.now += 31
            stop.wait(20)
        raise ServingError("It was told to stop.")

    lifecycle = Lifecycle(slow, progress, LifecycleSettings(load_stall_s=30), num_inside=lambda: 0)
    outcome = asyncio.run(lifecycle.live())
    stop.set()
    assert isinstance(outcome.error, ServingError)
    assert "stood still for 31.0 s (--load-stall)" in outcome.error.what
    assert progress.bytes_done == 12  # it outlived ten times the limit while bytes came
    assert (lifecycle.status, lifecycle.is_alive, lifecycle.app) == ("failed", False, None)


def test_being_told_to_stop_while_it_loads() -> None:
    load = SteppedLoad()
    with serving(load=load, wait=False) as running:
        running.server.request_stop()
        running.thread.join(10)
        assert running.outcomes == [Outcome(exit_code=0, lingering=True)]
        load.go_on.set()


def test_ctrl_c_while_it_loads_is_not_a_success() -> None:
    load = SteppedLoad()
    with serving(load=load, wait=False) as running:
        running.server._signalled(signal.SIGINT)
        running.thread.join(10)
        assert running.outcomes == [Outcome(exit_code=130, lingering=True)]
        load.go_on.set()


@pytest.mark.parametrize(
    "kind", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"]
)
def test_a_body_that_is_not_said_to_be_json_is_refused(kind: str | None) -> None:
    """A web page may send these to a server on the reader's own machine without asking it first."""
    with serving() as running:
        headers = {"content-type": kind} if kind else {}
        body = b'{"model": "m", "prompt": "x", "max_tokens": 1}'
        answer = httpx.post(running.url + "/v1/completions", content=body, headers=headers, trust_env=False, timeout=20)
        assert answer.status_code == 415 and "application/json" in answer.json()["error"]["message"]


def test_a_dead_engine_is_a_503_and_then_the_end() -> None:
    with serving(lifecycle=LifecycleSettings(farewell_s=1.0)) as running:
        running.engine.death = RuntimeError("CUDA error: device lost")
        answers = [running.get("/ready"), running.get("/health"), running.post("/v1/chat/completions", CHAT)]
        assert answers[0].status_code == answers[2].status_code == 503
        assert answers[0].json() == {"status": "failed", "report": {}}
        running.wait_for(lambda: running.get("/health").status_code == 503)
        running.thread.join(10)
        assert running.outcomes[0].exit_code == 1
        assert "device lost" in str(running.outcomes[0].error)


def endless(**options: Any) -> ScriptedEngine:
    return ScriptedEngine(PieceTokenizer(), [["x"]], end=False, pause_s=0.02, context_tokens=100_000, **options)


def test_draining_finishes_what_runs_and_takes_nothing_new(client_of: Callable[..., openai.OpenAI]) -> None:
    with serving(endless(), lifecycle=LifecycleSettings(drain_s=20)) as running:
        client = client_of(running)
        with client.chat.completions.create(**CHAT, max_tokens=60, stream=True) as stream:
            first = next(iter(stream))
            running.server.request_stop()
            running.wait_for(lambda: running.get("/ready").status_code == 503)
            assert running.get("/ready").json()["status"] == "draining"
            assert running.get("/health").status_code == 200
            refused = running.post("/v1/chat/completions", CHAT)
            chunks = [first, *stream]
        running.thread.join(10)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_ready")
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "x" * 60
    assert chunks[-1].choices[0].finish_reason == "length"
    assert running.outcomes == [Outcome(exit_code=0)]
    assert running.engine.closed


@pytest.mark.parametrize("second_signal", [False, True], ids=["at-the-limit", "at-the-second-signal"])
def test_what_does_not_end_in_time_is_told_so(client_of: Callable[..., openai.OpenAI], second_signal: bool) -> None:
    limit = 60.0 if second_signal else 0.5
    whole: list[httpx.Response] = []
    with serving(endless(), lifecycle=LifecycleSettings(drain_s=limit)) as running:
        other = threading.Thread(target=lambda: whole.append(running.post("/v1/chat/completions", CHAT)))
        other.start()
        with client_of(running).chat.completions.create(**CHAT, stream=True) as stream:
            chunks = iter(stream)
            next(chunks)
            running.wait_for(lambda: running.engine.num_running == 2)
            running.server.request_stop()
            if second_signal:
                running.wait_for(lambda: running.get("/ready").status_code == 503)
                running.server.request_stop()
            with pytest.raises(openai.APIError, match="is stopping"):
                list(chunks)
        other.join(10)
        running.thread.join(10)
    assert (whole[0].status_code, whole[0].json()["error"]["type"]) == (503, "service_unavailable")
    assert running.outcomes == [Outcome(exit_code=0)]
    assert running.engine.num_running == 0


def test_a_port_that_is_taken_is_an_error_that_says_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        server = Server(ServerSettings(port=taken.getsockname()[1]), lambda progress, metrics: pytest.fail("loaded"))
        with pytest.raises(ServingError, match=r"cannot be opened.*in use.*--port"):
            server.run()
    with pytest.raises(ServingError, match="cannot be opened"):
        open_port("host.invalid", 0)


def test_what_is_missing_is_said_before_the_load() -> None:
    check_installed(("json",))
    with pytest.raises(MissingDependency, match=r"no_such_package.*headrace\[serve\]"):
        check_installed(("json", "no_such_package"))
