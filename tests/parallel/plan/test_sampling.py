"""Seconds of sampling a step's answers: against what was measured, and by hand."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.harness import shapes
from unfreeze import models
from unfreeze.core.layout import RESIDENT
from unfreeze.kernels.choice import record
from unfreeze.parallel.answers import Answers, OfStep
from unfreeze.parallel.plan import rates_here
from unfreeze.parallel.plan.counts import counts
from unfreeze.parallel.plan.fleet import devices, fleet
from unfreeze.parallel.plan.rates import OPTIMIZER_BYTES, of_device
from unfreeze.parallel.plan.sampling import SHARE, Rollout, sampling_seconds
from unfreeze.parallel.plan.seconds import Step, seconds

RESULTS = Path(shapes.__file__).parents[1] / "results" / "cpu-avx512-bf16.jsonl"
SHAPES = {"moe": shapes.kimi(), "dense": shapes.qwen("qwen3", shapes.QWEN3_06B)}


def measured(name: str) -> dict[int, float]:
    """Rows -> seconds of a decoding step of `unfreeze dev bench decode`, prompts of 64; the latest count."""
    every = [json.loads(line) for line in RESULTS.read_text().splitlines() if '"decode"' in line]
    return {
        row["settings"]["batch"]: row["results"]["step_seconds"]
        for row in every
        if row["settings"].get("model") == name and row["side"] == "unfreeze"
        if row["settings"]["prompt"] == 64 and row["settings"]["dtype"] == "bfloat16"
        if "step_seconds" in row["results"]
    }


@pytest.mark.parametrize("name", SHAPES)
def test_a_decoding_step_is_within_a_factor_of_two_of_what_was_measured(name, monkeypatch):
    """At 1 to 64 rows. A pass of so few tokens through the training kernels is seven times too slow."""
    monkeypatch.setattr(record, "device_key", lambda device: RESULTS.stem)  # the rates of that class of CPU
    model = models.from_config(SHAPES[name], torch.bfloat16, as_stored=True)
    known, there = counts(model), measured(name)
    rates = rates_here(
        model.shape,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        length=64,
        every_weight=False,
        packed=known.packed,
        threads=2,
    )
    assert rates is not None and {1, 4, 16, 64} <= there.keys()
    for rows, took in there.items():
        answers = Answers(rows, 0, OfStep(rows, 1, rows, 64))
        cached = model.cache_bytes()
        step = sampling_seconds(known, rates, answers, cached=cached, trained=0, number_bytes=2, prefill=0)
        assert took / 2 < step < took * 2, (rows, took, step)


def test_by_hand():
    """8 rows at once of 20 answers: three times 10 steps; half of the weights of two experts of four."""
    known = replace(
        counts(models.from_config(shapes.qwen("qwen3", shapes.QWEN3_06B), torch.bfloat16)),
        num_experts=4,
        experts_per_token=2,
        moe_layers=1,
        expert_width=64,
        experts_bytes=4000,
    )
    rates = replace(of_device(devices()["H200"]), launch=0.0)
    answers = Answers(8, 0, OfStep(20, 10, 5, 30))
    head = known.vocab_size * known.hidden_size
    read = known.rest_bytes - known.ends_bytes + 2 * head + 4000 * (1 - 0.5**8) + 4 * 100 + 8 * 35 * 6
    weights = known.dense + known.router + head + 100 + 2 * 3 * known.hidden_size * 64
    step = (read / (rates.optimizer * OPTIMIZER_BYTES) + 16 * weights / rates.dense) / SHARE
    wanted = 5 + 3 * 10 * step
    fields = {"cached": 6, "trained": 100, "number_bytes": 2, "prefill": 5.0}
    assert sampling_seconds(known, rates, answers, **fields) == pytest.approx(wanted, rel=1e-12)
    assert sampling_seconds(known, rates, Answers(8, 100), **fields) == 0  # of on-policy distillation
    bound = sampling_seconds(known, replace(rates, launch=1.0), answers, **fields)
    assert bound > 30 * known.num_layers  # seconds: each launch takes one


def test_a_step_of_many_passes_has_one_update():
    """As seconds() of a step with as many micro-batches."""
    machine = fleet("8xH200")
    known = counts(models.from_config(shapes.qwen("qwen3", shapes.QWEN3_06B), torch.bfloat16))
    rates = of_device(devices()["H200"])

    def of(count):
        step = Step(4096 * count, 512, {"dense": 10**7}, micro_batches=count)
        return seconds(known, machine, rates, RESIDENT, step)

    assert of(1).of_passes(5) == pytest.approx(of(5).step, rel=1e-12)
    assert of(1).of_passes(5) < 5 * of(1).step


def test_the_sentence_has_the_share_and_the_runs_minutes():
    of = OfStep(answers=128, new_tokens=64, prompts=16, prompt_tokens=20, steps=60)
    rollout = Rollout(sampling=3.0, training=1.0, of=of)
    assert of.trained == 128 * 84 and rollout.fields() == {
        "step": 4,
        "sampling": 3,
        "share": 0.75,
        "run": 240,
    }
    assert "at most 4.0 s, 75 % of it sampling: 128 answers of 64 tokens" in rollout.line()
    assert "; 60 steps in 4 min 00 s; estimated" in rollout.line()
    assert "steps in" not in Rollout(3.0, 1.0, replace(of, steps=None)).line()


def test_processes_share_the_answers():
    answers = Answers(64, 0, OfStep(100, 8, 10, 4))
    assert answers.shared(3) == Answers(34, 0, OfStep(34, 8, 10, 4))
    assert math.ceil(100 / 3) == 34 and Answers(64, 9).shared(3) == Answers(64, 9)
