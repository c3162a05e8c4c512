"""Linear layers over packed weights: the weight is expanded for each product and dropped after it. Plain torch, on any device."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from headrace.quantization.input_slices import InputSlice
from headrace.quantization.parameters import FixedTypes, add_parts, drop_parts, parts_of, round_scaled, scale_inputs
from headrace.quantization.rounding import check_inputs, describe_inputs
from headrace.quantization.scheme import Role, WeightQuantization
from headrace.quantization.weight_cuts import WeightCut


class QuantizedLinear(FixedTypes):
    """A linear layer whose weight stays packed.

    Its parameters are the stored parts, each under its stored name (``weight_packed``, ``weight_scale``, …), type and shape, and ``bias`` where it has one. They are made
    with undefined values; whoever loads fills them. Casting the module casts the bias alone. A packed weight has no gradient.
    """

    def __init__(
        self,
        weight: WeightQuantization,
        *,
        has_bias: bool,
        dtype: torch.dtype,
        quantize_inputs: bool = True,
        device: torch.device | str | None = None,
    ) -> None:
        """Make a layer for ``weight``; ``dtype`` is that of the bias.

        ``quantize_inputs=False`` runs it weight-only: inputs are not rounded. A pre-scale counts all the same, for the weight was divided by it.
        Raises `UnsupportedQuantization` for a rounding of inputs that is not known.
        """
        super().__init__()
        self.quantization = self.stored = weight
        self.out_features, self.in_features = weight.shape
        self.quantize_inputs = quantize_inputs and weight.inputs is not None
        if self.quantize_inputs and weight.inputs is not None:
            check_inputs(weight.inputs, has_scale=Role.INPUT_SCALE in weight.parts)
        add_parts(self, weight, stack=(), device=device)
        self.cut: WeightCut | None = None
        self.input_slice: InputSlice | None = None
        self.bias: nn.Parameter | None = None
        if has_bias:
            self.bias = nn.Parameter(torch.empty(self.out_features, dtype=dtype, device=device))

    def keep_slice(self, cut: WeightCut, input_slice: InputSlice | None = None) -> None:
        """Become one rank's part of the layer: parts are made anew for the slice ``cut``, with undefined values, and what is in the layer is dropped.

        The input then has the features of the slice alone, which ``input_slice`` tells from those of other ranks, and the output its rows, or with columns alone its share of the
        sum. ``out_features``, ``in_features`` and ``stored`` stay the whole layer's, for whoever puts the ranks' outputs together. The bias is left as it is.
        """
        device = self.get_parameter(self.fixed_names[0]).device
        drop_parts(self)
        self.cut, self.input_slice = cut, input_slice
        self.quantization = cut.narrowed(self.quantization)
        add_parts(self, self.quantization, stack=(), device=device)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` ``[…, in_features]`` times the weight, plus the bias, as ``[…, out_features]`` in ``x``'s dtype."""
        parts = parts_of(self, self.quantization, of_input=True)
        x = scale_inputs(x, parts)
        rounded = round_scaled(x, self.quantization, parts, self.input_slice) if self.quantize_inputs else x
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return functional.linear(rounded, self.dequantized(x.dtype), bias)

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the weight ``[out_features, in_features]`` in ``dtype``, of a rank's layer its slice: a new tensor. The pre-scale is not in it."""
        weight = self.quantization
        with torch.no_grad():
            return weight.scheme.dequantize(parts_of(self, weight, of_input=False), shape=weight.shape, dtype=dtype)

    def extra_repr(self) -> str:
        """Return sizes, scheme and the rounding of inputs, for ``print(model)``."""
        inputs = describe_inputs(self.quantization.inputs if self.quantize_inputs else None)
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"scheme={self.quantization.scheme.describe()}, inputs={inputs}"
            + (f", of which {list(self.quantization.shape)} are this rank's" if self.cut is not None else "")
        )


class ScaledLinear(nn.Linear):
    """A plain linear layer that first multiplies its input by ``pre_quant_scale`` ``[in_features]``: what a layer with a pre-scale is once its weight is expanded."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias=bias, device=device, dtype=dtype)
        scale = torch.ones(in_features, dtype=dtype, device=device)
        self.pre_quant_scale = nn.Parameter(scale, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x * pre_quant_scale`` times the weight, plus the bias, in ``x``'s dtype."""
        return super().forward(x * self.pre_quant_scale.to(x.dtype))
