"""unfreeze pretrain run.toml: train all weights on text, from random weights or from a checkpoint.

For random weights give [shape] and a tokenizer, or a folder with config.json and a tokenizer. The loss counts
every token. The result is written to <out>/model in the format its config.json declares: with a
quantization_config, the modules it names are rounded to INT4 at the end, as Kimi-K2's are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from unfreeze.config.parse import parse
from unfreeze.config.pretrain import Config
from unfreeze.core.command import Common
from unfreeze.job import job
from unfreeze.job.end.folder import typed
from unfreeze.job.opening.new import new_model
from unfreeze.job.parts import Parts
from unfreeze.job.trained import AllWeights
from unfreeze.job.watch.baselines import measure_baselines

if TYPE_CHECKING:
    from unfreeze.checkpoint import Manifest
    from unfreeze.models import Decoder
    from unfreeze.train.balance import LossFreeBalance


def main(arguments: list[str], common: Common) -> dict[str, Any]:
    """Parse, train, save.

    Return run, model, steps, loss_first, loss_last, tokens_per_second, peak_bytes, receipt.
    """
    config = parse(Config, arguments, command="pretrain", description=__doc__ or "")
    return train(config, common, typed("pretrain", arguments))


def train(config: Config, common: Common, command: str = "") -> dict[str, Any]:
    """Run in the config's folder; see job.run."""
    return job.run(config, parts(config), common, command)


def parts(config: Config) -> Parts:
    """Return the Parts of pretraining: loss on every token, all weights trained, experts balanced."""
    from unfreeze.objectives.cross_entropy import cross_entropy

    rate = config.optimizer.balance_rate

    def balance(model: Decoder) -> Sequence[LossFreeBalance]:
        from unfreeze.train.balance import LossFreeBalance

        gates = [moe.gate for moe in model.moe_layers().values()]
        biased = any(getattr(gate, "e_score_correction_bias", None) is not None for gate in gates)
        return (LossFreeBalance(model, rate),) if biased and rate else ()

    def start(model: str, common: Common) -> Manifest:
        return new_model(config, model) if config.shape.family else job.open_start(model, common)

    return Parts(
        recipe="pretrain",
        trained=AllWeights(indexer=config.training.indexer == "trained", new=bool(config.shape.family)),
        objective=cross_entropy,
        start=start,
        new=bool(config.shape.family),
        encoding={"supervise": "all"},
        after_update=balance,
        before=(measure_baselines,),
        chat=False,
    )
