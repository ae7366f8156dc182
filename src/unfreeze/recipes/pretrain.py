"""unfreeze pretrain run.toml: train all weights on text, from random weights or from a checkpoint.

For random weights give [shape] and a tokenizer, or a folder with config.json and a tokenizer. `--help parts`
lists the attentions and norms that can take the place of a family's own. The loss counts every token. The
result is written to <out>/model in the format its config.json declares: with a quantization_config, the
modules it names are rounded to INT4 at the end, as Kimi-K2's are.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from unfreeze.config.parse import parse
from unfreeze.config.pretrain import Config
from unfreeze.core.command import Common
from unfreeze.job import job
from unfreeze.job.end.folder import typed
from unfreeze.job.only import all_weights, balanced
from unfreeze.job.opening.new import new_model
from unfreeze.job.parts import Parts
from unfreeze.job.source import encoded_rows, growing_rows
from unfreeze.job.watch.baselines import measure_baselines

if TYPE_CHECKING:
    from unfreeze.checkpoint import Manifest


def main(arguments: list[str], common: Common) -> dict[str, Any]:
    """Parse, train, save.

    Return run, model, steps, loss_first, loss_last, tokens_per_second, peak_bytes, receipt.
    """
    config = parse(
        Config, arguments, command="pretrain", description=__doc__ or "", topics={"parts": _parts_page}
    )
    return train(config, common, typed("pretrain", arguments))


def _parts_page() -> str:
    """Return the page of `--help parts`."""
    from unfreeze.models.parts.listing import text

    return text()


def train(config: Config, common: Common, command: str = "") -> dict[str, Any]:
    """Run in the config's folder; see job.run."""
    return job.run(config, parts(config), common, command)


def parts(config: Config) -> Parts:
    """Return the Parts of pretraining: loss on every token, all weights trained, experts balanced."""
    from unfreeze.job.experts import beside, source, watches
    from unfreeze.objectives.cross_entropy import cross_entropy

    stages, rate, new = config.data.stages, config.optimizer.balance_rate, bool(config.shape.family)
    rows = partial(growing_rows, stages) if stages else encoded_rows

    def start(model: str, common: Common) -> Manifest:
        return new_model(config, model) if new else job.open_start(model, common)

    return Parts(
        recipe="pretrain",
        trained=all_weights(config.training, rate, new=new),
        objective=cross_entropy,
        start=start,
        new=new,
        encoding={"supervise": "all"},
        beside=beside(config.experts),
        after_update=balanced(rate, config.training.only),
        source=source(config.experts, rows),
        start_lines=[_growing(config)] if stages else [],
        on_step=watches(rate, config.experts),
        before=(measure_baselines,),
        chat=False,
    )


def _growing(config: Config) -> str:
    """Return the start line of data.sequence_lengths."""
    stages = [f"{length:,} tokens for {share:.0%} of the steps" for length, share in config.data.stages]
    return f"documents of up to {', then '.join(stages)}, then {config.data.sequence_length:,}"
