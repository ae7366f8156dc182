"""Factory makes the leaf modules of a model; `build` makes a Decoder of them.

All have one dtype, device and codec, and are packed where the checkpoint is packed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from unfreeze import models
from unfreeze.checkpoint.keymap import disk_module
from unfreeze.checkpoint.manifest import Manifest
from unfreeze.core.errors import CheckpointError
from unfreeze.models import FAMILIES
from unfreeze.models.blocks.experts import Experts
from unfreeze.models.blocks.linear import Linear
from unfreeze.models.blocks.mlp import MLP
from unfreeze.models.blocks.norm import RMSNorm
from unfreeze.models.decoder import Body, Decoder, Embedding
from unfreeze.models.fields import check_against_files
from unfreeze.models.shape import Shape
from unfreeze.quant.codec import Codec
from unfreeze.quant.formats import is_ignored, is_packed, recognise


def nothing_packed(name: str) -> bool:
    """No module of this checkpoint is packed."""
    return False


@dataclass(frozen=True)
class Factory:
    """`packed(name)` says whether the checkpoint stores module `name` in the codec's format.

    `dtype` is that of the computation.
    """

    dtype: torch.dtype
    device: torch.device | str
    codec: Codec | None = None
    packed: Callable[[str], bool] = nothing_packed

    def codec_for(self, name: str) -> Codec | None:
        if not self.packed(name):
            return None
        if self.codec is None:
            raise CheckpointError(
                f"{name} is stored packed, but config.json has no quantization_config that says how"
            )
        return self.codec

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

    def experts(self, name: str, num_experts: int, hidden_size: int, intermediate_size: int) -> Experts:
        codec = self.codec_for(f"{name}.gate_up_proj")
        return Experts(
            num_experts, hidden_size, intermediate_size, codec=codec, dtype=self.dtype, device=self.device
        )


def build(
    shape: Shape,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "meta",
    codec: Codec | None = None,
    packed: Callable[[str], bool] = nothing_packed,
) -> Decoder:
    """A Decoder with uninitialised weights; on "meta" it takes no memory.

    parallel.place fills it, or initialize() draws it at random.

    `packed(module name)` says which modules the checkpoint stores in `codec`'s format; they stay so.
    """
    make = Factory(dtype, device, codec, packed)
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
    codec = manifest.codec()
    names, rules = manifest.by_model_name(), models.rules(shape)

    def packed(module: str) -> bool:
        return codec is not None and is_packed(disk_module(module, rules), names, codec)

    return build(shape, dtype=dtype, device="meta", codec=codec, packed=packed)


def from_config(
    config: Mapping[str, Any], dtype: torch.dtype, device: torch.device | str = "meta"
) -> Decoder:
    """The Decoder that a release's config.json alone describes, without memory; on another device than
    "meta", with uninitialised weights.

    It is packed where its quantization_config says so.
    """
    found, shape = recognise(config), models.shape(config)
    codec, ignore = found if found is not None else (None, [])
    rules = models.rules(shape)

    def packed(module: str) -> bool:
        return codec is not None and not is_ignored(disk_module(module, rules), ignore)

    return build(shape, dtype=dtype, device=device, codec=codec, packed=packed)
