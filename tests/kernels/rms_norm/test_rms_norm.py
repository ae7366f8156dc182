"""RMSNorm against a float64 formula, forward and both gradients; the CPU loops against plain torch; what the
op leaves alone."""

import pytest
import torch

from unfreeze.kernels.rms_norm import numba_cpu, reference, rms_norm

# float32: sums of up to 1,000 terms in another order. bf16: two roundings of 2^-9 each.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}


def float64(x, weight, eps):
    x = x.double()
    return weight.double() * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def relative(got, want):
    return float((got.detach().double() - want.detach()).norm() / want.detach().norm())


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(7, 64), (3, 5, 37), (400, 1000), (1, 1)])
def test_equals_float64_forward_and_backward(shape, dtype):
    torch.manual_seed(0)
    x, weight, dy = (
        torch.randn(shape).to(dtype),
        (1 + 0.1 * torch.randn(shape[-1])).to(dtype),
        torch.randn(shape).to(dtype),
    )
    x.requires_grad_(), weight.requires_grad_()
    y = rms_norm(x, weight, 1e-5)
    dx, dweight = torch.autograd.grad(y, (x, weight), dy)
    x64, weight64 = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    y64 = float64(x64, weight64, 1e-5)
    dx64, dweight64 = torch.autograd.grad(y64, (x64, weight64), dy.double())
    assert y.dtype == dx.dtype == dweight.dtype == dtype
    # a row of one element has a gradient of almost zero, all cancellation
    pairs = [(y, y64), (dweight, dweight64)] + ([(dx, dx64)] if shape[-1] > 1 else [])
    for got, want in pairs:
        assert relative(got, want) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_loops_round_as_the_reference_does(dtype):
    torch.manual_seed(1)
    x, weight, dy = torch.randn(64, 96).to(dtype), torch.randn(96).to(dtype), torch.randn(64, 96).to(dtype)
    (y, r), (y_ref, r_ref) = numba_cpu.forward(x, weight, 1e-6), reference.forward(x, weight, 1e-6)
    torch.testing.assert_close(r, r_ref, rtol=1e-6, atol=0)
    step = 2**-7 if dtype == torch.bfloat16 else 1e-6  # one rounding apart at most
    torch.testing.assert_close(y, y_ref, rtol=step, atol=0)
    got, want = numba_cpu.backward(dy, x, weight, r), reference.backward(dy, x, weight, r)
    torch.testing.assert_close(got, want, rtol=step, atol=step)
    got, want = numba_cpu.weight_gradient(dy, x, weight, r), reference.weight_gradient(dy, x, weight, r)
    # 64 terms, some cancel
    torch.testing.assert_close(got, want, rtol=step, atol=10 * step if dtype == torch.float32 else step)


def test_the_weights_gradient_has_the_same_bits_on_any_number_of_threads():
    torch.manual_seed(3)
    # enough for several threads
    x, weight, dy = (torch.randn(600, 512), torch.ones(512), torch.randn(600, 512))
    r = reference.forward(x, weight, 1e-6)[1]
    threads = torch.get_num_threads()
    try:
        got = []
        for number in (1, 2):
            torch.set_num_threads(number)
            got.append(numba_cpu.weight_gradient(dy, x, weight, r))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*got)


def test_a_view_with_strides_and_an_expanded_gradient():
    torch.manual_seed(2)
    wide, weight = torch.randn(6, 40).bfloat16(), torch.ones(24).bfloat16()
    x = wide[:, 8:32].detach().requires_grad_()
    rms_norm(x, weight, 1e-5).sum().backward()
    contiguous = wide[:, 8:32].clone().requires_grad_()
    rms_norm(contiguous, weight, 1e-5).sum().backward()
    assert torch.equal(x.grad, contiguous.grad)


@pytest.mark.parametrize("part", [reference, numba_cpu])
def test_an_all_zero_row_stays_finite_and_inputs_stay_as_they_were(part):
    x, weight, dy = torch.randn(4, 16), torch.randn(16), torch.randn(4, 16)
    x[2] = 0
    before = [t.clone() for t in (x, weight, dy)]
    y, r = part.forward(x, weight, 1e-8)
    dx = part.backward(dy, x, weight, r)
    part.weight_gradient(dy, x, weight, r)
    assert y.isfinite().all() and dx.isfinite().all()
    assert all(torch.equal(now, then) for now, then in zip((x, weight, dy), before, strict=True))


def test_control_arm_the_mean_in_half_precision_is_nan_at_an_all_zero_row():
    """Why the mean is taken in float32: eps 1e-8 is 0 in float16, and 0 · rsqrt(0) is NaN (docs/why/trust.md
    N1)."""
    x = torch.zeros(1, 8, dtype=torch.float16)
    assert (
        (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + torch.tensor(1e-8, dtype=torch.float16)))
        .isnan()
        .all()
    )
    assert rms_norm(x, torch.ones(8, dtype=torch.float16), 1e-8).isfinite().all()
