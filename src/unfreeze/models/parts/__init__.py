"""Parts that take the place of a family's own: attentions, norms, layers. An architecture is their list.

config.json of a model with other parts:

    "model_type": "unfreeze_parts",     # no other program computes these parts, so none may load the model
    "base_model_type": "llama",         # the other fields are this family's
    "parts": [{"at": "layers.*.self_attn", "part": "moba", "block": 64, "chosen": 3}, …]

The entries apply in their order. `at` names modules as the checkpoint does; * stands for every number, 2-5
for the numbers 2 to 5. A part is a function from the family's own module, without values, to the module in
its place: it takes over the parameters that it can use, under their names, and adds its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from unfreeze.core.errors import CheckpointError, nearest

if TYPE_CHECKING:
    from unfreeze.models.factory import Factory
    from unfreeze.models.layer import Layer
    from unfreeze.models.shape import Shape

ASSEMBLED = "unfreeze_parts"
"""model_type of a model with other parts than its family's."""
ARCHITECTURE = "UnfreezePartsForCausalLM"
"""In its `architectures`: no program has a class of this name."""
MOST = 2**31 - 1
"""Greatest number of an option: places in a text are 32-bit integers in kernels."""
LAYER, ATTENTION = "", "self_attn"
"""Slots: the whole layer, its attention."""


@dataclass(frozen=True)
class Option:
    """A setting of a part: its default and smallest value (numbers), or its choices (texts)."""

    default: float | str | bool
    about: str
    least: float | None = None
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Part:
    """An entry of PARTS.

    slot     the place it can stand in: ATTENTION, or LAYER
    formula  of its result, for the help
    source   of the formula
    builder  "module:function", called as function(own, at, **options) -> Block
    """

    slot: str
    formula: str
    source: str
    builder: str
    options: Mapping[str, Option] = field(default_factory=dict[str, Option])


@dataclass(frozen=True)
class At:
    """The place of a part that is being built: `module` is its name in the checkpoint's files."""

    shape: Shape
    index: int
    make: Factory
    module: str


class Placed(NamedTuple):
    """A part at one layer, its options complete."""

    layer: int
    name: str
    options: Mapping[str, Any]


_BLOCKS = "unfreeze.models.parts."
PARTS: dict[str, Part] = {
    "full": Part(
        ATTENTION,
        "o_proj(softmax(q kᵀ / √d) v), every token sees itself and all before it",
        "arXiv:1706.03762",
        f"{_BLOCKS}attention:full",
    ),
    "sliding_window": Part(
        ATTENTION,
        "as full, but a token sees itself and the window - 1 tokens before it",
        "arXiv:2004.05150",
        f"{_BLOCKS}attention:sliding_window",
        {"window": Option(128, "tokens that a token sees, itself included", least=1)},
    ),
    "moba": Part(
        ATTENTION,
        "as full, but a token sees its own block and the chosen - 1 earlier ones of highest q · mean(k)",
        "arXiv:2502.13189",
        f"{_BLOCKS}moba:moba",
        {
            "block": Option(64, "tokens of a block", least=1),
            "chosen": Option(3, "blocks that a query head sees, its own included", least=1),
            "gate": Option(
                "mean",
                "score of a block: q · mean(k), or (A q) · B [mean, max, min](k) with learned A and B"
                " (arXiv:2410.13276; training.indexer trains them)",
                choices=("mean", "low_rank"),
            ),
            "rank": Option(16, "rows of A and B, for gate low_rank", least=1),
        },
    ),
    "qk_norm": Part(
        ATTENTION,
        "as the attention that is there, with q and k normed per head before they turn",
        "arXiv:2302.05442",
        f"{_BLOCKS}attention:qk_norm",
    ),
    "gated_delta": Part(
        ATTENTION,
        "S ← a S, S ← S + β k (v - Sᵀ k)ᵀ, o = Sᵀ q per head, |k| = 1; o_proj(norm(o) · silu(g_proj x))",
        "arXiv:2412.06464",
        f"{_BLOCKS}gated_delta:gated_delta",
        {
            "conv": Option(4, "taps of the short convolutions of q, k and v, with SiLU; 0: none", least=0),
            "gate": Option(True, "the output gate g_proj"),
        },
    ),
    "shorten": Part(
        LAYER,
        "y_t = x_t + (layer(p) - p)_e, p the means of every `by` tokens, e the last group complete at t",
        "arXiv:2110.13711, arXiv:2006.03236",
        f"{_BLOCKS}shorten:shorten",
        {"by": Option(2, "tokens that the layer reads as one", least=1)},
    ),
    "pre_norm": Part(
        LAYER, "x + f(norm(x)), f attention and then the MLP", "arXiv:2002.04745", f"{_BLOCKS}norms:pre_norm"
    ),
    "post_norm": Part(LAYER, "norm(x + f(x))", "arXiv:1706.03762", f"{_BLOCKS}norms:post_norm"),
    "sandwich_norm": Part(LAYER, "x + norm(f(norm(x)))", "arXiv:2105.13290", f"{_BLOCKS}norms:sandwich_norm"),
    "branch_norm": Part(
        LAYER, "x + norm(f(x)), as in OLMo 2", "arXiv:2501.00656", f"{_BLOCKS}norms:branch_norm"
    ),
    "deep_norm": Part(
        LAYER,
        "norm(α x + f(x)), α = (2L)^¼; v, o and MLP begin (8L)^-¼ smaller; L layers",
        "arXiv:2203.00555",
        f"{_BLOCKS}norms:deep_norm",
    ),
}
"""name -> part."""


