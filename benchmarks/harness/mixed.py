"""Our side of `dev bench mixed`, its lengths and its checkpoints."""

from __future__ import annotations

import math
import random
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import unfreeze
from benchmarks.harness import shapes
from benchmarks.harness.checkpoints import made
from benchmarks.harness.sides import Side, Worker
from unfreeze.checkpoint.manifest import read_json
from unfreeze.generate.engine import Engine
from unfreeze.generate.sampling import Sampling


def lengths_of(rows: int, longest: int) -> list[int]:
    """Draw geometric lengths, cut at `longest`, with a chance to end that makes the mean a third of it.

    The mean of min(G, L) is (1 - (1 - p)^L) / p; one row has the longest length.
    """

    def mean(p: float) -> float:
        return (1 - (1 - p) ** longest) / p

    low, high = 1e-6, 1.0  # the mean falls with p
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if mean(middle) > longest / 3 else (low, middle)
    draw, stay = random.Random(rows * 100_003 + longest), math.log1p(-low)
    lengths = [min(longest, 1 + int(math.log(1 - draw.random()) / stay)) for _ in range(rows)]
    lengths[lengths.index(max(lengths))] = longest
    return lengths


@contextmanager
def checkpoints(root: str, models: Sequence[str], layers: int) -> Generator[dict[str, tuple[Path, int]]]:
    """Make the models of random weights. -> name -> folder, words of the vocabulary."""
    with ExitStack() as stack:
        folder = Path(root or stack.enter_context(TemporaryDirectory(prefix="unfreeze-bench-")))
        folders: dict[str, tuple[Path, int]] = {}
        for name in models:
            dense = shapes.QWEN3_06B | {"num_hidden_layers": layers}
            path = shapes.TINY_K2 if name == "tiny-k2" else made(folder / name, shapes.qwen("qwen3", dense))
            folders[name] = path, int(read_json(path / "config.json")["vocab_size"])
        yield folders


def ours(checkpoint: str, device: str, dtype: str) -> Worker:
    """Our engine; a row leaves when it has its tokens. calls: generate."""
    engine = Engine(unfreeze.load(checkpoint, dtype=dtype, device=device).decoder)

    def generate(prompts: list[list[int]], lengths: list[int]) -> dict[str, Any]:
        done = engine.generate(prompts, Sampling(max(lengths), temperature=0.0), limits=lengths)
        return {"lengths": [len(each.tokens) for each in done]}

    return Worker({"generate": generate})


def results(side: Side, lengths: list[int]) -> dict[str, Any]:
    """Return the speed; ValueError if a row has another length."""
    for reply in side.replies["generate"]:
        if reply["lengths"] != lengths:
            raise ValueError(f"{side.name} made rows of {reply['lengths'][:4]} tokens, not {lengths[:4]}")
    useful, seconds = sum(lengths), sorted(side.values("generate", "seconds"))
    return {
        "useful_per_second": useful / side.median("seconds", "generate"),
        "fastest": useful / seconds[0],
        "slowest": useful / seconds[-1],
        "peak_bytes": side.peak("generate"),
    }
