"""Which part of a module of packed experts a rank keeps: some experts, or of every expert some of the inner features. See `rank_slices`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from headrace.checkpoint import Entry
from headrace.engines.packed_slice import PackedSlice, StackedSlices, Unwanted
from headrace.engines.parallel import refuse_packed
from headrace.engines.sharding import Sharding
from headrace.engines.values import Assembly, Output, Plain, Stack
from headrace.errors import UnsupportedQuantization
from headrace.quantization.scheme import Role
from headrace.quantization.stack import PackedExperts
from headrace.quantization.weight_cuts import Bounds, WeightCut

_DOWN = "down_proj"


class ShownExperts:
    """A module of packed experts that is shown with the plain stacked parameters which its class has."""

    def __init__(self, path: str, experts: PackedExperts, dtype: torch.dtype) -> None:
        self._path, self._experts = path, experts
        self._ups, self._down = experts.ups, experts.down
        self._up_name = "gate_up_proj" if experts.has_gate else "up_proj"
        self._names = (*experts.packed_ups, experts.packed_down)
        for name in self._names:
            del experts._modules[name]
        for name, stacks in ((self._up_name, self._ups), (_DOWN, (self._down,))):
            rows = sum(stack.out_features for stack in stacks)
            sizes = (rows, stacks[0].in_features)[:: -1 if experts.is_transposed else 1]
            weight = torch.empty(stacks[0].num_experts, *sizes, dtype=dtype, device="meta")
            experts.register_parameter(name, nn.Parameter(weight, requires_grad=False))

    def settle(self) -> None:
        """Put the stacks back, those of the experts and features that the plain parameters were cut to."""
        experts = self._experts
        ups, down = (Sharding.taken_from(experts, name) for name in (self._up_name, _DOWN))
        for name, stack in zip(self._names, (*self._ups, self._down), strict=True):
            experts.register_module(name, stack)
        for sharding in (ups, down):
            if sharding.too_few is not None:
                raise self._refusal(sharding, sharding.too_few)
        if ups.is_whole and down.is_whole:
            return
        kept_of_ups, [kept_of_down] = self._kept_of_ups(ups), self._kept(down, num_parts=1)
        chosen, rows_of_down, inner = kept_of_down
        self._check(kept_of_ups, chosen, inner, down)
        if rows_of_down != (0, self._down.out_features):
            raise self._refusal(down, "Its rule cuts what experts give, not what is between their projections.")
        for stack, (_, rows, columns) in zip(self._ups, kept_of_ups, strict=True):
            stack.keep_slice(WeightCut.of(stack.quantization, rows, columns), chosen)
        is_cut = inner != (0, self._down.in_features)
        cut = WeightCut.of(self._down.quantization, rows_of_down, inner)
        self._down.keep_slice(cut, chosen, down.input_slice(self._down.in_features) if is_cut else None)

    def _check(
        self, kept_of_ups: Sequence[Bounds], chosen: tuple[int, int], inner: tuple[int, int], down: Sharding
    ) -> None:
        """Raise where what is kept of the projections does not go together, or not with the rest of the module."""
        is_cut = inner != (0, self._down.in_features)
        for stack, (experts, rows, columns) in zip(self._ups, kept_of_ups, strict=True):
            wanted = inner if is_cut else (0, stack.out_features)
            if (experts, rows, columns) != (chosen, wanted, (0, stack.in_features)):
                raise self._refusal(
                    down, "What its rules give a rank of one projection does not fit what they give of another."
                )
        if is_cut and self._experts.has_bias:
            raise self._refusal(down, "Its experts have biases, which every rank would add.")

    def _kept_of_ups(self, ups: Sharding) -> list[Bounds]:
        """Return experts, rows and columns that are kept of each stack before the inner activations; in the model's parameter these lie one below the other."""
        total = sum(stack.out_features for stack in self._ups)
        kept = self._kept(ups)
        if [rows for _, rows, _ in kept] == [(0, total)]:
            [(experts, _, columns)] = kept
            return [(experts, (0, stack.out_features), columns) for stack in self._ups]
        if len(self._ups) > 1 and not self._experts.is_concatenated:
            raise self._refusal(
                ups, "In the model gate and up alternate, row by row, and in the checkpoint they are apart."
            )
        if len(kept) != len(self._ups):
            raise self._refusal(ups, "Each rank would have rows of gate and of up, which the checkpoint stores as one.")
        firsts = [sum(stack.out_features for stack in self._ups[:number]) for number in range(len(self._ups))]
        return [
            (experts, (rows[0] - first, rows[1] - first), columns)
            for first, (experts, rows, columns) in zip(firsts, kept, strict=True)
        ]

    def _kept(self, sharding: Sharding, *, num_parts: int | None = None) -> list[Bounds]:
        """Return experts, rows and columns of each part that is kept of a stacked parameter."""
        parts = [part for part in sharding.kept if part is not None]
        if len(parts) < len(sharding.kept) or num_parts not in (None, len(parts)):
            raise self._refusal(sharding, "Its rule gives each rank parts of a kind that is not known here.")
        return [(part[0], part[2], part[1]) if self._experts.is_transposed else part for part in parts]

    def _refusal(self, sharding: Sharding, why: str) -> UnsupportedQuantization:
        return refuse_packed(self._path, self._down.quantization.scheme.describe(), sharding.num_ranks, why)


