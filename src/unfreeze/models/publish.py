"""A trained model as the tensors of a checkpoint: what config.json quantizes as codes and scales, the rest in bf16.

The inverse of loading, for models whose weights were trained dense: `unfreeze pretrain` writes tiny-k2's INT4 experts with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from unfreeze import models
from unfreeze.checkpoint.keymap import disk_tensors
from unfreeze.models.blocks.experts import ExpertWeight
from unfreeze.models.blocks.linear import Linear
from unfreeze.models.decoder import Decoder
from unfreeze.quant import from_quantization_config, is_ignored
from unfreeze.quant.codec import Codec

KEPT_FP32 = "e_score_correction_bias"  # the router's selection bias: Kimi's and DeepSeek's releases hold it in fp32


def published(model: Decoder, config: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """(name on disk, tensor) of every weight of `model`, in the format that `config` (a config.json) declares; one parameter at a time.

    A weight that quantization_config covers and its `ignore` list doesn't name is quantized from the model's values as they are (float32
    ones are not rounded to bf16 first). A tied head is not written. Raises ConfigError for a format that cannot be written.
    """
    quantization = from_quantization_config(config)
    codec, ignore = quantization if quantization else (None, [])
    return disk_tensors(_stored(model, codec, ignore), models.rules(model.shape), codec)


def _stored(model: Decoder, codec: Codec | None, ignore: list[str]) -> Iterator[tuple[str, Tensor]]:
    """(parameter name, tensor as it is stored), experts still stacked."""
    quantized = {f"{name}.weight" for name in quantized_modules(model, ignore)} if codec else set()
    tied = models.tied(model.shape)
    for name, tensor in model.state_dict().items():
        if name in tied:
            continue
        if codec is not None and name in quantized:
            yield from ((f"{name.removesuffix('weight')}{suffix}", part) for suffix, part in codec.quantize(tensor.float()).items())
        else:
            yield name, tensor if name.endswith(KEPT_FP32) else tensor.to(torch.bfloat16)


def quantized_modules(model: Decoder, ignore: list[str]) -> list[str]:
    """Names of the linear layers and stacked experts that the `ignore` list of a quantization_config leaves to be quantized."""
    linears = [name for name, module in model.named_modules() if isinstance(module, (Linear, ExpertWeight))]
    return [name for name in linears if not is_ignored(disk_name(name), ignore)]


def disk_name(module: str) -> str:
    """The checkpoint's name of a module, for the ignore list: stacked experts stand for their first."""
    return module.replace(".experts.gate_up_proj", ".experts.0.gate_proj").replace(".experts.down_proj", ".experts.0.down_proj")
