"""The order of the steps, what a failed one keeps from being tried, and that nothing that happens in a step escapes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.doctor import examination as module
from headrace.doctor.examination import Examination, Limits, Plan
from headrace.doctor.finding import Finding, State, failed, ok
from headrace.doctor.whereabouts import Whereabouts
from headrace.doctor.world import World
from headrace.errors import AccessDenied, InvalidSetting
from headrace.settings import Settings, TransportSettings

from .fakes import KEYS, ORIGIN, FakeStore, world

REMOTE = [
    "name",
    "settings",
    "network",
    "tls",
    "clock",
    "credentials",
    "list",
    "stat",
    "range read",
    "conditional read",
    "throughput",
    "cache",
]
LOCAL = [name for name in REMOTE if name not in ("network", "tls", "clock", "credentials")]

Replace = Callable[..., None]


@pytest.fixture
def replace_checks(monkeypatch: pytest.MonkeyPatch) -> Replace:
    """Put findings, or what raises, in place of the checks that need a network."""

    def replace_them(kind: str = "s3", **given: Any) -> None:
        def check(outcome: Any) -> Callable[..., Any]:
            def run(*_: Any, **__: Any) -> Any:
                if isinstance(outcome, BaseException):
                    raise outcome
                return outcome

            return run

        place = Whereabouts(kind=kind, endpoint="https://host", origin=ORIGIN)
        monkeypatch.setattr(module, "find_whereabouts", check(given.get("whereabouts", place)))
        for step, (holder, name) in {
            "network": (module.network, "examine_network"),
            "tls": (module.tls, "examine_tls"),
            "clock": (module.skew, "examine_clock"),
            "range read": (module.ranges, "examine_range"),
            "conditional read": (module.ranges, "examine_condition"),
            "throughput": (module.throughput, "examine_throughput"),
        }.items():
            monkeypatch.setattr(holder, name, check(given.get(step.replace(" ", "_"), ok(step, "Fine."))))

    return replace_them


def run(
    store: FakeStore,
    tmp_path: Path,
    *,
    wanted: tuple[str, ...] | None = None,
    uri: str = "s3://bucket/m",
    **more: Any,
) -> list[Finding]:
    more.setdefault("describe_credentials", lambda *_: KEYS)
    plan = Plan(uri=uri, read_settings=lambda: Settings(cache_dir=tmp_path / "cache"))
    examination = Examination(plan, world(open_store=lambda *_: store, **more))
    findings = list(examination.run(wanted))
    examination.close()
    return findings


def states(findings: list[Finding]) -> dict[str, str]:
    return {finding.step: str(finding.state) for finding in findings}


def test_all_steps_in_order(replace_checks: Replace, tmp_path: Path) -> None:
    replace_checks()
    store = FakeStore({"model.safetensors": 9})
    findings = run(store, tmp_path)
    assert [finding.step for finding in findings] == REMOTE
    assert set(states(findings).values()) == {"ok"}
    assert all(finding.seconds > 0 for finding in findings)
    assert store.is_closed
    # The settings led to another server than the one that the store has found meanwhile: the bucket's region is another one.
    assert findings[REMOTE.index("list")].details[0] == ("served from", store.endpoint)


def test_files_have_no_network(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(3_000_000))
    plan = Plan(uri=str(tmp_path), read_settings=lambda: Settings(cache_dir=tmp_path / "cache"), measures=False)
    examination = Examination(plan, World())
    findings = list(examination.run())
    assert [finding.step for finding in findings] == LOCAL
    assert states(findings) == {**dict.fromkeys(LOCAL, "ok"), "throughput": "skipped"}
    assert examination.uri == str(tmp_path)


def test_a_failed_step_keeps_others_from_being_tried_and_is_named(replace_checks: Replace, tmp_path: Path) -> None:
    replace_checks(network=failed("network", "No.", "Why.", "Mend."))
    findings = run(FakeStore({"model.safetensors": 9}), tmp_path)
    found = states(findings)
    assert found["network"] == "failed"
    assert {name for name, state in found.items() if state == "ok"} == {"name", "settings", "credentials", "cache"}
    assert {one.what for one in findings if one.state is State.SKIPPED} == {"Not tried, because network failed."}


def test_the_first_failure_is_named_by_all_that_follow(replace_checks: Replace, tmp_path: Path) -> None:
    replace_checks()

    def refuse(*_: Any) -> Any:
        raise AccessDenied("s3://bucket/m cannot be read.", "None found.", "Set some.")

    findings = run(FakeStore(), tmp_path, describe_credentials=refuse)
    by_step = {finding.step: finding for finding in findings}
    assert by_step["credentials"].what == "No credentials could be had."
    assert by_step["throughput"].what == "Not tried, because credentials failed."


def test_settings_that_cannot_be_read_are_a_finding(tmp_path: Path) -> None:
    def refuse() -> Settings:
        raise InvalidSetting("HEADRACE_CONNECTIONS is 'many'.", "It must be a whole number.")

    findings = list(Examination(Plan(uri="s3://bucket/m", read_settings=refuse), world()).run())
    assert findings[1].what == "HEADRACE_CONNECTIONS is 'many'."
    assert [finding.state for finding in findings[2:]] == [State.SKIPPED] * (len(REMOTE) - 2)


def test_a_uri_that_is_none(tmp_path: Path) -> None:
    plan = Plan(uri="s3://key:very-secret@bucket/m", read_settings=Settings)
    examination = Examination(plan, world())
    findings = list(examination.run())
    assert findings[0].state is State.FAILED
    assert examination.uri == ""
    assert "very-secret" not in repr(findings)


def test_what_a_check_does_not_expect_is_a_finding_without_its_words(replace_checks: Replace, tmp_path: Path) -> None:
    replace_checks(tls=RuntimeError("key=very-secret"))
    told: list[Exception] = []
    findings = run(FakeStore({"model.safetensors": 9}), tmp_path, on_unexpected=told.append)
    by_step = {finding.step: finding for finding in findings}
    assert by_step["tls"].what == "The check itself failed (RuntimeError)."
    assert by_step["cache"].state is State.OK
    assert "very-secret" not in repr(findings)
    assert [str(error) for error in told] == ["key=very-secret"]


def test_refused_requests_say_what_they_were_shown(replace_checks: Replace, tmp_path: Path) -> None:
    replace_checks()
    store = FakeStore(errors={"list_level": AccessDenied("403.", "No.", "Check."), "stat": AccessDenied("403.")})
    by_step = {finding.step: finding for finding in run(store, tmp_path)}
    assert by_step["list"].details[0] == ("shown", "the access key …MPLE from the variables")
    assert by_step["stat"].state is State.SKIPPED
    assert by_step["range read"].what == "Not tried, because list failed."


def test_without_the_right_to_list_the_rest_is_still_tried(replace_checks: Replace, tmp_path: Path) -> None:
    replace_checks()
    store = FakeStore({"model.safetensors": 9}, errors={"list_level": AccessDenied("403.", "No.", "Check.")})
    found = states(run(store, tmp_path))
    assert (found["list"], found["stat"], found["range read"]) == ("failed", "ok", "ok")


def test_only_what_is_wanted_and_what_it_needs(replace_checks: Replace, tmp_path: Path) -> None:
    replace_checks()
    findings = run(FakeStore(), tmp_path, wanted=("tls",))
    assert [finding.step for finding in findings] == ["name", "settings", "network", "tls"]


def test_a_hub_that_may_not_be_asked(replace_checks: Replace, tmp_path: Path) -> None:
    place = Whereabouts(kind="hf", endpoint="https://hub", origin=ORIGIN, is_offline=True)
    replace_checks(whereabouts=place)
    store = FakeStore({"model.safetensors": 9})
    found = states(run(store, tmp_path, uri="hf://org/name", describe_hub=lambda *_: KEYS))
    assert (found["network"], found["tls"], found["clock"]) == ("skipped",) * 3
    assert (found["list"], found["range read"]) == ("ok", "ok")


def test_a_hub_that_cannot_be_reached_and_a_snapshot_in_its_cache(
    replace_checks: Replace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unreachable = failed("network", "No.", "Why.", "Mend.")
    replace_checks("hf", network=unreachable)
    store = FakeStore({"model.safetensors": 9})
    more: dict[str, Any] = {"uri": "hf://org/name", "describe_hub": lambda *_: KEYS}
    monkeypatch.setattr(module, "has_snapshot", lambda _: False)
    assert states(run(store, tmp_path, **more))["list"] == "skipped"
    monkeypatch.setattr(module, "has_snapshot", lambda _: True)
    findings = run(store, tmp_path, **more)
    found = states(findings)
    assert (found["network"], found["tls"], found["list"]) == ("warning", "skipped", "ok")
    assert "hub's cache" in findings[2].why


def test_limits_shorten_and_never_lengthen() -> None:
    limits = Limits(connect_timeout_s=5, idle_timeout_s=10, total_timeout_s=30, max_attempts=2)
    found = limits.applied(TransportSettings(connect_timeout_s=1.0))
    assert (found.connect_timeout_s, found.idle_timeout_s, found.total_timeout_s, found.max_attempts) == (1, 10, 30, 2)
