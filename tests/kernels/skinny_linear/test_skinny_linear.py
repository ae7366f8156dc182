"""One to three rows times a bf16 weight, against float64; what is for this op and what is not."""

import pytest
import torch
import torch.nn.functional as F

from unfreeze.core.errors import ConfigError
from unfreeze.kernels.skinny_linear import MAX_ROWS, OP, bucket, is_skinny, numba_cpu, skinny_linear
from unfreeze.models.blocks.linear import Linear


def made(rows, out, width, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x, weight, bias = (
        torch.randn(*shape, generator=generator) for shape in ((rows, width), (out, width), (out,))
    )
    return x.bfloat16(), (weight / width**0.5).bfloat16(), bias.bfloat16()


@pytest.mark.parametrize("impl", ["reference", "numba"])
# a block and less, blocks and a rest; a width left to torch
@pytest.mark.parametrize("out, width", [(5, 32), (33, 96), (64, 40)])
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_equals_float64(rows, out, width, impl):
    """The result is rounded once: half a unit of 8 bits for each element, no more with bias than without."""
    x, weight, bias = made(rows, out, width)
    for shift in (None, bias):
        y = skinny_linear(x, weight, shift, impl)
        want = F.linear(x.double(), weight.double(), None if shift is None else shift.double())
        assert y.dtype == torch.bfloat16
        assert (y.double() - want).norm() <= OP.tolerance[torch.bfloat16] * want.norm()
        if impl == "numba" and width % 32 == 0:
            assert ((y.double() - want).abs() <= 2**-8 * want.abs() + 1e-5).all()


def test_a_weight_that_lies_otherwise_is_left_to_torch():
    x, weight, _ = made(1, 64, 64)
    assert torch.equal(numba_cpu.linear(x, weight.t(), None), F.linear(x, weight.t()))


def test_nan_and_infinity_pass_through():
    x, weight, _ = made(2, 8, 32)
    x[0, 3], x[1, 4] = float("nan"), float("inf")
    y = skinny_linear(x, weight, None, "numba")
    assert y[0].isnan().all() and not y[1].isfinite().any()


def test_what_is_for_this_op():
    x, weight, _ = made(MAX_ROWS, 8, 32)
    with torch.no_grad():
        assert is_skinny(x, weight.requires_grad_())
        assert (
            not is_skinny(x.repeat(2, 1), weight)
            and not is_skinny(x.float(), weight.float())
            and not is_skinny(x[None], weight)
        )
    assert not is_skinny(x, weight)  # the weight is being trained
    with torch.no_grad():
        assert bucket(1) == "1 row" and bucket(2) == bucket(3) == "2 or 3 rows"


def test_each_case_lies_in_the_bucket_it_stands_for():
    for case in OP.cases:
        for dtype in case.dtypes:
            x, weight, _ = case.inputs(torch.device("cpu"), dtype, torch.Generator().manual_seed(0))
            assert bucket(len(x)) == case.bucket and is_skinny(x, weight)


def test_another_dtype_is_refused_by_name():
    with pytest.raises(ConfigError, match="its loops read bfloat16 and float32"):
        skinny_linear(torch.ones(1, 32).half(), torch.ones(4, 32).bfloat16(), None, "numba")


@pytest.mark.parametrize("impl", ["reference", "numba"])
@pytest.mark.parametrize("rows", [1, 4, 16])
@pytest.mark.parametrize("out, width", [(33, 96), (64, 40)])
def test_float32_rows_over_a_bf16_weight_equal_float64(rows, out, width, impl):
    """The weight is exact in float32, so only the sums round."""
    x, weight, bias = made(rows, out, width)
    x, bias = x.float() + 1e-3, bias.float()
    assert is_skinny(x, weight) and not is_skinny(x, weight.float())
    for shift in (None, bias):
        y = skinny_linear(x, weight, shift, impl)
        want = F.linear(x.double(), weight.double(), None if shift is None else shift.double())
        assert y.dtype == torch.float32
        assert (y.double() - want).norm() <= OP.tolerance[torch.float32] * want.norm()


def test_a_linear_layer_asks_it_only_without_gradients(monkeypatch):
    """Control arm of `is_skinny`: with a gradient asked for, the layer goes torch's way and the gradient
    arrives."""
    calls = []
    monkeypatch.setattr(
        "unfreeze.models.blocks.linear.skinny_linear", lambda *a: calls.append(1) or F.linear(*a)
    )
    layer = Linear(32, 8, dtype=torch.bfloat16, device="cpu")
    torch.nn.init.normal_(layer.weight)
    x = torch.randn(1, 32).bfloat16()
    layer(x).sum().backward()
    assert calls == [] and layer.weight.grad is not None
    with torch.no_grad():
        layer(x)
    assert calls == [1]
