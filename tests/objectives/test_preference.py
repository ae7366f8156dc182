"""Preference losses against TRL 1.16's own trainers on the same batch: loss, gradients of hidden states and head,
rewards. TRL takes 7 s to import: every comparison with it stands here."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from unfreeze.core.batch import Batch, Loss
from unfreeze.data import Example, pack
from unfreeze.objectives.log_p import log_probabilities
from unfreeze.objectives.preference import KINDS, WITHOUT_REFERENCE, preference

V, D = 97, 16
BETA, GAMMA = 0.3, 0.7
HYPER = {"beta": BETA, "gamma": GAMMA}


class Toy(nn.Module):
    """The smallest language model: an embedding, what a position adds, and a head."""

    def __init__(self, seed: int, vocab: int = V):
        super().__init__()
        torch.manual_seed(seed)
        self.embed, self.place = nn.Embedding(vocab, D), nn.Embedding(64, D)
        self.head = nn.Linear(D, vocab, bias=False)

    def hidden(self, batch: Batch) -> Tensor:
        return self.embed(batch.tokens_T) + self.place(batch.positions_T)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **_: Any) -> SimpleNamespace:
        """What TRL asks of a model: logits, and log p of labels[:, 1:] with zeros where these are -100."""
        hidden = self.embed(input_ids) + self.place(torch.arange(input_ids.shape[1]))
        logits = self.head(hidden)
        if labels is None:
            return SimpleNamespace(logits=logits)
        wanted = labels[:, 1:]
        logp = logits[:, :-1].log_softmax(-1).gather(2, wanted.clamp(min=0)[..., None])[..., 0]
        zeros = torch.zeros_like(logp)
        return SimpleNamespace(
            log_probs=logp.masked_fill(wanted == -100, 0.0),
            entropy=zeros,
            mean_logits=zeros,
            is_top1=zeros.bool(),
            logits=logits,
        )


def pairs(
    seed: int = 0, count: int = 4, prompt: int | None = None, chosen: int | None = None
) -> list[Example]:
    """Pairs with prompts of 1 to 5 tokens and answers of 2 to 9, unless a length is given."""
    draw = torch.Generator().manual_seed(seed)

    def some(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=draw))

    made = []
    for row in range(count):
        asked = torch.randint(0, V, (prompt or some(1, 6),), generator=draw).tolist()
        sides = [
            asked + torch.randint(0, V, (length,), generator=draw).tolist()
            for length in (chosen or some(2, 10), some(2, 10))
        ]
        weights = [[0.0] * len(asked) + [1.0] * (len(side) - len(asked)) for side in sides]
        made.append(Example([*sides[0], *sides[1]], [*weights[0], *weights[1]], row, chosen=len(sides[0])))
    return made


def labelled(seed: int = 0, count: int = 5) -> list[Example]:
    """The answers of pairs, each with a label; desirable ones first, as a batch has them."""
    both = [example.documents() for example in pairs(seed, count)]
    each = [documents[row % 2] for row, documents in enumerate(both)]
    each = [
        Example(one.tokens, one.weights, one.row, chosen=0 if row % 2 else one.num_tokens)
        for row, one in enumerate(each)
    ]
    return sorted(each, key=lambda example: example.chosen == 0)


def examples_of(kind: str) -> list[Example]:
    return {"kto": labelled}.get(kind, lambda: pairs(prompt=1, chosen=6 if kind == "orpo" else None))()


def reference_of(model: Toy) -> Callable[[Batch], Tensor]:
    return lambda batch: log_probabilities(model.hidden(batch), model.head, batch)


def ours(kind: str, model: Toy, other: Toy, examples: list[Example], **options: Any) -> Loss:
    batch = pack(examples)
    given = {} if kind in WITHOUT_REFERENCE else {"reference": reference_of(other)}
    return preference(model.hidden(batch), model.head, batch, kind=kind, **{**HYPER, **given, **options})


def padded(documents: list[Example]) -> tuple[Tensor, Tensor, Tensor]:
    """(input ids, attention mask, mask of the answers), padded behind."""
    longest = max(document.num_tokens for document in documents)
    ids = torch.tensor([[*d.tokens, *[0] * (longest - d.num_tokens)] for d in documents])
    attention = torch.tensor([[1] * d.num_tokens + [0] * (longest - d.num_tokens) for d in documents])
    answers = torch.tensor([[*map(int, d.weights), *[0] * (longest - d.num_tokens)] for d in documents])
    return ids, attention, answers


def trainer(**fields: Any) -> SimpleNamespace:
    """What a trainer's loss reads of itself."""
    same = lambda value: value  # noqa: E731
    accelerator = SimpleNamespace(device="cpu", gather=same, gather_for_metrics=same)
    nothing = dict.fromkeys(("ld_alpha", "use_weighting", "precompute_ref_logps", "aux_loss_enabled"))
    return SimpleNamespace(
        accelerator=accelerator,
        **{**nothing, "_metrics": {"train": defaultdict(list)}, "_total_train_tokens": 0, "_tp_size": 1},
        args=SimpleNamespace(gradient_checkpointing_kwargs=None),
        is_encoder_decoder=False,
        **fields,
    )


