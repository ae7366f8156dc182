"""A merge's plan for each weight on disk, from names, dtypes and shapes alone.

A weight is one tensor, or the parts of a packed one. It is copied byte for byte, or written again: in its own
format ("same"), in bf16, in Kimi's INT4 or another quantized format. An adapter's ΔW is added on the way.

E experts, [out, in] a matrix in y = x Wᵀ.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from unfreeze import models
from unfreeze.checkpoint import nested
from unfreeze.checkpoint.keymap import StackRule, TensorSource, tensor_sources
from unfreeze.checkpoint.manifest import Manifest, TensorInfo
from unfreeze.checkpoint.tensors import stored_tensor
from unfreeze.compress.deltas import GATE, UP, Changes, MatrixPlace
from unfreeze.compress.quantize.formats import KIMI, Packing, fused, holds, splits, stored_parts
from unfreeze.core.dtypes import FLOATS
from unfreeze.core.errors import ConfigError
from unfreeze.models.blocks.experts import Experts
from unfreeze.models.decoder import Decoder
from unfreeze.models.groups import group_of
from unfreeze.models.targets import candidates
from unfreeze.quant import spelling
from unfreeze.quant.codec import Codec, Part, kept_suffixes
from unfreeze.quant.int4 import Int4
from unfreeze.quant.scheme import Scheme, is_unread

Format = Literal["same", "bf16", "int4"]
_LAYER = re.compile(r"\.layers\.([0-9]+)\.")


@dataclass(frozen=True)
class WeightHome:
    """The place in the model of a weight on disk.

    place       of the matrix; for a stack on disk, of expert 0
    shape       (out, in) of one matrix
    experts     matrices in the tensor on disk; None: not a stack
    transposed  the tensor on disk has in and out swapped
    """

    place: MatrixPlace
    shape: tuple[int, int]
    experts: int | None = None
    transposed: bool = False


@dataclass(frozen=True)
class Out:
    """An output of (a half of) a matrix: a module's name on disk with the prefix.

    whole  the tensor's own name, without a part after it, for stacked experts
    half   GATE or UP rows only; None: all rows
    """

    name: str
    half: int | None = None
    whole: bool = False
    transposed: bool = False


@dataclass(frozen=True)
class Weight:
    """One weight of the base, and its plan.

    name     of its module on disk, without the prefix
    parts    suffix -> tensor on disk; "": a dense one
    codec    its present one; None: dense
    home     None: not a linear layer or expert of the language model
    adapted  True if an adapter changes it
    to       a codec, the dtype of a dense tensor, or None: copied unchanged
    outputs  name in the new files -> (dtype, shape)
    instead  the values to write, of a module that trained fully
    """

    name: str
    parts: dict[str, TensorInfo]
    codec: Codec | None = None
    home: WeightHome | None = None
    adapted: bool = False
    to: Codec | str | None = None
    outputs: dict[str, Part] = field(default_factory=dict[str, Part])
    instead: Tensor | None = field(default=None, compare=False)

    @property
    def group(self) -> str:
        return group_of(self.home.place.site if self.home else self.name)

    @property
    def file(self) -> str:
        """The base's file that holds its first part."""
        return next(iter(self.parts.values())).file.name

    @property
    def in_place(self) -> bool:
        """True if the output has the names and shapes of the input."""
        return (
            self.codec is None if isinstance(self.to, str) else self.to is not None and self.to == self.codec
        )

    def experts(self) -> range:
        """The numbers of the matrices of the tensor on disk."""
        return range(self.home.experts if self.home and self.home.experts else 1)


