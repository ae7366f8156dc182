"""Experts of every quantized format come from disk with the resident model's gradients, to the bit."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file
from test_quantized_models import COMMON, ENDS, FORMATS, batch_of, some_ids

from unfreeze.adapters import attach
from unfreeze.checkpoint import open_checkpoint
from unfreeze.config.lora import LoraConfig
from unfreeze.core.layout import RESIDENT
from unfreeze.generate.open import open_model
from unfreeze.parallel.placement.residency import Streamed

SIZES = COMMON | {
    "num_hidden_layers": 3,
    "head_dim": 16,
    "moe_intermediate_size": 32,
    "num_experts": 3,
    "num_experts_per_tok": 2,
}


@pytest.fixture(params=FORMATS)
def release(request, tmp_path: Path) -> Path:
    """Three layers, so that a buffer holds two layers in turn."""
    table, packer = FORMATS[request.param]
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(**SIZES)
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(tmp_path / "random")
    packed = {}
    for name, tensor in open_random(tmp_path / "random").items():
        if name.endswith(ENDS):
            parts, _ = packer(tensor)
            module = name.removesuffix("weight")
            packed |= {f"{module}{part}": value.contiguous() for part, value in parts.items()}
        else:
            packed[name] = tensor
    folder = tmp_path / "packed"
    folder.mkdir()
    save_file(packed, folder / "model.safetensors", metadata={"format": "pt"})
    written = json.loads((tmp_path / "random/config.json").read_text())
    (folder / "config.json").write_text(json.dumps(written | {"quantization_config": table}))
    return folder


def open_random(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def gradients(folder: Path, experts: str) -> dict[str, torch.Tensor]:
    ids = some_ids(24)
    model = open_model(open_checkpoint(folder), layout=RESIDENT.but(experts=experts))
    attach(model, LoraConfig(rank=4), seed=0)
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    for name, value in trained.items():
        torch.manual_seed(len(name))
        value.data += 0.02 * torch.randn_like(value)
    if isinstance(model.residency, Streamed):
        model.residency.poison = True
    logits = model.lm_head(model.hidden(batch_of(ids)))
    torch.nn.functional.cross_entropy(logits[:-1], ids[1:]).backward()
    assert isinstance(model.residency, Streamed) == (experts != "device")
    return {name: value.grad for name, value in trained.items()} | {"logits": logits.detach()}


def test_the_resident_models_gradients(release: Path) -> None:
    wanted = gradients(release, "device")
    for experts in ("disk", "host"):
        found = gradients(release, experts)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted), experts
