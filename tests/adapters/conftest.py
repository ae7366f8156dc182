"""Tiny random models of transformers, the same weights in ours, and batches: what the tests of this folder
share."""

from types import SimpleNamespace

import pytest
import torch
import transformers

from unfreeze import models
from unfreeze.adapters import attach, sites
from unfreeze.core.batch import Batch

BASE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.2,
}
CASES = {
    "llama": ("Llama", {"num_attention_heads": 4, "num_key_value_heads": 2}),
    "qwen2": ("Qwen2", {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}),
    "deepseek": (
        "DeepseekV3",
        {
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "q_lora_rank": 16,
            "kv_lora_rank": 8,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 8,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
    ),
    "deepseek-square": (
        "DeepseekV3",
        {  # 2I == D and, for down, I != D: gate_up alone can't tell in from out
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "q_lora_rank": 16,
            "kv_lora_rank": 8,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 8,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
    ),
    "qwen3-moe": (
        "Qwen3Moe",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
        },
    ),
}


def reference(name: str):
    """A random transformers model, the same each time it is asked for."""
    family, settings = CASES[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**BASE, **settings)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()


def ours(oracle) -> models.Decoder:
    model = models.build(models.shape(oracle.config.to_dict()), dtype=torch.float32, device="cpu")
    ends = ("experts.gate_up_proj", "experts.down_proj")
    model.load_state_dict(
        {
            key + ".weight" if key.endswith(ends) else key: tensor
            for key, tensor in oracle.state_dict().items()
        }
    )
    for module in model.modules():
        if hasattr(module, "impl"):
            module.impl = "reference"
    return model


def batch_of(documents: list[list[int]]) -> Batch:
    lengths = torch.tensor([len(d) for d in documents])
    tokens = torch.tensor([token for d in documents for token in d])
    positions = torch.cat([torch.arange(len(d)) for d in documents])
    return Batch(tokens, tokens.roll(-1), torch.ones(len(tokens)), positions, lengths.cumsum(0) - lengths)


def trained(model, config, seed=0):
    """Attach, then give every B random values, as training would."""
    attach(model, config, seed)
    with torch.no_grad():
        for index, site in enumerate(sites(model)):
            generator = torch.Generator().manual_seed(index)
            for name, parameter in site.adapter.named_parameters():
                if name.endswith("B"):
                    parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


DOCUMENTS = [[5, 17, 3, 58, 41, 2, 9], [11, 7], [50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 1]]


def logits(model, documents=DOCUMENTS) -> torch.Tensor:
    return model.logits(model.hidden(batch_of(documents)))


def oracle_logits(oracle, documents=DOCUMENTS) -> torch.Tensor:
    return torch.cat([oracle(torch.tensor([document])).logits[0] for document in documents])


@pytest.fixture
def tiny():
    return SimpleNamespace(
        reference=reference,
        ours=ours,
        batch=batch_of,
        trained=trained,
        logits=logits,
        oracle_logits=oracle_logits,
        documents=DOCUMENTS,
        model=lambda name: ours(reference(name)),
    )
