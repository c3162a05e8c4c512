"""What a quantization scheme is: which tensors make one weight, and what values they stand for. Every format is one `Scheme`; pure torch, no input or output.

Words: a *module* is what a weight matrix belongs to (``model.layers.0.mlp.up_proj``); its *parts* are the stored tensors that together make the weight, each in a
*role*. ``N`` is the number of output features (rows), ``K`` of input features (columns) of the logical weight.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

import torch


class Role(StrEnum):
    """What a stored tensor is to its weight."""

    CODES = "codes"
    """The packed values themselves: ``weight``, ``weight_packed``, ``qweight``, ``…_blocks``."""
    SCALE = "scale"
    """Per tensor, row, group or block: ``weight_scale``, ``weight_scale_inv``, ``scales``, ``…_scales``."""
    GLOBAL_SCALE = "global_scale"
    """The second scale of two-level formats: ``weight_scale_2`` (a factor), ``weight_global_scale`` (a divisor; the scheme knows which)."""
    ZERO_POINT = "zero_point"
    GROUP_INDEX = "group_index"
    """``g_idx``: the group that each input feature belongs to."""
    SHAPE = "shape"
    """``weight_shape``: the logical shape, stored as a tensor."""
    INPUT_SCALE = "input_scale"
    """Static scale of the layer's input: ``input_scale``, ``input_global_scale`` (a divisor), ``activation_scale``."""
    INPUT_ZERO_POINT = "input_zero_point"
    PRE_SCALE = "pre_scale"
    """``pre_quant_scale``: per input feature; the layer's input is multiplied by it before anything else."""


ROLES_OF_INPUT = frozenset({Role.INPUT_SCALE, Role.INPUT_ZERO_POINT, Role.PRE_SCALE})
"""Roles that say something of the layer's input, not of its weight."""


@dataclass(frozen=True, slots=True)
class StoredPart:
    """One part as it is stored: ``suffix`` is its name after the module's (``weight_packed``; with gpt-oss's ``gate_up_proj_blocks`` of module ``…experts.gate_up_proj``: ``_blocks``)."""

    suffix: str
    dtype: torch.dtype
    shape: tuple[int, ...]


Parts = Mapping[Role, torch.Tensor]
"""The tensors of one weight, by role."""


class Scheme(ABC):
    """One way to pack a weight. Subclasses are frozen dataclasses whose fields are the format's parameters (group size, block, bits, …).

    A scheme knows one weight of two dimensions; of stacked experts it is given one expert's parts at a time.
    """

    label: ClassVar[str]
    """What people call it: ``NVFP4``, ``FP8 per tensor``, ``INT4 group`` …; `describe` adds the parameters."""

    @abstractmethod
    def describe(self) -> str:
        """Return the label with its parameters: ``FP8 block 128x128``, ``INT4 group 32 symmetric``."""

    @abstractmethod
    def check(self, parts: Mapping[Role, StoredPart], *, module: str) -> tuple[int, int]:
        """Return the logical shape ``(N, K)`` that ``parts`` make, after checking every part's presence, dtype and shape.

        Raises `UnsupportedQuantization` that names the module, the part, what it is and what it must be. ``parts`` may hold `ROLES_OF_INPUT` as well; those are checked too.
        A shape that is stored as a tensor (`Role.SHAPE`) is not known here; the packed size then decides, and `dequantize` trims.
        """

    @abstractmethod
    def dequantize(
        self,
        parts: Parts,
        *,
        shape: tuple[int, int],
        dtype: torch.dtype = torch.float32,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the weight as ``[N, K]`` in ``dtype``: each value computed in float32 in the order that the format's maker uses, then rounded once.

        The inputs are not changed. The result owns its memory, or is ``out`` (``[N, K]``, ``dtype``, any strides) where that is given. Works on any device that holds ``parts``.
        """

    def check_values(self, parts: Parts, module: str) -> str | None:
        """Return a sentence that warns of small parts (zero points, indices) whose values contradict the configuration, and says how they are read; None where nothing does.

        Raises `UnsupportedQuantization` where they cannot be right.
        """
        return None

    @abstractmethod
    def pack(self, values: torch.Tensor, parts: Parts) -> torch.Tensor:
        """Return the codes for ``values`` (float32 ``[N, K]``) under the scales in ``parts`` (everything but `Role.CODES`), each rounded to the nearest code.

        ``pack(dequantize(parts), parts)`` gives the codes of ``parts`` back, up to codes of equal value (two zeros).
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class InputQuantization:
    """How a layer's input is rounded before the product, where the checkpoint's maker meant it to be."""

    format: str
    """``e4m3``, ``int8``, ``nvfp4``, ``mxfp4``, ``mxfp8``."""
    granularity: str
    """``tensor`` (static: one stored scale), ``token`` (dynamic: one scale per row), ``group`` (dynamic: one per ``group_size`` features of a row)."""
    group_size: int | None = None
    is_dynamic: bool = True
    """False: the scale is `Role.INPUT_SCALE`, stored. Of NVFP4 that is the second-level scale; its groups are always dynamic."""
    divisor: bool = False
    """The stored scale is a divisor (compressed-tensors' ``input_global_scale``), not a factor."""
    symmetric: bool = True
    power_of_two: str | None = None
    """How the step of a dynamic group becomes a power of two: ``up`` (ModelOpt; DeepSeek's ``scale_fmt: ue8m0``), ``nearest`` (compressed-tensors). None: up for MXFP4 and
    MXFP8, else not at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightQuantization:
    """Everything about one packed weight that does not depend on its values: what a layer is built from."""

    scheme: Scheme
    shape: tuple[int, int]
    """``(N, K)``."""
    parts: Mapping[Role, StoredPart]
    """Exactly what is stored, dtypes and shapes included: a layer declares its parameters so."""
    inputs: InputQuantization | None = None
    """None: the input is left as it is."""

    @property
    def packed_bytes(self) -> int:
        """Bytes of all parts as stored."""
        total = 0
        for part in self.parts.values():
            num_elements = 1
            for size in part.shape:
                num_elements *= size
            total += num_elements * part.dtype.itemsize
        return total
