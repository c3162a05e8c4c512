"""What a model is fed: values that are not read yet, each made of one stored tensor or assembled from several. Pure; knows no engine.

An `Assembly` turns stored tensors into values under names of a state dict. Most take one tensor as it is (`Plain`); a dequantized weight comes from its packed parts
(`Expansion`), a stack of experts from the tensors of each (`Stack`). An assembly reads all its entries in one go, in the order of the files, when the first of its values is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch

from headrace.checkpoint import DTYPES, Entry
from headrace.quantization.scheme import ROLES_OF_INPUT, Role, WeightQuantization
from headrace.quantization.slices import WeightSlice
from headrace.streaming import torch_dtype, torch_shape
from headrace.streaming.room import Block

Take = Callable[[Entry], torch.Tensor]
"""Waits for one stored tensor and hands it over; each entry once."""

FindBlock = Callable[[str], torch.Tensor | None]
"""Returns the memory (flat uint8) in which the pieces of a stacked value arrive, each in its place; None where they arrive elsewhere."""


def no_block(name: str) -> torch.Tensor | None:
    """Say that pieces arrive elsewhere."""
    return None


_SPELLINGS = {stored.torch_name: name for name, stored in DTYPES.items() if stored.torch_name and stored.packed == 1}


@dataclass(frozen=True, slots=True)
class Output:
    """The shape and dtype of a value."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    spelling: str | None = field(default=None, compare=False)
    """The stored dtype, where the value is a stored tensor as it is."""


class Assembly(Protocol):
    """Stored tensors → values. ``pieces`` are in the order of reading, each with the name of the value that it helps to make."""

    @property
    def pieces(self) -> Sequence[tuple[Entry, str]]: ...

    @property
    def outputs(self) -> Mapping[str, Output]: ...

    def build(self, take: Take, block: FindBlock) -> Mapping[str, torch.Tensor | list[torch.Tensor]]:
        """Return all values, having taken every piece once, in order. A list has the parts of a value that are asked for, in that order."""


class Single(Protocol):
    """An assembly of one value, which can be put into memory that is there already."""

    @property
    def pieces(self) -> Sequence[tuple[Entry, str]]: ...

    @property
    def output(self) -> Output: ...

    def fill(self, take: Take, out: torch.Tensor) -> None:
        """Take every piece and leave the value in ``out``, which has its shape and dtype and any strides."""


@dataclass(frozen=True, slots=True)
class Plain:
    """One stored tensor, as it is, under ``name``."""

    entry: Entry
    name: str

    @property
    def pieces(self) -> Sequence[tuple[Entry, str]]:
        return ((self.entry, self.name),)

    @property
    def output(self) -> Output:
        return Output(torch_shape(self.entry), torch_dtype(self.entry), self.entry.dtype)

    @property
    def outputs(self) -> Mapping[str, Output]:
        return {self.name: self.output}

    def fill(self, take: Take, out: torch.Tensor) -> None:
        tensor = take(self.entry)
        if tensor.data_ptr() != out.data_ptr() or not tensor.numel():
            out.copy_(tensor.reshape(out.shape))

    def build(self, take: Take, block: FindBlock = no_block) -> dict[str, torch.Tensor]:
        return {self.name: take(self.entry)}


