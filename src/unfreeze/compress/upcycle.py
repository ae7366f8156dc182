"""upcycle: a dense checkpoint becomes a mixture of experts with the same outputs, file by file.

Every expert of a layer is a copy of its dense MLP, y = f(x). A router chooses K of E and weighs them, and the
weights of the chosen sum to one: Σ_k w_k f(x) = f(x), whatever the router says. Source: Sparse Upcycling,
arXiv:2212.05055.

The families' arithmetic and fields are in upcycled.py. E experts, K chosen per token, D model width, I width
of the MLP.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unfreeze import models
from unfreeze.checkpoint.beside import files_beside
from unfreeze.checkpoint.keymap import tensor_sources
from unfreeze.checkpoint.manifest import UPCYCLE, Manifest, TensorInfo
from unfreeze.checkpoint.save import MAX_SHARD_BYTES, write_file
from unfreeze.checkpoint.shard import Shard
from unfreeze.checkpoint.tensors import NAME, TORCH_DTYPE, stored_tensor
from unfreeze.compress import shards
from unfreeze.compress.draws import Change, router_rows
from unfreeze.compress.shards import Progress, Record
from unfreeze.compress.upcycled import SHARED, config_of, family_of
from unfreeze.core.errors import CheckpointError
from unfreeze.quant.codec import Part, parts_nbytes

GATE, UP, DOWN = "gate", "up", "down"


@dataclass(frozen=True)
class Made:
    """One tensor of the new checkpoint: its name, dtype and shape, and how it is written."""

    name: str
    part: Part
    write: Callable[[Shard], None]


@dataclass
class MadeFile:
    """A file to write, and its tensors."""

    name: str
    tensors: list[Made] = field(default_factory=list[Made])

    @property
    def parts(self) -> Mapping[str, Part]:
        return {one.name: one.part for one in self.tensors}


@dataclass(frozen=True)
class Upcycle:
    """The wish: E experts, K of them per token, and how the experts and the router begin."""

    experts: int
    top_k: int
    change: Change
    router_std: float


@dataclass
class Work:
    """A checkpoint to make: its tensors in order, and its config.json."""

    manifest: Manifest
    tensors: list[Made]
    config: dict[str, Any]


def dense_work(manifest: Manifest, wish: Upcycle) -> Work:
    """The mixture of a dense checkpoint. Raises ConfigError for a family that has none (upcycled.py)."""
    family = family_of(manifest)
    old = models.shape(manifest.config)
    config = config_of(manifest, old, wish.experts, wish.top_k)
    new = models.shape(config)
    disk = manifest.by_model_name()
    tensors: list[Made] = []
    for name, info in disk.items():
        layer, matrix = _of_mlp(name)
        if layer is None:
            tensors.append(copied(info.name, info))
        elif matrix == DOWN:  # once per layer, for all three
            mlp = {part: disk[f"model.layers.{layer}.mlp.{part}_proj.weight"] for part in (GATE, UP, DOWN)}
            tensors += _layer(mlp, layer, new, wish, SHARED if family.shared else 0)
    return Work(manifest, tensors, config)


def _of_mlp(name: str) -> tuple[int | None, str]:
    """(layer, matrix) of a dense MLP's weight; (None, "") for another tensor."""
    pieces = name.split(".")
    if name.startswith("model.layers.") and pieces[3:4] == ["mlp"] and name.endswith("_proj.weight"):
        return int(pieces[2]), pieces[4].removesuffix("_proj")
    return None, ""


def _layer(
    mlp: Mapping[str, TensorInfo], layer: int, new: models.Shape, wish: Upcycle, shared: int
) -> Iterator[Made]:
    """The router and the experts of a layer, and the shared expert if the family has one."""
    intermediate, hidden = mlp[GATE].shape
    shared = min(shared, intermediate)
    module, rules, dtype = f"model.layers.{layer}.mlp", models.rules(new), mlp[GATE].dtype
    router = tensor_sources(f"{module}.gate.weight", (wish.experts, hidden), rules)[0].name
    rows = router_rows(wish.experts, hidden, wish.router_std, wish.change.seed, layer)
    yield put(router, rows.to(TORCH_DTYPE[dtype]))
    for projection, shape in (
        ("gate_up_proj", (wish.experts, 2 * intermediate, hidden)),
        ("down_proj", (wish.experts, hidden, intermediate)),
    ):
        for source in tensor_sources(f"{module}.experts.{projection}.weight", shape, rules):
            expert, half = source.index[0], source.index[1] if len(source.index) > 1 else None
            matrix = DOWN if half is None else (UP if isinstance(half, slice) and half.start else GATE)
            halved = shared if matrix == DOWN else 0
            yield _expert(source.name, mlp[matrix], wish.change, f"{layer}.{expert}", matrix, halved)
    if shared:
        yield from _shared(module, mlp, shared)


