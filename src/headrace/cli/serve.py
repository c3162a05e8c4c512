"""`headrace serve`: puts a loader, an engine and a server together, and ends the process with its last words when that
fails."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import urlsplit

from headrace.cli.doctor import find_advice
from headrace.cli.parallel import LocalRanks, find_place, follow_launched
from headrace.cli.serve_model import DTYPES, dtype_name, load_served
from headrace.errors import HeadraceError, InvalidSetting
from headrace.progress import LoadProgress
from headrace.serving.failure import TERMINATION_LOG, last_words, redact, write_termination_log
from headrace.serving.gate import GateSettings
from headrace.serving.lifecycle import Backend, LifecycleSettings, Outcome
from headrace.serving.metrics import Metrics
from headrace.serving.server import Server, ServerSettings, check_installed, configure_logging
from headrace.settings import Settings
from headrace.storage.revision import with_revision
from headrace.storage.uri import Uri, parse_uri

logger = logging.getLogger("headrace.serving")

_PARALLEL_FAREWELL_S = 2.0
"""How long a server that has lost a rank still answers 503, in seconds."""
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """What was typed."""

    uri: str
    settings: Settings = field(default_factory=Settings)
    served_model_name: str | None = None
    """None for the last part of the uri."""
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = field(default=None, repr=False)
    load_format: str = "auto"
    """A `headrace.streaming.formats.LoadFormat`."""
    extra_config: str | None = None
    """A JSON object; see `headrace.streaming.formats.ExtraConfig`."""
    quantization: str | None = None
    """The method to insist on, or to quantize a plain model to; None for the checkpoint's."""
    calibration: Path | None = None
    """A file of texts, one a line, to find the scales of a plain model with; None for a few of our own."""
    dequantize: bool = False
    weight_only: bool = False
    language_only: bool = False
    """Leave out the encoders of a multimodal model."""
    dtype: str = "auto"
    """A torch dtype's name, or ``auto``: as stored, but on a CPU the faster of that and float32."""
    device: str = "auto"
    """``auto``, ``cpu``, ``cuda`` or ``cuda:1``."""
    trust_remote_code: bool = False
    revision: str | None = None
    """Of a hub repository."""
    snapshot: str | None = None
    """The id of the snapshot to take; None for what is there now."""
    tokenizer_path: str | None = None
    """A uri whose side files hold the tokenizer; None for the model's."""
    skip_tokenizer_init: bool = False
    """Do without a tokenizer: token ids in, token ids out."""
    load_deadline_s: float | None = None
    """Longest time until the model is ready."""
    load_stall_s: float | None = None
    """Longest time without a byte or a step of the load."""
    drain_s: float = 25.0
    """How long requests may go on after SIGTERM."""
    max_waiting: int = 128
    """Requests that may wait for their turn."""
    num_ranks: int = 1
    """Processes of this machine that compute the model together, each with its part of every layer."""
    termination_log: Path = TERMINATION_LOG


def serve(options: ServeOptions) -> int:
    """Serve until told to stop and return the exit code: 0, or 1 where the model could not be served.

    Then the last lines on standard error say why and how to mend it, and so does the termination log. Where a thread
    cannot be ended (a load that hangs in a read, a model in the middle of a long pass), the process is ended here
    instead of waiting for it.
    """
    secrets = _secrets(options)
    configure_logging(secrets=secrets)
    ranks: LocalRanks | None = None
    try:
        if options.num_ranks > 1:
            place = find_place(options.num_ranks, os.environ)
            if place.rank:
                follow_launched(place, options.device)
            ranks = LocalRanks(place)
            options = replace(options, settings=replace(options.settings, local_ranks=place.num_ranks))
        outcome = _make_server(options, ranks).run()
    except HeadraceError as error:
        outcome = Outcome(exit_code=1, error=error)
    if ranks is not None:
        outcome = replace(outcome, lingering=not ranks.end() or outcome.lingering)
    return conclude(_with_advice(outcome, options), termination_log=options.termination_log, secrets=secrets)


def conclude(outcome: Outcome, *, termination_log: Path, secrets: Sequence[str] = ()) -> int:
    """Say the last words of a server that failed, and return the exit code; or exit here and now where a thread
    lingers."""
    if outcome.error is not None:
        _say_last_words(outcome.error, termination_log, secrets)
    if outcome.lingering:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(outcome.exit_code)
    return outcome.exit_code


def _with_advice(outcome: Outcome, options: ServeOptions) -> Outcome:
    """Return the outcome with the doctor's words at the end of its error, where that is one of the store or of the way to it."""
    error = outcome.error
    advice = None if error is None else find_advice(error, options.uri, options.revision)
    if advice is None or not isinstance(error, HeadraceError):
        return outcome
    mend = "\n".join((error.mend, f"Doctor: {advice[0]}", *advice[1:]))
    return replace(outcome, error=type(error)(error.what, error.why, mend))


