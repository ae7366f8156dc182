"""Rewards of held-out prompts for `unfreeze merge`: base, base with adapter, merged checkpoint.

Prompts, draws and reward are those of the run: the same seeds for each of the three models, so the gain has a
standard error, paired by prompt.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from unfreeze.commands.merge_losses import no_room_for, open_base
from unfreeze.commands.merge_rows import HeldoutRows
from unfreeze.config.grpo import Grading, Rollout
from unfreeze.core.errors import ConfigError, UserError
from unfreeze.job.merge_aware import compute_as_trained

if TYPE_CHECKING:
    from pydantic import BaseModel

    from unfreeze.checkpoint import Manifest
    from unfreeze.data import Examples
    from unfreeze.evaluate.gain import Gain
    from unfreeze.evaluate.rewarded import Rewarded
    from unfreeze.models import Decoder

    Table = TypeVar("Table", bound=BaseModel)


@dataclass(frozen=True)
class Recorded:
    """Fields of a run's record that its rewards depend on."""

    reward: str
    env: str
    agent: str
    seed: int
    rollout: Rollout
    grading: Grading

    @classmethod
    def of(cls, resolved: dict[str, Any]) -> Recorded:
        """Read resolved_config.json."""

        def table(kind: type[Table], name: str) -> Table:
            fields = (f"{name}.{field}" for field in kind.model_fields)
            return kind(**{field.partition(".")[2]: resolved[field] for field in fields if field in resolved})

        reward, env, agent = (str(resolved.get(name) or "") for name in ("reward", "env", "agent"))
        seed, rollout = int(resolved.get("seed") or 0), table(Rollout, "rollout")
        return cls(reward, env, agent, seed, rollout, table(Grading, "grading"))


def reward_gain(
    base: Manifest, adapter: Path, merged: Path, examples: Examples, rows: HeldoutRows
) -> Gain | str:
    """Measure the three mean rewards in float32, one model in memory at a time.

    -> a reason if the reward has changed or cannot be computed.
    """
    from unfreeze.adapters import load_adapter
    from unfreeze.checkpoint import open_checkpoint
    from unfreeze.evaluate.gain import RewardGain, error_of
    from unfreeze.generate.open import open_model

    written = open_checkpoint(merged)
    if no_room := no_room_for(base) or no_room_for(written):
        return no_room
    try:
        judge = HeldOutReward(Recorded.of(rows.resolved), base, examples, rows)
        model = open_base(base, adapter)
        without = judge(model)
        load_adapter(model, adapter)
        compute_as_trained(model, base, adapter)
        with_adapter = judge(model)
        del model
        gc.collect()
        after = judge(open_model(written, as_stored=True))
    except UserError as error:
        return error.message
    gains: Sequence[float] = (with_adapter.mean_R - without.mean_R).tolist()
    return RewardGain(
        -without.loss,
        -with_adapter.loss,
        -after.loss,
        with_adapter.tokens,
        len(gains),
        error_of(gains, [1.0] * len(gains)) if len(gains) > 1 else 0.0,
    )


class HeldOutReward:
    """The run's reward of a model's answers to its held-out prompts.

    Raises ConfigError if the code is gone, or is not the run's.
    """

    def __init__(self, config: Recorded, base: Manifest, examples: Examples, rows: HeldoutRows):
        from unfreeze.job.reward_code import RewardCode
        from unfreeze.rollout.prompts import Rows

        code = RewardCode(config)
        if code.judge:
            raise ConfigError(
                "its reward is a judge, which would be paid again", next="unfreeze grpo measures it"
            )
        for field, digest in code.digests.items():
            if (rows.cursor or {}).get(field, digest) != digest:
                changed = f"{getattr(config, field)} has changed since the run"
                raise ConfigError(changed, next="restore it")
        self.config, self.examples = config, examples
        self.tokenizer, self._longest = rows.tokenizer(base), rows.longest
        self._rows = Rows([str(path) for path in rows.paths(_quiet)], rows.columns)

    def __call__(self, model: Decoder) -> Rewarded:
        """Answer and grade all prompts, in processes that end with the call."""
        from unfreeze.evaluate.rewarded import Asking
        from unfreeze.generate.model import Model
        from unfreeze.job.reward_code import RewardCode, measured
        from unfreeze.parallel.processes.collectives import ALONE
        from unfreeze.rollout.rollouts import Settings

        config, rollout = self.config, self.config.rollout
        settings = Settings(
            rollout.prompts_per_step,
            rollout.answers,
            rollout.max_new_tokens,
            temperature=rollout.temperature,
            at_once=rollout.at_once or rollout.prompts_per_step * rollout.answers,
        )
        engine = Model(model.eval().requires_grad_(False), self.tokenizer).engine
        window = self._longest(model.shape.max_positions)
        code = RewardCode(config)
        try:
            code.start(self.tokenizer, _quiet)
            code.check(self._rows)
            how = code.answering(
                engine, self.tokenizer, settings, code.grade, ALONE, window=window, say=_quiet
            )
            asking = Asking(rollout.held_out_answers, config.seed, config.grading.failing)
            return measured(how, list(self.examples), self._rows.of, asking, ALONE)
        finally:
            code.close()


def _quiet(line: str) -> None:
    """Say nothing: the run's start has the same lines."""
