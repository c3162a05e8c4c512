"""Whether this machine's clock agrees with the store's, from the Date of an answer; and whether the store speaks HTTP at all."""

from __future__ import annotations

from datetime import UTC
from email.utils import parsedate_to_datetime

from headrace.doctor.asking import NETWORK_FAILURES, Ask, ask, words_for
from headrace.doctor.finding import Finding, failed, ok, skipped, warning
from headrace.doctor.world import World
from headrace.settings import TransportSettings
from headrace.storage import HttpRange
from headrace.transport.connection import Origin
from headrace.units import format_seconds

STEP = "clock"

MOST_SKEW_S = 300.0
"""More than this is an error. Amazon S3 and Azure allow fifteen minutes, other services and stores five."""
_NOTED_SKEW_S = 60.0
_SIGNED = ("s3", "gs", "az")


def examine_clock(
    origin: Origin, kind: str, transport: TransportSettings, world: World, *, is_anonymous: bool, ask: Ask = ask
) -> Finding:
    """Ask the store's front page, without credentials, and compare its Date with this machine's clock. Any answer will do."""
    headers = (("Accept", "*/*"), ("Accept-Encoding", "identity"), ("User-Agent", "headrace doctor"))
    asked = HttpRange(
        scheme=origin.scheme,
        host=origin.host,
        port=origin.port,
        target="/",
        headers=headers,
        start=0,
        stop=1,
        ca_file=origin.ca_file,
        verify_tls=origin.verify_tls,
    )
    before = world.wall_clock()
    try:
        reply = ask(asked, transport, world.surroundings)
    except NETWORK_FAILURES as error:
        return failed(
            STEP,
            f"{origin.scheme}://{origin.host_header} gives no answer to a request.",
            f"The connection is made, but {words_for(error)}.",
            "Check that this port is the store's: one that speaks TLS wants https:// in the endpoint, and a console or another program may listen there.",
        )
    after = world.wall_clock()
    if reply.status == 400 and origin.scheme == "http" and b"HTTPS" in reply.refusal.body.upper():
        return failed(
            STEP,
            f"http://{origin.host_header} speaks TLS.",
            "It answers that plain HTTP was sent to a port for HTTPS.",
            "Write https:// in the endpoint.",
        )
    theirs = seconds_of(reply.refusal.headers.get("date", ""))
    if theirs is None:
        return skipped(STEP, f"{origin.host_header} does not say what time it is (no Date in its answer).")
    server = reply.refusal.headers.get("server", "")
    details = [("server", server)] if server else []
    return judge_skew(skew_of(theirs, before, after), kind, details, is_anonymous=is_anonymous)


def seconds_of(date: str) -> float | None:
    """Return an HTTP date in seconds since 1970; None for what is none."""
    try:
        parsed = parsedate_to_datetime(date)
    except ValueError:
        return None
    return (parsed if parsed.tzinfo is not None else parsed.replace(tzinfo=UTC)).timestamp()


def skew_of(theirs: float, before: float, after: float) -> float:
    """Return how far this machine is ahead of the store, in seconds, at least; negative where it is behind.

    A Date has whole seconds, and was written at some moment between the request and the answer's arrival.
    """
    if theirs + 1.0 < before:
        return before - (theirs + 1.0)
    return min(0.0, after - theirs)


def judge_skew(skew_s: float, kind: str, details: list[tuple[str, str]], *, is_anonymous: bool) -> Finding:
    """Return what a difference of clocks means for a store of this kind."""
    size = abs(skew_s)
    way = "ahead of" if skew_s > 0 else "behind"
    mend = "Set this machine's clock (chrony, systemd-timesyncd); a container has that of its host, a machine that was suspended may have an old one."
    if size > MOST_SKEW_S and kind in _SIGNED and not is_anonymous:
        return failed(
            STEP,
            f"This machine's clock is {format_seconds(size)} {way} the store's.",
            "Signatures and tokens hold the time, and are refused where it is off by more than a few minutes.",
            mend,
            details,
        )
    if size > _NOTED_SKEW_S:
        return warning(
            STEP,
            f"This machine's clock is {format_seconds(size)} {way} the store's.",
            "Signatures, signed addresses and certificates hold times, and are refused where clocks differ by much.",
            mend,
            details,
        )
    return ok(STEP, "The clocks agree." if size < 1 else f"The clocks agree to {format_seconds(size)}.", details)
