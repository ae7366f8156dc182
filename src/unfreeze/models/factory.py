"""Factory makes the leaf modules of a model; `build` assembles them into a Decoder.

All share one dtype and device, and are packed where the checkpoint is packed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, overload

import torch
from torch import Tensor, nn

from unfreeze import models
from unfreeze.checkpoint.keymap import disk_module, disk_modules
from unfreeze.checkpoint.manifest import Manifest
from unfreeze.checkpoint.tensors import TORCH_DTYPE
from unfreeze.kernels.expert_mlp import SWIGLU, Activation
from unfreeze.models import FAMILIES
from unfreeze.models.blocks.embedding import Embedding, ScaledEmbedding
from unfreeze.models.blocks.experts import Experts, ExpertWeight
from unfreeze.models.blocks.head import Head
from unfreeze.models.blocks.linear import Linear
from unfreeze.models.blocks.mamba import Step
from unfreeze.models.blocks.mlp import MLP
from unfreeze.models.blocks.nonlinearity import GATED_SILU, Nonlinearity
from unfreeze.models.blocks.norm import RMSNorm
from unfreeze.models.blocks.recurrent import ChannelDecay, Decay, ShortConv
from unfreeze.models.blocks.routers import Router, RoutingRule
from unfreeze.models.blocks.streams import HyperConnection
from unfreeze.models.decoder import Body, Decoder
from unfreeze.models.fields import check_against_files
from unfreeze.models.parts import assembled
from unfreeze.models.publish import declared_dtype
from unfreeze.models.shape import Shape
from unfreeze.quant.codec import Codec
from unfreeze.quant.formats import recognise
from unfreeze.quant.scheme import CodecFor, nothing_packed

Norm = TypeVar("Norm", bound=RMSNorm)
HeldFor = Callable[[str], torch.dtype | None]
"""Name of a module on disk -> the dtype its frozen matrix is held in; None: the computation's."""


def as_computed(module: str) -> torch.dtype | None:
    """Every weight is held in the dtype of the computation."""
    return None


