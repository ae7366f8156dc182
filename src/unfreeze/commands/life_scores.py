"""Scores of a model for `unfreeze life`: greedy answers that are graded, or bits per byte of texts.

Each returns one value per row, so that two models are compared row by row.
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

from unfreeze.commands import reward
from unfreeze.config.life import Score
from unfreeze.core.command import Common
from unfreeze.core.errors import ConfigError, DataError

TOKENS = 2048  # per batch


def measured(model: Path, score: Score, common: Common) -> dict[str, Any]:
    """Return value, low and high (95 % bootstrap interval), by_row, and weights of the rows.

    Texts are weighted by their bytes, answers equally.
    """
    by_row, weights = bits_of_texts(model, score) if score.text else rewards(model, score, common)
    value, (low, high) = mean(by_row, weights), interval(by_row, weights)
    return {"value": value, "low": low, "high": high, "by_row": by_row, "weights": weights}


def rewards(model: Path, score: Score, common: Common) -> tuple[list[float], list[float]]:
    """Reward of the greedy answer to each row. An answer that could not be graded raises ConfigError."""
    request = reward.Config(
        reward=score.reward,
        model=str(model),
        data=(score.data,),
        sample=score.rows,
        temperature=0.0,
        max_new_tokens=score.max_new_tokens,
        dtype="float32",
    )
    quiet = common._replace(quiet=True)
    with ExitStack() as ends:
        graders, environments = reward.started(request, quiet, ends)
        rows = reward.prompts(request, quiet)
        for each in filter(None, (graders, environments)):
            each.check(rows)
        _, graded = reward.answered(request, rows, graders, environments, quiet)
    values = [each.reward for each in graded if each.reward is not None]
    if len(values) < len(graded):
        failed = next(each for each in graded if each.reward is None)
        raise ConfigError(
            f"score {score.name!r}: {len(graded) - len(values)} of {len(graded)} answers have no reward"
            f" ({failed.outcome})",
            next=f"unfreeze reward show {score.reward} --model {model} --data {score.data}",
        )
    return values, [1.0] * len(values)


def bits_of_texts(model: Path, score: Score) -> tuple[list[float], list[float]]:
    """Bits per byte of each text: -sum log2 p / bytes of UTF-8. -> values, bytes.

    Texts are cut into pieces of the model's positions and measured as a run's held-out texts are.
    """
    import unfreeze
    from unfreeze.data import validation_batches
    from unfreeze.data.store.dataset import encode_files
    from unfreeze.evaluate.perplexity import heldout
    from unfreeze.job.watch.validation import supervised_bytes

    loaded = unfreeze.load(model, dtype="float32")
    tokenizer = loaded.tokenizer
    if tokenizer is None:
        raise ConfigError(f"{model} has no tokenizer, so its bits per byte are unknown")
    room = loaded.decoder.shape.max_positions
    rows = encode_files([score.text], tokenizer, room, truncation="split", supervise="all", workers=0)
    values: list[float] = []
    sizes: list[float] = []
    for example in islice(rows.examples, score.rows):
        if size := supervised_bytes([example], tokenizer):
            one = heldout(loaded.decoder, validation_batches([example], TOKENS))
            values.append(one.loss * one.tokens / math.log(2) / size)
            sizes.append(float(size))
    if len(values) < 2:
        raise DataError(f"{score.text} has {len(values)} texts of two tokens or more; 2 are needed")
    return values, sizes


def mean(by_row: list[float], weights: list[float]) -> float:
    """Weighted mean of the rows."""
    return math.fsum(x * w for x, w in zip(by_row, weights, strict=True)) / math.fsum(weights)


def interval(by_row: list[float], weights: list[float]) -> tuple[float, float]:
    """Return the 95 % interval of the mean (evaluate/bootstrap.py)."""
    from unfreeze.evaluate import bootstrap

    one = bootstrap.interval(bootstrap.items_of(by_row, weights))
    return one.low, one.high


def difference(one: dict[str, Any], other: dict[str, Any]) -> tuple[float, float, float]:
    """Return other - one and its 95 % interval, paired by row: the same draw of rows for both."""
    from unfreeze.evaluate import bootstrap

    if len(one["by_row"]) != len(other["by_row"]):
        raise ConfigError("two models were scored on other rows", next="score both again")
    before, after = (bootstrap.items_of(each["by_row"], one["weights"]) for each in (one, other))
    gap = bootstrap.difference(before, after)
    return gap.value, gap.low, gap.high
