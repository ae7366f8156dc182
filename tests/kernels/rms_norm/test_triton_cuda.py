"""The Triton RMSNorm against the reference, itself tested against float64; on a CPU through Triton's
interpreter, in float32."""

import importlib.util

import pytest
import torch

from unfreeze.kernels.rms_norm import reference

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# the interpreter cuts bf16 off
DTYPES = (torch.float32, torch.bfloat16) if torch.cuda.is_available() else (torch.float32,)
pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(7, 64), (3, 5, 37), (40, 1000), (1, 1), (300, 16), (0, 8), (2, 3000)])
def test_equals_the_reference(shape, dtype):
    from unfreeze.kernels.rms_norm import triton_cuda

    torch.manual_seed(0)
    x, dy = (torch.randn(shape).to(DEVICE, dtype) for _ in range(2))
    weight = (1 + 0.1 * torch.randn(shape[-1])).to(DEVICE, dtype)
    before = [t.clone() for t in (x, weight, dy)]
    (y, r), (y_ref, r_ref) = triton_cuda.forward(x, weight, 1e-6), reference.forward(x, weight, 1e-6)
    assert y.dtype == dtype and y.shape == shape and r.shape == r_ref.shape
    torch.testing.assert_close(r, r_ref, rtol=2e-6, atol=0)
    step = 2**-7 if dtype == torch.bfloat16 else 1e-6  # one rounding apart at most
    torch.testing.assert_close(y, y_ref, rtol=max(step, 3e-6), atol=0)
    args = (dy, x, weight, r_ref)
    torch.testing.assert_close(
        triton_cuda.backward(*args), reference.backward(*args), rtol=step, atol=3 * step
    )
    torch.testing.assert_close(
        triton_cuda.weight_gradient(*args),
        reference.weight_gradient(*args),
        rtol=max(step, 1e-5),
        atol=max(step, 2e-5),
    )
    assert all(torch.equal(now, then) for now, then in zip((x, weight, dy), before, strict=True))


def test_strided_rows_an_expanded_gradient_and_a_row_of_zeros():
    from unfreeze.kernels.rms_norm import triton_cuda

    torch.manual_seed(1)
    x, weight = torch.randn(6, 40, device=DEVICE)[:, 8:32], torch.randn(24, device=DEVICE)
    x[2] = 0
    dy = torch.ones((), device=DEVICE).expand(6, 24)
    (y, _), (y_ref, r_ref) = triton_cuda.forward(x, weight, 1e-8), reference.forward(x, weight, 1e-8)
    torch.testing.assert_close(y, y_ref, rtol=3e-6, atol=0)
    assert y.isfinite().all()
    for function in ("backward", "weight_gradient"):
        got, want = (getattr(part, function)(dy, x, weight, r_ref) for part in (triton_cuda, reference))
        torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-5 * float(want.abs().max()))
