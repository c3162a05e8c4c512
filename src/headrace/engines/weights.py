"""Streamed weights for one model: placement before the first byte, the stream, and the account after the last."""

from __future__ import annotations

import gc
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from headrace.checkpoint import Checkpoint, Entry
from headrace.engines.collector import collector_running
from headrace.engines.conversion import (
    LoadWeights,
    expects_extra_layers,
    needless_names,
    plan_placement,
    unfilled_names,
)
from headrace.engines.cuts import cut
from headrace.engines.installation import Installation, expand, odd_values
from headrace.engines.packing import check_packing, check_unread
from headrace.engines.parts_account import MTP, UNUSED, describe_left_out, left_out_groups
from headrace.engines.parts_hints import with_hints
from headrace.engines.parts_selection import Selection
from headrace.engines.placement import Placement, check_ledger, check_placement
from headrace.engines.quantizer import HeadraceQuantizer
from headrace.engines.rank_slices import with_slices
from headrace.engines.renaming import Renamer
from headrace.engines.stacking import stack_experts
from headrace.engines.values import Assembly, Stack, StoredValues, state_dict
from headrace.errors import PlacementError
from headrace.progress import LoadProgress
from headrace.quantization import CheckpointQuantization
from headrace.settings import Settings
from headrace.streaming import DistributedStream, LoadReport, Lockstep, Scope, StreamOptions, TensorStream, open_source
from headrace.streaming.formats import LoadFormat
from headrace.streaming.source import TensorSource

logger = logging.getLogger("headrace")


