"""The schedules against their closed forms and against transformers' (whose warm-up starts at 0, one step
behind ours)."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[1] / "parallel"))
import test_collectives as small

from unfreeze import models
from unfreeze.core.errors import ConfigError
from unfreeze.data import Example, pack
from unfreeze.objectives.cross_entropy import cross_entropy
from unfreeze.train.optim import AdamW
from unfreeze.train.schedule import Schedule
from unfreeze.train.step import train_step

STEPS, WARMUP, DECAY = 50, 8, 15


def transformers_factors(kind: str) -> list[float]:
    optimization = pytest.importorskip("transformers.optimization")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    if kind == "wsd":
        scheduler = optimization.get_wsd_schedule(
            optimizer,
            num_warmup_steps=WARMUP,
            num_decay_steps=DECAY,
            num_training_steps=STEPS,
            decay_type="1-sqrt",
        )
    else:
        make = {
            "cosine": optimization.get_cosine_schedule_with_warmup,
            "linear": optimization.get_linear_schedule_with_warmup,
            "constant": optimization.get_constant_schedule_with_warmup,
        }[kind]
        rest = () if kind == "constant" else (STEPS,)
        scheduler = make(optimizer, WARMUP, *rest)
    factors = []
    for _ in range(STEPS + 1):
        factors.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return factors


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant", "wsd"])
def test_after_warm_up_equal_to_transformers(kind: str):
    schedule = Schedule(1.0, STEPS, kind, WARMUP, DECAY if kind == "wsd" else 0)  # type: ignore[arg-type]
    expected = transformers_factors(kind)
    for step in range(WARMUP, STEPS + 1):
        assert schedule.factor(step) == pytest.approx(expected[step], abs=1e-12), step
    for step in range(WARMUP):
        assert schedule.factor(step) == pytest.approx(expected[step + 1], abs=1e-12), step


def torch_rates(make, warmup: int) -> list[float]:
    """The rates of torch's scheduler, in float64; its warm-up, if any, by LinearLR before it."""
    parameter = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = torch.optim.SGD([parameter], lr=PEAK)
    kinds = torch.optim.lr_scheduler
    if warmup:
        first = kinds.LinearLR(optimizer, start_factor=1 / warmup, total_iters=warmup - 1)
        scheduler = kinds.SequentialLR(optimizer, [first, make(kinds, optimizer)], milestones=[warmup])
    else:
        scheduler = make(kinds, optimizer)
    rates = []
    for _ in range(STEPS - 1):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return [*rates, scheduler.get_last_lr()[0]]


PEAK, FINAL = 3e-3, 0.1
GOLDEN = {
    "constant": lambda kinds, it: kinds.ConstantLR(it, factor=1.0),
    "cosine": lambda kinds, it: kinds.CosineAnnealingLR(it, STEPS - WARMUP, eta_min=PEAK * FINAL),
    "linear": lambda kinds, it: kinds.LinearLR(it, 1.0, FINAL, total_iters=STEPS - WARMUP),
    "wsd": lambda kinds, it: kinds.LambdaLR(
        it, lambda s: 1 - (1 - FINAL) * math.sqrt(max(0, s - (STEPS - WARMUP - DECAY)) / DECAY)
    ),
}


@pytest.mark.parametrize("kind", GOLDEN)
def test_golden_curves_equal_torchs_schedulers(kind: str):
    """Every step within 1e-12 of torch's (wsd, which torch lacks: of its closed form). Control arm: a
    schedule that is one step late is told apart."""
    schedule = Schedule(PEAK, STEPS, kind, WARMUP, DECAY if kind == "wsd" else 0, FINAL)  # type: ignore[arg-type]
    golden = torch_rates(GOLDEN[kind], WARMUP)
    late = [schedule.learning_rate(max(0, step - 1)) for step in range(STEPS)]
    assert [schedule.learning_rate(step) for step in range(STEPS)] == pytest.approx(golden, abs=1e-12)
    assert late != pytest.approx(golden, abs=1e-12)


@pytest.mark.parametrize(("warmup", "start", "final"), [(15, 1 / 25, 4e-6), (8, 0.1, 1e-3), (50, 0.5, 0.01)])
def test_one_cycle_equals_torchs_one_cycle(warmup: int, start: float, final: float):
    """Control arm: the ordinary warm-up and cosine of the same peak and end."""

    more = {"div_factor": 1 / start, "final_div_factor": start / final, "cycle_momentum": False}
    golden = torch_rates(
        lambda kinds, it: kinds.OneCycleLR(it, PEAK, total_steps=STEPS, pct_start=warmup / STEPS, **more), 0
    )
    schedule = Schedule(PEAK, STEPS, "one_cycle", warmup, final=final, start=start)
    assert [schedule.learning_rate(s) for s in range(STEPS)] == pytest.approx(golden, abs=1e-12)
    ordinary = replace(schedule, kind="cosine")
    assert [ordinary.learning_rate(s) for s in range(STEPS)] != pytest.approx(golden, abs=1e-12)


