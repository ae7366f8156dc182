"""One number for the NVFP4 matrices that a server multiplies as one: q, k and v, and gate and up.

A server reads one number for all of them (quant/nvfp4.py, FUSED); with a number each, all but one would be
scaled wrongly there, without a message. So the number is that of the largest weight of them all, as
llm-compressor computes it. Each matrix of such a group is read once more, for its largest weight.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from unfreeze.checkpoint.nested import in_model
from unfreeze.checkpoint.tensors import stored_tensor
from unfreeze.compress.quantize.formats import nearest
from unfreeze.compress.work import MergeWork, Weight
from unfreeze.models.blocks.experts import Experts
from unfreeze.quant.codec import Codec
from unfreeze.quant.nvfp4 import FUSED, Nvfp4
from unfreeze.quant.spelling import canonical

_GROUPS = {leaf: group for group in FUSED for leaf in group}


@dataclass
class OneNumber:
    """`nearest` with shared numbers. work: of a dense base."""

    work: MergeWork
    _weights: dict[str, Weight] = field(init=False)
    _largest: dict[str, Tensor] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._weights = {
            self._name(out.name): weight
            for weight in self.work.weights
            if isinstance(weight.to, Nvfp4)
            for expert in weight.experts()
            for out in self.work.outs(weight, expert)
        }

    def round(self, weight: Tensor, codec: Codec, name: str) -> dict[str, Tensor]:
        """A matrix rounded to the nearest (quantize/formats.py, Round)."""
        parent, _, leaf = self._name(name).rpartition(".")
        others = [f"{parent}.{part}" for part in _GROUPS.get(leaf, ())]
        own = [other for other in others if other in self._weights]
        if not isinstance(codec, Nvfp4) or len(own) < 2:
            return nearest(weight, codec, name)
        for other in own:
            if other not in self._largest:
                self._measure(self._weights[other])
        return nearest(weight, codec, name, codec.number(torch.stack([self._largest[n] for n in own]).amax()))

    def _name(self, name: str) -> str:
        return canonical(in_model(self.work.manifest.prefix, name))

    def _measure(self, weight: Weight) -> None:
        """The largest |w| of every matrix of a weight, without a copy of it."""
        home, stored = weight.home, stored_tensor(weight.parts[""])
        for expert in weight.experts():
            matrix = stored[expert] if home is not None and home.experts else stored
            if home is not None and home.transposed:
                matrix = matrix.t()
            for out in self.work.outs(weight, expert):
                rows = matrix
                if out.half is not None:
                    assert home is not None
                    owner = self.work.model.get_submodule(home.place.site)
                    assert isinstance(owner, Experts)
                    rows = owner.activation.split(matrix, 0)[out.half]
                ends = torch.stack(torch.aminmax(rows)).float()
                self._largest[self._name(out.name)] = (
                    ends.abs().amax().nan_to_num(0.0)
                )  # NaN is refused later
