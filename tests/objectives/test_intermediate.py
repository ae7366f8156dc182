"""Claims about distillation from inside: relations and hidden states equal torch's in float64, their gradients too;
documents and rows that are not supervised stay apart; no matrix of all tokens is held; who gets no gradient."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from unfreeze.core.batch import Batch
from unfreeze.core.errors import ConfigError
from unfreeze.core.taps import Tap
from unfreeze.kernels.attention import DocumentLayout, relations
from unfreeze.kernels.attention.relations import relation_divergence
from unfreeze.objectives.cross_entropy import cross_entropy
from unfreeze.objectives.divergence import divergence
from unfreeze.objectives.intermediate import (
    Hidden,
    Intermediate,
    Pair,
    Relations,
    intermediate,
    pairs_of,
    relation_heads,
)

LENGTHS = (5, 150, 1, 7, 7, 140)
OWN, THEIRS = (6, 8), (4, 20)  # heads and widths that differ


def batch_of(*lengths: int, seed: int = 0) -> Batch:
    total, drawn = sum(lengths), torch.Generator().manual_seed(seed)
    weights = (torch.rand(total, generator=drawn) < 0.6) * (0.5 + torch.rand(total, generator=drawn))
    starts = torch.tensor(lengths).cumsum(0) - torch.tensor(lengths)
    positions = torch.cat([torch.arange(length) for length in lengths])
    tokens, targets = torch.randint(0, 31, (2, total), generator=drawn)
    return Batch(tokens, targets, weights.float(), positions, starts)


def oracle(own: Tensor, theirs: Tensor, batch: Batch, heads: int) -> Tensor:
    """torch's softmax and kl_div, a document and a head at a time, every row whole."""
    total = own.new_zeros(())
    for start, length in zip(batch.starts_S.tolist(), batch.lengths(), strict=True):
        rows = slice(start, start + length)
        for head in range(heads):
            logs = []
            for x in (own, theirs):
                a = x[rows].flatten(1).unflatten(1, (heads, -1))[:, head]
                z = a @ a.T / a.shape[1] ** 0.5
                z = z.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), -1e30)
                logs.append(z.log_softmax(-1))
            kl = F.kl_div(logs[0], logs[1], reduction="none", log_target=True).sum(-1)
            total = total + (kl * batch.weights_T[rows].to(kl.dtype)).sum() / heads
    return total