def test_a_save_of_the_other_schedules_has_the_fields_of_earlier_versions():
    assert "start" not in Schedule(1.0, 10, "cosine").record()
    assert Schedule(1.0, 10, "one_cycle").record()["start"] == 1 / 25


def test_closed_forms():
    cosine = Schedule(2e-4, 100, "cosine", 10, final=0.1)
    assert cosine.learning_rate(0) == pytest.approx(2e-5)
    assert cosine.learning_rate(9) == cosine.learning_rate(10) == 2e-4
    assert cosine.learning_rate(55) == pytest.approx(2e-4 * (0.1 + 0.9 / 2))
    assert cosine.learning_rate(100) == pytest.approx(2e-5)
    assert Schedule(1.0, 100, "linear", 0).factor(25) == 0.75
    assert Schedule(1.0, 100, "constant", 0).factor(99) == 1.0
    wsd = Schedule(1.0, 100, "wsd", 10, 20)
    assert [wsd.factor(s) for s in (10, 50, 80)] == [1.0, 1.0, 1.0]
    assert wsd.factor(85) == pytest.approx(1 - math.sqrt(0.25))


@given(
    steps=st.integers(1, 300),
    warmup=st.integers(0, 300),
    decay=st.integers(0, 300),
    final=st.floats(0, 1),
    kind=st.sampled_from(["cosine", "linear", "constant", "wsd", "one_cycle"]),
)
def test_every_step_has_a_rate_above_zero_and_not_above_the_peak(
    steps: int, warmup: int, decay: int, final: float, kind: str
):
    warmup = min(warmup, steps)
    schedule = Schedule(1.0, steps, kind, warmup, min(decay, steps - warmup), final)  # type: ignore[arg-type]
    factors = [schedule.factor(step) for step in range(steps)]
    last = kind == "one_cycle" and final == 0  # it reaches its end at the last step
    assert all(0 < f <= 1 for f in factors[: -1 if last else None])
    assert all(a >= b - 1e-12 for a, b in zip(factors[warmup:], factors[warmup + 1 :], strict=False))


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ({"peak": 0.0}, "learning rate 0.0"),
        ({"peak": math.nan}, "learning rate nan"),
        ({"steps": 0}, "0 steps"),
        ({"warmup_steps": 11}, "warmup_steps 11"),
        ({"kind": "wsd", "warmup_steps": 4, "decay_steps": 7}, "0 .. steps - warmup_steps = 6"),
        ({"final": 1.5}, "final factor 1.5"),
        ({"start": 0.0}, "start factor 0.0"),
        ({"kind": "step"}, "unknown schedule 'step'"),
    ],
)
def test_impossible_values_are_named(arguments: dict, part: str):
    with pytest.raises(ConfigError, match=part.replace("..", r"\.\.")):
        Schedule(**({"peak": 1.0, "steps": 10} | arguments))


def toy_loss(seed: int, warmup: int) -> float:
    """Mean loss of the last 10 of 40 steps of a small Llama on pairs of tokens, at a rate that is too high."""
    config = {**small.CONFIG, "model_type": "llama", "tie_word_embeddings": True}
    model = models.build(models.shape(config), dtype=torch.float32, device="cpu")
    models.initialize(model, seed)
    optimizer, schedule = AdamW(model), Schedule(0.1, 40, "cosine", warmup)
    generator, losses = torch.Generator().manual_seed(seed), []
    for step in range(40):
        first_S, drawn_ST = (
            torch.randint(0, n, s, generator=generator) for n, s in ((32, (8,)), (3, (8, 31)))
        )
        rows = [first_S]
        for drawn_S in drawn_ST.T:
            rows.append((5 * rows[-1] + drawn_S) % 32)
        documents = [Example(row, [0.0] + [1.0] * 31) for row in torch.stack(rows, 1).tolist()]
        result = train_step(
            model,
            optimizer,
            [pack(documents)],
            cross_entropy,
            learning_rate=schedule.learning_rate(step),
            max_norm=0.0,
            recompute=models.plain,
        )
        losses.append(result.loss)
    return sum(losses[-10:]) / 10


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_with_warm_up_a_toy_run_learns_more_than_without(seed: int):
    """The source's entropy is log 3 = 1.1 nats; without warm-up these runs stay far above."""
    assert toy_loss(seed, 8) < toy_loss(seed, 0) - 0.1
