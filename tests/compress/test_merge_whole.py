"""Modules that trained fully beside an adapter, merged: the folder loads in transformers with peft's logits."""

import json
import warnings

import peft
import pytest
import torch
import transformers

from unfreeze.adapters import LoraConfig, attach, save_adapter, sites
from unfreeze.adapters.whole import wholes
from unfreeze.checkpoint import open_checkpoint
from unfreeze.compress.deltas import Deltas
from unfreeze.compress.gguf.lora import planned_lora
from unfreeze.core.errors import AdapterError, ConfigError
from unfreeze.generate.open import open_model

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
MOE = {"head_dim": 16, "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
CASES = {
    "llama": ("Llama", SIZES, ("*norm", "lm_head", "embed_tokens")),
    "tied": ("Qwen2", SIZES | {"tie_word_embeddings": True}, ("embed_tokens",)),
    "moe": ("Qwen3Moe", SIZES | MOE, ("*.gate", "norm")),
}
LORA_ENDS = ("attention", "embed_tokens", "lm_head")
IDS = torch.tensor([[5, 6, 7, 8, 9, 10, 30, 41, 77]])


@pytest.fixture(params=CASES)
def trained(request, merging, tmp_path):
    kind, settings, too = CASES[request.param]
    base = merging.sharded(tmp_path / "base", *merging.random_model(kind, settings))
    model = open_model(open_checkpoint(base))
    attach(model, LoraConfig(rank=4, alpha=6.0, targets=("attention",), train_too=too), seed=0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for site in sites(model):
            site.adapter.B.normal_(0, 0.05, generator=generator)
        for own in wholes(model).values():
            for parameter in own.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return base, save_adapter(model, tmp_path / "adapter", base_name=str(base))


def loaded(folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def test_transformers_loads_it_with_the_logits_of_peft(trained, merging, tmp_path):
    base, adapter = trained
    merging.run(base, adapter, tmp_path / "out")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = peft.PeftModel.from_pretrained(loaded(base), adapter).eval()
    with torch.no_grad():
        wanted, plain, merged = (m(IDS).logits for m in (theirs, loaded(base), loaded(tmp_path / "out")))
    assert (merged - wanted).abs().max() < 1e-4 and (plain - wanted).abs().max() > 1e-2
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config == json.loads((base / "config.json").read_text())


def test_gguf_lora_and_a_head_trained_apart_from_its_embeddings_are_refused(trained, tmp_path):
    base, adapter = trained
    model = open_model(open_checkpoint(base))
    deltas = Deltas(model, adapter)
    with pytest.raises(ConfigError, match=r"GGUF-LoRA holds no .*, which trained fully"):
        planned_lora(None, deltas, None)
    if model.shape.tied:
        from safetensors.torch import load_file, save_file

        tensors = load_file(adapter / "adapter_model.safetensors")
        del tensors["base_model.model.lm_head.weight"]
        save_file(tensors, adapter / "adapter_model.safetensors")
        config = json.loads((adapter / "adapter_config.json").read_text())
        config |= {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": False}
        (adapter / "adapter_config.json").write_text(json.dumps(config))
        with pytest.raises(AdapterError, match="are one, but the adapter has one alone"):
            Deltas(model, adapter)


@pytest.mark.parametrize("case", ["llama", "tied"])
def test_lora_on_embeddings_and_head_is_merged_but_not_into_a_tied_head(case, merging, tmp_path):
    kind, settings, _ = CASES[case]
    base = merging.sharded(tmp_path / "base", *merging.random_model(kind, settings))
    model = open_model(open_checkpoint(base))
    attach(model, LoraConfig(rank=4, alpha=6.0, targets=LORA_ENDS), seed=0)
    with torch.no_grad():
        model.model.embed_tokens.adapter.A.normal_(0, 0.1)
        for site in sites(model):
            site.adapter.B.normal_(0, 0.05)
    adapter = save_adapter(model, tmp_path / "adapter", base_name=str(base))
    if case == "tied":
        with pytest.raises(ConfigError, match="the head of this model is its embeddings"):
            merging.run(base, adapter, tmp_path / "out")
        return
    merging.run(base, adapter, tmp_path / "out")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = peft.PeftModel.from_pretrained(loaded(base), adapter).eval()
    with torch.no_grad():
        wanted, plain, merged = (m(IDS).logits for m in (theirs, loaded(base), loaded(tmp_path / "out")))
    assert (merged - wanted).abs().max() < 1e-4 and (plain - wanted).abs().max() > 1e-2
