"""Packing and batches: one shift, every document once per epoch, resumed exactly."""

import json
import math
import random

import numpy as np
import pytest
import torch
from torch.nn import functional

from unfreeze.core.errors import ConfigError, DataError
from unfreeze.data import Batches, Example, pack
from unfreeze.data.packing.order import Shuffled
from unfreeze.data.packing.packers import PACKERS, PackingPlan


def documents(count: int, seed: int = 0, longest: int = 60) -> list[Example]:
    rng = random.Random(seed)
    made = []
    for row in range(1, count + 1):
        length = rng.randrange(2, longest)
        prompt = rng.randrange(1, length)
        made.append(
            Example(
                [rng.randrange(1, 97) for _ in range(length)], [0.0] * prompt + [1.0] * (length - prompt), row
            )
        )
    return made


def copy_model_loss(tokens_T, targets_T, weights_T) -> float:
    """Weighted cross entropy of a model that has memorised the data: its logits are one-hot at the document's
    next token."""
    logits = functional.one_hot(tokens_T, 97).float() * 50
    losses = functional.cross_entropy(logits, targets_T, reduction="none")
    return float((losses * weights_T).sum() / weights_T.sum())


def test_shift_by_hand():
    batch = pack(
        [Example([5, 6, 7], [0.0, 1.0, 0.5], 1), Example([8], [0.0], 2), Example([9, 10], [0.0, 1.0], 3)]
    )
    assert batch.tokens_T.tolist() == [5, 6, 7, 8, 9, 10]
    assert batch.targets_T.tolist() == [6, 7, 0, 0, 10, 0]
    assert batch.weights_T.tolist() == [1.0, 0.5, 0.0, 0.0, 1.0, 0.0]
    assert batch.positions_T.tolist() == [0, 1, 2, 0, 0, 1]
    assert batch.starts_S.tolist() == [0, 3, 4] and batch.lengths() == [3, 1, 2]
    assert (
        batch.tokens_T.dtype == batch.targets_T.dtype == batch.positions_T.dtype == torch.int64
        and batch.weights_T.dtype == torch.float32
    )


def test_copy_model_has_loss_zero_and_a_wrong_shift_does_not():
    """docs/why/trust.md N4. What follows a position is read off the documents themselves, not off `targets_T`."""
    examples = documents(40)
    batch = pack(examples)
    following = torch.tensor([t for e in examples for t in [*e.tokens[1:], 0]])
    assert copy_model_loss(following, batch.targets_T, batch.weights_T) < 1e-6
    assert copy_model_loss(batch.tokens_T, batch.targets_T, batch.weights_T) > 1  # control arm: not shifted
    twice = torch.tensor([t for e in examples for t in [*e.tokens[2:], 0, 0][: e.num_tokens]])
    assert copy_model_loss(twice, batch.targets_T, batch.weights_T) > 1  # control arm: shifted twice


def test_supervised_tokens_are_the_same_before_and_after_the_shift():
    examples = documents(40)
    batch = pack(examples)
    expected = sorted(t for e in examples for t, w in zip(e.tokens, e.weights, strict=True) if w)
    assert sorted(batch.targets_T[batch.weights_T > 0].tolist()) == expected
    assert int((batch.weights_T > 0).sum()) == sum(e.num_supervised for e in examples)


def test_no_document_predicts_the_next_document():
    batch = pack(documents(40))
    ends = [*(batch.starts_S[1:] - 1).tolist(), batch.num_tokens - 1]
    assert batch.weights_T[ends].sum() == 0


@pytest.mark.parametrize("broken", [[], [Example([], [], 1)], [Example([1, 2], [0.0], 1)]])
def test_documents_that_cannot_be_packed(broken):
    with pytest.raises(DataError):
        pack(broken)


def test_every_document_once_per_epoch_and_no_step_over_budget():
    examples = documents(200)
    batches = Batches(examples, tokens_per_step=256, seed=3)
    seen, orders = [], []
    for epoch in range(3):
        rows = []
        for _ in range(len(batches.plan(epoch))):
            (batch,), _ = next(batches)
            assert batch.num_tokens <= 256
            rows += [tuple(document.tolist()) for document in batch.tokens_T.split(batch.lengths())]
        seen.append(sorted(rows))
        orders.append(rows)
    assert seen[0] == seen[1] == seen[2] == sorted(tuple(e.tokens) for e in examples)
    assert orders[0] != orders[1]
    assert batches.len_steps(1) == len(Batches(examples, 256, 3).plan(0))


def test_order_depends_on_the_seed_alone():
    examples = documents(50)
    first, second, other = (Batches(examples, 256, seed) for seed in (1, 1, 2))
    a, b, c = ([next(it)[0][0].tokens_T.tolist() for _ in range(12)] for it in (first, second, other))
    assert a == b and a != c


