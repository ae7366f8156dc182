"""Bases in several shards and formats, and adapters for them that were not trained: B is random."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from unfreeze import models
from unfreeze.adapters import attach, save_adapter, sites
from unfreeze.checkpoint import open_checkpoint
from unfreeze.compress.deltas import Deltas
from unfreeze.compress.merge import inputs_of, merge
from unfreeze.compress.work import MergeWork
from unfreeze.config.lora import LoraConfig
from unfreeze.generate.open import open_model
from unfreeze.quant import Fp8

LLAMA = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
MOE = {"head_dim": 16, "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [32, 32]}


def sharded(folder: Path, tensors: dict[str, torch.Tensor], config: dict, count: int = 3) -> Path:
    """A checkpoint of `count` files, tensors dealt out in turn: the parts of a weight lie in different files."""
    folder.mkdir(parents=True)
    names = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    weight_map = {name: names[i % count] for i, name in enumerate(sorted(tensors))}
    for file in names:
        own = {name: tensors[name].contiguous() for name in tensors if weight_map[name] == file}
        save_file(own, folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def random_model(kind: str, settings: dict) -> tuple[dict[str, torch.Tensor], dict]:
    """(tensors, config.json) of a random model as transformers writes it."""
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**settings))
    return written(model)


def written(model) -> tuple[dict[str, torch.Tensor], dict]:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        tensors = load_file(Path(folder) / "model.safetensors")
        return tensors, json.loads((Path(folder) / "config.json").read_text())


@pytest.fixture(scope="session")
def bases(tmp_path_factory, two_layers) -> dict[str, Path]:
    """name -> folder."""
    root = tmp_path_factory.mktemp("bases")
    found = {}
    found["int4"] = root / "int4"
    sharded(
        found["int4"],
        load_file(two_layers / "model.safetensors"),
        json.loads((two_layers / "config.json").read_text()),
    )
    for name in ("generation_config.json", "tiktoken.model", "tokenizer_config.json"):
        shutil.copy(two_layers / name, found["int4"] / name)
    for name, kind, settings in (("llama", "Llama", LLAMA), ("moe", "Qwen3Moe", LLAMA | MOE)):
        tensors, config = random_model(kind, settings)
        half = {key: value.bfloat16() for key, value in tensors.items()}
        found[name] = sharded(root / name, half, config | {"dtype": "bfloat16"})
    # transformers' other way to write experts: each projection stacked
    stacked = {key: value for key, value in half.items() if ".experts." not in key}
    for layer in range(2):
        own = f"model.layers.{layer}.mlp.experts"
        each = {
            p: torch.stack([half[f"{own}.{e}.{p}_proj.weight"] for e in range(4)])
            for p in ("gate", "up", "down")
        }
        stacked[f"{own}.gate_up_proj"] = torch.cat((each["gate"], each["up"]), 1)
        stacked[f"{own}.down_proj"] = each["down"]
    found["stacked"] = sharded(root / "stacked", stacked, config | {"dtype": "bfloat16"})
    packed = {}
    for key, tensor in half.items():
        parts = Fp8((32, 32)).quantize(tensor.float()) if key.endswith("_proj.weight") else {"weight": tensor}
        packed |= {key.removesuffix("weight") + suffix: part for suffix, part in parts.items()}
    found["fp8"] = sharded(root / "fp8", packed, config | {"quantization_config": FP8})
    return found


def adapter_for(base: Path, folder: Path, targets=("all-linear",), size: float = 0.02, layout="peft") -> Path:
    """An adapter of rank 4 with random factors."""
    model = open_model(open_checkpoint(base))
    attach(model, LoraConfig(rank=4, alpha=6.0, targets=targets), seed=0)
    with torch.no_grad():
        for number, site in enumerate(sites(model)):
            generator = torch.Generator().manual_seed(number)
            for name, parameter in site.adapter.named_parameters():
                if name.endswith("B"):
                    parameter.copy_(size * torch.randn(parameter.shape, generator=generator))
    return save_adapter(model, folder, layout, base_name=str(base))


@pytest.fixture
def adapter(bases, tmp_path):
    """base name -> (adapter as peft has it, the same with a pair per expert)."""

    def make(base: str, **options) -> tuple[Path, Path]:
        return tuple(
            adapter_for(bases[base], tmp_path / f"{base}-{layout}", layout=layout, **options)
            for layout in ("peft", "per-expert")
        )

    return make


def run_merge(base: Path, adapter: Path, out: Path, to="same", scales="refit", progress=None):
    """The merge as the command does it, without the command. -> its record."""
    manifest = open_checkpoint(base)
    model = models.meta_model(models.shape(manifest.config), manifest, torch.float32)
    deltas = Deltas(model, adapter)
    work = MergeWork(manifest, model, deltas, to)
    return merge(work, deltas, out, inputs_of(manifest, adapter, to, scales), scales, progress)


@pytest.fixture(scope="session")
def merging():
    return SimpleNamespace(run=run_merge, adapter_for=adapter_for, sharded=sharded, random_model=random_model)
