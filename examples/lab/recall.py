"""Does an attention that sees less still recall? Multi-query associative recall (MQAR).

    python examples/lab/recall.py --arm moba --seed 0 --out runs/recall
    unfreeze lab examples/lab/recall.toml

A row is PAIRS keys and their values, then every key once more somewhere in the rest, each followed by its
value, among tokens that stand for nothing:

    k3 v3 k7 v7 … | . . k7 v7 . k3 v3 . .

The model is taught the values of the second half alone; the value of an arm is the share that it has right on
rows that it has not seen. A head that sees few tokens must find the one block that has the key.
Source of the task: arXiv:2312.04927, 3; there the gaps follow a power law, here they are even.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from studying import arguments, fit, packed, write
from torch import Tensor

from unfreeze.core.batch import Batch
from unfreeze.models.decoder import Decoder
from unfreeze.models.factory import from_config
from unfreeze.models.from_shape import config_of
from unfreeze.models.init import initialize
from unfreeze.models.parts import ASSEMBLED, PARTS

PAIRS, LENGTH, KEYS, VALUES = 6, 64, 16, 16
NOTHING = KEYS + VALUES  # the token that stands for nothing
ROWS, STEPS, RATE = 32, 2000, 4e-3
SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
BLOCK, CHOSEN = 8, 3  # 24 of at most 64 tokens, as the window
ARMS: dict[str, dict[str, object]] = {
    "full": {},
    "moba": {"block": BLOCK, "chosen": CHOSEN},
    "sliding_window": {"window": BLOCK * CHOSEN},
    "gated_delta": {},
}


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


def model_of(arm: str, seed: int) -> Decoder:
    """A llama of random weights with the arm's attention in every layer; the same weights but for its own."""
    config = config_of("llama", SIZES, {"initializer_range": 0.1}, vocabulary=NOTHING + 1, positions=LENGTH)
    config |= {"model_type": ASSEMBLED, "base_model_type": "llama"}
    config["parts"] = [{"at": "layers.*.self_attn", "part": arm, **ARMS[arm]}]
    model = from_config(config, torch.float32, "cpu")
    initialize(model, seed)
    return model


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


def study(arm: str, seed: int, steps: int = STEPS) -> tuple[Decoder, list[float], list[list[float]]]:
    """(model, share of right values row by row, curve)."""
    model = model_of(arm, seed)
    curve = fit(model, batches(seed), steps, RATE)
    return model, right(model, 10_000 + seed), curve


if __name__ == "__main__":
    options = arguments(__doc__, [arm for arm in ARMS if arm in PARTS])
    steps = options.steps or STEPS
    model, shares, curve = study(options.arm, options.seed, steps)
    write(
        options.out,
        sum(shares) / len(shares),
        {"rows": len(shares)},
        model=model,
        tokens=steps * ROWS * LENGTH,
        curve=curve,
        rows=shares,
    )
