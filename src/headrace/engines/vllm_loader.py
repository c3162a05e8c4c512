"""vLLM's loader over the stream: vLLM's own `DefaultModelLoader`, whose weights come from `headrace.streaming`. Written against vLLM 0.32.0.

The base class asks for the weights of one source after another (the model's own, secondary ones, a draft model's) and does the rest: prefixes, quantized post-processing,
the check that no parameter is left unset, reload and weight update. Only where a source's tensors come from is ours.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from vllm.config import LoadConfig, ModelConfig, VllmConfig
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.ep_weight_filter import should_skip_weight
from vllm.platforms import current_platform

from headrace.checkpoint import Checkpoint, open_checkpoint
from headrace.engines.engine_coverage import Coverage
from headrace.engines.engine_folder import PinnedSource, make_place, read_source
from headrace.engines.engine_names import NameFilter, matching_keys
from headrace.engines.engine_ranks import Opened, StreamTerms, open_stream
from headrace.engines.vllm_options import parse_loader_options
from headrace.engines.vllm_parallel import find_link, layers_of_other_stages, num_local_ranks
from headrace.errors import CheckpointError, InvalidSetting, PlacementError, UnsupportedQuantization
from headrace.settings import Settings
from headrace.storage import Uri, open_store, parse_uri
from headrace.storage.revision import with_revision
from headrace.streaming import DistributedStream, LoadProgress, ProgressDisplay, StreamOptions, TensorSource

_LOG = logging.getLogger("headrace")

_MOST_NAMES = 8

WeightsIterator = Iterator[tuple[str, torch.Tensor]]


@dataclass(slots=True)
class _Load:
    """What the loader knows of the load that it is asked for."""

    model: torch.nn.Module | None = None
    config: Any = None
    """vLLM's configuration of the model; of the draft model where that is loaded."""
    parallel: Any = None
    """vLLM's configuration of ranks, where it was given."""
    is_draft: bool = False
    """Whether it is a model that drafts for another."""
    is_first: bool = False
    """Whether the model is filled for the first time: then it must be the snapshot that the configuration was read from. A reload takes what is there now."""
    stream: TensorSource | None = None


