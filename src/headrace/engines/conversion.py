"""Knows Transformers' private conversion of a state dict into a model's parameters (`renaming` knows how it names them).

Two uses. `plan_placement` runs that conversion on a copy of the meta model with shapes instead of bytes, so that what goes where, in which order, and what does
not fit is known before the first weight byte. `PlacingClass` stands in for the model's class during ``from_pretrained`` so that we are called between the
building of the meta model and its filling. ``tests/engines/test_contract.py`` pins every private name that is used here.
"""

from __future__ import annotations

import copy
import os
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.utils import logging as transformers_logging

from headrace.engines.parallel import check_stages
from headrace.engines.parts_account import MTP, NEEDLESS, OTHER_STAGES
from headrace.engines.placement import Placement
from headrace.engines.rank_slices import shown_plain
from headrace.engines.renaming import Renamer
from headrace.engines.values import Assembly, rehearsed_state_dict
from headrace.errors import InvalidSetting

_SYNCHRONOUS = "HF_DEACTIVATE_ASYNC_LOAD"
_transformers_lock = threading.RLock()

LoadWeights = Callable[[Any, Mapping[str, Any], Any], tuple[Any, Any]]
"""``(model, state_dict, load_config) -> (loading_info, disk_offload_index)``: the class's own filling of a meta model."""
Fill = Callable[[Any, Any, LoadWeights], tuple[Any, Any]]
"""``(model, load_config, load_weights) -> (loading_info, disk_offload_index)``: what is done in its place, by way of it."""


class PlacingClass:
    """Stands in for a model class in ``from_pretrained``: everything is the class's own, but the filling of the meta model goes through ``load``.

    The model that comes out is an instance of the class itself; nothing of Transformers is changed.
    """

    def __init__(self, model_class: Any, load: Fill, cut: Callable[[Any], None] | None = None) -> None:
        """``cut`` takes something out of the meta model, in place, before anything else is done with it."""
        self._model_class = model_class
        self._load = load
        self._cut = cut

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = self._model_class(*args, **kwargs)
        if self._cut is not None:
            self._cut(model)
        return model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model_class, name)

    def _load_pretrained_model(
        self, model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, expected_keys: Any = None
    ) -> tuple[Any, Any]:
        def load_weights(target: Any, values: Mapping[str, Any], config: Any) -> tuple[Any, Any]:
            with synchronous_loading():
                result: tuple[Any, Any] = self._model_class._load_pretrained_model(
                    target, values, checkpoint_files, config, expected_keys
                )
            return result

        return self._load(model, load_config, load_weights)

    def maybe_distribute_model(self, model: Any, distributed_config: Any, mesh_manager: Any) -> Any:
        """Divide the meta model among ranks as the class does, packed layers among the others."""
        if distributed_config.pp_size > 1:
            check_stages(model, distributed_config.pp_size)
        with shown_plain(model):
            try:
                return self._model_class.maybe_distribute_model(model, distributed_config, mesh_manager)
            except ValueError as error:
                raise InvalidSetting(
                    f"{type(model).__name__} cannot be divided among ranks as distributed_config says.",
                    f"Transformers says: {error} No weight byte was read.",
                    "Take other sizes (tp_size, ep_size, pp_size), or plans.",
                ) from error

    def from_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        """Run the class's ``from_pretrained`` with this object in the class's place.

        One at a time in a process: it swaps torch's default dtype and functions of ``torch.nn.init`` while it builds, so that two at once leave wrong dtypes behind.
        """
        with _transformers_lock:
            return self._model_class.from_pretrained.__func__(self, *args, **kwargs)


@contextmanager
def synchronous_loading() -> Iterator[None]:
    """Have Transformers ask for one value at a time, in this thread and in its own order, without its progress bar.

    Its thread pool runs ahead without bound: a model made of experts was measured at 1.95 times its size with it, 1.15 times without (2026-11).
    """
    with _transformers_lock:
        before = os.environ.get(_SYNCHRONOUS)
        bar = transformers_logging.is_progress_bar_enabled()
        os.environ[_SYNCHRONOUS] = "1"
        transformers_logging.disable_progress_bar()
        try:
            yield
        finally:
            if before is None:
                os.environ.pop(_SYNCHRONOUS, None)
            else:
                os.environ[_SYNCHRONOUS] = before
            if bar:
                transformers_logging.enable_progress_bar()


