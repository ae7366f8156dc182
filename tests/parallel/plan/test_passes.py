"""The plan's passes over memory and launches, against the counts of a step on the meta device."""

from dataclasses import replace

import pytest
import torch

from benchmarks import launches
from unfreeze import models
from unfreeze.parallel.plan import passes
from unfreeze.parallel.plan.counts import counts
from unfreeze.quant.int4 import Int4

SHARED = {"rms_norm_eps": 1e-6, "max_position_embeddings": 4096, "vocab_size": 4096}
DENSE = {
    **SHARED,
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
}
MIXTURE = {
    **SHARED,
    "model_type": "qwen3_moe",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "moe_intermediate_size": 384,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
}
LATENT = {
    **SHARED,
    "model_type": "kimi_k2",
    "hidden_size": 1792,
    "intermediate_size": 4608,
    "moe_intermediate_size": 512,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": 384,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 0,
    "moe_layer_freq": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.8,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "rope_theta": 50000.0,
}
TOKENS = 4096
BETWEEN = ("elementwise", "activation", "norms", "rotary")
pytestmark = pytest.mark.usefixtures("interpreted")


def of_a_layer(config, case):
    """Group -> (launches, bytes) of one further layer, which has gradients of its input."""
    two, three = (launches.count({**config, "num_hidden_layers": n}, case) for n in (2, 3))
    return {name: (n - two[name][0], size - two[name][1]) for name, (n, size) in three.items()}


def counts_of(config, codec=None):
    """The plan's counts of one layer."""
    one = {**config, "num_hidden_layers": 1}
    build = models.build(
        models.shape(one),
        dtype=torch.bfloat16,
        device="meta",
        codec_for=lambda part: codec if ".experts." in part and "shared" not in part else None,
    )
    return counts(build)


@pytest.mark.parametrize("recompute", ["nothing", "layers"])
@pytest.mark.parametrize("config", [DENSE, MIXTURE, LATENT], ids=["dense", "mixture", "latent"])
def test_passes_and_adapters_move_the_bytes_that_are_counted(config, recompute):
    """Within a fifth: the formulas leave out copies that make tensors contiguous, and latents' concatenations."""
    codec = Int4(32) if config is LATENT else None
    counted, visits = (
        of_a_layer(config, launches.Case("", TOKENS, recompute, codec)),
        1 + (recompute == "layers"),
    )
    planned = counts_of(config, codec)
    norms = TOKENS * 2 * planned.hidden_size * (4 * visits + 6)
    between = norms + TOKENS * passes.elementwise(planned, visits)
    assert between == pytest.approx(sum(counted[name][1] for name in BETWEEN if name in counted), rel=0.2)
    # what is added to in place is counted once there; it is read and written
    once = passes.BYTES * (visits * planned.widths.out + planned.widths.into)
    adapters = TOKENS * (passes.of_adapters(planned, visits) - once)
    assert adapters == pytest.approx(counted["adapters"][1], rel=0.2)


@pytest.mark.parametrize("recompute", ["nothing", "layers"])
@pytest.mark.parametrize("config", [DENSE, MIXTURE, LATENT], ids=["dense", "mixture", "latent"])
def test_launches_are_those_counted(config, recompute):
    """Within a fifth; of each of the layer's groups of ops, but the update."""
    codec = Int4(32) if config is LATENT else None
    counted, visits = (
        of_a_layer(config, launches.Case("", TOKENS, recompute, codec)),
        1 + (recompute == "layers"),
    )
    found = sum(n for name, (n, _) in counted.items() if name != "optimizer")
    assert passes.launches(counts_of(config, codec), visits, visits, 1) == pytest.approx(found, rel=0.2)


def test_control_arm_a_formula_without_the_activation_is_seen():
    planned = counts_of(DENSE)
    widths = replace(planned.widths, activated=0)
    without = passes.elementwise(replace(planned, widths=widths), 1)
    counted = of_a_layer(DENSE, launches.Case("", TOKENS, "nothing"))
    norms = TOKENS * 2 * planned.hidden_size * 10
    assert norms + TOKENS * without < 0.8 * sum(counted[name][1] for name in BETWEEN if name in counted)
