"""The model that `headrace serve` serves, loaded as was typed: its source, its tokenizer, its dtype and its weights. Imports torch and Transformers when it is called, not before."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from headrace.cli.parallel import LocalRanks, parallel_options
from headrace.errors import InvalidSetting
from headrace.progress import LoadProgress
from headrace.storage.uri import Uri

if TYPE_CHECKING:
    from headrace.checkpoint import Checkpoint, SideFiles
    from headrace.cli.serve import ServeOptions
    from headrace.serving.backend import LoadedModel
    from headrace.streaming.report import LoadReport

logger = logging.getLogger("headrace.serving")

DTYPES = ("auto", "bfloat16", "float16", "float32", "float64")
_SYNONYMS = {"half": "float16", "float": "float32", "double": "float64"}


def dtype_name(typed: str) -> str:
    """Return torch's name of a dtype that other servers call otherwise."""
    return _SYNONYMS.get(typed, typed)


def load_served(
    uri: Uri, name: str, options: ServeOptions, progress: LoadProgress, ranks: LocalRanks | None = None
) -> LoadedModel:
    """Return the model that is served, its tokenizer and the account of its load; ``ranks``, where there are more, are told to load their parts meanwhile."""
    from headrace.engines.routing import UriKind, route
    from headrace.serving.backend import LoadedModel
    from headrace.streaming.formats import LoadFormat

    reports: list[LoadReport] = []
    _check_device(options.device)
    route(LoadFormat.parse(options.load_format), UriKind.of(uri))  # what can never be is said before anything is opened
    with opened_source(uri, options, progress) as (source, side_files):
        # Before the weights: what is wrong with it is known in a second.
        tokenizer = _load_tokenizer(side_files, options)
        checkpoint = None if isinstance(source, str) else source
        options = replace(options, dtype=_choose_dtype(checkpoint, options))
        if ranks is not None:
            ranks.tell_order(options)
        model = load_weights(source, options, progress, on_report=reports.append)
    return LoadedModel(model=model, tokenizer=tokenizer, name=name, report=reports[0] if reports else None)


@contextmanager
def opened_source(
    uri: Uri, options: ServeOptions, progress: LoadProgress
) -> Iterator[tuple[Checkpoint | str, SideFiles]]:
    """Yield what to load from, and its side files, which are local from then on: the open checkpoint, or the uri where no weights are read."""
    import headrace
    from headrace.checkpoint.sideopening import open_side_files
    from headrace.streaming.formats import LoadFormat

    text = uri.text or str(uri)
    with ExitStack() as opened:
        source: Checkpoint | str = text
        if options.load_format == LoadFormat.DUMMY:
            side_files = opened.enter_context(open_side_files(text, settings=options.settings))
        else:
            source = opened.enter_context(
                headrace.open(text, snapshot=options.snapshot, settings=options.settings, progress=progress)
            )
            side_files = source.side_files
        with progress.during("side files"):
            side_files.folder()  # once, here; whoever needs one of them after this gets the local folder
        yield source, side_files


def load_weights(
    source: Checkpoint | str,
    options: ServeOptions,
    progress: LoadProgress,
    *,
    on_report: Callable[[LoadReport], None],
) -> Any:
    """Return the model as the options say, whose dtype has been chosen: alike on every rank, where there are several."""
    import headrace

    return headrace.load_model(
        source,
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
        on_report=on_report,
        **_placing(options),
        **(parallel_options(options) if options.num_ranks > 1 else {}),
    )


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


def _choose_dtype(checkpoint: Checkpoint | None, options: ServeOptions) -> str:
    """Return the name of the torch dtype to compute in, or ``auto`` for the stored one; without weights that is what config.json says."""
    from headrace.serving.hardware import available_bytes, choose_cpu_dtype, product_seconds

    dtype = dtype_name(options.dtype)
    if dtype == "auto" and _device(options) == "cpu" and checkpoint is not None:
        stored: Counter[str] = Counter()
        for entry in checkpoint.entries.values():
            stored[entry.dtype] += entry.size_bytes
        dtype = choose_cpu_dtype(stored, available=available_bytes(), seconds_of=product_seconds)
        if dtype != "auto":
            logger.info("Computing in %s: on this processor that is faster than the stored dtype.", dtype)
    return dtype


def _placing(options: ServeOptions) -> dict[str, Any]:
    """Return where the model goes and in which dtype, as ``from_pretrained`` takes it. Ranks have a device each, which Transformers finds."""
    import torch

    placing: dict[str, Any] = {"dtype": options.dtype if options.dtype == "auto" else getattr(torch, options.dtype)}
    device = _device(options)
    if device != "cpu" and options.num_ranks == 1:
        placing["device_map"] = {"": device}
    return placing


def _device(options: ServeOptions) -> str:
    import torch

    return ("cuda" if torch.cuda.is_available() else "cpu") if options.device == "auto" else options.device


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
