"""GPTQ's integers, as AutoGPTQ, GPTQModel and AutoRound write them (AutoGPTQ 0.7.1, ``nn_modules/qlinear``; AutoRound 0.15.1, ``auto_gptq`` layout).

Stored by columns of the weight:

- ``qweight`` int32 ``[K * bits / 32, N]``: low bits first along K, unsigned.
- ``qzeros`` int32 ``[G, N * bits / 32]``: low bits first along N. Version 1 (``checkpoint_format: gptq``, or no label) stores the zero point minus 1, modulo ``2**bits``; version 2
  (``gptq_v2``) stores it as it is. Some writers leave zero points unpacked: any type, ``[G, N]``, by the same rule of versions.
- ``scales`` ``[G, N]``.
- ``g_idx`` int32 ``[K]``: the group of each input feature. With ``desc_act`` it is a real order. Absent, or zero throughout beside several groups: groups follow one another.

The value is ``(code - zero) * scale[g_idx]``.

Symmetric weights have one zero point, ``2**(bits - 1)``; stored is 8 (version 2) or 7 (version 1) for 4 bits. So of symmetric weights both stored values are read as that one, whatever
version the label says, and `Gptq.check_values` tells of a wrong label. Of asymmetric weights only the label says which version it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from headrace.errors import UnsupportedQuantization
from headrace.quantization.bits import num_words, pack_bits, unpack_bits
from headrace.quantization.code_blocks import result_tensor, slice_words, turned_word_blocks
from headrace.quantization.group_scales import GroupScales, cut_groups, group_scales
from headrace.quantization.packed_parts import (
    FLOATS,
    PartCheck,
    columns_of,
    index_warning,
    require_parameters,
    slice_input_parts,
)
from headrace.quantization.scheme import Parts, Role, Scheme, StoredPart

_UNPACKED = (torch.int8, torch.uint8, torch.int16, torch.int32, *FLOATS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gptq(Scheme):
    """GPTQ, versions 1 and 2."""

    label: ClassVar[str] = "GPTQ"
    bits: int = 4
    """2, 3, 4 or 8."""
    group_size: int | None = None
    """Input features per scale; None (``group_size: -1`` in files): one scale per row."""
    version: int = 1
    """1: stored zero points are one less than what they mean."""
    symmetric: bool = True
    """``sym``: every zero point is ``2**(bits - 1)``."""
    is_slice: bool = False
    """Of a slice of a weight: an index means what it says, also where it is 0 throughout."""

    def __post_init__(self) -> None:
        require_parameters("GPTQ", group_size=self.group_size, bits=self.bits, known_bits=(2, 3, 4, 8))
        if self.version not in (1, 2):
            raise UnsupportedQuantization(
                f"Weights of GPTQ version {self.version} cannot be read.",
                "Known are version 1 (checkpoint_format gptq) and 2 (gptq_v2).",
                "Use a checkpoint of the same model in one of these.",
            )

    def describe(self) -> str:
        groups = "per row" if self.group_size is None else f"group {self.group_size}"
        return f"GPTQ v{self.version} INT{self.bits} {groups} {'symmetric' if self.symmetric else 'asymmetric'}"

    def check(self, parts: Mapping[Role, StoredPart], *, module: str) -> tuple[int, int]:
        check = PartCheck(self, module, parts)
        check.only(Role.CODES, Role.SCALE, Role.ZERO_POINT, Role.GROUP_INDEX)
        codes, scale = check.required(Role.CODES, "qweight"), check.required(Role.SCALE, "scales")
        zeros = check.required(Role.ZERO_POINT, "qzeros")
        words, rows = check.expect_matrix(codes, torch.int32, f"int32 [K * {self.bits} / 32, N]")
        is_right = scale.dtype in FLOATS and len(scale.shape) == 2 and scale.shape[1] == rows and scale.shape[0] > 0
        must = f"floating [{'1' if self.group_size is None else f'ceil(K / {self.group_size})'}, {rows}]"
        check.expect(scale, is_right, must)
        groups, length = scale.shape[0], check.expect_index()
        columns = columns_of(words, self.bits, num_groups=groups, group_size=self.group_size, index_length=length)
        check.expect(scale, columns is not None, f"{must}, where K is what {words} words in qweight hold")
        assert columns is not None
        packed = (groups, num_words(rows, self.bits))
        is_packed = zeros.dtype is torch.int32 and zeros.shape == packed
        is_right = is_packed or (zeros.dtype in _UNPACKED and zeros.shape == (groups, rows))
        check.expect(zeros, is_right, f"int32 {list(packed)}, or unpacked {[groups, rows]}")
        check.expect_inputs(columns)
        return rows, columns

    def check_values(self, parts: Parts, module: str) -> str | None:
        """Return a sentence that warns of zero points or a group index that contradict the configuration, and says how they are read; None where nothing does.

        Reads the small parts only. Raises `UnsupportedQuantization` where weights that are said to be symmetric have other zero points than symmetric ones, and where ``g_idx``
        names groups that do not exist.
        """
        index, num_groups = parts.get(Role.GROUP_INDEX), parts[Role.SCALE].shape[0]
        found = (
            self._zero_point_warning(self._stored_zero(parts), module),
            index_warning(index, num_groups, f"{module}.g_idx", is_literal=self.is_slice),
        )
        return " ".join(sentence for sentence in found if sentence) or None

    def dequantize(
        self,
        parts: Parts,
        *,
        shape: tuple[int, int],
        dtype: torch.dtype = torch.float32,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        words = parts[Role.CODES]
        result = result_tensor(shape, dtype, words.device, out)
        scales = self._scales(parts, shape[1])
        scales.write(turned_word_blocks(words, self.bits, scales.base, self.group_size), result)
        return result

    def pack(self, values: torch.Tensor, parts: Parts) -> torch.Tensor:
        codes = self._scales(parts, values.shape[1]).nearest(values)
        return pack_bits(codes, self.bits).t().contiguous()

    def at(self, row: int, column: int) -> Gptq:
        """Return the scheme of a slice of a weight of this one."""
        return replace(self, is_slice=True)

    def slice_parts(
        self, parts: Parts, *, shape: tuple[int, int], rows: tuple[int, int], columns: tuple[int, int]
    ) -> dict[Role, torch.Tensor]:
        """Return parts that stand for rows and columns ``[start, stop)`` of the weight of ``shape``; views of ``parts`` where words need no new packing.

        Zero points come unpacked. A weight with an index keeps all groups; with one group the index is left out.
        """
        groups, index = cut_groups(
            columns,
            num_columns=shape[1],
            num_groups=parts[Role.SCALE].shape[0],
            group_size=self.group_size,
            index=parts.get(Role.GROUP_INDEX),
            device=parts[Role.SCALE].device,
            is_literal=self.is_slice,
        )
        cut = slice_input_parts(parts, columns)
        cut[Role.CODES] = slice_words(parts[Role.CODES][:, slice(*rows)].t(), self.bits, columns).t()
        cut[Role.SCALE] = parts[Role.SCALE][groups, slice(*rows)]
        cut[Role.ZERO_POINT] = self._stored_zero(parts)[groups, slice(*rows)]
        if index is not None:
            cut[Role.GROUP_INDEX] = index
        return cut

    @property
    def _mask(self) -> int:
        return (1 << self.bits) - 1

    @property
    def _middle(self) -> int:
        return 1 << (self.bits - 1)

    def _scales(self, parts: Parts, num_columns: int) -> GroupScales:
        return group_scales(
            scale=parts[Role.SCALE].t(),
            zero=self._zero(parts).t(),
            bits=self.bits,
            num_columns=num_columns,
            group_size=self.group_size,
            index=parts.get(Role.GROUP_INDEX),
            is_literal=self.is_slice,
        )

    def _stored_zero(self, parts: Parts) -> torch.Tensor:
        """Return the zero points as they are stored, unpacked: ``[G, N]``, uint8 out of packed ones."""
        stored = parts[Role.ZERO_POINT]
        groups, rows = parts[Role.SCALE].shape
        if stored.dtype is torch.int32 and stored.shape == (groups, num_words(rows, self.bits)):
            return unpack_bits(stored, self.bits)[:, :rows]
        return stored

    def _zero(self, parts: Parts) -> torch.Tensor:
        """Return what the zero points mean: ``[G, N]``, int32 or floating."""
        stored = self._stored_zero(parts)
        zero = stored if stored.is_floating_point() else stored.to(torch.int32)
        if self.version == 1:
            zero = zero + 1
        if not zero.is_floating_point():
            zero = zero & self._mask
        if self.symmetric:
            zero = torch.where(self._is_symmetric(stored), self._middle, zero)
        return zero

    def _is_symmetric(self, stored: torch.Tensor) -> torch.Tensor:
        return (stored == self._middle) | (stored == self._middle - 1)

    def _zero_point_warning(self, stored: torch.Tensor, module: str) -> str | None:
        other = 3 - self.version
        of_label, of_other = (self._middle - (version == 1) for version in (self.version, other))
        if bool((stored == of_other).all()):
            told = f"All zero points of {module} are stored as {of_other}, as symmetric weights of version {other} have them, but the checkpoint is labelled version {self.version}"
            return (
                f"{told}; read as version {other}." if self.symmetric else f"{told} and asymmetric; read by the label."
            )
        if self.symmetric and not bool((stored == of_label).all()):
            raise UnsupportedQuantization(
                f"{module} is said to be symmetric, but its zero points are stored as {_some(stored)}.",
                f"Symmetric weights of version {self.version} have {of_label} throughout.",
                'If the zero points are right, write "sym": false into the quantization section of config.json.',
            )
        return None


def _some(stored: torch.Tensor) -> str:
    """Return the lowest and highest value in words."""
    return f"{float(stored.amin()):g} to {float(stored.amax()):g}"
