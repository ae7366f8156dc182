"""Does an attention that sees less still recall? Multi-query associative recall (MQAR).

    python examples/lab/recall.py --arm moba --seed 0 --out runs/recall
    unfreeze lab examples/lab/recall.toml

A row is PAIRS keys and their values, then every key once more somewhere in the rest, each followed by its
value, among tokens that stand for nothing:

    k3 v3 k7 v7 … | . . k7 v7 . k3 v3 . .

The model is taught the values of the second half alone; the value of an arm is the share that it has right on
rows that it has not seen. A head that sees few tokens must find the one block that has the key.
Source of the task: arXiv:2312.04927, 3; there the gaps follow a power law, here they are even.

    full            full attention, trained for STEPS steps and then for AFTER more
    moba            the same STEPS with full attention; then MoBA in its place, with the same weights
    sliding_window  likewise, with a window of as many tokens
    fresh           MoBA from random weights, for STEPS + AFTER steps

at once is the share right after the exchange.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from studying import arguments, fit, packed, write
from torch import Tensor

import unfreeze
from unfreeze.core.batch import Batch
from unfreeze.models.decoder import Decoder
from unfreeze.models.factory import from_config
from unfreeze.models.from_shape import config_of
from unfreeze.models.init import initialize
from unfreeze.models.parts import ASSEMBLED

PAIRS, LENGTH, KEYS, VALUES = 4, 48, 8, 8
NOTHING = KEYS + VALUES  # the token that stands for nothing
ROWS, STEPS, RATE = 32, 1500, 4e-3
AFTER, RATE_AFTER = 200, 2e-3
SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
BLOCK, CHOSEN = 6, 3  # 18 of at most 48 tokens, as the window
OPTIONS: dict[str, dict[str, int]] = {
    "full": {},
    "moba": {"block": BLOCK, "chosen": CHOSEN},
    "sliding_window": {"window": BLOCK * CHOSEN},
}
ARMS = (*OPTIONS, "fresh")


def rows(count: int, drawn: torch.Generator) -> tuple[Tensor, Tensor]:
    """(tokens [count, LENGTH], where the next token is a value to recall)."""
    keys = torch.rand(count, KEYS, generator=drawn).argsort(1)[:, :PAIRS]
    values = KEYS + torch.randint(VALUES, (count, PAIRS), generator=drawn)
    pairs = torch.stack((keys, values), -1)
    tokens = torch.full((count, LENGTH), NOTHING)
    tokens[:, : 2 * PAIRS] = pairs.flatten(1)
    # a place of two tokens for each pair, in another order
    places = (
        2 * PAIRS + 2 * torch.rand(count, (LENGTH - 2 * PAIRS) // 2, generator=drawn).argsort(1)[:, :PAIRS]
    )
    tokens.scatter_(1, places, keys).scatter_(1, places + 1, values)
    weights = torch.zeros(tokens.shape, dtype=torch.bool).scatter_(1, places, True)
    return tokens, weights


def batches(seed: int, count: int = ROWS) -> Iterator[Batch]:
    """Endless; they depend on the seed alone, so all arms see the same rows."""
    drawn = torch.Generator().manual_seed(seed)
    while True:
        tokens, weights = rows(count, drawn)
        yield packed(list(tokens), list(weights))


def model_of(part: str, seed: int) -> Decoder:
    """A llama of random weights with this attention in every layer."""
    config = config_of("llama", SIZES, {"initializer_range": 0.1}, vocabulary=NOTHING + 1, positions=LENGTH)
    config |= {"model_type": ASSEMBLED, "base_model_type": "llama"}
    config["parts"] = [{"at": "layers.*.self_attn", "part": part, **OPTIONS[part]}]
    model = from_config(config, torch.float32, "cpu")
    initialize(model, seed)
    return model


def exchanged(model: Decoder, part: str) -> Decoder:
    """The same weights with this attention in every layer."""
    copy = unfreeze.swap(
        unfreeze.Model(model), "layers.*.self_attn", part, init="copy", **OPTIONS[part]
    ).decoder
    return copy.requires_grad_(True)


@torch.no_grad()
def right(model: Decoder, seed: int, count: int = 256) -> list[float]:
    """Share of a row's values that are the likeliest token, row by row."""
    batch = next(batches(seed, count))
    best_T = model.logits(model.hidden(batch)).argmax(-1)
    weights = batch.weights_T.view(count, LENGTH).bool()
    return [
        float(part)
        for part in (best_T == batch.targets_T).view(count, LENGTH)[weights].view(count, -1).float().mean(1)
    ]


Shares = list[float]


def study(
    arm: str, seed: int, steps: int = STEPS, after: int = AFTER
) -> tuple[Decoder, Shares, Shares, list]:
    """(model, share of right values row by row, the same right after the exchange, curve)."""
    tests = 10_000 + seed
    if arm == "fresh":
        model = model_of("moba", seed)
        curve = fit(model, batches(seed), steps + after, RATE)
        return model, right(model, tests), [], curve
    model = model_of("full", seed)
    curve = fit(model, batches(seed), steps, RATE)
    model = model if arm == "full" else exchanged(model, arm)
    at_once = right(model, tests)
    later = fit(model, batches(1000 + seed), after, RATE_AFTER)
    return model, right(model, tests), at_once, curve + [[steps + step, loss] for step, loss in later]


if __name__ == "__main__":
    options = arguments(__doc__, ARMS)
    steps = options.steps or STEPS
    model, shares, at_once, curve = study(options.arm, options.seed, steps)
    more = {"at once": sum(at_once) / len(at_once)} if at_once else {}
    write(
        options.out,
        sum(shares) / len(shares),
        more,
        model=model,
        tokens=(steps + AFTER) * ROWS * LENGTH,
        curve=curve,
        rows=shares,
    )
