"""The grouped backend (what CUDA runs) on CPU in bf16: the same results as the loop backend, which is tested
against float64."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from unfreeze.kernels import int4_grouped_mm
from unfreeze.kernels.choice import choose
from unfreeze.kernels.expert_mlp import (
    ExpertFactors,
    backend,
    expert_mlp,
    fused,
    fused_expert_mlp,
    reference_expert_mlp,
    release_scratch,
    scratch_bytes,
    workspace,
)
from unfreeze.kernels.expert_mlp.grouped import Grouped
from unfreeze.kernels.expert_mlp.loop_cpu import LoopCpu
from unfreeze.quant.codec import Packed
from unfreeze.quant.int4 import Int4

_spec = importlib.util.spec_from_file_location(
    "expert_mlp_problem", Path(__file__).with_name("test_expert_mlp.py")
)
assert _spec is not None and _spec.loader is not None
oracle = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(oracle)


def results(args, backend):
    y = fused_expert_mlp(*args, backend=backend)
    named = oracle.leaves(*args)
    return {
        "y": y,
        **dict(
            zip(named, torch.autograd.grad(y, list(named.values()), oracle.output_grad(args[0])), strict=True)
        ),
    }


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("rank", [3, 8])
@pytest.mark.parametrize("routing", ["random", "some experts empty", "one token"])
def test_grouped_equals_merged_float64(packed, rank, routing):
    args = oracle.problem(R=rank, dtype=torch.bfloat16, packed=packed, ids=oracle.ROUTINGS.get(routing))
    got = results(args, Grouped())
    y, grads = oracle.merged_float64(*args)
    for name in got:
        assert (
            oracle.error(got[name], y if name == "y" else grads[name]) <= oracle.TOLERANCE[torch.bfloat16]
        ), name
    assert set(got) == set(results(args, LoopCpu()))


@pytest.mark.parametrize("experts_at_once", [1, 2, 3])
@pytest.mark.parametrize("dense", ["neither", "gate_up", "down"])
@pytest.mark.parametrize("routing", ["random", "some experts empty", "one token"])
def test_experts_in_groups_give_the_same_bits(routing, dense, experts_at_once, monkeypatch):
    """Of a dense matrix there is no workspace, but it goes in the groups of the other one."""
    args = list(oracle.problem(R=3, dtype=torch.bfloat16, ids=oracle.ROUTINGS.get(routing)))
    if dense != "neither":
        place = 3 if dense == "gate_up" else 4
        args[place] = args[place].dequantize().bfloat16().requires_grad_()
    whole = results(args, Grouped())
    one = []
    real = Grouped.groups

    def counted(self, routing, weight_bytes, row_bytes, both):
        monkeypatch.setattr(workspace, "WORKSPACE", max(weight_bytes) * experts_at_once)
        found = list(real(self, routing, weight_bytes, row_bytes, both=both))
        one.append(len(found))
        return iter(found)

    monkeypatch.setattr(Grouped, "groups", counted)
    parts = results(args, Grouped())
    experts = args[3].shape[0]
    assert one == 2 * [-(-experts // experts_at_once)] and parts.keys() == whole.keys()
    if dense != "neither":  # a sum of products is rounded before it is combined, not after
        y, grads = oracle.merged_float64(*args)
        wanted = {"y": y, **grads}
        assert all(oracle.error(parts[n], wanted[n]) <= oracle.TOLERANCE[torch.bfloat16] for n in parts)
        return
    assert all(torch.equal(parts[name], whole[name]) for name in whole)
    with torch.no_grad():
        assert torch.equal(fused_expert_mlp(*args, backend=Grouped()), whole["y"])


def test_the_buffers_of_a_group_are_gone_before_the_next(monkeypatch):
    """What backward asks of `rows` is alive for one of four groups, not for all: a third of what one group asks."""
    args = oracle.problem(E=8, T=96, R=3, dtype=torch.bfloat16, packed=True)
    held: list[tuple[int, StorageWeakRef]] = []
    peaks = []
    rows = Grouped.rows

    def watched(self, name, group, columns, dtype):
        made = rows(self, name, group, columns, dtype)
        held.append((made.nbytes, StorageWeakRef(made.untyped_storage())))
        peaks.append(sum(size for size, storage in held if not storage.expired()))
        return made

    monkeypatch.setattr(Grouped, "rows", watched)
    most = {}
    for groups in (1, 4):
        real = Grouped.groups

        def cut(self, routing, weight_bytes, row_bytes, both, real=real, groups=groups):
            at_once = max(weight_bytes) * 8 // groups if groups > 1 else 1 << 40
            monkeypatch.setattr(workspace, "WORKSPACE", at_once)
            return real(self, routing, weight_bytes, row_bytes, both=both)

        with monkeypatch.context() as patch:
            patch.setattr(Grouped, "groups", cut)
            y = fused_expert_mlp(*args, backend=Grouped())
            held.clear()
            peaks.clear()
            y.float().sum().backward()
        most[groups] = max(peaks)
    assert most[4] < most[1] / 3


def test_a_layer_that_is_recomputed_expands_its_codes_twice_a_step(monkeypatch):
    """Once in forward; the second visit's workspace serves backward. Another layer comes between."""
    fills = []
    real = workspace.Base._fill
    monkeypatch.setattr(workspace, "remembers", lambda device: True)
    monkeypatch.setattr(
        workspace.Base, "_fill", lambda self, *rest: (fills.append(self.name), real(self, *rest))
    )
    layer, other = (oracle.problem(dtype=torch.bfloat16) for _ in range(2))

    def step():
        fills.clear()
        with torch.no_grad():
            for args in (layer, other):
                visit(args)
        return [results(args, Grouped()) for args in (other, layer)]

    def visit(args):
        call = fused._Problem(Grouped(), args[1], args[3], args[4], args[5])
        fused._forward(call.call(args[0], call.route(args[0], args[2])), args[0], save=False)

    release_scratch()
    first = step()
    assert len(fills) == 2 * 2 + 2  # `other` was the last of forward, so its second visit finds its own
    again = step()
    monkeypatch.setattr(workspace, "remembers", lambda device: False)
    for ours, other_ours, plain in zip(first, again, step(), strict=True):
        assert all(torch.equal(ours[n], plain[n]) and torch.equal(other_ours[n], plain[n]) for n in plain)
    assert len(fills) == 2 * 2 * 3  # control arm: without memory three times a layer


