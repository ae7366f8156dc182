"""What the plan counts with Muon: the optimizer's own bytes, its workspace, its seconds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from unfreeze import models
from unfreeze.core.layout import RESIDENT
from unfreeze.models.matrices import flop, hidden_matrices
from unfreeze.parallel.machine import Hardware
from unfreeze.parallel.plan import Work, measure_sizes, plan
from unfreeze.train.muon import Muon
from unfreeze.train.optim import AdamW

CONFIG = {
    "model_type": "qwen3_moe",
    **dict(vocab_size=512, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2),
    **dict(head_dim=16, intermediate_size=96, moe_intermediate_size=48, num_experts=4, num_experts_per_tok=2),
    **dict(rms_norm_eps=1e-6, rope_theta=1e4, max_position_embeddings=256, tie_word_embeddings=False),
}
HERE = Hardware("cpu", "here", 2, 2**34, 2**34)


def bytes_of(optimizer: AdamW) -> int:
    """Of moments and masters, without step counters and int8's rounding of a last block."""
    return sum(t.nbytes for name, t in optimizer.tensors().items() if not name.startswith("step."))


@pytest.mark.parametrize("moments", ["float32", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_optimizers_bytes_are_those_it_has(dtype: torch.dtype, moments: str):
    """Control arm: counted as AdamW's they are off."""
    model = models.build(models.shape(CONFIG), dtype=dtype, device="cpu")
    optimizer = Muon(model, hidden_matrices(model), moments=moments)  # type: ignore[arg-type]
    work = Work(tokens=64, optimizer="muon", optimizer_moments=moments)  # type: ignore[arg-type]
    sizes = measure_sizes(model, None)
    planned = plan(sizes, RESIDENT, work, HERE).terms["optimizer"]
    # norms keep float32 moments, which the plan counts as int8 like the others
    assert planned == pytest.approx(bytes_of(optimizer), rel=0.02 if moments == "int8" else 1e-6)
    as_adamw = plan(sizes, RESIDENT, replace(work, optimizer="adamw"), HERE).terms["optimizer"]
    assert abs(as_adamw - planned) > 0.1 * planned
    if moments == "float32":
        assert as_adamw == bytes_of(AdamW(model))


def test_its_workspace_is_a_moment_of_its_own_and_sharded_weights_share_the_moments():
    model = models.build(models.shape(CONFIG), dtype=torch.float32, device="meta")
    sizes = measure_sizes(model, None)
    assert sizes.orthogonal_flop == sum(flop(w.shape) for w in hidden_matrices(model).values())
    work = Work(tokens=8, optimizer="muon", processes=2, micro_batches=2)
    tall = replace(sizes, orthogonal=10**9)  # of a wide model with few tokens it is the worst moment
    assert plan(tall, RESIDENT, work, HERE).terms["orthogonalisation"] == 10**9
    assert "orthogonalisation" not in plan(tall, RESIDENT, replace(work, optimizer="adamw"), HERE).terms
    whole, half = (plan(sizes, RESIDENT.but(weights=w), work, HERE) for w in ("device", "sharded"))
    assert half.terms["optimizer"] == pytest.approx(whole.terms["optimizer"] / 2, rel=1e-3)
