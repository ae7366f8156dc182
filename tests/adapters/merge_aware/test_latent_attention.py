"""A rounded kv_b_proj: steps of generation absorb it into the query, and in prefill it is a layer."""

from __future__ import annotations

import pytest
import torch

from unfreeze.adapters import LoraConfig, sites
from unfreeze.adapters.merge_aware import RoundedLowRank, Rounding
from unfreeze.generate.engine import Engine
from unfreeze.generate.sampling import Sampling
from unfreeze.generate.steps import launched
from unfreeze.quant.int4 import Int4

PROMPT = [5, 17, 3, 58]


def test_steps_of_latent_attention_multiply_by_the_rounded_weight(tiny):
    model = tiny.trained(tiny.model("deepseek"), LoraConfig(rank=2, alpha=4.0, targets=("attention",)))
    for site in sites(model):
        if site.name.endswith("kv_b_proj"):
            site.owner.adapter = RoundedLowRank(site.adapter, Rounding(Int4(8)))
    model.eval().requires_grad_(False)
    engine = Engine(model, stop_ids=frozenset(), steps=launched)
    answer = engine.generate([PROMPT], Sampling(6, temperature=0.0))[0]
    rows = tiny.logits(model, [[*PROMPT, *answer.tokens]])[len(PROMPT) - 1 : -1].log_softmax(-1)
    expected = rows.gather(1, torch.tensor(answer.tokens)[:, None]).flatten().tolist()
    assert answer.logprobs == pytest.approx(expected, abs=1e-5)
