"""Factory: makes the leaf modules of a model with one dtype, device and codec, packed where the checkpoint is packed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from unfreeze.core.errors import CheckpointError
from unfreeze.models.blocks.experts import Experts
from unfreeze.models.blocks.linear import Linear
from unfreeze.models.blocks.mlp import MLP
from unfreeze.models.blocks.norm import RMSNorm
from unfreeze.quant.codec import Codec


def nothing_packed(name: str) -> bool:
    """No module of this checkpoint is packed."""
    return False


@dataclass(frozen=True)
class Factory:
    """`packed(name)` says whether the checkpoint stores module `name` in the codec's format; `dtype` is that of the computation."""

    dtype: Any
    device: Any
    codec: Codec | None = None
    packed: Callable[[str], bool] = nothing_packed

    def codec_for(self, name: str) -> Codec | None:
        if not self.packed(name):
            return None
        if self.codec is None:
            raise CheckpointError(f"{name} is stored packed, but config.json has no quantization_config that says how")
        return self.codec

    def linear(self, name: str, in_features: int, out_features: int, *, bias: bool = False) -> Linear:
        return Linear(in_features, out_features, bias=bias, codec=self.codec_for(name), dtype=self.dtype, device=self.device)

    def norm(self, size: int, eps: float) -> RMSNorm:
        return RMSNorm(size, eps, dtype=self.dtype, device=self.device)

    def mlp(self, name: str, hidden_size: int, intermediate_size: int, *, bias: bool = False) -> MLP:
        return MLP(
            gate_proj=self.linear(f"{name}.gate_proj", hidden_size, intermediate_size, bias=bias),
            up_proj=self.linear(f"{name}.up_proj", hidden_size, intermediate_size, bias=bias),
            down_proj=self.linear(f"{name}.down_proj", intermediate_size, hidden_size, bias=bias),
        )

    def experts(self, name: str, num_experts: int, hidden_size: int, intermediate_size: int) -> Experts:
        codec = self.codec_for(f"{name}.0.gate_proj")
        return Experts(num_experts, hidden_size, intermediate_size, codec=codec, dtype=self.dtype, device=self.device)