def drawn(batch: Batch, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(batch.num_tokens, *OWN, dtype=dtype), torch.randn(
        batch.num_tokens, *THEIRS, dtype=dtype
    )


@pytest.mark.parametrize("heads", [1, 4, 16])
def test_relations_and_their_gradient_equal_torchs_in_float64(heads: int, monkeypatch):
    """Rectangles of several documents, padding, blocks of rows; 1e-12: float64 sums of 150 terms."""
    batch = batch_of(*LENGTHS)
    own, theirs = drawn(batch)
    expected_own = own.clone().requires_grad_()
    expected = oracle(expected_own, theirs, batch, heads)
    (expected / 7).backward()
    layout = DocumentLayout.build(batch.starts_S, batch.num_tokens)
    for size in (relations.SCORE_BYTES, 1):  # many documents at once, and one
        monkeypatch.setattr(relations, "SCORE_BYTES", size)
        leaf, their = own.clone().requires_grad_(), theirs.clone().requires_grad_()
        found = relation_divergence(leaf, their, batch.weights_T, layout, heads)
        (found / 7).backward()
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
        torch.testing.assert_close(leaf.grad, expected_own.grad, rtol=1e-11, atol=1e-14)
        assert their.grad is None  # the teacher gets none


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_relations_in_the_computations_dtype_are_formed_in_float32(dtype: torch.dtype):
    """Within the rounding of the gradient alone: of the same, rounded, numbers in float64."""
    batch = batch_of(*LENGTHS)
    own, theirs = (x.to(dtype) for x in drawn(batch))
    exact = own.double().requires_grad_()
    expected = oracle(exact, theirs.double(), batch, 4)
    expected.backward()
    leaf = own.clone().requires_grad_()
    found = relation_divergence(
        leaf, theirs, batch.weights_T, DocumentLayout.build(batch.starts_S, batch.num_tokens), 4
    )
    found.backward()
    assert found.dtype == torch.float32 and leaf.grad is not None and exact.grad is not None
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    off = (leaf.grad.double() - exact.grad).norm() / exact.grad.norm()
    assert off < (1e-5 if dtype == torch.float32 else 4e-3)


def test_the_same_model_is_not_apart_and_what_grows_with_length_is_one_block_of_rows():
    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            sizes = [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
            self.elements = max([self.elements, *sizes])
            return out

    tokens = 1024
    x = torch.randn(tokens, 2, 4, requires_grad=True)
    layout = DocumentLayout.build([0, 900], tokens)
    with Largest() as seen:
        same = relation_divergence(x, x.detach(), torch.ones(tokens), layout, 2)
        same.backward()
    assert abs(same.item()) < 1e-4 and x.grad is not None and float(x.grad.abs().max()) < 1e-6
    assert seen.elements <= 2 * 128 * 900
    with Largest() as control:
        oracle(x, x.detach(), batch_of(900, 124), 2)
    assert control.elements >= 900 * 900


def test_control_arms_of_relations_documents_that_see_each_other_and_the_other_way_round(monkeypatch):
    batch = batch_of(6, 6, 9)
    own, theirs = drawn(batch)
    right = float(oracle(own, theirs, batch, 2))

    def found(x: Tensor, y: Tensor, starts: Tensor) -> float:
        return float(
            relation_divergence(x, y, batch.weights_T, DocumentLayout.build(starts, batch.num_tokens), 2)
        )

    assert found(own, theirs, batch.starts_S) == pytest.approx(right, rel=1e-12)
    assert found(own, theirs, torch.tensor([0])) != pytest.approx(right, rel=1e-2)
    assert found(theirs, own, batch.starts_S) != pytest.approx(right, rel=1e-2)


# both terms, and the whole


def inside(batch: Batch, *, seed: int = 0) -> tuple[dict[Tap, Tensor], dict[Tap, Tensor]]:
    """What a student of 2 layers and a teacher of 4 hold."""
    torch.manual_seed(seed)
    T = batch.num_tokens
    names = {"q_plain": OWN, "k_plain": (3, 8), "v": (3, 8)}
    theirs = {"q_plain": THEIRS, "k_plain": (2, 20), "v": (2, 12)}
    found = {Tap(1, name): torch.randn(T, *size).requires_grad_() for name, size in names.items()}
    said = {Tap(2, name): torch.randn(T, *size) for name, size in theirs.items()}
    found[Tap(2, "input")], said[Tap(3, "input")] = torch.randn(T, 10).requires_grad_(), torch.randn(T, 14)
    return found, said


def terms(apart="mse") -> tuple[Relations, Hidden]:
    torch.manual_seed(3)
    projections = nn.ModuleDict({"1": nn.Linear(10, 14, bias=False)})
    return Relations(0.5, (Pair(1, 2),), 4), Hidden(2.0, (Pair(1, 2),), projections, apart)


def test_each_asks_for_what_it_reads():
    relation, hidden = terms()
    found, said = inside(batch_of(4))
    assert relation.taps("student") | hidden.taps("student") == set(found)
    assert relation.taps("teacher") | hidden.taps("teacher") == set(said)
    whole = Intermediate(cross_entropy, lambda batch: ({}, {}), (relation, hidden))  # type: ignore[arg-type]
    assert whole.taps == set(found)


@pytest.mark.parametrize("apart", ["mse", "cosine"])
def test_hidden_states_equal_torchs_in_float64(apart):
    batch = batch_of(4, 9, 3)
    found, said = inside(batch)
    term = terms(apart)[1]
    x, y, W = found[Tap(2, "input")], said[Tap(3, "input")], term.projections["1"].weight
    x64, W64 = x.detach().double().requires_grad_(), W.detach().double().requires_grad_()
    if apart == "mse":
        each = F.mse_loss(x64 @ W64.T, y.double(), reduction="none").mean(-1)
    else:
        ones = torch.ones(len(x))
        each = F.cosine_embedding_loss(x64 @ W64.T, y.double(), ones, reduction="none")
    expected = (each * batch.weights_T).sum()
    expected.backward()
    got = term.sum(found, said, batch)
    got.backward()
    assert got.dtype == torch.float32 and float(got) == pytest.approx(float(expected), rel=1e-6)
    torch.testing.assert_close(x.grad, x64.grad.float(), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(W.grad, W64.grad.float(), rtol=1e-5, atol=1e-6)
    assert not x.grad[batch.weights_T == 0].any()


def words(batch: Batch):
    return lambda rows, log_p_BV: torch.zeros_like(log_p_BV).log_softmax(-1)


def test_the_whole_is_the_weighted_sum_of_its_parts_and_asks_the_teacher_once():
    batch, asked = batch_of(5, 8), []
    found, said = inside(batch)
    hidden, head = torch.randn(13, 6, requires_grad=True), nn.Linear(6, 31, bias=False)

    def ask(given: Batch):
        asked.append(torch.is_grad_enabled())
        return words(given), said

    own = partial(divergence, alpha=0.25)
    both = terms()
    loss = intermediate(hidden, head, batch, found, words=own, ask=ask, terms=both)
    alone = own(hidden, head, batch, words)
    parts = [term.sum(found, said, batch) for term in both]
    expected = alone.sum + 0.5 * parts[0] + 2.0 * parts[1]
    assert asked == [False] and float(loss.sum) == pytest.approx(float(expected), rel=1e-6)
    assert float(loss.count) == float(alone.count) == pytest.approx(float(batch.weights_T.sum()))
    assert loss.metrics.keys() == {*alone.metrics, "relations", "hidden"}
    assert float(loss.metrics["relations"]) == pytest.approx(float(parts[0]))
    loss.sum.backward()
    assert all(tensor.grad is not None and tensor.grad.any() for tensor in (hidden, *found.values()))


def test_terms_are_sums_over_supervised_tokens():
    """Halves add up to the whole, and twice the weights give twice the sum; control arm: a mean doesn't."""
    batch = batch_of(5, 8, 3)
    found, said = inside(batch)
    cuts = [slice(0, 5), slice(5, 16)]
    halves = [
        Batch(
            *(getattr(batch, name)[cut] for name in ("tokens_T", "targets_T", "weights_T", "positions_T")),
            starts_S=torch.tensor([0] if cut.start == 0 else [0, 8]),
        )
        for cut in cuts
    ]
    doubled = replace(batch, weights_T=2 * batch.weights_T, nonzero=None)
    for term in terms():
        of = [
            term.sum({n: t[cut] for n, t in found.items()}, {n: t[cut] for n, t in said.items()}, half)
            for cut, half in zip(cuts, halves, strict=True)
        ]
        whole = float(term.sum(found, said, batch))
        assert float(of[0] + of[1]) == pytest.approx(whole, rel=1e-5)
        assert float(term.sum(found, said, doubled)) == pytest.approx(2 * whole, rel=1e-5)
        means = [part / half.weights_T.sum() for part, half in zip(of, halves, strict=True)]
        assert float(means[0] + means[1]) != pytest.approx(whole / float(batch.weights_T.sum()), rel=1e-2)


def test_a_batch_without_supervised_tokens_gives_zero_and_zero_gradients():
    batch = replace(batch_of(4, 3), weights_T=torch.zeros(7))
    found, said = inside(batch)
    for term in terms():
        total = term.sum(found, said, batch)
        total.backward()
        assert float(total) == 0
    assert all(tensor.grad is not None and not tensor.grad.any() for tensor in found.values())


@pytest.mark.parametrize(
    ("widths", "heads"),
    [([768, 768, 1024, 1024], 32), ([48, 24, 80, 40], 1), ([4096, 1024, 8192, 1024], 64), ([10, 14], 1)],
)
def test_relation_heads_divide_all_widths_and_keep_16_numbers(widths, heads):
    assert relation_heads(widths) == heads
    assert all(width % heads == 0 for width in widths)


def test_what_does_not_fit_is_said_in_one_line():
    with pytest.raises(ConfigError, match="relation_heads = 5 does not divide 768"):
        relation_heads([768, 1024], 5)
    with pytest.raises(
        ConfigError, match=r"--distillation\.layers has the pair 3:4; the student has the layers 1 to 2"
    ):
        pairs_of(2, 4, [(3, 4)], option="--distillation.layers")
    assert pairs_of(2, 4, option="--distillation.layers") == (Pair(1, 3),)
    assert pairs_of(2, 4, [(1, 2), (2, 4)], option="--distillation.layers") == (Pair(0, 1), Pair(1, 3))
