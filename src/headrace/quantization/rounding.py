"""Rounds a layer's inputs, and cached keys and values, as the makers of quantized checkpoints meant them to be. Values in, values out: plain torch on any device.

Every rounding finds a step, divides by it, rounds to the nearest value of the format (ties to even), and multiplies by the step again; all in float32, then once to
the input's own dtype. The formulas are those of NVIDIA ModelOpt 0.47 (``tensor_quant.py``, ``fp4_kernel_hopper.py``, ``tensor_quant_mx.cu``), compressed-tensors 0.19
(``quantization/utils/helpers.py``, ``mxfp_utils.py``) and DeepSeek's ``act_quant``. Where they differ from what is done here:

- ModelOpt multiplies by 448 / amax, where amax is the largest value it saw while calibrating; the checkpoint holds amax / 448, and we divide by that. The results are apart by
  a few units in the last place, and a value within as much of the middle between two codes can fall to the other one. The same holds for INT8 with 127.
- ModelOpt's NVFP4 kernel rounds with a step of 1 (to zero) in groups whose step is below 1e-5, and its kernels turn infinities and NaN into the largest code. Here NaN stays NaN.
- compressed-tensors finds steps and quotients in the model's dtype, not in float32; in a float32 model nothing differs. For inputs of two dimensions its dynamic
  "per token" takes one step for the whole input; here it is one per row. It refuses rows that its groups do not divide; here the last group is shorter.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from headrace.errors import UnsupportedQuantization
from headrace.quantization.input_slices import InputSlice, Share, alone
from headrace.quantization.scheme import InputQuantization

E4M3_MAX = 448.0
E2M1_MAX = 6.0
INT8_RANGE = (-128.0, 127.0)

_WORDS = {"e4m3": "FP8", "int8": "INT8", "nvfp4": "NVFP4", "mxfp4": "MXFP4", "mxfp8": "MXFP8"}
_GRANULARITIES = {
    "e4m3": ("tensor", "token", "group"),
    "int8": ("tensor", "token", "group"),
    "nvfp4": ("group",),
    "mxfp4": ("group",),
    "mxfp8": ("group",),
}
_POWERS = (None, "up", "nearest")


def check_inputs(inputs: InputQuantization, *, has_scale: bool) -> None:
    """Raise `UnsupportedQuantization` where `round_inputs` has no such rounding, or where it is static and there is no stored scale."""
    if inputs.format not in _GRANULARITIES:
        what, known = f"An input is to be rounded to {inputs.format!r}.", f"Known formats: {', '.join(_GRANULARITIES)}."
    elif inputs.granularity not in _GRANULARITIES[inputs.format]:
        what = f"An input is to be rounded to {_WORDS[inputs.format]} per {inputs.granularity}."
        known = f"{_WORDS[inputs.format]} is known per {', '.join(_GRANULARITIES[inputs.format])}."
    elif inputs.granularity == "group" and not inputs.group_size:
        what, known = f"An input is to be rounded to {_WORDS[inputs.format]} by groups.", "No group size is given."
    elif inputs.power_of_two not in _POWERS:
        what, known = (
            f"The steps are to be powers of two by the rule {inputs.power_of_two!r}.",
            "Known rules: up, nearest.",
        )
    elif not inputs.is_dynamic and not has_scale and inputs.format != "nvfp4":
        what, known = "An input is to be rounded by a stored scale.", "The checkpoint has none for it."
    else:
        return
    raise UnsupportedQuantization(
        what, known, "Load with weights only (inputs left as they are), or with dequantize=True."
    )


def describe_inputs(inputs: InputQuantization | None) -> str:
    """Return how inputs are rounded, in words: ``FP8 static``, ``FP8 per token``, ``FP8 groups of 128``, ``NVFP4``, ``as they are``."""
    if inputs is None:
        return "as they are"
    words = _WORDS.get(inputs.format, inputs.format)
    if inputs.format not in ("e4m3", "int8"):
        return words
    if inputs.granularity == "group":
        words += f" groups of {inputs.group_size}"
    else:
        words += f" per {inputs.granularity}" if inputs.is_dynamic else " static"
    return words if inputs.symmetric else f"{words} asymmetric"


def round_inputs(
    x: Tensor,
    inputs: InputQuantization,
    scale: Tensor | None,
    zero_point: Tensor | None = None,
    part: InputSlice | None = None,
) -> Tensor:
    """Return ``x`` ``[…, K]`` rounded as ``inputs`` says, in ``x``'s dtype and shape; a new tensor, ``x`` is not changed.

    ``scale`` is the stored `Role.INPUT_SCALE` (one element, any float dtype): the step itself where ``inputs`` is static, and of NVFP4 the second-level scale (1 where it is
    None); dynamic roundings do not look at it. ``zero_point`` is the stored `Role.INPUT_ZERO_POINT` of static asymmetric INT8. Where ``x`` has some features only, ``part`` says which:
    it is then rounded as the same features of the whole input. Not differentiable.
    """
    check_inputs(inputs, has_scale=scale is not None)
    with torch.no_grad():
        values = x.float()
        if inputs.granularity != "group":
            share = alone if part is None else part.of_rows()
            return _round_rows(values, inputs, _scalar(scale), _scalar(zero_point), share).to(x.dtype)
        size = int(inputs.group_size or 0)
        share, before = (alone, 0) if part is None else (part.of_groups(size), part.features_before(size))
        return _by_groups(
            values, size, lambda groups: _round_groups(groups, inputs, _scalar(scale), share), before=before
        ).to(x.dtype)


def round_kv(x: Tensor, format: str, group_size: int | None, scale: Tensor | None) -> Tensor:
    """Return keys or values ``x`` ``[batch, num_heads, num_tokens, head_dim]`` rounded as they would be cached, in ``x``'s dtype.

    ``format`` is ``e4m3``, with ``scale`` the step, or ``nvfp4``: groups of ``group_size`` features with ``scale`` as their second-level factor. ``scale`` has one element,
    or one for each head in any shape; None is 1.
    """
    if format not in ("e4m3", "nvfp4"):
        raise UnsupportedQuantization(
            f"Keys and values are to be cached as {format!r}.", "Known formats: e4m3, nvfp4.", "Load with weights only."
        )
    with torch.no_grad():
        values = x.float()
        factor = torch.ones(1, device=x.device) if scale is None else scale.float()
        if format == "e4m3":
            factor = factor.reshape(-1, 1, 1)
            return (to_e4m3(values / factor) * factor).to(x.dtype)
        factor = factor.reshape(-1, 1, 1, 1)
        return _by_groups(values, group_size or 16, lambda groups: _round_nvfp4(groups, factor, False)).to(x.dtype)


def to_e4m3(values: Tensor) -> Tensor:
    """Return float32 ``values`` rounded to E4M3, in float32: ties to even, beyond ±448 saturated, NaN kept."""
    return values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float()


def to_e2m1(values: Tensor) -> Tensor:
    """Return float32 ``values`` rounded to E2M1 (0, ½, 1, 1½, 2, 3, 4, 6), in float32: ties to even, beyond ±6 saturated, NaN kept."""
    values = values.clamp(-E2M1_MAX, E2M1_MAX)
    magnitudes = values.abs()
    # Codes are ½ apart below 2, 1 apart below 4, then 2 apart; an even multiple of that spacing is a code with an even last bit.
    spacing = torch.where(magnitudes < 2, 0.5, torch.where(magnitudes < 4, 1.0, 2.0))
    return (values / spacing).round() * spacing


def to_int8(values: Tensor) -> Tensor:
    """Return float32 ``values`` rounded to whole numbers from -128 to 127, in float32: ties to even, NaN kept."""
    return values.round().clamp(*INT8_RANGE)


def _round_rows(
    values: Tensor, inputs: InputQuantization, scale: Tensor | None, zero_point: Tensor | None, share: Share
) -> Tensor:
    """Round with the stored step, or with one per row (or for all of it) that is found here."""
    if not inputs.is_dynamic:
        assert scale is not None
        step = 1 / scale if inputs.divisor else scale
        if inputs.format == "int8" and zero_point is not None:
            return (to_int8(values / step + zero_point) - zero_point) * step
        return (to_int8 if inputs.format == "int8" else to_e4m3)(values / step) * step
    if not values.numel():
        return values
    if inputs.granularity == "tensor":
        return _round_dynamic(values.reshape(1, -1), inputs, share).reshape(values.shape)
    return _round_dynamic(values, inputs, share)


def _round_groups(groups: Tensor, inputs: InputQuantization, scale: Tensor | None, share: Share) -> Tensor:
    """Round ``groups`` ``[…, num_groups, group_size]``, each with a step of its own."""
    if inputs.format == "nvfp4":
        factor = torch.ones((), device=groups.device) if scale is None else scale
        return _round_nvfp4(groups, factor, inputs.divisor and scale is not None, share)
    if inputs.format == "mxfp4":
        return _round_power_of_two(groups, E2M1_MAX, to_e2m1, inputs.power_of_two or "up", share)
    if inputs.format == "mxfp8":
        return _round_power_of_two(groups, E4M3_MAX, to_e4m3, inputs.power_of_two or "up", share)
    return _round_dynamic(groups, inputs, share)


def _round_dynamic(values: Tensor, inputs: InputQuantization, share: Share) -> Tensor:
    """Round with one step for each row of the last dimension, so that its largest magnitude is the largest code."""
    if inputs.format == "int8":
        return _round_dynamic_int8(values, inputs.symmetric, share)
    power = inputs.power_of_two
    if power is not None:
        return _round_power_of_two(values, E4M3_MAX, to_e4m3, power, share)
    step = share(_amax(values)) / E4M3_MAX
    return to_e4m3(_divide(values, step)) * step


def _round_dynamic_int8(values: Tensor, symmetric: bool, share: Share) -> Tensor:
    # 255 steps between -128 and 127, as compressed-tensors has it: symmetric ranges end half a step beyond 127, which saturates.
    if symmetric:
        step = share(_amax(values)) / 127.5
        return to_int8(_divide(values, step)) * step
    lowest = values.amin(dim=-1, keepdim=True).clamp(max=0)
    highest = values.amax(dim=-1, keepdim=True).clamp(min=0)
    ends = share(torch.cat((-lowest, highest), dim=-1))
    low, high = -ends[..., :1], ends[..., 1:]
    step = (high - low) / 255
    zero = to_int8(INT8_RANGE[0] - _divide(low, step))
    return (to_int8(_divide(values, step) + zero) - zero) * step


def _round_nvfp4(groups: Tensor, scale: Tensor, divisor: bool, share: Share = alone) -> Tensor:
    """Round ``groups`` to E2M1 with steps that are E4M3 numbers times a second-level ``scale`` (or divided by it)."""
    # Each in the order of operations of the tool that stores the scale so.
    amax = share(_amax(groups))
    if divisor:
        step = to_e4m3(scale * (amax / E2M1_MAX)) / scale
    else:
        step = to_e4m3(amax / (E2M1_MAX * scale)) * scale
    return to_e2m1(_divide(groups, step)) * step


def _round_power_of_two(
    groups: Tensor, largest: float, to_code: Callable[[Tensor], Tensor], rule: str, share: Share
) -> Tensor:
    """Round ``groups`` with steps that are powers of two, from 2**-127 to 2**127 (E8M0)."""
    amax = share(_amax(groups))
    step = _power_above(amax / largest) if rule == "up" else _power_near(amax, largest)
    return to_code(groups / step) * step


def _power_above(ratio: Tensor) -> Tensor:
    """Return the smallest power of two that is at least ``ratio`` (float32, not negative): ``2**ceil(log2(ratio))``, from its bits, hence exactly."""
    bits = ratio.view(torch.int32)
    return _power(torch.where(bits <= 1 << 22, 0, (bits + 0x7FFFFF) >> 23))


def _power_near(amax: Tensor, largest: float) -> Tensor:
    """Return the power of two that brings ``amax`` near ``largest``: that of amax, the next one from 1.75 times on, over that of the format's largest code.

    In compressed-tensors' MXFP4 a group whose largest magnitude is 6 to 7 times the step saturates.
    """
    biased = ((amax.view(torch.int32) + (1 << 21)) >> 23) & 0xFF
    return _power(biased - (2 if largest == E2M1_MAX else 8))


def _power(biased: Tensor) -> Tensor:
    """Return ``2**(biased - 127)`` in float32, from 2**-127, which is subnormal, to 2**127."""
    biased = biased.clamp(0, 254)
    return torch.where(biased == 0, 1 << 22, biased << 23).to(torch.int32).view(torch.float32)


def _by_groups(values: Tensor, size: int, round_groups: Callable[[Tensor], Tensor], *, before: int = 0) -> Tensor:
    """Apply ``round_groups`` to ``values`` cut into ``[…, num_groups, size]``; zeros stand meanwhile for what a last group lacks, and for the features of the first that lie ``before``."""
    columns = values.shape[-1]
    if not values.numel():
        return values
    if before or (before + columns) % size:
        values = torch.nn.functional.pad(values, (before, -(before + columns) % size))
    return round_groups(values.reshape(*values.shape[:-1], -1, size)).flatten(-2)[..., before : before + columns]


def _amax(values: Tensor) -> Tensor:
    return values.abs().amax(dim=-1, keepdim=True)


def _divide(values: Tensor, step: Tensor) -> Tensor:
    """Return ``values / step``, and ``values`` themselves where the step is zero: there they are zero too, or so small that they round to it."""
    return values / torch.where(step == 0, 1.0, step)


def _scalar(scale: Tensor | None) -> Tensor | None:
    """Return a stored scale in float32, without dimensions where it has one element."""
    if scale is None:
        return None
    return scale.float().reshape(()) if scale.numel() == 1 else scale.float()
