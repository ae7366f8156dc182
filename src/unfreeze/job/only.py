"""Some experts of a mixture train, all else is frozen (`training.only`): the trained part of such a run.

The frozen weights of the written checkpoint are the bytes of the one that the run started from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from unfreeze import models
from unfreeze.core.errors import ConfigError
from unfreeze.job.trained import AllWeights

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

    from unfreeze.checkpoint import Manifest
    from unfreeze.config.tables import Training
    from unfreeze.models import Decoder
    from unfreeze.parallel.plan import PlannedModel
    from unfreeze.train.balance import LossFreeBalance
    from unfreeze.train.state import State


def all_weights(training: Training, optimizer: Balancing, *, new: bool = False) -> AllWeights:
    """The trained part of a run without adapters: every weight, or the experts that training.only names.

    new: True for a model that is made of [shape].
    """
    rate = optimizer.balance_rate
    if training.only:
        return OnlyExperts(training.only, rate)
    wanted = bool(rate) and "balance_rate" in optimizer.model_fields_set
    return Balanced(wanted, indexer=training.indexer == "trained", new=new)


class Balancing(Protocol):
    """The fields of [optimizer] that concern experts."""

    @property
    def balance_rate(self) -> float: ...
    @property
    def model_fields_set(self) -> set[str]: ...


class Balanced(AllWeights):
    """Every weight. asked: True if a balance_rate was given, which needs routers with a bias."""

    def __init__(self, wanted: bool, *, indexer: bool = False, new: bool = False):
        super().__init__(indexer=indexer, new=new)
        self._asked = wanted

    def check(self, manifest: Manifest) -> None:
        """As AllWeights; also raise ConfigError for a balance_rate without a bias that it could move."""
        super().check(manifest)
        if not self._asked:
            return
        import torch

        moes = models.meta_model(models.shape(manifest.config), manifest, torch.float32).moe_layers()
        if not any(_bias(moe.gate) is not None for moe in moes.values()):
            has = "its routers have no selection bias" if moes else "it has no experts"
            raise ConfigError(
                f"optimizer.balance_rate is given, but {has}: nothing would move",
                next="leave optimizer.balance_rate out"
                + ("; in pretrain --experts.balance-loss 0.01 balances without a bias" if moes else ""),
            )


def balanced(rate: float, only: str) -> Callable[[Decoder], Sequence[LossFreeBalance]]:
    """The loss-free balancing of a run; with training.only the other experts' biases stay as they are."""

    def balance(model: Decoder) -> Sequence[LossFreeBalance]:
        from unfreeze.models.only import rows_of
        from unfreeze.train.balance import LossFreeBalance

        rows = rows_of(only, model.shape.num_experts) if only else None
        gates = [moe.gate for moe in model.moe_layers().values()]
        biased = any(_bias(gate) is not None for gate in gates)
        return (LossFreeBalance(model, rate, rows),) if biased and rate else ()

    return balance


def _bias(gate: Module) -> Tensor | None:
    """The selection bias of a router; None if it has none, as one that chooses by a table of tokens."""
    return getattr(gate, "e_score_correction_bias", None)


