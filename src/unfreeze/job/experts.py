"""Parts of a run that concern its experts: their auxiliary loss, their random choice, and two guards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from unfreeze.core.errors import ConfigError
from unfreeze.job.source import encoded_rows
from unfreeze.job.watch.balancing import BiasWatch, UnbalancedWatch

if TYPE_CHECKING:
    from unfreeze.config.experts import Experts
    from unfreeze.data import Cursor, Source
    from unfreeze.job.setup import EncodedData, Placed, Setup
    from unfreeze.models import Decoder
    from unfreeze.models.blocks.moe import MoE
    from unfreeze.train.fit import OnStep
    from unfreeze.train.step import Objective

MakeSource = Callable[["Setup", "EncodedData", "Placed", "Cursor | None"], "Source"]


def beside(experts: Experts) -> Callable[[Decoder, Objective], Objective]:
    """Return Parts.beside: the objective with the auxiliary loss, if its weight is above 0."""

    def balanced(model: Decoder, objective: Objective) -> Objective:
        from unfreeze.objectives.balanced import Balanced

        if not experts.balance_loss:
            return objective
        return Balanced(objective, routed(model, "balance_loss"), experts.balance_loss)

    return balanced


def source(experts: Experts, encoded: MakeSource = encoded_rows) -> MakeSource:
    """Return Parts.source: the encoded rows, with the keys of random choices if experts are drawn."""

    def drawn(setup: Setup, rows: EncodedData, at: Placed, start: Cursor | None) -> Source:
        from unfreeze.data.packing.drawn import Drawn

        routed(at.model, "choice")
        batches, step = encoded(setup, rows, at, start), setup.folder.step
        return Drawn(batches, seed=setup.config.seed, temperature=experts.temperature, step=step)

    return drawn if experts.choice == "drawn" else encoded


def routed(model: Decoder, field: str) -> dict[int, dict[int, MoE]]:
    """Return layer -> its mixtures whose router chooses, by their keys.

    Raises ConfigError for a model without such a layer; `field` of [experts] asked for it.
    """
    from unfreeze.models.blocks.moe import HashMoE

    by_layer: dict[int, dict[int, MoE]] = {}
    for key, moe in model.moe_layers().items():
        if not isinstance(moe, HashMoE):
            by_layer.setdefault(key % model.shape.num_layers, {})[key] = moe
    if not by_layer:
        raise ConfigError(
            f"experts.{field} is given, but no layer of this {model.shape.family} model chooses experts",
            next=f"leave experts.{field} out",
        )
    return by_layer


def watches(balance_rate: float, experts: Experts) -> Sequence[OnStep]:
    """Return hooks that warn of a model whose experts nothing balances, and of a bias that stands still."""
    return (UnbalancedWatch(bool(experts.balance_loss)), *((BiasWatch(),) if balance_rate else ()))
