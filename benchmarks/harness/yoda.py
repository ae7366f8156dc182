"""tiny-k2 taught by pairs of answers: the pairs, the runs in processes of their own, and what they say."""

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
"""Of the model whose memory is measured; the rest as in shapes.SIZES."""
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
    said = {
        "chosen": "one two three four " * (LENGTH // 8),
        "rejected": "five six seven eight " * (LENGTH // 8),
    }
    asked = [f"Count to {number}." for number in range(ROWS)]
    pairs = [{"prompt": prompt, **said} for prompt in asked]
    taught = [{"prompt": prompt, "completion": answer} for prompt in asked for answer in said.values()]
    return written(taught if side == "sft" else pairs, folder / f"long-{side}.jsonl")


def lines(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def answers(source: Path, items: Sequence[dict[str, str]]) -> list[str]:
    """The greedy answer to each question, 256 at a time."""
    model = unfreeze.load(source)
    asked = [item["question"] for item in items]
    said: list[str] = []
    for first in range(0, len(asked), 256):
        said += [answer.text for answer in model.chat_batch(asked[first : first + 256], max_new_tokens=48)]
    return said


def pairs_of(rows: Sequence[dict[str, str]], folder: Path) -> Path:
    """Yoda's answer is chosen, the model's own rejected; rows where the two are equal are left out."""
    own = answers(TINY_K2, rows)
    made = [
        {"prompt": row["question"], "chosen": row["answer"], "rejected": said}
        for row, said in zip(rows, own, strict=True)
        if said.strip() and said != row["answer"]
    ]
    return written(made, folder / "pairs.jsonl")


def trained(
    side: str, config: Any, data: Path, folder: Path, *, model: Path = TINY_K2, adapter: Path | None = None
) -> Path:
    """A run in a process of its own -> its folder.

    sft+dpo: sft, then half as many steps of dpo at a fiftieth of the rate.
    """
    if side == "sft+dpo":
        first = trained("sft", config, data, folder / "first")
        half = {"steps": max(1, config.steps // 2), "learning_rate": config.learning_rate / 50}
        return trained("dpo", config.model_copy(update=half), data, folder / "second", adapter=first)
    out = folder / side
    given: dict[str, Any] = {
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
    given |= {"adapter": adapter} if adapter else {"lora.rank": config.rank}
    if side == "sft" and model == TINY_K2:
        given["columns"] = "completion=chosen"
    if side != "sft":
        given |= {"loss": side.removesuffix("+nll")} | (
            {"preference.nll": config.nll} if "+nll" in side else {}
        )
        given |= {"preference.beta": config.beta} if config.beta else {}
    flags = [str(word) for name, value in given.items() for word in (f"--{name}", value)]
    recipe = "sft" if side == "sft" else "prefer"
    words = [sys.executable, "-m", "unfreeze", recipe, *flags, "--quiet"]
    process(words)
    return out


def memory(config: Any, folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(side, its peak, and that over sft's) at the same tokens a step, on a random INT4 model."""
    small(folder / "int4")
    asked, first = config.model_copy(update={"steps": STEPS, "beta": 0.0, "tokens_per_step": TOKENS}), 0
    for side in dict.fromkeys(["sft", *(side for side in config.sides if "+" not in side)]):
        data, place = long_rows(side, folder), folder / "memory"
        found = found_in(trained(side, asked, data, place, model=folder / "int4"))
        first = first or found["peak_bytes"]
        over = found["peak_bytes"] / first
        yield (
            side,
            found
            | {"over_sft": over, "note": f"peak {found['peak_bytes'] / 2**20:.0f} MiB, {over:.3f} x sft's"},
        )


def said(found: dict[str, Any]) -> str:
    style = f"style {found['style_before']:.0f} -> {found['style_after']:.1f} %"
    return f"{style}, facts {found['facts_before']:.0f} -> {found['facts_after']:.1f} %"


def found_in(run: Path) -> dict[str, Any]:
    """What the run's own events say of its training."""
    train = of_kind(read_events(run / "events.jsonl"), TrainEvent)
    kept = {name: train[-1].get(name) for name in ("accuracy", "margin", "logp_chosen", "logp_rejected")}
    return {
        "peak_bytes": max(event.get("peak_bytes", 0) for event in train),
        "step_seconds": statistics.median(event.get("seconds", 0.0) for event in train[1:]),
        "loss_first": train[0]["loss"],
        "loss_last": train[-1]["loss"],
        **{name: value for name, value in kept.items() if isinstance(value, float)},
    }
