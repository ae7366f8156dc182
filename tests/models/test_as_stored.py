"""float32 arithmetic over weights that stay in bf16: the numbers of a float32 copy, in half its bytes."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from test_quantized_models import batch_of

from unfreeze import models
from unfreeze.adapters import attach
from unfreeze.checkpoint import open_checkpoint
from unfreeze.commands.demo import TINY_K2
from unfreeze.config.lora import LoraConfig
from unfreeze.generate.model import Model
from unfreeze.generate.open import open_model
from unfreeze.objectives.cross_entropy import cross_entropy
from unfreeze.parallel.plan import measure_sizes

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "head_dim": 16,
}
EXPERTS = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}


def written(folder, kind, **fields):
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **fields})
    made = getattr(transformers, f"{kind}ForCausalLM")
    made(config).bfloat16().save_pretrained(folder)
    return folder, made.from_pretrained(folder, dtype=torch.float32)


@pytest.fixture(params=["tied", "biases", "experts", "packed"])
def checkpoint(request, tmp_path):
    """(folder, transformers' model in float32, or None)."""
    match request.param:
        case "tied":
            return written(tmp_path, "Llama", tie_word_embeddings=True)
        case "biases":
            return written(tmp_path, "Qwen2", tie_word_embeddings=False)
        case "experts":
            return written(tmp_path, "Qwen3Moe", **EXPERTS)
    return TINY_K2, None


def step(model, batch):
    """(loss, gradients of the adapters) of a model with adapters on every linear layer."""
    attach(model, LoraConfig(rank=4), seed=1)
    for name, parameter in model.named_parameters():
        if name.endswith(("B", ".gate_up_B", ".down_B")) and ".adapter." in name:
            torch.nn.init.normal_(parameter, std=0.02, generator=torch.Generator().manual_seed(2))
    loss = cross_entropy(model.hidden(batch), model.lm_head, batch).sum
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def test_logits_gradients_and_generation_equal_those_of_a_float32_copy(checkpoint):
    folder, oracle = checkpoint
    manifest = open_checkpoint(str(folder))
    wide, kept = open_model(manifest, torch.float32), open_model(manifest, torch.float32, as_stored=True)
    batch = batch_of(torch.arange(23) * 5 % kept.shape.vocab_size)

    logits = kept.logits(kept.hidden(batch))
    assert kept.dtype == logits.dtype == torch.float32
    torch.testing.assert_close(logits, wide.logits(wide.hidden(batch)), rtol=0, atol=2e-5)
    if oracle is not None:
        theirs = oracle(batch.tokens_T[None], position_ids=batch.positions_T[None]).logits[0]
        torch.testing.assert_close(logits, theirs, rtol=0, atol=1e-4)

    ids = batch.tokens_T.tolist()
    for rows in (1, 3, 20):  # few rows have a loop of their own
        both = [Model(m.eval()).complete([ids[:9]] * rows, max_new_tokens=6) for m in (wide, kept)]
        assert [answer.tokens for answer in both[0]] == [answer.tokens for answer in both[1]]

    (loss, gradients), (same, others) = step(wide, batch), step(kept, batch)
    torch.testing.assert_close(loss, same, rtol=1e-6, atol=0)
    assert gradients.keys() == others.keys() and gradients
    for name, gradient in gradients.items():
        assert (gradient - others[name]).norm() <= 1e-5 * gradient.norm() + 1e-9, name


def test_matrices_stay_in_bf16_and_the_plan_counts_their_bytes(checkpoint):
    manifest = open_checkpoint(str(checkpoint[0]))
    wide, kept = open_model(manifest, torch.float32), open_model(manifest, torch.float32, as_stored=True)
    matrices = {name: p for name, p in kept.named_parameters() if p.dim() > 1 and "mlp.gate." not in name}
    assert {p.dtype for p in matrices.values()} == {torch.bfloat16}
    assert not any(p.requires_grad for p in matrices.values())
    assert {p.dtype for p in kept.parameters() if p.dim() == 1} <= {torch.float32}

    def held(model):
        return sum(t.nbytes for t in [*model.parameters(), *model.buffers()])

    assert held(kept) < 0.62 * held(wide)
    meta = models.meta_model(kept.shape, manifest, torch.float32, as_stored=True)
    sizes = measure_sizes(meta, LoraConfig())
    assert sizes.base == held(kept) and sizes.compute_bytes == 4


def test_one_expert_in_float32_keeps_the_stack_exact(tmp_path):
    """A stack has one dtype in memory: rounding that expert to bf16 would lose what it holds."""
    written(tmp_path, "Qwen3Moe", **EXPERTS)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = next(n for n in tensors if ".1.mlp.experts.2.down_proj" in n)
    tensors[name] = tensors[name].float() + 1e-5
    save_file(tensors, file, {"format": "pt"})

    model = open_model(open_checkpoint(str(tmp_path)), torch.float32, as_stored=True)
    held = model.layers[1].mlp.experts.down_proj.weight
    assert torch.equal(held[2], tensors[name]) and held.dtype == torch.float32
    assert model.layers[0].self_attn.q_proj.weight.dtype == torch.bfloat16


def test_gate_up_and_down_may_be_stored_in_two_dtypes(tmp_path):
    """As files of GraniteMoe can be, whose experts stand under no name of their own."""
    sizes = {"intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2}
    written(tmp_path, "GraniteMoe", **sizes)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    names = [name for name in tensors if name.endswith("output_linear.weight")]
    for name in names:
        tensors[name] = tensors[name].float() + 1e-5
    save_file(tensors, file, {"format": "pt"})

    model = open_model(open_checkpoint(str(tmp_path)), torch.float32, as_stored=True)
    for name, layer in zip(sorted(names), model.layers, strict=True):
        experts = layer.mlp.experts
        assert experts.gate_up_proj.weight.dtype == torch.bfloat16
        assert torch.equal(experts.down_proj.weight, tensors[name])


def test_a_config_alone_says_how_its_weights_are_stored(tmp_path):
    written(tmp_path, "Llama", tie_word_embeddings=False)
    config = json.loads((tmp_path / "config.json").read_text())
    files = models.meta_model(
        models.shape(config), open_checkpoint(str(tmp_path)), torch.float32, as_stored=True
    )
    alone = models.from_config(config, torch.float32, as_stored=True)
    assert {n: p.dtype for n, p in files.named_parameters()} == {
        n: p.dtype for n, p in alone.named_parameters()
    }
    assert models.from_config(config, torch.bfloat16, as_stored=True).dtype == torch.bfloat16
    declared = models.from_config({**config, "dtype": "float32"}, torch.float32, as_stored=True)
    assert {p.dtype for p in declared.parameters()} == {torch.float32}
