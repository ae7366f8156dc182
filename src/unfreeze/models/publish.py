"""A trained model as the tensors of a checkpoint.

What config.json quantizes becomes codes and scales; the rest has the dtype it came in.
The inverse of loading, for models whose weights were trained dense: `unfreeze pretrain` writes tiny-k2's INT4
experts with it, `--train all` what it was given, with the tensors beside the language model as they were.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from unfreeze import models
from unfreeze.checkpoint.keymap import disk_module, sources
from unfreeze.checkpoint.manifest import Manifest, TensorInfo
from unfreeze.checkpoint.save import disk_tensors
from unfreeze.checkpoint.tensors import TORCH_DTYPE
from unfreeze.models.blocks.experts import ExpertWeight
from unfreeze.models.blocks.linear import Linear
from unfreeze.models.decoder import Decoder
from unfreeze.quant import is_ignored, recognise
from unfreeze.quant.codec import Codec

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
KEPT_FP32 = (  # the router's selection bias: Kimi's and DeepSeek's releases hold it in fp32
    "e_score_correction_bias"
)


def published(
    model: Decoder,
    config: Mapping[str, Any],
    *,
    dtypes: Mapping[str, torch.dtype] | None = None,
    values: Mapping[str, Tensor] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Give (name on disk, tensor) of every weight of `model`, in the format that `config` declares.

    `config` is a config.json. One parameter at a time. A weight that quantization_config covers and its
    `ignore` list doesn't name is quantized from its values as they are (float32 ones are not rounded to bf16
    first). A tied head is not written.

    dtypes   name on disk -> the dtype it is written in (stored_dtypes); others get config.json's, or bf16
             where it has none
    values   parameter name -> what is written instead of the model's own tensor: float32 masters of bf16
             weights

    Raises ConfigError for a format that cannot be written.
    """
    quantization = recognise(config)
    codec, ignore = quantization if quantization else (None, [])
    declared = DTYPES.get(str(config.get("dtype") or config.get("torch_dtype")), torch.bfloat16)
    stored = _stored(model, codec, ignore, values or {})
    for name, tensor in disk_tensors(stored, models.rules(model.shape), codec):
        if codec is not None and name.rpartition(".")[2] in codec.suffixes:
            yield name, tensor
        else:
            default = torch.float32 if name.endswith(KEPT_FP32) else declared
            yield name, tensor.to((dtypes or {}).get(name, default))


def _stored(
    model: Decoder, codec: Codec | None, ignore: list[str], values: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """(parameter name, tensor), what is quantized as its parts, experts still stacked."""
    quantized = {f"{name}.weight" for name in quantized_modules(model, ignore)} if codec else set()
    tied = models.tied(model.shape)
    for name, own in model.state_dict().items():
        tensor = values.get(name, own).detach()
        if name in tied:
            continue
        if codec is not None and name in quantized:
            yield from (
                (f"{name.removesuffix('weight')}{suffix}", part)
                for suffix, part in codec.quantize(tensor.float()).items()
            )
        else:
            yield name, tensor


def stored_dtypes(model: Decoder, manifest: Manifest) -> dict[str, torch.dtype]:
    """Name on disk, as `published` writes it -> the dtype the checkpoint has it in.

    Experts stored fused are written one by one.
    """
    disk, rules = manifest.by_model_name(), models.rules(model.shape)
    stand_in = {name: alias for alias, name in models.tied(model.shape).items()}
    dtypes = {}
    for param, tensor in model.state_dict().items():
        stored = [source.name for source in sources(param, tensor.shape, rules, disk)]
        for written, name in zip_longest(
            (source.name for source in sources(param, tensor.shape, rules)), stored, fillvalue=stored[-1]
        ):
            info = disk.get(name) or disk.get(stand_in.get(name, ""))
            if info is not None:
                dtypes[written] = TORCH_DTYPE[info.dtype]
    return dtypes


def carried(model: Decoder, manifest: Manifest) -> list[TensorInfo]:
    """The checkpoint's tensors that are no part of `model`: heads for later tokens, a vision tower.

    Not trained, kept as they are.
    """
    disk, rules = manifest.by_model_name(), models.rules(model.shape)
    used = {
        source.name
        for name, tensor in model.state_dict().items()
        for source in sources(name, tensor.shape, rules, disk)
    }
    used |= models.tied(model.shape).keys()
    return [info for name, info in disk.items() if name not in used]


def quantized_modules(model: Decoder, ignore: list[str]) -> list[str]:
    """Names of the linear layers and stacked experts that a quantization_config doesn't `ignore`."""
    linears = [name for name, module in model.named_modules() if isinstance(module, (Linear, ExpertWeight))]
    rules = models.rules(model.shape)
    return [name for name in linears if not is_ignored(disk_module(name, rules), ignore)]
