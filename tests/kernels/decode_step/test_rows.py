"""Rows inside the loops of a step: packing, softmax, activations, sums of weight rows."""

import numpy as np
import pytest
import torch

from unfreeze.kernels.decode_step import rows
from unfreeze.kernels.decode_step.dots import BF16, FLOAT32
from unfreeze.kernels.loops.numba_options import serial
from unfreeze.kernels.swiglu.activation import ClampedSwiGLU, GeGLU

NAN, INF = float("nan"), float("inf")


@serial
def _pack(like, row, first, address):
    rows.pack(like, row, first, address)


@serial
def _softmax(scores, sink):
    return rows.softmax(scores, sink)


@serial
def _activated(kind, gate, up, alpha, limit, out):
    for i in range(out.size):
        out[i] = rows.activated(kind, gate[i], up[i], alpha, limit)


@serial
def _sums(kind, x, factors, address, stride, out):
    """The dot of x with the first row at address; out: a combination of all rows."""
    rows.combine(kind, out, factors, address, stride)
    return rows.dot(kind, x, address)


@pytest.mark.parametrize("width", [7, 32, 45, 96])
def test_a_packed_row_is_split_or_rounded(width):
    row = torch.randn(width, generator=torch.Generator().manual_seed(0))
    for first in (0, 64):  # parts of a row are packed one by one
        out, bits = torch.full((200,), NAN), torch.full((200,), NAN, dtype=torch.bfloat16)
        _pack(np.float32(0), row.numpy(), first, out.data_ptr())
        _pack(np.uint16(0), row.numpy(), first, bits.data_ptr())
        whole = width // 32 * 32
        want = torch.cat((row[:whole].view(-1, 16, 2).mT.flatten(), row[whole:]))
        assert torch.equal(out[first : first + width], want)
        assert torch.equal(bits[first : first + width], row.bfloat16())
        # nothing else is written
        for written in (out, bits):
            assert written[:first].isnan().all() and written[first + width :].isnan().all()
        assert whole == 0 or not torch.equal(want, row)  # control: the order matters


def test_rounding_to_bf16_keeps_nan_and_infinities():
    row = torch.tensor([NAN, -NAN, INF, -INF, 3.4e38, 1.00390625, 1.01171875, 1e-40, -0.0])
    bits = torch.empty(len(row), dtype=torch.bfloat16)
    _pack(np.uint16(0), row.numpy(), 0, bits.data_ptr())
    assert torch.equal(bits.isnan(), row.isnan())
    assert torch.equal(bits[2:].view(torch.int16), row[2:].bfloat16().view(torch.int16))


@pytest.mark.parametrize("sink", [-INF, 0.3, 40.0])
@pytest.mark.parametrize("count", [1, 16, 77])
def test_softmax_equals_float64(sink, count):
    scores = 3 * torch.randn(count, generator=torch.Generator().manual_seed(count))
    want = torch.cat((scores, torch.tensor([sink]))).double().softmax(0)[:count]
    got = scores.clone()
    share = _softmax(got.numpy(), np.float32(sink))
    torch.testing.assert_close(got.double() * share, want, rtol=1e-5, atol=1e-12)
    assert sink < 0 or (want < 0.9999 * scores.double().softmax(0)).all()  # control: no sink


@pytest.mark.parametrize("place", [0, 5, 18])
def test_a_score_that_is_nan_makes_all_shares_nan(place):
    """Else a NaN would leave the model's answer finite, and generation would go on."""
    scores = torch.zeros(20)
    scores[place] = NAN
    share = _softmax(scores.numpy(), np.float32(-INF))
    assert (scores * share).isnan().all()
    scores = torch.full((20,), NAN)
    assert (scores * _softmax(scores.numpy(), np.float32(-INF))).isnan().all()


GATED = {
    "silu": lambda g, u: torch.nn.functional.silu(g) * u,
    "gelu_pytorch_tanh": GeGLU().forward,
    "gelu": GeGLU().forward,
    "relu2": lambda g, u: g.relu() ** 2,
    "clamped": ClampedSwiGLU().forward,
}


@pytest.mark.parametrize("name", rows.ACTIVATIONS)
def test_activations_equal_torchs_in_float64(name):
    """Error: 3e-7 of the gate's part (numba_options.sigmoid) and some roundings."""
    gate = torch.cat((torch.linspace(-20, 20, 401), torch.tensor([0.0, -0.0, 60.0, -60.0])))
    up = 3 * torch.randn(len(gate), generator=torch.Generator().manual_seed(0))
    up[3:5] = torch.tensor([9.0, -9.0])  # beyond the limit
    out = torch.empty_like(gate)
    kind = rows.ACTIVATIONS[name]
    _activated(kind, gate.numpy(), up.numpy(), np.float32(1.702), np.float32(7), out.numpy())
    want = GATED[name](gate.double(), up.double())
    torch.testing.assert_close(out.double(), want, rtol=2e-6, atol=2e-6)
    other = GATED["relu2" if name != "relu2" else "silu"](gate.double(), up.double())
    assert not torch.allclose(out.double(), other, rtol=1e-2)  # control


@pytest.mark.parametrize("kind", [FLOAT32, BF16])
@pytest.mark.parametrize("count", [0, 1, 4, 7])
def test_sums_of_weight_rows_equal_float64(kind, count):
    """Four rows in a pass, and a rest; rows lie apart."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(max(count, 1), 45, generator=generator).to([torch.float32, torch.bfloat16][kind])
    x, factors, out = (torch.randn(size, generator=generator) for size in (40, count, 40))
    before, wide = out.clone().double(), weights[:, :40].double()
    stride = weights.element_size() * 45
    dot = _sums(kind, x.numpy(), factors.numpy(), weights.data_ptr(), stride, out.numpy())
    torch.testing.assert_close(torch.tensor(dot).double(), wide[0] @ x.double(), rtol=1e-5, atol=1e-5)
    want = before + factors.double() @ wide[:count]
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)
    assert count == 0 or not torch.allclose(out.double(), before + factors[1:].double() @ wide[1:count])