def expert_slices(
    path: str, experts: PackedExperts, plain: Mapping[str, Plain], stacks: Mapping[str, Stack]
) -> list[Assembly]:
    """Return what fills this rank's part of ``experts``, which lie at ``path``, instead of those of ``plain`` and ``stacks`` that fill the whole of it."""
    found: list[Assembly] = []
    outputs: dict[str, Output] = {}
    slices: list[tuple[PackedSlice | Unwanted, int]] = []
    for projection, stack in zip((*experts.packed_ups, experts.packed_down), (*experts.ups, experts.down), strict=True):
        assert stack.cut is not None
        kept = (stack.first_expert, stack.first_expert + stack.num_experts)
        names = {role: f"{path}.{projection}.{part.suffix}" for role, part in stack.quantization.parts.items()}
        stored = {role: f"{path}.{projection}.{part.suffix}" for role, part in stack.stored.parts.items()}
        if stored[Role.CODES] in plain:
            entries = {role: plain[name].entry for role, name in stored.items() if role in names}
            found.append(PackedSlice(cut=stack.cut, entries=entries, names=names, experts=kept))
            continue
        for role, part in stack.quantization.parts.items():
            outputs[names[role]] = Output((stack.num_experts, *part.shape), part.dtype)
        for expert, entries in _entries_by_expert(stored, stacks).items():
            needed = {role: entry for role, entry in entries.items() if role in names}
            if kept[0] <= expert < kept[1]:
                slices.append((PackedSlice(cut=stack.cut, entries=needed, names=names), expert - kept[0]))
            else:
                slices.append((Unwanted(entries=needed, name=stored[Role.CODES]), 0))
            if rest := {role: entry for role, entry in entries.items() if role not in names}:
                slices.append((Unwanted(entries=rest, name=stored[Role.CODES]), 0))
    return [*found, StackedSlices(outputs=outputs, slices=slices)] if outputs else found


def _entries_by_expert(stored: Mapping[Role, str], stacks: Mapping[str, Stack]) -> dict[int, dict[Role, Entry]]:
    """Return the entries of the stack whose parts are ``stored`` under these names, by expert and role."""
    roles = {name: role for role, name in stored.items()}
    found: dict[int, dict[Role, Entry]] = {}
    for piece in stacks[stored[Role.CODES]].stacked:
        if piece.name in roles:
            assert isinstance(piece.source, Plain) and isinstance(piece.index[0], int)
            found.setdefault(piece.index[0], {})[roles[piece.name]] = piece.source.entry
    return found
