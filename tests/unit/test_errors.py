"""Errors cross processes and speak in three parts."""

from __future__ import annotations

import pickle
import re

import pytest

from headrace import errors

ALL = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, errors.HeadraceError)]


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_every_error_survives_pickling_with_its_parts(kind: type[errors.HeadraceError]) -> None:
    again = pickle.loads(pickle.dumps(kind("It happened.", "For a reason.", "Do this.")))
    assert type(again) is kind
    assert (again.what, again.why, again.mend) == ("It happened.", "For a reason.", "Do this.")
    assert str(again) == "It happened. For a reason. Do this."


def test_empty_parts_leave_no_trace() -> None:
    assert str(errors.StreamClosed("It is closed.")) == "It is closed."


def test_of_several_failures_the_cause_is_nearest() -> None:
    outcomes = [
        (0, errors.ObjectNotFound("Its own, which teaches.")),
        (1, errors.RankFailed("Rank 1 ended without a word.", rank=1)),
        (2, RuntimeError("Connection closed by peer")),
        (3, errors.RankFailed("Rank 0 failed while loading weights.", rank=0)),
        (4, errors.RankFailed("A rank of the group vanished while loading weights.")),
    ]
    distances = [errors.distance_from_cause(rank, error) for rank, error in outcomes]
    assert distances == sorted(set(distances)) and distances[0] == 0


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    drawn: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").splitlines():
        found = re.match(r"^([ │├└─]*)([A-Z]\w+)", line)
        if found and found[2] in vars(errors):
            drawn.append((len(found[1]) // 4, found[2]))
    parents: dict[str, str] = {}
    path: list[str] = []
    for depth, name in drawn:
        path[depth - 1 :] = [name]
        if len(path) > 1:
            parents[name] = path[-2]
    assert {kind.__name__: kind.__base__.__name__ for kind in ALL if kind is not errors.HeadraceError} == parents
