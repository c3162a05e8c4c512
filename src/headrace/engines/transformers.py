"""Transformers over the stream: ``load_model(uri)`` is ``from_pretrained`` whose weights arrive from a store and become the parameters themselves."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from headrace.checkpoint import Checkpoint, Entry
from headrace.errors import InvalidSetting, MissingDependency, PlacementError
from headrace.settings import Settings
from headrace.streaming import LoadProgress, LoadReport, ProgressDisplay, Source, StreamOptions, TensorStream
from headrace.streaming import open as open_source

try:
    import transformers
    from transformers import AutoProcessor, AutoTokenizer, GenerationConfig

    from headrace.engines.architecture import find_model_class, load_config
    from headrace.engines.conversion import LazyValue, LoadWeights, PlacingClass, plan_placement, unfilled_names
except ImportError as error:
    raise MissingDependency(
        "Loading a model needs Transformers.",
        f"Importing it failed: {error}.",
        'Install it with: pip install "headrace[transformers]"',
    ) from error

from headrace.engines.placement import Placement, check_ledger, check_placement

logger = logging.getLogger("headrace")

_LOADER_OPTIONS = frozenset(
    [
        *(
            "adapter_kwargs",
            "attn_implementation",
            "experts_implementation",
            "fusion_config",
            "kernel_config",
            "use_kernels",
            "allow_all_kernels",
        ),
        *(
            "device_map",
            "device_mesh",
            "distributed_config",
            "max_memory",
            "offload_buffers",
            "offload_folder",
            "tp_plan",
            "tp_size",
        ),
        *("dtype", "torch_dtype", "quantization_config", "generation_config"),
        *("ignore_mismatched_sizes", "key_mapping", "output_loading_info", "weights_only"),
    ]
)
"""Keywords of ``from_pretrained`` that are about loading; all others may be fields of the configuration."""
_MEANINGLESS_OPTIONS = frozenset(
    [
        *("cache_dir", "force_download", "local_files_only", "proxies", "resume_download", "token", "use_auth_token"),
        *("low_cpu_mem_usage", "use_safetensors"),
    ]
)
"""Keywords about the hub and its cache, which this path does not use."""
_REFUSED_OPTIONS = {
    "state_dict": "The weights come from the uri.",
    "gguf_file": "GGUF files are not streamed.",
    "variant": "Name the variant's files by their own uri.",
    "from_tf": "TensorFlow weights are not read.",
    "from_flax": "Flax weights are not read.",
}


def load_model(
    source: Source,
    *,
    auto_class: Any = None,
    trust_remote_code: bool = False,
    revision: str | None = None,
    subfolder: str = "",
    strict: bool = True,
    settings: Settings | None = None,
    progress: LoadProgress | None = None,
    on_report: Callable[[LoadReport], None] | None = None,
    **options: Any,
) -> Any:
    """Return the model at ``source`` as ``from_pretrained`` would, its weights streamed: no weight file is written, no tensor is copied that need not be.

    ``options`` are ``from_pretrained``'s own (``dtype``, ``device_map``, ``attn_implementation``, ``quantization_config``, ``output_loading_info``, fields of the
    configuration, …). ``auto_class`` is an Auto class or a model class; by default config.json's ``architectures`` decides. Where the stored dtype and the model's
    agree and the target is the CPU, the parameters are the streamed tensors. For another device host memory stays within the read-ahead budget plus the largest
    tensor. With ``strict`` (default) every parameter and persistent buffer must be filled exactly once, or tied; otherwise what is missing is initialised by the class, and
    what is unexpected is left out, each with a warning.

    Raises `PlacementError` before the first weight byte where names or shapes do not fit, `UnknownArchitecture`, and everything that opening and streaming raise.
    """
    settings = settings or Settings.from_environment()
    progress = progress or LoadProgress()
    _check_options(options, revision)
    if subfolder:
        source = _child(source, subfolder)
    with ProgressDisplay(progress, enabled=settings.progress):
        checkpoint = open_source(source, settings=settings, progress=progress)
        try:
            load = _ModelLoad(
                checkpoint,
                settings=settings,
                progress=progress,
                strict=strict,
                tolerate_mismatch=bool(options.get("ignore_mismatched_sizes")),
            )
            model = load.run(options, auto_class=auto_class, trust_remote_code=trust_remote_code)
        finally:
            if checkpoint is not source:
                checkpoint.close()
    if on_report is not None:
        on_report(load.report())
    return model


def load_tokenizer(checkpoint: Checkpoint, *, trust_remote_code: bool = False, **options: Any) -> Any:
    """Return the tokenizer in the checkpoint's side files."""
    return AutoTokenizer.from_pretrained(
        _folder(checkpoint), trust_remote_code=trust_remote_code, local_files_only=True, **options
    )


def load_processor(checkpoint: Checkpoint, *, trust_remote_code: bool = False, **options: Any) -> Any:
    """Return the processor (images, audio, text) in the checkpoint's side files."""
    return AutoProcessor.from_pretrained(
        _folder(checkpoint), trust_remote_code=trust_remote_code, local_files_only=True, **options
    )


