"""The gradient of every objective is the exact policy gradient of a decision process whose answers can all be
enumerated, in float64; at other ratios it is that of the plain formula. Packing and dealing change nothing."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from unfreeze.core.batch import Batch, Loss
from unfreeze.kernels.linear_cross_entropy import Words
from unfreeze.models.blocks.head import Head
from unfreeze.objectives.policy import Settings, policy
from unfreeze.objectives.ratios import ESTIMATORS, KINDS, Bounds, Correction
from unfreeze.rollout.groups import divided

WORDS, PADDED, D, END, LONGEST = 3, 5, 4, 2, 3
TEMPERATURE = 0.7
DRAWN = Words(WORDS, TEMPERATURE)
PROMPT = 4


class Toy(nn.Module):
    """A model of few states: what the last word and the position add, and a softcapped head with padded rows."""

    def __init__(self, seed: int):
        super().__init__()
        torch.manual_seed(seed)
        self.embed, self.place = nn.Embedding(PADDED, D), nn.Embedding(8, D)
        self.head = Head(D, PADDED, softcap=2.0, dtype=torch.float32, device="cpu")
        nn.init.normal_(self.head.weight)
        self.double()

    def hidden(self, batch: Batch) -> Tensor:
        return (self.embed(batch.tokens_T) + self.place(batch.positions_T)).tanh()

    def log_p(self, answer: Sequence[int]) -> Tensor:
        """log p of each word of an answer, by the plain formula."""
        tokens = torch.tensor([PROMPT, *answer[:-1]])
        hidden = (self.embed(tokens) + self.place(torch.arange(len(tokens)))).tanh()
        logits = 2.0 * (hidden @ self.head.weight.T / 2.0).tanh()
        log_p = (logits[:, :WORDS] / TEMPERATURE).log_softmax(-1)
        return log_p.gather(1, torch.tensor(answer)[:, None])[:, 0]


def answers_of(longest: int) -> Iterator[tuple[int, ...]]:
    """Every answer that ends with END, or at the longest allowed."""
    for length in range(1, longest + 1):
        for words in itertools.product(range(WORDS), repeat=length):
            stops = [place for place, word in enumerate(words) if word == END]
            if stops == [length - 1] or (not stops and length == longest):
                yield words


def reward(answer: Sequence[int]) -> float:
    return math.sin(sum((place + 1) * (word + 1) for place, word in enumerate(answer)))


@dataclass
class Process:
    """A decision process: all its answers, their rewards and their probabilities under a toy."""

    answers: list[tuple[int, ...]]
    toy: Toy

    def batch(self, chosen: Sequence[int] | None = None, **extras: Callable[[int], Tensor]) -> Batch:
        """These answers as documents. A token's weight is the probability of its answer, so that a sum over all is
        an expectation."""
        chosen = range(len(self.answers)) if chosen is None else chosen
        lengths = [len(self.answers[index]) for index in chosen]

        def flat(values: Callable[[int], Tensor]) -> Tensor:
            # the document's last token predicts nothing
            return torch.cat([torch.cat([values(index), torch.zeros(1)]) for index in chosen]).double()

        tokens = torch.cat([torch.tensor([PROMPT, *self.answers[index]]) for index in chosen])
        targets = torch.cat([torch.tensor([*self.answers[index], 0]) for index in chosen])
        sizes = torch.tensor(lengths) + 1
        positions = torch.cat([torch.arange(int(size)) for size in sizes])
        weights = flat(lambda index: self.probability(index).expand(len(self.answers[index])))
        every = {"advantage": self.advantage, "sampler_log_p": self.before, **extras}
        found = {name: flat(values) for name, values in every.items()}
        return Batch(tokens, targets, weights, positions, sizes.cumsum(0) - sizes, extras=found)

    def before(self, index: int) -> Tensor:
        return self.toy.log_p(self.answers[index]).detach()

    def probability(self, index: int) -> Tensor:
        return self.before(index).sum().exp()

    def advantage(self, index: int) -> Tensor:
        """The reward minus a baseline: any number."""
        answer = self.answers[index]
        return torch.full((len(answer),), reward(answer) - 0.3, dtype=torch.float64)

    def gradient(self, value: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(value, list(self.toy.parameters()), retain_graph=True))

    def loss(self, batch: Batch, settings: Settings, **options: Any) -> Loss:
        return policy(self.toy.hidden(batch), self.toy.head, batch, settings, words=DRAWN, **options)


def process(longest: int, seed: int = 1) -> Process:
    return Process(list(answers_of(longest)), Toy(seed))


def furthest(found: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    return max((one - other).abs().max().item() for one, other in zip(found, exact, strict=True))


@pytest.mark.parametrize("longest", [1, LONGEST], ids=["bandit", "three tokens"])
@pytest.mark.parametrize("kind", KINDS)
def test_at_ratio_one_the_gradient_is_the_exact_policy_gradient(kind, longest):
    here = process(longest)
    batch = here.batch()
    assert len(here.answers) == {1: 3, 3: 15}[longest]
    torch.testing.assert_close(
        sum(map(here.probability, range(len(here.answers)))), torch.tensor(1.0).double()
    )
    exact = here.gradient(
        -sum(here.toy.log_p(answer).sum().exp() * reward(answer) for answer in here.answers)
    )
    wide = Bounds(low=10.0, high=10.0)
    for settings in (Settings(kind), Settings(kind, wide), Settings(kind, against="trainer")):
        assert furthest(here.gradient(here.loss(batch, settings).sum), exact) < 1e-9
    assert max(gradient.abs().max() for gradient in exact) > 1e-2

    # control arms: other words, another temperature, the other sign, one wrong ratio
    for words in (Words(PADDED, TEMPERATURE), Words(WORDS), None):
        loss = policy(here.toy.hidden(batch), here.toy.head, batch, Settings(kind), words=words)
        assert furthest(here.gradient(loss.sum), exact) > 1e-3
    turned = here.batch(advantage=lambda index: -here.advantage(index))
    assert furthest(here.gradient(here.loss(turned, Settings(kind)).sum), exact) > 1e-3
    if kind != "reinforce":
        shifted = here.batch(sampler_log_p=lambda index: here.before(index) - 0.1)
        assert furthest(here.gradient(here.loss(shifted, Settings(kind, wide)).sum), exact) > 1e-3


def moved(here: Process) -> dict[str, Callable[[int], Tensor]]:
    """Extras of a policy that has moved since it sampled."""

    def near(seed: int) -> Callable[[int], Tensor]:
        def values(index: int) -> Tensor:
            generator = torch.Generator().manual_seed(100 * seed + index)
            before = here.before(index)
            return (before + 0.5 * torch.randn(len(before), generator=generator)).clamp(max=-0.01)

        return values

    return {"sampler_log_p": near(1), "trainer_log_p": near(2), "reference": near(3)}


def plain(kind: str, bounds: Bounds, r: Tensor, A: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """The loss of one answer's tokens, written once more: a loop over its tokens."""
    low, high, n = 1 - bounds.low, 1 + bounds.high, len(r)
    s, R = r.log().mean().exp(), r.prod()
    each = []
    for t in range(n):
        if kind == "reinforce":
            each.append(-A[t] * p[t].log())
        elif kind == "cispo":
            each.append(-A[t] * r[t].detach().clamp(low, high) * p[t].log())
        elif kind == "dppo":
            gone = p[t] - q[t] > bounds.high if A[t] > 0 else q[t] - p[t] > bounds.low
            each.append(-A[t] * r[t] * float(not gone))
        elif kind == "sapo":
            tau = bounds.rising if A[t] > 0 else bounds.falling
            each.append(-A[t] * (4 / tau) / (1 + torch.exp(-tau * (r[t] - 1))))
        else:
            ratio, divisor = {"ppo": (r[t], 1), "gspo": (s, 1), "rloo": (R, n)}[kind]
            worst = torch.minimum(ratio * A[t], ratio.clamp(low, high) * A[t])
            if bounds.dual and A[t] < 0:
                worst = torch.maximum(worst, bounds.dual * A[t])
            each.append(-worst / divisor)
    return torch.stack(each)


