"""A layer over a packed weight computes what a plain one would with the weight expanded."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.support.byte_scheme import byte_weight, fill
from tests.support.closeness import assert_computed_alike
from tests.support.shared_largest import SharedLargest
from torch.nn import functional

from headrace.errors import UnsupportedQuantization
from headrace.quantization.fp8 import Fp8Channel
from headrace.quantization.input_slices import InputSlice
from headrace.quantization.linear import QuantizedLinear, ScaledLinear
from headrace.quantization.rounding import round_inputs
from headrace.quantization.scheme import InputQuantization, Role, StoredPart, WeightQuantization
from headrace.quantization.slices import slice_weight
from headrace.quantization.weight_cuts import WeightCut

STATIC = InputQuantization(format="e4m3", granularity="tensor", is_dynamic=False)
TOKEN = InputQuantization(format="e4m3", granularity="token")
X = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(9))


def layer(
    *extra: Role, inputs: InputQuantization | None = None, has_bias: bool = True, **options: bool
) -> QuantizedLinear:
    """Return a layer of 6 × 8 with values in it."""
    weight = byte_weight(6, 8, *extra, inputs=inputs)
    made = QuantizedLinear(weight, has_bias=has_bias, dtype=torch.float32, **options)
    fill(made)
    return made


def expanded(made: QuantizedLinear) -> torch.Tensor:
    return made.get_parameter("weight").float() * made.get_parameter("weight_scale").float()


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_product_is_that_with_the_expanded_weight(dtype: torch.dtype, has_bias: bool) -> None:
    made = layer(has_bias=has_bias)
    bias = made.bias.to(dtype) if made.bias is not None else None
    assert torch.equal(made.dequantized(), expanded(made))
    product = made(X.to(dtype))
    assert product.dtype == dtype
    assert torch.equal(product, functional.linear(X.to(dtype), expanded(made).to(dtype), bias))


@pytest.mark.parametrize("inputs", [STATIC, TOKEN])
def test_inputs_are_rounded_unless_it_runs_weight_only(inputs: InputQuantization) -> None:
    made = layer(Role.INPUT_SCALE, inputs=inputs)
    scale = made.get_parameter("input_scale")
    rounded = round_inputs(X, inputs, scale)
    assert not torch.equal(rounded, X)
    assert torch.equal(made(X), functional.linear(rounded, expanded(made), made.bias))
    plain = layer(Role.INPUT_SCALE, inputs=inputs, quantize_inputs=False)
    assert torch.equal(plain(X), functional.linear(X, expanded(plain), plain.bias))
    assert "input_scale" in plain.state_dict()


def test_the_pre_scale_comes_before_the_rounding_and_counts_weight_only_too() -> None:
    made = layer(Role.PRE_SCALE, Role.INPUT_SCALE, inputs=STATIC)
    scaled = X * made.get_parameter("pre_quant_scale").float()
    rounded = round_inputs(scaled, STATIC, made.get_parameter("input_scale"))
    assert torch.equal(made(X), functional.linear(rounded, expanded(made), made.bias))
    plain = layer(Role.PRE_SCALE, Role.INPUT_SCALE, inputs=STATIC, quantize_inputs=False)
    assert torch.equal(plain(X), functional.linear(scaled, expanded(plain), plain.bias))


def test_parts_of_a_fused_projection_keep_their_own_scales() -> None:
    ones = {}
    for name, scale in (("q", 1.0), ("k", 0.5), ("v", 0.0078125)):
        made = layer(has_bias=False)
        made.get_parameter("weight").data.fill_(1)
        made.get_parameter("weight_scale").data.fill_(scale)
        ones[name] = made
    x = torch.ones(1, 8)
    assert {name: made(x).unique().tolist() for name, made in ones.items()} == {"q": [8.0], "k": [4.0], "v": [0.0625]}


def test_it_is_made_on_the_meta_device_and_loaded_by_name() -> None:
    weight = byte_weight(6, 8, Role.INPUT_SCALE, inputs=STATIC)
    made = QuantizedLinear(weight, has_bias=True, dtype=torch.bfloat16, device="meta")
    assert {parameter.device.type for parameter in made.parameters()} == {"meta"}
    assert (made.in_features, made.out_features) == (8, 6)
    source = layer(Role.INPUT_SCALE, inputs=STATIC)
    made.to_empty(device="cpu").load_state_dict(source.state_dict())
    assert torch.equal(made.dequantized(), source.dequantized())
    assert made.bias is not None and made.bias.dtype == torch.bfloat16


def test_a_copy_is_its_own_and_equal() -> None:
    made = layer(Role.INPUT_SCALE, inputs=STATIC)
    copied = copy.deepcopy(made)
    assert torch.equal(copied(X), made(X))
    copied.get_parameter("weight").data.zero_()
    assert made.dequantized().any()


def test_a_cast_reaches_the_bias_alone() -> None:
    made = layer()
    before = made.dequantized()
    made.half()
    assert made.bias is not None and made.bias.dtype == torch.float16
    assert made.get_parameter("weight_scale").dtype == torch.float8_e5m2
    assert torch.equal(made.dequantized(), before) and made(X.half()).dtype == torch.float16


def test_its_text_says_the_scheme_and_the_rounding() -> None:
    shown = repr(layer(Role.INPUT_SCALE, inputs=STATIC))
    assert shown == (
        "QuantizedLinear(in_features=8, out_features=6, bias=True, scheme=BYTES per tensor, inputs=FP8 static)"
    )
    assert "inputs=as they are" in repr(layer(Role.INPUT_SCALE, inputs=STATIC, quantize_inputs=False))


@pytest.mark.parametrize("inputs", [TOKEN, STATIC, None])
def test_ranks_that_divide_a_layer_compute_it_together(inputs: InputQuantization | None) -> None:
    """Rows side by side, and columns as a sum; of columns each rank's input has its features alone, and is rounded as the whole is."""
    parts = {
        Role.CODES: StoredPart("weight", torch.float8_e4m3fn, (6, 8)),
        Role.SCALE: StoredPart("weight_scale", torch.float32, (6, 1)),
        Role.INPUT_SCALE: StoredPart("input_scale", torch.float32, ()),
        Role.PRE_SCALE: StoredPart("pre_quant_scale", torch.float32, (8,)),
    }
    weight = WeightQuantization(scheme=Fp8Channel(), shape=(6, 8), parts=parts, inputs=inputs)
    whole = QuantizedLinear(weight, has_bias=False, dtype=torch.float32)
    fill(whole)

    def kept(rows: slice, columns: slice, part: InputSlice | None = None) -> QuantizedLinear:
        bounds = (rows.start, rows.stop), (columns.start, columns.stop)
        made = copy.deepcopy(whole)
        made.keep_slice(WeightCut.of(weight, *bounds), part)
        stored = {role: whole.get_parameter(one.suffix).data for role, one in parts.items()}
        cut = slice_weight(weight.scheme, stored, shape=weight.shape, rows=bounds[0], columns=bounds[1])
        for role, one in cut.parts.items():
            made.get_parameter(parts[role].suffix).data.copy_(one)
        assert (made.out_features, made.in_features, made.stored) == (6, 8, weight)
        assert "are this rank's" in repr(made) and made.fixed_names == whole.fixed_names
        return made

    sides = [kept(rows, slice(0, 8))(X) for rows in (slice(0, 4), slice(4, 6))]
    assert_computed_alike(torch.cat(sides, dim=-1), whole(X))
    ranks = SharedLargest((0, 3), 8)
    summands = ranks.run(lambda part, columns: kept(slice(0, 6), columns, part)(X[..., columns]))
    assert_computed_alike(sum(summands), whole(X))
    assert ranks.num_asked == (inputs is TOKEN)


def test_a_static_rounding_without_a_scale_is_refused() -> None:
    with pytest.raises(UnsupportedQuantization, match="The checkpoint has none for it"):
        layer(inputs=STATIC)
    layer(inputs=STATIC, quantize_inputs=False)


def test_a_scaled_layer_multiplies_first() -> None:
    made = ScaledLinear(8, 6, dtype=torch.float32)
    assert torch.equal(made(X), functional.linear(X, made.weight, made.bias))
    scale = torch.arange(8.0)
    made.pre_quant_scale.data.copy_(scale)
    assert torch.equal(made(X), functional.linear(X * scale, made.weight, made.bias))
    assert not ScaledLinear(8, 6, bias=False, device="meta").pre_quant_scale.requires_grad
