"""A swap: a part takes the place of another in a model, and the rest stays.

The model is built twice without values, with and without the new entry of `parts` (models/parts). A parameter
outside the replaced modules is in both. Inside them a parameter that the part still has, by name, is copied;
one that it alone has is drawn, by the rules of a new model (models/init.py); one that it no longer has is
dropped.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from unfreeze import models
from unfreeze.compress.draws import generator_of
from unfreeze.core.errors import ConfigError, nearest
from unfreeze.core.events import RESOLVED
from unfreeze.generate.source import ADAPTER_CONFIG
from unfreeze.models.blocks.linear import PackedHolder
from unfreeze.models.blocks.norm import LayerNorm, RMSNorm
from unfreeze.models.decoder import Decoder
from unfreeze.models.init import first_value
from unfreeze.models.parts import ASSEMBLED, PARTS, completed, placed, places
from unfreeze.models.shape import Shape
from unfreeze.quant.halves import Halves

Init = Literal["copy", "new"]
INITS = ("copy", "new")
NOT_OURS = ("architectures", "auto_map")
"""Fields that name a class of another program: it would compute the family's own parts, and load them."""


@dataclass(frozen=True)
class Wish:
    """A part and its place.

    at       names of modules, as in the checkpoint: "layers.*.self_attn"
    part     name in models.parts.PARTS
    options  of the part; those left out have their defaults
    init     "copy": parameters that the part has, too, are kept; "new": all of the part's are drawn
    seed     of the drawn values
    """

    at: str
    part: str
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    init: Init = "copy"
    seed: int = 0

    @property
    def entry(self) -> dict[str, Any]:
        """The entry of config.json, with every option. Raises CheckpointError for one that is unknown."""
        return {"at": self.at, "part": self.part, **completed(self.part, self.options)}

    @property
    def words(self) -> str:
        """Every option as --set takes it: "block=64 chosen=3"."""
        options = completed(self.part, self.options)
        return " ".join(f"{name}={json.dumps(value)}" for name, value in options.items())


@dataclass(frozen=True)
class Difference:
    """The parameters and persistent buffers of the replaced modules, by the model's names.

    modules  the replaced modules
    layers   their layers
    same     True if the new modules compute what the old ones did, from equal parameters
    """

    modules: tuple[str, ...]
    layers: tuple[int, ...]
    copied: tuple[str, ...]
    drawn: tuple[str, ...]
    dropped: tuple[str, ...]
    same: bool


def shape_with(before: Decoder, wish: Wish) -> Shape:
    """The shape after the swap.

    Raises CheckpointError for a place, part or option that is unknown, ConfigError for layers without the
    module.
    """
    if wish.init not in INITS:
        raise ConfigError(
            f"init is {wish.init!r}{nearest(str(wish.init), INITS)}; it must be copy or new",
            next="--init copy",
        )
    old = before.shape
    shape = replace(old, parts=(*old.parts, *placed([wish.entry], old.num_layers)))
    slot, layers = places(wish.at, old.num_layers)
    having = [layer for layer, module in enumerate(before.layers) if not slot or slot in module._modules]
    lacking = [layer for layer in layers if layer not in having]
    if lacking:
        first = f'"layers.{having[0]}.{slot}"' if having else "a part for whole layers"
        counts = f"{len(having)} of {len(before.layers)} have"
        raise ConfigError(
            f"layer {lacking[0]} of this {old.model_type} has no {slot}; {counts}",
            next=f"one swap for each; the first: {first}",
        )
    return shape


def refuse_adapters(folder: Path) -> None:
    """Raise ConfigError for an adapter's folder, and for a run that has adapters, in place of a model."""
    whole = (folder / "config.json").is_file() or (folder / "model" / "config.json").is_file()
    if not whole and ((folder / RESOLVED).is_file() or (folder / ADAPTER_CONFIG).is_file()):
        raise ConfigError(
            f"{folder} has adapters, which belong to the parts that its model has now",
            next=f"unfreeze merge {folder} --to bf16 --out DIR, then swap DIR",
        )


def config_with(config: Mapping[str, Any], wish: Wish) -> dict[str, Any]:
    """config.json after the swap: the entry behind those that are there."""
    own = {name: value for name, value in config.items() if name not in NOT_OURS}
    if own.get("model_type") == ASSEMBLED:
        return {**own, "parts": [*own["parts"], wish.entry]}
    kind = own.pop("model_type")
    return {"model_type": ASSEMBLED, "base_model_type": kind, "parts": [wish.entry], **own}


def difference(before: Decoder, after: Decoder, wish: Wish) -> Difference:
    """Compare the models with and without the swap; neither needs values.

    Raises ConfigError for parameters of another shape under the same name, for packed weights that the part
    cannot keep packed, and for a part that leaves the one before it in place.
    """
    slot, layers = places(wish.at, before.shape.num_layers)
    modules = [f"model.layers.{layer}" + (f".{slot}" if slot else "") for layer in layers]
    equal = [same(before.get_submodule(name), after.get_submodule(name)) for name in modules]
    for layer, unchanged in zip(layers, equal, strict=True):
        _refuse_left(before.shape, layer, wish, slot, unchanged)
    _refuse_unpacked(before, after, wish)
    old, new = before.state_dict(keep_vars=True), after.state_dict(keep_vars=True)
    copied: list[str] = []
    drawn: list[str] = []
    for name, tensor in new.items():
        inside = any(name.startswith(f"{module}.") for module in modules)
        if name not in old or (inside and wish.init == "new"):
            drawn.append(name)
        elif tensor.shape != old[name].shape:
            raise ConfigError(
                f"{name} is {list(old[name].shape)}, and {wish.part} needs {list(tensor.shape)}",
                next="choose other options of the part, or draw its parameters: --init new",
            )
        elif inside:
            _refuse_other_gain(before, after, name, wish)
            copied.append(name)
    _refuse_packed_draws(after, drawn, wish)
    dropped = tuple(name for name in old if name not in new)
    return Difference(tuple(modules), tuple(layers), tuple(copied), tuple(drawn), dropped, all(equal))


