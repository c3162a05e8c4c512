"""SGLang's loader over the stream: SGLang's own `DefaultModelLoader`, whose weights come from `headrace.streaming`. Written against SGLang 0.5.23.

The base class builds the model, asks for the weights of one source after another (the model's own, secondary ones), and does the rest: quantized post-processing, reload and
weight update. Only where a source's tensors come from is ours. SGLang asks for them in two ways, by `load_model` and, for a weight update, by `_get_weights_iterator` of a loader
that it makes anew with a fresh configuration.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from sglang.srt.configs.device_config import DeviceConfig
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.model_loader.loader import DefaultModelLoader
from sglang.srt.model_loader.weight_utils import RUNAI_STREAMER_TENSOR_ATTR
from sglang.srt.utils import is_cuda_alike

from headrace.checkpoint import Checkpoint, open_checkpoint
from headrace.engines.engine_coverage import Coverage
from headrace.engines.engine_folder import read_source
from headrace.engines.engine_names import matching_keys
from headrace.engines.engine_ranks import Opened, StreamTerms, open_stream
from headrace.engines.sglang_options import parse_loader_options
from headrace.engines.sglang_parallel import find_link, num_local_ranks, published_checksum, published_extra_config
from headrace.engines.sglang_sources import forgotten_files, is_quantized_while_loading
from headrace.errors import CheckpointError, InvalidSetting, PlacementError, UnsupportedQuantization
from headrace.settings import Settings
from headrace.storage import Uri, is_object_uri, open_store, parse_uri
from headrace.storage.revision import with_revision
from headrace.streaming import DistributedStream, LoadProgress, ProgressDisplay, StreamOptions, TensorSource

_LOG = logging.getLogger("headrace")

_MOST_NAMES = 8
_OUR_FORMATS = frozenset({"headrace", "runai_streamer"})

WeightsIterator = Iterator[tuple[str, torch.Tensor]]
Opening = Callable[[LoadProgress], Checkpoint]


@dataclass(frozen=True, slots=True)
class _Origin:
    """Where a source's weights are."""

    uri: Uri
    snapshot: str | None = None
    """The snapshot that the configuration was read from; None: what is in the store now."""


@dataclass(slots=True)
class _Load:
    """What the loader knows of the load that it is asked for."""

    config: Any = None
    """SGLang's configuration of the model."""
    is_first: bool = False
    """Whether a model is built and filled, not one that runs filled again."""
    checkpoint: Checkpoint | None = None
    """What was opened last."""
    stream: TensorSource | None = None


