"""Factory makes the leaf modules of a model; `build` makes a Decoder of them.

All have one dtype and device, and are packed where the checkpoint is packed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from unfreeze import models
from unfreeze.checkpoint.keymap import disk_module
from unfreeze.checkpoint.manifest import Manifest
from unfreeze.kernels.expert_mlp import SWIGLU, Activation
from unfreeze.models import FAMILIES
from unfreeze.models.blocks.experts import Experts
from unfreeze.models.blocks.linear import Linear
from unfreeze.models.blocks.mlp import MLP
from unfreeze.models.blocks.norm import RMSNorm
from unfreeze.models.decoder import Body, Decoder, Embedding
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

    def norm(self, size: int, eps: float) -> RMSNorm:
        return RMSNorm(size, eps, dtype=self.dtype, device=self.device)

    def mlp(self, name: str, hidden_size: int, intermediate_size: int, *, bias: bool = False) -> MLP:
        return MLP(
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
        codec = self.codec_for(f"{name}.gate_up_proj")
        return kind(
            num_experts,
            hidden_size,
            intermediate_size,
            codec=codec,
            dtype=self.dtype,
            device=self.device,
            activation=activation,
        )

    def experts_of(self, shape: Shape, name: str, **parts: Any) -> Experts:
        """The routed experts of the mixture `name`, of the model's sizes; `parts` as in `experts`."""
        assert shape.moe is not None
        sizes = shape.moe.num_experts, shape.hidden_size, shape.moe.intermediate_size
        return self.experts(f"{name}.experts", *sizes, **parts)


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
    layers = [FAMILIES[shape.model_type].layer(shape, index, make) for index in range(shape.num_layers)]
    body = Body(
        Embedding(shape.vocab_size, shape.hidden_size, dtype=dtype, device=device),
        layers,
        make.norm(shape.hidden_size, shape.rms_norm_eps),
    )
    lm_head = Linear(
        shape.hidden_size, shape.vocab_size, codec=make.codec_for("lm_head"), dtype=dtype, device=device
    )
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
        return None if scheme is None else scheme.stored(disk_module(module, rules), names)

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