@pytest.mark.parametrize("against", ["sampler", "trainer"])
@pytest.mark.parametrize("kind", KINDS)
def test_at_other_ratios_it_is_autograd_of_the_plain_formula(kind, against):
    here = process(LONGEST)
    extras, bounds = moved(here), Bounds(0.2, 0.3, dual=1.4)
    total, cut = torch.zeros(()).double(), 0
    for index, answer in enumerate(here.answers):
        log_p, q = here.toy.log_p(answer), extras[f"{against}_log_p"](index)
        tokens = plain(kind, bounds, (log_p - q).exp(), here.advantage(index), log_p.exp(), q.exp())
        total = total + here.probability(index) * tokens.mean()
        cut += int((log_p - q).exp().gt(1.3).sum())
    assert cut > 3
    batch = replace(here.batch(**extras), examples=1)
    loss = here.loss(batch, Settings(kind, bounds, against, per="answers"))
    assert abs(float(loss.sum.detach() - total.detach())) < 1e-9
    assert furthest(here.gradient(loss.sum), here.gradient(total)) < 1e-9


TRUE_WEIGHT = {
    "ppo": Settings("ppo", Bounds(9.0, 99.0)),
    "dppo": Settings("dppo", Bounds(9.0, 99.0)),
    "rloo": Settings("rloo", Bounds(9.0, 99.0), per="answers"),
    "cispo": Settings("cispo", Bounds(9.0, 99.0)),
    "reinforce, weighed": Settings("reinforce", correction=Correction("answer", 99.0)),
}


