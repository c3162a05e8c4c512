"""Transformers over the stream: ``load_model(uri)`` is ``from_pretrained`` whose weights arrive from a store and become the parameters themselves."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from torch.distributed import ProcessGroup

from headrace.checkpoint import Checkpoint, SideFiles
from headrace.checkpoint.sideopening import open_side_files
from headrace.engines.calibration import Calibration
from headrace.engines.options import check_options
from headrace.engines.routing import LoaderDecision, LoaderRequest, UriKind, choose_loader, route
from headrace.errors import InvalidSetting, MissingDependency
from headrace.quantization import CheckpointQuantization
from headrace.settings import Settings
from headrace.storage import parse_uri
from headrace.storage.revision import with_revision
from headrace.streaming import Distributed, LoadProgress, LoadReport, Lockstep, ProgressDisplay, Scope, Source
from headrace.streaming import open as open_checkpoint
from headrace.streaming.formats import ExtraConfig, LoadFormat, parse_extra_config
from headrace.streaming.loading import link_for

try:
    from transformers import AutoProcessor, AutoTokenizer

    from headrace.engines.architecture import check_tokenizer, unusable_tokenizer
    from headrace.engines.collector import collector_paused
    from headrace.engines.construction import Construction, ModelWishes, prepare_construction
    from headrace.engines.dummy import RandomWeights
    from headrace.engines.modelopt import Workflow, prepare_workflow, refuse_calibration
    from headrace.engines.parallel import check_kinds, check_parallel, num_tensor_ranks
    from headrace.engines.parts import PartWishes
    from headrace.engines.parts_selection import Stored
    from headrace.engines.quantized import PackingWishes, detect_quantization, read_quantization
    from headrace.engines.weights import Conditions, StreamedWeights, Weights
except ImportError as error:
    raise MissingDependency(
        "Loading a model needs Transformers.",
        f"Importing it failed: {error}.",
        'Install it with: pip install "headrace[transformers]"',
    ) from error

logger = logging.getLogger("headrace")

T = TypeVar("T")


def load_model(
    source: Source,
    *,
    load_format: str | LoadFormat = LoadFormat.AUTO,
    quantization: str | None = None,
    extra_config: ExtraConfig | Mapping[str, Any] | str | None = None,
    auto_class: Any = None,
    trust_remote_code: bool = False,
    revision: str | None = None,
    snapshot: str | None = None,
    subfolder: str = "",
    strict: bool = True,
    dequantize: bool = False,
    weight_only: bool = False,
    language_only: bool = False,
    encoder_only: bool = False,
    layers: range | None = None,
    experts: Iterable[int] | None = None,
    calibration: Calibration = None,
    distributed: Distributed = "auto",
    process_group: ProcessGroup | None = None,
    scope: Scope = "node",
    settings: Settings | None = None,
    progress: LoadProgress | None = None,
    on_report: Callable[[LoadReport], None] | None = None,
    **options: Any,
) -> Any:
    """Return the model at ``source`` as ``from_pretrained`` would, its weights streamed: no weight file is written, no tensor is copied that need not be.

    ``load_format`` says how the weights come (see `headrace.streaming.formats.LoadFormat`); ``auto`` streams every uri. With ``dummy`` only side files need be at
    ``source``, and the parameters are random, the same each time.

    A quantized checkpoint stays packed, and is computed with as its maker meant it: inputs, keys and values are rounded where the checkpoint says so. With ``weight_only``
    they are not. With ``dequantize`` every packed weight is expanded to ``dtype`` (computed in float32, rounded once) as it arrives, and the model is a plain one.
    ``quantization`` may name the checkpoint's method, to be sure of it; it is read from the side files. Of a plain model in a local folder it is what to quantize it to while
    loading, ``modelopt_fp8`` or ``modelopt_nvfp4``, by NVIDIA ModelOpt's workflow: ``calibration`` is the texts that it finds the scales with, or the path of a file with one in
    each line; by default a few of our own, which are few. ``revision`` is a hub repository's branch, tag or commit; ``snapshot`` the id of the one snapshot that is wanted
    (see `headrace.open`). ``extra_config`` takes the place of what ``settings`` say of connections and memory.

    ``language_only`` builds the language model of a multimodal checkpoint, ``encoder_only`` its encoders and projectors; ``layers`` (a range) only these decoder layers, numbered
    from 0, with the embeddings if layer 0 is among them and the head if the last one is; ``experts`` only these of each layer. What does not belong to the part is not requested,
    and has to be known to the whole model's class all the same. See docs/guide/multimodal.md.

    With a ``process_group`` of `torch.distributed`, or with ``distributed`` True for the one that was initialised, all its ranks must call this alike, and each gets the whole model: the
    ranks of each machine read every byte once among them, or, with ``scope`` ``group``, all ranks do.

    ``options`` are ``from_pretrained``'s own (``dtype``, ``device_map``, ``attn_implementation``, ``quantization_config``, ``output_loading_info``, fields of the
    configuration, …). ``auto_class`` is an Auto class or a model class; by default config.json's ``architectures`` decides. Where the stored dtype and the model's
    agree and the target is the CPU, the parameters are the streamed tensors. For another device host memory stays within the read-ahead budget plus the largest
    tensor. With ``strict`` (default) every parameter and persistent buffer must be filled exactly once, or tied; otherwise what is missing is initialised by the class, and
    what is unexpected is left out, each with a warning.

    Raises `PlacementError` before the first weight byte where names or shapes do not fit, `UnsupportedQuantization` where packed weights would be taken for plain ones,
    `UnknownArchitecture`, `InvalidSetting` for what does not go together, and everything that opening and streaming raise.
    """
    check_options(options)
    if subfolder:
        source = _child(source, subfolder)
    if revision is not None:
        source = _at_revision(source, revision)
    kind = UriKind.of(source.store.uri if isinstance(source, Checkpoint) else parse_uri(source))
    request = LoaderRequest(load_format=LoadFormat.parse(load_format), uri_kind=kind, quantization=quantization)
    route(request.load_format, kind)  # what can never be is said before anything is opened
    extra = parse_extra_config(extra_config)
    link = link_for(request.load_format, extra, distributed, process_group, scope)
    settings = extra.applied_to(settings or Settings.from_environment())
    progress = progress or LoadProgress()
    wishes = ModelWishes(
        auto_class=auto_class,
        trust_remote_code=trust_remote_code,
        options=options,
        packing=PackingWishes(dequantize=dequantize, weight_only=weight_only),
        part=PartWishes.of(language_only=language_only, encoder_only=encoder_only, layers=layers, experts=experts),
    )
    lockstep = Lockstep(link) if link is not None else None
    load = _ModelLoad(
        request=request,
        wishes=wishes,
        strict=strict,
        calibration=calibration,
        snapshot=snapshot,
        settings=settings,
        progress=progress,
        lockstep=lockstep,
        scope=scope,
    )
    with ProgressDisplay(progress, enabled=settings.progress and (link is None or link.rank == 0)):
        try:
            with collector_paused():
                result, report = load.run(source)
        except BaseException as error:
            if lockstep is not None:
                lockstep.stop(error)  # the other ranks shall hear of it
            raise
    if on_report is not None:
        on_report(report)
    return result


def load_tokenizer(source: Checkpoint | SideFiles, *, trust_remote_code: bool = False, **options: Any) -> Any:
    """Return the tokenizer in the side files of ``source``. Raises `ModelError` where there is none that works."""
    folder = _folder(source)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=trust_remote_code, local_files_only=True, **options
        )
        check_tokenizer(tokenizer)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        raise unusable_tokenizer(folder, error, trust_remote_code=trust_remote_code) from error
    return tokenizer


def load_processor(source: Checkpoint | SideFiles, *, trust_remote_code: bool = False, **options: Any) -> Any:
    """Return the processor (images, audio, text) in the side files of ``source``."""
    return AutoProcessor.from_pretrained(
        _folder(source), trust_remote_code=trust_remote_code, local_files_only=True, **options
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _ModelLoad:
    """One load: side files, choice of the loader, class, weights, account."""

    request: LoaderRequest
    """Without the checkpoint's own quantization, which is not known yet."""
    wishes: ModelWishes
    strict: bool
    calibration: Calibration
    snapshot: str | None
    settings: Settings
    progress: LoadProgress
    lockstep: Lockstep | None = None
    scope: Scope = "node"

    def run(self, source: Source) -> tuple[Any, LoadReport]:
        """Return what ``from_pretrained`` returns, and the account."""
        if isinstance(source, Checkpoint):
            self._opened(source)
            return self._run(source.side_files, source.uri, source)
        if self.request.load_format is LoadFormat.DUMMY:
            if self.snapshot is not None:
                raise InvalidSetting("A snapshot was asked for, and load_format is dummy.", mend="Leave one out.")
            # What lies beside them need not be weights.
            with open_side_files(source, settings=self.settings) as side_files:
                return self._run(side_files, str(parse_uri(source)), None)
        with self._together(
            "opening the checkpoint", lambda: self._opened(source), undo=Checkpoint.close
        ) as checkpoint:
            return self._run(checkpoint.side_files, checkpoint.uri, checkpoint)

    def _opened(self, source: Source) -> Checkpoint:
        return open_checkpoint(source, snapshot=self.snapshot, settings=self.settings, progress=self.progress)

    def _together(self, name: str, work: Callable[[], T], *, undo: Callable[[T], None] | None = None) -> T:
        """Do a step of the load, in step with the other ranks where there are any: what fails on one fails on all."""
        return work() if self.lockstep is None else self.lockstep.do(name, work, undo=undo)

    def _run(self, side_files: SideFiles, source: str, checkpoint: Checkpoint | None) -> tuple[Any, LoadReport]:
        with self.progress.during("side files"):
            folder = self._together("fetching the side files", side_files.folder)
        with self.progress.during("planning"):
            section = read_quantization(folder, source=source)
            stored = section.method if section else None
            decision = choose_loader(replace(self.request, stored_quantization=stored))
            logger.info("%s: load format %s, quantization %s", source, decision.load_format, stored or "none")
            detected = self._detected(folder, source, checkpoint)
            construction = prepare_construction(
                folder, section, detected, source=source, wishes=self.wishes, stored=self._stored(checkpoint, decision)
            )
            self._check_parallel(decision, construction)
            workflow = self._workflow(decision, source, side_files, construction.config)
            weights = self._weights(decision, source, checkpoint, construction)
        try:
            result = construction.run(weights.values, weights.fill)
            model = result[0] if isinstance(result, tuple) else result
            weights.settle(model)
        finally:
            weights.close()
        # The model says where it came from, as it does after loading from a folder.
        model.config.name_or_path = model.name_or_path = source
        if workflow is None:
            return result, weights.report()
        workflow.run(model, self.progress)
        return result, replace(weights.report(), load_format=LoadFormat.MODELOPT)

    def _check_parallel(self, decision: LoaderDecision, construction: Construction) -> None:
        """Raise an error of ours for a model that the ranks of a tensor-parallel load cannot share."""
        num_ranks, source = num_tensor_ranks(self.wishes.options), construction.source
        check_kinds(self.wishes.options, source=source)
        if num_ranks == 1:
            return
        if decision.load_format is LoadFormat.MODELOPT:
            raise InvalidSetting(
                f"{source} cannot be quantized while it is divided among {num_ranks} ranks.",
                "NVIDIA ModelOpt's workflow wants the whole model in one process.",
                "Use one process, or quantize the model first.",
            )
        check_parallel(construction.model_class, construction.config, num_ranks, source=source)

    def _workflow(self, decision: LoaderDecision, source: str, side_files: SideFiles, config: Any) -> Workflow | None:
        """Return what quantizes the model once it is loaded, its texts read; None where nothing does."""
        if decision.load_format is not LoadFormat.MODELOPT:
            refuse_calibration(self.calibration)
            return None
        return prepare_workflow(
            decision.quantization,
            self.calibration,
            source=source,
            config=config,
            wishes=self.wishes,
            load_tokenizer=lambda: load_tokenizer(side_files, trust_remote_code=self.wishes.trust_remote_code),
        )

    def _detected(self, folder: Path, source: str, checkpoint: Checkpoint | None) -> CheckpointQuantization | None:
        """Return what our own readers are to do; None where nothing is packed, or the caller names a quantizer of Transformers."""
        if checkpoint is None or self.wishes.options.get("quantization_config") is not None:
            return None
        detected = detect_quantization(folder, checkpoint.entries, source=source)
        for warning in detected.warnings if detected is not None else ():
            logger.warning("%s: %s", source, warning)
        return detected

    def _stored(self, checkpoint: Checkpoint | None, decision: LoaderDecision) -> Stored | None:
        """Return what a part may be taken from. Other libraries read whole tensors only."""
        can_slice = decision.load_format in (LoadFormat.HEADRACE, LoadFormat.MODELOPT)
        return Stored(checkpoint.entries, is_strict=self.strict, can_slice=can_slice) if checkpoint else None

    def _weights(
        self,
        decision: LoaderDecision,
        source: str,
        checkpoint: Checkpoint | None,
        construction: Construction,
    ) -> Weights:
        if decision.load_format is LoadFormat.MODELOPT:
            # What it starts from is the plain model, streamed as any other.
            decision = LoaderDecision(load_format=LoadFormat.HEADRACE)
        if decision.load_format is LoadFormat.DUMMY:
            return RandomWeights(source=source, progress=self.progress)
        assert checkpoint is not None
        conditions = Conditions(
            load_format=decision.load_format,
            settings=self.settings,
            progress=self.progress,
            strict=self.strict,
            tolerate_mismatch=bool(self.wishes.options.get("ignore_mismatched_sizes")),
            quantization=decision.quantization,
            expanded=construction.detected if self.wishes.packing.dequantize else None,
            lockstep=self.lockstep,
            scope=self.scope,
            selection=construction.selection,
        )
        return StreamedWeights(checkpoint, conditions, model_class=construction.model_class.__name__)


def _child(source: Source, subfolder: str) -> Source:
    if isinstance(source, Checkpoint):
        raise InvalidSetting("subfolder cannot be used with an open checkpoint.", mend="Open the sub-folder's own uri.")
    return f"{str(source).rstrip('/')}/{subfolder.strip('/')}"


def _at_revision(source: Source, revision: str) -> Source:
    """Return a hub uri at ``revision``. Elsewhere there are none, and ``main``, which callers pass along from habit, is what there is."""
    uri = source.store.uri if isinstance(source, Checkpoint) else parse_uri(source)
    if uri.scheme != "hf" and revision == "main":
        return source
    if isinstance(source, Checkpoint):
        raise InvalidSetting("revision cannot be used with an open checkpoint.", mend="Open the revision's own uri.")
    return str(with_revision(uri, revision))


def _folder(source: Checkpoint | SideFiles) -> Path:
    return (source.side_files if isinstance(source, Checkpoint) else source).folder()
