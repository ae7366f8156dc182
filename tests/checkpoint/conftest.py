"""A small checkpoint in Kimi's on-disk format, made by compressed-tensors' packing and the safetensors
library (not by our writer)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors.pack_quantized import pack_to_int32
from safetensors.torch import save_file

from unfreeze.checkpoint import StackRule

STACK = "model.layers.{layer}.mlp.experts."
RULES = (
    StackRule(STACK + "{expert}.gate_proj.{part}", STACK + "gate_up_proj.{part}", 0),
    StackRule(STACK + "{expert}.up_proj.{part}", STACK + "gate_up_proj.{part}", 1),
    StackRule(STACK + "{expert}.down_proj.{part}", STACK + "down_proj.{part}", None),
    StackRule(STACK + "gate_up_proj", STACK + "gate_up_proj.weight", None),
)
E, D, I, GROUP = 3, 64, 32, 32
CONFIG = {
    "model_type": "kimi_k2",
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    "num_bits": 4,
                    "type": "int",
                    "symmetric": True,
                    "strategy": "group",
                    "group_size": GROUP,
                },
            }
        },
        "ignore": ["lm_head"],
    },
}


def kimi_tensors(prefix: str = "") -> dict[str, torch.Tensor]:
    """name on disk -> tensor."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    tensors = {
        "model.embed_tokens.weight": normal(48, D),
        "model.norm.weight": normal(D),
        "lm_head.weight": normal(48, D),
    }
    tensors["model.layers.0.mlp.gate.e_score_correction_bias"] = torch.randn(E, generator=generator)
    for e in range(E):
        for proj, rows, columns in (("gate_proj", I, D), ("up_proj", I, D), ("down_proj", D, I)):
            base = f"model.layers.0.mlp.experts.{e}.{proj}"
            codes = torch.randint(-7, 8, (rows, columns), dtype=torch.int8, generator=generator)
            tensors[f"{base}.weight_packed"] = pack_to_int32(codes, 4)
            tensors[f"{base}.weight_scale"] = normal(rows, columns // GROUP).abs()
            tensors[f"{base}.weight_shape"] = torch.tensor([rows, columns], dtype=torch.int32)
    return {prefix + name: tensor for name, tensor in tensors.items()}


def kimi_params(dtype: torch.dtype = torch.bfloat16) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """What a model of that checkpoint wants filled."""
    stack = "model.layers.0.mlp.experts."
    return {
        "model.embed_tokens.weight": (dtype, (48, D)),
        "model.layers.0.mlp.gate.e_score_correction_bias": (torch.float32, (E,)),
        stack + "gate_up_proj.weight_packed": (torch.int32, (E, 2 * I, D // 8)),
        stack + "gate_up_proj.weight_scale": (torch.bfloat16, (E, 2 * I, D // GROUP)),
        stack + "down_proj.weight_packed": (torch.int32, (E, D, I // 8)),
        stack + "down_proj.weight_scale": (torch.bfloat16, (E, D, I // GROUP)),
        "model.norm.weight": (dtype, (D,)),
        "lm_head.weight": (dtype, (48, D)),
    }


def write(
    folder: Path, tensors: dict[str, torch.Tensor], *, config: dict | None = None, shards: int = 1
) -> Path:
    """A checkpoint folder with one file, or `shards` files and an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG if config is None else config))
    names = list(tensors)
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = names[i::shards]
        save_file({name: tensors[name] for name in part}, folder / file)
        weight_map.update(dict.fromkeys(part, file))
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    return folder


class Kimi:
    """What the tests of this room share."""

    rules, config = RULES, CONFIG
    tensors, params, write = staticmethod(kimi_tensors), staticmethod(kimi_params), staticmethod(write)


@pytest.fixture
def kimi() -> type[Kimi]:
    return Kimi


@pytest.fixture
def rewrite_header() -> Callable[[Path, Callable[[dict], None]], None]:
    """Change a safetensors file's header, leaving the tensors' bytes as they are."""

    def change(file: Path, edit: Callable[[dict], None]) -> None:
        raw = file.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + length])
        edit(header)
        text = json.dumps(header).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])

    return change
