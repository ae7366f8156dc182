"""KL and perplexity against a direct float64 computation, and the standard error against resampled rows."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import scipy.stats
import torch

from unfreeze.core.errors import DataError
from unfreeze.data.packing.batches import pack
from unfreeze.data.store.examples import Example
from unfreeze.evaluate import divergence as module
from unfreeze.evaluate.divergence import compared, divergence

D, V = 12, 37


def made(seed: int = 0, lengths=(7, 4, 9, 5, 12)):
    """Batches of random documents, some positions of which count, and hidden states and heads of two models."""
    generator = torch.Generator().manual_seed(seed)
    examples = [
        Example(
            torch.randint(V, (length,), generator=generator).tolist(),
            [0.0, 0.0] + [float(place % 3 > 0) for place in range(length - 2)],
        )
        for length in lengths
    ]
    batches = [pack(examples[:3]), pack(examples[3:])]
    one = [torch.randn(batch.num_tokens, D, generator=generator) for batch in batches]
    two = [states + 0.3 * torch.randn(states.shape, generator=generator) for states in one]
    heads = [torch.randn(V, D, generator=generator) for _ in range(2)]
    heads[1] = heads[0] + 0.1 * heads[1]
    return batches, one, two, *(lambda x, W=W: x @ W.T for W in heads)


def directly(batches, one, two, p_head, q_head):
    """(rows' KL sums, losses of both, counts): position by position, scipy's entropy of the probabilities."""
    rows = []
    for batch, h_TD, g_TD in zip(batches, one, two, strict=True):
        starts = [*batch.starts_S.tolist(), batch.num_tokens]
        for first, last in pairwise(starts):
            own = [0.0, 0.0, 0.0, 0]
            for t in range(first, last):
                if batch.weights_T[t] > 0:
                    p, q = (
                        torch.softmax(head(x[t]).double(), 0) for head, x in ((p_head, h_TD), (q_head, g_TD))
                    )
                    target = int(batch.targets_T[t])
                    terms = (float(scipy.stats.entropy(p, q)), -math.log(q[target]), -math.log(p[target]), 1)
                    own = [a + b for a, b in zip(own, terms, strict=True)]
            rows.append(own)
    return [row for row in rows if row[3]]


def test_it_is_the_direct_computation_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = made()
    rows = directly(*parts)
    kl, loss, original, tokens = (sum(row[place] for row in rows) for place in range(4))
    whole = divergence(*parts)
    monkeypatch.setattr(module, "AT_ONCE", 2 * V)  # two positions at a time
    for result in (whole, divergence(*parts)):
        assert (result.tokens, result.rows) == (tokens, len(rows)) == (result.tokens, 5)
        assert result.kl == pytest.approx(kl / tokens, rel=1e-6)
        assert result.loss == pytest.approx(loss / tokens, rel=1e-6)
        assert result.perplexity == pytest.approx(math.exp(loss / tokens), rel=1e-6)
        assert result.original_perplexity == pytest.approx(math.exp(original / tokens), rel=1e-6)
    # control arms: KL the other way round, and of all positions, are other numbers
    batches, one, two, p_head, q_head = parts
    assert divergence(batches, two, one, q_head, p_head).kl != pytest.approx(whole.kl, rel=1e-3)
    for batch in batches:
        batch.weights_T.fill_(1)
    assert divergence(*parts).kl != pytest.approx(whole.kl, rel=1e-3)


def test_its_standard_error_is_that_of_drawing_the_rows_again() -> None:
    """The bootstrap over rows of unequal length, within its own error and the ratio's bias."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(3, 20, (60,), generator=generator).tolist()
    parts = made(1, lengths)
    rows = torch.tensor(directly(*parts), dtype=torch.float64)
    drawn = rows[torch.randint(len(rows), (4000, len(rows)), generator=generator)].sum(1)
    result = divergence(*parts)
    assert result.kl_error == pytest.approx(float((drawn[:, 0] / drawn[:, 3]).std()), rel=0.1)
    spread = float(((drawn[:, 1] - drawn[:, 2]) / drawn[:, 3]).std())
    assert result.loss_error == pytest.approx(spread, rel=0.1)


def test_a_model_beside_itself_has_no_divergence() -> None:
    batches, one, _, head, _ = made()
    result = divergence(batches, one, one, head, head)
    assert (result.kl, result.kl_error, result.loss_error, result.agree) == (0, 0, 0, 1)
    assert result.loss == result.original
    alone = divergence(batches[:1], one[:1], [states * 1.1 for states in one[:1]], head, head)
    assert alone.kl > 0 and alone.rows == 3


def test_far_logits_and_rows_without_a_supervised_token() -> None:
    """exp of a float32 logit of 200 overflows; log_softmax does not."""
    p, q = torch.tensor([[200.0, 0.0, -200.0]]), torch.tensor([[0.0, 200.0, -200.0]])
    loss, original, kl, agree = compared(p, q, torch.tensor([0])).flatten().tolist()
    assert (loss, original, kl, agree) == (
        pytest.approx(200),
        pytest.approx(0, abs=1e-12),
        pytest.approx(200),
        0,
    )
    batches, *rest = made()
    for batch in batches:
        batch.weights_T.zero_()
    with pytest.raises(DataError, match="0 tokens of the rows to measure on are supervised"):
        divergence(batches, *rest)