class HeadraceLoader(DefaultModelLoader):  # type: ignore[misc]  # SGLang is not there when types are checked
    """Fills a model from any store that Headrace knows. One is made for each load or update; one thread uses it."""

    # The base class sets them.
    load_config: Any
    counter_before_loading_weights: float

    def __init__(self, load_config: LoadConfig) -> None:
        """Read nothing yet. Raises `InvalidSetting` for an extra configuration that cannot be.

        An update comes without one: then what SGLang was started with counts, but for ``uri``, which was about the model of the start.
        """
        given = load_config.model_loader_extra_config
        if not given:
            given = {key: value for key, value in published_extra_config(_OUR_FORMATS).items() if key != "uri"}
        self.options = parse_loader_options(given)
        beneath = copy.copy(load_config)
        beneath.model_loader_extra_config = {}
        super().__init__(beneath)
        self.load_config = load_config
        self._load = _Load()

    # -- what SGLang calls

    def load_model(self, *, model_config: ModelConfig, device_config: DeviceConfig) -> torch.nn.Module:
        """Return the model, built and filled. What goes wrong anywhere ends the reading here, and is told to the ranks that read together with this one.

        Raises `PlacementError` where a part of a layer's weights has not come, `UnsupportedQuantization` where the model is to be quantized from a folder while it is
        loaded, and what opening and streaming raise.
        """
        self._check_quantization(model_config)
        self._load.config, self._load.is_first = model_config, True
        try:
            model: torch.nn.Module = super().load_model(model_config=model_config, device_config=device_config)
            return model
        finally:
            self._load.is_first = False

    def load_weights_and_postprocess(
        self, model: torch.nn.Module, weights: WeightsIterator, target_device: torch.device
    ) -> None:
        """Fill ``model`` with ``weights``. SGLang calls this for a weight update, too, which may be of a part of the model."""
        try:
            if not self._load.is_first:
                DefaultModelLoader.load_weights_and_postprocess(model, weights, target_device)
                return
            coverage = Coverage(model, has_vocabulary=_wants_vocabulary(self._load.config))
            with coverage:
                DefaultModelLoader.load_weights_only(model, weights, target_device)
            self._check_filled(coverage.gaps())
            DefaultModelLoader.postprocess_weights(model, target_device)
        except BaseException as error:
            self._stop(error)
            raise

    def download_model(self, model_config: ModelConfig) -> None:
        """Open the checkpoint, which checks it. Nothing is written to the disk: weights are streamed."""
        self._load.config = model_config
        origin = self._origin(DefaultModelLoader.Source(model_config.model_path, model_config.revision))
        open_checkpoint(origin.uri, snapshot=origin.snapshot, settings=self._settings()).close()

    def _get_weights_iterator(self, source: DefaultModelLoader.Source, **resolved: Any) -> WeightsIterator:
        """Return the tensors of ``source`` under the checkpoint's names. The checkpoint is opened and checked before this returns, when no weight has been touched yet.

        ``resolved`` is for overlapping the load with the start, which SGLang does with its own loader only.
        """
        if published_checksum() is not None:
            raise InvalidSetting(
                "model_checksum cannot be used with Headrace.",
                "It is about files in a local folder.",
                "Leave it out; every read is of the one snapshot that was opened.",
            )
        if self.counter_before_loading_weights == 0.0:
            self.counter_before_loading_weights = time.perf_counter()
        settings, progress = self._settings(), LoadProgress()
        origin = self._origin(source)
        first, *others = self._openings(origin, source, settings)
        stream = self._open(first, settings, progress)
        if source.allow_patterns_overrides is None:
            others = self._forgotten(source)
        weights = self._tensors(stream, others, settings, progress)
        index = self.load_config.draft_model_idx
        if index is not None:
            chosen: WeightsIterator = self._filter_mtp_weights(weights, source.prefix, index)
            return chosen
        return _prefixed(weights, source.prefix)

    # -- where a source is

    def _origin(self, source: DefaultModelLoader.Source) -> _Origin:
        """Return where the weights of ``source`` are: a folder of side files is mapped back to the uri that it stands for."""
        text = str(source.model_or_path)
        config = source.model_config or self._load.config
        stated = getattr(config, "model_weights", None)
        model = parse_uri(stated) if stated and is_object_uri(stated) else None
        pinned = read_source(text)
        if pinned is not None:
            # As the user gave it, it may be signed.
            return _Origin(
                model if model is not None and str(model) == str(pinned.uri) else pinned.uri, pinned.snapshot_id
            )
        if not is_object_uri(text) and Path(text).is_dir():
            self._check_folder(text)
            elsewhere = None if _holds_weights(text) else self.options.uri or model
            return _Origin(elsewhere or parse_uri(text))
        uri = parse_uri(text)
        if uri.scheme == "hf" and "@" not in uri.bucket and source.revision is not None:
            uri = with_revision(uri, str(source.revision))
        return _Origin(uri)

    def _check_folder(self, folder: str) -> None:
        if self.options.uri is not None and _holds_weights(folder):
            raise InvalidSetting(
                f"model_loader_extra_config says uri, and {folder} holds weights itself.",
                "Only one of them can be meant.",
                "Leave uri out, or give a folder with nothing but side files.",
            )

    def _openings(self, origin: _Origin, source: DefaultModelLoader.Source, settings: Settings) -> list[Opening]:
        """Return what opens each checkpoint of ``source``: one, or each file that a model names by patterns of its own."""
        patterns = source.allow_patterns_overrides
        if patterns is None:
            return [partial(_open_whole, origin, settings)]
        with closing(open_store(replace(origin.uri, text=f"{origin.uri}/"), settings=settings)) as store:
            keys = matching_keys(store, patterns)
        others = [key for key in keys if not key.endswith(".safetensors")]
        if others or not keys:
            raise CheckpointError(
                f"The model wants weights of {origin.uri} that match {', '.join(patterns)}.",
                f"There is {others[0]}, which is not a safetensors file." if others else "There is no such file.",
                "Convert them to safetensors and upload them, or load the model from a local folder with --load-format auto.",
            )
        return [partial(_open_file, origin.uri.child(key), settings) for key in keys]

    def _forgotten(self, source: DefaultModelLoader.Source) -> list[Opening]:
        """Return what opens the files beside the checkpoint that SGLang takes although its index does not name them."""
        checkpoint = self._load.checkpoint
        assert checkpoint is not None
        wanted = [
            key
            for key in forgotten_files(getattr(source.model_config, "hf_config", None))
            if key not in checkpoint.files
        ]
        there = {one.key for one in checkpoint.store.list_level().objects} if wanted else set()
        found = [key for key in wanted if key in there]
        if found:
            _LOG.warning(
                "%s: the index does not name %s, which SGLang loads all the same.", checkpoint.uri, ", ".join(found)
            )
        return [partial(_open_file, checkpoint.store.uri.child(key), self._settings()) for key in found]

    # -- the stream

    def _open(self, opening: Opening, settings: Settings, progress: LoadProgress) -> TensorSource | None:
        def prepare() -> Opened:
            checkpoint = self._load.checkpoint = opening(progress)
            return Opened(checkpoint, tuple(checkpoint.entries.values()))

        terms = StreamTerms(
            options=StreamOptions(ownership="leased", device="cuda" if is_cuda_alike() else "cpu"),
            settings=settings,
            progress=progress,
            distributed=self.options.extra.distributed,
        )
        self._load.stream = open_stream(prepare, find_link(self.load_config.load_group), terms)
        return self._load.stream

    def _tensors(
        self, stream: TensorSource | None, others: list[Opening], settings: Settings, progress: LoadProgress
    ) -> WeightsIterator:
        with ProgressDisplay(progress, enabled=settings.progress):
            while True:
                if stream is not None:
                    with stream, progress.during("weights"):
                        for name, tensor in stream:
                            for marked in (tensor, tensor.untyped_storage()):
                                setattr(marked, RUNAI_STREAMER_TENSOR_ATTR, True)
                            yield name, tensor
                            del tensor, marked  # else it would be held while the next is awaited
                    self._load.stream = None
                    self._say(stream)
                if not others:
                    return
                stream = self._open(others.pop(0), settings, progress)

    def _say(self, stream: TensorSource) -> None:
        link = find_link(self.load_config.load_group)
        if link is None or link.rank == 0 or not isinstance(stream, DistributedStream):
            _LOG.info("Headrace: %s", "; ".join(f"{label} {value}" for label, value in stream.report.rows()))

    def _settings(self) -> Settings:
        """Return the environment's settings with what the extra configuration says, for this rank's share of the machine."""
        settings = self.options.extra.applied_to(Settings.from_environment())
        local_ranks = num_local_ranks()
        return settings.changed("SGLang", local_ranks=local_ranks) if local_ranks > settings.local_ranks else settings

    def _stop(self, error: BaseException) -> None:
        stream, self._load.stream = self._load.stream, None
        if stream is not None:
            stream.__exit__(type(error), error, error.__traceback__)

    # -- what cannot be

    def _check_filled(self, gaps: list[str]) -> None:
        if not gaps:
            return
        config = self._load.config
        uri = self._origin(DefaultModelLoader.Source(config.model_path, config.revision)).uri
        more = f" and {len(gaps) - _MOST_NAMES} more" if gaps[_MOST_NAMES:] else ""
        error = PlacementError(
            f"The checkpoint {uri} does not fill the model: tensors are missing.",
            f"Not filled: {', '.join(gaps[:_MOST_NAMES])}{more}.",
            f"Upload it whole; see what it holds with: headrace inspect {uri}",
        )
        if self.options.check_weights:
            raise error
        _LOG.warning("%s", error)

    def _check_quantization(self, config: ModelConfig) -> None:
        what = is_quantized_while_loading(config, self.load_config.modelopt_config)
        if what:
            raise UnsupportedQuantization(
                f"{what} quantizes the model while it is loaded.",
                "For that SGLang reads the weights itself, from a local folder.",
                "Quantize it once, upload the result and serve that; or load from a local folder with --load-format auto.",
            )


def _wants_vocabulary(config: Any) -> bool:
    """Say whether embedding and head must come: a draft model may be given its target's, and a model that embeds has no use for a head."""
    return not getattr(config, "is_draft_model", False) and bool(getattr(config, "is_generation", True))


def _prefixed(weights: WeightsIterator, prefix: str) -> WeightsIterator:
    for name, tensor in weights:
        yield prefix + name, tensor
        del tensor


def _open_whole(origin: _Origin, settings: Settings, progress: LoadProgress) -> Checkpoint:
    return open_checkpoint(origin.uri, snapshot=origin.snapshot, settings=settings, progress=progress)


def _open_file(file: Uri, settings: Settings, progress: LoadProgress) -> Checkpoint:
    return open_checkpoint(file, settings=settings, progress=progress)


def _holds_weights(folder: str) -> bool:
    return any(Path(folder).glob("*.safetensors"))
