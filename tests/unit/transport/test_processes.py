"""What is pure about reader processes: messages, told errors and requests, the status page and places."""

from __future__ import annotations

import json
import os
import socket
import threading

import pytest

from headrace.errors import AccessDenied, InvalidSetting, ReadFailed
from headrace.settings import Settings, TransportSettings
from headrace.storage import HttpRange, Refusal
from headrace.transport.channel import Channel, ChannelClosed, channel_pair
from headrace.transport.processes import parse_place
from headrace.transport.reader import ReadCounters
from headrace.transport.sharing import NUM_SLOTS, StatusPage
from headrace.transport.told import error_of, range_of, refusal_of, tell_error, tell_range, tell_refusal


@pytest.fixture
def channels():
    ours, theirs = channel_pair()
    other = Channel(theirs)
    yield ours, other
    ours.close()
    other.close()


def test_a_message_arrives_with_its_bytes_and_its_descriptors(channels) -> None:
    ours, other = channels
    first, second = os.pipe()
    body = os.urandom(300_000)
    sender = threading.Thread(
        target=lambda: (ours.send({"kind": "a", "text": "é"}, body, [first]), ours.send({"kind": "b"}))
    )
    sender.start()
    message, received, descriptors = other.receive()
    assert (message, received) == ({"kind": "a", "text": "é"}, body)
    os.write(second, b"through")
    assert os.read(descriptors[0], 10) == b"through"
    assert not os.get_inheritable(descriptors[0])
    assert other.receive() == ({"kind": "b"}, b"", [])
    sender.join()
    for descriptor in (first, second, *descriptors):
        os.close(descriptor)


def test_the_end_of_a_channel_is_an_error_of_its_own_on_both_sides(channels) -> None:
    ours, other = channels
    assert not other.can_receive(0)
    ours.close()
    ours.close()
    assert other.can_receive(10)
    with pytest.raises(ChannelClosed):
        other.receive()
    with pytest.raises(ChannelClosed):
        for _ in range(3):
            other.send({})


def test_a_channel_that_is_closed_under_a_thread_that_waits_ends_for_the_other_side(channels) -> None:
    ours, other = channels
    waiting = threading.Thread(target=ours.can_receive, args=(60,))
    waiting.start()
    ours.close()
    with pytest.raises(ChannelClosed):
        other.receive()
    waiting.join(20)
    assert not waiting.is_alive()


def test_what_is_no_message_closes_the_channel(channels) -> None:
    ours, other = channels
    with socket.socket(fileno=os.dup(ours.fileno())) as raw:
        raw.sendall(b"\xff" * 8)
    with pytest.raises(ChannelClosed, match="no message"):
        other.receive()


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (AccessDenied("No.", "The key is old.", "Renew it."), AccessDenied, "No. The key is old. Renew it."),
        (OSError(5, "Input/output error"), OSError, "Input/output error"),
        (ValueError("bad"), ValueError, "bad"),
        (ZeroDivisionError("by 0"), RuntimeError, "ZeroDivisionError: by 0"),
    ],
)
def test_an_error_is_told_by_kind_and_text(error: Exception, kind: type[Exception], text: str) -> None:
    made = error_of(json.loads(json.dumps(tell_error(error))))
    assert type(made) is kind
    assert text in str(made)


def test_an_error_of_another_module_is_told_as_the_nearest_kind_that_is_known() -> None:
    class Special(AccessDenied):
        pass

    made = error_of(tell_error(Special("No.")))
    assert type(made) is AccessDenied


def test_the_cause_of_an_error_is_told_without_what_it_may_quote() -> None:
    error = ReadFailed("It failed.")
    error.__cause__ = KeyError("Authorization: secret")
    assert str(error_of(tell_error(error)).__cause__) == "KeyError"
    error.__cause__ = ConnectionResetError(104, "reset")
    assert "ConnectionResetError" in str(error_of(tell_error(error)).__cause__)


def test_a_kind_that_is_none_of_ours_makes_nothing_else() -> None:
    made = error_of({"kind": "SystemExit", "parts": ["x"], "cause": None, "number": None})
    assert type(made) is RuntimeError
    made = error_of({"kind": "annotations", "parts": ["x"], "cause": None, "number": None})
    assert type(made) is RuntimeError


def test_an_error_keeps_the_number_it_is_found_by() -> None:
    assert tell_error(error_of(tell_error(AccessDenied("No.")), number=7))["number"] == 7


def test_requests_and_refusals_survive_the_way() -> None:
    asked = HttpRange(
        "https", "host", 443, "/a?b", (("Range", "bytes=0-1"), ("X", "y")), 0, 2, '"e"', "/ca.pem", True, ("x-v", "3")
    )
    assert range_of(json.loads(json.dumps(tell_range(asked)))) == asked
    plain = HttpRange("http", "host", 80, "/", (), 0, 2)
    assert range_of(json.loads(json.dumps(tell_range(plain)))) == plain
    refusal = Refusal(503, "Slow down", {"retry-after": "1"}, b"<xml>\xff")
    assert refusal_of(json.loads(json.dumps(tell_refusal(refusal))), refusal.body) == refusal


def test_the_status_page_keeps_the_slots_apart_and_is_seen_by_whoever_maps_it() -> None:
    descriptor = StatusPage.make_file()
    ours, theirs = StatusPage(descriptor), StatusPage(descriptor)
    os.close(descriptor)
    theirs.write(3, ReadCounters(1, 2, 1 << 40, 1.5, 0.25))
    theirs.write(NUM_SLOTS - 1, ReadCounters(9))
    assert ours.read(3) == ReadCounters(1, 2, 1 << 40, 1.5, 0.25)
    assert ours.read(4) == ReadCounters()
    assert ours.read(NUM_SLOTS - 1) == ReadCounters(9)
    ours.close()
    theirs.close()


def test_places_are_interfaces_and_nodes_that_are_there() -> None:
    assert parse_place("") == ("", [])
    assert parse_place("lo") == ("lo", [])
    with pytest.raises(InvalidSetting, match=r"'eth77'.*lo"):
        parse_place("eth77")
    for place in ("@77", "@x"):
        with pytest.raises(InvalidSetting, match="NUMA"):
            parse_place(place)


def test_a_place_on_a_node_names_the_processors_that_may_be_used(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = os.sched_getaffinity(0)
    first = min(allowed)
    (tmp_path / "node0").mkdir()
    (tmp_path / "node0" / "cpulist").write_text(f"{first}-{first},100000-100002\n")
    monkeypatch.setattr("headrace.transport.processes._NODES", tmp_path)
    assert parse_place("lo@0") == ("lo", [first])


def test_the_setting_is_auto_or_a_number() -> None:
    assert Settings.from_environment({}).transport.readers == "auto"
    assert Settings.from_environment({"HEADRACE_READERS": "AUTO"}).transport.readers == "auto"
    assert Settings.from_environment({"HEADRACE_READERS": "4"}).transport.readers == 4
    for bad in (-1, True, "many", 1.5, 100_000):
        with pytest.raises(InvalidSetting, match="readers"):
            TransportSettings(readers=bad)  # type: ignore[arg-type]
    with pytest.raises(InvalidSetting, match="HEADRACE_READERS"):
        Settings.from_environment({"HEADRACE_READERS": "many"})