@dataclass(frozen=True, kw_only=True)
class Expansion:
    """One packed weight, expanded: ``[N, K]`` in ``dtype``, or ``[E, N, K]`` where the file stacks ``num_experts``; last two dimensions swapped where ``is_transposed``.

    ``fold_input_scale`` multiplies the weight's columns by the scale that its input would be multiplied by, for weights in stacks, whose layer has no place for that scale.
    """

    name: str
    weight: WeightQuantization
    entries: Mapping[Role, Entry]
    dtype: torch.dtype
    num_experts: int | None = None
    is_transposed: bool = False
    fold_input_scale: bool = False
    notes: list[str] = field(default_factory=list, compare=False)
    """Gets a sentence for every weight whose values contradict the configuration."""

    @cached_property
    def pieces(self) -> Sequence[tuple[Entry, str]]:
        left_out = ROLES_OF_INPUT - {Role.PRE_SCALE} if self.fold_input_scale else ROLES_OF_INPUT
        wanted = [entry for role, entry in self.entries.items() if role not in left_out]
        return [(entry, self.name) for entry in sorted(wanted, key=_place)]

    @property
    def output(self) -> Output:
        rows, columns = self.weight.shape
        shape = (columns, rows) if self.is_transposed else (rows, columns)
        leading = () if self.num_experts is None else (self.num_experts,)
        return Output((*leading, *shape), self.dtype)

    @property
    def outputs(self) -> Mapping[str, Output]:
        return {self.name: self.output}

    def fill(self, take: Take, out: torch.Tensor) -> None:
        roles = {entry.name: role for role, entry in self.entries.items()}
        parts = {roles[entry.name]: take(entry) for entry, _ in self.pieces}
        target = out.transpose(-1, -2) if self.is_transposed else out
        if self.num_experts is None:
            self.expand(parts, target)
            return
        for expert in range(self.num_experts):
            self.expand({role: part[expert] for role, part in parts.items()}, target[expert])

    def build(self, take: Take, block: FindBlock = no_block) -> dict[str, torch.Tensor]:
        output = self.output
        out = torch.empty(output.shape, dtype=output.dtype)
        self.fill(take, out)
        return {self.name: out}

    def expand(self, parts: dict[Role, torch.Tensor], out: torch.Tensor, cut: WeightSlice | None = None) -> None:
        """Write into ``out`` (``[N, K]``, any strides) what ``parts`` stand for, which are those of ``cut`` where only that is wanted; they are used up."""
        scheme, shape = (self.weight.scheme, self.weight.shape) if cut is None else (cut.scheme, cut.shape)
        note = scheme.check_values(parts, self.name.removesuffix(".weight"))
        if note is not None:
            self.notes.append(note)
        pre_scale = parts.pop(Role.PRE_SCALE, None)
        if pre_scale is None:
            scheme.dequantize(parts, shape=shape, dtype=self.dtype, out=out)
        else:
            exact = scheme.dequantize(parts, shape=shape, dtype=torch.float32)
            out.copy_(exact.mul_(pre_scale.to(torch.float32)))


@dataclass(frozen=True, slots=True)
class StackPiece:
    """A value that becomes the region ``index`` of the stacked value ``name``."""

    source: Plain | Expansion
    name: str
    index: tuple[int | slice, ...]


@dataclass(frozen=True, kw_only=True)
class Stack:
    """Stacked values that are filled together, since their pieces lie side by side in the files: all experts of a layer, with every part of theirs.

    A piece is in memory only until it has been put into its place.
    """

    outputs: Mapping[str, Output]
    stacked: Sequence[StackPiece]
    """In any order; together they cover every value exactly once."""

    @cached_property
    def _ordered(self) -> Sequence[StackPiece]:
        return sorted(self.stacked, key=lambda piece: _place(piece.source.pieces[0][0]))

    @cached_property
    def pieces(self) -> Sequence[tuple[Entry, str]]:
        return [(entry, piece.name) for piece in self._ordered for entry, _ in piece.source.pieces]

    def blocks(self) -> list[Block]:
        """Return the memory in which the stacked values can arrive piece by piece; none for those whose pieces are expanded."""
        found = []
        for name, output in self.outputs.items():
            pieces = [piece for piece in self.stacked if piece.name == name]
            whole = torch.empty(output.shape, dtype=output.dtype, device="meta")
            offsets = {
                piece.source.entry.name: int(whole[piece.index].storage_offset()) * output.dtype.itemsize
                for piece in pieces
                if isinstance(piece.source, Plain)
            }
            if len(offsets) == len(pieces):
                found.append(Block(name=name, size_bytes=whole.nbytes, offsets=offsets))
        return found

    def build(self, take: Take, block: FindBlock = no_block) -> dict[str, torch.Tensor]:
        built = {}
        for name, output in self.outputs.items():
            memory = block(name)
            built[name] = (
                torch.empty(output.shape, dtype=output.dtype)
                if memory is None
                else memory.view(output.dtype).view(output.shape)
            )
        del memory
        for piece in self._ordered:
            piece.source.fill(take, built[piece.name][piece.index])
        return built


Index = Any
"""What a value is asked for by: ``...`` for all of it, or slices for the part that this rank keeps."""


