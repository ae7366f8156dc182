"""unfreeze grpo --model M --data F --reward my.py: train a model on rewards of its own answers.

Each step samples a group of answers to some prompts, grades them with a Python function, and makes answers
better than their group likelier. The sampler is the model that trains, on the same packed weights. Columns of
a row go to the function by keyword. `unfreeze reward show my.py` shows rewards before any training.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from unfreeze.config.grpo import Config
from unfreeze.config.parse import parse
from unfreeze.core.command import Common
from unfreeze.core.metrics import OF_POLICY
from unfreeze.job import job
from unfreeze.job.end.folder import typed
from unfreeze.job.parts import Parts
from unfreeze.job.planning.residency import refuse_answers
from unfreeze.job.rewarded import Rewarding, lines_of
from unfreeze.recipes import sft

if TYPE_CHECKING:
    from unfreeze.job.data import Encoding
    from unfreeze.job.job import Job
    from unfreeze.train.step import Judge


def main(arguments: list[str], common: Common) -> dict[str, Any]:
    """Parse, train, report; return the same as sft."""
    config = parse(Config, arguments, command="grpo", description=__doc__ or "")
    return train(config, common, typed("grpo", arguments))


def train(config: Config, common: Common, command: str = "") -> dict[str, Any]:
    """Run in the config's folder; see job.run."""
    return job.run(config, parts(config), common, command)


def parts(config: Config) -> Parts:
    """Return sft's Parts with answers that the model samples, and the loss of their rewards."""
    same, rewarding = sft.parts(config), Rewarding(config)
    return replace(
        same,
        recipe="grpo",
        objective=rewarding.objective,
        second=rewarding.second(),
        encoding=of_prompts(same.encoding, config.rollout.max_new_tokens, bool(config.env or config.agent)),
        rows_check=rewarding.check,
        close=rewarding.close,
        interrupt=rewarding.interrupt,
        on_step=(*same.on_step, rewarding.watch_gap),
        source=rewarding.source,
        kept=rewarding.kept,
        heldout=rewarding.heldout,
        metrics=OF_POLICY,
        judge=_any_loss,
        answers=rewarding.answers,
        plan_check=refuse_answers,
        start_lines=lines_of(rewarding.preset, config, rewarding.judge),
    )


def of_prompts(encoding: Encoding, room: int, by_columns: bool = False) -> Encoding:
    """Return the encoding of rows whose answers are sampled. room: tokens of the longest.

    by_columns: an environment or agent makes the task of a row's columns, so prompts may be equal
    """
    return {**encoding, "answers": "asked", "room": room, "by_columns": by_columns}


def _any_loss(job: Job) -> Judge:
    """A policy's loss has no usual level, so no step is refused for it."""
    from unfreeze.train.step import accept

    return accept