def value_of(after: Decoder, name: str, seed: int) -> Tensor:
    """The first value of one parameter, float32 on the CPU; it depends on its name and the seed alone."""
    own = name.rpartition(".")[0] if hasattr(after.get_submodule(name.rpartition(".")[0]), "drawn") else name
    return first_value(after, name, generator_of(seed, own))


def same(old: nn.Module, new: nn.Module) -> bool:
    """True if two modules are of the same class, with the same settings, parameters' shapes and parts."""
    if type(old) is not type(new) or _settings(old).keys() != _settings(new).keys():
        return False
    tensors = [{**module._parameters, **module._buffers} for module in (old, new)]
    if tensors[0].keys() != tensors[1].keys() or old._modules.keys() != new._modules.keys():
        return False
    alike = all(_alike(one, tensors[1][name]) for name, one in tensors[0].items())
    alike = alike and all(_equal(value, _settings(new)[name]) for name, value in _settings(old).items())
    return alike and all(
        (one is None and new._modules[name] is None) or (one is not None and same(one, new._modules[name]))  # type: ignore[arg-type]
        for name, one in old._modules.items()
    )


def _refuse_other_gain(before: Decoder, after: Decoder, name: str, wish: Wish) -> None:
    """Raise ConfigError for a norm's weight under another norm: a weight of 0 is a gain of 1 in Gemma."""
    module = name.rpartition(".")[0]
    old, new = before.get_submodule(module), after.get_submodule(module)
    if isinstance(old, (RMSNorm, LayerNorm)) and type(old) is not type(new):
        raise ConfigError(
            f"{module} is {type(old).__name__}, and that of {wish.part} is {type(new).__name__}",
            next="its weights mean other gains; draw them anew: --init new",
        )


_OWN = frozenset(vars(nn.Module()))


def _settings(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in _OWN}


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Shape) and isinstance(other, Shape):
        return replace(one, parts=()) == replace(other, parts=())
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and _alike(one, other)
    return bool(one == other)


def _alike(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    alike = one.shape == other.shape and one.dtype == other.dtype
    return alike and (one.is_meta or other.is_meta or torch.equal(one, other))


def _refuse_left(shape: Shape, layer: int, wish: Wish, slot: str, unchanged: bool) -> None:
    """Raise ConfigError if `full` is asked for, and an earlier part stays in its place."""
    if wish.part != "full":  # the others may add to a part: a norm to a window
        return
    there = [part.name for part in shape.parts if part.layer == layer and PARTS[part.name].slot == slot]
    if unchanged and there and there[-1] != wish.part:
        raise ConfigError(
            f"{wish.part} leaves the {there[-1]} of layer {layer} as it is",
            next=f"swap the model that had no {there[-1]} yet",
        )


def _refuse_unpacked(before: Decoder, after: Decoder, wish: Wish) -> None:
    """Raise ConfigError for a packed weight that the part would need dense, or in another shape."""
    new = dict(after.named_modules())
    for name, module in before.named_modules():
        if not isinstance(module, PackedHolder) or module.codec is None or name not in new:
            continue
        holder = new[name]
        if isinstance(holder, PackedHolder) and holder.codec == module.codec and _alike_parts(module, holder):
            continue
        raise ConfigError(
            f"{name} is packed in {module.codec.name}, and {wish.part} cannot keep it packed",
            next="choose another part, or take the model's bf16 release",
        )


def _alike_parts(old: nn.Module, new: nn.Module) -> bool:
    one, other = dict(old.named_buffers(recurse=False)), dict(new.named_buffers(recurse=False))
    return {name: each.shape for name, each in one.items()} == {
        name: each.shape for name, each in other.items()
    }


def _refuse_packed_draws(after: Decoder, drawn: list[str], wish: Wish) -> None:
    """Raise ConfigError for drawn values of a packed weight: codes have no first values."""
    for name in drawn:
        module = after.get_submodule(name.rpartition(".")[0])
        if (
            isinstance(module, PackedHolder)
            and module.codec is not None
            and name.rpartition(".")[2] != "bias"
        ):
            raise ConfigError(
                f"{name.rpartition('.')[0]} is packed in {module.codec.name}: its codes cannot be drawn anew",
                next="keep them with --init copy" if wish.init == "new" else "choose another part",
            )


def built(before: Decoder, shape: Shape) -> Decoder:
    """The model of `shape` without values, with the formats that the weights of `before` have."""
    codecs = {
        name: module.codec.codec if isinstance(module.codec, Halves) else module.codec
        for name, module in before.named_modules()
        if isinstance(module, PackedHolder)
    }
    return models.build(shape, dtype=before.dtype, device="meta", codec_for=codecs.get)