class LazyValue:
    """What stands in a state dict for a value that is not there yet: it knows its shape and dtype, and is asked for itself, by ``[...]``, or for parts, by slices."""

    __slots__ = ("_fetch", "_spelling", "dtype", "shape")

    def __init__(self, output: Output, fetch: Callable[[Index], torch.Tensor]) -> None:
        self._fetch = fetch
        self._spelling = output.spelling
        self.dtype = output.dtype
        self.shape = torch.Size(output.shape)

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._fetch(index)

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def get_dtype(self) -> str:
        """Return the dtype in safetensors' spelling, as Transformers expects of a lazily read value."""
        return self._spelling or _SPELLINGS[str(self.dtype).removeprefix("torch.")]

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point

    def numel(self) -> int:
        return self.shape.numel()

    @property
    def ndim(self) -> int:
        return len(self.shape)


Asked = Mapping[str, Sequence[Index]]
"""Value → what is asked of it, in order."""


class _Running:
    """One assembly that is built when its first value is asked for; each value is handed over as often as it was in the rehearsal, and then no reference to it is kept."""

    __slots__ = ("_assembly", "_block", "_built", "_left", "_take")

    def __init__(self, assembly: Assembly, take: Take, block: FindBlock, asked: Asked) -> None:
        self._assembly = assembly
        self._take = take
        self._block = block
        self._left = {name: len(asked.get(name, (...,))) for name in assembly.outputs}
        self._built: dict[str, torch.Tensor | list[torch.Tensor]] | None = None

    def fetch(self, name: str, index: Index) -> torch.Tensor:
        if self._built is None:
            self._built = dict(self._assembly.build(self._take, self._block))
        self._left[name] -= 1
        value = self._built[name] if self._left[name] else self._built.pop(name)
        if isinstance(value, list):
            return value.pop(0)
        if index is Ellipsis:
            return value
        part = value[index]
        # A view would keep the rest in memory for as long as the part is used.
        return part if part.shape == value.shape else part.clone(memory_format=torch.contiguous_format)


class _Rehearsed:
    """Stands for a running assembly in a rehearsal: notes what would be taken, and gives values without memory."""

    __slots__ = ("_asked", "_assembly", "_note", "_noted")

    def __init__(self, assembly: Assembly, note: Callable[[Assembly], None], asked: dict[str, list[Index]]) -> None:
        self._assembly = assembly
        self._note = note
        self._asked = asked
        self._noted = False

    def fetch(self, name: str, index: Index) -> torch.Tensor:
        self._asked.setdefault(name, []).append(index)
        if not self._noted:
            self._noted = True
            self._note(self._assembly)
        output = self._assembly.outputs[name]
        whole = torch.empty(output.shape, dtype=output.dtype, device="meta")
        return whole if index is Ellipsis else whole[index]


class StoredValues(Mapping[str, LazyValue]):
    """Every stored tensor as a value, by its own name; made when it is looked at."""

    def __init__(self, entries: Mapping[str, Entry], take: Take) -> None:
        self._entries = entries
        self._take = take

    def __getitem__(self, name: str) -> LazyValue:
        entry = self._entries[name]
        plain = Plain(entry, name)
        return LazyValue(plain.output, lambda index: _Running(plain, self._take, no_block, {}).fetch(name, index))

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def state_dict(
    assemblies: Iterable[Assembly], take: Take, block: FindBlock = no_block, asked: Asked | None = None
) -> dict[str, LazyValue]:
    """Return all values of ``assemblies``, by name. Each may be fetched as often as ``asked`` has it, once where it does not."""
    return _lazy(assemblies, lambda assembly: _Running(assembly, take, block, asked or {}))


def rehearsed_state_dict(
    assemblies: Iterable[Assembly], note: Callable[[Assembly], None], asked: dict[str, list[Index]]
) -> dict[str, LazyValue]:
    """Return values on the meta device that tell ``note`` which assemblies would be built, in order, and ``asked`` what is asked of each value."""
    return _lazy(assemblies, lambda assembly: _Rehearsed(assembly, note, asked))


def _lazy(assemblies: Iterable[Assembly], running: Callable[[Assembly], Any]) -> dict[str, LazyValue]:
    values: dict[str, LazyValue] = {}
    for assembly in assemblies:
        runs = running(assembly)
        for name, output in assembly.outputs.items():
            values[name] = LazyValue(output, _fetcher(runs, name))
    return values


def _fetcher(runs: Any, name: str) -> Callable[[Index], torch.Tensor]:
    def fetch(index: Index) -> torch.Tensor:
        tensor: torch.Tensor = runs.fetch(name, index)
        return tensor

    return fetch


def _place(entry: Entry) -> tuple[str, int]:
    return entry.file, entry.start
