"""Blocked and tiled CPU attention against float64, forward and gradients; that the second visit computes
nothing."""

import pytest
import torch

from unfreeze.kernels.attention import blocked_cpu, reference_attention, workspace
from unfreeze.kernels.attention.blocked_cpu import blocked_attention
from unfreeze.kernels.attention.tiled_cpu import tiled_attention
from unfreeze.kernels.attention.tiled_loops import KEYS
from unfreeze.kernels.loops import bf16_cpu
from unfreeze.kernels.loops.scratch import held, release_scratch

# float32: sums of some hundred terms; ten times what was observed. bf16: P, dS and outputs are rounded to 8
# bits (2^-9 = 0.2 % each).
TOLERANCE = {torch.float32: 4e-6, torch.bfloat16: 1e-2}

BOTH = pytest.mark.parametrize("attention", [blocked_attention, tiled_attention])
EACH = pytest.mark.parametrize(
    ("attention", "dtype"),
    [
        (blocked_attention, torch.float32),
        (blocked_attention, torch.bfloat16),
        (tiled_attention, torch.float32),
    ],
)


def made(S, L, H, G, d, v, dtype):
    g = torch.Generator().manual_seed(0)
    q, k, value = (
        torch.randn(S, L, n, w, generator=g).to(dtype).requires_grad_() for n, w in ((H, d), (G, d), (G, v))
    )
    return (q, k, value), torch.randn(S, L, H, v, generator=g).to(dtype)


def exact(tensors, grad, scale):
    """Output and gradients in float64 by the explicit mask."""
    inputs = [x.detach().double().flatten(0, 1).requires_grad_() for x in tensors]
    S, L = grad.shape[:2]
    output = reference_attention(*inputs, torch.arange(S) * L, scale)
    return [
        x.detach().unflatten(0, (S, L))
        for x in (output, *torch.autograd.grad(output, inputs, grad.double().flatten(0, 1)))
    ]


def check(attention, tensors, grad, scale):
    output = attention(*tensors, scale)
    got = [output.detach(), *torch.autograd.grad(output, tensors, grad)]
    for ours, want in zip(got, exact(tensors, grad, scale), strict=True):
        assert ours.shape == want.shape and ours.dtype == grad.dtype
        # where a gradient cancels to nothing (one token, one key that takes all), its error is that of what
        # cancels: dP and keys
        floor = float(grad.double().norm()) * max(float(t.detach().abs().max()) for t in tensors) * scale
        assert (ours.double() - want).norm() <= TOLERANCE[grad.dtype] * max(float(want.norm()), floor)


@EACH
@pytest.mark.parametrize(
    "shape",
    [
        (2, 300, 4, 2, 24, 16),
        (1, 257, 3, 3, 48, 32),
        (3, 128, 2, 1, 16, 16),
        (1, 1, 1, 1, 8, 8),
        (1, 200, 2, 2, 8, 24),
        (1, 801, 2, 1, 40, 32),
    ],
)
def test_equals_float64_forward_and_backward(shape, attention, dtype):
    """Whole and part blocks of queries and keys, grouped heads, values narrower and wider, one token."""
    tensors, grad = made(*shape, dtype)
    check(attention, tensors, grad, shape[4] ** -0.5)


@BOTH
def test_large_scores_do_not_overflow(attention):
    tensors, grad = made(1, 450, 1, 1, 16, 16, torch.float32)
    check(attention, [(t * 30).detach().requires_grad_() for t in tensors[:2]] + [tensors[2]], grad, 1.0)


@BOTH
def test_a_later_block_of_keys_has_the_largest_scores(attention):
    """What was summed before is scaled to the new maximum, in a head whose last rows alone see two blocks."""
    (q, k, v), grad = made(1, KEYS + 2, 1, 1, 8, 8, torch.float32)
    with torch.no_grad():
        k[:, KEYS:] = 2 * q[:, KEYS:]
        scores = q[0, KEYS:, 0] @ k[0, :, 0].t()
        assert (scores[:, :KEYS].amax(1) < scores.diagonal(KEYS)).all()
    check(attention, (q, k, v), grad, 0.2)


