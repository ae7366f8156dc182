"""One number for the NVFP4 matrices that a server multiplies as one: q, k and v, and gate and up.

A server reads one number for all of them (quant/nvfp4.py, FUSED); with a number each, all but one would be
scaled wrongly there, without a message. So the number is that of the largest weight of them all, as
llm-compressor computes it. Each matrix of such a group is read once more, for its largest weight.

A merge may give one of them a number of its own: `parted` says which.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from unfreeze.checkpoint import open_checkpoint
from unfreeze.checkpoint.nested import in_model
from unfreeze.checkpoint.tensors import stored_tensor
from unfreeze.compress.quantize.formats import nearest
from unfreeze.compress.rounding import Row
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


def parted(work: MergeWork, rows: Sequence[Row], out: Path) -> tuple[str, str] | None:
    """Two modules that had one number in the base and have two in the merged folder `out`; None: no such two.

    rows: of the merge. A server multiplies the two in one product, with one number.
    """
    changed = {row.module: row.numbers for row in rows if row.numbers}
    if not changed:
        return None
    tensors = open_checkpoint(out).tensors
    stored = {
        weight.name: tensors[weight.parts[weight.codec.names.whole].name]
        for weight in work.weights
        if isinstance(weight.codec, Nvfp4)
    }
    for name, (old, new) in changed.items():
        parent, _, leaf = name.rpartition(".")
        for other in (f"{parent}.{part}" for part in _GROUPS.get(leaf, ()) if part != leaf):
            if other not in stored:
                continue
            before, after = changed.get(other) or [float(stored_tensor(stored[other]))] * 2
            if before == old and after != new:
                return name, other
    return None
