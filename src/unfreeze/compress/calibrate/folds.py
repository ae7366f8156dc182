"""Scales that move from a matrix's input into the weights in front of it, without a change of the function.

    W y = (W diag(s)) (y / s)           y / s is what the producer in front gives, once it is divided by s

    a norm        y = g ⊙ x / rms(x)     g / s; where the gain is 1 + w: w becomes (1 + w) / s − 1
    v_proj        o_proj reads a sum of values over tokens, each channel apart: v's rows / s
    up_proj       down_proj reads a(gate) · up: up's rows / s

All that reads y must be known, such as a mixture's router and all its experts. So the readers are watched in
one pass; in a second one the producer's output is multiplied by powers of two, 2^-20 to 2^20, and each
reader's input divided by them: both are exact in floating point, so the layer's output must be the same bit
for bit. A clamp, a norm between, or a reader that was not seen changes it, and then nothing is folded there.

T tokens, I input channels of the readers, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from unfreeze.compress.calibrate.layers import State
from unfreeze.compress.deltas import UP
from unfreeze.models.blocks.experts import Experts
from unfreeze.models.blocks.linear import Linear
from unfreeze.models.blocks.norm import OffsetRMSNorm, RMSNorm
from unfreeze.models.blocks.routers import Router
from unfreeze.models.layer import Layer

PAIRS = (
    ("v_proj", "o_proj"),
    ("qkv_proj", "o_proj"),
    ("up_proj", "down_proj"),
    ("gate_up_proj", "down_proj"),
    ("input_linear", "output_linear"),
    ("in_proj", "out_proj"),
)
"""Layers of one block of which the second may read the last outputs of the first, channel by channel."""
LARGEST = 20  # exponent of two in the check
Kind = Literal["gain", "gain + 1", "columns", "rows", "bias"]


@dataclass(frozen=True)
class Fold:
    """Scales s divide the outputs of `producer` and multiply the input columns of `readers`.

    producer  a norm; a Linear, whose last I outputs are read; or experts, each of which has an s of its own
              between up and down
    readers   linear layers, routers, experts
    """

    producer: str
    readers: tuple[str, ...]

    @property
    def inner(self) -> bool:
        """True for the scales between up and down of experts, [E, I]."""
        return self.readers == (self.producer,)


def folds_of(layer: Layer, name: str, state: State) -> list[Fold]:
    """The folds of a loaded layer that leave its function as it is. name: its place in the model."""
    expected = layer(state.x_TD, state.run)
    norms, pairs, inner = _candidates(layer, state)
    first = [fold for fold in (*norms, *pairs) if _exact(layer, [fold], state, expected)]
    if first and not _exact(layer, first, state, expected):
        first = []
    for fold in norms:  # experts may read a product of y with a token's weight (Llama 4)
        more = fold not in first and _with_experts(layer, fold)
        if more and _exact(layer, [*first, more], state, expected):
            first.append(more)
    whole = [*first, *(Fold(experts, (experts,)) for experts in inner)]
    return [
        Fold(f"{name}.{fold.producer}", tuple(f"{name}.{reader}" for reader in fold.readers))
        for fold in whole
    ]


def _candidates(layer: Layer, state: State) -> tuple[list[Fold], list[Fold], list[str]]:
    """(norms with what reads their output, pairs of linear layers, experts with scales inside)."""
    modules = {name: module for name, module in layer.named_modules() if name}
    outputs: dict[int, tuple[Tensor, str]] = {}  # held, so that an id stays its own
    readers: dict[str, dict[str, None]] = {}

    def gives(name: str) -> Callable[[nn.Module, Any, Tensor], None]:
        def hook(module: nn.Module, arguments: Any, y: Tensor) -> None:
            outputs[id(y)] = y, name

        return hook

    def reads(name: str) -> Callable[[nn.Module, Any], None]:
        def hook(module: nn.Module, arguments: Any) -> None:
            if arguments and (known := outputs.get(id(arguments[0]))):
                readers.setdefault(known[1], {})[name] = None

        return hook

    with ExitStack() as hooks:
        for name, module in modules.items():
            if type(module) in (RMSNorm, OffsetRMSNorm):
                hooks.callback(module.register_forward_hook(gives(name)).remove)
            elif type(module) is Linear or isinstance(module, (Router, Experts)):
                hooks.callback(module.register_forward_pre_hook(reads(name)).remove)
        layer(state.x_TD, state.run)
    norms = [Fold(name, tuple(own)) for name, own in readers.items()]
    pairs = [
        Fold(f"{owner}.{one}", (f"{owner}.{two}",))
        for owner in modules
        for one, two in PAIRS
        if _fits(modules.get(f"{owner}.{one}"), modules.get(f"{owner}.{two}"))
    ]
    return norms, pairs, [name for name, module in modules.items() if _linear_in_up(module)]


def _fits(one: nn.Module | None, two: nn.Module | None) -> bool:
    if not isinstance(one, Linear) or not isinstance(two, Linear) or {type(one), type(two)} != {Linear}:
        return False
    return one.out_features >= two.in_features


def _with_experts(layer: Layer, fold: Fold) -> Fold | None:
    """The fold with the experts beside a router that is among its readers."""
    modules = dict(layer.named_modules())
    for reader in fold.readers:
        experts = f"{reader.rpartition('.')[0]}.experts"
        beside = isinstance(modules[reader], Router) and isinstance(modules.get(experts), Experts)
        if beside and experts not in fold.readers:
            return Fold(fold.producer, (*fold.readers, experts))
    return None


def _linear_in_up(module: nn.Module) -> bool:
    """True for experts whose activation is linear in up, which has no bias."""
    if not isinstance(module, Experts) or module.before == 1 or module.biases()[0] is not None:
        return False
    gate, up = torch.randn(2, 64, 64, generator=torch.Generator().manual_seed(0))
    t = _powers(64)
    return torch.equal(module.activation.forward(gate, up * t), module.activation.forward(gate, up) * t)


def _powers(width: int) -> Tensor:
    generator = torch.Generator().manual_seed(width)
    return 2.0 ** torch.randint(-LARGEST, LARGEST + 1, (width,), generator=generator)


def _exact(layer: Layer, folds: Sequence[Fold], state: State, expected: Tensor) -> bool:
    """True if the layer's output is the same with t · y of each producer, of which its readers get y."""
    with ExitStack() as hooks:
        for fold in folds:
            producer = layer.get_submodule(fold.producer)
            readers = [layer.get_submodule(name) for name in fold.readers]
            for hook in _hooks(producer, readers):
                hooks.callback(hook.remove)
        return torch.equal(layer(state.x_TD, state.run), expected)