def test_codes_that_change_are_expanded_again(monkeypatch):
    monkeypatch.setattr(workspace, "remembers", lambda device: True)
    args = oracle.problem(dtype=torch.bfloat16)
    before = results(args, Grouped())
    for base in args[3:5]:
        base.parts["weight_packed"].copy_(~base.parts["weight_packed"])
    got = results(args, Grouped())
    release_scratch()
    want = results(args, Grouped())
    assert all(torch.equal(got[n], want[n]) for n in want) and not torch.equal(got["y"], before["y"])


@pytest.mark.parametrize("experts", [48, 384])
def test_the_workspace_of_kimi_k2_keeps_to_its_bytes(experts, monkeypatch):
    """At true size, on meta, where the routing is taken as even: the host can't read it there."""
    T, K, D, I, R = 8192, 8, 7168, 2048, 16
    per_expert = T * K / experts
    ends = [int((e + 1) * per_expert) for e in range(experts)]
    monkeypatch.setattr(backend.DeviceRouting, "ends", ends)
    codec = Int4(32)

    def meta(*shape, dtype=torch.float32, grad=True):
        return torch.empty(shape, dtype=dtype, device="meta", requires_grad=grad)

    def packed(rows, columns):
        words = meta(experts, rows, columns // 8, dtype=torch.int32, grad=False)
        scales = meta(experts, rows, columns // 32, dtype=torch.bfloat16, grad=False)
        return Packed(codec, {"weight_packed": words, "weight_scale": scales})

    factors = ExpertFactors(
        meta(experts, 2 * R, D), meta(experts, 2 * I, R), meta(experts, R, I), meta(experts, D, R)
    )
    x, ids = meta(T, D, dtype=torch.bfloat16), meta(T, K, dtype=torch.int64, grad=False)
    monkeypatch.setattr(workspace, "expand_stack", lambda *_: None)
    release_scratch()
    y = fused_expert_mlp(x, ids, meta(T, K), packed(2 * I, D), packed(D, I), factors, Grouped())
    y.backward(torch.empty_like(y))
    held = scratch_bytes() - 4 * T * D  # the float32 sums
    assert workspace.WORKSPACE / 2 < held <= workspace.WORKSPACE
    release_scratch()


def test_the_bytes_of_a_workspace():
    """Of Kimi-K2 gate_up of 77 of 384 experts, in float32 of 39."""
    bf16, float32 = (
        workspace.workspace_bytes(384, 7168, 2048, d, "cuda") for d in (torch.bfloat16, torch.float32)
    )
    assert bf16 == 77 * 2 * 7168 * 2048 * 2 < workspace.WORKSPACE
    assert float32 == 39 * 2 * 7168 * 2048 * 4 < 1.03 * workspace.WORKSPACE
    assert workspace.workspace_bytes(8, 7168, 2048, torch.bfloat16, "cuda") == 8 * 3 * 7168 * 2048 * 2


def test_grouped_without_factors():
    args = oracle.problem(lora="none", packed=False, dtype=torch.bfloat16)
    y, grads = oracle.merged_float64(*args)
    got = results(args, Grouped())
    assert oracle.error(got["y"], y) <= 0.015 and oracle.error(got["gate_up"], grads["gate_up"]) <= 0.015


@pytest.mark.parametrize("lora", ["both", "none"])
@pytest.mark.parametrize("routing", ["random", "some experts empty", "one token"])
def test_multiplied_codes_equal_merged_float64(routing, lora):
    """What runs without gradients where a record says so: here with the reference's products, whose Triton
    candidate has tests of its own."""
    x, ids, weights, gate_up, down, factors = oracle.problem(
        dtype=torch.bfloat16, ids=oracle.ROUTINGS.get(routing), lora=lora
    )
    backend = Grouped()
    with torch.no_grad():
        routing = backend.route(ids, weights, gate_up.shape[0], x.dtype)
        y = backend.multiply_codes(x, routing, gate_up, down, factors, impl="reference")
    want, _ = oracle.merged_float64(x, ids, weights, gate_up, down, factors)
    assert oracle.error(y, want) <= oracle.TOLERANCE[torch.bfloat16]


def test_decode_multiplies_codes_only_where_a_record_says_so(monkeypatch):
    x, ids, weights, gate_up, down, factors = oracle.problem(dtype=torch.bfloat16)
    args = (x, ids, weights, gate_up, down, factors)
    want, _ = oracle.merged_float64(*args)
    with torch.no_grad():
        assert Grouped().decode(*args) is None  # no record says that anything beats expanding
        monkeypatch.setattr(int4_grouped_mm, "expands", lambda *_: False)
        assert oracle.error(Grouped().decode(*args), want) <= oracle.TOLERANCE[torch.bfloat16]
        assert Grouped().decode(x, ids, weights, gate_up.dequantize(), down.dequantize(), factors) is None


def on_gpu(args):
    """The problem's tensors as leaves on the GPU."""

    def moved(value):
        if isinstance(value, Packed):
            return Packed(value.codec, {name: part.cuda() for name, part in value.parts.items()})
        return value.detach().cuda().requires_grad_(value.requires_grad)

    *tensors, factors = args
    return (
        *map(moved, tensors),
        replace(factors, **{name: moved(getattr(factors, name)) for name in oracle.FACTORS}),
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("op", ["swiglu", "token_order", "expand"])
def test_on_a_gpu_each_triton_part_equals_merged_float64_without_synchronising(op, monkeypatch):
    args = oracle.problem(dtype=torch.bfloat16)
    want, _ = oracle.merged_float64(*args)
    args, dy = on_gpu(args), oracle.output_grad(args[0]).cuda()
    real = choose.by_record
    monkeypatch.setattr(choose, "_CHOSEN", {})
    planted = choose.Choice("triton", "test", "as asked")
    monkeypatch.setattr(choose, "by_record", lambda o, *rest: planted if o.name == op else real(o, *rest))
    y = fused_expert_mlp(*args, backend=Grouped())  # compiles
    torch.autograd.grad(y, list(oracle.leaves(*args).values()), dy)
    torch.cuda.set_sync_debug_mode("error")
    try:
        y = fused_expert_mlp(*args, backend=Grouped())
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
