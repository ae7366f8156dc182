"""Steps with adapters: the packed pass with the same adapters, and the dense model that they were merged into."""

from __future__ import annotations

import pytest
from exact import (
    SEEN,
    adapted,
    apart,
    assert_exact,
    checked,
    each_maker,
    family,
    merged,
    packed,
    rows_of,
    uncached,
    walked,
)

from unfreeze.adapters import sites, without_adapters
from unfreeze.quant import Int4
from unfreeze.quant.awq import Awq

ROWS = rows_of((3, 14), (9, 10), (1, 6), greedy=1)
CASES = {
    "every linear layer, head too": ("llama-3-rope-biases", ("all-linear", "lm_head")),
    "a head that scales": ("granite-biases-tied", ("all-linear", "lm_head")),
    "a head that caps": ("gemma2-window", ("all-linear", "lm_head")),
    "queries alone": ("qwen3", ("q_proj",)),
    "fused projections": ("phi3", ("qkv_proj", "gate_up_proj")),
    "values that are keys": ("gemma4-values-are-keys", ("all-linear",)),
    "latent attention and experts": ("deepseek-v3-groups-yarn", ("all-linear",)),
    "an indexer too, which alone only chooses": ("deepseek-v32", ("all-linear", "indexer")),
    "kv_b_proj alone": ("deepseek-v2", ("kv_b_proj",)),
    "experts, gate and up alone": ("qwen3-moe", ("*.experts.gate_up_proj",)),
    "experts, down alone": ("mixtral", ("*.experts.down_proj",)),
    "experts whose rows are in turn": ("gpt-oss", ("all-linear",)),
    "a shared expert with a gate": ("qwen2-moe", ("all-linear",)),
    "inputs scaled before experts": ("llama4-text", ("all-linear",)),
    "experts beside a dense layer": ("gemma4-experts", ("all-linear",)),
    "the gated delta rule": ("qwen3-next", ("all-linear",)),
    "a decay per channel": ("kimi-linear", ("all-linear",)),
    "convolutions between gates": ("lfm2-moe", ("all-linear",)),
}


@each_maker
@pytest.mark.parametrize("case", CASES)
def test_steps_with_adapters_are_the_packed_pass_and_the_merged_model(case, steps):
    name, targets = CASES[case]
    exact(adapted(family(name)[1], *targets), steps)


@each_maker
@pytest.mark.parametrize("codec", [Int4(32), Awq(32)], ids=lambda codec: codec.name)
def test_beside_packed_weights_too(codec, steps):
    sizes = {"moe_intermediate_size": 64, "q_lora_rank": 64, "v_head_dim": 16, "vocab_size": 96}
    _, model = family("deepseek-v3-groups-yarn", **sizes)
    exact(adapted(packed(model, codec), "all-linear"), steps)


def exact(model, steps):
    walks = checked(model, steps, ROWS)
    assert_exact(walks, uncached(merged(model), walks))
    with without_adapters(model):  # control arm: they matter
        assert apart(walks, uncached(model, walks)) > SEEN


@each_maker
@pytest.mark.parametrize("case", [case for case in CASES if "alone" not in case])
def test_control_the_adapter_of_one_layer_left_out_is_seen(case, steps):
    """Each kind of target by itself: the last module of that name."""
    name, targets = CASES[case]
    model = adapted(family(name)[1], *targets)
    last = {site.name.rpartition(".")[2]: site for site in sites(model)}
    for site in last.values():
        left, site.owner.adapter = site.owner.adapter, None
        walks = walked(model, steps, rows_of((3, 3)))
        site.owner.adapter = left
        assert apart(walks, uncached(model, walks)) > SEEN, site.name
