"""log p over the words that a sampler draws from, at its temperature: against float64 of the plain formula, for every
kind of head; and against the sampler's own numbers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from unfreeze.generate.sampling import logprobs_of
from unfreeze.kernels.linear_cross_entropy import Words, head_cross_entropy
from unfreeze.models.blocks.head import Head
from unfreeze.models.blocks.linear import Linear

N, D, V, NAMED = 37, 24, 333, 300


class Adapter(nn.Module):
    """With it, a head runs its own forward and backward."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.A, self.B = (nn.Parameter(torch.randn(size, dtype=dtype)) for size in ((4, D), (V, 4)))

    def factors(self) -> tuple[Tensor, Tensor, float]:
        return self.A, self.B, 0.3


def a_head(kind: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(1)
    if kind == "adapter":
        head: nn.Module = Linear(D, V, dtype=dtype, device="cpu")
        head.adapter = Adapter(dtype)
    elif kind == "softcap":
        head = Head(D, V, factor=0.7, softcap=3.0, dtype=dtype, device="cpu")
    else:
        head = nn.Linear(D, V, bias=kind == "bias", dtype=dtype)
    for name, parameter in head.named_parameters():
        if name in ("weight", "bias"):
            nn.init.normal_(parameter)
    return head.requires_grad_(kind != "frozen")


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, D, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(0, NAMED, (N,), generator=generator)
    return hidden, targets, torch.randn(N, generator=generator)


def plain(logits_NV: Tensor, targets: Tensor, words: Words) -> Tensor:
    """log p of the targets, all logits at once."""
    log_p_NV = (logits_NV[:, : words.num_ids] / words.temperature).log_softmax(-1)
    return log_p_NV.gather(1, targets[:, None])[:, 0]


def relative(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm())


LIMITS = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("words", [Words(NAMED), Words(None, 0.6), Words(NAMED, 1.7), Words(V, 1.0)])
@pytest.mark.parametrize("kind", ["dense", "bias", "softcap", "adapter", "frozen"])
@pytest.mark.parametrize(
    ("dtype", "impl"),
    [
        (torch.float64, "auto"),
        *((d, i) for d in (torch.float32, torch.bfloat16) for i in ("reference", "numba")),
    ],
)
def test_loss_and_gradients_equal_float64(kind, words, dtype, impl):
    head, (hidden, targets, weights) = a_head(kind, dtype), inputs(dtype)
    exact = copy.deepcopy(head).double().requires_grad_(kind != "frozen")
    exact_hidden = hidden.detach().double().requires_grad_()
    log_p = plain(exact(exact_hidden), targets, words)
    (-log_p * weights.double()).sum().backward()

    loss, _, found = head_cross_entropy(hidden, head, targets, weights, 9, impl, words=words)
    loss.backward()
    limit = LIMITS[dtype]
    assert relative(found, log_p.detach()) < limit
    assert relative(hidden.grad, exact_hidden.grad) < limit
    pairs = zip(head.named_parameters(), exact.parameters(), strict=True)
    trained = {name: (ours.grad, theirs.grad) for (name, ours), theirs in pairs if theirs.grad is not None}
    assert bool(trained) == (kind != "frozen")
    for name, (ours, theirs) in trained.items():
        assert relative(ours, theirs) < limit, name
        if name == "weight" and words.num_ids == NAMED:
            assert ours[NAMED:].eq(0).all()  # padding is never drawn, so nothing of it is learnt
    # without a gradient it is the same number
    with torch.no_grad():
        again = head_cross_entropy(hidden, head, targets, weights, 9, impl, words=words)
    torch.testing.assert_close(again[2], found, rtol=0, atol=0)
    # control arm: all rows, or temperature 1, give another log p
    if words != Words(V, 1.0):
        _, _, other = head_cross_entropy(hidden, head, targets, weights, 9, impl)
        assert relative(other, log_p.detach()) > 10 * limit or dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_the_samplers_number(dtype):
    """The same logits, rounded in the same order: the two differ by float32's sums alone, in bf16 too."""
    head, (hidden, targets, weights) = a_head("softcap", dtype), inputs(dtype)
    with torch.no_grad():
        logits_NV = head(hidden).float()[:, :NAMED] / 0.6
        _, _, found = head_cross_entropy(
            hidden, head, targets, weights, 9, "reference", words=Words(NAMED, 0.6)
        )
    sampled = torch.tensor(logprobs_of(logits_NV, targets.tolist()))
    torch.testing.assert_close(found, sampled, rtol=0, atol=5e-6)