def places(at: str, num_layers: int) -> tuple[str, list[int]]:
    """(slot, layers) of a text such as "layers.*.self_attn", "layers.3" or "model.layers.2-5.self_attn".

    Raises CheckpointError for a text of another form, and for layers that the model does not have.
    """
    match = re.fullmatch(r"(?:model\.)?layers\.(\*|[0-9]+(?:-[0-9]+)?)(?:\.(\w+))?", at)
    if match is None or (match[2] or LAYER) not in (LAYER, ATTENTION):
        raise CheckpointError(
            f"parts: {at!r} names no place for a part",
            next='write "layers.*.self_attn", "layers.0-3" or "layers.*"',
        )
    first, _, last = ("0", "-", str(num_layers - 1)) if match[1] == "*" else match[1].partition("-")
    begin, end = int(first), int(last or first)
    if not begin <= end < num_layers:
        raise CheckpointError(
            f"parts: {at!r}: the model has layers 0 to {num_layers - 1}", next="correct the numbers"
        )
    return match[2] or LAYER, list(range(begin, end + 1))


def assembled_config(config: Mapping[str, Any], parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """config.json of a family's model with other parts.

    Programs that choose their code by `architectures` must not take the family's, so it has a name of ours.
    """
    own = {name: value for name, value in config.items() if name not in ("model_type", "architectures")}
    kind = {"architectures": [ARCHITECTURE], "model_type": ASSEMBLED, "base_model_type": config["model_type"]}
    return {**kind, **own, "parts": [dict(entry) for entry in parts]}


def completed(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a part with its defaults. Raises CheckpointError for a part, option or value unknown."""
    if name not in PARTS:
        raise CheckpointError(
            f"parts: {name!r} is no part{nearest(name, PARTS)}",
            next="unfreeze pretrain --help parts lists them",
        )
    known = PARTS[name].options
    for option, value in options.items():
        if option not in known:
            raise CheckpointError(
                f"parts: {name} has no option {option!r}{nearest(option, known)}",
                next=f"its options: {', '.join(known) or 'none'}",
            )
        _check(name, option, known[option], value)
    return {**{option: of.default for option, of in known.items()}, **options}


def _check(name: str, option: str, known: Option, value: object) -> None:
    if known.choices:
        fits, needed = value in known.choices, " or ".join(known.choices)
    elif isinstance(known.default, bool):
        fits, needed = isinstance(value, bool), "true or false"
    else:
        whole = isinstance(known.default, int)
        kind = int if whole else (int, float)
        fits = isinstance(value, kind) and not isinstance(value, bool) and value <= MOST
        fits = fits and (known.least is None or value >= known.least)  # type: ignore[operator]
        needed = f"a {'whole ' if whole else ''}number" + (
            f" from {known.least:g} to {MOST:,}" if known.least is not None else ""
        )
    if not fits:
        raise CheckpointError(
            f"parts: {name}.{option} is {repr(value)[:40]}; it must be {needed}", next="correct it"
        )


def placed(entries: Sequence[Mapping[str, Any]], num_layers: int) -> tuple[Placed, ...]:
    """Every part at every layer, in the order in which they apply."""
    return tuple(_placed(entries, num_layers))


def _placed(entries: Sequence[Mapping[str, Any]], num_layers: int) -> Iterator[Placed]:
    for entry in entries:
        if not isinstance(entry, Mapping) or not isinstance(entry.get("at"), str) or "part" not in entry:
            raise CheckpointError(
                f"parts: {str(entry)[:60]} is no entry",
                next='write {"at": "layers.*.self_attn", "part": "moba"}',
            )
        name = str(entry["part"])
        options = completed(name, {key: value for key, value in entry.items() if key not in ("at", "part")})
        slot, layers = places(entry["at"], num_layers)
        if PARTS[name].slot != slot:
            fit = "layers.*" + (f".{PARTS[name].slot}" if PARTS[name].slot else "")
            raise CheckpointError(
                f"parts: {name} cannot stand at {entry['at']!r}", next=f'its place is "{fit}"'
            )
        yield from (Placed(layer, name, options) for layer in layers)


def assembled(layer: Layer, shape: Shape, index: int, make: Factory) -> Layer:
    """The family's layer `index` with the parts of `shape` in place of its own."""
    for part in shape.parts:
        if part.layer != index:
            continue
        entry, module = PARTS[part.name], f"model.layers.{index}"
        path, _, function = entry.builder.partition(":")
        build = getattr(import_module(path), function)
        if entry.slot == LAYER:
            layer = build(layer, At(shape, index, make, module), **part.options)
            continue
        own = layer._modules.get(entry.slot)
        if own is None:
            raise CheckpointError(
                f"parts: layer {index} of a {shape.model_type} has no {entry.slot}",
                next="choose other layers",
            )
        layer.add_module(
            entry.slot, build(own, At(shape, index, make, f"{module}.{entry.slot}"), **part.options)
        )
    return layer


def refuse(own: object, part: str, needs: str, at: At) -> NoReturn:
    """Raise the error for a part that cannot take the place of this module."""
    raise CheckpointError(
        f"parts: {part} takes the place of {needs}; {at.module.removeprefix('model.')} of a"
        f" {at.shape.model_type} is"
        f" {type(own).__name__}",
        next="choose another part, or other layers",
    )
