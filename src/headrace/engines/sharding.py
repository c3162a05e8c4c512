"""What Transformers has cut a parameter of a model (on the meta device) to, for each rank of a tensor- or expert-parallel group. Uses private names of Transformers (5.24)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.distributed.sharding_utils import DtensorShardOperation, _local_shard_size_and_offset

from headrace.engines.cuts import bounds_of
from headrace.engines.values import Index, LazyValue, Output
from headrace.quantization.input_slices import InputSlice
from headrace.quantization.weight_cuts import Bounds


@dataclass(frozen=True)
class Sharding:
    """The parts of one parameter that this rank keeps."""

    parameter: Tensor
    """As Transformers left it: a `DTensor` where it is cut."""

    @classmethod
    def taken_from(cls, layer: nn.Module, name: str) -> Sharding:
        """Return what the parameter ``name`` of ``layer`` was cut to, and take it out of the layer."""
        parameter = layer._parameters.pop(name)
        assert parameter is not None
        return cls(parameter)

    @property
    def is_whole(self) -> bool:
        return self.kept == [tuple((0, size) for size in self.parameter.shape)]

    @property
    def num_ranks(self) -> int:
        return self.parameter.device_mesh.size() if isinstance(self.parameter, DTensor) else 1

    @cached_property
    def kept(self) -> list[Bounds | None]:
        """The parts in the order in which the rank has them: what Transformers would ask of a stored tensor. None for one that is no slice, or is of a mesh of several dimensions."""
        asked: list[Index] = []
        whole = torch.empty(self.parameter.shape, dtype=self.parameter.dtype, device="meta")
        if not isinstance(self.parameter, DTensor):
            return [bounds_of(..., whole.shape)]
        if self.parameter.device_mesh.ndim != 1:
            return [None]

        def fetch(index: Index) -> Tensor:
            asked.append(index)
            return whole[index]

        DtensorShardOperation(self.parameter).shard_tensor(LazyValue(Output(tuple(whole.shape), whole.dtype), fetch))
        return [bounds_of(index, whole.shape) for index in asked]

    @property
    def too_few(self) -> str | None:
        """Return a sentence where so little is divided that a rank has none of it, the same on all ranks; else None."""
        if not isinstance(self.parameter, DTensor):
            return None
        for placement in self.parameter.placements:
            dimension = getattr(placement, "dim", None)
            if dimension is not None:
                # Of weights one below the other in one parameter (gate and up) each is divided by itself.
                length = -(-self.parameter.shape[dimension] // getattr(placement, "split_factor", 1))
                if any(size == 0 for size, _ in self._parts_of(length)):
                    return f"There are {length} features to divide, and one of the ranks would have none."
        return None

    def input_slice(self, num_features: int) -> InputSlice:
        """Return what a layer has to know whose ``num_features`` input features the ranks divide; largest magnitudes are found over their group."""
        assert isinstance(self.parameter, DTensor)
        mesh = self.parameter.device_mesh
        group = mesh.get_group()

        def share(largest: Tensor) -> Tensor:
            largest = largest.contiguous()
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
            return largest

        starts = tuple(start for _, start in self._parts_of(num_features))
        return InputSlice(starts=starts, rank=mesh.get_local_rank(), num_features=num_features, share=share)

    def _parts_of(self, length: int) -> list[tuple[int, int]]:
        """Return size and start for each rank."""
        return [_local_shard_size_and_offset(length, self.num_ranks, rank) for rank in range(self.num_ranks)]
