"""Factory makes the leaf modules of a model; `build` makes a Decoder of them.

All have one dtype and device, and are packed where the checkpoint is packed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from unfreeze import models
from unfreeze.checkpoint.keymap import disk_module, disk_modules
from unfreeze.checkpoint.manifest import Manifest
from unfreeze.kernels.expert_mlp import SWIGLU, Activation
from unfreeze.models import FAMILIES
from unfreeze.models.blocks.embedding import Embedding, ScaledEmbedding
from unfreeze.models.blocks.experts import Experts, ExpertWeight
from unfreeze.models.blocks.head import Head
from unfreeze.models.blocks.linear import Linear
from unfreeze.models.blocks.mlp import MLP
from unfreeze.models.blocks.nonlinearity import GATED_SILU, Nonlinearity
from unfreeze.models.blocks.norm import RMSNorm
from unfreeze.models.decoder import Body, Decoder
from unfreeze.models.fields import check_against_files
from unfreeze.models.shape import Shape
from unfreeze.quant.codec import Codec
from unfreeze.quant.formats import recognise
from unfreeze.quant.scheme import CodecFor, nothing_packed


@dataclass(frozen=True)
class Factory:
    """`codec_for(name)` is the codec that module `name` of the checkpoint is packed in, or None.

    A name is that of the files, where experts are not stacked. `dtype` is that of the computation.
    """

    dtype: torch.dtype
    device: torch.device | str
    codec_for: CodecFor = nothing_packed

    def linear(self, name: str, in_features: int, out_features: int, *, bias: bool = False) -> Linear:
        return Linear(
            in_features,
            out_features,
            bias=bias,
            codec=self.codec_for(name),
            dtype=self.dtype,
            device=self.device,
        )

    def vector(self, size: int) -> nn.Parameter:
        """A parameter of its own, such as attention's sinks."""
        return nn.Parameter(torch.empty(size, dtype=self.dtype, device=self.device))

    def scalar(self) -> Tensor:
        """One number that no run trains: a buffer of its module."""
        return torch.empty(1, dtype=self.dtype, device=self.device)

    def norm(self, size: int, eps: float, kind: type[RMSNorm] = RMSNorm) -> RMSNorm:
        return kind(size, eps, dtype=self.dtype, device=self.device)

    def mlp(
        self,
        name: str,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool = False,
        activation: Nonlinearity = GATED_SILU,
    ) -> MLP:
        return MLP(
            activation=activation,
            gate_proj=self.linear(f"{name}.gate_proj", hidden_size, intermediate_size, bias=bias),
            up_proj=self.linear(f"{name}.up_proj", hidden_size, intermediate_size, bias=bias),
            down_proj=self.linear(f"{name}.down_proj", intermediate_size, hidden_size, bias=bias),
        )

    def experts(
        self,
        name: str,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        kind: type[Experts] = Experts,
        activation: Activation = SWIGLU,
    ) -> Experts:
        codec, down = (self.codec_for(f"{name}.{projection}") for projection in ("gate_up_proj", "down_proj"))
        made: dict[str, Any] = {"dtype": self.dtype, "device": self.device}
        experts = kind(
            num_experts, hidden_size, intermediate_size, codec=codec, activation=activation, **made
        )
        if down != codec:
            experts.down_proj = ExpertWeight(num_experts, intermediate_size, hidden_size, codec=down, **made)
        return experts

    def experts_of(self, shape: Shape, name: str, **parts: Any) -> Experts:
        """The routed experts of the mixture `name`, of the model's sizes; `parts` as in `experts`."""
        assert shape.moe is not None
        sizes = shape.moe.num_experts, shape.hidden_size, shape.moe.intermediate_size
        return self.experts(f"{name}.experts", *sizes, **parts)

    def embedding(self, shape: Shape, scale: float | None = None) -> Embedding:
        """Rows of the table, times `scale` where it is a number."""
        sizes = shape.vocab_size, shape.hidden_size
        if scale is None:
            return Embedding(*sizes, dtype=self.dtype, device=self.device)
        return ScaledEmbedding(*sizes, scale, dtype=self.dtype, device=self.device)

    def head(self, shape: Shape, factor: float = 1.0) -> Linear:
        """The output head: logits times `factor`, within shape.softcap where it is a number."""
        sizes, codec = (shape.hidden_size, shape.vocab_size), self.codec_for("lm_head")
        if factor == 1 and shape.softcap is None:
            return Linear(*sizes, codec=codec, dtype=self.dtype, device=self.device)
        return Head(
            *sizes, factor=factor, softcap=shape.softcap, codec=codec, dtype=self.dtype, device=self.device
        )


class Ends(NamedTuple):
    """What stands before and behind a model's layers."""

    embed_tokens: Embedding
    norm: RMSNorm
    lm_head: Linear


def ends(shape: Shape, make: Factory) -> Ends:
    """A table, an RMSNorm and a matrix. A family with others has a function of this name."""
    return Ends(make.embedding(shape), make.norm(shape.hidden_size, shape.rms_norm_eps), make.head(shape))


def build(
    shape: Shape,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "meta",
    codec_for: CodecFor = nothing_packed,
) -> Decoder:
    """A Decoder with uninitialised weights; on "meta" it takes no memory.

    parallel.place fills it, or initialize() draws it at random.

    `codec_for(module name)` says which modules the checkpoint stores packed, and how; they stay so.
    """
    make = Factory(dtype, device, codec_for)
    family = FAMILIES[shape.model_type]
    layers = [family.layer(shape, index, make) for index in range(shape.num_layers)]
    embed_tokens, norm, lm_head = getattr(family, "ends", ends)(shape, make)
    body = Body(embed_tokens, layers, norm)
    if shape.tied:
        lm_head.weight = body.embed_tokens.weight
    return Decoder(shape, body, lm_head)


def meta_model(shape: Shape, manifest: Manifest, dtype: torch.dtype) -> Decoder:
    """The checkpoint's Decoder without memory, packed where the checkpoint is packed.

    Raises CheckpointError where the files hold too few bytes for the sizes of config.json.
    """
    if manifest.tensors:
        check_against_files(shape, manifest)
    scheme, names, rules = manifest.scheme(), manifest.by_model_name(), models.rules(shape)

    def stored(module: str) -> Codec | None:
        found = [scheme.stored(name, names) for name in disk_modules(module, rules)] if scheme else []
        return next((codec for codec in found if codec is not None), None)

    return build(shape, dtype=dtype, device="meta", codec_for=stored)


def from_config(
    config: Mapping[str, Any], dtype: torch.dtype, device: torch.device | str = "meta"
) -> Decoder:
    """The Decoder that a release's config.json alone describes, without memory; on another device than
    "meta", with uninitialised weights.

    It is packed where its quantization_config says so.
    """
    scheme, shape = recognise(config), models.shape(config)
    rules = models.rules(shape)

    def said(module: str) -> Codec | None:
        return None if scheme is None else scheme.codec_for(disk_module(module, rules))

    return build(shape, dtype=dtype, device=device, codec_for=said)
