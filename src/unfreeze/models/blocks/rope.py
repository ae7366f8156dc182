"""Rotary position embeddings with the scalings of published models: none, linear, llama3, yarn, longrope.

A Rope is the table of inverse frequencies (R/2 numbers, R rotary width) and the factor on cos and sin, from
config.json. In a model the table is float32 and bit-identical to transformers' (rope_float32.py). An angle is
position · frequency, so at position 8,000 a difference of one rounding would be 5e-4 of a radian.

The rotation itself is kernels/rotary.

T tokens, R rotary width of a head.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from unfreeze.core.errors import CheckpointError
from unfreeze.models.blocks.rope_float32 import Computed

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class Rope:
    """inverse_frequency[i] = theta^(-2i/R) after scaling, in double precision: the exact values.

    computed           how its float32 table is computed; None: by rounding it
    attention_factor   factor on cos and sin (1 except with yarn and longrope)
    long, short_until  other frequencies for a whole document of more than short_until tokens (longrope)
    growth, per        cos and sin also grow with the position p, by 1 + growth · ln(1 + floor(p / per)): for
                       queries that are scaled this way (Llama 4's temperature, Ministral 3)
    """

    inverse_frequency: tuple[float, ...]
    attention_factor: float = 1.0
    long: tuple[float, ...] | None = None
    short_until: int = 0
    growth: float = 0.0
    per: float = 1.0
    computed: Computed | None = None

    @property
    def words(self) -> str:
        """The scaling, as "yarn, factor 4"; "" if there is none."""
        kind, factor = (self.computed.kind, self.computed.factor) if self.computed else ("default", 1.0)
        return "" if kind == "default" else kind + f", factor {factor:g}" * (factor != 1)

    def tables(self, positions_T: Tensor, lengths_T: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """cos and sin [T, R/2] in fp32 for integer positions [T].

        lengths_T: the length of each token's document, which longrope needs; None: each token is its
        document's last.
        """
        frequency = _on_device(self, positions_T.device, False)
        if self.long is not None:
            lengths_T = positions_T + 1 if lengths_T is None else lengths_T
            longer_T1 = (lengths_T > self.short_until)[:, None]
            frequency = _on_device(self, positions_T.device, True).where(longer_T1, frequency)
        angle, factor = positions_T.float()[:, None] * frequency, self.attention_factor
        if self.growth:
            factor = factor * (1 + self.growth * (1 + (positions_T / self.per).floor()).log())[:, None]
        return angle.cos() * factor, angle.sin() * factor

    def backwards(self) -> Rope:
        """The rotation in the opposite direction."""
        inverse, long = (
            numbers and tuple(-f for f in numbers) for numbers in (self.inverse_frequency, self.long)
        )
        computed = self.computed and replace(self.computed, sign=-self.computed.sign)
        return replace(self, inverse_frequency=inverse or (), long=long, computed=computed)


@dataclass(frozen=True)
class Temperature(Rope):
    """Queries that grow and do not rotate: by 1 + growth · ln(1 + floor((p + first) / per)) at position p.

    As rotary tables: inverse_frequency is zeros, cos is that factor and sin is 0. Source: arXiv:2501.19399,
    as used by Llama 4 and Mistral 4.
    """

    first: int = 0

    def tables(self, positions_T: Tensor, lengths_T: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return super().tables(positions_T + self.first, lengths_T)


@dataclass(frozen=True)
class Stepped(Rope):
    """The table of a window's first position, for each of its `every` tokens (blocks/compressed.py)."""

    every: int = 1

    def tables(self, positions_T: Tensor, lengths_T: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return super().tables(positions_T // self.every * self.every, lengths_T)


@functools.cache
def _on_device(rope: Rope, device: torch.device, long: bool) -> Tensor:
    """The frequencies in float32, once per device: a copy from the host at every step would make it wait."""
    import torch  # imported here: config.json is read, and refused, without torch

    if rope.computed is not None:
        return rope.computed.numbers(long).to(device)
    numbers = rope.long if long else rope.inverse_frequency
    return torch.tensor(numbers, dtype=torch.float32, device=device)


def rope_from_config(config: Mapping[str, Any], width: int) -> Rope:
    """The Rope of a config.json, in either spelling.

    The spellings: `rope_theta` + `rope_scaling` (with `type` or `rope_type`), or transformers 5's
    `rope_parameters`. `width` is R, the rotary width of a head. Raises CheckpointError naming a scaling that
    this file does not know.
    """
    parameters = rope_parameters(config)
    theta = float(parameters["rope_theta"])
    kind = parameters["rope_type"]
    inverse = [theta ** (-2 * i / width) for i in range(width // 2)]
    table = partial(Computed, kind, theta, width)
    if kind == "default":
        return Rope(tuple(inverse), computed=table())
    if kind == "linear":
        factor = float(parameters["factor"])
        return Rope(tuple(f / factor for f in inverse), computed=table(factor))
    if kind == "llama3":
        return _llama3(inverse, parameters, table)
    if kind == "yarn":
        return _yarn(inverse, theta, width, parameters, config, table)
    if kind == "proportional":
        return _proportional(inverse, parameters, table)
    if kind == "longrope":
        return _longrope(inverse, parameters, config, table)
    raise CheckpointError(
        f"config.json: rope type {kind!r} is not known; known: default, linear, llama3, yarn, longrope,"
        " proportional",
        next="open an issue with the model's name",
    )


def rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary parameters as one flat dict with `rope_theta`, from either spelling of config.json.

    Precedence as in transformers: a field in the table overrides the same one outside, except
    original_max_position_embeddings, where the outer one wins. Raises CheckpointError if both spellings are
    present and differ.
    """
    old, new = (dict(config.get(name) or {}) for name in ("rope_scaling", "rope_parameters"))
    theta = config.get("rope_theta", 10000.0)
    for table in (old, new):
        table["rope_type"] = table.get("rope_type") or table.pop("type", None) or "default"
        table.pop("type", None)
        table.setdefault("rope_theta", theta)
    if config.get("rope_scaling") and config.get("rope_parameters") and old != new:
        differs = sorted(key for key in {*old, *new} if old.get(key) != new.get(key))
        raise CheckpointError(
            "config.json: rope_scaling and rope_parameters disagree:"
            f" {', '.join(f'{key} {old.get(key)} and {new.get(key)}' for key in differs)}",
            next="remove the one that is not the publisher's",
        )
    merged = old if config.get("rope_scaling") else new
    original = config.get("original_max_position_embeddings")
    if merged["rope_type"] in ("llama3", "yarn", "longrope") and original:
        merged["original_max_position_embeddings"] = original
    return merged


def rotary_width(config: Mapping[str, Any], head_dim: int, absent: float = 1.0) -> int:
    """R = partial_rotary_factor · head_dim; the factor is the table's, else the config's, else `absent`.

    Raises CheckpointError if R is not an even number from 2 to head_dim, and for "proportional", where the
    factor says which pairs of a whole head rotate: no release of the families that call this has it.
    """
    parameters = rope_parameters(config)
    if parameters["rope_type"] == "proportional":
        raise CheckpointError(
            f"config.json: rope type 'proportional' is not built for model_type {config.get('model_type')!r}",
            next="check rope_parameters against the publisher's",
        )
    factor = float(parameters.get("partial_rotary_factor") or config.get("partial_rotary_factor") or absent)
    width = int(head_dim * factor)
    if width % 2 or not 0 < width <= head_dim:
        raise CheckpointError(
            f"config.json: partial_rotary_factor {factor:g} of head_dim {head_dim:,} rotates {width:,}"
            f" elements; they go in pairs, at most {head_dim:,}",
            next="check partial_rotary_factor against the publisher's",
        )
    return width


def _llama3(inverse: list[float], parameters: Mapping[str, Any], table: Callable[..., Computed]) -> Rope:
    """Llama 3.1's scaling: divide long wavelengths by factor, keep short ones, with a linear ramp between.

    If both bounds are equal there is no ramp (Llama 4 Scout). Source: Meta's reference.
    """
    factor, low, high = (float(parameters[k]) for k in ("factor", "low_freq_factor", "high_freq_factor"))
    context = float(parameters["original_max_position_embeddings"])

    def scaled(frequency: float) -> float:
        wavelength = 2 * math.pi / frequency
        if wavelength >= context / low:
            return frequency / factor
        if wavelength < context / high:
            return frequency
        smooth = (context / wavelength - low) / (high - low)
        return (1 - smooth) * frequency / factor + smooth * frequency

    return Rope(tuple(map(scaled, inverse)), computed=table(factor, low=low, high=high, context=context))


def _yarn(
    inverse: list[float],
    theta: float,
    width: int,
    parameters: Mapping[str, Any],
    config: Mapping[str, Any],
    table: Callable[..., Computed],
) -> Rope:
    """YaRN (Peng et al. 2023): interpolate low frequencies by `factor`, keep high ones.

    A ramp lies between beta_fast and beta_slow rotations.
    """
    context = float(parameters.get("original_max_position_embeddings") or config["max_position_embeddings"])
    factor = float(parameters.get("factor") or config["max_position_embeddings"] / context)

    def dimension(rotations: float) -> float:
        return width * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = dimension(float(parameters.get("beta_fast") or 32))
    high = dimension(float(parameters.get("beta_slow") or 1))
    if not math.isfinite(low) or not math.isfinite(high):
        settings = {name: parameters.get(name) for name in ("beta_fast", "beta_slow")} | {"rope_theta": theta}
        words = ", ".join(f"{name} {value!r}" for name, value in settings.items())
        raise CheckpointError(
            f"config.json: {words} give no rotation", next="check rope_parameters against the publisher's"
        )
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    if low == high:
        high += 0.001  # the ramp's width is a divisor
    ramp = [min(max((i - low) / (high - low), 0.0), 1.0) for i in range(width // 2)]
    scaled = [f / factor * r + f * (1 - r) for f, r in zip(inverse, ramp, strict=True)]
    mscale, mscale_all = parameters.get("mscale"), parameters.get("mscale_all_dim")
    attention = parameters.get("attention_factor")
    if attention is None:
        attention = (
            yarn_mscale(factor, float(mscale)) / yarn_mscale(factor, float(mscale_all))
            if mscale and mscale_all
            else yarn_mscale(factor)
        )
    return Rope(tuple(scaled), float(attention), computed=table(factor, low=low, high=high))


def _proportional(
    inverse: list[float], parameters: Mapping[str, Any], table: Callable[..., Computed]
) -> Rope:
    """Gemma 4's: the first partial_rotary_factor of the frequencies rotate; the other pairs do not."""
    share = float(parameters.get("partial_rotary_factor") or 1.0)
    factor = float(parameters.get("factor") or 1.0)
    turning = int(share * 2 * len(inverse) // 2)
    numbers = tuple(f / factor if i < turning else 0.0 for i, f in enumerate(inverse))
    return Rope(numbers, computed=table(factor, turning=turning))


def _longrope(
    inverse: list[float],
    parameters: Mapping[str, Any],
    config: Mapping[str, Any],
    table: Callable[..., Computed],
) -> Rope:
    """LongRoPE (Ding et al. 2024, arXiv:2402.13753): each frequency has its own divisor.

    One set is for documents up to the pretraining length, one for longer ones.
    """
    context = parameters.get("original_max_position_embeddings") or config["max_position_embeddings"]
    if not context >= 2:
        raise CheckpointError(
            f"config.json: original_max_position_embeddings is {context}; longrope needs two tokens at least",
            next="get config.json from the model's publisher again",
        )
    factor = float(parameters.get("factor") or config["max_position_embeddings"] / context)
    attention = parameters.get("attention_factor")
    if attention is None:
        attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(context))
    sets = [parameters[name] for name in ("short_factor", "long_factor")]
    for name, divisors in zip(("short_factor", "long_factor"), sets, strict=True):
        numbers = all(type(d) in (int, float) and 0 < d < 1e12 for d in divisors)
        if len(divisors) != len(inverse) or not numbers:
            raise CheckpointError(
                f"config.json: {name} of the rotary table must be {len(inverse)} numbers above 0, one per"
                f" pair of elements that rotate; it has {len(divisors)} entries",
                next="get config.json from the model's publisher again",
            )
    short, long = (tuple(f / float(d) for f, d in zip(inverse, divisors, strict=True)) for divisors in sets)
    computed = table(divisors=tuple(map(float, sets[0])), long=tuple(map(float, sets[1])))
    return Rope(short, float(attention), long=long, short_until=int(context), computed=computed)


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """0.1 · mscale · ln(factor) + 1: growth of attention's temperature with the context (YaRN, 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