def theirs(
    kind: str, model: Toy, other: Toy, examples: list[Example], nll: float = 0.0
) -> tuple[Tensor, dict[str, float]]:
    """TRL's mean loss over the batch, and its metrics."""
    model.is_gradient_checkpointing = other.is_gradient_checkpointing = False
    if kind in ("dpo", "ipo"):
        from trl.trainer.dpo_trainer import DPOTrainer

        sides = [example.documents() for example in examples]
        ids, attention, answers = padded([w for w, _ in sides] + [v for _, v in sides])
        names = ["sigmoid" if kind == "dpo" else "ipo", *["sft"] * bool(nll)]
        own = trainer(
            model=model, ref_model=other, beta=BETA, f_divergence_type="reverse_kl", loss_types=names,
            loss_weights=[1.0, nll][: len(names)], label_smoothing=0.0,
        )  # fmt: skip
        inputs = {"input_ids": ids, "attention_mask": attention, "completion_mask": answers}
        loss = DPOTrainer._compute_loss(own, model, inputs, False)
        return loss, {name: values[-1] for name, values in own._metrics["train"].items()}
    if kind == "kto":
        from trl.trainer.kto_trainer import KTOTrainer

        ids, attention, answers = padded(examples)
        batch = pack(examples)
        mixed = [  # what pack laid out, so that both estimate z from the same answers
            (batch.tokens_T[a:b].tolist(), [0.0, *batch.weights_T[a : b - 1].tolist()])
            for a, b in zip(
                batch.starts_S.tolist(), [*batch.starts_S.tolist()[1:], batch.num_tokens], strict=True
            )
        ][len(examples) :]
        kl_ids, kl_attention, kl_answers = padded([Example(tokens, weights) for tokens, weights in mixed])
        own = trainer(
            model=model, ref_model=other, beta=BETA, loss_type="kto", calculate_KL=True,
            desirable_weight=1.0, undesirable_weight=1.5, use_liger_kernel=False,
        )  # fmt: skip
        own._compute_kl_logps = lambda m, b: KTOTrainer._compute_kl_logps(own, m, b)
        inputs = {
            "input_ids": ids, "attention_mask": attention, "completion_mask": answers,
            "KL_input_ids": kl_ids, "KL_attention_mask": kl_attention, "KL_completion_mask": kl_answers,
            "label": torch.tensor([example.chosen > 0 for example in examples]),
        }  # fmt: skip
        loss = KTOTrainer._compute_loss(own, model, inputs, False)
        return loss, {name: values[-1] for name, values in own._metrics["train"].items()}
    sides = [example.documents() for example in examples]
    made = {}
    for name, documents in (("chosen", [w for w, _ in sides]), ("rejected", [v for _, v in sides])):
        ids, attention, answers = padded(documents)
        made |= {f"{name}_input_ids": ids, f"{name}_attention_mask": attention}
        made[f"{name}_labels"] = ids.masked_fill(answers == 0, -100)
    if kind == "simpo":
        from trl.experimental.cpo.cpo_trainer import CPOTrainer as Trainer

        own = trainer(
            beta=BETA, simpo_gamma=GAMMA, loss_type="simpo", cpo_alpha=nll, alpha=0.0, label_smoothing=0.0,
            pad_token_id=0,
        )  # fmt: skip
        own.cpo_loss = lambda w, v: Trainer.cpo_loss(own, w, v)
    else:
        from trl.experimental.orpo.orpo_trainer import ORPOTrainer as Trainer

        own = trainer(beta=BETA, padding_value=0)
        own.odds_ratio_loss = lambda w, v: Trainer.odds_ratio_loss(own, w, v)
    own.concatenated_inputs, own.get_batch_logps = Trainer.concatenated_inputs, Trainer.get_batch_logps
    own.concatenated_forward = lambda m, b: Trainer.concatenated_forward(own, m, b)
    return Trainer.get_batch_loss_metrics(own, model, made)


