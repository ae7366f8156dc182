"""The key-map interpreter: maps each tensor on disk to the region of a parameter that it fills, and back.

Most names on disk are parameter names. Routed experts are not: a release stores 384 small matrices per
projection, the model holds one stacked parameter. Model files declare that as data (a few StackRules).
`tensor_sources` interprets it for loading, `unstack` (save.py) the other way, so that adding a family never
changes checkpoint code.

Shapes: E experts, I expert width, D model width. A stacked gate_up_proj is [E, 2I, D], gate rows first;
down_proj [E, D, I].
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from unfreeze.quant.halves import HALVES

Index = tuple[int | slice, ...]
"""Index into a parameter: () all of it, (e,) one expert, (e, slice(a, b)) rows of one expert."""

_NUMBERS = ("layer", "expert")


@dataclass(frozen=True)
class StackRule:
    """One kind of tensor on disk and the parameter that it is part of.

    disk   "model.layers.{layer}.mlp.experts.{expert}.gate_proj.{part}"
    param  "model.layers.{layer}.mlp.experts.gate_up_proj.{part}"
    half   None: the tensor is param[expert]; 0: param[expert, :rows]; 1: param[expert, rows:], where rows is
           half of the parameter's. Parts kept separately per half (quant/halves.py), "gate_qweight" for
           qweight, are mapped as if half were None.
    transposed   the tensor on disk has the last two dimensions of the parameter swapped: [E, in, out], as
                 gpt-oss, Llama 4 and Qwen3-VL publish fused experts
    either  the tensor may also have the other orientation, which its shape tells: Qwen3-VL's as written by
           transformers. Saving follows `transposed`
    instead  on a rule with {expert}: the names that quantizers give the experts of a family that is published
           fused. Used for packed parts, if the files have these names

    {layer} and {expert} are numbers, any other field is one name component ("weight"). Without {expert} the
    tensor is the whole parameter under another name: a router that is block_sparse_moe.gate on disk, or fused
    experts [E, 2I, D], which transformers can write as "….experts.gate_up_proj". If a parameter also has
    rules with {expert}, such a rule is an alternative for reading, and saving uses those with {expert}.
    Rules with {expert} whose names begin otherwise are another spelling: saving uses the first.
    """

    disk: str
    param: str
    half: int | None = None
    transposed: bool = False
    either: bool = False
    instead: bool = False

    @property
    def per_expert(self) -> bool:
        return "{expert}" in self.disk


@dataclass(frozen=True)
class TensorSource:
    """A tensor on disk that fills `index` of a parameter; `shape` is its required shape.

    transposed: its last two dimensions are swapped on disk. either: its shape tells the orientation.
    """

    name: str
    index: Index
    shape: tuple[int, ...]
    transposed: bool = False
    either: bool = False

    def turned(self) -> TensorSource:
        """The same with the last two dimensions swapped."""
        *lead, rows, columns = self.shape
        return replace(self, shape=(*lead, columns, rows), transposed=not self.transposed)


@lru_cache(maxsize=256)
def _pattern(template: str) -> re.Pattern[str]:
    """The template as a regular expression with a group per field."""
    pieces = re.split(r"\{(\w+)\}", template)  # text, field, text, field, …
    for i in range(1, len(pieces), 2):
        pieces[i] = f"(?P<{pieces[i]}>{'[0-9]+' if pieces[i] in _NUMBERS else '[^.]+'})"
    return re.compile("".join(piece if i % 2 else re.escape(piece) for i, piece in enumerate(pieces)))


def tensor_sources(
    param: str, shape: Sequence[int], rules: Sequence[StackRule], disk: Mapping[str, object] | None = None
) -> list[TensorSource]:
    """The tensors on disk that make up `param`, whose shape is [E, …] if rules stack it.

    A parameter without rules is its own source. With `disk` (name -> TensorInfo), a rule without {expert} is
    preferred if that name exists, then the parameter's own name. Otherwise the per-expert names are expected,
    or if there are none the first rule's.
    """
    matching = [
        (rule, match.groupdict()) for rule in rules if (match := _pattern(rule.param).fullmatch(param))
    ]
    for rule, fields in matching:
        name = rule.disk.format(**fields) if not rule.per_expert else ""
        if name and disk is not None and name in disk:
            source = _whole(rule, name, shape)
            other = source.turned() if source.either else source
            return [other if getattr(disk[name], "shape", None) == other.shape else source]
    stacked = [(rule, fields, rule.half) for rule, fields in matching if rule.per_expert and not rule.instead]
    instead = [(rule, fields, rule.half) for rule, fields in matching if rule.instead]
    if instead and (len(instead) == len(matching) or _first_of(instead) in (disk or ())):
        stacked = instead
    stacked = _one_spelling(stacked, disk)
    if not matching or (disk is not None and param in disk):
        return [TensorSource(param, (), tuple(shape))]
    if not stacked:
        rule, fields = matching[0]
        return [_whole(rule, rule.disk.format(**fields), shape)]
    for half, begin in enumerate(HALVES):
        own = [(rule, fields) for rule, fields, of in stacked if of == half]
        if own and own[0][1].get("part", "").startswith(begin):
            part = own[0][1]["part"].removeprefix(begin)
            stacked = [(rule, fields | {"part": part}, None) for rule, fields in own]
            break
    return [
        TensorSource(rule.disk.format(**fields, expert=expert), *_region(half, expert, shape))
        for expert in range(shape[0])
        for rule, fields, half in stacked
    ]


Matched = tuple[StackRule, dict[str, str], int | None]
"""A rule, the fields of a name that it matches, and its half."""


def _one_spelling(stacked: list[Matched], disk: Mapping[str, object] | None) -> list[Matched]:
    """Rules of one spelling of the experts' names: the first of which `disk` has a tensor, else the first."""
    ways = _spellings(stacked)
    there = (way for way in ways if any(_is_there(entry, disk or {}) for entry in way))
    return next(there, next(iter(ways), []))