def build_skeleton(model_class: Any, config: Any) -> Any:
    """Return a model of ``model_class`` on the meta device, built as ``from_pretrained`` builds it: names and shapes, no values. ``config`` is left as it is."""
    with _transformers_lock, ExitStack() as contexts:
        for context in model_class.get_init_context(torch.float32, False, False, False):
            contexts.enter_context(context)
        return model_class(copy.deepcopy(config))


def plan_placement(model: Any, load_config: Any, assemblies: Sequence[Assembly]) -> Placement:
    """Return the placement in ``model`` (on the meta device) of what ``assemblies`` make, by Transformers' own conversion run without bytes."""
    renamer = Renamer(model, load_config.weight_mapping or ())
    homes = _homes(renamer, assemblies)
    ignored = needless_names(model, homes.homeless)
    built: list[Assembly] = []
    asked: dict[str, list[Any]] = {}
    rehearsal = _copied(model)
    values = {
        name: value
        for name, value in rehearsed_state_dict(assemblies, built.append, asked).items()
        if name not in homes.homeless
    }
    dry_config = replace(load_config, device_map={"": "meta"}, disk_offload_folder=None)
    with synchronous_loading():
        outcome, _ = convert_and_load_state_dict_in_model(model=rehearsal, state_dict=values, load_config=dry_config)
    mismatched = {
        name: (tuple(stored), tuple(wanted))
        for name, stored, wanted in sorted(outcome.mismatched_keys, key=lambda item: item[0])
    }
    failed = {name: _last_lines(text) for name, text in outcome.conversion_errors.items()}
    unhoused = {
        entry.name: name in ignored
        for assembly in assemblies
        for entry, name in assembly.pieces
        if name in homes.homeless
    }
    return Placement(
        order=tuple(entry for assembly in built for entry, _ in assembly.pieces),
        asked=asked,
        targets=homes.targets,
        ignored=tuple(name for name, is_ignored in unhoused.items() if is_ignored),
        unexpected=tuple(sorted(name for name, is_ignored in unhoused.items() if not is_ignored)),
        missing=tuple(sorted(_truly_missing(model, set(outcome.missing_keys) - set(failed)))),
        doubled=homes.doubled,
        mismatched=mismatched,
        failed=failed,
    )


def needless_names(model: Any, homeless: Mapping[str, str]) -> dict[str, str]:
    """Return those of ``homeless`` (name → what it is renamed to, where no parameter has that) that ``model`` can do without, each with the word for what it is."""
    ignorable, extra_layers = _ignored_pattern(model), _extra_layers(model, homeless.values())
    found = {}
    for name, target in homeless.items():
        if _layer_of(target) in extra_layers:
            found[name] = MTP
        elif ignorable.search(target):
            found[name] = MTP if _MTP_MODULE.search(target) else NEEDLESS
        elif _belongs_elsewhere(model, target):
            found[name] = OTHER_STAGES
    return found


def expects_extra_layers(model: Any) -> bool:
    """Say whether the configuration counts layers for multi-token prediction."""
    return _stated_extra_layers(model.config.get_text_config(decoder=True)) > 0


def unfilled_names(model: Any) -> list[str]:
    """Return the names of parameters and persistent buffers that are still on the meta device."""
    offloaded = {name for name, device in (getattr(model, "hf_device_map", None) or {}).items() if device == "disk"}
    state = model.state_dict(keep_vars=True)
    return [
        name
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and value.is_meta and not _below(name, offloaded)
    ]


def _copied(model: Any) -> Any:
    """Return a copy of ``model``, on the meta device. What says which stage of a pipeline it is holds process groups, of which there is no copy, and stays the model's own."""
    if (getattr(model, "_fsdp_size", None) or 1) > 1:
        raise InvalidSetting(
            "The model is to be sharded for data-parallel training (fsdp_size), and is not loaded that way here.",
            "Tensor-, expert- and pipeline-parallel models are: each rank asks for its slices only.",
            "Leave fsdp_size out, or load the checkpoint with Transformers.",
        )
    stage = _stage_of(model)
    return copy.deepcopy(model, {} if stage is None else {id(stage): stage})