def served_name(uri: Uri) -> str:
    """Return the name of a model whose uri is ``uri``: the last part that names anything."""
    if uri.scheme == "hf" and not uri.key:
        return uri.bucket.partition("@")[0].rpartition("/")[2]
    return uri.name or uri.bucket or "model"


def _make_server(options: ServeOptions, ranks: LocalRanks | None = None) -> Server:
    uri = with_revision(parse_uri(options.uri), options.revision)
    if dtype_name(options.dtype) not in DTYPES:
        raise InvalidSetting(f"--dtype {options.dtype!r} is not one.", f"Known are {', '.join(DTYPES)}.")
    if options.snapshot is not None and options.load_format == "dummy":
        raise InvalidSetting(
            "--snapshot cannot be used with --load-format dummy, which reads no weights.", mend="Leave one out."
        )
    if options.tokenizer_path is not None:
        parse_uri(options.tokenizer_path)
        if options.skip_tokenizer_init:
            raise InvalidSetting("--tokenizer-path and --skip-tokenizer-init contradict each other.", mend="Give one.")
    check_installed()
    name = options.served_model_name or served_name(uri)
    settings = ServerSettings(
        host=options.host,
        port=options.port,
        gate=GateSettings(api_key=options.api_key),
        lifecycle=_lifecycle(options),
    )
    if options.api_key is None and options.host not in _LOOPBACK:
        logger.warning("Anybody who reaches %s can use this model: no API key is set.", options.host)
    if ranks is not None:
        return Server(settings, _parallel_loader(uri, name, options, ranks))
    return Server(settings, _loader(uri, name, options))


def _lifecycle(options: ServeOptions) -> LifecycleSettings:
    settings = LifecycleSettings(
        load_deadline_s=options.load_deadline_s, load_stall_s=options.load_stall_s, drain_s=options.drain_s
    )
    # Ranks that have lost one hold the memory of a model that nobody can use.
    return settings if options.num_ranks == 1 else replace(settings, farewell_s=_PARALLEL_FAREWELL_S)


def _parallel_loader(
    uri: Uri, name: str, options: ServeOptions, ranks: LocalRanks
) -> Callable[[LoadProgress, Metrics], Backend]:
    """Return what loads the model on all ranks, of which this process is the first; see `_loader`."""

    def load(progress: LoadProgress, metrics: Metrics) -> Backend:
        from headrace.cli.token_ids import TokenIds
        from headrace.serving.backend import make_backend
        from headrace.serving.tokenizer import HubTokenizer

        ranks.start(options)
        loaded = ranks.during(lambda: load_served(uri, name, options, progress, ranks))
        loaded = replace(loaded, report=ranks.wait_ready(loaded.report))
        return make_backend(
            loaded,
            lambda loaded: (
                ranks.make_engine(loaded),
                HubTokenizer(loaded.tokenizer) if loaded.tokenizer is not None else TokenIds(),
            ),
            progress=progress,
            metrics=metrics,
            max_waiting=options.max_waiting,
        )

    return load


def _loader(uri: Uri, name: str, options: ServeOptions) -> Callable[[LoadProgress, Metrics], Backend]:
    """Return what loads the model, in a thread, while the port is open: torch and Transformers are imported there and
    not before."""

    def load(progress: LoadProgress, metrics: Metrics) -> Backend:
        import torch

        from headrace.cli.token_ids import TokenIds
        from headrace.serving.backend import make_backend, make_transformers_engine
        from headrace.serving.hardware import num_compute_threads
        from headrace.serving.transformers_engine import TransformersEngine

        num_threads = num_compute_threads()
        torch.set_num_threads(num_threads)
        loaded = load_served(uri, name, options, progress)
        return make_backend(
            loaded,
            lambda loaded: (
                make_transformers_engine(loaded, num_threads=num_threads)
                if loaded.tokenizer is not None
                else (TransformersEngine(loaded.model, None, num_threads=num_threads), TokenIds())
            ),
            progress=progress,
            metrics=metrics,
            max_waiting=options.max_waiting,
        )

    return load


def _secrets(options: ServeOptions) -> list[str]:
    """Return what must not be printed: the key, and what a signed URL carries."""
    query = urlsplit(options.uri).query if "://" in options.uri else ""
    return [secret for secret in (options.api_key, query) if secret]


def _say_last_words(error: BaseException, path: Path, secrets: Sequence[str]) -> None:
    if not isinstance(error, HeadraceError):
        trace = "".join(traceback.format_exception(error))
        print(redact(trace, secrets), file=sys.stderr)
    words = last_words(error, secrets=secrets)
    print(words, file=sys.stderr, flush=True)
    write_termination_log(words, path)