def test_resuming_from_every_cursor_gives_the_same_batches():
    examples = documents(60)
    straight = Batches(examples, 200, seed=5)
    steps = straight.len_steps(2.5)
    run = [next(straight) for _ in range(steps)]
    for at in range(steps - 1):
        cursor = json.loads(json.dumps(run[at][1]))
        resumed = Batches(examples, 200, seed=5, start=cursor)
        for (batch,), after in run[at + 1 : at + 4]:
            (again,), cursor_again = next(resumed)
            fields = [(getattr(batch, name), getattr(again, name)) for name in vars(batch)]
            assert (
                all(
                    one.equal(other) if isinstance(one, torch.Tensor) else one == other
                    for one, other in fields
                )
                and after == cursor_again
            )
    assert run[straight.len_steps(1) - 1][1]["passes"] == 1 and run[-1][1]["passes"] == pytest.approx(
        2.5, abs=0.1
    )
    # control arm: one batch lost
    skipping = Batches(examples, 200, seed=5, start={**run[0][1], "position": run[0][1]["position"] + 1})
    assert not torch.equal(next(skipping)[0][0].tokens_T, run[1][0][0].tokens_T)


@pytest.mark.parametrize("changed", ["seed", "tokens_per_step", "data", "position"])
def test_a_cursor_of_other_data_or_settings_is_refused_by_name(changed):
    examples = documents(20)
    _, cursor = next(Batches(examples, 200, seed=5))
    arguments = {"examples": examples, "tokens_per_step": 200, "seed": 5, "start": cursor}
    if changed == "data":
        arguments["examples"] = [*examples[:-1], Example([1, 2], [0.0, 1.0], 20)]
    elif changed == "position":
        arguments["start"] = {**cursor, "position": 999}
    else:
        arguments[changed] += 1
    with pytest.raises(ConfigError, match=f"cannot resume: .*{changed}"):
        Batches(**arguments)


def test_a_document_longer_than_a_step_is_refused_naming_the_field():
    with pytest.raises(DataError, match="row 1 has 30 tokens, tokens_per_step is 29") as error:
        Batches([Example([1] * 30, [1.0] * 30, 1)], 29, seed=0)
    assert "--tokens-per-step" in error.value.next
    with pytest.raises(DataError, match="no documents"):
        Batches([], 29, seed=0)


def test_documents_of_a_tenth_of_a_step_leave_less_than_one_percent_unused():
    assert Batches(documents(5000, longest=200), 2048, seed=0).efficiency() > 0.99


