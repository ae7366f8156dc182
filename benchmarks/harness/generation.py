"""Our sides that generate, the judge of their tokens, and the cases.

A side that generates has the calls start(prompts, new), steps(count), finish() -> tokens. start reads the
prompts and chooses the first token of each row; steps makes more of them, at most `new` in all. Sides thus
take turns within one generation, and a long prompt is read once.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

import unfreeze
from benchmarks.harness.limits import experts_read, work
from benchmarks.harness.sides import Worker
from benchmarks.harness.synthetic import attach_random
from unfreeze import models
from unfreeze.adapters import LoraConfig
from unfreeze.adapters.layouts import save_adapter
from unfreeze.checkpoint import open_checkpoint
from unfreeze.core.errors import ConfigError
from unfreeze.generate.engine import Engine, Piece
from unfreeze.generate.sampling import Sampling
from unfreeze.generate.steps import Replayed, launched, step_by_record

STEPS = {"unfreeze": "by_record", "unfreeze-launched": "launched", "unfreeze-graphs": "graphs"}
RANK = 16
OWN_CALLS = 2  # of the profiled function itself, and of the one that ends the count


def read_cases(cases: Sequence[str]) -> list[tuple[int, int]]:
    """ "16x64" -> (16, 64): rows, tokens of the prompt. Raises ConfigError."""
    sizes = []
    for text in cases:
        batch, _, prompt = text.partition("x")
        if not (batch.isdigit() and prompt.isdigit() and int(batch) and int(prompt)):
            raise ConfigError(f"cases: {text!r} is not BATCHxPROMPT, such as 16x64", next="mend --cases")
        sizes.append((int(batch), int(prompt)))
    return sizes


def prompts_of(batch: int, prompt: int, vocab_size: int) -> list[list[int]]:
    """Random ids, the same for every side."""
    draw = random.Random(batch * 100_003 + prompt)
    return [[draw.randrange(2, vocab_size) for _ in range(prompt)] for _ in range(batch)]


def make_adapter(checkpoint: Path, folder: Path) -> None:
    """Write LoRA of rank RANK on all linear layers and experts, with a random B, in peft's layout."""
    manifest = open_checkpoint(str(checkpoint))
    model = models.meta_model(models.shape(manifest.config), manifest, torch.float32)
    attach_random(model, LoraConfig(rank=RANK), seed=0)
    save_adapter(model, folder, base_name=str(checkpoint))


class Generation:
    """Greedy generation by our engine, paused between calls."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.tokens: list[list[int]] = []
        self.stream: Iterator[list[Piece]] = iter(())

    def start(self, prompts: list[list[int]], new: int) -> dict[str, Any]:
        self.tokens = [[] for _ in prompts]
        self.stream = self.engine.stream(prompts, Sampling(max_new_tokens=new, temperature=0.0))
        return self.steps(1)

    def steps(self, count: int) -> dict[str, Any]:
        for _ in range(count):
            for piece in next(self.stream):
                self.tokens[piece.row].append(piece.token)
        return {}

    def finish(self) -> dict[str, Any]:
        self.stream = iter(())  # frees the cache
        return {"tokens": self.tokens}

    def calls(self, count: int) -> dict[str, Any]:
        """-> calls: Python function calls of one step, the mean of `count` more steps."""
        return {"calls": function_calls(lambda: self.steps(count)) / count}


def function_calls(run: Callable[[], object]) -> int:
    """Calls of functions in Python and in C that `run` makes on this thread, as cProfile counts them."""
    count = -OWN_CALLS

    def seen(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(seen)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


def ours(checkpoint: str, device: str = "cpu", steps: str = "by_record", dtype: str = "bfloat16") -> Worker:
    """Our engine on a checkpoint or an adapter's folder. calls: of Generation."""
    ways = {"by_record": step_by_record, "launched": launched, "graphs": partial(Replayed, impl="cuda_graph")}
    decoder = unfreeze.load(checkpoint, dtype=dtype, device=device).decoder
    # without stop ids: every row gets all its tokens
    running = Generation(Engine(decoder, steps=ways[steps]))
    names = ("start", "steps", "finish", "calls")
    return Worker({name: getattr(running, name) for name in names})


def generated(worker: Worker, prompts: list[list[int]], new: int) -> list[list[int]]:
    """The `new` tokens of each row, at once."""
    worker.calls["start"](prompts=prompts, new=new)
    worker.calls["steps"](count=new - 1)
    return worker.calls["finish"]()["tokens"]


def judge(checkpoint: str) -> Worker:
    """Our model in float32, without a cache.

    calls: score(prompts, tokens) -> other (share of tokens that aren't the likeliest), nats (largest gap);
    work(prompts, tokens, length, dtype) -> read_bytes, flop, weights_read, experts_read of a step.
    """
    model = unfreeze.load(checkpoint, dtype="float32")

    def score(prompts: Sequence[list[int]], tokens: Sequence[list[int]]) -> dict[str, Any]:
        short = []
        for prompt, answer in zip(prompts, tokens, strict=True):
            logits_TV = model.logits([[*prompt, *answer[:-1]]])[0][len(prompt) - 1 :]
            short.append(logits_TV.amax(-1) - logits_TV.gather(1, torch.tensor(answer)[:, None])[:, 0])
        short_N = torch.cat(short)
        return {"other": float(short_N.gt(0).float().mean()), "nats": float(short_N.max())}

    def work_of(
        prompts: Sequence[list[int]], tokens: Sequence[list[int]], length: float, dtype: str
    ) -> dict[str, Any]:
        experts = experts_read(model.decoder, prompts, tokens)
        step = work(model.decoder, len(prompts), length, experts, getattr(torch, dtype).itemsize)
        mean = sum(experts) / len(experts) if experts else 0.0
        return {
            "read_bytes": step.read,
            "flop": step.flop,
            "weights_read": step.weights,
            "experts_read": mean,
        }

    return Worker({"score": score, "work": work_of})


def scored(score: Mapping[str, float]) -> dict[str, float]:
    """The result of a judge's `score`, under the names of a row's correctness."""
    names = "tokens that are not float32's first choice", "worst of them, nats less likely"
    return dict(zip(names, (score["other"], score["nats"]), strict=True))
