"""A rank other than the first of `headrace serve --tp`: loads its part of the model when rank 0 says so, and computes with it until rank 0 is done, or gone. Says nothing itself."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, NoReturn

from headrace.cli.parallel import forget_rendezvous, join_group
from headrace.cli.ranks import sendable
from headrace.progress import LoadProgress
from headrace.storage.revision import with_revision
from headrace.storage.uri import parse_uri

if TYPE_CHECKING:
    from headrace.cli.serve import ServeOptions
    from headrace.streaming.report import LoadReport


class Inbox:
    """What rank 0 says, in order. Its end ends this process at once, whatever it is at: it may be in a collective that nobody comes to any more."""

    def __init__(self, connection: Connection, clean_up: Callable[[], None]) -> None:
        self._connection = connection
        self._clean_up = clean_up
        self._messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._listen, name="headrace-rank-0", daemon=True).start()

    def receive(self) -> Any:
        """Return the next message; None is the last."""
        return self._messages.get()

    def _listen(self) -> None:
        message: Any = True
        while message is not None:
            try:
                message = self._connection.recv()
            except (EOFError, OSError):
                self._clean_up()
                os._exit(1)
            self._messages.put(message)


def follow_rank_0(
    connection: Connection, join: Callable[[], int], *, clean_up: Callable[[], None] = lambda: None
) -> int:
    """Do what rank 0 says over ``connection``, in the group that ``join`` joins; return the exit code once it says that there is no more. A failure is told to rank 0.

    Where rank 0 ends without a word, ``clean_up`` is called before this process ends, too.
    """
    from headrace.serving.followers import Failed, Ready

    # Who ends the server ends rank 0, which lets requests end first, and this process after them.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    inbox = Inbox(connection, clean_up)
    try:
        num_threads = join()
        # While rank 0 imports them as well, and looks at the checkpoint.
        import headrace.engines.transformers  # noqa: F401
        from headrace.serving.parallel_engine import follow
        from headrace.streaming.processgroup import GroupLink

        options = inbox.receive()
        if options is None:
            return 0
        model, report = _load(options)
        connection.send(Ready(report))
        follow(model, inbox.receive, GroupLink(), num_threads=num_threads)
    except BaseException as error:  # noqa: BLE001  Rank 0 says it.
        with contextlib.suppress(OSError):
            connection.send(Failed(sendable(error)))
        return 1
    return 0


def quieten() -> None:
    """Let this process print nothing but what kills it: what it would say rank 0 says as well."""
    logging.basicConfig(level=logging.ERROR, force=True)
    logging.getLogger("headrace").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def main() -> None:
    """Run a rank whose connection is the descriptor that is the one argument."""
    quieten()
    connection = Connection(int(sys.argv[1]))
    place, device = connection.recv()
    code = follow_rank_0(
        connection, lambda: join_group(place, device), clean_up=lambda: forget_rendezvous(place.rendezvous)
    )
    end_process(code)


def end_process(code: int) -> NoReturn:
    """End this process, whatever the threads of its group are at: nobody waits for them any more."""
    sys.stderr.flush()
    os._exit(code)


def _load(options: ServeOptions) -> tuple[Any, LoadReport | None]:
    from headrace.cli.serve_model import load_weights, opened_source

    reports: list[LoadReport] = []
    progress = LoadProgress()
    uri = with_revision(parse_uri(options.uri), options.revision)
    with opened_source(uri, options, progress) as (source, _):
        model = load_weights(source, options, progress, on_report=reports.append)
    return model, (reports[0] if reports else None)