def _stage_of(model: Any) -> Any:
    """Return what says which stage of a pipeline ``model`` is; None for a whole model."""
    return getattr(model, "_pp_stage", None)


def _belongs_elsewhere(model: Any, target: str) -> bool:
    """Say whether a parameter is another stage's of the pipeline that ``model`` is a stage of."""
    stage = _stage_of(model)
    if stage is None:
        return False
    num_layers = model.config.get_text_config(decoder=True).num_hidden_layers
    return stage.find_rank_for_key(target, num_layers, model.base_model_prefix) not in (None, stage.pp_rank)


@dataclass(frozen=True, slots=True)
class _Homes:
    """Where everything goes."""

    targets: dict[str, str]
    """Entry → the parameter that it helps to fill."""
    homeless: dict[str, str]
    """Value → its renamed name, where no parameter has that."""
    doubled: dict[str, tuple[str, ...]]
    """Parameter → the several values that would each fill all of it."""


def _homes(renamer: Renamer, assemblies: Sequence[Assembly]) -> _Homes:
    parameters: dict[str, str] = {}
    homeless: dict[str, str] = {}
    whole: dict[tuple[str, str | None], list[str]] = defaultdict(list)
    for assembly in assemblies:
        for name in assembly.outputs:
            target, pattern = renamer(name)
            if target not in renamer.wanted:
                homeless[name] = target
                continue
            parameters[name] = target
            if pattern is None or "*" not in pattern:
                whole[target, pattern].append(name)
    targets = {
        entry.name: parameters[name] for assembly in assemblies for entry, name in assembly.pieces if name in parameters
    }
    doubled = {target: tuple(names) for (target, _), names in whole.items() if len(names) > 1}
    return _Homes(targets, homeless, doubled)


def _ignored_pattern(model: Any) -> re.Pattern[str]:
    """Return what the class declares as not needed, and the two buffers that old checkpoints carry though they are computed now."""
    patterns = set(model._keys_to_ignore_on_load_unexpected or ())
    patterns |= {r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$"}
    return re.compile("|".join(f"({pattern})" for pattern in sorted(patterns)))


def _extra_layers(model: Any, homeless: Iterable[str]) -> set[int]:
    """Return the numbers of the layers for multi-token prediction, which checkpoints number on after the model's own and this class does not build.

    They are as many as config.json says, and those that hold the projection that only such a layer has.
    """
    config = model.config.get_text_config(decoder=True)
    own = getattr(config, "num_hidden_layers", None)
    if not isinstance(own, int):
        return set()
    extra = set(range(own, own + _stated_extra_layers(config)))
    return extra | {_layer_of(name) for name in homeless if ".eh_proj." in name and _layer_of(name) >= own}


def _stated_extra_layers(config: Any) -> int:
    """Return how many layers for multi-token prediction ``config`` counts."""
    stated = [getattr(config, name, None) for name in _EXTRA_LAYER_COUNTS]
    return max((count for count in stated if isinstance(count, int)), default=0)


_EXTRA_LAYER_COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")
"""DeepSeek's name for it, which most have, Qwen3.5's, and Transformers' own."""
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_MTP_MODULE = re.compile(r"(?:^|\.)mtp(?:_\w+)?\.")


def _layer_of(name: str) -> int:
    found = _LAYER.search(name)
    return int(found.group(1)) if found else -1


def _truly_missing(model: Any, missing: set[str]) -> set[str]:
    """Take out of ``missing`` what is tied to something that is filled, and what the class declares it may lack."""
    tied = dict(model.all_tied_weights_keys)
    groups: dict[str, set[str]] = defaultdict(set)
    for target, source in tied.items():
        groups[source] |= {target, source}
    for group in groups.values():
        if group - missing:
            missing = missing - group
    optional = model._keys_to_ignore_on_load_missing
    if optional:
        pattern = re.compile("|".join(f"({item})" for item in optional))
        missing = {name for name in missing if not pattern.search(name)}
    return missing


def _below(name: str, modules: set[str]) -> bool:
    return any(module == "" or name == module or name.startswith(f"{module}.") for module in modules)


def _last_lines(text: str) -> str:
    """Return the end of a conversion error, which holds a traceback: the cause and the operation that met it."""
    lines = [line.strip() for line in str(text).splitlines() if line.strip()]
    return " ".join(lines[-2:]) if lines else "unknown"
