"""A language with known next-token probabilities, students of it, and their distance from it.

q(c | a, b) = softmax of (A_a + B_b) W over V words, random factors of width 12: an order-2 Markov source
whose conditionals are exact. The measure is KL(q ‖ p) on held-out documents, in nats per token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import Field
from torch import Tensor, nn

from benchmarks.harness.case import Run, command
from benchmarks.harness.report import markdown
from benchmarks.harness.rows import commit, machine
from unfreeze import models
from unfreeze.config.parse import Frozen
from unfreeze.core.batch import Batch
from unfreeze.data import Batches, Example, pack
from unfreeze.models import Decoder
from unfreeze.teach.coding import Coding, top_of
from unfreeze.teach.store import IDS, LOG_Q, REST, said_in
from unfreeze.train.optim import AdamW
from unfreeze.train.schedule import Schedule
from unfreeze.train.step import Objective, train_step

if TYPE_CHECKING:
    from unfreeze.objectives.divergence import LogProbs

WIDTH = 12  # of the language's factors
STUDENT = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256,
}
TEACHER = STUDENT | {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 3}
TEACHER |= {"num_attention_heads": 6, "num_key_value_heads": 3}
RATE = 3e-3


@dataclass(frozen=True)
class Language:
    """An order-2 Markov source with known conditionals."""

    words: int
    seed: int

    @cached_property
    def factors(self) -> tuple[Tensor, Tensor, Tensor]:
        """A and B [V + 1, WIDTH] (row V: before the text), W [WIDTH, V]."""
        generator = torch.Generator().manual_seed(1000 + self.seed)
        A, B = (torch.randn(self.words + 1, WIDTH, generator=generator) for _ in range(2))
        return A, B, torch.randn(WIDTH, self.words, generator=generator) * 2.5 / math.sqrt(2 * WIDTH)

    def log_q(self, before_N: Tensor, now_N: Tensor) -> Tensor:
        """log q(· | before, now), [N, V]."""
        A, B, W = self.factors
        return ((A[before_N] + B[now_N]) @ W).log_softmax(-1)

    def texts(self, count: int, length: int, seed: int) -> list[Example]:
        """Documents sampled from the language."""
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.full((count, length + 1), self.words)
        tokens[:, 1] = torch.randint(0, self.words, (count,), generator=generator)
        for place in range(2, length + 1):
            q = self.log_q(tokens[:, place - 2], tokens[:, place - 1]).exp()
            tokens[:, place] = torch.multinomial(q, 1, generator=generator)[:, 0]
        weights = [0.0, *[1.0] * (length - 1)]
        return [Example(row.tolist(), weights, number) for number, row in enumerate(tokens[:, 1:])]

    def of(self, batch: Batch) -> Tensor:
        """log q at the supervised rows of a batch, [N, V]."""
        before_T = batch.tokens_T.roll(1)
        before_T[batch.starts_S] = self.words
        rows_N = batch.supervised()
        return self.log_q(before_T[rows_N], batch.tokens_T[rows_N])

    def says(self, batch: Batch) -> LogProbs:
        """The language as the teacher of objectives.divergence."""
        log_q_NV = self.of(batch)
        return lambda rows, log_p_BV: log_q_NV[rows].clone()

    def softened(self, temperature: float, batch: Batch) -> LogProbs:
        """The same at a temperature."""
        log_q_NV = (self.of(batch) / temperature).log_softmax(-1)
        return lambda rows, log_p_BV: log_q_NV[rows].clone()

    def kept(self, coding: Coding, batch: Batch) -> LogProbs:
        """The same through a store: encoded, then decoded."""
        arrays, extras = coding.decode(coding.encode(*top_of(self.of(batch), coding.top_k))), {}
        for name, values in zip((IDS, LOG_Q, REST), arrays, strict=True):
            values_N = torch.from_numpy(values)
            extras[name] = values_N.new_zeros((batch.num_tokens, *values_N.shape[1:]))
            extras[name][batch.supervised()] = values_N
        return said_in(replace(batch, extras=extras))


class Taught(Frozen):
    """Flags of the cases that teach the language."""

    seeds: int = Field(default=3, ge=1, description="languages and students")
    steps: int = Field(default=200, ge=1, description="optimizer steps of each student")
    documents: int = Field(default=3200, ge=1, description="training documents")
    length: int = Field(default=64, ge=4, description="tokens of a document")
    tokens: int = Field(default=1024, ge=4, description="tokens per step")
    words: int = Field(default=128, ge=4, description="vocabulary of the language")
    write: str = Field(default="", description="page to write the table to")


Arms = Callable[[Language, Sequence[Example], int], dict[str, Any]]
"""(language, documents, seed) -> name -> a student's objective, or a model to measure as it is."""


