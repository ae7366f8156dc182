"""The weights of a checkpoint one matrix at a time, in float32, packed ones expanded and with ΔW added.

E experts.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from unfreeze import models
from unfreeze.checkpoint.keymap import tensor_sources
from unfreeze.checkpoint.manifest import Manifest
from unfreeze.checkpoint.tensors import stored_tensor
from unfreeze.compress.deltas import GATE, UP, Changes
from unfreeze.compress.rounding import merged
from unfreeze.compress.work import MergeWork, Weight
from unfreeze.core.errors import CheckpointError
from unfreeze.models.blocks.experts import Experts
from unfreeze.models.decoder import Decoder

Home = tuple[str, str, int | None, int | None]
"""(site, projection, expert or None for a stack, GATE, UP or None for both)"""


class Weights:
    """Reads a model's tensors by the names of its parameters."""

    def __init__(self, manifest: Manifest, model: Decoder, changes: Changes):
        self._changes = changes
        self._work = MergeWork(manifest, model, changes, "bf16")
        self._disk = manifest.by_model_name()
        rows = self._work.vocabulary  # 0, or with tokens that the adapter added
        self.shape = replace(model.shape, vocab_size=rows) if rows else model.shape
        self._dense = models.build(self.shape, dtype=torch.float32)
        self._homes: dict[Home, Weight] = {}
        for weight in self._work.weights:
            if weight.home is not None:
                place, stack = weight.home.place, weight.home.experts is not None
                expert = None if stack or not self._is_experts(place.site) else place.expert
                self._homes[place.site, place.projection, expert, place.half] = weight

    @property
    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every tensor of the model, a tied head left out."""
        tied = models.tied(self.shape)
        state = self._dense.state_dict().items()
        return {name: tuple(tensor.shape) for name, tensor in state if name not in tied}

    @property
    def stacks(self) -> dict[str, Experts]:
        """Site -> the experts there, whose matrices are read one by one."""
        return {name: module for name, module in self._dense.named_modules() if isinstance(module, Experts)}

    def disk_name(self, parameter: str) -> str:
        """The published name of a parameter that is one tensor on disk, without a release's prefix."""
        return tensor_sources(parameter, self.parameters[parameter], self._work.rules)[0].name

    def read(self, parameter: str) -> Tensor:
        """A parameter that is not a stack of experts' matrices, float32."""
        if (value := self._changes.whole.get(parameter)) is not None:
            return value.float()
        shape = self.parameters[parameter]
        sources = tensor_sources(parameter, shape, self._work.rules, self._disk)
        if (value := self._work.instead.get(sources[0].name.removesuffix(".weight"))) is not None:
            return (value.mT if sources[0].transposed else value).float()
        weight = self._homes.get((parameter.removesuffix(".weight"), "", None, None))
        if weight is not None:
            return merged(self._work, weight, self._changes, 0)
        whole = torch.empty(shape)
        aliases = {name: alias for alias, name in models.tied(self.shape).items()}
        for source in sources:
            info = self._disk.get(source.name) or self._disk.get(aliases.get(source.name, ""))
            if info is None:
                raise CheckpointError(f"{source.name} is missing", next="unfreeze inspect the checkpoint")
            stored = stored_tensor(info)
            place = whole[source.index] if source.index else whole
            place.copy_((stored.mT if source.transposed else stored).view(place.shape))
        return whole

    def expert(self, site: str, projection: str, expert: int) -> Tensor:
        """One expert's matrix [out, in], float32; gate's rows and up's as the model has them."""
        for key in ((site, projection, None, None), (site, projection, expert, None)):
            if key in self._homes:
                return merged(
                    self._work, self._homes[key], self._changes, 0 if key[2] is not None else expert
                )
        halves = [
            merged(self._work, self._homes[site, projection, expert, half], self._changes, 0)
            for half in (GATE, UP)
        ]
        owner = self.stacks[site]
        both = torch.empty(2 * halves[0].shape[0], halves[0].shape[1])
        for rows, half in zip(owner.activation.split(both, 0), halves, strict=True):
            rows.copy_(half)
        return both

    def _is_experts(self, site: str) -> bool:
        return isinstance(self._dense.get_submodule(site), Experts)
