"""Several updates on one rollout: how its groups are dealt, the gradient of each update, and what a save keeps."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.objectives.test_policy import DRAWN, PROMPT, Toy, plain
from unfreeze.core.batch import Batch
from unfreeze.data.rows.row import Conversation
from unfreeze.data.store.examples import Example
from unfreeze.objectives.policy import Settings as Loss
from unfreeze.objectives.policy import policy
from unfreeze.objectives.ratios import KINDS, Bounds
from unfreeze.parallel.processes.collectives import ALONE
from unfreeze.rollout.groups import Advantage, advantages, rewards_of
from unfreeze.rollout.reward import Graded
from unfreeze.rollout.rollouts import Answers, Rolled, Settings, micro_batches
from unfreeze.rollout.sampled import Sampled
from unfreeze.rollout.updates import as_tensors, dealt, numbered, of_tensors, with_trainer

BOUNDS = Bounds(0.2, 0.3, dual=1.4)


def rolled(rewards: list[list[float | None]], toy: Toy | None = None, experts: bool = False) -> Rolled:
    """A rollout of groups with these rewards. The answers of a group are the words of a bandit, 0, 1 and so on."""
    groups = []
    for row, group in enumerate(rewards):
        example = Example([PROMPT, PROMPT], [0.0, 1.0], row)  # a prompt and room for an answer
        sampled = []
        for word in range(len(group)):
            log_p = [0.0] if toy is None else toy.log_p((word,)).tolist()
            ids = torch.full((1, 2, 1), word, dtype=torch.int16) if experts else None
            sampled.append(Sampled([word], str(word), "stop", log_p, ids))
        graded = [Graded(reward) for reward in group]
        groups.append(Answers(example, Conversation([], row=row), sampled, graded))
    found = advantages(rewards_of([group.rewards() for group in groups]), Advantage())
    return Rolled(1, groups, found, 0.0, 0.0)


def rows(part: Rolled) -> list[int]:
    return [group.example.row for group in part.answers]


def test_groups_are_dealt_once_and_those_with_a_signal_evenly():
    whole = rolled([[0.0, 1.0]] * 5 + [[0.5, 0.5]] * 4)
    parts = dealt(whole, 3, seed=0)
    assert sorted(row for part in parts for row in rows(part)) == list(range(9))
    assert sorted(int(part.groups.signal_P.sum()) for part in parts) == [1, 2, 2]
    for part in parts:
        assert part.groups.advantage_PG.tolist() == [
            whole.groups.advantage_PG[row].tolist() for row in rows(part)
        ]
    assert [rows(part) for part in dealt(whole, 3, seed=0)] == [rows(part) for part in parts]
    # control arms: another seed, another rollout
    assert [rows(part) for part in dealt(whole, 3, seed=1)] != [rows(part) for part in parts]
    assert [rows(part) for part in dealt(replace(whole, step=4), 3, seed=0)] != [rows(part) for part in parts]
    assert dealt(whole, 1, seed=0) == [whole]


@pytest.mark.parametrize("against", ["sampler", "trainer"])
@pytest.mark.parametrize("kind", KINDS)
def test_two_updates_of_a_bandit_are_autograd_of_the_plain_formula(kind, against):
    """In float64; the extras are float32, so q is rounded to that here too. After the first update the policy has
    moved, and the second one's ratios are against the policy that sampled."""
    toy = Toy(1)
    before = {word: toy.log_p((word,)).detach().float().double() for word in range(3)}
    whole = rolled([[1.0, -0.5, 0.25], [-1.0, 2.0, 0.0], [0.1, 3.0, -2.0], [0.0, -1.0, 1.5]], toy)
    settings = Settings(4, 3, 1, updates=2, micro_batch=4)
    parts = dealt(whole, settings.updates, seed=3)
    updates = numbered([micro_batches(part, settings) for part in parts])

    def measure(batch: Batch) -> torch.Tensor:
        return torch.cat([before[int(word)] for word in batch.targets_T[batch.supervised()]])

    if against == "trainer":
        updates = with_trainer(updates, measure, ALONE)
    moved = []
    for part, batches in zip(parts, updates, strict=True):
        assert len(batches) > 1
        losses = [
            policy(toy.hidden(batch), toy.head, batch, Loss(kind, BOUNDS, against), words=DRAWN)
            for batch in batches
        ]
        total = sum(loss.sum for loss in losses) / sum(float(loss.count) for loss in losses)
        found = torch.autograd.grad(total, list(toy.parameters()))

        each, ratios = [], []
        for group, advantage_G in zip(part.answers, part.groups.advantage_PG, strict=True):
            for answer, advantage in zip(group.sampled, advantage_G.float().double(), strict=True):
                q, log_p = before[answer.tokens[0]], toy.log_p(answer.tokens)
                ratio = (log_p - q).exp()
                each.append(plain(kind, BOUNDS, ratio, advantage[None], log_p.exp(), q.exp()).sum())
                ratios.append(float(ratio.detach()))
        exact = torch.autograd.grad(sum(each) / len(each), list(toy.parameters()))
        for ours, theirs in zip(found, exact, strict=True):
            assert (ours - theirs).abs().max() < 1e-9
        assert max(gradient.abs().max() for gradient in exact) > 1e-2
        moved.append(max(abs(ratio - 1) for ratio in ratios))
        # only in the first update do trainer and sampler have to agree
        assert [{"gap", "gap_max"} & {*loss.metrics, *loss.largest} for loss in losses] == [
            {"gap", "gap_max"} if len(moved) == 1 else set()
        ] * len(losses)
        with torch.no_grad():
            for parameter, gradient in zip(toy.parameters(), exact, strict=True):
                parameter -= 3.0 * gradient
    assert moved[0] < 1e-6 and moved[1] > 0.3