@dataclass(frozen=True)
class Factory:
    """Makes modules. `codec_for(name)` is the codec of the checkpoint's module `name`, or None.

    A name is that of the files, in which experts are not stacked. `dtype` is that of the computation.
    `held_for(name)` is the dtype that a frozen matrix is held in if it is narrower; None: dtype.
    """

    dtype: torch.dtype
    device: torch.device | str
    codec_for: CodecFor = nothing_packed
    held_for: HeldFor = as_computed

    def linear(
        self,
        name: str,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        kind: type[Linear] = Linear,
    ) -> Linear:
        return kind(
            in_features,
            out_features,
            bias=bias,
            codec=self.codec_for(name),
            dtype=self.dtype,
            device=self.device,
            held=self.held_for(name),
        )

    def vector(self, size: int) -> nn.Parameter:
        """A parameter outside any module, such as attention's sinks."""
        return nn.Parameter(torch.empty(size, dtype=self.dtype, device=self.device))

    def scalar(self) -> Tensor:
        """One number that is never trained: a buffer of its module."""
        return torch.empty(1, dtype=self.dtype, device=self.device)

    @overload
    def norm(self, size: int, eps: float) -> RMSNorm: ...
    @overload
    def norm(self, size: int, eps: float, kind: type[Norm]) -> Norm: ...
    def norm(self, size: int, eps: float, kind: type[RMSNorm] = RMSNorm) -> RMSNorm:
        """A norm; `kind` is its class."""
        return kind(size, eps, dtype=self.dtype, device=self.device)

    def short_conv(self, channels: int, taps: int, *, silu: bool, bias: bool = False) -> ShortConv:
        return ShortConv(channels, taps, silu=silu, bias=bias, dtype=self.dtype, device=self.device)

    def decay(self, heads: int) -> Decay:
        """Its parameters are in float32 whatever the computation's dtype."""
        return Decay(heads, device=self.device)

    def channel_decay(self, heads: int, width: int) -> ChannelDecay:
        """As `decay`, with a number per head and key channel."""
        return ChannelDecay(heads, width, device=self.device)

    def hyper_connection(self, shape: Shape) -> HyperConnection:
        """Its parameters are in float32 whatever the computation's dtype."""
        config = shape.config
        iterations, eps = int(config["hc_sinkhorn_iters"]), float(config["hc_eps"])
        return HyperConnection(
            shape.hidden_size,
            streams=shape.streams,
            iterations=iterations,
            eps=eps,
            norm_eps=shape.rms_norm_eps,
            device=self.device,
        )

    def step(self, heads: int, limits: tuple[float, float]) -> Step:
        """As `decay`, of Mamba-2."""
        return Step(heads, limits, device=self.device)

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
        gate_up, down_proj = (f"{name}.{projection}" for projection in (kind.first, "down_proj"))
        codec, down = self.codec_for(gate_up), self.codec_for(down_proj)
        options: dict[str, Any] = {"dtype": self.dtype, "device": self.device}
        # a width may be no multiple of a format's group, and then down_proj alone is not packed
        other = ExpertWeight(
            num_experts, intermediate_size, hidden_size, codec=down, held=self.held_for(down_proj), **options
        )
        options |= {"codec": codec, "held": self.held_for(gate_up), "down": other}
        return kind(num_experts, hidden_size, intermediate_size, activation=activation, **options)

    def experts_of(self, shape: Shape, name: str, **parts: Any) -> Experts:
        """Routed experts of the MoE layer `name`, with the model's sizes; `parts` as in `experts`."""
        assert shape.moe is not None
        sizes = shape.moe.num_experts, shape.moe.latent or shape.hidden_size, shape.moe.intermediate_size
        return self.experts(f"{name}.experts", *sizes, **parts)

    def router(self, shape: Shape, routing: RoutingRule, kind: type[Router] = Router) -> Router:
        """The router of a layer, with the model's sizes."""
        assert shape.moe is not None
        sizes = (shape.hidden_size, shape.moe.num_experts, shape.moe.experts_per_token)
        return kind(*sizes, routing, dtype=self.dtype, device=self.device)

    def embedding(self, shape: Shape, scale: float | None = None) -> Embedding:
        """The token embeddings, scaled by `scale` unless it is None."""
        sizes = shape.vocab_size, shape.hidden_size
        if scale is None:
            return Embedding(*sizes, **self.table)
        return ScaledEmbedding(*sizes, scale, **self.table)

    @property
    def table(self) -> dict[str, Any]:
        """dtype, device and held of the token embeddings."""
        held = self.held_for("model.embed_tokens")
        return {"dtype": self.dtype, "device": self.device, "held": held}

    def head(self, shape: Shape, factor: float = 1.0) -> Linear:
        """The output head: logits times `factor`, softcapped by shape.softcap unless it is None."""
        sizes = shape.hidden_size, shape.vocab_size
        options: dict[str, Any] = {"codec": self.codec_for("lm_head"), "held": self.held_for("lm_head")}
        options |= {"dtype": self.dtype, "device": self.device}
        if factor == 1 and shape.softcap is None:
            return Linear(*sizes, **options)
        return Head(*sizes, factor=factor, softcap=shape.softcap, **options)


class Ends(NamedTuple):
    """The parts before and after a model's layers."""

    embed_tokens: Embedding
    norm: RMSNorm
    lm_head: Linear


def ends(shape: Shape, make: Factory) -> Ends:
    """An embedding, an RMSNorm and an output head. A family with others has a function of this name."""
    return Ends(make.embedding(shape), make.norm(shape.hidden_size, shape.rms_norm_eps), make.head(shape))


