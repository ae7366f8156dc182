"""Norms compared: the range of learning rates at which a model trains, and its lowest loss.

    python examples/lab/norms.py --arm deep_norm --seed 0 --out runs/norms
    unfreeze lab examples/lab/norms.toml

A byte model of 8 layers trains for a few steps at each of RATES, from the same weights on the same batches.
L(r) is its held-out loss after rate r, at most START: that of all bytes alike, also for a run that diverged.

    bar        (H1 + H2) / 2: held-out loss of the bytes' frequencies, and of their pairs', by training counts
    usable     rates with L(r) < bar, those around the best one without a gap
    tolerance  log10(largest / smallest usable rate), the ends where a line through two L(log r) meets the bar
    best       lowest L(r)

The bar is the same in all arms: a norm that learns little at every rate is not tolerant. A range that goes
beyond the first or last of RATES is cut there, and counted in `cut`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from studying import BYTES, arguments, each_loss, fit, packed, texts, write
from torch import Tensor

from unfreeze.core.batch import Batch
from unfreeze.models.decoder import Decoder
from unfreeze.models.factory import from_config
from unfreeze.models.from_shape import config_of
from unfreeze.models.init import initialize
from unfreeze.train.optim import NonFinite

ARMS = ("pre_norm", "post_norm", "sandwich_norm", "deep_norm", "qk_norm")
RATES = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
START = math.log(BYTES)
WIDTH, LAYERS, LENGTH, DOCUMENTS, STEPS = 48, 8, 64, 8, 100


def normed(arm: str, seed: int, layers: int = LAYERS) -> Decoder:
    """A llama with an arm's part in every layer. qk_norm norms queries and keys of a pre-norm model."""
    at = "layers.*.self_attn" if arm == "qk_norm" else "layers.*"
    sizes = {
        "hidden_size": WIDTH,
        "num_hidden_layers": layers,
        "num_attention_heads": WIDTH // 16,
        "intermediate_size": 3 * WIDTH,
    }
    more = {"initializer_range": 0.1}  # about 1 / sqrt(width)
    parts = [{"at": at, "part": arm}]
    config = config_of("llama", sizes, more, vocabulary=BYTES, positions=LENGTH, parts=parts)
    model = from_config(config, torch.float32, "cpu")
    initialize(model, seed)
    return model


def batches(text: Tensor, seed: int) -> Iterator[Batch]:
    """Endless batches of pieces of the text."""
    drawn = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - LENGTH, (DOCUMENTS,), generator=drawn).tolist()
        yield packed([text[at : at + LENGTH] for at in starts])


def bar(train: Tensor, held_out: Tensor) -> float:
    """Half-way between the held-out losses of bytes and of pairs of bytes, with a little smoothing."""
    one_V = torch.bincount(train, minlength=BYTES).double() + 0.1
    one_V /= one_V.sum()
    two_VV = torch.bincount(train[:-1] * BYTES + train[1:], minlength=BYTES**2).view(BYTES, BYTES).double()
    two_VV = (two_VV + 2 * one_V) / (two_VV.sum(1, keepdim=True) + 2)
    h1, h2 = -one_V[held_out].log().mean(), -two_VV[held_out[:-1], held_out[1:]].log().mean()
    return float(h1 + h2) / 2


def loss_after(arm: str, seed: int, rate: float, steps: int, train: Tensor, held_out: Tensor) -> float:
    """L(rate)."""
    model = normed(arm, seed)
    try:
        fit(model, batches(train, seed), steps, rate)
    except NonFinite:
        return START
    rows = held_out[: 64 * LENGTH].view(-1, LENGTH)
    loss = float(each_loss(model, packed(list(rows))).view(rows.shape)[:, :-1].mean())
    return min(loss, START) if math.isfinite(loss) else START


def tolerance(rates: Sequence[float], losses: Sequence[float], bar: float) -> tuple[float, int]:
    """(decades between the smallest and the largest usable rate, ends of it that were cut); 0 without any."""
    best = min(range(len(rates)), key=lambda i: losses[i])
    if losses[best] >= bar:
        return 0.0, 0
    ends: list[float] = []
    cut = 0
    for way in (-1, 1):
        i = best
        while 0 <= i + way < len(rates) and losses[i + way] < bar:
            i += way
        end = math.log10(rates[i])
        if 0 <= i + way < len(rates):
            share = (bar - losses[i]) / (losses[i + way] - losses[i])
            end += share * (math.log10(rates[i + way]) - end)
        else:
            cut += 1
        ends.append(end)
    return ends[1] - ends[0], cut


def study(arm: str, seed: int, steps: int = STEPS) -> tuple[float, dict[str, float], list[list[float]]]:
    """(tolerance in decades, further numbers, [[log10 of the rate, loss], …])."""
    train, held_out = texts()
    losses = [loss_after(arm, seed, rate, steps, train, held_out) for rate in RATES]
    wide, cut = tolerance(RATES, losses, bar(train, held_out))
    best = min(losses)
    more = {"best": best, "best_rate": RATES[losses.index(best)], "cut": float(cut)}
    more |= {f"loss at {rate:g}": loss for rate, loss in zip(RATES, losses, strict=True)}
    return wide, more, [[math.log10(rate), loss] for rate, loss in zip(RATES, losses, strict=True)]


if __name__ == "__main__":
    options = arguments(__doc__, ARMS)
    steps = options.steps or STEPS
    wide, more, curve = study(options.arm, options.seed, steps)
    tokens = len(RATES) * steps * DOCUMENTS * LENGTH
    write(options.out, wide, more, model=normed(options.arm, 0), tokens=tokens, curve=curve)
