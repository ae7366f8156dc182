"""Launches counted on meta: of made ops, of a small mixture of experts, and the page that is made of them."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import launches
from benchmarks.harness.on_meta import Launches
from unfreeze.quant.int4 import Int4

PAGE = Path(__file__).parents[2] / "docs" / "measured" / "launches.md"
RANK = launches.RANK
SMALL = {
    "model_type": "qwen3_moe",
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
}


def test_views_and_empty_tensors_launch_nothing_and_bytes_are_the_operands():
    x = torch.empty(64, 32, dtype=torch.bfloat16, device="meta")
    with Launches(RANK) as counted:
        y = x.view(32, 64).t()[:8].unsqueeze(0).new_empty(3)
        z = x @ x.t()
        z.add_(z)
    assert y.shape == (3,)
    assert counted.launches == {"dense layers": 1, "elementwise": 1}
    assert counted.bytes == {"dense layers": 2 * 64 * 32 * 2 + 64 * 64 * 2, "elementwise": 64 * 64 * 2}
    counted.report("kernel", [x, [z], 3], "experts")
    assert (counted.launches["experts"], counted.bytes["experts"]) == (1, x.nbytes + z.nbytes)


@pytest.mark.usefixtures("interpreted")
def test_launches_grow_with_layers_and_bytes_with_tokens():
    case = launches.Case("", 4096, "layers", Int4(32))
    one, two, three = (launches.count({**SMALL, "num_hidden_layers": n}, case) for n in (1, 2, 3))
    for group in ("expansion", "experts", "rows of experts", "router", "attention", "dense layers"):
        each = two[group][0] - one[group][0]
        assert 0 < each == three[group][0] - two[group][0]
    # two matrices at each of two forward visits; backward reads what the second left
    assert two["expansion"][0] - one["expansion"][0] == 4
    wide = launches.count(SMALL, launches.Case("", 8192, "layers", Int4(32)))
    assert wide["experts"][0] == two["experts"][0] and wide["dense layers"][1] > two["dense layers"][1]
    nothing = launches.count(SMALL, launches.Case("", 4096, "nothing", Int4(32)))
    assert nothing["dense layers"][0] < two["dense layers"][0]


@pytest.mark.usefixtures("interpreted")
def test_split_experts_exchange_and_each_process_expands_its_own():
    config = {**SMALL, "hidden_size": 256, "moe_intermediate_size": 256}
    alone, split = (
        launches.count(config, launches.Case("", 4096, "nothing", Int4(32), processes))
        for processes in (1, 4)
    )
    assert "exchange" not in alone and split["exchange"][0] > 0
    assert split["expansion"][1] < alone["expansion"][1] / 3


def test_the_page_is_what_was_counted():
    kept = json.loads(launches.RESULTS.read_text(encoding="utf-8"))
    assert PAGE.read_text(encoding="utf-8") == launches.page(kept)