@pytest.mark.parametrize("name", [*TRUE_WEIGHT, "reinforce"])
def test_a_policy_that_has_moved_keeps_its_exact_gradient_if_ratios_weigh_it(name):
    """The second update of a bandit: answers come from q, the gradient is wanted at p. Unclipped ratios weigh each
    answer by p / q; without them it is another gradient."""
    q, p = process(1), process(1, seed=2)
    exact = p.gradient(-sum(p.toy.log_p(answer).sum().exp() * reward(answer) for answer in p.answers))
    batch = q.batch(sampler_log_p=q.before)  # weighed by its probability under q
    ratios = [float((p.before(index) - q.before(index)).exp()) for index in range(len(p.answers))]
    assert max(ratios) > 1.3 and min(ratios) < 0.7
    settings = TRUE_WEIGHT.get(name, Settings())
    batch = replace(batch, examples=1) if settings.per != "tokens" else batch
    difference = furthest(p.gradient(p.loss(batch, settings).sum), exact)
    assert difference > 1e-2 if name == "reinforce" else difference < 1e-9


SETTINGS = [
    Settings(kind, per=("tokens", "answers", "constant")[place % 3], constant=7.0)
    for place, kind in enumerate(KINDS)
]
SETTINGS += [Settings("ppo", correction=Correction("token", 1.2, "answer", (0.7, 1.4)), against="trainer")]
SETTINGS += [Settings("gspo", per="sum", kl=kl, beta=0.3) for kl in ESTIMATORS]


@pytest.mark.parametrize(
    "settings", SETTINGS, ids=lambda s: f"{s.loss}-{s.per}-{s.kl if s.beta else 'no kl'}"
)
def test_packing_order_and_micro_batches_change_nothing(settings):
    here = process(LONGEST)
    extras, answers = moved(here), range(len(here.answers))
    dealt = [[*answers], [4, 0, 9, 14], [1, 2, 3, 5, 6, 13], [7, 12], [8], [10, 11]]

    def folded(parts: Sequence[Sequence[int]]) -> tuple[list[Tensor], dict[str, float]]:
        batches = [here.batch(part, **extras) for part in parts]
        tokens = sum(float(batch.weights_T.sum()) for batch in batches)
        if settings.per != "tokens":
            batches = divided(batches, settings.per, answers=len(answers), tokens=0)
        losses = [
            here.loss(batch, settings, reference=lambda batch: batch.extras["reference"][batch.supervised()])
            for batch in batches
        ]
        total = sum(loss.sum for loss in losses) / sum(float(loss.count) for loss in losses)
        means = {
            name: sum(float(loss.metrics[name]) for loss in losses)
            / sum(float(loss.metric_count or 0) for loss in losses)
            for name in losses[0].metrics
        }
        top = {name: max(float(loss.largest[name]) for loss in losses) for name in losses[0].largest}
        assert sum(float(loss.metric_count or 0) for loss in losses) == pytest.approx(tokens)
        return here.gradient(total), {**means, **top}

    whole, parts = folded(dealt[:1]), folded(dealt[1:])
    assert furthest(parts[0], whole[0]) < 1e-9 and parts[1] == pytest.approx(whole[1], abs=1e-9)
    assert max(gradient.abs().max() for gradient in whole[0]) > 1e-4


def test_the_mean_of_k1_and_of_k3_is_the_divergence_and_the_gradients_are_as_documented():
    here, other = process(1), Toy(5)
    batch = replace(here.batch(advantage=lambda index: torch.zeros(1)), examples=1)

    def reference(batch: Batch) -> Tensor:
        return torch.cat([other.log_p(answer) for answer in here.answers]).detach()

    log_p = torch.stack([here.toy.log_p(answer)[0] for answer in here.answers])
    log_ref = reference(batch)
    forward = here.gradient((log_p.exp() * (log_p - log_ref)).sum())
    backward = here.gradient((log_ref.exp() * (log_ref - log_p)).sum())
    exact = float((log_p.exp() * (log_p - log_ref)).sum().detach())
    found = {}
    for kl in ESTIMATORS:
        loss = here.loss(batch, Settings(kl=kl, beta=1.0, per="sum"), reference=reference)
        found[kl] = float(loss.metrics["kl"])
        gradient = here.gradient(loss.sum)
        assert furthest(gradient, backward if kl == "k3" else forward) < 1e-9, kl
        assert furthest(gradient, forward if kl == "k3" else backward) > 1e-3, kl
    assert exact > 0.05
    assert {name: value for name, value in found.items() if name != "k2"} == pytest.approx(
        dict.fromkeys(("k1", "k3", "k3+"), exact), abs=1e-9
    )
    assert abs(found["k2"] - exact) > 1e-3


