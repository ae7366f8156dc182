"""Held-out loss by row: that of plain torch row by row, whatever the batches; its change with the error of the
paired difference, against Python's statistics and a jackknife."""

from __future__ import annotations

import json
import math
import statistics
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from unfreeze import models
from unfreeze.data import Example, Examples
from unfreeze.data.packing.split import distinct_rows, validation_batches
from unfreeze.evaluate.by_row import ByRow, RowSums, example_rows
from unfreeze.evaluate.compared import compared
from unfreeze.evaluate.perplexity import heldout
from unfreeze.objectives.preference import preference
from unfreeze.parallel.processes.collectives import ALONE

SMALL = {
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "max_position_embeddings": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
}


@pytest.fixture(scope="module")
def model() -> models.Decoder:
    torch.manual_seed(0)
    made = models.build(models.shape(SMALL), dtype=torch.float32, device="cpu")
    for weight in made.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    return made


def documents(count: int, seed: int = 1) -> list[Example]:
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 20, (count,), generator=draw).tolist()
    return [
        Example(torch.randint(0, 61, (n,), generator=draw).tolist(), [0.0, 0.0] + [1.0] * (n - 2), row=i)
        for i, n in enumerate(lengths)
    ]


def log_p(model: models.Decoder, tokens: list[int], weights: list[float]) -> float:
    """Of one answer by plain torch, alone."""
    (batch,) = validation_batches([Example(tokens, weights)], 128)
    with torch.no_grad():
        logp_TV = model.logits(model.hidden(batch)).double().log_softmax(-1)
    return sum(w * float(logp_TV[t - 1, tokens[t]]) for t, w in enumerate(weights) if t)


@pytest.mark.parametrize("tokens", [1, 40, 1000])
def test_each_rows_loss_is_that_of_plain_torch_whatever_the_batches(model, tokens):
    examples = documents(9)
    # one row in two pieces, and one that is there twice: each is one row
    examples[4] = replace(examples[4], row=3)
    examples[6] = replace(examples[5], row=6, digest=b"6" * 16)
    examples[5] = replace(examples[5], digest=b"6" * 16)
    expected = [0.0] * 7
    for row, example in zip((0, 1, 2, 3, 3, 4, 4, 5, 6), examples, strict=True):
        expected[row] -= log_p(model, list(example.tokens), list(example.weights))
    assert distinct_rows(Examples.of(examples)).tolist() == [0, 1, 2, 3, 3, 4, 4, 5, 6]
    by_row = heldout(model, validation_batches(examples, tokens)).by_row
    assert by_row is not None and by_row.rows == 7
    sum_R, count_R = by_row.sums["loss"]
    assert sum_R.tolist() == pytest.approx(expected, rel=1e-5)
    assert count_R.sum() == sum(example.num_supervised for example in examples)


def labelled(examples: list[Example]) -> list[Example]:
    return [replace(each, chosen=0 if i % 3 else each.num_tokens) for i, each in enumerate(examples)]


@pytest.mark.parametrize("tokens", [60, 1000])
@pytest.mark.parametrize("kind", ["simpo", "kto"])
def test_scores_belong_to_their_rows_also_where_labels_are_sorted(model, kind, tokens):
    """The likelier answer of a pair; of answers with a label the desirable ones, which come first in a batch."""
    pairs = kind == "simpo"
    single = documents(12, seed=3)
    examples = labelled(single)
    if pairs:
        both = zip(single[::2], single[1::2], strict=True)
        examples = [
            Example([*a.tokens, *b.tokens], [*a.weights, *b.weights], row=a.row, chosen=a.num_tokens)
            for a, b in both
        ]
    each = [log_p(model, list(one.tokens), list(one.weights)) for one in single]
    expected = [max(pair) for pair in zip(each[::2], each[1::2], strict=True)] if pairs else each[::3]
    if not pairs:  # row 0 has a desirable and an undesirable answer, with a label each
        examples[5] = replace(examples[5], row=0)
        expected[0] = max(each[0], each[5])
        assert each[5] > each[0]

    def objective(hidden_TD: Any, lm_head: Any, batch: Any) -> Any:
        reference = None if pairs else lambda batch: torch.zeros(len(batch.starts_S))
        return preference(hidden_TD, lm_head, batch, kind=kind, reference=reference)

    by_row = compared(model, validation_batches(examples, tokens), objective=objective).by_row
    assert by_row is not None and by_row.rows == (6 if pairs else 11)
    sum_R, count_R = by_row.sums["logp_likelier"]
    assert sum_R[count_R > 0].tolist() == pytest.approx(expected, rel=1e-5)
    assert count_R.tolist() == [1.0] * 6 if pairs else [float(i % 3 == 0) for i in range(12) if i != 5]


def of(sums: Any, counts: Any) -> ByRow:
    return ByRow({"loss": (np.asarray(sums, np.float32), np.asarray(counts, np.float32))})