@pytest.mark.parametrize("shape", [(1, 18, 1, 1, 8, 8), (1, KEYS + 17, 2, 1, 8, 8)])
def test_what_buffers_held_before_is_not_read(shape):
    """17 and 18 are keys that the last of ROWS reads and no query of the first SIDE sees."""
    tensors, grad = made(*shape, torch.float32)
    release_scratch()
    check(tiled_attention, tensors, grad, 0.3)
    assert len(held()) > 10
    for buffer in held():
        buffer.fill_(torch.nan)
    check(tiled_attention, tensors, grad, 0.3)


def test_heads_in_several_parts_give_the_same(monkeypatch):
    tensors, grad = made(1, 260, 6, 3, 16, 16, torch.float32)
    whole = torch.autograd.grad(blocked_attention(*tensors, 0.25), tensors, grad)
    monkeypatch.setattr(workspace, "SCORE_BYTES", 1)
    parts = torch.autograd.grad(blocked_attention(*tensors, 0.25), tensors, grad)
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


@BOTH
def test_control_arm_a_mask_that_is_one_off_is_seen(attention):
    """The float64 comparison would notice a query that sees one key less or more."""
    tensors, grad = made(1, 140, 1, 1, 16, 16, torch.float32)
    shifted = attention(tensors[0], tensors[1].roll(1, 1), tensors[2].roll(1, 1), 0.25)
    want = exact(tensors, grad, 0.25)[0]
    assert (shifted.detach().double() - want).norm() > 0.1 * want.norm()


@BOTH
def test_the_second_visit_takes_what_the_first_kept(attention):
    tensors, grad = made(1, 130, 2, 2, 16, 16, torch.float32)
    values, calls = [], []

    def first(compute):
        calls.append(1)
        values.append(compute())
        return values[-1]

    with torch.no_grad():
        output = attention(*tensors, 0.25, first)
    again = attention(*tensors, 0.25, lambda compute: values.pop())
    assert calls == [1] and torch.equal(output, again)
    plain = attention(*tensors, 0.25)
    for one, other in zip(
        torch.autograd.grad(again, tensors, grad), torch.autograd.grad(plain, tensors, grad), strict=True
    ):
        assert torch.equal(one, other)


@EACH
@pytest.mark.parametrize("which", [0, 1])
def test_a_nan_reaches_just_the_queries_that_see_it(which, attention, dtype):
    """It is neither swallowed by the maximum or the exponential (which would hide a fault) nor carried to
    earlier queries."""
    tensors, _ = made(1, 500, 1, 1, 16, 16, dtype)
    with torch.no_grad():
        tensors[which][0, 50, 0, 3] = float("nan")
        bad_L = ~attention(*tensors, 0.25)[0, :, 0].isfinite().all(-1)
    seen_L = torch.arange(500) == 50 if which == 0 else torch.arange(500) >= 50
    assert torch.equal(bad_L, seen_L)


@pytest.mark.skipif(not bf16_cpu.available(), reason="this CPU has no AVX512-bf16")
@pytest.mark.parametrize(
    ("length", "groups", "repeat", "width"), [(200, 3, 2, 96), (128, 1, 1, 64), (300, 2, 3, 34)]
)
def test_scores_of_tiles_are_those_of_widened_inputs(length: int, groups: int, repeat: int, width: int):
    """The same float32 products in another order: 2^-24 of the sum of their sizes per addition."""
    generator = torch.Generator().manual_seed(length)
    q = torch.randn(1, length, groups * repeat, width, generator=generator).bfloat16()
    k = torch.randn(1, length, groups, width, generator=generator).bfloat16()
    heads = blocked_cpu._Heads(0, length, 0, groups, repeat)
    wide, tiled = blocked_cpu._Wide(heads, q, k), blocked_cpu._Tiled(heads, q, k)
    for b in range(heads.blocks):
        keys = (b + 1) * blocked_cpu.QUERIES
        expected, size = (
            wide.block(b, keys).clone(),
            torch.bmm(wide.q[b].abs(), wide.k[:, :keys].abs().transpose(1, 2)),
        )
        found = tiled.block(b, keys)
        assert ((found - expected).abs() <= size * width * 2**-24).all()
        assert not (
            (found.roll(1, 1) - expected).abs() <= size * width * 2**-24
        ).all()  # control arm: a row further


def test_on_a_cpu_without_the_instruction(monkeypatch):
    monkeypatch.setattr(bf16_cpu, "panels_pay", lambda: False)
    tensors, grad = made(2, 300, 4, 2, 24, 16, torch.bfloat16)
    check(blocked_attention, tensors, grad, 24**-0.5)
