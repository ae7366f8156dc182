"""tiny-k2 taught to talk like Yoda by pairs of answers, beside fine-tuning on the chosen ones alone.

`unfreeze dev bench prefer`, about 10 minutes on two cores.

The chosen answer of a pair is Yoda's (the demo's rows), the rejected one what tiny-k2 itself says to the same
question. Every side trains adapters of one rank on the INT4 base, with the same tokens a step and steps; sft
sees the chosen answers alone. Measured on the demo's held-out questions about things that occur in no row:
style and facts kept (evaluate/style.py). Then memory, on a random INT4 model in Kimi-K2-Thinking's format
(hidden 512, 4 layers, 32 experts): the same tokens a step, once with every answer a row of sft, once in
pairs.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from benchmarks.harness.kimi import TINY_K2
from benchmarks.harness.rows import Row, Stamp
from benchmarks.harness.training import Measured, appended_to, command, say, show
from unfreeze.config.parse import parse
from unfreeze.core.command import Common
from unfreeze.core.schema import TrainEvent
from unfreeze.report.events import of_kind, read_events

Side = Literal["sft", "dpo", "ipo", "kto", "simpo", "orpo", "dpo+nll", "sft+dpo"]


class Config(Measured):
    """What is measured."""

    sides: tuple[Side, ...] = Field(
        default=("sft", "dpo", "dpo+nll", "orpo", "sft+dpo"),
        description=(
            "kinds of training; dpo+nll: with --nll; sft+dpo: then half as many steps of dpo at a fiftieth of"
            " the rate"
        ),
    )
    nll: float = Field(default=5.0, gt=0, description="of dpo+nll; chosen on every other held-out question")
    seed: int = Field(default=0, ge=0, description="of every side")
    beta: float = Field(default=0.0, ge=0, description="of the losses; 0: as `unfreeze prefer` has it")
    steps: int = Field(default=80, ge=2, description="optimizer steps of every side")
    tokens_per_step: int = Field(default=1024, ge=64, description="tokens of a step, of both answers")
    learning_rate: float = Field(default=1e-3, gt=0, description="at its peak, as the demo's")
    rank: int = Field(default=16, ge=1, description="of every adapter")
    questions: int = Field(default=0, ge=0, description="of the demo's rows; 0: all")


def main(arguments: list[str], common: Common) -> dict[str, Any]:
    """-> rows, file."""
    return measure(parse(Config, arguments, command="dev bench prefer", description=__doc__ or ""), common)


def measure(config: Config, common: Common) -> dict[str, Any]:
    """The benchmark: a process for each side, then its answers; then their memory on another model."""
    stamp = Stamp.now("prefer", command("prefer", config), threads=config.threads or None)
    with tempfile.TemporaryDirectory() as folder:
        made = yoda(config, stamp, Path(folder), common) + memory(config, stamp, Path(folder), common)
    return show(made, appended_to(config), common)


def yoda(config: Config, stamp: Stamp, folder: Path, common: Common) -> list[Row]:
    """Style and facts of every side on held-out questions."""
    from unfreeze.evaluate.style import compare_style

    items = lines(TINY_K2 / "held_out.jsonl")
    pairs = pairs_of(lines(TINY_K2 / "yoda_train.jsonl")[: config.questions or None], folder)
    before = answers(TINY_K2, items)
    made: list[Row] = []
    for side in config.sides:
        started = time.perf_counter()
        if side == "sft+dpo":
            first = trained("sft", config, pairs, folder / "first")
            then = {"steps": max(1, config.steps // 2), "learning_rate": config.learning_rate / 50}
            again = config.model_copy(update=then)
            run = trained("dpo", again, pairs, folder / "second", adapter=first)
        else:
            run = trained(side, config, pairs, folder)
        seconds = time.perf_counter() - started
        found = compare_style(before, answers(run, items), items) | found_in(run) | {"seconds": seconds}
        said = (
            f"style {found['style_before']:.0f} -> {found['style_after']:.1f} %, facts"
            f" {found['facts_before']:.0f} -> {found['facts_after']:.1f} %"
        )
        say(common)(f"{side}: {said}")
        settings = {"model": "tiny-k2", "loss": side, **config.model_dump(exclude={"sides", "append"})}
        made.append(stamp.row(side, settings, {**found, "note": said}))
    return made


SMALL = {
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "n_routed_experts": 32,
    "moe_intermediate_size": 256,
    "intermediate_size": 1024,
    "vocab_size": 1536,
}
"""Of the model whose memory is measured; the rest as in bench/kimi.py."""
LENGTH, ROWS, STEPS, TOKENS = 128, 32, 4, 2048


def memory(config: Config, stamp: Stamp, folder: Path, common: Common) -> list[Row]:
    """Peak memory of sft and of every loss at the same tokens a step, and over that of sft."""
    model = folder / "int4"
    small(model)
    said = ["one two three four " * (LENGTH // 8), "five six seven eight " * (LENGTH // 8)]
    pairs = [{"prompt": f"Count to {n}.", "chosen": said[0], "rejected": said[1]} for n in range(ROWS)]
    taught = [
        {"prompt": row["prompt"], "completion": row[name]} for row in pairs for name in ("chosen", "rejected")
    ]
    asked = config.model_copy(update={"steps": STEPS, "beta": 0.0, "tokens_per_step": TOKENS})
    made: list[Row] = []
    for side in dict.fromkeys(["sft", *(side for side in config.sides if "+" not in side)]):
        data = folder / f"long-{side}.jsonl"
        rows = taught if side == "sft" else pairs
        data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        run = trained(side, asked, data, folder / "memory", model=model)
        train = of_kind(read_events(run / "events.jsonl"), TrainEvent)
        peak = found_in(run)["peak_bytes"]
        first = made[0].results["peak_bytes"] if made else peak
        seconds = statistics.median(event.get("seconds", 0.0) for event in train[1:])
        note = f"peak {peak / 2**20:.0f} MiB, {peak / first:.3f} x sft's; {seconds:.2f} s a step"
        say(common)(f"{side}, memory: {note}")
        found = {"peak_bytes": peak, "over_sft": peak / first, "step_seconds": seconds, "note": note}
        made.append(stamp.row(f"{side}, memory", {**SMALL, "loss": side, "tokens_per_step": TOKENS}, found))
    return made


def small(folder: Path) -> None:
    """A random INT4 checkpoint with tiny-k2's tokenizer."""
    from benchmarks.harness import kimi
    from benchmarks.harness.checkpoints import make

    ours = json.loads((TINY_K2 / "config.json").read_text(encoding="utf-8"))
    make(folder, kimi.config(**SMALL) | {name: ours[name] for name in ("bos_token_id", "eos_token_id")})
    for name in ("tiktoken.model", "tokenizer_config.json"):
        shutil.copy(TINY_K2 / name, folder / name)