def _hooks(producer: nn.Module, readers: Sequence[nn.Module]) -> Iterator[Any]:
    width = width_of(readers[0])
    t = _powers(width)

    def times(module: nn.Module, arguments: Any, y: Tensor) -> Tensor:
        return torch.cat((y[..., :-width], y[..., -width:] * t), -1)

    def divided(module: nn.Module, arguments: Any) -> Any:
        return arguments[0] / t, *arguments[1:]

    yield producer.register_forward_hook(times)
    for reader in readers:
        yield reader.register_forward_pre_hook(divided)


def width_of(reader: nn.Module) -> int:
    """Input channels of a module that reads."""
    if isinstance(reader, Linear):
        return reader.in_features
    if isinstance(reader, Experts):
        return reader.hidden_size
    assert isinstance(reader, Router)
    return reader.weight.shape[1]


def parameters_of(model: nn.Module, fold: Fold, s: Tensor) -> Iterator[tuple[str, Kind, Tensor]]:
    """(parameter, the way it changes, its scales as `changed` takes them) of all that a fold changes.

    s [I] float; of an inner fold [E, I].
    """
    producer = model.get_submodule(fold.producer)
    if fold.inner:
        assert isinstance(producer, Experts)
        rows = s.new_ones(len(s), producer.before * s.shape[1])
        producer.activation.split(rows)[UP].copy_(s)
        yield f"{fold.producer}.{producer.first}.weight", "rows", rows
        yield f"{fold.producer}.down_proj.weight", "columns", s
        return
    if isinstance(producer, Linear):
        rows = padded(s, producer.out_features)
        yield f"{fold.producer}.weight", "rows", rows
        if producer.bias is not None:
            yield f"{fold.producer}.bias", "bias", rows
    else:
        yield f"{fold.producer}.weight", "gain + 1" if isinstance(producer, OffsetRMSNorm) else "gain", s
    for reader in fold.readers:
        module = model.get_submodule(reader)
        leaf = f"{module.first}.weight" if isinstance(module, Experts) else "weight"
        yield f"{reader}.{leaf}", "columns", s


def padded(s: Tensor, outputs: int) -> Tensor:
    """s for the last of a producer's outputs, 1 for those before."""
    return torch.cat((s.new_ones(outputs - len(s)), s))


def changed(weight: Tensor, kind: Kind, s: Tensor) -> Tensor:
    """A parameter after the fold, in its dtype; the arithmetic is in the wider one of weight and s."""
    if kind == "columns":
        value = weight * s[..., None, :]
    elif kind == "rows":
        value = weight / s[..., :, None]
    elif kind == "gain + 1":
        value = (1 + weight.to(s.dtype)) / s - 1
    else:
        value = weight / s
    return value.to(weight.dtype)
