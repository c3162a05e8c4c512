"""Consumers that fuse stored tensors into the parameters of an engine, and checkpoints for them: plain and in three packed formats, their parts in any order and in several files.

An engine makes one layer of several stored modules (q, k and v; gate and up; DeepSeek's ``q_a_proj`` and ``kv_a_proj_with_mqa``). It gets there in several ways, each of which is a
consumer here: it copies each part into its rows as it comes, or puts parts aside, as they came, until the others are there, for each tensor or for the whole layer, or until a weight
has its scales.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.support.weight_files import INDEX, StoredTensor, WeightFile

E4M3 = torch.float8_e4m3fn
COLUMNS = 320
"""Two and a half blocks."""
BLOCK = 128

Tensors = dict[str, torch.Tensor]
Stream = Iterable[tuple[str, torch.Tensor]]


@dataclass(frozen=True, slots=True, eq=False)
class Fusion:
    """A layer of an engine's model, and the stored modules that are its rows, from the top down, each with how many."""

    name: str
    parts: Mapping[str, int]

    @property
    def num_rows(self) -> int:
        return sum(self.parts.values())


FUSIONS = (
    # As DeepSeek has it: whole blocks, and then one and a piece.
    Fusion("layers.0.self_attn.fused_qkv_a_proj_with_mqa", {"q_a_proj": 256, "kv_a_proj_with_mqa": 144}),
    Fusion("layers.0.mlp.gate_up_proj", {"gate_proj": 160, "up_proj": 160}),
    # Blocks cut in the middle: three rows of scales, as many as one grid over all rows would have.
    Fusion("layers.1.self_attn.fused_qkv_a_proj_with_mqa", {"q_a_proj": 192, "kv_a_proj_with_mqa": 80}),
    Fusion("layers.1.mlp.gate_up_proj", {"gate_proj": 130, "up_proj": 126}),
    Fusion("layers.2.self_attn.qkv_proj", {"q_proj": 200, "k_proj": 72, "v_proj": 72}),
    Fusion("layers.2.mlp.gate_up_proj", {"gate_proj": 96, "up_proj": 200}),
)