def gradients(loss: Tensor, model: Toy) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


NAMES = {
    "rewards/chosen": "reward_chosen",
    "rewards/rejected": "reward_rejected",
    "rewards/margins": "margin",
    "rewards/accuracies": "accuracy",
    "logps/chosen": "logp_chosen",
    "logps/rejected": "logp_rejected",
    "kl": "kl",
}


@pytest.mark.parametrize("kind", KINDS)
def test_loss_gradients_and_rewards_equal_trl(kind: str):
    """1e-5: the brief's; float32 sums of up to 9 log-probabilities near 5 are 1e-6 apart."""
    model, other, examples = Toy(1), Toy(2), examples_of(kind)
    options = {"undesirable_weight": 1.5} if kind == "kto" else {}
    expected, measured = theirs(kind, model, other, examples)
    want = gradients(expected, model)
    got = ours(kind, model, other, examples, **options)
    have = gradients(got.sum / got.count, model)

    assert got.count == len(examples)
    assert float(got.sum.detach()) / got.count == pytest.approx(float(expected.detach()), rel=1e-5, abs=1e-6)
    assert have.keys() == want.keys() == {"embed.weight", "place.weight", "head.weight"}
    for name in want:
        torch.testing.assert_close(have[name], want[name], rtol=1e-5, atol=1e-6, msg=name)
    for name, value in measured.items():
        if name in NAMES and not (kind in WITHOUT_REFERENCE and name.startswith("logps")):
            mine = float(got.metrics[NAMES[name]]) / got.count
            assert mine == pytest.approx(value, rel=1e-5, abs=1e-5), name
    assert {"rewards/chosen", "rewards/margins"} <= measured.keys()


@pytest.mark.parametrize("kind", ["dpo", "ipo", "simpo"])
def test_with_fine_tuning_on_the_chosen_answer_loss_and_gradients_equal_trl(kind: str):
    """Chosen answers of one length: there TRL's mean over the tokens of a batch is the mean over pairs."""
    model, other, examples = Toy(1), Toy(2), pairs(prompt=1, chosen=6)
    expected = theirs(kind, model, other, examples, nll=0.2)[0]
    want = gradients(expected, model)
    got = ours(kind, model, other, examples, nll=0.2)
    have = gradients(got.sum / got.count, model)
    assert float(got.sum.detach()) / got.count == pytest.approx(float(expected.detach()), rel=1e-5)
    for name in want:
        torch.testing.assert_close(have[name], want[name], rtol=1e-5, atol=1e-6, msg=name)
    without = ours(kind, model, other, examples)  # control arm
    assert float(got.sum.detach()) > 1.01 * float(without.sum.detach())


@pytest.mark.parametrize("fault", ["swapped", "mean", "without reference"])
def test_control_arms_are_far_from_trl(fault: str):
    """Planted: chosen for rejected, a mean where DPO has a sum, no reference. Each moves the loss by > 1 %."""
    model, other, examples = Toy(1), Toy(2), pairs()
    expected = float(theirs("dpo", model, other, examples)[0].detach())

    def swapped(example: Example) -> Example:
        w, v = example.documents()
        return Example([*v.tokens, *w.tokens], [*v.weights, *w.weights], example.row, chosen=v.num_tokens)

    def averaged(example: Example) -> Example:
        w, v = example.documents()
        weights = [x / sum(side.weights) for side in (w, v) for x in side.weights]
        return Example(example.tokens, weights, example.row, chosen=example.chosen)

    wrong = {"swapped": swapped, "mean": averaged}.get(fault, lambda example: example)
    nothing = {"reference": lambda batch: torch.zeros(len(batch.starts_S))}
    got = ours(
        "dpo", model, other, [wrong(e) for e in examples], **(nothing if fault == "without reference" else {})
    )
    assert abs(float(got.sum.detach()) / got.count - expected) > 0.01 * expected
    right = ours("dpo", model, other, examples)
    assert float(right.sum.detach()) / right.count == pytest.approx(expected, rel=1e-5)