class OnlyExperts(AllWeights):
    """Experts that train alone, with their rows of the router; written like AllWeights.

    words  of training.only, "experts 8-15"
    rate   of the loss-free balancing, which opens experts that are closed (compress/grow.py)
    """

    def __init__(self, words: str, rate: float):
        super().__init__()
        self._words, self._rate = words, rate
        self.begins = f" of {words} alone"

    def check(self, manifest: Manifest) -> None:
        """As AllWeights; also raise ConfigError for experts that the model doesn't have."""
        from unfreeze.models.only import rows_of

        super().check(manifest)
        rows_of(self._words, models.shape(manifest.config).num_experts)
        if not manifest.tensors:
            raise ConfigError(
                f"training.only = {self._words!r} needs a trained model, but {manifest.path} has no weights",
                next="remove training.only",
            )

    def planned(self, model: PlannedModel) -> PlannedModel:
        """The model with the weights counted that train; a layer's experts get their gradient whole first."""
        from unfreeze.models.only import rows_of

        rows, depth = rows_of(self._words, model.shape.num_experts), model.shape.num_layers
        moes = model.meta.moe_layers()
        stacks = {id(moe.experts): sum(w.numel() for w in moe.experts.parameters()) for moe in moes.values()}
        each: dict[int, int] = {}  # layer -> numbers of an expert and its row of the router
        counted: set[int] = set()  # passes of a chain share experts, and may share a gate
        for key, moe in moes.items():
            own = {
                id(moe.experts): stacks[id(moe.experts)] // rows.of,
                id(moe.gate): moe.gate.weight.shape[1],
            }
            new = sum(of for part, of in own.items() if part not in counted)
            each[key % depth] = each.get(key % depth, 0) + new
            counted |= own.keys()
        sizes = replace(
            model.sizes,
            elements=len(rows) * sum(each.values()),
            last_elements=len(rows) * each.get(0, 0),
            passing=max(stacks.values()),
        )
        return replace(model, sizes=sizes)

    def attach(self, model: Decoder, *, quiet: bool = False, restored: bool = False) -> None:
        """Freeze all else. Raises ConfigError for closed experts that nothing would open."""
        from unfreeze.models.only import rows_of, train_only

        rows = rows_of(self._words, model.shape.num_experts)
        if not self._rate and any(_is_closed(model, layer, rows.slice) for layer in model.moe_layers()):
            raise ConfigError(
                f"{self._words} are closed: no token is sent to them, and optimizer.balance_rate is 0",
                next="--optimizer.balance-rate 0.02, which opens them after about 50 steps",
            )
        train_only(model, rows)

    def _write(self, state: State, manifest: Manifest, folder: Path, extra: dict[str, Path]) -> None:
        from unfreeze.checkpoint import save_checkpoint

        self._make_room(folder)
        save_checkpoint(folder, manifest.config, _tensors(state, manifest), extra=extra)


def _is_closed(model: Decoder, layer: int, rows: slice) -> bool:
    """True if every expert of `rows` has a bias so low that it is never chosen."""
    bias = model.moe_layers()[layer].gate.e_score_correction_bias
    if bias is None:
        return False
    own, others = bias.flatten()[rows], [*bias.flatten()[: rows.start], *bias.flatten()[rows.stop :]]
    return bool(others) and float(own.max()) + 1 < float(min(others))


def _tensors(state: State, manifest: Manifest) -> Iterator[tuple[str, Tensor]]:
    """Yield (name on disk, tensor) of the whole checkpoint: the base's own but for what trained."""
    from unfreeze.checkpoint.keymap import tensor_sources
    from unfreeze.checkpoint.tensors import TORCH_DTYPE, stored_tensor
    from unfreeze.models.only import divided

    model, masters = state.model, state.optimizer.masters
    disk, rules = manifest.by_model_name(), models.rules(model.shape)
    parts = dict(divided(model))
    new: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        biases = name.endswith("e_score_correction_bias")
        if not biases and name not in parts:
            continue
        part = parts.get(name)
        shape = tuple(tensor.shape) if part is None else tuple(part.whole.shape)
        for source in tensor_sources(name, shape, rules, disk):
            stored = disk[source.name]
            if part is None:
                new[source.name] = tensor.to(TORCH_DTYPE[stored.dtype])
                continue
            trained, rows = masters.get(name, tensor), part.rows
            if not source.index:  # a stack, or a router: the other rows keep their bits
                whole = stored_tensor(stored).clone()
                into = whole.mT if source.transposed else whole
                into[rows.slice] = trained.to(device="cpu", dtype=whole.dtype)
                new[source.name] = whole
            elif isinstance(expert := source.index[0], int) and rows.first <= expert < rows.last:
                own = trained[(expert - rows.first, *source.index[1:])]
                new[source.name] = (own.mT if source.transposed else own).to(TORCH_DTYPE[stored.dtype])
    for name, info in disk.items():
        yield info.name, new[name].detach() if name in new else stored_tensor(info)
