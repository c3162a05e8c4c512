"""What the loader for vLLM takes as extra configuration, and how it refuses the rest."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.engines.vllm import is_wanted
from headrace.engines.vllm_options import parse_loader_options
from headrace.errors import InvalidSetting


def test_nothing_says_nothing() -> None:
    options = parse_loader_options({})
    assert options.uri is None
    assert not options.theirs
    assert (options.extra.concurrency, options.extra.memory_limit, options.extra.distributed) == (None, None, None)


def test_every_key_arrives_where_it_belongs() -> None:
    given = {"concurrency": 4, "memory_limit": -1, "distributed": False, "uri": "S3://b/m/"}
    options = parse_loader_options({**given, "enable_weights_track": True})
    assert (options.extra.concurrency, options.extra.memory_limit, options.extra.distributed) == (4, -1, False)
    assert str(options.uri) == "s3://b/m"
    assert options.theirs == {"enable_weights_track": True}


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("text", "is a str, not an object"),
        ({"memory_limits": 1}, "Did you mean memory_limit"),
        ({3: 1}, "Unknown in model_loader_extra_config: 3"),
        ({"enable_multithread_load": True}, "several connections at once"),
        ({"num_threads": 4}, "calls it concurrency"),
        ({"memory_limit": -2}, "less than -1"),
        ({"distributed": None}, "is null"),
        ({"uri": 5}, "uri is 5"),
        ({"uri": "org/name"}, "in which store"),
        ({"enable_weights_track": "yes"}, "must be true or false"),
    ],
)
def test_what_cannot_be_is_refused(config: Any, says: str) -> None:
    with pytest.raises(InvalidSetting, match=says):
        parse_loader_options(config)


def test_a_refusal_lists_what_is_allowed() -> None:
    with pytest.raises(InvalidSetting) as caught:
        parse_loader_options({"speed": 9})
    for key in ("concurrency", "memory_limit", "distributed", "uri", "enable_weights_track"):
        assert key in caught.value.mend


@pytest.mark.parametrize(("text", "wanted"), [("", False), ("0", False), ("no", False), ("1", True), (" True ", True)])
def test_the_takeover_is_asked_for_in_so_many_words(text: str, wanted: bool) -> None:
    assert is_wanted(text) is wanted


def test_a_word_that_says_neither_is_refused() -> None:
    with pytest.raises(InvalidSetting, match="HEADRACE_VLLM is 'maybe'"):
        is_wanted("maybe")