def build(
    shape: Shape,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "meta",
    codec_for: CodecFor = nothing_packed,
    held_for: HeldFor = as_computed,
) -> Decoder:
    """A Decoder with uninitialised weights; on "meta" it takes no memory.

    parallel.place fills it, or initialize() draws it at random. `codec_for(module name)` returns the codec of
    a module that the checkpoint stores packed; it stays packed. `held_for(module name)` returns the dtype of
    a frozen matrix held narrower than the computation's.
    """
    make = Factory(dtype, device, codec_for, held_for)
    family = FAMILIES[shape.model_type]
    layers = [
        assembled(family.layer(shape, index, make), shape, index, make) for index in range(shape.num_layers)
    ]
    embed_tokens, norm, lm_head = getattr(family, "ends", ends)(shape, make)
    body = Body(embed_tokens, layers, norm)
    if shape.tied:
        lm_head.weight = body.embed_tokens.weight
    decoder = Decoder(shape, body, lm_head)
    decoder.dtype = dtype
    if torch.device(device).type != "meta":  # from there place() moves the experts' counters
        _move_buffers(decoder, device)
    return decoder


def _move_buffers(model: nn.Module, device: torch.device | str) -> None:
    """Move every buffer to the device."""
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, buffer.to(device))


def meta_model(shape: Shape, manifest: Manifest, dtype: torch.dtype, *, as_stored: bool = False) -> Decoder:
    """The checkpoint's Decoder without memory, packed where the checkpoint is packed.

    as_stored: matrices stored in a narrower dtype than `dtype` stay in it (bf16 under float32): they are
    frozen. Raises CheckpointError if the files hold too few bytes for the sizes of config.json.
    """
    if manifest.tensors:
        check_against_files(shape, manifest)
    scheme, names, rules = manifest.scheme(), manifest.by_model_name(), models.rules(shape)

    def stored(module: str) -> Codec | None:
        codecs = [scheme.stored(name, names) for name in disk_modules(module, rules)] if scheme else []
        return next((codec for codec in codecs if codec is not None), None)

    # A stack of experts has one dtype in memory, so all its tensors must agree.
    dtypes: dict[str, set[str]] = {}
    for name, info in names.items() if as_stored else ():
        dtypes.setdefault(_unnumbered(name), set()).add(info.dtype)

    def held(module: str) -> torch.dtype | None:
        disk = [name for module in disk_modules(module, rules) for name in (f"{module}.weight", module)]
        of_all = set[str]().union(*(dtypes.get(_unnumbered(name), ()) for name in disk))
        return _narrower(TORCH_DTYPE[of_all.pop()], dtype) if len(of_all) == 1 else None

    return build(
        shape, dtype=dtype, device="meta", codec_for=stored, held_for=held if as_stored else as_computed
    )


def _unnumbered(name: str) -> str:
    """A tensor's name without its layer number; for an expert, only the part up to ".experts"."""
    plain = ".".join("*" if part.isdigit() else part for part in name.split("."))
    return plain.partition(".experts.")[0] + ".experts" if ".experts." in plain else plain


HALVES = (torch.bfloat16, torch.float16)


def _narrower(stored: torch.dtype, dtype: torch.dtype) -> torch.dtype | None:
    """`stored` if it is a half precision and `dtype` is wider; else None."""
    return stored if stored in HALVES and dtype.itemsize > stored.itemsize else None


def from_config(
    config: Mapping[str, Any],
    dtype: torch.dtype,
    device: torch.device | str = "meta",
    *,
    as_stored: bool = False,
) -> Decoder:
    """The Decoder described by a config.json alone.

    On "meta" it takes no memory; elsewhere it is uninitialised. It is packed if its quantization_config says
    so. as_stored: as in meta_model, with the dtype that the config names.
    """
    scheme, shape = recognise(config), models.shape(config)
    rules = models.rules(shape)

    def declared(module: str) -> Codec | None:
        return None if scheme is None else scheme.codec_for(disk_module(module, rules))

    named = declared_dtype(config)

    def held(module: str) -> torch.dtype | None:
        return _narrower(named, dtype)

    return build(
        shape, dtype=dtype, device=device, codec_for=declared, held_for=held if as_stored else as_computed
    )
