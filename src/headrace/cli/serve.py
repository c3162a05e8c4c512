"""`headrace serve`: puts a loader, an engine and a server together, and ends the process with its last words when that
fails."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from headrace.cli.doctor import find_advice
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

if TYPE_CHECKING:
    from headrace.checkpoint import Checkpoint, SideFiles
    from headrace.serving.backend import LoadedModel

logger = logging.getLogger("headrace.serving")

DTYPES = ("auto", "bfloat16", "float16", "float32", "float64")
_DTYPE_SYNONYMS = {"half": "float16", "float": "float32", "double": "float64"}
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
    termination_log: Path = TERMINATION_LOG


def serve(options: ServeOptions) -> int:
    """Serve until told to stop and return the exit code: 0, or 1 where the model could not be served.

    Then the last lines on standard error say why and how to mend it, and so does the termination log. Where a thread
    cannot be ended (a load that hangs in a read, a model in the middle of a long pass), the process is ended here
    instead of waiting for it.
    """
    secrets = _secrets(options)
    configure_logging(secrets=secrets)
    try:
        outcome = _make_server(options).run()
    except HeadraceError as error:
        outcome = Outcome(exit_code=1, error=error)
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


def _make_server(options: ServeOptions) -> Server:
    uri = with_revision(parse_uri(options.uri), options.revision)
    if _DTYPE_SYNONYMS.get(options.dtype, options.dtype) not in DTYPES:
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
        lifecycle=LifecycleSettings(
            load_deadline_s=options.load_deadline_s, load_stall_s=options.load_stall_s, drain_s=options.drain_s
        ),
    )
    if options.api_key is None and options.host not in _LOOPBACK:
        logger.warning("Anybody who reaches %s can use this model: no API key is set.", options.host)
    return Server(settings, _loader(uri, name, options))


def _loader(uri: Uri, name: str, options: ServeOptions) -> Callable[[LoadProgress, Metrics], Backend]:
    """Return what loads the model, in a thread, while the port is open: torch and Transformers are imported there and
    not before."""

    def load(progress: LoadProgress, metrics: Metrics) -> Backend:
        import torch

        from headrace.cli.token_ids import TokenIds
        from headrace.serving.backend import make_backend, make_transformers_engine
        from headrace.serving.hardware import num_usable_cpus
        from headrace.serving.transformers_engine import TransformersEngine

        num_threads = num_usable_cpus()
        torch.set_num_threads(num_threads)
        loaded = _load_model(uri, name, options, progress)
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


def _load_model(uri: Uri, name: str, options: ServeOptions, progress: LoadProgress) -> LoadedModel:
    import headrace
    from headrace.checkpoint.sideopening import open_side_files
    from headrace.engines.routing import UriKind, route
    from headrace.serving.backend import LoadedModel
    from headrace.streaming.formats import LoadFormat
    from headrace.streaming.report import LoadReport

    reports: list[LoadReport] = []
    _check_device(options.device)
    route(LoadFormat.parse(options.load_format), UriKind.of(uri))  # what can never be is said before anything is opened
    source = uri.text or str(uri)
    with ExitStack() as opened:
        checkpoint = None
        if options.load_format == LoadFormat.DUMMY:
            side_files = opened.enter_context(open_side_files(source, settings=options.settings))
        else:
            checkpoint = opened.enter_context(
                headrace.open(source, snapshot=options.snapshot, settings=options.settings, progress=progress)
            )
            side_files = checkpoint.side_files
        with progress.during("side files"):
            side_files.folder()  # once, here; whoever needs one of them after this gets the local folder
        # Before the weights: what is wrong with it is known in a second.
        tokenizer = _load_tokenizer(side_files, options)
        model = headrace.load_model(
            checkpoint or source,
            load_format=options.load_format,
            quantization=options.quantization,
            calibration=options.calibration,
            dequantize=options.dequantize,
            weight_only=options.weight_only,
            language_only=options.language_only,
            extra_config=options.extra_config,
            trust_remote_code=options.trust_remote_code,
            settings=options.settings,
            progress=progress,
            on_report=reports.append,
            **_placing(checkpoint, options),
        )
    return LoadedModel(model=model, tokenizer=tokenizer, name=name, report=reports[0] if reports else None)


def _load_tokenizer(side_files: SideFiles, options: ServeOptions) -> Any:
    """Return the tokenizer that was asked for: the model's, another uri's, or None."""
    from headrace.checkpoint.sideopening import open_side_files
    from headrace.engines.transformers import load_tokenizer

    if options.skip_tokenizer_init:
        return None
    if options.tokenizer_path is None:
        return load_tokenizer(side_files, trust_remote_code=options.trust_remote_code)
    with open_side_files(options.tokenizer_path, settings=options.settings) as others:
        return load_tokenizer(others, trust_remote_code=options.trust_remote_code)


def _placing(checkpoint: Checkpoint | None, options: ServeOptions) -> dict[str, Any]:
    """Return where the model goes and in which dtype, as ``from_pretrained`` takes it. Without weights ``auto`` is what config.json says."""
    import torch

    from headrace.serving.hardware import available_bytes, choose_cpu_dtype, product_seconds

    device = ("cuda" if torch.cuda.is_available() else "cpu") if options.device == "auto" else options.device
    dtype = _DTYPE_SYNONYMS.get(options.dtype, options.dtype)
    if dtype == "auto" and device == "cpu" and checkpoint is not None:
        stored: Counter[str] = Counter()
        for entry in checkpoint.entries.values():
            stored[entry.dtype] += entry.size_bytes
        dtype = choose_cpu_dtype(stored, available=available_bytes(), seconds_of=product_seconds)
        if dtype != "auto":
            logger.info("Computing in %s: on this processor that is faster than the stored dtype.", dtype)
    placing: dict[str, Any] = {"dtype": dtype if dtype == "auto" else getattr(torch, dtype)}
    if device != "cpu":
        placing["device_map"] = {"": device}
    return placing


def _check_device(wanted: str) -> None:
    """Raise `InvalidSetting` for a torch device that is not there: in a second, and not after the checkpoint has been opened."""
    import torch

    if wanted == "auto":
        return
    try:
        torch.empty(1, device=wanted)
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as error:
        raise InvalidSetting(
            f"--device {wanted!r} cannot be used here.",
            f"torch {torch.__version__} says: {str(error).splitlines()[0]}",
            "Use cpu, or install the torch build for that device.",
        ) from error


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
