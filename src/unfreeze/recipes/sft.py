"""unfreeze sft run.toml: fine-tune a checkpoint on conversations, with LoRA or in full.

LoRA is added to every linear layer, including routed experts. The base stays as published: 4-bit experts are
trained in 4 bits. With train = "all" every weight is trained, and the result is a checkpoint in <out>/model.
The loss counts only the assistant's turns, and all of a `text` row.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from unfreeze.config.adapter import base_of
from unfreeze.config.parse import parse
from unfreeze.config.sft import Config
from unfreeze.core.command import Common
from unfreeze.core.errors import CheckpointError
from unfreeze.job import job
from unfreeze.job.end.folder import typed
from unfreeze.job.only import all_weights, balanced
from unfreeze.job.parts import Parts
from unfreeze.job.trained import Adapters, Continued, Trained
from unfreeze.job.watch.balancing import BiasWatch

if TYPE_CHECKING:
    from unfreeze.checkpoint import Manifest


def main(arguments: list[str], common: Common) -> dict[str, Any]:
    """Parse, train, report.

    Return run, steps, loss_first, loss_last, tokens_per_second, peak_bytes, receipt.
    """
    config = parse(Config, arguments, command="sft", description=__doc__ or "")
    return train(config, common, typed("sft", arguments))


def train(config: Config, common: Common, command: str = "") -> dict[str, Any]:
    """Run in the config's folder; see job.run."""
    return job.run(config, parts(config), common, command)


def parts(config: Config) -> Parts:
    """Return the Parts of fine-tuning: conversations, cross entropy, and adapters or all weights."""
    from unfreeze.objectives.cross_entropy import cross_entropy

    start = job.open_weights if not config.adapter else partial(_base_weights, config.adapter)
    return Parts(
        recipe="sft",
        trained=_trained(config),
        objective=cross_entropy,
        after_update=balanced(config.optimizer.balance_rate, config.training.only),
        start=start if config.quantize is None else partial(_packed, start, config),
        encoding={"turns": config.data.turns, "reasoning": config.data.reasoning},
        on_step=(BiasWatch(),) if config.optimizer.balance_rate else (),
    )


def _base_weights(adapter: str, model: str, common: Common) -> Manifest:
    """Load base weights like job.open_weights; name the adapter's base if it is missing."""
    try:
        return job.open_weights(model, common)
    except CheckpointError as error:
        if model != base_of(adapter):
            raise
        raise CheckpointError(
            f"{adapter} is an adapter of {model}: {error.message}",
            next=f"if the base is elsewhere: --model DIR; else: {error.next}",
        ) from error


def _packed(start: Callable[[str, Common], Manifest], config: Config, model: str, common: Common) -> Manifest:
    """Open the starting model as one that is packed while it is loaded."""
    from unfreeze.compress.quantize.onload import packed_on_load

    assert config.quantize is not None
    return packed_on_load(start(model, common), config.quantize, config.quantize_modules)


def _trained(config: Config) -> Trained:
    if config.lora is None:
        return all_weights(config.training, config.optimizer)
    if config.adapter:
        return Continued(config.lora, config.seed, config.adapter)
    return Adapters(config.lora, config.seed)