def test_the_error_is_that_of_a_mean_of_paired_differences():
    draw = torch.Generator().manual_seed(0)
    before = (
        5 + torch.randn(40, generator=draw).double()
    )  # rows differ by far more than training changes them
    after = before - 0.1 + 0.05 * torch.randn(40, generator=draw).double()
    then, now = of(before, np.ones(40)), of(after, np.ones(40))
    differences = [
        b - a for a, b in zip(then.sums["loss"][0].tolist(), now.sums["loss"][0].tolist(), strict=True)
    ]
    change, error = now.change(then, "loss") or (0, 0)
    assert change == pytest.approx(statistics.fmean(differences), rel=1e-6)
    assert error == pytest.approx(statistics.stdev(differences) / math.sqrt(40), rel=1e-6)
    assert error < 0.05 * statistics.stdev(before.tolist())  # control arm: unpaired it would be 20 times that


def test_rows_of_other_lengths_weigh_as_in_the_loss():
    """Against a jackknife over rows: leave one out, compute the change of the loss again."""
    draw = np.random.default_rng(0)
    counts = draw.integers(1, 30, 60)
    before = counts * draw.normal(3, 1, 60)
    after = before - counts * draw.normal(0.2, 0.3, 60)
    change, error = of(after, counts).change(of(before, counts), "loss") or (0, 0)
    assert change == pytest.approx((after.sum() - before.sum()) / counts.sum(), rel=1e-5)
    left = [
        (np.delete(after, i).sum() - np.delete(before, i).sum()) / np.delete(counts, i).sum()
        for i in range(60)
    ]
    jackknife = math.sqrt(59 / 60 * sum((each - np.mean(left)) ** 2 for each in left))
    assert error == pytest.approx(jackknife, rel=0.03)


def test_nothing_is_said_of_other_rows_of_one_row_and_of_what_is_not_finite():
    now = of([1, 2], [1, 1])
    assert now.change(of([1, 2, 3], [1, 1, 1]), "loss") is None
    assert now.change(of([1, 2], [1, 2]), "loss") is None and now.change(now, "accuracy") is None
    assert now.change(of([math.nan, 2], [1, 1]), "loss") is None
    assert of([1, 0], [1, 0]).change(of([2, 0], [1, 0]), "loss") == (-1.0, None)
    assert now.change(now, "loss") == (0.0, 0.0)


def test_it_is_saved_as_it_is():
    kept = of(np.random.default_rng(0).normal(size=9), np.ones(9))
    again = ByRow.of(json.loads(json.dumps(kept.record())))
    assert all(np.array_equal(a, b) for a, b in zip(kept.sums["loss"], again.sums["loss"], strict=True))


class Together:
    """Three processes as threads of one: what each gives, all get."""

    size = 3

    def __init__(self, rank: int, given: list[Any], met: threading.Barrier):
        self.rank, self.given, self.met = rank, given, met

    def texts(self, text: str) -> list[str]:
        self.given[self.rank] = text
        self.met.wait()
        every = list(self.given)
        self.met.wait()
        return every

    def sum_(self, tensors: list[torch.Tensor]) -> None:
        self.given[self.rank] = tensors[0].clone()
        self.met.wait()
        tensors[0].copy_(sum(self.given))
        self.met.wait()


def test_processes_add_up_to_what_one_finds(model):
    """Two batches for three processes: one has none of its own, and knows neither measures nor rows."""
    batches = list(validation_batches(documents(8), 60))[:2]
    alone = heldout(model, batches).by_row
    rows = [[0, 1, 2], [1, 2, 4]]  # of these the larger number is taken
    values = [[-5.0, -1.0, -3.0], [-2.0, -2.0, -9.0]]
    met, given = threading.Barrier(3, timeout=20), [None] * 3

    def one(rank: int) -> ByRow | None:
        sums = RowSums(largest=("most",))
        if rank < 2:
            counts = torch.tensor([1.0, 0.0, 1.0])
            sums.add(torch.tensor(rows[rank]), "most", torch.tensor(values[rank]), counts)
        for batch in batches[rank : rank + 1]:
            found, row_E = heldout(model, [batch]).by_row, example_rows(batch)
            assert found is not None and row_E is not None
            sums.add(row_E, "loss", *(torch.from_numpy(each[row_E.numpy()]) for each in found.sums["loss"]))
        return sums.gathered(Together(rank, given, met), torch.device("cpu"))  # type: ignore[arg-type]

    with ThreadPoolExecutor(3) as pool:
        every = list(pool.map(one, range(3)))
    for found in every:
        assert found is not None and alone is not None and found.rows == alone.rows > 3
        most_R, count_R = (each[:5].tolist() for each in found.sums["most"])
        assert (most_R, count_R) == ([-5, -1, -2, 0, -9], [1, 1, 1, 0, 1])
        for a, b in zip(found.sums["loss"], alone.sums["loss"], strict=True):
            assert np.allclose(a, b, rtol=1e-6)
    assert RowSums().gathered(ALONE, torch.device("cpu")) is None