def learned(
    sizes: dict[str, Any],
    objective: Callable[[Decoder], Objective],
    examples: Sequence[Example],
    config: Taught,
    steps: int,
    seed: int,
) -> Decoder:
    """A model of `sizes` after `steps` steps. objective: called with the model before the first step."""
    shape = models.shape({**sizes, "vocab_size": config.words})
    model = models.build(shape, dtype=torch.float32, device="cpu")
    models.initialize(model, seed)
    minimised, optimizer = objective(model), AdamW(model, weight_decay=0.01)
    schedule = Schedule(peak=RATE, steps=steps, kind="cosine", warmup_steps=steps // 20)
    batches = Batches(examples, config.tokens, seed)
    for step in range(steps):
        rate = schedule.learning_rate(step)
        options = {"learning_rate": rate, "max_norm": 1.0, "recompute": models.plain}
        train_step(model, optimizer, next(batches)[0], minimised, **options)
    return model


@torch.no_grad()
def apart(model: models.Decoder, language: Language, batch: Batch) -> float:
    """KL(q ‖ p) in nats per token, over the whole vocabulary, in float64."""
    log_p_NV = model.logits(model.hidden(batch)[batch.supervised()]).double().log_softmax(-1)
    log_q_NV = language.of(batch).double()
    return float(nn.functional.kl_div(log_p_NV, log_q_NV, log_target=True, reduction="batchmean"))


def taught(config: Taught, run: Run, arms: Arms) -> dict[str, list[float]]:
    """Arm -> KL(q ‖ p) of each seed."""
    divergences: dict[str, list[float]] = {}
    for seed in range(config.seeds):
        language = Language(config.words, seed)
        examples = language.texts(config.documents, config.length, seed=2 * seed)
        held_out = pack(language.texts(64, config.length, seed=10_000 + seed))
        for name, arm in arms(language, examples, seed).items():
            model = (
                arm
                if isinstance(arm, Decoder)
                else learned(STUDENT, arm, examples, config, config.steps, seed)
            )
            divergences.setdefault(name, []).append(apart(model, language, held_out))
            run.say(f"seed {seed}: {name}: {divergences[name][-1]:.4f}")
    return divergences


def page(
    run: Run, title: str, what: str, head: Sequence[str], last: Callable[[str], str], divergences: Any
) -> dict[str, Any]:
    """Print the table and write it to --write. last: the last column of an arm."""
    seeds = [f"seed {seed}" for seed in range(run.config.seeds)]
    rows = [
        [name, *(f"{value:.4f}" for value in values), f"{sum(values) / len(values):.4f}", last(name)]
        for name, values in divergences.items()
    ]
    lines, here = markdown([head[0], *seeds, "mean", head[1]], rows), machine()
    if run.config.write:
        origin = f"`{command(run.name, run.config)}`, {date.today()}, commit {commit() or '?'}, {here.name},"
        text = "\n\n".join([f"# {title}", f"{origin} {here.cores} cores.", what, lines])
        Path(run.config.write).write_text(text + "\n", encoding="utf-8")
    if not run.common.quiet:
        print(lines)
    return {"kl": divergences}
