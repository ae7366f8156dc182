"""The grouped part (what CUDA runs) on CPU in bf16: the same results as the loop part, which is tested against float64."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from unfreeze.kernels import int4_grouped_mm
from unfreeze.kernels.choice import choose
from unfreeze.kernels.expert_mlp import expert_mlp, fused_expert_mlp, reference_expert_mlp
from unfreeze.kernels.expert_mlp.few_cuda import few_rows
from unfreeze.kernels.expert_mlp.grouped import Grouped
from unfreeze.kernels.expert_mlp.loop_cpu import LoopCpu
from unfreeze.quant.codec import Packed

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


@pytest.mark.parametrize("lora", ["both", "none"])
@pytest.mark.parametrize("routing", ["random", "some experts empty", "one token"])
def test_few_rows_equal_merged_float64(routing, lora):
    """What runs without gradients where a record says so: here with the reference's products, whose Triton candidate has tests of its own."""
    x, ids, weights, gate_up, down, factors = oracle.problem(dtype=torch.bfloat16, ids=oracle.ROUTINGS.get(routing), lora=lora)
    part = Grouped()
    with torch.no_grad():
        routed = part.route(ids, weights, gate_up.shape[0], x.dtype)
        y = few_rows(x, part, routed, gate_up, down, factors, impl="reference")
    want, _ = oracle.merged_float64(x, ids, weights, gate_up, down, factors)
    assert oracle.error(y, want) <= oracle.TOLERANCE[torch.bfloat16]


def test_few_rows_are_asked_only_where_codes_go_into_the_product(monkeypatch):
    x, ids, weights, gate_up, down, factors = oracle.problem(dtype=torch.bfloat16)
    args = (x, ids, weights, gate_up, down, factors)
    want, _ = oracle.merged_float64(*args)
    with torch.no_grad():
        assert Grouped().few(*args) is None  # no record says that anything beats expanding
        monkeypatch.setattr(int4_grouped_mm, "expands", lambda *_: False)
        assert oracle.error(Grouped().few(*args), want) <= oracle.TOLERANCE[torch.bfloat16]
        assert Grouped().few(x, ids, weights, gate_up.dequantize(), down.dequantize(), factors) is None


def on_gpu(args):
    """The problem's tensors as leaves on the GPU."""

    def moved(value):
        if isinstance(value, Packed):
            return Packed(value.codec, {name: part.cuda() for name, part in value.parts.items()})
        return value.detach().cuda().requires_grad_(value.requires_grad)

    *tensors, factors = args
    return (*map(moved, tensors), replace(factors, **{name: moved(getattr(factors, name)) for name in oracle.FACTORS}))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("op", ["swiglu", "token_order", "int4_expand"])
def test_on_a_gpu_each_triton_part_equals_merged_float64_without_synchronising(op, monkeypatch):
    args = oracle.problem(dtype=torch.bfloat16)
    want, _ = oracle.merged_float64(*args)
    args, dy = on_gpu(args), oracle.output_grad(args[0]).cuda()
    real = choose.by_record
    monkeypatch.setattr(choose, "_CHOSEN", {})
    monkeypatch.setattr(choose, "by_record", lambda o, *rest: ("triton", "test") if o.name == op else real(o, *rest))
    y = fused_expert_mlp(*args, part=Grouped())  # compiles
    torch.autograd.grad(y, list(oracle.leaves(*args).values()), dy)
    torch.cuda.set_sync_debug_mode("error")
    try:
        y = fused_expert_mlp(*args, part=Grouped())
        torch.autograd.grad(y, list(oracle.leaves(*args).values()), dy)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert oracle.error(y.cpu(), want) <= oracle.TOLERANCE[torch.bfloat16]


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
