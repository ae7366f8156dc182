"""Does annealing the learning rate keep a model from overfitting?

    python examples/lab/annealing.py --arm restarts --seed 0 --out runs/annealing
    unfreeze lab examples/lab/annealing.toml

A byte model reads 16 KiB of text again and again. Every 20 steps the held-out loss is measured. One half of
the rows chooses the best step, as early stopping does; the value is the loss of the other half at that step.
Cosine with that is the first arm. The others, at the same peak and number of steps:

    constant  after the warm-up the peak to the end
    wsd       constant, and down by 1 - sqrt in the last fifth
    one_cycle up for three tenths, then down, on cosines
    restarts  four cosines one after the other (SGDR, arXiv:1608.03983), with one optimizer
    doubling  cosines of 1, 2 and 4 sevenths of the steps
    averaged  constant, measured at an exponential mean of the weights, of the last 20 steps or so

last and gap say what happens without stopping: the held-out loss at the end, and how far above the lowest.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator

import torch
from studying import arguments, each_loss, fresh, mean_loss, packed, texts, write
from torch import Tensor

from unfreeze.core.batch import Batch
from unfreeze.models.decoder import Decoder
from unfreeze.train.optim import AdamW
from unfreeze.train.schedule import Schedule

ARMS = ("cosine", "constant", "wsd", "one_cycle", "restarts", "doubling", "averaged")
CYCLES = {"restarts": (1, 1, 1, 1), "doubling": (1, 2, 4)}
PEAK, STEPS, EVERY = 4e-3, 400, 20
CORPUS, LENGTH, DOCUMENTS = 16_384, 64, 12
KEPT = 0.95  # of the mean of weights, at every step


def rate(arm: str, step: int, steps: int) -> float:
    """The learning rate of an arm at a step, counted from 0. Warm-up: a twentieth of the steps."""
    warm = max(1, steps // 20)
    if arm in CYCLES:
        if step < warm:
            return PEAK * (step + 1) / warm
        parts, left = CYCLES[arm], (step - warm) / (steps - warm)
        for part in parts:
            share = part / sum(parts)
            if left < share - 1e-9:
                return PEAK * (1 + math.cos(math.pi * left / share)) / 2
            left -= share
        return 0.0
    kind = {"averaged": "constant"}.get(arm, arm)
    up = steps * 3 // 10 if kind == "one_cycle" else warm
    down = steps // 5 if kind == "wsd" else 0
    return Schedule(PEAK, steps, kind, up, down).learning_rate(step)  # type: ignore[arg-type]


def batches(text: Tensor, seed: int) -> Iterator[Batch]:
    """Endless batches of pieces of the text. All arms of a seed see the same ones."""
    drawn = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - LENGTH, (DOCUMENTS,), generator=drawn).tolist()
        yield packed([text[at : at + LENGTH] for at in starts])


def held_out_loss(model: Decoder, rows_RL: Tensor) -> list[float]:
    """Mean loss of each held-out row."""
    losses = each_loss(model, packed(list(rows_RL))).view(rows_RL.shape)[:, :-1]
    return losses.mean(dim=1).tolist()


@torch.no_grad()
def average(kept: Decoder, model: Decoder) -> None:
    """Move `kept` towards the model's weights."""
    for own, new in zip(kept.parameters(), model.parameters(), strict=True):
        own.lerp_(new, 1 - KEPT)


def study(
    arm: str, seed: int, steps: int = STEPS, rows: int = 96
) -> tuple[list[float], dict[str, float], list[list[float]]]:
    """(loss of each reported row at the best step, further numbers, curve of the rows that choose it)."""
    train, held_out = texts()
    corpus = train[seed * CORPUS : (seed + 1) * CORPUS]  # each seed has its own
    rows_RL = held_out[: rows * LENGTH * 7].view(rows, -1)[:, :LENGTH]
    model = fresh(seed, width=96, initializer_range=0.1)
    shown = copy.deepcopy(model) if arm == "averaged" else model
    steps_of, optimizer = batches(corpus, seed), AdamW(model)
    curve: list[list[float]] = []
    best_step, last, reported = 0, list[float](), list[float]()
    trained: list[float] = []
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        loss = mean_loss(model, next(steps_of))
        loss.backward()
        optimizer.collect()
        optimizer.update(rate(arm, step - 1, steps), 1.0)
        trained.append(float(loss.detach()))
        if shown is not model:
            average(shown, model)
        if step % EVERY == 0 or step == steps:
            each = held_out_loss(shown, rows_RL)
            choosing, last = each[::2], each[1::2]
            curve.append([step, sum(choosing) / len(choosing)])
            if curve[-1][1] == min(of for _, of in curve):
                best_step, reported = step, last
    end = trained[-max(1, steps // 20) :]
    at_end, best = sum(last) / len(last), sum(reported) / len(reported)
    more = {"last": at_end, "gap": at_end - best, "best_step": float(best_step)}
    return reported, {**more, "train": sum(end) / len(end)}, curve


if __name__ == "__main__":
    options = arguments(__doc__, ARMS)
    steps = options.steps or STEPS
    rows, more, curve = study(options.arm, options.seed, steps)
    write(
        options.out,
        sum(rows) / len(rows),
        more,
        model=fresh(0, width=96),
        tokens=steps * DOCUMENTS * LENGTH,
        curve=curve,
        rows=rows,
    )
