"""What the formats' own libraries write of a matrix and read of a folder."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import load_file
from torch import Tensor

from tests.quant.compressed_tensors_oracle import theirs

LAYOUTS = {
    "int4": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32}),
    "int8": ("pack-quantized", {"num_bits": 8, "strategy": "channel"}),
    "fp8": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    "mxfp4": (
        "mxfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": torch.uint8},
    ),
    "nvfp4": (
        "nvfp4-pack-quantized",
        {
            "num_bits": 4,
            "type": "float",
            "strategy": "tensor_group",
            "group_size": 16,
            "scale_dtype": torch.float8_e4m3fn,
        },
    ),
}
NF4 = "weight.quant_state.bitsandbytes__nf4"


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """All tensors, read by the safetensors library."""
    return {
        name: part for file in sorted(folder.glob("*.safetensors")) for name, part in load_file(file).items()
    }


def scheme(to: str) -> QuantizationScheme:
    return QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(symmetric=True, **LAYOUTS[to][1]))


def compressed(to: str, weight: Tensor) -> dict[str, Tensor]:
    """compressed-tensors' parts of W float32 with scales in bf16: Kimi's absmax / 7 for int4, else its own."""
    layout, arguments = LAYOUTS[to]
    parts, _ = theirs(layout, weight, symmetric=True, **arguments)
    if to not in ("int4", "int8", "fp8"):
        return parts
    scale = parts["weight_scale"]
    if to == "int4":
        scale = weight.unflatten(1, (-1, 32)).abs().amax(-1) / 7
    compressor = BaseCompressor.get_value_from_registry(layout)
    return compressor.compress({"weight": weight, "weight_scale": scale.bfloat16()}, scheme(to))


def expanded(to: str, parts: dict[str, Tensor]) -> Tensor:
    """What the library reads of the parts of one matrix. NF4: bitsandbytes' formula, in float32."""
    if to != "nf4":
        return BaseCompressor.get_value_from_registry(LAYOUTS[to][0]).decompress(parts, scheme(to))["weight"]
    state = json.loads(bytes(parts[NF4].tolist()))
    maps, blocks = parts["weight.nested_quant_map"], parts["weight.nested_absmax"].repeat_interleave(256)
    absmax = maps[parts["weight.absmax"].long()]
    absmax = absmax * blocks[: len(absmax)] + torch.tensor(state["nested_offset"])
    codes = torch.stack((parts["weight"] >> 4, parts["weight"] & 15), -1).flatten().long()
    weight = parts["weight.quant_map"][codes] * absmax.repeat_interleave(64)[: len(codes)]
    return weight.view(state["shape"]).to(getattr(torch, state["dtype"]))


def modules_of(tensors: dict[str, Tensor], to: str) -> dict[str, dict[str, Tensor]]:
    """module -> its parts, for every quantized one."""
    mark = NF4 if to == "nf4" else "weight_scale"
    names = [name.removesuffix(f".{mark}") for name in tensors if name.endswith(f".{mark}")]
    return {
        name: {
            key.removeprefix(f"{name}."): part for key, part in tensors.items() if key.startswith(f"{name}.")
        }
        for name in names
    }


def dense(tensors: dict[str, Tensor], to: str) -> dict[str, Tensor]:
    """The same checkpoint with every quantized matrix expanded by its library."""
    modules = modules_of(tensors, to)
    whole = {f"{name}.weight": expanded(to, parts) for name, parts in modules.items()}
    rest = {n: t for n, t in tensors.items() if not n.startswith(tuple(f"{name}." for name in modules))}
    return rest | whole
