"""Layers compared with a teacher's, beside its words alone: does a student of the same steps come nearer?

`unfreeze dev bench inside`, about 5 minutes on two cores, 0.6 GB;
`--write docs/inside_measured.md` makes the page.

The language is `unfreeze dev bench teach`'s: its next-token probabilities q are known. A teacher, a llama of 3
layers, width 96 and 6 heads, learns q itself; then students of 2 layers, width 64 and 4 heads learn the teacher,
each from the same documents for the same steps. What counts is KL(q ‖ p) on documents that nobody trained on.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pydantic import Field

from benchmarks.cases import teach
from benchmarks.cases.teach import ALONE, RATE, STUDENT, Language, apart
from benchmarks.harness.report import markdown
from benchmarks.harness.rows import commit, machine
from unfreeze import models
from unfreeze.config.parse import parse
from unfreeze.core.command import Common
from unfreeze.data import Batches, Example, pack
from unfreeze.job.opening.device import say
from unfreeze.models import Decoder
from unfreeze.objectives.divergence import divergence
from unfreeze.teach.inside import Inside
from unfreeze.teach.teacher import teacher_log_probs
from unfreeze.train.optim import AdamW
from unfreeze.train.schedule import Schedule
from unfreeze.train.step import train_step

TEACHER = STUDENT | {
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
}
WORDS = "its words, forward KL"
ARMS = {
    "its words, and relations at 0.1": Inside(relations=0.1),
    "its words, and relations at 1": Inside(relations=1.0),
    "its words, and hidden states at 0.1": Inside(hidden=0.1),
    "its words, and hidden states at 1": Inside(hidden=1.0),
}
"""Name -> what is compared, of both last layers."""


class Config(teach.Config):
    """What is measured."""

    steps: int = Field(default=120, ge=1, description="optimizer steps of each student")
    teacher_steps: int = Field(default=250, ge=1, description="optimizer steps of the teacher, on q itself")
    tokens: int = Field(default=512, ge=4, description="of a step")
    words: int = Field(default=64, ge=4, description="V, of the language")
    documents: int = Field(default=4000, ge=1, description="that are trained on")
    length: int = Field(default=32, ge=4, description="tokens of a document")
    first: int = Field(default=0, ge=0, description="the first seed")


def of_seed(config: Config, seed: int, tell: Callable[[str], None]) -> dict[str, float]:
    """Arm -> KL(q ‖ p), the teacher's too."""
    language = Language(config.words, seed)
    examples = language.texts(config.documents, config.length, seed=2 * seed)
    held_out = pack(language.texts(64, config.length, seed=10_000 + seed))
    itself = partial(divergence, teacher=language.says)
    teacher = learned(TEACHER, lambda model: itself, examples, config, config.teacher_steps, 100 + seed)
    teacher.requires_grad_(False)
    found = {"the teacher": apart(teacher, language, held_out)}
    tell(f"seed {seed}: the teacher: {found['the teacher']:.4f}")
    says = partial(teacher_log_probs, teacher, config.words, 1.0)

    def compared(inside: Inside, model: Decoder) -> Any:
        return inside.objective(model, teacher, lambda batch, taps: says(batch, taps=taps), divergence)

    arms: dict[str, Callable[[Decoder], Any]] = {
        ALONE: lambda model: partial(divergence, teacher=says, alpha=1.0),
        WORDS: lambda model: partial(divergence, teacher=says),
        **{name: partial(compared, inside) for name, inside in ARMS.items()},
    }
    for name, objective in arms.items():
        student = learned(STUDENT, objective, examples, config, config.steps, seed)
        found[name] = apart(student, language, held_out)
        tell(f"seed {seed}: {name}: {found[name]:.4f}")
    return found


def measure(config: Config, tell: Callable[[str], None] = lambda line: None) -> dict[str, list[float]]:
    """Arm -> KL of each seed; `tell` is told each."""
    seeds = range(config.first, config.first + config.seeds)
    of = [of_seed(config, seed, tell) for seed in seeds]
    return {name: [found[name] for found in of] for name in of[0]}


def table(found: Mapping[str, Sequence[float]]) -> str:
    """KL of each seed, and its difference to words alone: mean ± standard deviation over the seeds."""
    rows, words = [], found[WORDS]
    for name, values in found.items():
        less = [value - alone for value, alone in zip(values, words, strict=True)]
        spread = statistics.stdev(less) if len(less) > 1 else 0.0
        change = "–" if name == WORDS else f"{statistics.mean(less):+.4f} ± {spread:.4f}"
        rows.append([name, *(f"{value:.4f}" for value in values), f"{statistics.mean(values):.4f}", change])
    seeds = [f"seed {seed}" for seed in range(len(words))]
    return markdown(["loss", *seeds, "mean", "less words alone"], rows)


def learned(
    sizes: Mapping[str, Any],
    objective: Callable[[Decoder], Any],
    examples: Sequence[Example],
    config: Config,
    steps: int,
    seed: int,
) -> Decoder:
    """A model of those sizes after so many steps. objective: of the model, before its first step."""
    model = models.build(
        models.shape({**sizes, "vocab_size": config.words}), dtype=torch.float32, device="cpu"
    )
    models.initialize(model, seed)
    minimised = objective(model)
    optimizer = AdamW(model, weight_decay=0.01)
    schedule = Schedule(peak=RATE, steps=steps, kind="cosine", warmup_steps=steps // 20)
    batches = Batches(examples, config.tokens, seed)
    for step in range(steps):
        batch, _ = next(batches)
        rate = schedule.learning_rate(step)
        train_step(
            model, optimizer, [batch], minimised, learning_rate=rate, max_norm=1.0, recompute=models.plain
        )
    return model


def main(arguments: list[str], common: Common) -> dict[str, Any]:
    """-> kl: arm -> nats a token, of each seed."""
    config = parse(Config, arguments, command="dev bench inside", description=__doc__ or "")
    found = measure(config, say(common))
    lines = table(found)
    if config.write:
        Path(config.write).write_text("\n".join(page(lines, config)) + "\n", encoding="utf-8")
    if not common.quiet:
        print(lines)
    return {"kl": found}


def page(lines: str, config: Config) -> list[str]:
    """docs/inside_measured.md."""
    here = machine()
    given = [
        f" --{name.replace('_', '-')} {value}" for name, value in config if name in config.model_fields_set
    ]
    return [
        "# Layers compared with a teacher's",
        "",
        f"`unfreeze dev bench inside{''.join(given)}`, {date.today()}, commit {(commit() or '?')[:12]},"
        f" {here.name}, {here.cores} cores.",
        "",
        f"The language is that of `unfreeze dev bench teach`, {config.words} words with known probabilities q."
        f" The teacher, of 3 layers, width 96 and 6 heads, learned q in {config.teacher_steps} steps; the"
        f" students, of 2 layers, width 64 and 4 heads, see {config.documents} documents of {config.length}"
        f" tokens for {config.steps} steps of {config.tokens} tokens in every row. KL(q ‖ student) on 64"
        " others, nats a token; last column: mean ± standard deviation of the difference of the same seed."
        " Both last layers are compared.",
        "",
        lines,
    ]