class MergeWork:
    """The weights of a base checkpoint with an adapter, and the plan for each."""

    def __init__(self, manifest: Manifest, model: Decoder, deltas: Changes, to: Format | Packing):
        self.manifest, self.model, self.to = manifest, model, to
        self.packing = Packing(KIMI) if to == "int4" else to if isinstance(to, Packing) else None
        self.rules = models.rules(model.shape)
        instead = tuple(rule for rule in self.rules if rule.instead)
        split = self.packing is not None and splits(self.packing.codec, model.shape.model_type)
        self.packed_rules = instead if instead and split else self.rules
        self.scheme = manifest.scheme()
        disk = manifest.by_model_name()
        self.instead = dict(_instead(self, deltas, disk))
        self.vocabulary = grown_vocabulary(self, deltas)
        self.homes = dict(_homes(self, disk))
        weights = _weights(disk, self.scheme, self.homes)
        if to != "same":  # scales of activations belong to the old format
            weights = (weight for weight in weights if self.scheme is None or not is_unread(weight.name))
        self.weights = [self._planned(weight, deltas) for weight in weights]
        _check_all_found(self.weights, deltas)

    @property
    def codecs(self) -> dict[Codec, Weight]:
        """The codecs of adapted or converted weights, each with the first such weight."""
        first: dict[Codec, Weight] = {}
        for weight in self.weights:
            if weight.to is not None and not isinstance(weight.to, str):
                first.setdefault(weight.to, weight)
        return first

    def outs(self, weight: Weight, expert: int) -> list[Out]:
        """The outputs of matrix `expert` of a weight that changes its names."""
        packs = weight.to is not None and not isinstance(weight.to, str)
        return self._outs(weight, expert, self.packed_rules if packs else self.rules)

    def _outs(self, weight: Weight, expert: int, rules: Sequence[StackRule]) -> list[Out]:
        home = weight.home
        if home is None or home.experts is None:
            return [Out(self._named(weight.name))]
        module = f"{home.place.site}.{home.place.projection}"
        sources = tensor_sources(f"{module}.weight", (home.experts, *home.shape), rules)
        if not sources[0].index:
            return [Out(self._named(sources[0].name), whole=True, transposed=sources[0].transposed)]
        own = [source for source in sources if source.index[0] == expert]
        return [Out(self._named(_module(source)), _half(source)) for source in own]

    def part_name(self, module: str, suffix: str) -> str:
        """The name on disk of a packed weight's part. module: with the prefix."""
        return spelling.on_disk(f"{module}.{suffix}")

    def _named(self, name: str) -> str:
        """The name on disk, with the prefix of a release that holds more than the language model."""
        return nested.name_on_disk(self.manifest.prefix, spelling.on_disk(name))

    def _planned(self, weight: Weight, deltas: Changes) -> Weight:
        """The weight with its plan."""
        if (value := self.instead.get(weight.name)) is not None:
            dense = weight.parts[""]
            dtype = "BF16" if self.to == "bf16" and _is_matrix(weight) else dense.dtype
            outputs = {dense.name: (dtype, tuple(value.shape))}
            return replace(weight, to=dtype, outputs=outputs, instead=value)
        home = weight.home
        if home is not None:
            adapted = home.place.projection in deltas.projections.get(home.place.site, ())
            weight = replace(weight, adapted=adapted)
        to = self._target(weight)
        weight = replace(weight, to=to)
        if to is not None and not weight.in_place:
            return replace(weight, outputs=dict(self._outputs(weight, to)))
        outputs: dict[str, Part] = {
            info.name: (to if isinstance(to, str) else info.dtype, info.shape)
            for info in weight.parts.values()
        }
        return replace(weight, outputs=outputs)

    def _target(self, weight: Weight) -> Codec | str | None:
        dense = next(iter(weight.parts.values())).dtype if weight.codec is None else ""
        if self.packing is not None and self._quantizes(weight, self.packing):
            same = isinstance(weight.codec, Int4) and weight.codec.group_size == KIMI.group_size
            return (weight.codec if weight.adapted else None) if same else self._codec(weight, self.packing)
        if weight.codec is not None and self.to != "same":
            return "BF16"
        if self.to == "bf16" and (weight.adapted or (_is_matrix(weight) and self._inside(weight))):
            return "BF16" if weight.adapted or dense != "BF16" else None
        if not weight.adapted:
            return None
        return weight.codec or dense

    def _inside(self, weight: Weight) -> bool:
        """True if a dense weight is the language model's; a vision tower beside it is unchanged."""
        prefix, name = self.manifest.prefix, weight.parts[""].name
        return name.startswith(prefix) or weight.group == "lm_head"

    def chosen(self, weight: Weight) -> bool:
        """True if a weight of a dense base is of the modules to pack."""
        return self.packing is not None and weight.home is not None and self.packing.chooses(weight.group)

    def _quantizes(self, weight: Weight, packing: Packing) -> bool:
        """True if a weight is packed: if the base packs it, or the wish for a dense base says so."""
        if not self.chosen(weight) if self.scheme is None else weight.codec is None:
            return False
        return holds(packing.codec, *self.shape(weight))

    def _codec(self, weight: Weight, packing: Packing) -> Codec:
        """The codec of a weight, which for stacked experts may have a layout of its own."""
        whole = any(out.whole for out in self._outs(weight, 0, self.packed_rules))
        return fused(packing.codec, self.model.shape.model_type) if whole else packing.codec

    def shape(self, weight: Weight) -> tuple[int, int]:
        """(out, in) of a matrix of the weight."""
        if weight.home is not None:
            return weight.home.shape
        if weight.codec is None:
            *_, rows, columns = weight.parts[""].shape
            return rows, columns
        shapes = {suffix: weight.parts[suffix].shape for suffix in kept_suffixes(weight.codec)}
        *lead, rows, columns = weight.codec.shape(shapes)
        if lead:
            raise ConfigError(f"{weight.name} is a stack of packed matrices outside of the language model")
        return rows, columns

    def _outputs(self, weight: Weight, to: Codec | str) -> Iterator[tuple[str, Part]]:
        """(name, (dtype, shape)) of a weight that is written in another format."""
        rows, columns = self.shape(weight)
        for expert in weight.experts():
            for out in self.outs(weight, expert):
                half = rows if out.half is None else rows // 2
                if isinstance(to, str):
                    shape = (columns, half) if out.transposed else (half, columns)
                    lead = (len(weight.experts()),) if out.whole else ()
                    yield (out.name if out.whole else f"{out.name}.weight"), (to, (*lead, *shape))
                    continue
                lead = (len(weight.experts()),) if out.whole else ()
                for suffix, (dtype, shape) in stored_parts(to, half, columns).items():
                    yield self.part_name(out.name, suffix), (dtype, (*lead, *shape))


