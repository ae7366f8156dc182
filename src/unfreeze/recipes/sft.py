"""unfreeze sft run.toml: fine-tune a checkpoint on conversations with LoRA on every linear layer, routed experts included, or in full.

With adapters the base stays as it was published: 4-bit experts are trained in 4 bits. With train = "all" every weight moves, and the result is a
checkpoint in <out>/model. Loss on the assistant's turns only (on all of a `text`).
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from unfreeze.config.lora import LoraConfig
from unfreeze.config.parse import parse
from unfreeze.config.training import TrainingConfig
from unfreeze.core.command import Common
from unfreeze.job import job
from unfreeze.job.folder import typed
from unfreeze.job.trained import Adapters, AllWeights

ALL_RATE = 2e-5


class Config(TrainingConfig):
    """Everything a fine-tuning run depends on."""

    train: Literal["adapters", "all"] = Field(
        default="adapters", description="adapters: LoRA beside the frozen base; all: every weight of an unpacked checkpoint, without adapters"
    )
    learning_rate: float = Field(
        default=2e-4, gt=0, description="peak learning rate; for train = all the default is 2e-5 (a tenth, as TRL's SFT has it)"
    )
    turns: Literal["auto", "whole", "each", "last"] = Field(
        default="auto", description="examples of a conversation: one of the whole where the chat template leaves earlier turns "
        "as they were, else one per turn of the assistant (auto); always one (whole); one per turn (each); only the last turn (last)"
    )  # fmt: skip
    reasoning: Literal["auto", "inline", "drop"] = Field(
        default="auto", description="reasoning_content: taught as the release writes it, refused where it has no form (auto); as <think>…</think> in "
        "the answer (inline); left out (drop)"
    )  # fmt: skip
    lora: LoraConfig | None = Field(default_factory=lambda: LoraConfig(), description="the adapters")

    @model_validator(mode="before")
    @classmethod
    def _as_trained(cls, fields: Any) -> Any:
        """train = "all" has no adapters and another default rate; a field of the adapters beside it is a mistake, not to be passed over."""
        if not isinstance(fields, dict):
            return fields
        if fields.get("train") != "all":
            if fields.get("lora", True) is None:
                raise ValueError('train = "adapters" needs [lora]; its defaults are an empty table')
            return fields
        if fields.get("lora") is not None:
            raise ValueError('train = "all" trains every weight and has no adapters: remove [lora] and --lora flags, or give train = "adapters"')
        return {"learning_rate": ALL_RATE, **fields, "lora": None}


def main(arguments: list[str], common: Common) -> dict[str, Any]:
    """Parse, train, report. -> run, steps, loss_first, loss_last, tokens_per_second, peak_bytes, receipt."""
    config = parse(Config, arguments, command="sft", description=__doc__ or "")
    return train(config, common, typed("sft", arguments))


def train(config: Config, common: Common, command: str = "") -> dict[str, Any]:
    """A run in the config's folder; see job.run."""
    return job.run(config, parts(config), common, command)


def parts(config: Config) -> job.Parts:
    """Conversations, cross entropy, and adapters or every weight."""
    from unfreeze.objectives.cross_entropy import cross_entropy

    return job.Parts(
        recipe="sft",
        trained=AllWeights() if config.lora is None else Adapters(config.lora, config.seed),
        objective=cross_entropy,
        start=job.open_weights,
        encoding={"turns": config.turns, "reasoning": config.reasoning},
    )
