"""What is added to the error of a load: quickly, only what is new, and nothing that raises."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from headrace.doctor.aftermath import Advice, advise, choose, is_explained, pointer_to, steps_for
from headrace.doctor.examination import Plan
from headrace.doctor.finding import State, failed, ok
from headrace.errors import (
    AccessDenied,
    Cancelled,
    HeadraceError,
    InvalidHeader,
    NoWeights,
    ObjectChanged,
    ObjectNotFound,
    ReadStalled,
    StorageError,
    StoreUnavailable,
    WrongRange,
)
from headrace.settings import Settings

from .fakes import world

PLAN = Plan(uri="s3://bucket/m", read_settings=Settings)
UNREACHABLE = StoreUnavailable("s3://bucket/m cannot be read.", "https://host could not be reached.", "Check it.")
UNRESOLVED = failed("network", "host does not resolve.", "There is no such name.", "Check the spelling.")


@pytest.mark.parametrize(
    ("error", "steps"),
    [
        (UNREACHABLE, ("network", "tls", "clock")),
        (ReadStalled("x"), ("network", "tls", "clock")),
        (AccessDenied("x"), ("clock", "credentials")),
        (ObjectNotFound("x"), ("name", "list")),
        (NoWeights("x"), ("name", "list")),
        (WrongRange("x"), ("range read",)),
        (ObjectChanged("x"), ()),
        (StorageError("x"), ("network", "tls")),
    ],
)
def test_each_error_has_its_checks(error: HeadraceError, steps: tuple[str, ...]) -> None:
    assert steps_for(error) == steps
    assert is_explained(error)


@pytest.mark.parametrize("error", [InvalidHeader("x"), Cancelled("x"), ValueError("x")])
def test_other_errors_are_none_of_the_doctors(error: BaseException) -> None:
    assert not is_explained(error)


def test_the_first_trouble_is_chosen() -> None:
    assert choose(UNREACHABLE, [ok("name", "Fine."), UNRESOLVED]) is UNRESOLVED
    assert choose(UNREACHABLE, [ok("name", "Fine.")]) is None


def test_what_the_error_says_itself_is_not_repeated() -> None:
    same = failed("network", "Nothing.", "HTTPS://host could  not be reached", "Check it.")
    assert choose(UNREACHABLE, [same]) is None


def test_refused_credentials_are_named() -> None:
    keys = ok("credentials", "The access key …MPLE comes from the variables.")
    assert choose(AccessDenied("403."), [keys]) is keys
    assert choose(UNREACHABLE, [keys]) is None


def test_a_folder_with_a_similar_name_is_said() -> None:
    error = NoWeights("There are no weights.", "It is empty.", "Check the uri.")
    trouble = failed("list", error.what, error.why, error.mend, [("similar", "s3://bucket/m3")])
    found = choose(error, [trouble])
    assert found is not None
    assert found.what == "There is s3://bucket/m3. Did you mean that?"
    assert choose(error, [failed("list", error.what, error.why, error.mend)]) is None


def test_the_words() -> None:
    pointer = pointer_to("s3://bucket/m", "s3://bucket/m")
    assert Advice(UNRESOLVED, pointer).lines() == (
        "network: host does not resolve. There is no such name. Check the spelling.",
        "Run headrace doctor s3://bucket/m for all checks.",
    )
    assert Advice(None, pointer).lines() == (pointer,)
    assert "Signature" not in pointer_to("https://host/m?Signature=x", "https://host/m")
    assert pointer_to("s3://", "") == "Run headrace doctor with the same uri for all checks."


def test_the_checks_are_run() -> None:
    import socket

    nobody = world(
        addresses=socket.gaierror(socket.EAI_NONAME, "Name or service not known"),
    )
    advice = advise(UNREACHABLE, Plan(uri="https://nobody.example/m", read_settings=Settings), nobody)
    assert advice.finding is not None
    assert advice.finding.state is State.FAILED
    assert "does not resolve" in advice.finding.what


def test_a_check_that_hangs_is_left_behind() -> None:
    released, began = threading.Event(), threading.Event()

    def hang(*_: Any) -> Any:
        began.set()
        released.wait(60)
        raise OSError

    advice = advise(UNREACHABLE, PLAN, world(open_store=hang), most_seconds=0.05)
    assert began.wait(60)
    assert advice.lines() == ("Run headrace doctor s3://bucket/m for all checks.",)
    released.set()
    for thread in threading.enumerate():
        if thread.name == "headrace-doctor":
            thread.join(60)


def test_nothing_that_goes_wrong_escapes() -> None:
    def break_down() -> Settings:
        raise KeyError("secret")

    advice = advise(UNREACHABLE, Plan(uri="s3://bucket/m", read_settings=break_down), world())
    assert advice.lines() == ("Run headrace doctor s3://bucket/m for all checks.",)


def test_a_changed_object_gets_the_pointer_alone() -> None:
    assert advise(ObjectChanged("x"), PLAN, world()).finding is None