def _instead(
    work: MergeWork, deltas: Changes, disk: Mapping[str, TensorInfo]
) -> Iterator[tuple[str, Tensor]]:
    """(module on disk, values as on disk) of every weight that trained fully; a tied head has none there."""
    for name, value in deltas.whole.items():
        source = tensor_sources(name, value.shape, work.rules, disk)[0]
        if source.name not in disk:
            continue
        if source.index:
            raise ConfigError(
                f"{name} trained fully, and is a part of {source.name} in the base's files",
                next="unfreeze export RUN --for peft, and serve the adapter",
            )
        yield _module(source), value.mT if source.transposed else value
    adapter, tied = deltas.embeddings, work.model.shape.tied
    if tied and (adapter is not None or "lm_head" in deltas.projections):
        raise ConfigError(
            "the head of this model is its embeddings, but the adapter changes the two apart",
            next="serve the adapter beside its base: unfreeze export RUN --for peft",
        )
    if adapter is not None:
        source = tensor_sources("model.embed_tokens.weight", (), work.rules, disk)[0]
        stored, change = stored_tensor(disk[source.name]), adapter.A.detach().t() @ adapter.B.detach().t()
        yield _module(source), stored.float() + adapter.scale * change
    most = max((max(ids) + 1 for ids, _ in deltas.rows.values()), default=0)
    for name, (ids, rows) in deltas.rows.items():
        source = tensor_sources(name, (), work.rules, disk)[0]
        if source.name not in disk:  # a tied head
            continue
        stored = stored_tensor(disk[source.name])
        value = stored.new_zeros((max(most, len(stored)), stored.shape[1]))
        value[: len(stored)] = stored
        value[torch.tensor(ids)] = rows.to(value.dtype)
        yield _module(source), value


def grown_vocabulary(work: MergeWork, deltas: Changes) -> int:
    """Rows of the merged embeddings if an adapter added tokens beyond the base's, else 0."""
    most = max((max(ids) + 1 for ids, _ in deltas.rows.values()), default=0)
    return most if most > work.model.shape.vocab_size else 0