def test_a_step_of_several_micro_batches_is_as_many_batches_one_behind_the_other():
    """Whatever is taken together: the same batches in the same order, over the end of an epoch too, with the
    cursor behind the last of them; `documents` are those that were packed."""
    examples = documents(60)
    one_by_one, together = Batches(examples, 200, seed=5), Batches(examples, 200, seed=5, micro_batches=3)
    steps = together.len_steps(2)
    assert steps == -(-one_by_one.len_steps(2) // 3) and one_by_one.len_steps(2) % 3
    for _ in range(steps):
        micro_batches, cursor = next(together)
        singles = [next(one_by_one) for _ in range(3)]
        assert cursor == singles[-1][1]
        for batch, ((single,), _), packed in zip(micro_batches, singles, together.documents, strict=True):
            assert batch.tokens_T.equal(single.tokens_T)
            assert batch.tokens_T.tolist() == [token for example in packed for token in example.tokens]
    assert cursor["epoch"] == 2 or cursor["position"] == len(one_by_one.plan(1))


def test_steps_of_epochs():
    batches = Batches(documents(50), 200, seed=0)
    sizes = [len(batches.plan(epoch)) for epoch in range(3)]
    assert (
        batches.len_steps(0) == 0 and batches.len_steps(1) == sizes[0] and batches.len_steps(3) == sum(sizes)
    )
    assert batches.len_steps(1.5) == sizes[0] + -(-sizes[1] // 2)


@pytest.mark.parametrize("packing", ["none", "first_fit", "best_fit"])
def test_each_packing_places_every_document_once_within_the_budget_and_resumes(packing):
    examples = documents(150)
    batches = Batches(examples, 100, seed=2, packing=packing)
    for epoch in range(2):
        plan = batches.plan(epoch)
        assert sorted(index for batch in plan for index in batch) == list(range(150))
        assert all(sum(examples[index].num_tokens for index in batch) <= 100 for batch in plan)
    assert batches.efficiency() == sum(e.num_tokens for e in examples) / (len(batches.plan(0)) * 100)
    run = [next(batches) for _ in range(6)]
    (again,), _ = next(Batches(examples, 100, seed=2, packing=packing, start=run[3][1]))
    assert torch.equal(again.tokens_T, run[4][0][0].tokens_T)
    other = "none" if packing != "none" else "best_fit"
    with pytest.raises(ConfigError, match=f"packing was '{packing}', is '{other}'"):
        Batches(examples, 100, seed=2, packing=other, start=run[3][1])


def test_best_fit_equals_its_definition_and_fills_more_than_one_by_one():
    """Oracle: for each document, all open batches are looked at, and of those with room the fullest (then the
    oldest) takes it."""
    examples = documents(300, longest=90)
    lengths = [example.num_tokens for example in examples]
    batches = Batches(examples, 100, seed=0, packing="best_fit")
    expected: list[list[int]] = []
    for index in Shuffled(300, 0)(0):
        rooms = [(100 - sum(lengths[i] for i in batch), at) for at, batch in enumerate(expected)]
        fitting = [(room, at) for room, at in rooms if room >= lengths[index]]
        if fitting:
            expected[min(fitting)[1]].append(index)
        else:
            expected.append([index])
    assert sorted(batches.plan(0)) == sorted(expected)  # they come in a random order
    fill = {
        packing: Batches(examples, 100, 0, packing=packing).efficiency()
        for packing in ("none", "first_fit", "best_fit")
    }
    assert fill["none"] < 0.5 and fill["best_fit"] > 0.9 and fill["best_fit"] >= fill["first_fit"] - 0.02


def test_supervision_is_the_weights_and_nothing_else():
    """docs/why/trust.md N7: no partial logits, no ignored ids. The loss over all positions with weights is that
    over the supervised ones alone."""
    from pathlib import Path

    import unfreeze
    from unfreeze.objectives.cross_entropy import cross_entropy

    # the drill names what it plants, models/ fields of a config.json that are no concern of training
    root = Path(unfreeze.__file__).parent
    fields = (root / "models", root / "models" / "configs")
    files = [path for path in root.rglob("*.py") if "drill" not in path.parts and path.parent not in fields]
    source = "\n".join(path.read_text(encoding="utf-8") for path in files)
    assert not any(word in source for word in ("num_logits_to_keep", "logits_to_keep", "ignore_index"))
    torch.manual_seed(0)
    batch = pack(documents(8))
    hidden_TD, head = (
        torch.randn(batch.num_tokens, 16, dtype=torch.float64),
        torch.nn.Linear(16, 97, bias=False, dtype=torch.float64),
    )
    loss = cross_entropy(hidden_TD, head, batch)
    chosen = batch.weights_T > 0
    expected = functional.cross_entropy(head(hidden_TD[chosen]), batch.targets_T[chosen], reduction="sum")
    assert loss.sum.item() == pytest.approx(expected.item(), rel=1e-6) and loss.count == int(chosen.sum())
    last = int(chosen.sum())  # control arm: logits of the last positions only, as many as are supervised
    partial = functional.cross_entropy(head(hidden_TD[-last:]), batch.targets_T[-last:], reduction="sum")
    assert partial.item() != pytest.approx(expected.item(), rel=1e-3)


@pytest.mark.parametrize("packing", ["first_fit", "best_fit"])
@pytest.mark.parametrize("old", [False, True])
def test_an_epoch_has_no_curriculum_by_length_and_an_earlier_versions_cursor_keeps_its_order(packing, old):
    """Long rows and short ones: as they are begun, the last batches hold long ones alone. That is the control
    arm, and what a run of an earlier version, whose cursor says nothing of the order, goes on with."""
    rng = np.random.default_rng(0)
    lengths = rng.permutation([*rng.integers(200, 230, 120), *[25] * 300]).tolist()
    examples = [Example([n] * n, [1.0] * n, n) for n in lengths]
    begin = Batches(examples, 384, seed=1, packing=packing).cursor()
    cursor = {name: value for name, value in begin.items() if not (old and name == "batches")}
    batches = Batches(examples, 384, seed=1, packing=packing, start=cursor)
    apart = []
    for epoch in range(8):
        means = [np.mean([lengths[index] for index in batch]) for batch in batches.plan(epoch)]
        part = len(means) // 4
        apart.append(np.mean(means[-part:]) - np.mean(means[:part]))
    error = np.std(apart) / math.sqrt(len(apart))
    assert bool(abs(np.mean(apart)) > 5 * error) is old
    orders = {tuple(map(tuple, batches.plan(epoch))) for epoch in range(2)}
    assert len(orders) == 2 and ("batches" in batches.cursor()) is not old
    order = Shuffled(len(examples), 1)(0)
    packed = PackingPlan(order, PACKERS[packing](order, lengths, 384))  # the same batches, as they were begun
    assert sorted(batches.plan(0)) == sorted(packed) and (list(batches.plan(0)) == list(packed)) is old
    with pytest.raises(ConfigError, match="cannot resume: batches changed"):
        Batches(examples, 384, seed=1, packing=packing, start={**begin, "batches": "by size"})


def test_extras_are_shifted_as_weights_are():
    """A number per token stands where the token is the target: beside its weight."""
    examples = [Example([5, 6, 7], [0.0, 1.0, 1.0], 1), Example([8, 9], [0.0, 1.0], 2)]
    batch = pack(examples, {"advantage": [[0.0, 0.5, -2.0], [0.0, 3.0]]})
    assert batch.extras["advantage"].tolist() == [0.5, -2.0, 0.0, 3.0, 0.0]
    assert batch.extras["advantage"].dtype == torch.float32
    assert batch.extras["advantage"][batch.supervised()].tolist() == [0.5, -2.0, 3.0]
    assert not pack(examples).extras
    with pytest.raises(DataError, match=r"extras 'advantage' has \[3, 1\] numbers"):
        pack(examples, {"advantage": [[0.0, 0.5, -2.0], [0.0]]})