def test_smoothed_labels_are_the_mixture_of_both_orders():
    """cDPO: (1 - s) of the loss, s of the loss with the answers swapped; from two plain losses."""
    model, other, examples = Toy(1), Toy(2), pairs()
    swapped = []
    for example in examples:
        w, v = example.documents()
        swapped.append(Example([*v.tokens, *w.tokens], [*v.weights, *w.weights], chosen=v.num_tokens))
    plain, back = (float(ours("dpo", model, other, e).sum.detach()) for e in (examples, swapped))
    smoothed = float(ours("dpo", model, other, examples, label_smoothing=0.2).sum.detach())
    assert smoothed == pytest.approx(0.8 * plain + 0.2 * back, rel=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_a_sum_over_examples_with_its_count(kind: str):
    """Any cut of pairs into micro-batches gives the same sum. KTO's z is of a micro-batch, so there only z = 0
    is cut: a policy that is the reference."""
    model = Toy(1)
    other = model if kind == "kto" else Toy(2)
    examples = examples_of(kind)
    both = ours(kind, model, other, examples)
    halves = [ours(kind, model, other, examples[:2]), ours(kind, model, other, examples[2:])]
    assert both.count == len(examples) == sum(half.count for half in halves)
    total = sum(float(half.sum.detach()) for half in halves)
    assert float(both.sum.detach()) == pytest.approx(total, rel=1e-5)
    assert both.each is not None and float(both.each.sum()) == pytest.approx(total, rel=1e-5)


def test_a_policy_that_is_its_reference_has_no_margin_and_log_two():
    model = Toy(1)
    loss = ours("dpo", model, model, pairs())
    assert float(loss.sum.detach()) / loss.count == pytest.approx(math.log(2), rel=1e-6)
    assert float(loss.metrics["margin"]) == 0 and float(loss.metrics["accuracy"]) == loss.count / 2


def test_a_loss_that_compares_needs_a_reference():
    batch = pack(pairs())
    model = Toy(1)
    with pytest.raises(ValueError, match="none is given"):
        preference(model.hidden(batch), model.head, batch, kind="dpo")


def test_lengths_and_longer_answers_are_counted():
    loss = ours("dpo", Toy(1), Toy(2), examples := pairs(chosen=6))
    lengths = [[int(sum(side.weights)) for side in example.documents()] for example in examples]
    assert float(loss.metrics["length_chosen"]) == sum(w for w, _ in lengths)
    assert float(loss.metrics["length_rejected"]) == sum(v for _, v in lengths)
    assert float(loss.metrics["longer"]) == sum((w > v) + (w == v) / 2 for w, v in lengths)


def test_longer_answers_are_counted_among_labels_too():
    """Over every chosen with every rejected answer, by plain loops; of one side alone nothing is known: 1/2."""
    model, other, examples = Toy(1), Toy(2), labelled(count=6)
    loss = ours("kto", model, other, examples)
    batch = pack(examples)
    ratio = reference_of(model)(batch) - reference_of(other)(batch)
    each = [(e.chosen > 0, sum(e.weights), float(r)) for e, r in zip(examples, ratio, strict=False)]
    both = [(n - m, r - q) for good, n, r in each if good for bad, m, q in each if not bad]
    longer = sum((n > 0) + (n == 0) / 2 for n, _ in both) / len(both)
    follows = sum((n * r > 0) + (n == 0) / 2 for n, r in both) / len(both)
    assert float(loss.metrics["longer"]) / loss.count == pytest.approx(longer) != 0.5
    assert float(loss.metrics["by_length"]) / loss.count == pytest.approx(follows)
    alone = ours("kto", model, other, [e for e in examples if e.chosen])
    assert float(alone.metrics["longer"]) == alone.count / 2


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
    torch.manual_seed(0)
    vocab, rows, length = 1 << 13, 32, 32
    model, other = (Toy(seed, vocab).requires_grad_(False) for seed in (1, 2))
    sides = torch.randint(0, vocab, (rows, 2, length)).tolist()
    weights = [0.0, *[1.0] * (length - 1)] * 2
    batch = pack([Example([*w, *v], weights, chosen=length) for w, v in sides])
    hidden = model.hidden(batch).detach().requires_grad_()
    with LargestTensor() as seen:
        preference(hidden, model.head, batch, kind="dpo", reference=reference_of(other)).sum.backward()
    supervised = rows * 2 * (length - 1)
    assert seen.elements < supervised * vocab / 3  # blocks of 512 rows
    with LargestTensor() as control:  # the hook does see the tensor where it is made
        model.head(hidden).log_softmax(-1)
    assert control.elements >= supervised * vocab
