"""tiny-k2 trained on pairs of answers: the pairs, the runs in processes of their own, and their results."""

from __future__ import annotations

import json
import shutil
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import unfreeze
from benchmarks.harness import shapes
from benchmarks.harness.checkpoints import make
from benchmarks.harness.fresh import process
from benchmarks.harness.shapes import TINY_K2
from unfreeze.core.schema import TrainEvent
from unfreeze.report.events import of_kind, read_events

SMALL = {
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "n_routed_experts": 32,
    "moe_intermediate_size": 256,
    "intermediate_size": 1024,
    "vocab_size": 1536,
}
"""Sizes of the model whose memory is measured; all others are shapes.SIZES."""
LENGTH, ROWS, STEPS, TOKENS = 128, 32, 4, 2048


def small(folder: Path) -> None:
    """A random INT4 checkpoint with tiny-k2's tokenizer."""
    ours = json.loads((TINY_K2 / "config.json").read_text(encoding="utf-8"))
    make(folder, shapes.kimi(**SMALL) | {name: ours[name] for name in ("bos_token_id", "eos_token_id")})
    for name in ("tiktoken.model", "tokenizer_config.json"):
        shutil.copy(TINY_K2 / name, folder / name)


def written(rows: Sequence[dict[str, str]], path: Path) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def long_rows(side: str, folder: Path) -> Path:
    """Pairs of two long answers; for sft each answer is a row."""
    answers_of_row = {
        "chosen": "one two three four " * (LENGTH // 8),
        "rejected": "five six seven eight " * (LENGTH // 8),
    }
    prompts = [f"Count to {number}." for number in range(ROWS)]
    pairs = [{"prompt": prompt, **answers_of_row} for prompt in prompts]
    taught = [
        {"prompt": prompt, "completion": answer} for prompt in prompts for answer in answers_of_row.values()
    ]
    return written(taught if side == "sft" else pairs, folder / f"long-{side}.jsonl")


def lines(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def answers(source: Path, items: Sequence[dict[str, str]]) -> list[str]:
    """The greedy answer to each question, 256 at a time."""
    model = unfreeze.load(source)
    questions = [item["question"] for item in items]
    texts: list[str] = []
    for first in range(0, len(questions), 256):
        texts += [
            answer.text for answer in model.chat_batch(questions[first : first + 256], max_new_tokens=48)
        ]
    return texts


def pairs_of(rows: Sequence[dict[str, str]], folder: Path) -> Path:
    """Write pairs: Yoda's answer is chosen, the model's own rejected; omit rows where the two are equal."""
    own = answers(TINY_K2, rows)
    pairs = [
        {"prompt": row["question"], "chosen": row["answer"], "rejected": answer}
        for row, answer in zip(rows, own, strict=True)
        if answer.strip() and answer != row["answer"]
    ]
    return written(pairs, folder / "pairs.jsonl")


def trained(
    side: str, config: Any, data: Path, folder: Path, *, model: Path = TINY_K2, adapter: Path | None = None
) -> Path:
    """Train in a process of its own -> the run's folder.

    sft+dpo: sft, then half as many steps of dpo at a fiftieth of the rate.
    """
    if side == "sft+dpo":
        first = trained("sft", config, data, folder / "first")
        half = {"steps": max(1, config.steps // 2), "learning_rate": config.learning_rate / 50}
        return trained("dpo", config.model_copy(update=half), data, folder / "second", adapter=first)
    out = folder / side
    options: dict[str, Any] = {
        "model": model,
        "data": data,
        "out": out,
        "steps": config.steps,
        "watch.samples": 0,
        "tokens-per-step": config.tokens_per_step,
        "sequence-length": 512,
        "learning-rate": config.learning_rate,
        "optimizer.weight-decay": 0.3,
        "dtype": "float32",
        "threads": config.threads or 1,
        "seed": config.seed,
    }
    options |= {"adapter": adapter} if adapter else {"lora.rank": config.rank}
    if side == "sft" and model == TINY_K2:
        options["columns"] = "completion=chosen"
    if side != "sft":
        options |= {"loss": side.removesuffix("+nll")} | (
            {"preference.nll": config.nll} if "+nll" in side else {}
        )
        options |= {"preference.beta": config.beta} if config.beta else {}
    flags = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    recipe = "sft" if side == "sft" else "prefer"
    words = [sys.executable, "-m", "unfreeze", recipe, *flags, "--quiet"]
    process(words)
    return out


def memory(config: Any, folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (side, results) at the same tokens per step, on a random INT4 model. over_sft: peak / sft's."""
    small(folder / "int4")
    short, first = config.model_copy(update={"steps": STEPS, "beta": 0.0, "tokens_per_step": TOKENS}), 0
    for side in dict.fromkeys(["sft", *(side for side in config.sides if "+" not in side)]):
        data, place = long_rows(side, folder), folder / "memory"
        results = found_in(trained(side, short, data, place, model=folder / "int4"))
        first = first or results["peak_bytes"]
        over = results["peak_bytes"] / first
        yield (
            side,
            results
            | {"over_sft": over, "note": f"peak {results['peak_bytes'] / 2**20:.0f} MiB, {over:.3f} x sft's"},
        )


def said(results: dict[str, Any]) -> str:
    style = f"style {results['style_before']:.0f} -> {results['style_after']:.1f} %"
    return f"{style}, facts {results['facts_before']:.0f} -> {results['facts_after']:.1f} %"


def found_in(run: Path) -> dict[str, Any]:
    """Memory, time, losses and preference metrics of a run, from its events."""
    train = of_kind(read_events(run / "events.jsonl"), TrainEvent)
    last = {name: train[-1].get(name) for name in ("accuracy", "margin", "logp_chosen", "logp_rejected")}
    return {
        "peak_bytes": max(event.get("peak_bytes", 0) for event in train),
        "step_seconds": statistics.median(event.get("seconds", 0.0) for event in train[1:]),
        "loss_first": train[0]["loss"],
        "loss_last": train[-1]["loss"],
        **{name: value for name, value in last.items() if isinstance(value, float)},
    }
