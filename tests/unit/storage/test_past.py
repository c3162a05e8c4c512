"""States of a bucket out of its changes: every state that was, the newest first, and each of them a store."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import ObjectNotFound
from headrace.storage import Listing, StoredObject, Uri, parse_uri
from headrace.storage import past as module
from headrace.storage.past import PastStore, past_states
from headrace.storage.store import Change


class Present:
    """As much of a store as a past one asks of it."""

    uri: Uri = parse_uri("s3://bucket/m")
    selected_key = None
    endpoint = "http://127.0.0.1:9"
    num_closed = 0

    def uri_of(self, key: str) -> str:
        return f"{self.uri}/{key}"

    def list_level(self, folder: str = "") -> Listing:
        raise AssertionError("the present was listed")

    def close(self) -> None:
        self.num_closed += 1


def put(key: str, version: str, when_s: float) -> Change:
    return Change(key, when_s, StoredObject(key, 5, version, f"id-{version}"))


def states(changes: Sequence[Change]) -> list[dict[str, str]]:
    return [
        {stored.key: stored.version for stored in past.list_level().objects}
        for past in past_states(Present(), changes)  # type: ignore[arg-type]
    ]


def test_every_change_makes_a_state_and_the_newest_comes_first() -> None:
    changes = [put("a", "1", 10), put("a", "2", 30), put("b", "1", 20), Change("b", 40, None), put("c", "1", 25)]
    assert states(changes) == [
        {"a": "2", "c": "1"},
        {"a": "2", "b": "1", "c": "1"},
        {"a": "1", "b": "1", "c": "1"},
        {"a": "1", "b": "1"},
        {"a": "1"},
    ]


def test_of_one_moment_all_first_changes_come_before_any_second() -> None:
    """A store that dates by the second: what was uploaded, and a file of it that was written anew within that second."""
    changes = [put("a", "1", 10), put("a", "2", 10), put("b", "1", 10), put("c", "1", 10)]
    assert states(changes)[1] == {"a": "1", "b": "1", "c": "1"}


def test_the_order_of_one_key_counts_whatever_the_clock_says() -> None:
    assert states([put("a", "1", 20), put("a", "2", 10)]) == [{"a": "2"}, {"a": "1"}]


def test_states_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_STATES", 3)
    assert states([put("a", str(number), number) for number in range(10)]) == [{"a": "9"}, {"a": "8"}, {"a": "7"}]


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(0, 4), st.booleans()),
        max_size=12,
    )
)
def test_the_last_change_of_each_key_is_what_is_there_now(events: list[tuple[str, int, bool]]) -> None:
    times: dict[str, int] = {}
    changes, current = [], {}
    for number, (key, step, kept) in enumerate(events):
        times[key] = times.get(key, 0) + step
        changes.append(put(key, str(number), times[key]) if kept else Change(key, times[key], None))
        current[key] = str(number) if kept else None
    found = states(changes)
    assert len(found) == len(events)
    if events:
        assert found[0] == {key: version for key, version in current.items() if version is not None}


def test_a_past_store_lists_as_the_store_itself_would() -> None:
    objects = {
        key: StoredObject(key, size, '"v"', "id")
        for key, size in {"a": 1, "e": 0, "sub/": 0, "sub": 0, "sub/x/y": 1, "sub/z": 2, "w//c": 1, "../d": 1}.items()
    }
    present = Present()
    past = PastStore(present, objects)  # type: ignore[arg-type]
    top = past.list_level()
    assert [stored.key for stored in top.objects] == ["a", "e"]
    assert top.objects[0].version_id == "id"
    assert top.folders == ("sub", "w")
    assert [stored.key for stored in past.list_level("sub").objects] == ["sub/z"]
    assert past.list_level("sub").folders == ("sub/x",)
    assert past.list_level("absent") == Listing((), ())
    assert past.stat("sub/x/y") is objects["sub/x/y"]
    with pytest.raises(ObjectNotFound, match="did not exist then"):
        past.stat("b")
    assert (str(past.uri), past.endpoint, past.selected_key) == ("s3://bucket/m", present.endpoint, None)
    past.close()
    assert present.num_closed == 1


def test_how_an_object_is_asked_for_does_not_make_it_another() -> None:
    assert StoredObject("a", 1, "v", "id") == StoredObject("a", 1, "v")
