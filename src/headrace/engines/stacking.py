"""Gives each expert's weight its place inside the stacked parameter that it belongs to, so that no stack is made of copies at the end. Pure, but for asking where names go."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headrace.engines.renaming import Renamer, StackSlot
from headrace.engines.values import Assembly, Expansion, Output, Plain, Stack, StackPiece


@dataclass(frozen=True, slots=True)
class _Placed:
    source: Plain | Expansion
    slot: StackSlot


def stack_experts(renamer: Renamer, assemblies: Sequence[Assembly]) -> list[Assembly]:
    """Return ``assemblies`` with those that are experts' weights joined: one `Stack` for each module of experts whose stacked parameters they fill exactly.

    What does not fit exactly (an expert too few, another shape) stays as it is, for the placement to name it.
    """
    by_target: dict[str, list[_Placed]] = defaultdict(list)
    for assembly in assemblies:
        if isinstance(assembly, Plain | Expansion):
            slot = renamer.slot(assembly.name)
            if slot is not None:
                by_target[slot.target].append(_Placed(assembly, slot))
    stacks: dict[str, list[tuple[str, Output, list[StackPiece]]]] = defaultdict(list)
    for target, placed in by_target.items():
        shape = tuple(renamer.wanted[target].shape)
        pieces = _pieces(target, placed, shape) if renamer.is_plain(target) else None
        if pieces is not None:
            output = Output(shape, placed[0].source.output.dtype)
            stacks[target.rpartition(".")[0]].append((target, output, pieces))
    joined = {piece.source.name for stack in stacks.values() for _, _, pieces in stack for piece in pieces}
    rest = [item for item in assemblies if not (isinstance(item, Plain | Expansion) and item.name in joined)]
    return [*rest, *(_joined(stack) for stack in stacks.values())]


def _joined(stack: Sequence[tuple[str, Output, list[StackPiece]]]) -> Stack:
    return Stack(
        outputs={target: output for target, output, _ in stack},
        stacked=[piece for _, _, pieces in stack for piece in pieces],
    )


def _pieces(target: str, placed: Sequence[_Placed], shape: tuple[int, ...]) -> list[StackPiece] | None:
    """Return the region of every piece, or None where they do not fill ``shape`` (``[num_experts, rows, columns]``) exactly."""
    if len(shape) != 3 or len({item.source.output.dtype for item in placed}) != 1:
        return None
    rows = _rows(placed, columns=shape[2])
    num_positions = placed[0].slot.num_positions
    if rows is None or set(rows) != set(range(num_positions)) or sum(rows.values()) != shape[1]:
        return None
    if {(item.slot.expert, item.slot.position) for item in placed} != {
        (expert, position) for expert in range(shape[0]) for position in range(num_positions)
    } or len(placed) != shape[0] * num_positions:
        return None
    starts = {position: sum(rows[before] for before in range(position)) for position in rows}
    return [
        StackPiece(
            item.source,
            target,
            (
                item.slot.expert,
                slice(starts[item.slot.position], starts[item.slot.position] + rows[item.slot.position]),
            ),
        )
        for item in placed
    ]


def _rows(placed: Sequence[_Placed], *, columns: int) -> Mapping[int, int] | None:
    """Return the rows of the weights at each position, or None where they differ or have other columns."""
    rows: dict[int, int] = {}
    for item in placed:
        shape = item.source.output.shape
        if len(shape) != 2 or shape[1] != columns or rows.setdefault(item.slot.position, shape[0]) != shape[0]:
            return None
    return rows
