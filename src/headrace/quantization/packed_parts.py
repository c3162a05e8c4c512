"""Checks of the stored parts of packed weights, by their headers alone. Each refusal names the module, the part, what it is and what it must be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from headrace.errors import UnsupportedQuantization
from headrace.quantization.bits import num_values
from headrace.quantization.scheme import ROLES_OF_INPUT, Role, Scheme, StoredPart

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_INTEGERS = (torch.int8, torch.uint8, torch.int32, torch.int64)
_MEND = "Check that config.json and the tensors belong together: headrace inspect shows both."


@dataclass(frozen=True, slots=True)
class PartCheck:
    """The parts of one module, as one scheme looks at them."""

    scheme: Scheme
    module: str
    parts: Mapping[Role, StoredPart]

    def only(self, *roles: Role) -> None:
        """Refuse parts in any other role; `ROLES_OF_INPUT` may always be there."""
        for role, part in self.parts.items():
            if role not in roles and role not in ROLES_OF_INPUT:
                raise UnsupportedQuantization(
                    f"{self._name(part)} is not a part of {self.scheme.describe()}.",
                    f"That format has {' and '.join(', '.join(roles).rsplit(', ', 1))} only; this is its {role}.",
                    _MEND,
                )

    def required(self, role: Role, suffix: str) -> StoredPart:
        """Return the part in ``role``, which files call ``suffix``."""
        if role not in self.parts:
            raise UnsupportedQuantization(
                f"{self.module}.{suffix} is missing.",
                f"{self.scheme.describe()} needs it; of this module there are: {', '.join(sorted(part.suffix for part in self.parts.values())) or 'none'}.",
                _MEND,
            )
        return self.parts[role]

    def expect(self, part: StoredPart, is_right: bool, must: str) -> None:
        """Refuse ``part`` unless ``is_right``; ``must`` says what it must be: ``I32 [N, K / 8]``."""
        if not is_right:
            is_odd_float = "floating" in must and part.dtype.is_floating_point and part.dtype not in FLOATS
            kinds = f" Floating is {' or '.join(map(_kind, FLOATS))}." if is_odd_float else ""
            raise UnsupportedQuantization(
                f"{self._name(part)} is {_kind(part.dtype)} {list(part.shape)}.",
                f"In {self.scheme.describe()} it must be {must}.{kinds}",
                _MEND,
            )

    def expect_matrix(self, part: StoredPart, dtype: torch.dtype, must: str) -> tuple[int, int]:
        """Return both sizes of ``part``, after checking that it has two, neither 0, and ``dtype``."""
        self.expect(part, part.dtype is dtype and len(part.shape) == 2 and 0 not in part.shape, must)
        rows, columns = part.shape
        return rows, columns

    def expect_index(self) -> int | None:
        """Return the length of ``g_idx`` where there is one."""
        part = self.parts.get(Role.GROUP_INDEX)
        if part is None:
            return None
        is_right = part.dtype in (torch.int32, torch.int64) and len(part.shape) == 1 and part.shape[0] > 0
        self.expect(part, is_right, "int32 [K]")
        return part.shape[0]

    def expect_inputs(self, num_columns: int) -> None:
        """Check the parts that say something of the layer's input, which has ``num_columns`` features."""
        for role in sorted(ROLES_OF_INPUT & self.parts.keys()):
            part = self.parts[role]
            if role is Role.PRE_SCALE:
                self.expect(
                    part,
                    part.dtype in FLOATS and part.shape == (num_columns,),
                    f"floating [{num_columns}], one per input feature",
                )
            else:
                is_number = part.dtype in FLOATS or (role is Role.INPUT_ZERO_POINT and part.dtype in _INTEGERS)
                self.expect(part, is_number and part.shape in ((), (1,)), "one floating number")

    def _name(self, part: StoredPart) -> str:
        return f"{self.module}.{part.suffix}"


def columns_of(
    words: int, bits: int, *, num_groups: int, group_size: int | None, index_length: int | None = None
) -> int | None:
    """Return how many input features ``words`` packed words per row stand for, or None where no number of them makes ``num_groups`` groups.

    The last word may be partly used. The length of ``g_idx`` then decides, else full groups, else full words.
    """
    most, fewest = num_values(words, bits), num_values(words - 1, bits) + 1
    if index_length is not None:
        columns = index_length
    else:
        columns = most if group_size is None else min(most, num_groups * group_size)
    expected = 1 if group_size is None else -(-columns // group_size)
    return columns if fewest <= columns <= most and expected == num_groups else None


def require_parameters(
    format: str, *, group_size: int | None, bits: int = 4, known_bits: tuple[int, ...] = (4,)
) -> None:
    """Raise `UnsupportedQuantization` for parameters that ``format`` does not have, or that cannot be read."""
    if bits not in known_bits:
        known = " or ".join(", ".join(map(str, known_bits)).rsplit(", ", 1))
        raise UnsupportedQuantization(
            f"Weights of {format} with {bits} bits cannot be read.",
            f"Known are {known} bits.",
            "Use a checkpoint of the same model with one of these.",
        )
    if group_size is not None and group_size < 1:
        raise UnsupportedQuantization(
            f"Weights of {format} are said to have groups of {group_size}.",
            "A group has at least one input feature.",
            "Take config.json from where the model was made.",
        )


def index_warning(index: torch.Tensor | None, num_groups: int, name: str, *, is_literal: bool = False) -> str | None:
    """Return a sentence that warns of an ``index``, stored as ``name``, that is 0 throughout beside several groups; None of any other that can be right, and of one that ``is_literal``.

    Raises `UnsupportedQuantization` where it names a group that does not exist. -1 throughout stands for no index (see `group_of_columns`).
    """
    if index is None or num_groups == 1:
        return None
    lowest, highest = int(index.amin()), int(index.amax())
    if lowest == highest == 0 and not is_literal:
        return f"{name} is 0 throughout, but there are {num_groups} groups; groups are taken to follow one another."
    if highest >= num_groups or (lowest < 0 and not lowest == highest == -1):
        raise UnsupportedQuantization(
            f"{name} names group {highest if highest >= num_groups else lowest}.",
            f"The weight has {num_groups} groups, counted from 0.",
            "Take the tensors of this module from where the model was made.",
        )
    return None


def slice_input_parts(parts: Mapping[Role, torch.Tensor], columns: tuple[int, int]) -> dict[Role, torch.Tensor]:
    """Return the parts of ``parts`` that say something of the input, for input features ``[start, stop)``."""
    found = {role: parts[role] for role in ROLES_OF_INPUT & parts.keys()}
    if Role.PRE_SCALE in found:
        found[Role.PRE_SCALE] = found[Role.PRE_SCALE][slice(*columns)]
    return found


def _kind(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
