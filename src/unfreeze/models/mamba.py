"""Mamba-2 layers as families describe them: sizes, checks, names on disk, and the block made of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from unfreeze.checkpoint.keymap import StackRule
from unfreeze.core.errors import CheckpointError
from unfreeze.models.fields import NEXT, shown
from unfreeze.models.layer_types import FULL, LINEAR

if TYPE_CHECKING:
    from unfreeze.models.blocks.mamba import Mamba2
    from unfreeze.models.factory import Factory

FLOAT32_MAX = 3.4e38
NO_LIMITS = (0.0, float("inf"))
OLD_KINDS = {"mamba": LINEAR, "attention": FULL}
"""Kinds of layers as first releases spell them."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of a Mamba-2 layer; a pair has the field of config.json that it is from, for errors.

    groups, heads   G and H; state and width: k and v of a head; channels: H v, as config.json has it
    taps            of the convolution; conv_bias, and bias of in_proj and out_proj
    limits          of dt; eps: of the norm
    """

    groups: tuple[str, int]
    heads: tuple[str, int]
    state: int
    width: int
    channels: tuple[str, int]
    taps: int
    conv_bias: bool
    bias: bool
    limits: tuple[float, float]
    eps: float


def check(sizes: Sizes) -> None:
    """Raise CheckpointError for sizes that don't divide."""
    (groups_field, G), (heads_field, H), (field, channels) = sizes.groups, sizes.heads, sizes.channels
    wrong = ""
    if H % G:
        wrong = f"{heads_field} {H:,} is not a multiple of {groups_field} {G:,}"
    elif H * sizes.width != channels:
        wrong = f"{heads_field} {H:,} x a head width of {sizes.width:,} is not {field} {channels:,}"
    if wrong:
        raise CheckpointError(f"config.json: {wrong}", next=NEXT)


def limits(config: Mapping[str, Any]) -> tuple[float, float]:
    """time_step_limit: the least and the largest dt. Raises CheckpointError unless it is two numbers.

    transformers writes infinity as {"__float__": "Infinity"}.
    """
    declared = config["time_step_limit"]
    numbers: list[Any] = [
        limit.get("__float__") if isinstance(limit, Mapping) else limit for limit in declared
    ]
    try:
        low, high = map(float, numbers)
    except (TypeError, ValueError):
        low, high = 1.0, 0.0
    if not 0 <= low <= high:
        raise CheckpointError(
            f"config.json: time_step_limit is {shown(declared)}; it must be two numbers, the lower first",
            next=NEXT,
        )
    return low, high if high <= FLOAT32_MAX else float("inf")  # Nemotron 3 Ultra has 1e308


def renamed_kinds(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config with today's names in layer_types."""
    kinds = config.get("layer_types")
    if kinds is None:
        return config
    return {**config, "layer_types": [OLD_KINDS.get(str(kind), kind) for kind in kinds]}


def decay_rules(disk: str, ours: str) -> tuple[StackRule, ...]:
    """A_log, dt_bias and D lie beside the projections on disk, and in a module of their own here."""
    return tuple(StackRule(disk + name, f"{ours}decay.{name}") for name in ("A_log", "dt_bias", "D"))


def mixer(name: str, hidden_size: int, sizes: Sizes, make: Factory) -> Mamba2:
    """The block of these sizes; `name` is that of its module on disk."""
    from unfreeze.models.blocks.mamba import GroupedNorm, Mamba2

    (_, G), (_, H), (k, v) = sizes.groups, sizes.heads, (sizes.state, sizes.width)
    channels = H * v + 2 * G * k
    return Mamba2(
        name,
        (G, H),
        (k, v),
        in_proj=make.linear(f"{name}.in_proj", hidden_size, H * v + channels + H, bias=sizes.bias),
        conv1d=make.short_conv(channels, sizes.taps, silu=True, bias=sizes.conv_bias),
        decay=make.step(H, sizes.limits),
        norm=make.norm(H * v, sizes.eps, GroupedNorm),
        out_proj=make.linear(f"{name}.out_proj", H * v, hidden_size, bias=sizes.bias),
    )