class Format:
    """One way to store a module: how its tensors are made, which of them have rows of their own, and what they stand for, by the maker's formula in plain torch."""

    name: str
    rows_of: Mapping[str, int] = {"weight": 1}
    """Suffix to how many rows of the weight one row of that tensor is for: these are put one below the other. All else is one number, and each part keeps its own."""

    def make(self, num_rows: int, generator: torch.Generator, num_columns: int = COLUMNS) -> Tensors:
        """Return a module's tensors by suffix, with random values."""
        raise NotImplementedError

    def expand(self, stored: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return what a module's tensors stand for: float32 ``[num_rows, num_columns]``."""
        raise NotImplementedError


class Bf16(Format):
    name = "bf16"

    def make(self, num_rows: int, generator: torch.Generator, num_columns: int = COLUMNS) -> Tensors:
        return {"weight": torch.randn(num_rows, num_columns, generator=generator).to(torch.bfloat16)}

    def expand(self, stored: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return stored["weight"].float()


class BlockFp8(Format):
    """DeepSeek's layout: a scale for each 128 × 128 values of a module, the last ones of fewer."""

    name = "block FP8"
    rows_of: Mapping[str, int] = {"weight": 1, "weight_scale_inv": BLOCK}

    def make(self, num_rows: int, generator: torch.Generator, num_columns: int = COLUMNS) -> Tensors:
        grid = (-(-num_rows // BLOCK), -(-num_columns // BLOCK))
        return {
            "weight": torch.randn(num_rows, num_columns, generator=generator).to(E4M3),
            "weight_scale_inv": torch.rand(grid, generator=generator) + 0.25,
        }

    def expand(self, stored: Mapping[str, torch.Tensor]) -> torch.Tensor:
        num_rows, num_columns = stored["weight"].shape
        scales = stored["weight_scale_inv"].repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        return stored["weight"].float() * scales[:num_rows, :num_columns]


class ModeloptFp8(Format):
    """One scale for a module, and one for its input."""

    name = "ModelOpt FP8"

    def make(self, num_rows: int, generator: torch.Generator, num_columns: int = COLUMNS) -> Tensors:
        return {
            "weight": torch.randn(num_rows, num_columns, generator=generator).to(E4M3),
            "weight_scale": torch.rand((), generator=generator) + 0.01,
            "input_scale": torch.rand((), generator=generator) + 0.01,
        }

    def expand(self, stored: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return stored["weight"].float() * stored["weight_scale"]


class ModeloptNvfp4(Format):
    """Two values in a byte, the lower half first; an FP8 scale for 16 of them, and one scale over these."""

    name = "ModelOpt NVFP4"
    rows_of: Mapping[str, int] = {"weight": 1, "weight_scale": 1}
    magnitudes = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

    def make(self, num_rows: int, generator: torch.Generator, num_columns: int = COLUMNS) -> Tensors:
        return {
            "weight": torch.randint(0, 256, (num_rows, num_columns // 2), generator=generator, dtype=torch.uint8),
            "weight_scale": (torch.rand(num_rows, num_columns // 16, generator=generator) * 400 + 1).to(E4M3),
            "weight_scale_2": torch.rand((), generator=generator) * 1e-4 + 1e-5,
            "input_scale": torch.rand((), generator=generator) + 0.01,
        }

    def expand(self, stored: Mapping[str, torch.Tensor]) -> torch.Tensor:
        codes = torch.stack([stored["weight"] & 15, stored["weight"] >> 4], dim=-1).flatten(1).long()
        values = torch.tensor([*self.magnitudes, *(-value for value in self.magnitudes)])[codes]
        return values * (stored["weight_scale"].float() * stored["weight_scale_2"]).repeat_interleave(16, 1)


FORMATS: tuple[Format, ...] = (Bf16(), BlockFp8(), ModeloptFp8(), ModeloptNvfp4())


# -- checkpoints


def module_name(fusion: Fusion, part: str) -> str:
    """Return the name of a stored module."""
    return f"model.{fusion.name.rpartition('.')[0]}.{part}"


def make_tensors(format_: Format, *, seed: int = 0) -> Tensors:
    """Return everything that a checkpoint holds, under stored names: the parts of `FUSIONS`, and between them tensors that nothing fuses."""
    generator = torch.Generator().manual_seed(seed)
    found: Tensors = {}
    for fusion in FUSIONS:
        for part, num_rows in fusion.parts.items():
            for suffix, tensor in format_.make(num_rows, generator).items():
                found[f"{module_name(fusion, part)}.{suffix}"] = tensor
        found[f"{module_name(fusion, 'after')}.weight"] = torch.randn(90, 200, generator=generator).to(torch.bfloat16)
        found[f"{module_name(fusion, 'norm')}.weight"] = torch.randn(201, generator=generator).to(torch.bfloat16)
    return found


FIRST = ("q_a_proj", "q_proj", "gate_proj", "q_conv1d", "w1")
LAST = ("kv_a_proj_with_mqa", "v_proj", "up_proj", "v_conv1d", "w3")

Layout = Callable[[Sequence[str]], list[list[str]]]
"""Names in → names of each file, in the order in which they lie there."""


def in_order(names: Sequence[str]) -> list[list[str]]:
    return [list(names)]


def _apart(names: Sequence[str], first: Sequence[str], last: Sequence[str]) -> list[list[str]]:
    def part(name: str) -> str:
        return name.split(".")[-2] if "." in name else ""

    return [
        [name for name in names if part(name) in first],
        [name for name in names if part(name) not in (*first, *last)],
        [name for name in names if part(name) in last],
    ]


def first_parts_first(names: Sequence[str]) -> list[list[str]]:
    """The first parts in one file, the last ones in another, and a file between them."""
    return _apart(names, FIRST, LAST)


def last_parts_first(names: Sequence[str]) -> list[list[str]]:
    return _apart(names, LAST, FIRST)


def scales_first(names: Sequence[str]) -> list[list[str]]:
    """Scales in one file and weights in another, those of the last layer first."""
    scales = [name for name in names if not name.endswith(".weight")]
    rest = [name for name in names if name.endswith(".weight")]
    return [file[::-1] for file in (scales, rest) if file]


def shuffled(seed: int) -> Layout:
    def place(names: Sequence[str]) -> list[list[str]]:
        chooser = random.Random(seed)
        order = chooser.sample(list(names), len(names))
        files: list[list[str]] = [[], [], []]
        for name in order:
            chooser.choice(files).append(name)
        return [file for file in files if file]

    return place


LAYOUTS: Mapping[str, Layout] = {
    "in order": in_order,
    "first parts first": first_parts_first,
    "last parts first": last_parts_first,
    "scales first": scales_first,
    "shuffled": shuffled(1),
    "shuffled otherwise": shuffled(2),
}


def save_checkpoint(folder: Path, tensors: Mapping[str, torch.Tensor], layout: Layout) -> Path:
    """Write ``tensors`` as safetensors files with an index, each file's bytes in the order of ``layout`` (no writer's own), and return ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    files = layout(list(tensors))
    assert sorted(name for file in files for name in file) == sorted(tensors)
    weight_map: dict[str, str] = {}
    for number, names in enumerate(files, 1):
        path = folder / f"model-{number:05}-of-{len(files):05}.safetensors"
        stored = {name: StoredTensor.of(tensors[name]) for name in names}
        path.write_bytes(WeightFile(stored, {"format": "pt"}).encode())
        weight_map |= dict.fromkeys(names, path.name)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


# -- the engine's side


class FusedLayer:
    """A layer of an engine's model. Its parameters are there before the load, full of NaN, and each is filled part by part."""

    def __init__(self, format_: Format, fusion: Fusion) -> None:
        self.format = format_
        self.fusion = fusion
        self.parameters: Tensors = {}
        sample = format_.make(1, torch.Generator())
        for suffix, tensor in sample.items():
            shape = (self._rows(suffix)[-1][1], *tensor.shape[1:]) if tensor.dim() else (len(fusion.parts),)
            empty = torch.empty(shape, dtype=tensor.dtype)
            empty.view(torch.uint8).fill_(0xFF)
            self.parameters[suffix] = empty

    def load(self, suffix: str, tensor: torch.Tensor, part: str) -> None:
        """Copy a stored tensor to its place: ``weight_loader(param, loaded_weight, shard_id)``."""
        parameter, position = self.parameters[suffix], list(self.fusion.parts).index(part)
        if suffix in self.format.rows_of:
            start, stop = self._rows(suffix)[position]
            parameter.narrow(0, start, stop - start).copy_(tensor)
        else:
            parameter[position].copy_(tensor)

    def set_whole(self, suffix: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Make a parameter of the stored tensors of all parts: rows one below the other, one number beside the other."""
        ordered = [tensors[part] for part in self.fusion.parts]
        join = torch.cat if suffix in self.format.rows_of else torch.stack
        self.parameters[suffix] = join(ordered)

    def part(self, part: str) -> Tensors:
        """Return views of what belongs to one part."""
        position = list(self.fusion.parts).index(part)
        return {
            suffix: parameter[slice(*self._rows(suffix)[position])]
            if suffix in self.format.rows_of
            else parameter[position]
            for suffix, parameter in self.parameters.items()
        }

    def _rows(self, suffix: str) -> list[tuple[int, int]]:
        """Return the rows ``[start, stop)`` of each part. Each begins with a row, and so a block, of its own."""
        found, start = [], 0
        for num_rows in self.fusion.parts.values():
            stop = start + -(-num_rows // self.format.rows_of.get(suffix, 1))
            found.append((start, stop))
            start = stop
        return found


@dataclass(slots=True)
class EngineModel:
    """What is loaded: fused layers by name, and everything else as it is stored."""

    layers: dict[str, FusedLayer]
    plain: Tensors

    @classmethod
    def empty(cls, format_: Format) -> EngineModel:
        return cls({fusion.name: FusedLayer(format_, fusion) for fusion in FUSIONS}, {})

    def find(self, name: str) -> tuple[FusedLayer, str, str] | None:
        """Return the layer that a stored name is a part of, which part, and the suffix; None for what nothing fuses. As ``stacked_params_mapping`` says."""
        module, _, suffix = name.rpartition(".")
        parent, _, part = module.removeprefix("model.").rpartition(".")
        for layer in self.layers.values():
            if layer.fusion.name.rpartition(".")[0] == parent and part in layer.fusion.parts:
                return layer, part, suffix
        return None


Consumer = Callable[[Stream, EngineModel], None]


def copying_rows(stream: Stream, model: EngineModel) -> None:
    """Copy each part into its rows as it comes; keep nothing."""
    for name, tensor in stream:
        found = model.find(name)
        if found is None:
            model.plain[name] = torch.empty_like(tensor).copy_(tensor)
        else:
            layer, part, suffix = found
            layer.load(suffix, tensor, part)


def holding_tensors(stream: Stream, model: EngineModel) -> None:
    """Put a tensor aside, as it came, until the same tensor of the layer's other parts has come; then join them."""
    waiting: dict[tuple[str, str], Tensors] = {}
    for name, tensor in stream:
        found = model.find(name)
        if found is None:
            model.plain[name] = tensor.clone()
            continue
        layer, part, suffix = found
        held = waiting.setdefault((layer.fusion.name, suffix), {})
        held[part] = tensor
        if len(held) == len(layer.fusion.parts):
            layer.set_whole(suffix, waiting.pop((layer.fusion.name, suffix)))
    assert not waiting


def holding_layers(stream: Stream, model: EngineModel) -> None:
    """Put everything of a layer aside, as it came, until all of it has come; then copy each part into its rows."""
    waiting: dict[str, dict[str, Tensors]] = {}
    for name, tensor in stream:
        found = model.find(name)
        if found is None:
            model.plain[name] = tensor.clone()
            continue
        layer, part, suffix = found
        held = waiting.setdefault(layer.fusion.name, {})
        held.setdefault(part, {})[suffix] = tensor
        if sum(map(len, held.values())) == len(layer.fusion.parts) * len(layer.parameters):
            for one, tensors in waiting.pop(layer.fusion.name).items():
                for each, stored in tensors.items():
                    layer.load(each, stored, one)
    assert not waiting


def holding_views(stream: Stream, model: EngineModel) -> None:
    """As `holding_tensors`, but what is put aside is a view of the tensor, and the tensor itself is dropped."""
    holding_tensors(((name, tensor.detach()[...]) for name, tensor in stream), model)


CONSUMERS: tuple[Consumer, ...] = (copying_rows, holding_tensors, holding_layers, holding_views)


def expanding(stream: Stream, format_: Format) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each layer's name and its float32 weight. A weight is put aside, as it came, until its scales have come, and is expanded into its rows then."""
    model = EngineModel.empty(format_)
    needed = len(format_.make(1, torch.Generator()))
    expanded = {fusion.name: torch.full((fusion.num_rows, COLUMNS), torch.nan) for fusion in FUSIONS}
    left = {fusion.name: len(fusion.parts) for fusion in FUSIONS}
    waiting: dict[tuple[str, str], Tensors] = {}
    for name, tensor in stream:
        found = model.find(name)
        if found is None:
            continue
        layer, part, suffix = found
        held = waiting.setdefault((layer.fusion.name, part), {})
        held[suffix] = tensor
        if len(held) == needed:
            values = format_.expand(waiting.pop((layer.fusion.name, part)))
            start = sum(
                layer.fusion.parts[one] for one in list(layer.fusion.parts)[: list(layer.fusion.parts).index(part)]
            )
            expanded[layer.fusion.name].narrow(0, start, len(values)).copy_(values)
            left[layer.fusion.name] -= 1
            if not left[layer.fusion.name]:
                yield layer.fusion.name, expanded.pop(layer.fusion.name)
    assert not waiting and not expanded
