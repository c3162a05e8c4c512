"""Whether, over what and where a process loads with others. No process group is made here; real ones are in tests/contract."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import headrace
from headrace.errors import InvalidSetting
from headrace.streaming.processgroup import find_link


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A process group of torch's, as far as it is looked at: a test changes what it says."""
    told = {"rank": 1, "size": 2, "backends": "cpu:gloo,cuda:nccl"}
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda group: told["rank"])
    monkeypatch.setattr(dist, "get_world_size", lambda group: told["size"])
    monkeypatch.setattr(dist, "get_backend_config", lambda group: told["backends"])
    return told


def test_alone_where_nothing_is_initialised() -> None:
    assert find_link("auto") is None
    assert find_link(False) is None


def test_true_insists_on_a_group() -> None:
    with pytest.raises(InvalidSetting, match="init_process_group"):
        find_link(True)


@pytest.mark.parametrize("wrong", ["yes", None, 2])
def test_other_values_are_refused(wrong: Any) -> None:
    with pytest.raises(InvalidSetting, match="distributed is"):
        find_link(wrong)


GIVEN: Any = object()


def test_a_group_is_used_that_is_given_or_insisted_on(group: dict[str, Any]) -> None:
    for link in (find_link("auto", GIVEN), find_link(True, GIVEN), find_link(True)):
        assert link is not None
        assert (link.rank, link.num_ranks) == (1, 2)
    assert find_link(False, GIVEN) is None


def test_the_world_is_never_taken_by_itself(group: dict[str, Any]) -> None:
    """A job whose first rank alone loads a model must not wait for the others."""
    assert find_link("auto") is None


def test_a_group_of_one_shares_nothing(group: dict[str, Any]) -> None:
    group.update(rank=0, size=1)
    assert find_link("auto", GIVEN) is None
    assert find_link(True) is None


def test_a_group_of_others_is_refused(group: dict[str, Any]) -> None:
    group["rank"] = -1
    with pytest.raises(InvalidSetting, match="not in the process group"):
        find_link("auto", GIVEN)


def test_a_group_that_moves_bytes_on_no_known_device_is_refused(group: dict[str, Any]) -> None:
    group["backends"] = "xpu:ccl"
    with pytest.raises(InvalidSetting, match="xpu:ccl"):
        find_link("auto", GIVEN)


@pytest.mark.parametrize("load", [headrace.stream, headrace.load_state_dict, headrace.load_model])
def test_a_scope_that_is_none_is_refused_where_a_process_loads_alone(load: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match="scope is 'nodes'"):
        load(tmp_path, scope="nodes")
