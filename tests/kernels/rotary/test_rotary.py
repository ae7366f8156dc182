"""The rotation against complex multiplication in float64, x e^(iθ): every implementation that runs here, both
pairings, strided, and backward."""

import math

import pytest
import torch

from unfreeze.core.errors import ConfigError
from unfreeze.kernels.rotary import OP, bucket, rotary

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = {torch.float32: 3e-7, torch.bfloat16: 2**-8}  # one rounding of the result


def by_complex_numbers(x, angle, pairing):
    """float64. x [T, H, d], angle [T, r]."""
    pairs = angle.shape[-1]
    kept, rotated = x[..., : x.shape[-1] - 2 * pairs], x[..., x.shape[-1] - 2 * pairs :]
    a, b = rotated.chunk(2, -1) if pairing == "halves" else (rotated[..., 0::2], rotated[..., 1::2])
    z = torch.complex(a, b) * torch.polar(torch.ones_like(angle), angle)[:, None]
    return torch.cat((kept, z.real, z.imag), -1)


def relative(got, want):
    return float((got.detach().double() - want.detach()).norm() / want.detach().norm())


def runs_here(name, dtype):
    reason = "" if name == "reference" else OP.candidates[name].refuses(DEVICE.type, dtype)
    if reason:
        pytest.skip(reason)


@pytest.mark.parametrize("impl", ["reference", *OP.candidates])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("pairing", ["halves", "adjacent"])
@pytest.mark.parametrize(
    "tokens, heads, width, rotated",
    [(5, 3, 8, 8), (7, 1, 24, 10), (18, 5, 96, 32), (1, 2, 2, 2), (0, 2, 8, 4)],
)
def test_equals_complex_float64_forward_and_backward(tokens, heads, width, rotated, pairing, dtype, impl):
    runs_here(impl, dtype)
    torch.manual_seed(0)
    angle = (torch.rand(tokens, rotated // 2, device=DEVICE) * 2 * math.pi).double()
    wide = torch.randn(tokens, heads, width + 5).to(DEVICE, dtype)
    x, dy = (
        wide[..., 3 : 3 + width].detach().requires_grad_(),
        torch.randn(tokens, heads, width).to(DEVICE, dtype),
    )
    y = rotary(x, angle.cos().float(), angle.sin().float(), pairing, impl)
    (dx,) = torch.autograd.grad(y, x, dy)
    x64 = x.detach().double().requires_grad_()
    y64 = by_complex_numbers(x64, angle, pairing)
    (dx64,) = torch.autograd.grad(y64, x64, dy.double())
    assert y.dtype == dx.dtype == dtype and y.shape == dx.shape == x.shape and y.is_contiguous()
    if x.numel():
        assert relative(y, y64) <= TOLERANCE[dtype] and relative(dx, dx64) <= TOLERANCE[dtype]


def test_the_reference_is_exact_in_float64():
    torch.manual_seed(0)
    x = torch.randn(4, 2, 10, dtype=torch.float64, requires_grad=True)
    angle = torch.rand(4, 3, dtype=torch.float64)
    for pairing in ("halves", "adjacent"):
        assert torch.autograd.gradcheck(
            lambda x, p=pairing: rotary(x, angle.cos(), angle.sin(), p, "reference"), (x,)
        )


@pytest.mark.parametrize("impl", ["reference", "numba", "triton"])
def test_it_keeps_no_x_and_takes_an_expanded_gradient(impl):
    runs_here(impl, torch.float32)
    x, angle = torch.randn(6, 2, 8, device=DEVICE, requires_grad=True), torch.rand(6, 4, device=DEVICE)
    cos, sin, kept = angle.cos(), angle.sin(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.data_ptr()) or t, lambda t: t):
        y = rotary(x, cos, sin, "halves", impl)
    assert sorted(kept) == sorted([cos.data_ptr(), sin.data_ptr()])
    y.sum().backward()  # its gradient is one number, expanded
    want = torch.cat((cos + sin, cos - sin), -1)[:, None].expand(6, 2, 8)
    torch.testing.assert_close(x.grad, want, rtol=1e-6, atol=1e-6)


def test_control_arm_the_wrong_pairing_or_sign_is_seen():
    torch.manual_seed(0)
    x, angle = torch.randn(16, 2, 8), torch.rand(16, 4)
    want = by_complex_numbers(x.double(), angle.double(), "adjacent")
    assert relative(rotary(x, angle.cos(), angle.sin(), "adjacent"), want) <= 3e-7
    assert relative(rotary(x, angle.cos(), angle.sin(), "halves"), want) > 0.1
    assert relative(rotary(x, angle.cos(), -angle.sin(), "adjacent"), want) > 0.1


def test_refusals_name_the_reason_and_buckets_cover_the_cases():
    with pytest.raises(ConfigError, match="float64"):
        rotary(
            torch.randn(2, 1, 4, dtype=torch.float64), torch.ones(2, 2), torch.ones(2, 2), "halves", "numba"
        )
    generator = torch.Generator().manual_seed(0)
    for case in OP.cases[:2]:
        assert bucket(*case.inputs(torch.device("cpu"), torch.float32, generator)) == case.bucket