def _homes(work: MergeWork, disk: Mapping[str, TensorInfo]) -> Iterator[tuple[str, WeightHome]]:
    """(module on disk, its home) of every linear layer and every expert's matrices."""
    for candidate in candidates(work.model):
        owner, site = candidate.owner, candidate.name
        if not isinstance(owner, Experts):
            shape = (owner.out_features, owner.in_features)
            source = tensor_sources(f"{site}.weight", shape, work.rules, disk)[0]
            yield _module(source), WeightHome(MatrixPlace(site), shape, None, source.transposed)
            continue
        E, D, I = owner.num_experts, owner.hidden_size, owner.intermediate_size
        for projection, shape in ((owner.first, (owner.before * I, D)), ("down_proj", (D, I))):
            module = f"{site}.{projection}"
            if work.scheme is not None and work.scheme.stored(module, disk) is not None:
                yield module, WeightHome(MatrixPlace(site, projection), shape, E)
                continue
            for source in tensor_sources(f"{module}.weight", (E, *shape), work.rules, disk):
                info = disk.get(source.name)
                if source.either and info and info.shape == source.turned().shape != source.shape:
                    source = source.turned()  # as in checkpoint/resolve.py
                if not source.index:
                    yield (
                        _module(source),
                        WeightHome(MatrixPlace(site, projection), shape, E, source.transposed),
                    )
                    continue
                expert, half = source.index[0], _half(source)
                assert isinstance(expert, int)
                rows = shape[0] if half is None else shape[0] // 2
                yield (
                    _module(source),
                    WeightHome(MatrixPlace(site, projection, expert, half), (rows, shape[1])),
                )


def _weights(
    disk: Mapping[str, TensorInfo], scheme: Scheme | None, homes: Mapping[str, WeightHome]
) -> Iterator[Weight]:
    """Each tensor on disk once, parts of a packed weight together; by file, then by layer."""
    packed: dict[str, Weight] = {}
    weights: list[Weight] = []
    for name, info in disk.items():
        codec = scheme.part_of(name, disk) if scheme is not None else None
        if codec is None:
            module = name.removesuffix(".weight")
            weights.append(Weight(module, {"": info}, home=homes.get(module)))
            continue
        module, _, suffix = name.rpartition(".")
        if module not in packed:
            packed[module] = Weight(module, {}, codec, homes.get(module))
            weights.append(packed[module])
        packed[module].parts[suffix] = info
    return iter(sorted(weights, key=_order))


def _order(weight: Weight) -> tuple[str, int, str]:
    layer = _LAYER.search(f".{weight.name}.")
    return weight.file, int(layer[1]) if layer else -1, weight.name


def _is_matrix(weight: Weight) -> bool:
    """True for a dense float tensor that a bf16 release has in bf16: not a vector, not the router's.

    Kimi's A_log [1, 1, H, 1] is a vector; a gate of shared experts [1, D] is none.
    """
    info = weight.parts.get("")
    if info is None or info.dtype not in FLOATS or weight.group == "router":
        return False
    return len(info.shape) == 2 or sum(size > 1 for size in info.shape) > 1


def _module(source: TensorSource) -> str:
    return source.name.removesuffix(".weight")


def _half(source: TensorSource) -> int | None:
    """GATE or UP of a source that is half of an expert's rows."""
    rows = source.index[1] if len(source.index) > 1 else None
    return None if rows is None else (UP if isinstance(rows, slice) and rows.start else GATE)


def _check_all_found(weights: list[Weight], deltas: Changes) -> None:
    """Check that every adapted projection has its weights on disk, each expert once."""
    wanted = {(site, name) for site, names in deltas.projections.items() for name in names}
    present = {
        (weight.home.place.site, weight.home.place.projection)
        for weight in weights
        if weight.adapted and weight.home
    }
    if wanted - present:
        raise ConfigError(
            f"{len(wanted - present)} adapted modules have no weight in the base's files; first:"
            f" {'.'.join(filter(None, min(wanted - present)))}",
            next="report this: a key map is wrong",
        )