def _spellings(stacked: list[Matched]) -> list[list[Matched]]:
    """The rules, apart by how the names begin."""
    ways: dict[str, list[Matched]] = {}
    for entry in stacked:
        ways.setdefault(entry[0].disk.partition("{expert}")[0], []).append(entry)
    return list(ways.values())


def _is_there(entry: Matched, disk: Mapping[str, object]) -> bool:
    """True if `disk` has the first expert's tensor of a rule, or the part of one of its halves."""
    rule, fields, half = entry
    part = fields.get("part", "")
    parts = {part, *(part.removeprefix(begin) for begin in HALVES)}
    return any(_first_of([(rule, fields | {"part": one}, half)]) in disk for one in parts)


def _first_of(stacked: list[Matched]) -> str:
    """The name of the first expert's first tensor."""
    rule, fields, _ = stacked[0]
    return rule.disk.format(**fields, expert=0)


def _whole(rule: StackRule, name: str, shape: Sequence[int]) -> TensorSource:
    """The source of a parameter that one tensor fills."""
    source = TensorSource(name, (), tuple(shape), either=rule.either)
    return source.turned() if rule.transposed else source


def disk_module(module: str, rules: Sequence[StackRule]) -> str:
    """Name on disk of the module that holds `module`'s weight; for stacked experts, of the first expert.

    The lists of modules in quantization_config use these names.
    """
    return disk_modules(module, rules)[0]


def disk_modules(module: str, rules: Sequence[StackRule]) -> list[str]:
    """`disk_module`, then its other names: of `StackRule.instead`, of whole rules, in other spellings."""
    param = f"{module}.weight"
    plain = tensor_sources(param, (1, 2), [rule for rule in rules if not rule.instead])
    other = tensor_sources(param, (1, 2), [rule for rule in rules if rule.instead])
    matching = [
        (rule, match.groupdict(), rule.half)
        for rule in rules
        if (match := _pattern(rule.param).fullmatch(param))
    ]
    whole = [rule.disk.format(**fields) for rule, fields, _ in matching if not rule.per_expert]
    stacked = [entry for entry in matching if entry[0].per_expert and not entry[0].instead]
    spelled = [_first_of(way) for way in _spellings(stacked)]
    names = (plain[0].name, other[0].name, *whole, *spelled)
    return list(dict.fromkeys(name.removesuffix(".weight") for name in names))


def _region(half: int | None, expert: int, shape: Sequence[int]) -> tuple[Index, tuple[int, ...]]:
    """(index into the parameter, shape of the tensor on disk) for one expert, or half of it."""
    if half is None:
        return (expert,), tuple(shape[1:])
    rows = shape[1] // 2
    return (expert, slice(half * rows, (half + 1) * rows)), (rows, *shape[2:])
