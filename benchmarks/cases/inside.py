"""Distill from a teacher's layers and from its words alone: which student gets closer in the same steps?

`unfreeze dev bench inside --write docs/measured/teacher_layers.md`: 5 minutes on two cores, 0.6 GB. A llama
of 3 layers learns the language of `bench teach`; students of 2 layers learn from it for as many steps.
"""

import statistics
from functools import partial

from pydantic import Field

from benchmarks.harness.case import Run
from benchmarks.harness.language import TEACHER, Language, Taught, learned, page, taught
from unfreeze.objectives.divergence import divergence
from unfreeze.teach.inside import Inside
from unfreeze.teach.teacher import teacher_log_probs

WORDS = "its words, forward KL"
ARMS = {f"its words, and relations at {at:g}": Inside(relations=at) for at in (0.1, 1.0)}
ARMS |= {f"its words, and hidden states at {at:g}": Inside(hidden=at) for at in (0.1, 1.0)}


class Config(Taught):
    steps: int = Field(default=120, ge=1, description="optimizer steps of each student")
    teacher_steps: int = Field(default=250, ge=1, description="optimizer steps of the teacher, from q")
    tokens: int = Field(default=512, ge=4, description="tokens per step")
    words: int = Field(default=64, ge=4, description="vocabulary of the language")
    documents: int = Field(default=4000, ge=1, description="training documents")
    length: int = Field(default=32, ge=4, description="tokens of a document")


def written(config: Config, run: Run):
    def arms(language: Language, examples, seed: int):
        itself = partial(divergence, teacher=language.says)
        teacher = learned(TEACHER, lambda model: itself, examples, config, config.teacher_steps, 100 + seed)
        teacher.requires_grad_(False)
        says = partial(teacher_log_probs, teacher, config.words, 1.0)

        def compared(inside: Inside, model):
            return inside.objective(model, teacher, lambda batch, taps: says(batch, taps=taps), divergence)

        objectives = {
            "the teacher": teacher,
            "cross entropy alone": lambda model: partial(divergence, teacher=says, alpha=1.0),
        }
        objectives[WORDS] = lambda model: partial(divergence, teacher=says)
        return objectives | {name: partial(compared, inside) for name, inside in ARMS.items()}

    def less(name: str) -> str:
        apart = [value - alone for value, alone in zip(divergences[name], divergences[WORDS], strict=True)]
        spread = statistics.stdev(apart) if len(apart) > 1 else 0.0
        return "–" if name == WORDS else f"{statistics.mean(apart):+.4f} ± {spread:.4f}"

    divergences = taught(config, run, arms)
    what = f"{config.documents} documents of {config.length} tokens, {config.steps} steps. The last layers"
    what += (
        " of both are compared. The columns have KL(q ‖ student) on 64 other documents, in nats a token; last"
    )
    what += " column: mean ± standard deviation of the difference of the same seed."
    return page(run, "Losses on a teacher's layers", what, ("loss", "less words alone"), less, divergences)