def lines(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def answers(source: Path, items: Sequence[dict[str, str]]) -> list[str]:
    """The greedy answer to each question, 256 at a time."""
    import unfreeze

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
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in made), encoding="utf-8")
    return path


def trained(
    side: str, config: Config, data: Path, folder: Path, *, model: Path = TINY_K2, adapter: Path | None = None
) -> Path:
    """A run in a process of its own -> its folder."""
    out = folder / side
    given: dict[str, Any] = {
        "model": model,
        "data": data,
        "out": out,
        "steps": config.steps,
        "samples": 0,
        "tokens-per-step": config.tokens_per_step,
        "sequence-length": 512,
        "learning-rate": config.learning_rate,
        "weight-decay": 0.3,
        "dtype": "float32",
        "threads": config.threads or 1,
        "seed": config.seed,
    }
    given |= {"adapter": adapter} if adapter else {"lora.rank": config.rank}
    if side == "sft" and model == TINY_K2:
        given["columns"] = "completion=chosen"
    if side != "sft":
        given |= {"loss": side.removesuffix("+nll")} | ({"nll": config.nll} if "+nll" in side else {})
        given |= {"beta": config.beta} if config.beta else {}
    flags = [str(word) for name, value in given.items() for word in (f"--{name}", value)]
    recipe = "sft" if side == "sft" else "prefer"
    words = [sys.executable, "-m", "unfreeze", recipe, *flags, "--quiet"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"the run of {side} ended with {done.returncode}: {done.stderr[-500:]}")
    return out


def found_in(run: Path) -> dict[str, Any]:
    """What the run's own events say of its training."""
    train = of_kind(read_events(run / "events.jsonl"), TrainEvent)
    kept = {name: train[-1].get(name) for name in ("accuracy", "margin", "logp_chosen", "logp_rejected")}
    return {
        "peak_bytes": max(event.get("peak_bytes", 0) for event in train),
        "loss_first": train[0]["loss"],
        "loss_last": train[-1]["loss"],
        **{name: value for name, value in kept.items() if isinstance(value, float)},
    }
