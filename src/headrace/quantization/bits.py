"""Small unsigned numbers packed densely into bytes and 32-bit words, lowest bits first. Knows no format: what the numbers mean is said elsewhere.

Value ``i`` of a row lies at bits ``[i * bits, (i + 1) * bits)`` of the row, taken as one long number in little-endian order. Sizes that do not divide 32 cross from one
word into the next, so 32 values always fill ``bits`` words. GPTQ (AutoGPTQ 0.7, also for 3 bits) and compressed-tensors 0.19 (``pack_to_int32``) both pack so.
Words are read through their bytes, which is right on little-endian machines; torch and safetensors are at home on no others.
"""

from __future__ import annotations

import torch

WORD_BITS = 32


def num_words(num_values: int, bits: int) -> int:
    """Return how many words hold ``num_values`` values."""
    return -(-num_values * bits // WORD_BITS)


def num_values(words: int, bits: int) -> int:
    """Return how many whole values fit into ``words`` words."""
    return words * WORD_BITS // bits


def unpack_bits(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the values of ``words`` (int32 ``[rows, W]``) as uint8 ``[rows, num_values(W, bits)]``. With 8 bits the result is a view of contiguous ``words``, else it owns its memory."""
    octets = without_gaps(words).view(torch.uint8)
    if bits == 8:
        return octets
    if bits == 4:
        return torch.stack((octets & 0x0F, octets >> 4), dim=-1).view(octets.shape[0], -1)
    return _unpack_any(octets, bits)[:, : num_values(words.shape[1], bits)]


def pack_bits(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Return ``values`` (any integer type, ``[rows, C]``, each in ``[0, 2**bits)``) as int32 words ``[rows, num_words(C, bits)]``; bits past the last value are zero."""
    rows, count = values.shape
    words = num_words(count, bits)
    padded = torch.zeros(rows, -(-count // WORD_BITS) * WORD_BITS, dtype=torch.int16, device=values.device)
    padded[:, :count] = values
    octets = torch.zeros(rows, padded.shape[1] // 8, bits + 1, dtype=torch.int16, device=values.device)
    for place in range(8):
        octet, shift = divmod(place * bits, 8)
        moved = padded[:, place::8] << shift
        octets[:, :, octet] |= moved & 0xFF
        octets[:, :, octet + 1] |= moved >> 8
    packed = octets[:, :, :bits].to(torch.uint8).reshape(rows, -1).view(torch.int32)
    return packed[:, :words].contiguous()


def without_gaps(words: torch.Tensor) -> torch.Tensor:
    """Return ``words`` (two dimensions) so that they can be viewed as smaller numbers: `Tensor.contiguous` leaves any stride in a dimension of one element."""
    words = words.contiguous()
    return words if words.stride(-1) == 1 else words.clone(memory_format=torch.contiguous_format)


def _unpack_any(octets: torch.Tensor, bits: int) -> torch.Tensor:
    """Eight values fill ``bits`` bytes, so the same eight shifts serve every such group."""
    rows, count = octets.shape
    groups = -(-count // bits)
    padded = torch.zeros(rows, groups * bits + 1, dtype=torch.int16, device=octets.device)
    padded[:, :count] = octets
    values = torch.empty(rows, groups, 8, dtype=torch.uint8, device=octets.device)
    for place in range(8):
        octet, shift = divmod(place * bits, 8)
        pair = padded[:, octet::bits][:, :groups] | (padded[:, octet + 1 :: bits][:, :groups] << 8)
        values[:, :, place] = (pair >> shift) & ((1 << bits) - 1)
    return values.view(rows, groups * 8)
