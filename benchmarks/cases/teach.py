"""Learn a language with known next-token probabilities: from its texts, and from the probabilities.

`unfreeze dev bench teach --write docs/measured/distill.md`: 3 minutes on two cores, 0.6 GB. The teacher is
the language itself (harness/language.py). The student is a small llama of random weights; in every arm it
sees the same documents for the same number of steps; only the loss differs. gain = 1 - KL / KL of cross
entropy alone."""

from functools import partial

from pydantic import Field

from benchmarks.harness.case import Run
from benchmarks.harness.language import Language, Taught, page, taught
from unfreeze.objectives.divergence import divergence
from unfreeze.teach.coding import Coding

ALONE, TEACHER, TOP = "cross entropy alone", "the teacher, forward KL", "its top {k}, compact coding"


class Config(Taught):
    """Flags of this benchmark."""

    top_k: int = Field(default=64, ge=1, description="words per token in the arm that reads a store")


def objectives(language: Language, top_k: int):
    """Name of an arm -> its loss."""

    def of(teacher, **options: float):
        return partial(divergence, teacher=teacher, **options)

    coding = Coding("compact", min(top_k, language.words), language.words)
    return {
        ALONE: of(language.says, alpha=1.0),
        TEACHER: of(language.says),
        TOP.format(k=coding.top_k): of(partial(language.kept, coding)),
        "half cross entropy, half forward KL": of(language.says, alpha=0.5),
        "forward KL at temperature 2": of(partial(language.softened, 2.0), temperature=2.0),
        "reverse KL": of(language.says, beta=1.0),
        "generalized JSD, beta 0.5": of(language.says, beta=0.5),
    }


def written(config: Config, run: Run):
    def arms(language: Language, examples, seed: int):
        return {name: lambda model, o=o: o for name, o in objectives(language, config.top_k).items()}

    def gain(name: str) -> str:
        gains = [
            1 - value / without for value, without in zip(divergences[name], divergences[ALONE], strict=True)
        ]
        return "–" if name == ALONE else f"{100 * sum(gains) / len(gains):.1f} %"

    divergences = taught(config, run, arms)
    what = f"An order-2 Markov source over {config.words} words with exact conditional probabilities q."
    what += f" In every row the student trains on {config.documents} documents of {config.length} tokens"
    what += f" for {config.steps} steps. The columns have KL(q ‖ student) on 64 other documents, in nats a"
    what += " token. Gap recovered: 1 - KL / KL of cross entropy alone."
    title = "Distillation from a teacher with known probabilities"
    return page(run, title, what, ("loss", "gap recovered"), gain, divergences)
