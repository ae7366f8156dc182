"""The grouped part (what CUDA runs) on CPU in bf16: the same results as the loop part, which is tested against float64."""

import importlib.util
from pathlib import Path

import pytest
import torch

from unfreeze.kernels.expert_mlp import expert_mlp, fused_expert_mlp, reference_expert_mlp
from unfreeze.kernels.expert_mlp.grouped import Grouped
from unfreeze.kernels.expert_mlp.loop_cpu import LoopCpu

_spec = importlib.util.spec_from_file_location("expert_mlp_problem", Path(__file__).with_name("test_expert_mlp.py"))
assert _spec is not None and _spec.loader is not None
oracle = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(oracle)


def results(args, part):
    y = fused_expert_mlp(*args, part=part)
    named = oracle.leaves(*args)
    return {"y": y, **dict(zip(named, torch.autograd.grad(y, list(named.values()), oracle.output_grad(args[0])), strict=True))}


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("rank", [3, 8])
@pytest.mark.parametrize("routing", ["random", "some experts empty", "one token"])
def test_grouped_equals_merged_float64(packed, rank, routing):
    args = oracle.problem(R=rank, dtype=torch.bfloat16, packed=packed, ids=oracle.ROUTINGS.get(routing))
    got = results(args, Grouped())
    y, grads = oracle.merged_float64(*args)
    for name in got:
        assert oracle.error(got[name], y if name == "y" else grads[name]) <= oracle.TOLERANCE[torch.bfloat16], name
    assert set(got) == set(results(args, LoopCpu()))


def test_grouped_without_factors():
    args = oracle.problem(lora="none", packed=False, dtype=torch.bfloat16)
    y, grads = oracle.merged_float64(*args)
    got = results(args, Grouped())
    assert oracle.error(got["y"], y) <= 0.015 and oracle.error(got["gate_up"], grads["gate_up"]) <= 0.015


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu_fused_equals_the_reference_without_synchronising():
    x, ids, weights, gate_up, down, _ = oracle.problem(dtype=torch.bfloat16, packed=False, lora="none")
    x, ids, weights, gate_up, down = (t.detach().cuda() for t in (x, ids, weights, gate_up, down))
    want = reference_expert_mlp(x, ids, weights, gate_up, down)
    expert_mlp(x, ids, weights, gate_up, down)  # self-check and allocations happen here
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = expert_mlp(x, ids, weights, gate_up, down, impl="fused")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert oracle.error(got, want.double()) <= 0.015
