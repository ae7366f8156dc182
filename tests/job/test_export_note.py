"""The export that a run's last line suggests is one that works for its model, and the note says what it leaves out."""

import json

import pytest
import torch

from unfreeze import models
from unfreeze.checkpoint.manifest import Manifest
from unfreeze.config.lora import LoraConfig
from unfreeze.job.end.card import usage
from unfreeze.job.end.result import next_command
from unfreeze.job.planning.plan import export_hint

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
QWEN = SMALL | {
    "num_hidden_layers": 2,
    "model_type": "qwen3_5_moe_text",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "full_attention_interval": 2,
}
NEMOTRON = SMALL | {
    "num_hidden_layers": 3,
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "M-*",
    "intermediate_size": 32,
    "mamba_num_heads": 2,
    "mamba_head_dim": 16,
    "ssm_state_size": 8,
    "n_groups": 1,
}
LLAMA = SMALL | {"num_hidden_layers": 2, "model_type": "llama", "intermediate_size": 32}


def hint(config, tmp_path, targets=("all-linear",), tokenizer=None, **fields):
    """export_hint of adapters on a model on meta. tokenizer: folder of one with new tokens."""
    model = models.from_config(config, torch.float32)
    start = Manifest(tmp_path, config, {}, "", (), tokenizer=tokenizer)
    return export_hint(LoraConfig(targets=targets, **fields), start, model)


def test_experts_that_no_reader_of_vllms_layout_knows_are_exported_for_peft(tmp_path):
    reader, words = hint(QWEN, tmp_path)
    assert reader == "peft" and words.startswith("vllm cannot load") and "--lora.targets attention" in words
    assert hint(QWEN, tmp_path, ("attention",)) == ("vllm", "")  # control: the remedy


def test_what_peft_refuses_is_said_before_training(tmp_path):
    reader, words = hint(NEMOTRON, tmp_path)
    assert reader == "vllm" and words.startswith("peft does not apply out_proj")
    remedy = words.partition("--lora.targets ")[2].split()
    assert remedy and hint(NEMOTRON, tmp_path, tuple(remedy)) == ("vllm", "")
    assert hint(LLAMA, tmp_path) == ("vllm", "")  # control


def test_new_tokens_and_adapters_of_the_embeddings_are_exported_for_peft(tmp_path):
    words = "vllm and sglang load LoRA alone; for them: unfreeze merge RUN --to bf16"
    assert hint(LLAMA, tmp_path, tokenizer=tmp_path) == ("peft", words)
    assert hint(LLAMA, tmp_path, ("all-linear", "embed_tokens")) == ("peft", words)
    dora = "vllm and sglang read no DoRA; for them: unfreeze merge RUN --to bf16"
    assert hint(LLAMA, tmp_path, dora=True) == ("peft", dora)


@pytest.mark.parametrize("kind, name", [("qwen3_vl", "ImageTextToText"), ("llama", "CausalLM")])
def test_the_card_of_a_release_that_sees_names_the_class_that_loads_it(kind, name):
    assert f"from transformers import AutoModelFor{name}" in usage("BASE", kind)


@pytest.mark.parametrize("fields, reader", [({"export_for": "peft"}, "peft"), ({}, "vllm")])
def test_the_last_line_names_the_reader_that_works(fields, reader, tmp_path):
    event = {"kind": "plan", "step": 0, "time": 0.0, "lines": []} | fields
    (tmp_path / "events.jsonl").write_text(json.dumps(event) + "\n")
    words = next_command(tmp_path, {"finished": True, "steps": 1}, "unfreeze sft", export=True)
    assert f"--for {reader}" in words
