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

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from unfreeze.core.errors import ConfigError
from unfreeze.quant.bitsandbytes import Bits4
from unfreeze.quant.codec import Codec, Part, finite, texted
from unfreeze.quant.fp8_scaled import Fp8Scaled
from unfreeze.quant.int4 import Int4
from unfreeze.quant.integers import ROW, Integers
from unfreeze.quant.kept import refitted
from unfreeze.quant.mxfp4 import BLOCKS, Mxfp4
from unfreeze.quant.nvfp4 import Nvfp4
from unfreeze.quant.requantize import below, rows_at_once

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
MODULES = ("experts", "all-linear", "lm_head")
LEFT = frozenset(("lm_head", "router", "embeddings", "norms", "indexer", "hyper_connections"))
"""Groups (models/groups.py) that all-linear leaves as they are."""

Round = Callable[["Tensor", Codec, str], "dict[str, Tensor]"]
"""(W float32 [out, in], codec, name) -> suffix -> part, as `codec.parts` has them.

name: of the matrix's module on disk, without a release's prefix: "model.layers.0.mlp.experts.3.gate_proj".
Gate and up of an expert come one after the other. Of stacked experts on disk the number is at the end:
"model.layers.0.mlp.experts.gate_up_proj[3]".
"""


class Scales(Protocol):
    """Scales of matrices' inputs, of which the weights in front take the inverse (calibrate/folds.py)."""

    def unscaled(self, weight: Tensor, name: str) -> Tensor:
        """A rounded matrix, name as in Round, as it compares with the base's."""
        ...

    def change(self, name: str) -> Callable[[Tensor], Tensor] | None:
        """The change of a tensor on disk that is not quantized; None if it stays as it is."""
        ...


def nearest(weight: Tensor, codec: Codec, name: str, whole: Tensor | None = None) -> dict[str, Tensor]:
    """Round to nearest: the codec's own scales, in their dtype on disk, and for each weight the nearest code.

    whole: the number of an NVFP4 matrix that shares it with others (fused.py); None: its own.

    Computed in float32, some rows at a time where rows are independent. Where a scale is rounded to its
    dtype, the codes are those of the rounded scale. Raises CheckpointError for a weight that is not finite,
    ConfigError for a shape that the format lacks.
    """
    finite(weight)
    if isinstance(codec, Nvfp4) and whole is not None:
        return codec.quantize(weight, whole)
    parts = codec.parts(*weight.shape)
    step = rows_at_once(codec, *weight.shape)
    blocks = [_nearest(rows, codec, parts) for rows in weight.split(step)]
    return {suffix: below([block[suffix] for block in blocks]) for suffix in blocks[0]}


def _nearest(weight: Tensor, codec: Codec, parts: Mapping[str, Part]) -> dict[str, Tensor]:
    """`nearest` in one piece. parts: for the scales' dtypes."""
    import torch

    from unfreeze.checkpoint.tensors import TORCH_DTYPE

    if isinstance(codec, Bits4):  # the offset of double quantization is new
        return codec.quantize(weight)
    if isinstance(codec, Mxfp4) and not codec.names.blocked:  # compressed-tensors gives -0.0 the code of 0.0
        weight = weight + 0.0
    like = {suffix: torch.empty(0, dtype=TORCH_DTYPE[dtype]) for suffix, (dtype, _) in parts.items()}
    return refitted(codec, weight, like)


@dataclass(frozen=True)
class Packing:
    """A wish: the codec, the modules that get it, and the way to round.

    modules  of MODULES: "all-linear" is every group but LEFT, "experts" the routed ones
    scales   folded into other weights; None: none
    """

    codec: Codec
    modules: Collection[str] = ("all-linear",)
    round: Round = nearest
    scales: Scales | None = None

    def chooses(self, group: str) -> bool:
        """True if a linear layer or expert of this group is packed."""
        return group in self.modules or ("all-linear" in self.modules and group not in LEFT)


def holds(codec: Codec, rows: int, columns: int) -> bool:
    """True if the format has parts for an [out, in] matrix: a group must divide its width."""
    try:
        codec.parts(rows, columns)
    except ConfigError:
        return False
    return True


def splits(codec: Codec, model_type: str) -> bool:
    """True if experts of a family that publishes them stacked are written one by one, as quantizers do.

    gpt-oss is published so in bitsandbytes' 4 bits alone.
    """
    return model_type != "gpt_oss" or isinstance(codec, Bits4)


def fused(codec: Codec, model_type: str) -> Codec:
    """The codec of experts that are one tensor on disk. Raises ConfigError if the format has no such layout.

    Only MXFP4 of gpt-oss has one.
    """
    if isinstance(codec, Mxfp4) and model_type == "gpt_oss":
        return Mxfp4(BLOCKS)
    name = next((name for name, known in FORMATS.items() if known == codec), codec.name)
    raise ConfigError(
        f"{name.upper()} needs a matrix per expert; {model_type} has them stacked",
        next="--to mxfp4, as gpt-oss is published" if model_type == "gpt_oss" else "another model",
    )


def stored_parts(codec: Codec, rows: int, columns: int) -> dict[str, Part]:
    """suffix -> (dtype, shape) of everything that is on disk for one [out, in] matrix."""
    if texted(codec):
        return codec.stored_parts(rows, columns)
    extras = codec.disk_extras(rows, columns)
    return codec.parts(rows, columns) | {suffix: ("I32", (len(n),)) for suffix, n in extras.items()}


def stored_tensors(codec: Codec, parts: Mapping[str, Tensor], rows: int, columns: int) -> dict[str, Tensor]:
    """suffix -> tensor on disk, for the parts of one [out, in] matrix."""
    import torch

    if texted(codec):
        return codec.stored_tensors(parts)
    extras = codec.disk_extras(rows, columns)
    return {**parts, **{suffix: torch.tensor(n, dtype=torch.int32) for suffix, n in extras.items()}}
