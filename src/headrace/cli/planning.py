"""What `headrace inspect --plan` says: which bytes a load will ask for, and how long that takes at least. Reads no weight."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.checkpoint import Checkpoint, Entry
from headrace.cli.console import print_rows, print_table
from headrace.cli.inspect import PlanOptions
from headrace.errors import InvalidSetting
from headrace.settings import Settings
from headrace.streaming.forecast import LINKS_BITS_PER_S, Conditions, Forecast, forecast_load
from headrace.streaming.memory import available_memory_bytes
from headrace.streaming.selection import select_entries
from headrace.transport.opening import is_local
from headrace.units import format_bytes, format_seconds


def forecast(checkpoint: Checkpoint, options: PlanOptions, settings: Settings) -> Forecast:
    """Return what a load of ``checkpoint``, which must be open, will do.

    Raises `InvalidSetting` for options that do not go together or leave no tensor, and what the placement of a model raises where a part of one is asked for.
    """
    entries = _entries(checkpoint, options, settings)
    conditions = Conditions(
        num_ranks=options.num_ranks,
        is_local=is_local(checkpoint.store),
        # As `headrace load` and `load_model` do it by default. The plans differ where the memory limit is 0.
        ownership="owned" if options.asks_model else "leased",
        available_bytes=available_memory_bytes(),
    )
    return forecast_load(entries, settings, conditions, bytes_checkpoint=checkpoint.total_bytes)


def print_forecast(found: Forecast) -> None:
    """Print the plan as rows, a table of ranks where there are several, and a table of links."""
    print_rows(_rows(found))
    if len(found.ranks) > 1:
        print()
        ranks = [
            (str(number), format_bytes(rank.bytes_read), f"{rank.num_requests:,}", format_bytes(rank.bytes_received))
            for number, rank in enumerate(found.ranks)
        ]
        print_table(("rank", "read", _requests(found), "read by others"), ranks)
    print()
    columns = ("link", "bytes alone") if found.is_local else ("link", "bytes alone", "with requests")
    links = [
        (f"{link / 1e9:.0f} Gbit/s", format_seconds(found.least_seconds(link)), format_seconds(found.seconds(link)))
        for link in LINKS_BITS_PER_S
    ]
    print_table(columns, [row[: len(columns)] for row in links])


def _rows(found: Forecast) -> list[tuple[str, str]]:
    gaps = f", {format_bytes(found.bytes_in_gaps)} of it between wanted tensors" if found.bytes_in_gaps else ""
    at_once, each = found.ranks[0].num_connections, " of each rank" if len(found.ranks) > 1 else ""
    ways = f"{at_once} {'reader' if found.is_local else 'connection'}{'' if at_once == 1 else 's'}{each}"
    latency = "" if found.is_local else f", {found.request_latency_s * 1000:.0f} ms to an answer's first byte"
    return [
        ("plan", f"{format_bytes(found.bytes_wanted)} in {found.num_tensors:,} tensors are asked for"),
        ("left out", f"{format_bytes(found.bytes_skipped)} are never asked for"),
        ("read", f"{format_bytes(found.bytes_read)} in {found.num_requests:,} {_requests(found)}{gaps}"),
        ("at once", f"{ways}, reads of {format_bytes(found.read_bytes)} at most{latency}"),
    ]


def _requests(found: Forecast) -> str:
    return "system calls" if found.is_local else "requests"


def _entries(checkpoint: Checkpoint, options: PlanOptions, settings: Settings) -> Sequence[Entry]:
    if not options.asks_model:
        return select_entries(checkpoint.entries, include=options.include or None, exclude=options.exclude or None)
    if options.include or options.exclude:
        raise InvalidSetting(
            "--include and --exclude cannot be joined with --as-model, --language-only, --layers or --experts.",
            "A model takes the tensors that its class has parameters for.",
            "Leave either out.",
        )
    from headrace.engines.rehearsal import rehearse_model

    return rehearse_model(
        checkpoint,
        settings=settings,
        language_only=options.language_only,
        layers=_range_of(options.layers),
        experts=_range_of(options.experts),
    )


def _range_of(text: str | None) -> range | None:
    if text is None:
        return None
    start, _, stop = text.partition(":")
    return range(int(start), int(stop))
