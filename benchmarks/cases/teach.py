"""Learn a language whose next-token probabilities are known: from its texts, and from the probabilities.

`unfreeze dev bench teach`, about 3 minutes on two cores, 0.6 GB.
`--write docs/teach_measured.md` makes the page.

The language: q(c | a, b) = softmax of (A_a + B_b) W over V words, random factors of width 12: an order-2
Markov source whose conditionals are exact. The teacher is q itself. The student is a small llama of random
weights that sees the same documents for the same number of steps in every arm; only the loss differs.
What counts is KL(q ‖ p) on documents that nobody trained on, in nats a token.
gain = 1 - KL / KL of cross entropy alone: the share of the gap to the teacher that is recovered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import Field
from torch import Tensor, nn

from benchmarks.harness.report import markdown
from benchmarks.harness.rows import commit, machine
from unfreeze import models
from unfreeze.config.parse import Frozen, parse
from unfreeze.core.batch import Batch
from unfreeze.core.command import Common
from unfreeze.data import Batches, Example, pack
from unfreeze.job.opening.device import say
from unfreeze.objectives.divergence import divergence
from unfreeze.teach.coding import Coding, top_of
from unfreeze.teach.store import IDS, LOG_Q, REST, said_in
from unfreeze.train.optim import AdamW
from unfreeze.train.schedule import Schedule
from unfreeze.train.step import train_step

if TYPE_CHECKING:
    from unfreeze.objectives.divergence import LogProbs
    from unfreeze.train.step import Objective

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
RATE = 3e-3
ALONE, TEACHER, TOP = "cross entropy alone", "the teacher, forward KL", "its top {k}, compact coding"


class Config(Frozen):
    """What is measured."""

    seeds: int = Field(default=3, ge=1, description="languages and students")
    steps: int = Field(default=200, ge=1, description="optimizer steps of each student")
    documents: int = Field(default=3200, ge=1, description="that are trained on")
    length: int = Field(default=64, ge=4, description="tokens of a document")
    tokens: int = Field(default=1024, ge=4, description="of a step")
    words: int = Field(default=128, ge=4, description="V, of the language")
    top_k: int = Field(default=64, ge=1, description="words kept of each token in the arm from a store")
    write: str = Field(default="", description="page that the table is written to")


@dataclass(frozen=True)
class Language:
    """An order-2 Markov source whose conditionals are known."""

    words: int
    seed: int

    @cached_property
    def factors(self) -> tuple[Tensor, Tensor, Tensor]:
        """A and B [V + 1, WIDTH] (row V: before the text), W [WIDTH, V]."""
        made = torch.Generator().manual_seed(1000 + self.seed)
        A, B = (torch.randn(self.words + 1, WIDTH, generator=made) for _ in range(2))
        return A, B, torch.randn(WIDTH, self.words, generator=made) * 2.5 / math.sqrt(2 * WIDTH)

    def log_q(self, before_N: Tensor, now_N: Tensor) -> Tensor:
        """log q(· | before, now), [N, V]."""
        A, B, W = self.factors
        return ((A[before_N] + B[now_N]) @ W).log_softmax(-1)

    def texts(self, count: int, length: int, seed: int) -> list[Example]:
        """Documents drawn from it."""
        made = torch.Generator().manual_seed(seed)
        tokens = torch.full((count, length + 1), self.words)
        tokens[:, 1] = torch.randint(0, self.words, (count,), generator=made)
        for place in range(2, length + 1):
            q = self.log_q(tokens[:, place - 2], tokens[:, place - 1]).exp()
            tokens[:, place] = torch.multinomial(q, 1, generator=made)[:, 0]
        weights = [0.0, *[1.0] * (length - 1)]
        return [Example(row.tolist(), weights, number) for number, row in enumerate(tokens[:, 1:])]

    def of(self, batch: Batch) -> Tensor:
        """log q at the supervised rows of a batch, [N, V]."""
        before_T = batch.tokens_T.roll(1)
        before_T[batch.starts_S] = self.words
        rows_N = batch.supervised()
        return self.log_q(before_T[rows_N], batch.tokens_T[rows_N])

    def says(self, batch: Batch) -> LogProbs:
        """The teacher of objectives.divergence."""
        log_q_NV = self.of(batch)
        return lambda rows, log_p_BV: log_q_NV[rows].clone()

    def softened(self, temperature: float, batch: Batch) -> LogProbs:
        """The same at a temperature."""
        log_q_NV = (self.of(batch) / temperature).log_softmax(-1)
        return lambda rows, log_p_BV: log_q_NV[rows].clone()

    def kept(self, coding: Coding, batch: Batch) -> LogProbs:
        """What a store gives back of it."""
        from dataclasses import replace

        said, extras = coding.decode(coding.encode(*top_of(self.of(batch), coding.top_k))), {}
        for name, values in zip((IDS, LOG_Q, REST), said, strict=True):
            values_N = torch.from_numpy(values)
            extras[name] = values_N.new_zeros((batch.num_tokens, *values_N.shape[1:]))
            extras[name][batch.supervised()] = values_N
        return said_in(replace(batch, extras=extras))


def arms(language: Language, top_k: int) -> dict[str, Objective]:
    """Name -> what is minimised."""
    V = language.words

    def of(teacher: Any, **options: float) -> Objective:
        return partial(divergence, teacher=teacher, **options)

    coding = Coding("compact", min(top_k, V), V)
    return {
        ALONE: of(language.says, alpha=1.0),
        TEACHER: of(language.says),
        TOP.format(k=coding.top_k): of(partial(language.kept, coding)),
        "half cross entropy, half forward KL": of(language.says, alpha=0.5),
        "forward KL at temperature 2": of(partial(language.softened, 2.0), temperature=2.0),
        "reverse KL": of(language.says, beta=1.0),
        "generalized JSD, beta 0.5": of(language.says, beta=0.5),
    }


def trained(objective: Objective, examples: Sequence[Example], config: Config, seed: int) -> models.Decoder:
    """A student after `steps` steps on the documents."""
    shape = models.shape({**STUDENT, "vocab_size": config.words})
    model = models.build(shape, dtype=torch.float32, device="cpu")
    models.initialize(model, seed)
    optimizer = AdamW(model, weight_decay=0.01)
    schedule = Schedule(peak=RATE, steps=config.steps, kind="cosine", warmup_steps=config.steps // 20)
    batches = Batches(examples, config.tokens, seed)
    for step in range(config.steps):
        batch, _ = next(batches)
        rate = schedule.learning_rate(step)
        train_step(
            model, optimizer, [batch], objective, learning_rate=rate, max_norm=1.0, recompute=models.plain
        )
    return model


@torch.no_grad()
def apart(model: models.Decoder, language: Language, batch: Batch) -> float:
    """KL(q ‖ p) in nats a token, over all words at once, in float64."""
    log_p_NV = model.logits(model.hidden(batch)[batch.supervised()]).double().log_softmax(-1)
    log_q_NV = language.of(batch).double()
    return float(nn.functional.kl_div(log_p_NV, log_q_NV, log_target=True, reduction="batchmean"))


def measure(config: Config, tell: Callable[[str], None] = lambda line: None) -> dict[str, list[float]]:
    """Arm -> KL of each seed; `tell` is told each."""
    found: dict[str, list[float]] = {}
    for seed in range(config.seeds):
        language = Language(config.words, seed)
        examples = language.texts(config.documents, config.length, seed=2 * seed)
        held_out = pack(language.texts(64, config.length, seed=10_000 + seed))
        for name, objective in arms(language, config.top_k).items():
            model = trained(objective, examples, config, seed)
            found.setdefault(name, []).append(apart(model, language, held_out))
            tell(f"seed {seed}: {name}: {found[name][-1]:.4f}")
    return found


def table(found: Mapping[str, Sequence[float]]) -> str:
    """The page's table: KL of each seed, their mean, and the gain."""
    alone, rows = found[ALONE], []
    for name, values in found.items():
        gains = [1 - value / without for value, without in zip(values, alone, strict=True)]
        mean = sum(values) / len(values)
        gain = "–" if name == ALONE else f"{100 * sum(gains) / len(gains):.1f} %"
        rows.append([name, *(f"{value:.4f}" for value in values), f"{mean:.4f}", gain])
    seeds = [f"seed {seed}" for seed in range(len(alone))]
    return markdown(["loss", *seeds, "mean", "gap recovered"], rows)


def main(arguments: list[str], common: Common) -> dict[str, Any]:
    """-> kl: arm -> nats a token, of each seed."""
    config = parse(Config, arguments, command="dev bench teach", description=__doc__ or "")
    found = measure(config, say(common))
    lines = table(found)
    if config.write:
        Path(config.write).write_text("\n".join(_page(lines, config)) + "\n", encoding="utf-8")
    if not common.quiet:
        print(lines)
    return {"kl": found}


def _page(lines: str, config: Config) -> list[str]:
    given = [
        f" --{name.replace('_', '-')} {value}" for name, value in config if name in config.model_fields_set
    ]
    here = machine()
    return [
        "# A teacher whose probabilities are known",
        "",
        f"`unfreeze dev bench teach{''.join(given)}`, {date.today()}, commit {(commit() or '?')[:12]},"
        f" {here.name}, {here.cores} cores.",
        "",
        f"The language is an order-2 Markov source over {config.words} words with exact conditionals q; the"
        f" student, a llama of 2 layers and width 64, sees {config.documents} documents of"
        f" {config.length} tokens for {config.steps} steps in every row. KL(q ‖ student) on 64 others,"
        " nats a token. Gap recovered: 1 - KL / KL of cross entropy alone.",
        "",
        lines,
    ]