class HeadraceLoader(DefaultModelLoader):  # type: ignore[misc]  # vLLM is not there when types are checked
    """Fills a model from any store that Headrace knows. One is made for each load; one thread uses it."""

    # The base class sets them.
    counter_before_loading_weights: float
    enable_weights_track: bool | None
    local_expert_ids: set[int] | None

    def __init__(self, load_config: LoadConfig) -> None:
        """Read nothing yet. Raises `InvalidSetting` for an extra configuration that cannot be."""
        self.options = parse_loader_options(load_config.model_loader_extra_config)
        beneath = copy.copy(load_config)
        beneath.model_loader_extra_config = dict(self.options.theirs)
        super().__init__(beneath)
        self.load_config = load_config
        self._load = _Load()

    # -- what vLLM calls

    def load_model(self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = "") -> torch.nn.Module:
        """Return the model, built and filled. On a machine that has no side files yet, they are brought first."""
        self._load.parallel, self._load.config = vllm_config.parallel_config, model_config
        self._load.is_draft = bool(prefix) or model_config is not vllm_config.model_config
        if not self._load.is_draft:
            self._check_folder(model_config)
        self._bring_side_files(model_config)
        model: torch.nn.Module = super().load_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
        return model

    def download_model(self, model_config: ModelConfig) -> None:
        """Open the checkpoint, which checks it. Nothing is written to the disk: weights are streamed."""
        self._load.config = model_config
        source = DefaultModelLoader.Source(model_config.model, model_config.revision)
        open_checkpoint(self._uri_of(source), settings=self._settings()).close()

    def load_weights(self, model: torch.nn.Module, model_config: ModelConfig) -> None:
        """Fill ``model``. What goes wrong anywhere ends the reading here, and is told to the ranks that read together with this one.

        Raises `PlacementError` where a part of a layer's weights has not come, and what opening and streaming raise.
        """
        self._load.is_first = True
        coverage = Coverage(model, has_vocabulary=not self._load.is_draft)
        try:
            with coverage:
                super().load_weights(model, model_config)
            self._check_filled(model_config, coverage.gaps())
        except BaseException as error:
            self._stop(error)
            raise
        finally:
            self._load.is_first = False

    def get_all_weights(self, model_config: ModelConfig, model: torch.nn.Module) -> WeightsIterator:
        """Yield what fills ``model``, under the checkpoint's names. vLLM calls this by itself for a reload, which takes what is in the store then."""
        self._load.model, self._load.config = model, model_config
        weights: WeightsIterator = super().get_all_weights(model_config, model)
        return weights

    def track_weights_loading(
        self, model: torch.nn.Module, loaded_weights: set[str] | None, quantized: bool = False
    ) -> None:
        """Raise `PlacementError` where a parameter got no weights. vLLM decides which count."""
        try:
            super().track_weights_loading(model, loaded_weights, quantized)
        except ValueError as error:
            raise self._unfilled(self._load.config, f"vLLM says: {error}.") from error

    def _check_filled(self, config: ModelConfig, gaps: list[str]) -> None:
        if not gaps:
            return
        why = f"Not filled: {', '.join(gaps[:_MOST_NAMES])}{f' and {len(gaps) - _MOST_NAMES} more' if gaps[_MOST_NAMES:] else ''}."
        if self.enable_weights_track is False:
            _LOG.warning("%s", self._unfilled(config, why))
            return
        raise self._unfilled(config, why)

    def _unfilled(self, config: ModelConfig, why: str) -> PlacementError:
        uri = self._uri_of(DefaultModelLoader.Source(config.model, config.revision))
        return PlacementError(
            f"The checkpoint {uri} does not fill the model: tensors are missing.",
            why,
            f"Upload it whole; see what it holds with: headrace inspect {uri}",
        )

    def _get_weights_iterator(self, source: DefaultModelLoader.Source) -> WeightsIterator:
        if self.counter_before_loading_weights == 0.0:
            self.counter_before_loading_weights = time.perf_counter()
        if self.load_config.safetensors_load_strategy == "torchao":
            raise UnsupportedQuantization(
                "This checkpoint was written by torchao.",
                "Its tensors are put together from several stored ones by vLLM's own reader of files.",
                "Load it from a local folder, with --load-format auto.",
            )
        return self._streamed(source)

    # -- where a source is

    def _uri_of(self, source: DefaultModelLoader.Source) -> Uri:
        """Return where the weights of ``source`` are: a folder of side files is mapped back to the uri that it stands for."""
        text, config = source.model_or_path, self._load.config
        uri: Uri | None = None
        if config is not None and text == config.model:
            if config.model_weights:
                uri = parse_uri(config.model_weights)
            elif self.options.uri is not None and not _holds_weights(text):
                uri = self.options.uri
        if uri is None:
            pinned = read_source(text)
            uri = pinned.uri if pinned is not None else parse_uri(text)
        if uri.scheme == "hf" and "@" not in uri.bucket and source.revision is not None:
            uri = with_revision(uri, str(source.revision))
        return uri.child(source.subfolder) if source.subfolder else uri

    def _check_folder(self, config: ModelConfig) -> None:
        if self.options.uri is not None and (config.model_weights or _holds_weights(config.model)):
            raise InvalidSetting(
                f"model_loader_extra_config says uri, and {config.model_weights or config.model} holds weights itself.",
                "Only one of them can be meant.",
                "Leave uri out, or give a folder with nothing but side files.",
            )

    def _check_decisions(self, checkpoint: Checkpoint) -> None:
        """Raise `PlacementError` where vLLM has decided without the headers, since it had only a folder of side files, and the stored tensors say otherwise."""
        config = self._load.config
        if self.options.uri is None or not self._load.is_first or checkpoint.store.uri != self.options.uri:
            return
        heads = [name for name in checkpoint.entries if name.endswith("lm_head.weight")]
        if heads and getattr(config.hf_config, "tie_word_embeddings", False):
            raise PlacementError(
                f"config.json says that the head is tied to the embedding, and {checkpoint.uri} holds {heads[0]}.",
                "vLLM looked for it in the folder of side files, and would drop it.",
                """Pass --hf-overrides '{"tie_word_embeddings": false}', or serve the uri itself with HEADRACE_VLLM=1.""",
            )
        if self.enable_weights_track is None and config.quantization is not None:
            self.enable_weights_track = True  # a layer that is not packed would be left at random values

    def _bring_side_files(self, config: ModelConfig) -> None:
        """Make the model's folder on a machine where it is not: side files were brought by the process that read the configuration, maybe elsewhere."""
        pinned = self._pinned(parse_uri(config.model_weights)) if config.model_weights else None
        if pinned is None or Path(config.model).exists():
            return
        settings = self._settings()
        with open_checkpoint(pinned.uri, snapshot=pinned.snapshot_id, settings=settings) as checkpoint:
            place = make_place(checkpoint.side_files.folder(), pinned, settings.cache_dir)
        if str(place.folder) != config.model:
            _LOG.warning(
                "The side files of %s are not at %s on this machine. Set HEADRACE_CACHE_DIR to the same folder on every machine.",
                pinned.uri,
                config.model,
            )

    def _pinned(self, uri: Uri) -> PinnedSource | None:
        """Return what the model's folder says of its snapshot, where the folder stands for ``uri``. The name alone says it: the record may be on another machine."""
        name = Path(self._load.config.model).name
        pinned = PinnedSource(uri, name.rpartition("-")[2])
        return pinned if pinned.name == name else None

    # -- the stream

    def _streamed(self, source: DefaultModelLoader.Source) -> WeightsIterator:
        settings = self._settings()
        uri = self._uri_of(source)
        keep = self._filter(source)
        for opening in self._openings(uri, source, settings):
            for name, tensor in self._tensors(opening, keep, settings):
                yield source.prefix + name, tensor
                del tensor  # else it would be held while the next is awaited

    def _openings(
        self, uri: Uri, source: DefaultModelLoader.Source, settings: Settings
    ) -> Iterator[Callable[[LoadProgress], Checkpoint]]:
        """Yield what opens each checkpoint of ``source``: one, or each file that a model names by patterns of its own."""
        if source.allow_patterns_overrides is None:
            pinned = self._pinned(uri) if self._load.is_first and not source.subfolder else None
            snapshot = pinned.snapshot_id if pinned is not None else None
            yield lambda progress: open_checkpoint(uri, snapshot=snapshot, settings=settings, progress=progress)
            return
        store = open_store(replace(uri, text=f"{uri}/"), settings=settings)
        try:
            keys = matching_keys(store, source.allow_patterns_overrides)
        finally:
            store.close()
        others = [key for key in keys if not key.endswith(".safetensors")]
        if others or not keys:
            raise CheckpointError(
                f"The model wants weights of {uri} that match {', '.join(source.allow_patterns_overrides)}.",
                f"There is {others[0]}, which is not a safetensors file." if others else "There is no such file.",
                "Convert them to safetensors and upload them, or load the model from a local folder with --load-format auto.",
            )
        for key in keys:
            yield partial(_open_file, uri.child(key), settings)

    def _tensors(
        self, opening: Callable[[LoadProgress], Checkpoint], keep: NameFilter, settings: Settings
    ) -> WeightsIterator:
        progress, link = LoadProgress(), find_link()

        def prepare() -> Opened:
            checkpoint = opening(progress)
            self._check_decisions(checkpoint)
            return Opened(checkpoint, tuple(one for name, one in checkpoint.entries.items() if keep.is_needed(name)))

        device = "cuda" if current_platform.device_type == "cuda" else "cpu"
        terms = StreamTerms(
            options=StreamOptions(ownership="leased", device=device),
            settings=settings,
            progress=progress,
            distributed=self.options.extra.distributed,
        )
        with ProgressDisplay(progress, enabled=settings.progress):
            stream = open_stream(prepare, link, terms)
            if stream is None:
                return
            self._load.stream = stream
            with stream, progress.during("weights"):
                for name, tensor in stream:
                    yield name, tensor
                    del tensor
            self._load.stream = None
        if link is None or link.rank == 0 or not isinstance(stream, DistributedStream):
            _LOG.info("Headrace: %s", "; ".join(f"{label} {value}" for label, value in stream.report.rows()))

    def _filter(self, source: DefaultModelLoader.Source) -> NameFilter:
        """Return which names of ``source`` this worker needs."""
        mapper = getattr(self._load.model, "hf_to_vllm_mapper", None)
        experts = self.local_expert_ids
        absent = (*(self._encoder_only_lm_prefixes or ()), *layers_of_other_stages(self._load.model))
        return NameFilter(
            prefix=source.prefix,
            is_unused=source.is_unused_weight or (lambda name: False),
            is_foreign=lambda name: should_skip_weight(name, experts),
            renamed=mapper.map_name if mapper is not None else (lambda name: name),
            absent_modules=absent,
        )

    def _settings(self) -> Settings:
        """Return the environment's settings with what the extra configuration and the command line say, for this worker's share of the machine."""
        settings = self.options.extra.applied_to(Settings.from_environment())
        local_ranks = num_local_ranks(self._load.parallel)
        if local_ranks > settings.local_ranks:  # vLLM sets LOCAL_WORLD_SIZE to 1 in each of its workers
            settings = settings.changed("vLLM", local_ranks=local_ranks)
        return replace(settings, progress=settings.progress and self.load_config.use_tqdm_on_load)

    def _stop(self, error: BaseException) -> None:
        stream, self._load.stream = self._load.stream, None
        if stream is not None:
            stream.__exit__(type(error), error, error.__traceback__)


def _open_file(file: Uri, settings: Settings, progress: LoadProgress) -> Checkpoint:
    return open_checkpoint(file, settings=settings, progress=progress)


def _holds_weights(folder: str) -> bool:
    return any(Path(folder).glob("*.safetensors"))
