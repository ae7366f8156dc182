"""A trained model as the tensors of a checkpoint.

Weights covered by config.json's quantization_config become codes and scales; the others keep the dtype they
came in. This is the inverse of loading, for models whose weights were trained dense. `unfreeze pretrain`
writes tiny-k2's INT4 experts with it. `--train all` writes its model in the input's format, with the tensors
beside the language model unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from unfreeze import models
from unfreeze.checkpoint.keymap import disk_module, tensor_sources
from unfreeze.checkpoint.manifest import Manifest
from unfreeze.checkpoint.nested import name_on_disk
from unfreeze.checkpoint.save import disk_tensors
from unfreeze.checkpoint.tensors import TORCH_DTYPE, stored_tensor
from unfreeze.models.blocks.experts import ExpertWeight
from unfreeze.models.blocks.linear import Linear
from unfreeze.models.decoder import Decoder
from unfreeze.quant import Scheme, recognise
from unfreeze.quant.codec import Codec
from unfreeze.quant.halves import stacked

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
# the router's selection bias (fp32 in Kimi's and DeepSeek's releases), and the decay of a recurrent state
KEPT_FP32 = ("e_score_correction_bias", ".expert_bias", ".A_log", ".dt_bias", ".D")


def declared_dtype(config: Mapping[str, Any]) -> torch.dtype:
    """The dtype that a config.json names for its weights; bf16 if it names none."""
    inner: Mapping[str, Any] = config.get("text_config") or {}
    named = (table.get(field) for table in (config, inner) for field in ("dtype", "torch_dtype"))
    return DTYPES.get(str(next(filter(None, named), None)), torch.bfloat16)


def published(
    model: Decoder,
    config: Mapping[str, Any],
    *,
    dtypes: Mapping[str, torch.dtype] | None = None,
    values: Mapping[str, Tensor] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name on disk, tensor) for every weight of `model`, in the format that `config` declares.

    `config` is a config.json. Yields one parameter at a time. A weight that quantization_config covers and
    its `ignore` list doesn't name is quantized from its values as they are (float32 ones are not rounded to
    bf16 first). A tied head is not written.

    dtypes   name on disk -> the dtype it is written in (stored_dtypes); others get config.json's, or bf16 if
             it has none
    values   parameter name -> the tensor to write instead of the model's own: float32 masters of bf16
             weights. Each is requested once, when its turn comes, so a mapping may compute it then

    Raises ConfigError for a format that cannot be written.
    """
    declared = declared_dtype(config)
    rules, tied = models.rules(model.shape), models.tied(model.shape)
    codecs = quantized_modules(model, recognise(config))
    for param, own in model.state_dict().items():
        if param in tied:
            continue
        tensor = values[param] if values is not None and param in values else own
        codec = codecs.get(param.removesuffix(".weight"))
        if codec is not None:
            # experts are still stacked, so the codec's parts are stacked like the weight
            whole = stacked(codec, *tensor.shape[-2:]) if param.endswith(".gate_up_proj.weight") else codec
            parts = whole.quantize(tensor.detach().float())
            named = ((f"{param.removesuffix('weight')}{suffix}", part) for suffix, part in parts.items())
            yield from disk_tensors(named, rules, partial(_always, codec))
            continue
        for name, dense in disk_tensors([(param, tensor.detach())], rules):
            default = torch.float32 if name.endswith(KEPT_FP32) else declared
            kept = not dense.is_floating_point()  # a table of experts (DeepSeek-V4)
            yield name, dense if kept else dense.to((dtypes or {}).get(name, default))


def _always(codec: Codec, module: str) -> Codec:
    """The codec of one weight, for a `module` that is part of it or all of it."""
    return codec


def stored_dtypes(model: Decoder, manifest: Manifest) -> dict[str, torch.dtype]:
    """Name on disk, as `published` writes it -> its dtype in the checkpoint.

    Experts that are stored fused are listed one by one.
    """
    disk = manifest.by_model_name()
    stand_in = {name: alias for alias, name in models.tied(model.shape).items()}
    dtypes = {}
    for written, stored in _names(model, manifest):
        for own, name in zip_longest(written, stored, fillvalue=stored[-1]):
            info = disk.get(name) or disk.get(stand_in.get(name, ""))
            if info is not None:
                dtypes[own] = TORCH_DTYPE[info.dtype]
    return dtypes


def _names(model: Decoder, manifest: Manifest) -> Iterator[tuple[list[str], list[str]]]:
    """Yield each parameter's names as `published` writes them, and as the checkpoint has them."""
    disk, rules = manifest.by_model_name(), models.rules(model.shape)
    for param, tensor in model.state_dict().items():
        written = [source.name for source in tensor_sources(param, tensor.shape, rules)]
        yield written, [source.name for source in tensor_sources(param, tensor.shape, rules, disk)]


def named_as_stored(
    model: Decoder, manifest: Manifest, tensors: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors as `published` names them under their names in the checkpoint's files.

    A name that is not there (experts that are stored fused) gets the prefix of the others.
    """
    disk = manifest.by_model_name()
    spelled = {  # a release may have several spellings (DeepSeek-V4)
        own: name
        for written, stored in _names(model, manifest)
        if len(written) == len(stored)
        for own, name in zip(written, stored, strict=True)
    }
    for own, tensor in tensors:
        name = spelled.get(own, own)
        yield (disk[name].name if name in disk else name_on_disk(manifest.prefix, own)), tensor


def carried(model: Decoder, manifest: Manifest) -> Iterator[tuple[str, Tensor]]:
    """Yield (name on disk, tensor) for every tensor of the checkpoint that is not part of `model`.

    These are multi-token prediction heads and a vision tower. They are not trained and stay unchanged. Each
    is read when its turn comes.
    """
    disk, rules = manifest.by_model_name(), models.rules(model.shape)
    used = {
        source.name
        for name, tensor in model.state_dict().items()
        for source in tensor_sources(name, tensor.shape, rules, disk)
    }
    used |= models.tied(model.shape).keys()
    for name, info in disk.items():
        if name not in used:
            yield info.name, stored_tensor(info)


def quantized_modules(model: Decoder, scheme: Scheme | None) -> dict[str, Codec]:
    """Name -> codec of the linear layers and stacked experts that a quantization_config covers."""
    if scheme is None:
        return {}
    linears = [name for name, module in model.named_modules() if isinstance(module, (Linear, ExpertWeight))]
    rules = models.rules(model.shape)
    codecs = {name: scheme.codec_for(disk_module(name, rules)) for name in linears}
    return {name: codec for name, codec in codecs.items() if codec is not None}