def same(ours: Batch, theirs: Batch) -> bool:
    fields = ("tokens_T", "targets_T", "weights_T", "positions_T", "starts_S")
    equal = all(torch.equal(getattr(ours, name), getattr(theirs, name)) for name in fields)
    for name in ("extras", "documents"):
        one, other = getattr(ours, name), getattr(theirs, name)
        equal &= one.keys() == other.keys()
        equal &= all(torch.equal(one[key], other[key]) and one[key].dtype == other[key].dtype for key in one)
    return equal and ours.examples == theirs.examples


def updates_of(**settings: object) -> list[list[Batch]]:
    whole = rolled([[1.0, 2.0, 0.25]] * 4, experts=True)
    made = Settings(4, 3, 1, updates=2, micro_batch=6, **settings)
    return numbered([micro_batches(part, made) for part in dealt(whole, 2, seed=0)])


def test_what_is_kept_comes_back_to_the_bit():
    updates = updates_of()
    assert "routes" in updates[0][0].extras and "update" in updates[1][0].documents
    again = of_tensors(as_tensors(updates), passes=1)
    assert [len(update) for update in again] == [len(update) for update in updates]
    for ours, theirs in zip(again, updates, strict=True):
        assert all(same(one, other) for one, other in zip(ours, theirs, strict=True))
    assert of_tensors({}, passes=3) == []


def test_other_processes_get_a_multiple_of_passes_with_the_same_sum():
    for update in updates_of():
        (filled,) = of_tensors(as_tensors([update]), passes=5)
        assert len(filled) % 5 == 0 and len(filled) > len(update)
        assert sum(batch.count for batch in filled) == sum(batch.count for batch in update)
        assert all(same(one, other) for one, other in zip(filled, update, strict=False))
        assert not any(bool(batch.weights_T.any()) for batch in filled[len(update) :])


def test_processes_measure_their_share_and_all_get_all():
    updates = updates_of(passes=2)
    sent: dict[int, str] = {}

    def measure(batch: Batch) -> torch.Tensor:
        return -0.1 * batch.targets_T[batch.supervised()].double() - 1 / 3

    def process(rank: int, seen: list[int]) -> SimpleNamespace:
        def texts(text: str) -> list[str]:
            sent[rank] = text
            return [sent[other] for other in sorted(sent)]

        def share(items: list[int]) -> list[int]:
            seen.extend(items[rank::2])
            return items[rank::2]

        return SimpleNamespace(share=share, texts=texts)

    seen: tuple[list[int], list[int]] = ([], [])
    with pytest.raises(KeyError):  # control: process 0 alone lacks the other's
        with_trainer(updates, measure, process(0, seen[0]))
    both = with_trainer(updates, measure, process(1, seen[1]))
    assert not {*seen[0]} & {*seen[1]} and len(seen[0] + seen[1]) == sum(map(len, updates))
    alone = with_trainer(updates, measure, ALONE)
    for ours, theirs in zip(both, alone, strict=True):
        assert all(same(one, other) for one, other in zip(ours, theirs, strict=True))
    batch = alone[1][0]
    rows_N = batch.supervised()
    torch.testing.assert_close(batch.extras["trainer_log_p"][rows_N], measure(batch).float())
    assert not batch.extras["trainer_log_p"][batch.weights_T == 0].any()