class Weights(Protocol):
    """What fills a model that is being built."""

    @property
    def values(self) -> Mapping[str, Any]:
        """The state dict that ``from_pretrained`` is given: what there is, none of it read yet."""

    def fill(self, model: Any, load_config: Any, load_weights: LoadWeights) -> tuple[Any, Any]:
        """Fill the meta model; what happens between its being built and its being complete."""

    def settle(self, model: Any) -> None:
        """Check the finished model. Raises `PlacementError` where the account does not add up."""

    def close(self) -> None:
        """Stop and free what is left. May be called twice."""

    def report(self) -> LoadReport:
        """The account, after `settle`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """How weights are to be streamed, and what is let pass."""

    load_format: LoadFormat
    """``headrace``, ``runai_streamer`` or ``safetensors``."""
    settings: Settings
    progress: LoadProgress
    strict: bool = True
    tolerate_mismatch: bool = False
    quantization: str | None = None
    """The method that the configuration names, for messages."""
    expanded: CheckpointQuantization | None = None
    """The packed weights that are to be expanded as they arrive; None where there are none, or they stay packed."""
    lockstep: Lockstep | None = None
    """The ranks that share the reading; None where this process reads everything."""
    scope: Scope = "node"
    """Which of these ranks read each byte once among them."""
    selection: Selection | None = None
    """What a part of the model takes of the checkpoint; None for the whole model."""


class StreamedWeights:
    """The weights of ``checkpoint``. One use, one thread."""

    def __init__(self, checkpoint: Checkpoint, conditions: Conditions, *, model_class: str) -> None:
        self._checkpoint = checkpoint
        self._conditions = conditions
        self._progress = conditions.progress
        self._source = str(checkpoint.uri)
        self._class_name = model_class
        self._stream: TensorSource | None = None
        self._placement: Placement | None = None
        self._installation = Installation()
        selection = conditions.selection
        self._entries = checkpoint.entries if selection is None else selection.entries
        self.values: Mapping[str, Any] = StoredValues(self._entries, self._take)

    def fill(self, model: Any, load_config: Any, load_weights: LoadWeights) -> tuple[Any, Any]:
        """Place, check, stream."""
        lockstep = self._conditions.lockstep
        with self._progress.during("planning"):
            assemblies = self._assemblies(model, load_config)
            if lockstep is None:
                placement = self._place(model, load_config, assemblies)
            else:
                placement = lockstep.do("planning", lambda: self._place(model, load_config, assemblies))
            wanted = _wanted(assemblies, placement)
            if lockstep is None and self._conditions.load_format is LoadFormat.HEADRACE:
                # Ranks that share the reading need the same bytes, and other libraries give whole tensors only.
                wanted, placement = cut(wanted, placement, gap_bytes=self._conditions.settings.transport.gap_bytes)
            self._placement = placement
            self._stream = self._open(placement, load_config.device_map, wanted)
        values = state_dict(wanted, self._take, self._block, placement.asked)
        gc.collect()  # the rehearsal's model is cyclic
        with self._progress.during("weights"), collector_running():
            loading_info, offloaded = load_weights(model, values, load_config)
        loading_info.unexpected_keys.update(placement.unexpected)
        return loading_info, offloaded

    def settle(self, model: Any) -> None:
        assert self._stream is not None and self._placement is not None
        with self._progress.during("finishing"):
            left = set(self._stream.names_left)
            taken = [entry.name for entry in self._placement.order if entry.name not in left]
            check_ledger(taken=taken, placement=self._placement, unfilled=unfilled_names(model), source=self._source)
            notes = [*self._installation.notes, *odd_values(model)]
            if notes:
                others = f" The same holds for {len(notes) - 3} more weights." if len(notes) > 3 else ""
                logger.warning("%s: %s%s", self._source, " ".join(notes[:3]), others)

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()

    def report(self) -> LoadReport:
        assert self._stream is not None
        return replace(self._stream.report, phases=dict(self._progress.phases))

    def _assemblies(self, model: Any, load_config: Any) -> list[Assembly]:
        """Return everything that may be fed to ``model``: packed parts for our layers, or weights expanded on their way, and the rest as it is stored."""
        quantizer, expanded = load_config.hf_quantizer, self._conditions.expanded
        if isinstance(quantizer, HeadraceQuantizer):
            self._installation = with_slices(model, quantizer.installation)
        elif expanded is not None:
            renamer = Renamer(model, load_config.weight_mapping or ())
            self._installation = expand(model, expanded, renamer, dtype=load_config.dtype)
        renamer = Renamer(model, load_config.weight_mapping or ())
        return stack_experts(renamer, self._installation.with_plain(self._entries))

    def _place(self, model: Any, load_config: Any, assemblies: Sequence[Assembly]) -> Placement:
        placement = plan_placement(model, load_config, assemblies)
        check_packing(model, placement, source=self._source, method=self._conditions.quantization)
        try:
            placement = self._checked(placement)
        except PlacementError as error:
            raise with_hints(error, placement, model, Renamer(model, load_config.weight_mapping or ())) from error
        self._log_left_out(model, placement)
        return placement

    def _log_left_out(self, model: Any, placement: Placement) -> None:
        """Say in one line what is not asked for, and what is not there."""
        entries, selection = self._checkpoint.entries, self._conditions.selection
        groups = dict(selection.groups) if selection is not None else {}
        groups |= dict.fromkeys(self._installation.left_out, UNUSED)
        groups |= dict.fromkeys(placement.unexpected, "unexpected")
        groups |= needless_names(model, {name: name for name in placement.ignored})
        absent = list(selection.absent) if selection is not None else []
        if expects_extra_layers(model) and MTP not in groups.values():
            absent.append(MTP)
        total_bytes = sum(entry.size_bytes for entry in entries.values())
        line = describe_left_out(left_out_groups(entries, placement.order, groups), absent, total_bytes=total_bytes)
        if line is not None:
            logger.info("%s: %s", self._source, line)

    def _open(
        self, placement: Placement, device_map: Mapping[str, Any] | None, assemblies: Sequence[Assembly]
    ) -> TensorSource:
        settings, lockstep = self._conditions.settings, self._conditions.lockstep
        if lockstep is not None:
            return DistributedStream(
                self._checkpoint,
                placement.order,
                lockstep=lockstep,
                scope=self._conditions.scope,
                settings=settings,
                progress=self._progress,
            )
        return open_source(
            self._conditions.load_format,
            self._checkpoint,
            placement.order,
            options=_stream_options(device_map, assemblies),
            settings=settings,
            progress=self._progress,
        )

    def _block(self, name: str) -> torch.Tensor | None:
        """Return the memory in which the pieces of a stacked value arrive, where the stream can do that."""
        return self._stream.block(name) if isinstance(self._stream, TensorStream) else None

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
        if not self._conditions.strict:
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
            check_unread(placement, self._entries, source=self._source, model_class=self._class_name)
            lenient = replace(placement, missing=(), unexpected=())
        check_placement(
            lenient,
            source=self._source,
            model_class=self._class_name,
            tolerate_mismatch=self._conditions.tolerate_mismatch,
        )
        return placement


def _wanted(assemblies: Sequence[Assembly], placement: Placement) -> list[Assembly]:
    """Return the assemblies whose pieces are placed."""
    placed = {entry.name for entry in placement.order}
    return [item for item in assemblies if all(entry.name in placed for entry, _ in item.pieces)]


def _stream_options(device_map: Mapping[str, Any] | None, assemblies: Sequence[Assembly]) -> StreamOptions:
    """Return leased memory, pinned for CUDA, where every parameter is copied to another device; memory of its own for each tensor where one may stay, and its place in a stack."""
    devices = {torch.device(place) if place != "disk" else None for place in (device_map or {}).values()}
    if not devices or None in devices or any(device.type == "cpu" for device in devices if device is not None):
        return StreamOptions(
            blocks=tuple(block for item in assemblies if isinstance(item, Stack) for block in item.blocks())
        )
    return StreamOptions(ownership="leased", device=next(device for device in devices if device is not None))