def test_metrics_are_means_and_largest_over_sampled_tokens():
    here = process(LONGEST)
    extras, bounds = moved(here), Bounds(0.2, 0.3)
    correction = Correction(mask="token", band=(0.8, 1.25))
    batch = replace(here.batch(**extras), examples=1)
    loss = here.loss(batch, Settings("ppo", bounds, per="answers", correction=correction))
    rows = batch.supervised()
    weights = batch.weights_T[rows]
    log_p = torch.cat([here.before(index) for index in range(len(here.answers))])
    sampled, advantage = batch.extras["sampler_log_p"][rows], batch.extras["advantage"][rows]
    ratio = (log_p - sampled).exp()
    cut = ((ratio > 1.3) & (advantage > 0)) | ((ratio < 0.8) & (advantage < 0))
    expected = {
        "entropy": -log_p,
        "ratio": ratio,
        "clip_fraction": cut.double(),
        "masked": ((ratio < 0.8) | (ratio > 1.25)).double(),
        "gap": (log_p - sampled).abs(),
    }
    assert {*loss.metrics} == {*expected} and 0 < cut.double().mean() < 1
    for name, values in expected.items():
        assert float(loss.metrics[name]) == pytest.approx(float((weights * values).sum()), abs=1e-9), name
    assert float(loss.metric_count) == pytest.approx(float(weights.sum()))
    largest = {"ratio_max": float(ratio.max()), "gap_max": float((log_p - sampled).abs().max())}
    assert {name: float(value) for name, value in loss.largest.items()} == pytest.approx(largest, abs=1e-9)


def test_a_micro_batch_without_sampled_tokens_adds_nothing():
    here = process(LONGEST)
    batch = here.batch(**moved(here))
    empty = replace(batch, weights_T=torch.zeros_like(batch.weights_T))
    for settings in (Settings(), Settings("gspo", correction=Correction("answer", mask="answer"))):
        loss = here.loss(empty, settings)
        assert float(loss.sum.detach()) == float(loss.count) == 0
        assert all(float(value) == 0 for value in (*loss.metrics.values(), *loss.largest.values()))
        assert furthest(here.gradient(loss.sum), [torch.zeros(()).double()] * 3) == 0


@pytest.mark.parametrize(
    ("settings", "missing", "message"),
    [
        (Settings(beta=0.1), "", "no reference"),
        (Settings(per="answers"), "", "divisor"),
        (Settings("ppo"), "sampler_log_p", "sampler_log_p"),
        (Settings(), "advantage", "advantage"),
        (Settings("ppo", against="trainer", correction=Correction("token")), "sampler_log_p", "correction"),
    ],
)
def test_what_is_missing_is_named(settings, missing, message):
    here = process(1)
    batch = here.batch()
    kept = {name: values for name, values in batch.extras.items() if name != missing}
    with pytest.raises(ValueError, match=message):
        here.loss(replace(batch, extras=kept), settings)


class Largest(TorchDispatchMode):
    """The largest number of elements of a tensor that an operation returns."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [value.numel() for value in tree_leaves(result) if isinstance(value, Tensor)]
        self.elements = max([self.elements, *sizes])
        return result


@pytest.mark.parametrize("kind", KINDS)
def test_the_logits_of_all_tokens_are_never_in_memory(kind):
    torch.manual_seed(0)
    T, vocab, block = 256, 512, 16
    hidden = torch.randn(T, D, requires_grad=True)
    head = nn.Linear(D, vocab, bias=False)
    tokens = torch.randint(0, vocab, (T,))
    extras = {"advantage": torch.randn(T), "sampler_log_p": -6 + torch.randn(T)}
    batch = Batch(tokens, tokens, torch.ones(T), torch.arange(T), torch.tensor([0]), extras=extras)
    words = Words(vocab - 3, 0.8)
    with Largest() as largest:
        policy(hidden, head, batch, Settings(kind), words=words, block_rows=block).sum.backward()
    assert block * vocab <= largest.elements < T * vocab / 8
