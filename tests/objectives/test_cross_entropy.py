"""cross_entropy against torch's own F.cross_entropy in float64, its gradients too; and the memory claim, with
a control arm each."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from unfreeze.core.batch import Batch
from unfreeze.objectives.cross_entropy import cross_entropy

T, D, V = 96, 16, 211


class LowRank(nn.Module):
    def __init__(self, rank: int):
        super().__init__()
        self.A, self.B = nn.Parameter(torch.randn(rank, D)), nn.Parameter(torch.randn(V, rank))

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * (x @ self.A.to(x.dtype).T) @ self.B.to(x.dtype).T


class AdaptedHead(nn.Linear):
    """A frozen head with a trainable adapter beside it, as adapters.attach leaves it."""

    def __init__(self):
        super().__init__(D, V, bias=False)
        self.weight.requires_grad_(False)
        self.adapter = LowRank(4)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + self.adapter(input)


def make_batch(*, num_tokens: int = T, fraction: float = 0.4, seed: int = 0, vocab: int = V) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, vocab, (num_tokens,), generator=generator)
    targets = torch.randint(0, vocab, (num_tokens,), generator=generator)
    weights = (torch.rand(num_tokens, generator=generator) < fraction).float() * (
        0.5 + torch.rand(num_tokens, generator=generator)
    )
    return Batch(tokens, targets, weights, torch.arange(num_tokens), torch.tensor([0]))


def oracle(
    hidden: Tensor, head: nn.Module, batch: Batch, upstream: float
) -> tuple[float, Tensor, dict[str, Tensor]]:
    """F.cross_entropy over all tokens at once, in float64."""
    head64 = copy.deepcopy(head).double()
    hidden64 = hidden.detach().double().requires_grad_()
    loss = (
        F.cross_entropy(head64(hidden64), batch.targets_T, reduction="none") * batch.weights_T.double()
    ).sum()
    (loss * upstream).backward()
    assert hidden64.grad is not None
    return loss.item(), hidden64.grad, {n: p.grad for n, p in head64.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("upstream", [1.0, 1 / 38.0, -3.0])
@pytest.mark.parametrize("head_kind", ["dense", "bias", "adapter", "frozen"])
@pytest.mark.parametrize("block_rows", [1, 7, None])
@pytest.mark.parametrize("impl", ["reference", "numba"])
def test_loss_and_gradients_equal_float64_cross_entropy(
    head_kind: str, upstream: float, block_rows: int | None, impl: str
):
    torch.manual_seed(1)
    head = AdaptedHead() if head_kind == "adapter" else nn.Linear(D, V, bias=head_kind == "bias")
    head.requires_grad_(head_kind != "frozen")
    if head_kind == "adapter":
        head.weight.requires_grad_(False)
    batch, hidden = make_batch(), torch.randn(T, D, requires_grad=True)
    expected_loss, expected_hidden, expected_head = oracle(hidden, head, batch, upstream)

    loss = cross_entropy(hidden, head, batch, block_rows=block_rows, impl=impl)
    (loss.sum * upstream).backward()

    # float32 sums of about 40 tokens with losses near 6: 1e-6 relative
    assert loss.sum.dtype == torch.float32
    assert loss.sum.item() == pytest.approx(expected_loss, rel=1e-6)
    assert loss.count == pytest.approx(batch.weights_T.double().sum().item(), rel=1e-6)
    torch.testing.assert_close(hidden.grad, expected_hidden.float(), rtol=1e-5, atol=1e-6 * abs(upstream))
    got = {n: p.grad for n, p in head.named_parameters() if p.grad is not None}
    assert got.keys() == expected_head.keys() and (head_kind == "frozen") == (not got)
    for name, gradient in got.items():
        torch.testing.assert_close(
            gradient, expected_head[name].float(), rtol=1e-5, atol=2e-6 * abs(upstream), msg=name
        )


def test_control_arm_ignoring_the_upstream_scalar_is_noticed():
    """The gradients are ready before backward; a backward that forgot to scale them would be off by exactly
    the divisor."""
    head, batch = nn.Linear(D, V, bias=False), make_batch()
    gradients = []
    for upstream in (1.0, 1 / 38.0):
        hidden = torch.ones(T, D, requires_grad=True)
        (cross_entropy(hidden, head, batch).sum * upstream).backward()
        assert hidden.grad is not None
        gradients.append(hidden.grad)
    torch.testing.assert_close(gradients[0] / 38.0, gradients[1])
    assert not torch.allclose(gradients[0], gradients[1])


def test_backward_twice_gives_the_same_gradient_twice():
    head, batch, hidden = nn.Linear(D, V, bias=False), make_batch(), torch.randn(T, D, requires_grad=True)
    total = cross_entropy(hidden, head, batch).sum
    first = torch.autograd.grad(total * 2, [hidden, head.weight], retain_graph=True)
    second = torch.autograd.grad(total * 2, [hidden, head.weight])
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


def test_head_tied_to_the_embedding_gets_both_gradients():
    torch.manual_seed(2)
    batch = make_batch()
    embedding = nn.Embedding(V, D)
    head = nn.Linear(D, V, bias=False)
    head.weight = embedding.weight
    (cross_entropy(embedding(batch.tokens_T).tanh(), head, batch).sum / 7).backward()
    assert embedding.weight.grad is not None

    weight = embedding.weight.detach().double().requires_grad_()
    logits = F.embedding(batch.tokens_T, weight).tanh() @ weight.T
    loss = (F.cross_entropy(logits, batch.targets_T, reduction="none") * batch.weights_T.double()).sum() / 7
    (expected,) = torch.autograd.grad(loss, weight)
    torch.testing.assert_close(embedding.weight.grad, expected.float(), rtol=1e-5, atol=1e-6)


def test_bfloat16_hidden_and_head_stay_within_their_rounding():
    """Head and hidden in bfloat16: logits round once (2**-9 relative), the sums and the softmax stay in
    float32."""
    torch.manual_seed(3)
    head, batch = nn.Linear(D, V, bias=False).bfloat16(), make_batch()
    hidden = torch.randn(T, D).bfloat16().requires_grad_()
    expected_loss, expected_hidden, expected_head = oracle(hidden, head, batch, 1.0)
    loss = cross_entropy(hidden, head, batch, block_rows=8)
    loss.sum.backward()
    assert loss.sum.dtype == torch.float32 and loss.sum.item() == pytest.approx(expected_loss, rel=2e-3)
    assert hidden.grad is not None and hidden.grad.dtype == torch.bfloat16
    for got, expected in ((hidden.grad, expected_hidden), (head.weight.grad, expected_head["weight"])):
        assert got is not None
        assert (got.double() - expected).norm() / expected.norm() < 1e-2


def test_weight_gradient_of_a_bfloat16_head_is_summed_in_float32():
    """Many blocks each adding less than half a unit in the last place: a bfloat16 sum would stop growing (the
    control arm does)."""
    blocks = 2000
    head = nn.Linear(1, 2, bias=False).bfloat16()
    # softmax = (1/2, 1/2), so each row adds exactly -1/2 to the gradient of its target
    nn.init.zeros_(head.weight)
    batch = Batch(
        *(torch.zeros(blocks, dtype=torch.int64),) * 2,
        torch.ones(blocks),
        torch.arange(blocks),
        torch.tensor([0]),
    )
    cross_entropy(torch.ones(blocks, 1, dtype=torch.bfloat16), head, batch, block_rows=1).sum.backward()
    assert head.weight.grad is not None
    assert head.weight.grad[0].item() == -blocks / 2
    running = torch.zeros((), dtype=torch.bfloat16)
    for _ in range(blocks):
        running += 0.5
    assert running.item() < blocks / 4


def test_rows_without_weight_are_never_computed():
    """N1: a NaN or an impossible target at an unsupervised row reaches neither loss nor gradient."""
    torch.manual_seed(4)
    head, batch = nn.Linear(D, V, bias=False), make_batch()
    unsupervised = batch.weights_T == 0
    clean = torch.randn(T, D)
    dirty = clean.masked_fill(unsupervised.unsqueeze(1), math.nan).requires_grad_()
    batch.targets_T[unsupervised] = -100
    total = cross_entropy(dirty, head, batch).sum
    total.backward()
    assert total.item() == cross_entropy(clean, head, batch).sum.item()
    assert dirty.grad is not None and head.weight.grad is not None and head.weight.grad.isfinite().all()
    assert dirty.grad[unsupervised].eq(0).all() and dirty.grad[~unsupervised].ne(0).any()
    # control arm: the usual mask after the loss of all rows gives a NaN gradient of the head
    weight = head.weight.detach().clone().requires_grad_()
    losses = F.cross_entropy(dirty.detach() @ weight.T, batch.targets_T.clamp_min(0), reduction="none")
    torch.where(unsupervised, 0.0, losses).sum().backward()
    assert weight.grad is not None and weight.grad.isnan().any()


def test_a_batch_without_supervised_tokens_gives_zero_and_zero_gradients():
    head, batch, hidden = nn.Linear(D, V), make_batch(fraction=0.0), torch.randn(T, D, requires_grad=True)
    loss = cross_entropy(hidden, head, batch)
    loss.sum.backward()
    assert (loss.sum.item(), loss.count, loss.metrics) == (0.0, 0.0, {"correct": 0.0})
    assert (
        hidden.grad is not None
        and hidden.grad.eq(0).all()
        and head.weight.grad is not None
        and head.weight.grad.eq(0).all()
    )


def test_correct_counts_the_weight_of_tokens_that_win():
    torch.manual_seed(5)
    head, batch, hidden = nn.Linear(D, V), make_batch(), torch.randn(T, D)
    best = head(hidden).argmax(-1)
    batch.targets_T[::2] = best[::2]
    expected = (batch.weights_T * (best == batch.targets_T)).sum().item()
    assert expected > 0
    assert cross_entropy(hidden, head, batch).metrics["correct"] == pytest.approx(expected)


def test_without_grad_only_the_loss_is_computed():
    torch.manual_seed(6)
    head, batch, hidden = nn.Linear(D, V), make_batch(), torch.randn(T, D, requires_grad=True)
    with torch.no_grad():
        loss = cross_entropy(hidden, head, batch)
    assert not loss.sum.requires_grad
    assert loss.sum.item() == cross_entropy(hidden, head, batch).sum.item()


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor any operation made."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.elements = max(self.elements, leaf.numel())
        return out


def test_no_tensor_of_tokens_by_vocabulary_is_ever_made():
    num_tokens, vocab, block = 512, 4096, 64
    head, batch = (
        nn.Linear(D, vocab, bias=False),
        make_batch(num_tokens=num_tokens, fraction=2.0, vocab=vocab),
    )
    hidden = torch.randn(num_tokens, D, requires_grad=True)
    with LargestTensor() as ours:
        cross_entropy(hidden, head, batch, block_rows=block).sum.backward()
    assert ours.elements == block * vocab
    with LargestTensor() as control:  # the hook does see the tensor where it is made
        F.cross_entropy(head(hidden), batch.targets_T, reduction="sum").backward()
    assert control.elements == num_tokens * vocab


def test_nothing_but_gradients_waits_for_backward():
    num_tokens, vocab = 256, 4096
    head, batch = (
        nn.Linear(D, vocab, bias=False),
        make_batch(num_tokens=num_tokens, fraction=2.0, vocab=vocab),
    )
    hidden, saved = torch.randn(num_tokens, D, requires_grad=True), []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        total = cross_entropy(hidden, head, batch).sum
    total.backward()
    # the head's own gradient; a block of logits would be 16 times that
    assert max(math.prod(shape) for shape in saved) == vocab * D
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        F.cross_entropy(head(hidden), batch.targets_T, reduction="sum").backward()
    assert (num_tokens, vocab) in saved  # control arm


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_the_loss_equals_float64_and_the_logits_of_all_tokens_never_exist():
    torch.manual_seed(7)
    num_tokens, width, vocab = 16_384, 256, 32_768
    head = nn.Linear(width, vocab, bias=False, device="cuda", dtype=torch.bfloat16)
    batch = make_batch(num_tokens=num_tokens, fraction=2.0, vocab=vocab).to("cuda")
    hidden = torch.randn(num_tokens, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss = cross_entropy(hidden, head, batch, block_rows=1024)
    loss.sum.backward()
    # half of the float32 logits of all tokens
    assert torch.cuda.max_memory_allocated() - before < num_tokens * vocab * 4 / 2
    with torch.no_grad():
        expected = sum(
            (F.cross_entropy(h @ head.weight.double().T, t, reduction="none") * w.double()).sum().item()
            for h, t, w in zip(
                hidden.double().split(1024),
                batch.targets_T.split(1024),
                batch.weights_T.split(1024),
                strict=True,
            )
        )
    assert loss.sum.item() == pytest.approx(expected, rel=1e-3)
