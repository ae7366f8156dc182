"""Softcapped and scaled logits: the loss and its gradients against float64, by the op and by the head's own
backward; what a block of them takes."""

import pytest
import torch
import torch.nn.functional as F

from unfreeze.core.batch import Batch
from unfreeze.kernels.linear_cross_entropy import block_cost, linear_cross_entropy
from unfreeze.kernels.linear_cross_entropy.softcap import softcapped
from unfreeze.models.blocks.head import Head
from unfreeze.objectives.cross_entropy import cross_entropy

N, D, V, CAP = 37, 24, 333, 3.0


def inputs(dtype=torch.float32):
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn((N, D), generator=g), torch.randn((V, D), generator=g)
    targets, weights = torch.randint(0, V, (N,), generator=g), torch.rand(N, generator=g)
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets, weights


def exact(hidden, weight, targets, weights, cap=CAP, factor=1.0):
    h, w = (x.detach().double().requires_grad_() for x in (hidden, weight))
    logits = factor * (h @ w.T)
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    loss = (F.cross_entropy(logits, targets, reduction="none") * weights.double()).sum()
    return loss.detach(), *torch.autograd.grad(loss, (h, w))


@pytest.mark.parametrize("impl", ["reference", "numba"])
@pytest.mark.parametrize("block_rows", [5, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_and_gradients_equal_float64(impl, block_rows, dtype):
    hidden, weight, targets, weights = inputs(dtype)
    loss, _, _ = linear_cross_entropy(hidden, weight, None, targets, weights, block_rows, impl, softcap=CAP)
    got = loss.detach(), *torch.autograd.grad(loss, (hidden, weight))
    # bf16: logits within 3 are rounded to 2^-9 of themselves, twice, and the gradient once more
    tolerance = 2e-2 if dtype == torch.bfloat16 else 2e-6
    for ours, theirs in zip(got, exact(hidden, weight, targets, weights), strict=True):
        assert (ours.double() - theirs).norm() <= tolerance * theirs.norm()


@pytest.mark.parametrize("cap, factor", [(CAP, 1.0), (None, 0.125), (CAP, 0.5)])
@pytest.mark.parametrize("whole", [True, False], ids=["as tensors", "by its own backward"])
def test_a_head_of_a_model_is_seen_by_the_objective(cap, factor, whole):
    hidden, weight, targets, weights = inputs()
    head = Head(D, V, factor=factor, softcap=cap, dtype=torch.float32, device="cpu")
    with torch.no_grad():
        head.weight.copy_(weight)
    if not whole:
        head.register_forward_hook(lambda *_: None)  # somebody looks on: the module is called
    batch = Batch(targets, targets, weights, torch.arange(N), torch.tensor([0]))
    loss = cross_entropy(hidden, head, batch, block_rows=8).sum
    got = loss.detach(), *torch.autograd.grad(loss, (hidden, head.weight))
    for ours, theirs in zip(got, exact(hidden, weight, targets, weights, cap, factor), strict=True):
        assert (ours.double() - theirs).norm() <= 2e-6 * theirs.norm()
    # control: without them the loss is another
    assert abs(exact(hidden, weight, targets, weights, None)[0] - loss.detach()) > 1


def test_near_the_cap_the_slope_is_taken_from_the_logits():
    """bf16 rounds 2.99 and 3 · tanh(2.99) to the same few numbers: from them 1 - tanh² would be 0 or 1 %."""
    z = torch.tensor([9.0, 10.0, 12.0]).bfloat16().requires_grad_()
    softcapped(z, CAP).sum().backward()
    expected = 1 - torch.tanh(z.detach().double() / CAP) ** 2
    torch.testing.assert_close(z.grad.double(), expected, rtol=2**-8, atol=0)
    y = softcapped(z.detach(), CAP).double()
    assert ((1 - (y / CAP) ** 2 - expected).abs() / expected).max() > 0.2  # control


def test_a_block_of_softcapped_logits_takes_more():
    """The logits, what they are capped to, and the slope in float32 beside the gradient."""
    cpu = torch.device("cpu")
    rows, plain = block_cost(32000, torch.bfloat16, cpu, trained=False)
    assert block_cost(32000, torch.bfloat16, cpu, trained=False, softcapped=True) == (
        rows,
        4 + max(plain - 2, 4),
    )
