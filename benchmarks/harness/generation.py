"""Sides that generate, their timings, and the judge of their tokens."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

import unfreeze
from benchmarks.harness.sides import Side, Worker
from unfreeze.core.errors import ConfigError
from unfreeze.generate.engine import Engine
from unfreeze.generate.sampling import Sampling
from unfreeze.generate.steps import Replayed, launched, step_by_record

STEPS = {"unfreeze": "by_record", "unfreeze-launched": "launched", "unfreeze-graphs": "graphs"}


def read_cases(config: Any) -> list[tuple[int, int]]:
    """ "16x64" -> (16, 64): rows, tokens of the prompt. Raises ConfigError, also for CUDA graphs on a CPU."""
    sizes = []
    for text in config.cases:
        batch, _, prompt = text.partition("x")
        if not (batch.isdigit() and prompt.isdigit() and int(batch) and int(prompt)):
            raise ConfigError(f"cases: {text!r} is not BATCHxPROMPT, such as 16x64", next="mend --cases")
        sizes.append((int(batch), int(prompt)))
    if config.device == "cpu" and "unfreeze-graphs" in config.sides:
        raise ConfigError(
            "sides: unfreeze-graphs records CUDA graphs, and this runs on the CPU",
            next="--device cuda, or leave that side out",
        )
    return sizes


def prompts_of(batch: int, prompt: int, vocab_size: int) -> list[list[int]]:
    """Random ids, the same for every side."""
    draw = random.Random(batch * 100_003 + prompt)
    return [[draw.randrange(2, vocab_size) for _ in range(prompt)] for _ in range(batch)]


def timings(side: Side, batch: int, new: int) -> dict[str, Any]:
    """tokens_per_second of decoding, prompt_seconds, and peak memory.

    The first token of each row comes with the prompt, so decoding doesn't count it.
    """
    decode, replies = sorted(side.values("generate", "decode_seconds")), side.replies["generate"]
    tokens = batch * (new - 1)
    return {
        "tokens_per_second": tokens / statistics.median(decode),
        "fastest": tokens / decode[0],
        "slowest": tokens / decode[-1],
        "prompt_seconds": statistics.median(reply["seconds"] - reply["decode_seconds"] for reply in replies),
        "peak_bytes": max(side.values("generate", "peak")),
        "load_peak_bytes": side.loaded["load_peak"],
    }


def scored(score: Mapping[str, float]) -> dict[str, float]:
    """The result of a judge's `score`, under the names of a row's correctness."""
    names = "tokens that are not float32's first choice", "worst of them, nats less likely"
    return dict(zip(names, (score["other"], score["nats"]), strict=True))


def note(settings: Mapping[str, Any], entry: Mapping[str, Any]) -> str:
    other, nats = entry["correctness"].values()
    return (
        f"{settings['batch']}x{settings['prompt']}: prompt {entry['prompt_seconds']:.2f} s;"
        f" {other:.1%} other than float32's choice, at worst {nats:.3f} nats"
    )


def ours(checkpoint: str, device: str = "cpu", steps: str = "by_record", dtype: str = "bfloat16") -> Worker:
    """Our engine. calls: generate(prompts, new) -> tokens, decode_seconds."""
    ways = {"by_record": step_by_record, "launched": launched, "graphs": partial(Replayed, impl="cuda_graph")}
    decoder = unfreeze.load(checkpoint, dtype=dtype, device=device).decoder
    engine = Engine(decoder, steps=ways[steps])  # without stop ids: every row gets all its tokens

    def generate(prompts: list[list[int]], new: int) -> dict[str, Any]:
        tokens: list[list[int]] = [[] for _ in prompts]
        times = []
        for pieces in engine.stream(prompts, Sampling(max_new_tokens=new, temperature=0.0)):
            times.append(time.perf_counter())
            for piece in pieces:
                tokens[piece.row].append(piece.token)
        return {"tokens": tokens, "decode_seconds": times[-1] - times[0]}

    return Worker({"generate": generate})


def judge(checkpoint: str) -> Worker:
    """Our model in float32, without a cache.

    calls: score(prompts, tokens) -> other (share of tokens that aren't the likeliest), nats (largest gap).
    """
    model = unfreeze.load(checkpoint, dtype="float32")

    def score(prompts: Sequence[list[int]], tokens: Sequence[list[int]]) -> dict[str, Any]:
        short = []
        for prompt, answer in zip(prompts, tokens, strict=True):
            logits_TV = model.logits([[*prompt, *answer[:-1]]])[0][len(prompt) - 1 :]
            short.append(logits_TV.amax(-1) - logits_TV.gather(1, torch.tensor(answer)[:, None])[:, 0])
        short_N = torch.cat(short)
        return {"other": float(short_N.gt(0).float().mean()), "nats": float(short_N.max())}

    return Worker({"score": score})