def _expert(name: str, info: TensorInfo, change: Change, place: str, matrix: str, halved: int) -> Made:
    """One matrix of an expert. halved: the first channels of down that the shared expert has too."""
    if change.none and not halved:
        return copied(name, info)

    def write(shard: Shard) -> None:
        weight = change.applied(stored_tensor(info), place, matrix)
        if halved:
            weight = weight.clone()
            weight[:, :halved] *= 0.5
        shard.put(name, weight)

    return Made(name, (info.dtype, info.shape), write)


def _shared(module: str, mlp: Mapping[str, TensorInfo], width: int) -> Iterator[Made]:
    """Qwen2-MoE's shared expert: the first `width` channels of the dense MLP, under a gate of zero.

    Its gate is sigmoid(0) = 1/2, and the routed experts have these channels of down halved: the sum is the
    dense MLP's, 1/2 + 1/2. (A down of zeros would be exact too, but its gate and up would have no gradient.)
    """
    for matrix, info in mlp.items():
        name = f"{module}.shared_expert.{matrix}_proj.weight"
        rows = matrix != DOWN
        shape = (width, info.shape[1]) if rows else (info.shape[0], width)

        def write(shard: Shard, name: str = name, info: TensorInfo = info, rows: bool = rows) -> None:
            weight = stored_tensor(info)
            shard.put(name, weight[:width] if rows else weight[:, :width])

        yield Made(name, (info.dtype, shape), write)
    zero = torch.zeros(1, mlp[GATE].shape[1], dtype=TORCH_DTYPE[mlp[GATE].dtype])
    yield put(f"{module}.shared_expert_gate.weight", zero)


def copied(name: str, info: TensorInfo) -> Made:
    """A tensor with the bytes of another."""
    return Made(name, (info.dtype, info.shape), lambda shard: shard.copy(name, info))


def put(name: str, tensor: Tensor) -> Made:
    """A small tensor that is there already."""
    return Made(name, (NAME[tensor.dtype], tuple(tensor.shape)), lambda shard: shard.put(name, tensor))


def made_files(tensors: Sequence[Made], limit: int = MAX_SHARD_BYTES) -> list[MadeFile]:
    """The tensors in files of at most `limit` bytes; a larger tensor has its own."""
    files: list[MadeFile] = []
    held = 0
    for one in tensors:
        size = parts_nbytes([one.part])
        if not files or held + size > limit:
            files.append(MadeFile(""))
            held = 0
        held += size
        files[-1].tensors.append(one)
    if len(files) == 1:
        files[0].name = "model.safetensors"
        return files
    for number, file in enumerate(files, 1):
        file.name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
    return files


def write(
    work: Work,
    out: Path,
    inputs: dict[str, Any],
    progress: Progress | None,
    kind: tuple[str, str] = (UPCYCLE, "upcycle"),
) -> Record:
    """Write the checkpoint into `out`, or the files that are still missing there (shards.py).

    kind: the record's file, and the noun of messages.
    """
    twice = len(work.tensors) - len({one.name for one in work.tensors})
    if twice:
        raise CheckpointError(f"{twice} tensors would be written twice", next="report it with config.json")
    files = made_files(work.tensors)
    record = shards.begun(Record(inputs, file=kind[0], noun=kind[1]), out)

    def write_file_of(file: MadeFile, shard: Shard, advance: Callable[[int], None]) -> dict[str, Any]:
        for one in file.tensors:
            one.write(shard)
            advance(parts_nbytes([one.part]))
        return {}

    def finish() -> None:
        beside = files_beside(work.manifest.path)
        for name, path in beside.items():
            write_file(out / name, path.read_bytes())
        record.more["carried"] = list(beside)
        write_file(out / "config.json", json.dumps(work.config, indent=2, ensure_ascii=False) + "\n")
        shards.write_index(out, files)
        record.finished = True
        record.write(out)

    shards.write_files(out, files, record, write_file_of, finish, progress)
    return record


def inputs_of(manifest: Manifest, **flags: object) -> dict[str, Any]:
    """The inputs as the record keeps them: equal for equal files, at any path. flags: by their names."""
    base = shards.files_fingerprint(manifest.path / "config.json", *manifest.files)
    return {"base": base, **{name.replace("_", "-"): value for name, value in flags.items()}}
