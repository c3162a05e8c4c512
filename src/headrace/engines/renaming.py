"""Where Transformers puts a stored name in a model: its renamings and converters, asked for one name at a time. Uses private names of Transformers, as `conversion` does."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    apply_renamings,
    rename_source_key,
)


@dataclass(frozen=True, slots=True)
class StackSlot:
    """The place of one expert's weight in a stacked parameter."""

    target: str
    """The parameter: ``model.layers.3.mlp.experts.gate_up_proj``, ``[num_experts, rows, columns]``."""
    expert: int
    position: int
    """Which of the weights that are put one below the other in each expert: 0 gate, 1 up."""
    num_positions: int


class Renamer:
    """Transformers' renaming of stored names for one model (on the meta device)."""

    def __init__(self, model: Any, weight_mapping: Sequence[Any] | None = None) -> None:
        """``weight_mapping`` is what ``from_pretrained`` uses; by default what belongs to the model's class."""
        mapping = get_model_conversion_mapping(model) if weight_mapping is None else weight_mapping
        self._renamings = [item for item in mapping if isinstance(item, WeightRenaming)]
        self._converters = [item for item in mapping if isinstance(item, WeightConverter)]
        self._prefix = model.base_model_prefix
        self.wanted: Mapping[str, Any] = model.state_dict()

    def __call__(self, name: str) -> tuple[str, str | None]:
        """Return the parameter's name, and the pattern of the converter that takes the tensor (None where it is taken as it is)."""
        target, pattern = rename_source_key(name, self._renamings, self._converters, self._prefix, self.wanted)
        if target not in self.wanted and name in self.wanted:
            target, pattern = rename_source_key(
                name, [], [], base_model_prefix=self._prefix, meta_state_dict=self.wanted
            )
        return target, pattern

    def is_plain(self, name: str) -> bool:
        """Say whether ``name`` is a parameter's own, which renaming leaves alone."""
        return self(name) == (name, None) and name in self.wanted

    def slot(self, name: str) -> StackSlot | None:
        """Return where the converter of ``name`` puts it, where it does nothing but stack experts and put their parts one below the other; else None."""
        target, pattern = self(name)
        stacker = self._stackers.get(pattern) if pattern is not None else None
        if stacker is None or target not in self.wanted:
            return None
        converter, expression = stacker
        found = expression.search(apply_renamings(name, self._renamings))
        if found is None:
            return None
        patterns = converter.source_patterns
        return StackSlot(target, int(found.group("expert")), patterns.index(pattern), len(patterns))

    @cached_property
    def _stackers(self) -> dict[str, tuple[Any, re.Pattern[str]]]:
        found: dict[str, tuple[Any, re.Pattern[str]]] = {}
        for converter in self._converters:
            if _only_stacks(converter):
                for pattern in converter.source_patterns:
                    if pattern.count("*.") == 1:
                        expression = re.compile(pattern.replace("*.", r"(?P<expert>\d+)\.") + r"(?!\w)")
                        found.setdefault(pattern, (converter, expression))
        return found


def _only_stacks(converter: Any) -> bool:
    operations = converter.operations
    if not operations or type(operations[0]) is not MergeModulelist or operations[0].dim != 0:
        return False
    if len(operations) == 1:
        return len(converter.source_patterns) == 1
    return len(operations) == 2 and type(operations[1]) is Concatenate and operations[1].dim == 1
