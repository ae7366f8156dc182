"""The losses and advantages of other trainers, as their own functions computed them (benchmarks/policy_vectors.py
recorded them, in float64): every preset of --like, and TRL's other losses and corrections, to 1e-9."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from unfreeze.core.batch import Batch
from unfreeze.objectives.policy import Settings, policy, sampler_log_p
from unfreeze.objectives.ratios import Bounds, Correction
from unfreeze.rollout.groups import Advantage, advantages, divided
from unfreeze.rollout.like import LIKE, Preset

RECORDED = json.loads((Path(__file__).parent / "recorded" / "policies.json").read_text(encoding="utf-8"))
INPUTS = {name: torch.tensor(values, dtype=torch.float64) for name, values in RECORDED["inputs"].items()}
TRAINER = {"against": "trainer"}
TRL: dict[str, Settings] = {
    "grpo": Settings("ppo", per="answers", **TRAINER),
    "dapo": Settings("ppo", **TRAINER),
    "bnpo": Settings("ppo", **TRAINER),
    "dr_grpo": Settings("ppo", per="constant", constant=8, **TRAINER),
    "cispo": Settings("cispo", Bounds(low=1.0, high=0.3), **TRAINER),
    "sapo": Settings("sapo", per="answers", **TRAINER),
    "gspo": Settings("gspo", per="answers", **TRAINER),
    "kl": Settings("ppo", beta=0.04, **TRAINER),
    "token TIS": Settings("ppo", correction=Correction("token", 1.2), **TRAINER),
    "answer TIS": Settings("ppo", correction=Correction("answer", 1.2), **TRAINER),
    "token mask": Settings("ppo", correction=Correction(mask="token", band=(0.8, 1.25)), **TRAINER),
    "answer mask": Settings("ppo", correction=Correction(mask="answer", band=(0.9, 1.1)), **TRAINER),
    "rloo": Settings("rloo", per="constant", **TRAINER),
}


def batch_of(x: Mapping[str, Tensor], answers: Sequence[int]) -> tuple[Tensor, Batch]:
    """Hidden states that are two logits, so that the identity as a head gives each token its recorded log p; and the
    batch of these answers, a document each, all of whose tokens are sampled ones."""
    lengths = [int(x["mask"][answer].sum()) for answer in answers]

    def flat(name: str) -> Tensor:
        return torch.cat([x[name][answer][:length] for answer, length in zip(answers, lengths, strict=True)])

    log_p_T = flat("log_p")
    hidden_TD = torch.stack([log_p_T, torch.log(-torch.expm1(log_p_T))], 1).requires_grad_()
    total, counts = len(log_p_T), torch.tensor(lengths)
    wide = {"advantage": x["advantages"][list(answers)].repeat_interleave(counts)}
    names = {"trainer_log_p": "old", "sampler_log_p": "sampler", "reference": "reference"}
    extras = wide | {name: flat(source) for name, source in names.items()}
    zeros = torch.zeros(total, dtype=torch.int64)
    starts = counts.cumsum(0) - counts
    return hidden_TD, Batch(zeros, zeros, torch.ones(total), torch.arange(total), starts, extras=extras)


def ours(
    settings: Settings,
    x: Mapping[str, Tensor],
    reference: Any = lambda batch: batch.extras["reference"],
    split: Sequence[Sequence[int]] = ((0, 1, 2, 3, 4, 5),),
) -> tuple[float, list[Tensor]]:
    """The step's loss, and its gradient by each answer's log p, from micro-batches of these answers."""
    head = nn.Linear(2, 2, bias=False, dtype=torch.float64).requires_grad_(False)
    nn.init.eye_(head.weight)
    parts = [batch_of(x, answers) for answers in split]
    count = {"answers": len(x["mask"]), "tokens": int(x["mask"].sum())}
    batches = divided([batch for _, batch in parts], settings.per, **count)
    losses = [
        policy(hidden, head, batch, settings, reference=reference)
        for (hidden, _), batch in zip(parts, batches, strict=True)
    ]
    total = sum(loss.sum for loss in losses) / sum(float(loss.count) for loss in losses)
    gradients = torch.autograd.grad(total, [hidden for hidden, _ in parts])
    by_answer: dict[int, Tensor] = {}
    for answers, (hidden, batch), gradient in zip(split, parts, gradients, strict=True):
        slopes = gradient[:, 0] / -torch.expm1(hidden.detach()[:, 0])  # d log p / d z is 1 - p
        by_answer |= dict(zip(answers, slopes.split(batch.lengths()), strict=True))
    return total.item(), [by_answer[answer] for answer in sorted(by_answer)]


def apart(case: Mapping[str, Any], loss: float, gradient: Sequence[Tensor]) -> float:
    """The largest difference from a recorded loss and its gradient; padding has none."""
    rows = torch.tensor(case["gradient"], dtype=torch.float64)
    differences = [
        (row[: len(own)] - own).abs().max().item() for row, own in zip(rows, gradient, strict=True)
    ]
    return max(abs(loss - case["loss"]), *differences)


@pytest.mark.parametrize("name", TRL)
def test_every_loss_and_correction_of_trl(name):
    case = RECORDED["peers"]["trl"]["cases"][name]
    assert apart(case, *ours(TRL[name], INPUTS)) < 1e-9
    # however the answers are dealt to micro-batches, and in whatever order
    assert apart(case, *ours(TRL[name], INPUTS, split=[(5, 2), (0,), (4, 1, 3)])) < 1e-9


@pytest.mark.parametrize("name", TRL)
def test_control_arm_another_divisor_ratio_or_sign_is_seen(name):
    case, right = RECORDED["peers"]["trl"]["cases"][name], TRL[name]
    divisor = replace(right, per="tokens" if right.per != "tokens" else "answers")
    turned = {**INPUTS, "advantages": -INPUTS["advantages"]}
    ratio = {**INPUTS, "old": INPUTS["log_p"], "sampler": INPUTS["log_p"]}
    for settings, x in ((divisor, INPUTS), (right, turned), (right, ratio)):
        assert apart(case, *ours(settings, x)) > 1e-3


def recorded_inputs(name: str, label: str) -> tuple[dict[str, Tensor], Preset]:
    """The inputs of a recorded case, and the preset that it was made for."""
    preset, x = LIKE[name], dict(INPUTS)
    if label == "dual":  # ratios above the limit of tokens with A < 0
        x["old"] = x["old"] - 1.5 * (x["advantages"] < 0).double()[:, None]
    if label == "even lengths":
        x["mask"] = torch.ones_like(x["mask"])
    if label == "without KL":
        preset = preset._replace(policy=replace(preset.policy, beta=0.0))
    return x, preset


PEERS = [(name, label) for name in LIKE if name != "trl" for label in RECORDED["peers"][name]["cases"]]


@pytest.mark.parametrize(("name", "label"), [("trl", "dapo"), *PEERS])
def test_each_preset_is_that_trainers_own_loss(name, label):
    x, preset = recorded_inputs(name, label)
    reference = sampler_log_p if preset.reference == "sampler" else lambda batch: batch.extras["reference"]
    assert (preset.policy.beta > 0) <= (preset.reference != "none")
    case = RECORDED["peers"][name]["cases"][label]
    assert apart(case, *ours(preset.policy, x, reference)) < 1e-9
    assert apart(case, *ours(preset.policy, x, reference, [(3, 0, 4), (1, 5, 2)])) < 1e-9


@pytest.mark.parametrize("name", LIKE)
def test_each_preset_has_that_trainers_own_advantages(name):
    preset, rewards = LIKE[name], INPUTS["rewards"]
    recorded = RECORDED["peers"][name]["advantages"][preset.advantage.scale]
    wanted = torch.tensor(recorded, dtype=torch.float64)
    found_PG = advantages(rewards, preset.advantage).advantage_PG
    torch.testing.assert_close(found_PG, wanted, rtol=0, atol=1e-9)
    # control arms: without a spread, or with the other's eps, it is another advantage
    if preset.advantage.scale != "none":
        for other in (replace(preset.advantage, scale="none"), replace(preset.advantage, eps=0.01)):
            assert (advantages(rewards, other).advantage_PG - wanted).abs().max() > 1e-3


def test_trls_spread_of_the_batch():
    wanted = torch.tensor(RECORDED["peers"]["trl"]["advantages"]["batch"], dtype=torch.float64)
    found_PG = advantages(INPUTS["rewards"], Advantage(scale="batch", eps=1e-4)).advantage_PG
    torch.testing.assert_close(found_PG, wanted, rtol=0, atol=1e-9)


def test_the_table_names_where_each_recording_comes_from():
    assert {*RECORDED["peers"]} == {*LIKE} and all(peer["version"] for peer in RECORDED["peers"].values())
    assert all(preset.differs for preset in LIKE.values())
