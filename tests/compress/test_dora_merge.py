"""A merged DoRA adapter is W' = m ⊙ (W + ΔW) / ‖W + ΔW‖, as peft merges it; the rounding is that of W' − W."""

import json
from pathlib import Path

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file

from unfreeze import models
from unfreeze.adapters import LoraConfig, attach, save_adapter, sites
from unfreeze.checkpoint import open_checkpoint
from unfreeze.compress.deltas import Deltas, MatrixPlace
from unfreeze.compress.rounding import merged
from unfreeze.compress.work import MergeWork
from unfreeze.core.errors import AdapterError
from unfreeze.generate.open import open_model


def trained(base: Path, folder: Path, **options) -> Path:
    model = open_model(open_checkpoint(base))
    attach(model, LoraConfig(rank=4, alpha=6.0, dora=True, **options), seed=0)
    with torch.no_grad():
        for number, site in enumerate(sites(model)):
            generator = torch.Generator().manual_seed(number)
            site.adapter.B.copy_(0.02 * torch.randn(site.adapter.B.shape, generator=generator))
            site.adapter.m.mul_(1 + 0.1 * torch.randn(site.adapter.m.shape, generator=generator))
    return save_adapter(model, folder, base_name=str(base))


def merged_tensors(out: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in out.glob("*.safetensors") for name, t in load_file(file).items()}


def test_a_merge_equals_pefts(merging, tmp_path):
    tensors, config = merging.random_model("Llama", LLAMA)
    base = merging.sharded(tmp_path / "base", tensors, config | {"dtype": "float32"})
    folder = trained(base, tmp_path / "adapter")
    record = merging.run(base, folder, tmp_path / "out")
    oracle = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(oracle, folder).merge_and_unload().state_dict()
    ours = merged_tensors(tmp_path / "out")
    changed = [name for name in ours if not torch.equal(ours[name], tensors[name])]
    assert len(changed) == 14 == len(record.rows)
    for name in ours:
        assert (ours[name] - theirs[name]).abs().max() < 1e-5
    # control arm: m left out is another matrix
    name = changed[0]
    assert (ours[name] - tensors[name]).norm() > 1e-3

    # one matrix at a time, as a GGUF is written
    model = models.meta_model(models.shape(config), open_checkpoint(base), torch.float32)
    work = MergeWork(open_checkpoint(base), model, deltas := Deltas(model, folder), "same")
    weight = next(weight for weight in work.weights if weight.adapted)
    assert torch.allclose(merged(work, weight, deltas, 0), ours[f"{weight.name}.weight"], atol=1e-6)

    # what the figures of rounding are relative to: ‖W' − W‖
    row = next(row for row in record.rows if row.module == name.removesuffix(".weight"))
    assert row.delta == pytest.approx(float((theirs[name] - tensors[name]).norm()), rel=1e-4)
    assert row.ways["F32"].kept == pytest.approx(1, abs=1e-4)


def test_a_packed_base_is_merged_by_its_own_numbers(bases, merging, tmp_path):
    folder = trained(bases["int4"], tmp_path / "adapter", targets=("attention",))
    record = merging.run(bases["int4"], folder, tmp_path / "out", to="bf16")
    assert {row.group for row in record.rows} == {"attention"} and len(record.rows) == 10
    model = open_model(open_checkpoint(bases["int4"]))
    attach(model, LoraConfig(rank=4, alpha=6.0, dora=True, targets=("attention",)), seed=0)
    from unfreeze.adapters import load_adapter

    load_adapter(model, folder)
    ours = merged_tensors(tmp_path / "out")
    for site in sites(model):
        whole = site.adapter.matrix(site.owner)
        name = next(name for name in ours if name.endswith(f"{site.name}.weight"))
        assert (ours[name].float() - whole).abs().max() <= whole.abs().max() * 2**-8


def test_without_its_weight_a_change_is_refused(bases, tmp_path):
    folder = trained(bases["llama"], tmp_path / "adapter")
    deltas = Deltas(open_model(open_checkpoint(bases["llama"])), folder)
    place = MatrixPlace(next(iter(deltas.projections)))
    with pytest.raises(AdapterError, match="depends on the weight"):
        deltas.of(place)
    with pytest.raises(AdapterError, match="no product of two factors") as error:  # GGUF-LoRA
        deltas.factors(place.site)
    assert "merge it" in error.value.next
    assert json.loads((folder / "adapter_config.json").read_text())["use_dora"]


LLAMA = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