class _ModelLoad:
    """One load: side files, class, placement, stream, ledger."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        settings: Settings,
        progress: LoadProgress,
        strict: bool,
        tolerate_mismatch: bool,
    ) -> None:
        self._checkpoint = checkpoint
        self._settings = settings
        self._progress = progress
        self._strict = strict
        self._tolerate_mismatch = tolerate_mismatch
        self._stream: TensorStream | None = None
        self._placement: Placement | None = None
        self._source = str(checkpoint.uri)
        self._class_name = ""

    def run(self, options: dict[str, Any], *, auto_class: Any, trust_remote_code: bool) -> Any:
        with self._progress.during("side files"):
            folder = _folder(self._checkpoint)
        with self._progress.during("planning"):
            own = {name: value for name, value in options.items() if name in _LOADER_OPTIONS}
            fields = {
                name: value for name, value in options.items() if name not in _LOADER_OPTIONS | _MEANINGLESS_OPTIONS
            }
            config, rest = load_config(folder, source=self._source, trust_remote_code=trust_remote_code, options=fields)
            found = find_model_class(
                config, folder, source=self._source, trust_remote_code=trust_remote_code, auto_class=auto_class
            )
            self._class_name = found.__name__
            own.setdefault("generation_config", _generation_config(folder, found))
            values = {name: LazyValue(entry, self._take) for name, entry in self._checkpoint.entries.items()}
        try:
            result = PlacingClass(found, self._fill).from_pretrained(
                None, config=config, state_dict=values, **own, **rest
            )
        finally:
            if self._stream is not None:
                self._stream.close()
        model = result[0] if isinstance(result, tuple) else result
        self._settle(model)
        return result

    def report(self) -> LoadReport:
        assert self._stream is not None
        return replace(self._stream.report, phases=dict(self._progress.phases))

    def _fill(self, model: Any, config: Any, load_weights: LoadWeights) -> tuple[Any, Any]:
        """Place, check, stream: what happens between the building of the meta model and its being complete."""
        with self._progress.during("planning"):
            placement = plan_placement(model, config, self._checkpoint.entries)
            self._placement = self._checked(placement)
            self._stream = TensorStream(
                self._checkpoint, placement.order, settings=self._settings, progress=self._progress
            )
        values = {entry.name: LazyValue(entry, self._take) for entry in placement.order}
        gc.collect()  # the rehearsal's model is cyclic
        with self._progress.during("weights"):
            return load_weights(model, values, config)

    def _take(self, entry: Entry) -> torch.Tensor:
        if self._stream is None:
            raise PlacementError(
                f"The value of {entry.name} was asked for before the placement was known.",
                f"{self._class_name} loads weights in a way of its own.",
                "Load this model from a local folder with Transformers, and please report its class.",
            )
        return self._stream.take(entry.name)

    def _checked(self, placement: Placement) -> Placement:
        lenient = placement
        if not self._strict:
            for what, names in (
                ("missing, initialised by the class", placement.missing),
                ("unexpected, left out", placement.unexpected),
            ):
                if names:
                    logger.warning(
                        "%s in %s: %d tensors %s",
                        self._source,
                        self._class_name,
                        len(names),
                        f"{what}: {', '.join(names[:20])}",
                    )
            lenient = replace(placement, missing=(), unexpected=())
        check_placement(
            lenient, source=self._source, model_class=self._class_name, tolerate_mismatch=self._tolerate_mismatch
        )
        if placement.ignored:
            logger.info(
                "%s: %d tensors that %s does not need are not read",
                self._source,
                len(placement.ignored),
                self._class_name,
            )
        return placement

    def _settle(self, model: Any) -> None:
        """Check the ledger, and let the model say where it came from, as it does after loading from a folder."""
        assert self._stream is not None and self._placement is not None
        with self._progress.during("finishing"):
            left = set(self._stream.names_left)
            taken = [entry.name for entry in self._placement.order if entry.name not in left]
            check_ledger(taken=taken, placement=self._placement, unfilled=unfilled_names(model), source=self._source)
            model.config.name_or_path = self._source
            model.name_or_path = self._source


def _stream_options(device_map: Mapping[str, Any] | None) -> StreamOptions:
    """Return leased memory, pinned for CUDA, where every parameter is copied to another device; memory of its own for each tensor where one may stay."""
    devices = {torch.device(place) if place != "disk" else None for place in (device_map or {}).values()}
    if not devices or None in devices or any(device.type == "cpu" for device in devices if device is not None):
        return StreamOptions()
    return StreamOptions(ownership="leased", device=next(device for device in devices if device is not None))


def _check_options(options: Mapping[str, Any], revision: str | None) -> None:
    for name, why in _REFUSED_OPTIONS.items():
        if options.get(name):
            raise InvalidSetting(f"{name} cannot be used with load_model.", why)
    if revision not in (None, "main"):
        raise InvalidSetting(
            f"revision={revision!r} cannot be used with this uri.",
            "Only hub repositories have revisions; a bucket's objects are pinned as they are when opened.",
        )


def _child(source: Source, subfolder: str) -> Source:
    if isinstance(source, Checkpoint):
        raise InvalidSetting("subfolder cannot be used with an open checkpoint.", mend="Open the sub-folder's own uri.")
    return f"{str(source).rstrip('/')}/{subfolder.strip('/')}"


def _folder(checkpoint: Checkpoint) -> Path:
    return checkpoint.side_files.folder()


def _generation_config(folder: Path, model_class: Any) -> Any:
    """Return what ``from_pretrained`` would read itself if it were given the folder: generation_config.json, else what config.json says of it."""
    if not getattr(model_class, "can_generate", lambda: False)():
        return None
    if (folder / "generation_config.json").is_file():
        return GenerationConfig.from_pretrained(folder, local_files_only=True)
    return GenerationConfig.from_pretrained(
        folder, config_file_name="config.json", local_files_only=True, _from_model_config=True
    )


TRANSFORMERS_VERSION: str = transformers.__version__
"""The version that loads; its private names are pinned by a contract test."""
