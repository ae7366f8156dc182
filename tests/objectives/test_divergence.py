"""divergence against TRL's generalized_jsd_loss as recorded (benchmarks/trl_vectors.py) and against torch's
kl_div on all logits in float64; its memory; the vocabulary's padding. A control arm each."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from unfreeze.core.batch import Batch
from unfreeze.models.blocks.head import Head
from unfreeze.objectives.divergence import divergence, log_softmax

T, D, V = 40, 16, 61
RECORDED = json.loads((Path(__file__).parent / "recorded" / "gkd.json").read_text(encoding="utf-8"))


def saying(logits_TV: Tensor, temperature: float, vocab: int | None = None):
    """A teacher that says these logits."""

    def teacher(batch: Batch):
        logits_NV = logits_TV[batch.supervised(), :vocab]
        return lambda rows, log_p_BV: log_softmax(logits_NV[rows], temperature, log_p_BV.dtype)

    return teacher


def a_batch(num_tokens: int = T, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    tokens, targets = torch.randint(0, V - 5, (2, num_tokens), generator=generator)
    weights = (torch.rand(num_tokens, generator=generator) < 0.6) * (
        0.5 + torch.rand(num_tokens, generator=generator)
    )
    return Batch(tokens, targets, weights.float(), torch.arange(num_tokens), torch.tensor([0]))


@pytest.mark.parametrize("case", RECORDED["cases"], ids=lambda c: f"{c['beta']}-{c['temperature']}")
def test_the_recorded_losses_and_gradients_of_trl(case):
    """TRL divides by the number of labels and has no τ². Its logits here come from a head that is the identity."""
    student, teacher = torch.tensor(RECORDED["student"]), torch.tensor(RECORDED["teacher"])
    labels = torch.tensor(RECORDED["labels"])
    head = nn.Linear(student.shape[1], student.shape[1], bias=False)
    nn.init.eye_(head.weight)
    weights = labels.ge(0).float()
    batch = Batch(labels.clamp(min=0), labels.clamp(min=0), weights, torch.arange(5), torch.tensor([0]))
    hidden = student.clone().requires_grad_()
    options = {"beta": case["beta"], "temperature": case["temperature"]}
    loss = divergence(hidden, head, batch, saying(teacher, case["temperature"]), block_rows=2, **options)
    ours = loss.sum / loss.count / case["temperature"] ** 2
    ours.backward()
    assert ours.item() == pytest.approx(case["loss"], abs=1e-6)
    torch.testing.assert_close(hidden.grad, torch.tensor(case["gradient"]), rtol=0, atol=1e-6)


class Adapted(nn.Linear):
    def __init__(self, kind: str):
        super().__init__(D, V, bias=kind == "bias")
        self.A = nn.Parameter(torch.randn(4, D)) if kind == "adapter" else None
        self.B = nn.Parameter(torch.randn(V, 4)) if kind == "adapter" else None
        self.weight.requires_grad_(kind in ("dense", "bias"))

    def forward(self, input: Tensor) -> Tensor:
        plain = super().forward(input)
        return plain if self.A is None or self.B is None else plain + 0.5 * input @ self.A.T @ self.B.T


def a_head(kind: str) -> nn.Module:
    if kind == "softcap":
        head = Head(D, V, factor=0.7, softcap=3.0, dtype=torch.float32, device="cpu")
        nn.init.normal_(head.weight)
        return head
    return Adapted(kind) if kind != "dense" else nn.Linear(D, V, bias=False)


def oracle(
    hidden: Tensor, head: nn.Module, batch: Batch, teacher_TV: Tensor, vocab: int, **o: float
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """torch's own kl_div and cross_entropy of all rows at once, in float64."""
    head64, hidden64 = copy.deepcopy(head).double(), hidden.detach().double().requires_grad_()
    logits = head64(hidden64)
    p, q = ((x[:, :vocab] / o["temperature"]).log_softmax(-1) for x in (logits, teacher_TV.double()))

    def kl(of: Tensor, to: Tensor) -> Tensor:
        return F.kl_div(to, of, log_target=True, reduction="none").sum(-1)

    beta = o["beta"]
    m = torch.log((1 - beta) * p.exp() + beta * q.exp())
    apart = kl(q, p) if beta == 0 else kl(p, q) if beta == 1 else beta * kl(q, m) + (1 - beta) * kl(p, m)
    each = o["alpha"] * F.cross_entropy(logits, batch.targets_T, reduction="none")
    loss = ((each + (1 - o["alpha"]) * o["temperature"] ** 2 * apart) * batch.weights_T.double()).sum()
    loss.backward()
    assert hidden64.grad is not None
    return loss, hidden64.grad, {n: p.grad for n, p in head64.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", ["dense", "bias", "adapter", "frozen", "softcap"])
@pytest.mark.parametrize(
    "beta, temperature, alpha", [(0, 1, 0), (0, 2, 0.5), (1, 0.9, 0.3), (0.5, 1, 0), (0.1, 3, 1)]
)
@pytest.mark.parametrize("block_rows", [7, None])
def test_loss_and_gradients_equal_float64(kind, beta, temperature, alpha, block_rows):
    torch.manual_seed(1)
    head, batch = a_head(kind), a_batch()
    hidden, teacher_TV = torch.randn(T, D, requires_grad=True), 2 * torch.randn(T, V)
    options = {"beta": beta, "temperature": temperature, "alpha": alpha}
    vocab = V - 4
    expected, of_hidden, of_head = oracle(hidden, head, batch, teacher_TV, vocab, **options)
    teacher = saying(teacher_TV, temperature, vocab)
    loss = divergence(hidden, head, batch, teacher, vocab=vocab, block_rows=block_rows, **options)
    loss.sum.backward()

    # float32 sums of about 25 tokens; gradients of size 1
    assert loss.sum.item() == pytest.approx(expected.item(), rel=2e-6)
    assert float(loss.count) == pytest.approx(float(batch.weights_T.double().sum()), rel=1e-6)
    torch.testing.assert_close(hidden.grad, of_hidden.float(), rtol=1e-5, atol=1e-5)
    got = {n: p.grad for n, p in head.named_parameters() if p.grad is not None}
    assert got.keys() == of_head.keys() and bool(got) == (kind != "frozen")
    for name, gradient in got.items():
        torch.testing.assert_close(gradient, of_head[name].float(), rtol=1e-5, atol=2e-5, msg=name)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_a_teacher_equal_to_the_student_gives_nothing(beta):
    torch.manual_seed(2)
    head, batch, hidden = nn.Linear(D, V), a_batch(), torch.randn(T, D, requires_grad=True)
    loss = divergence(hidden, head, batch, saying(head(hidden).detach(), 2.0), beta=beta, temperature=2.0)
    loss.sum.backward()
    assert hidden.grad is not None
    assert abs(loss.sum.item()) < 1e-5 and hidden.grad.abs().max() < 1e-6


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_padded_rows_of_either_head_change_nothing(beta):
    """docs/why/trust.md N5: two heads with the same words and paddings of their own."""
    torch.manual_seed(3)
    batch, hidden, teacher_TV = a_batch(), torch.randn(T, D), torch.randn(T, V)
    weight = torch.randn(V, D)
    sums = []
    for padded, more in ((V, 0), (V + 3, 7), (V + 11, 2)):
        head = nn.Linear(D, padded, bias=False)
        with torch.no_grad():
            head.weight.normal_(std=3).narrow(0, 0, V).copy_(weight)
        wide = torch.cat([teacher_TV, 9 + torch.randn(T, more)], 1)
        cut = divergence(hidden, head, batch, saying(wide, 1.0, V), beta=beta, vocab=V)
        sums.append((cut.sum / cut.count).item())
    assert sums[1:] == pytest.approx([sums[0]] * 2, abs=1e-6)


def test_control_arm_padding_that_counts_is_seen():
    torch.manual_seed(3)
    batch, hidden = a_batch(), torch.randn(T, D)
    teacher_TV = torch.cat([torch.randn(T, V), 9 + torch.randn(T, 3)], 1)
    head = nn.Linear(D, V + 3, bias=False)
    cut, whole = (
        divergence(hidden, head, batch, saying(teacher_TV, 1.0, vocab), vocab=vocab).sum.item()
        for vocab in (V, V + 3)
    )
    assert abs(cut - whole) > 1


class Largest(TorchDispatchMode):
    """The most rows of any tensor as wide as the vocabulary."""

    rows = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.dim() == 2 and leaf.shape[1] == V:
                self.rows = max(self.rows, leaf.shape[0])
        return out


@pytest.mark.parametrize("kind", ["dense", "adapter"])
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_the_logits_of_all_rows_are_never_held(kind, beta):
    head, batch, hidden = a_head(kind), a_batch(200), torch.randn(200, D, requires_grad=True)
    other = nn.Linear(D, V, bias=False)
    said = torch.randn(200, D)

    def teacher(batch: Batch):
        hidden_ND = said[batch.supervised()]
        return lambda rows, log_p_BV: log_softmax(other(hidden_ND[rows]).detach(), 1.0, log_p_BV.dtype)

    with Largest() as held:
        divergence(hidden, head, batch, teacher, beta=beta, alpha=0.5, block_rows=16).sum.backward()
    assert 8 <= held.rows <= 16
    with Largest() as held:  # control: one block for all
        divergence(hidden, head, batch, teacher, beta=beta, block_rows=200).sum.backward()
    assert held.rows > 100


def test_bfloat16_stays_within_its_rounding():
    torch.manual_seed(4)
    head, batch, teacher_TV = nn.Linear(D, V, bias=False).bfloat16(), a_batch(), torch.randn(T, V)
    hidden = torch.randn(T, D).bfloat16().requires_grad_()
    options = {"beta": 0.5, "temperature": 2.0, "alpha": 0.5}
    expected, of_hidden, _ = oracle(hidden, head, batch, teacher_TV, V, **options)
    loss = divergence(hidden, head, batch, saying(teacher_TV, 2.0), block_rows=8, **options)
    loss.sum.backward()
    assert loss.sum.dtype == torch.float32 and loss.sum.item() == pytest.approx(expected.item(), rel=3e-3)
    assert hidden.grad is not None and (hidden.grad.double() - of_hidden).norm() < 1.5e-2 * of_hidden.norm()


def test_a_batch_without_supervised_tokens_is_0():
    head, hidden = nn.Linear(D, V, bias=False), torch.randn(T, D, requires_grad=True)
    batch = replace(a_batch(), weights_T=torch.zeros(T))
    loss = divergence(hidden, head, batch, saying(torch.full((T, V), math.nan), 1.0), alpha=0.5)
    loss.sum.backward()
    assert loss.sum == loss.count == 0 and hidden.grad is not None and not hidden.grad.any()


def test_rows_without_weight_are_not_looked_at():
    head, batch = nn.Linear(D, V, bias=False), a_batch()
    hidden = torch.randn(T, D)
    teacher = partial(divergence, teacher=saying(torch.randn(T, V), 1.0))
    before = teacher(hidden, head, batch).sum.item()
    hidden[batch.weights_T == 0] = math.nan
    assert teacher(hidden, head, batch).sum.item() == before
