"""A float release as the manifest of the folder that `unfreeze quantize` would write of it.

    packed = packed_on_load(manifest, "int4", "all-linear")

Its tensors have the names, dtypes and shapes of that folder's, and its config the quantization_config. Each
part of a packed weight has a Packing (checkpoint/packing.py), by which it is made when it is read. So
training, plans and merges treat it as that folder, and nothing is written.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import torch

from unfreeze import models
from unfreeze.checkpoint.manifest import Manifest, TensorInfo
from unfreeze.checkpoint.packing import OnLoad, Packing, matrix_of
from unfreeze.compress.deltas import NoChanges
from unfreeze.compress.quantize.formats import nearest
from unfreeze.compress.released import config_of
from unfreeze.compress.work import MergeWork, Out, Weight
from unfreeze.core.errors import ConfigError
from unfreeze.models.blocks.experts import Experts
from unfreeze.quant.codec import Codec, parts_nbytes


def packed_on_load(manifest: Manifest, to: str, modules: str) -> Manifest:
    """The manifest of this release packed in the format `to` of FORMATS.

    modules: as `unfreeze quantize` takes them. Raises ConfigError for a release that is quantized already,
    and for a format that cannot hold it.
    """
    if manifest.is_packed():
        scheme = manifest.scheme()
        raise ConfigError(
            f"{manifest.path} is quantized already{f' ({scheme.name})' if scheme else ''}",
            next="leave --quantize out: it is trained in its own format",
        )
    model = models.meta_model(models.shape(manifest.config), manifest, torch.float32)
    work = MergeWork(manifest, model, NoChanges(), "int4")
    tensors: dict[str, TensorInfo] = {}
    for weight in work.weights:
        codec = weight.to
        if codec is None or isinstance(codec, str):
            tensors |= {info.name: info for info in weight.parts.values()}
            continue
        for packed in _parts(work, weight, codec):
            tensors[packed.name] = packed
    return replace(
        manifest,
        config=json.loads(config_of(work)),
        tensors=tensors,
        on_load=OnLoad(manifest, to, modules),
    )


def _parts(work: MergeWork, weight: Weight, codec: Codec) -> Iterator[TensorInfo]:
    """The tensors of a weight that is packed, each with what it is made from."""
    home, stored = weight.home, weight.parts[""]
    assert home is not None
    for expert in weight.experts():
        source = stored if home.experts is None else matrix_of(stored, expert)
        for out in work.outs(weight, expert):
            rows = None if out.half is None else _rows(work, weight, out)
            packing = Packing(source, codec, "", weight.name, nearest, home.transposed, rows)
            parts = codec.parts(*packing.shape)
            extras = codec.disk_extras(*packing.shape)
            parts |= {suffix: ("I32", (len(numbers),)) for suffix, numbers in extras.items()}
            for suffix, (dtype, shape) in parts.items():
                yield TensorInfo(
                    f"{out.name}.{suffix}",
                    dtype,
                    shape,
                    parts_nbytes([(dtype, shape)]),
                    source.file,
                    source.offset,
                    replace(packing, suffix=suffix, module=out.name),
                )


def _rows(work: MergeWork, weight: Weight, out: Out) -> tuple[int, int, int]:
    """(first, stop, step) of gate's or up's rows in an expert's fused matrix."""
    assert weight.home is not None and out.half is not None
    owner = work.model.get_submodule(weight.home.place.site)
    assert isinstance(owner, Experts)
    numbers = torch.arange(weight.home.shape[0]).unsqueeze(-1)
    own = owner.activation.split(numbers, 0)[out.half].flatten()
    first, step = int(own[0]), int(own[1] - own[0]) if len(own) > 1 else 1
    return first, int(own[-1]) + 1, step
