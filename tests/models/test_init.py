"""initialize: the spread config.json asks for, smaller into the residual stream, the same for the same
seed."""

import pytest
import torch
from cases_mamba import NEMOTRON

from unfreeze import models

CONFIG = {
    "model_type": "deepseek_v3",
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 64,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.05,
    "attention_bias": True,
}


def made(seed: int, dtype: torch.dtype = torch.float32) -> models.Decoder:
    model = models.build(models.shape(CONFIG), dtype=dtype, device="cpu")
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))  # whatever is not initialised shows
    models.initialize(model, seed)
    return model


def test_every_weight_has_the_spread_it_should():
    """The sample deviation of n normal numbers is within 5 / sqrt(2n) of the true one, relatively (5 standard
    errors)."""
    for name, p in made(0).named_parameters():
        if "norm" in name:
            assert (p == 1).all(), name
        elif name.endswith(".bias"):
            assert not p.any(), name
        else:
            into_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            expected = 0.05 / 2 if into_residual else 0.05  # 1 / sqrt(2 * 2 layers)
            assert p.std().item() == pytest.approx(expected, rel=5 / (2 * p.numel()) ** 0.5), name
            assert abs(p.mean().item()) < 5 * expected / p.numel() ** 0.5, name


def test_the_seed_decides_and_the_dtype_only_rounds():
    one, same, other = (dict(made(seed).named_parameters()) for seed in (1, 1, 2))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["model.embed_tokens.weight"], other["model.embed_tokens.weight"])
    half = dict(made(1, torch.bfloat16).named_parameters())
    assert all(torch.equal(half[name], one[name].to(half[name].dtype)) for name in one)


def test_a_decay_is_drawn_as_mamba_2s_and_given_to_put_like_all_others():
    """put: a process that holds a part of each weight stores its rows itself."""
    sizes = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "model_type": "nemotron_h"}
    model = models.build(models.shape({**NEMOTRON, **sizes}), dtype=torch.float32, device="cpu")
    models.initialize(model, 0)
    decay, own = model.layers[0].mixer.decay, dict(model.named_parameters())
    step = torch.nn.functional.softplus(decay.dt_bias)
    assert float(step.min()) >= 9e-4 and float(step.max()) <= 0.11 and torch.equal(decay.D, torch.ones(8))
    assert float(decay.A_log.exp().min()) >= 1 and float(decay.A_log.exp().max()) <= 16

    put = {}
    models.initialize(model, 0, lambda name, values: put.setdefault(name, values))
    assert all(torch.equal(own[name], values) for name, values in put.items())
    assert {f"model.layers.0.mixer.decay.{name}" for name in ("A_log", "dt_bias", "D")} <= put.keys()
