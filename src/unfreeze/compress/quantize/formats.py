"""The formats that can be written, the modules that are packed, and the rounding of one matrix.

    int4    compressed-tensors pack-quantized, groups of 32, as Kimi-K2 publishes its experts
    int8    compressed-tensors pack-quantized, a scale for each row
    fp8     compressed-tensors float-quantized, e4m3, a scale for each row
    mxfp4   compressed-tensors mxfp4-pack-quantized; of gpt-oss its own layout
    nvfp4   compressed-tensors nvfp4-pack-quantized
    nf4     bitsandbytes NF4 with double quantization, blocks of 64

Weights alone are rounded, no activations. Shapes: W [out, in] in y = x Wᵀ.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from unfreeze.quant.bitsandbytes import Bits4
from unfreeze.quant.codec import Codec
from unfreeze.quant.fp8_scaled import Fp8Scaled
from unfreeze.quant.int4 import Int4
from unfreeze.quant.integers import ROW, Integers
from unfreeze.quant.mxfp4 import Mxfp4
from unfreeze.quant.nvfp4 import Nvfp4

if TYPE_CHECKING:
    from torch import Tensor

KIMI = Int4(32)
"""The format of `int4`: Kimi-K2-Thinking's."""
FORMATS: dict[str, Codec] = {
    "int4": KIMI,
    "int8": Integers(8, ROW),
    "fp8": Fp8Scaled(scale_dtype="BF16"),
    "mxfp4": Mxfp4(),
    "nvfp4": Nvfp4(),
    "nf4": Bits4(),
}
MODULES = ("experts", "all-linear")
LEFT = frozenset(("lm_head", "router", "embeddings", "norms", "indexer", "hyper_connections"))
"""Groups (models/groups.py) that all-linear leaves as they are."""

Round = Callable[["Tensor", Codec, str], "dict[str, Tensor]"]
"""(W float32 [out, in], codec, name) -> suffix -> part, as `codec.parts` has them.

name: of the matrix's module on disk, without a release's prefix: "model.layers.0.mlp.experts.3.gate_proj".
Gate and up of an expert come one after the other. Of stacked experts on disk the number is at the end:
"model.layers.0.mlp.experts.gate_up_proj[3]".
"""


def chosen(group: str, modules: Collection[str]) -> bool:
    """True if a linear layer or expert of this group is packed. modules: of MODULES, or names of groups."""
    return group in modules or ("all-linear" in modules and group not in LEFT)


def nearest(weight: Tensor, codec: Codec, name: str) -> dict[str, Tensor]:
    """Round to nearest: the codec's own scales, in their dtype on disk, and for each weight the nearest code.

    Computed in float32. Where a scale is rounded to its dtype, the codes are those of the rounded scale.
    Raises CheckpointError for a weight that is not finite, ConfigError for a shape that the format lacks.
    """
    import torch

    from unfreeze.checkpoint.tensors import TORCH_DTYPE
    from unfreeze.quant.kept import refitted

    parts = codec.parts(*weight.shape)
    if isinstance(codec, Bits4):  # the offset of double quantization is new
        return codec.quantize(weight)
    like = {suffix: torch.empty(0, dtype=TORCH_DTYPE[dtype]) for suffix, (dtype, _) in parts.items()}
    return refitted(codec, weight, like)
