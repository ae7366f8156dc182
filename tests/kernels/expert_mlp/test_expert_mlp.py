"""The fused expert MLP against a float64 merged model: forward and every gradient, packed and dense, float32
and bf16.

The oracle merges W + scale B A in float64 and knows nothing of sorting, groups, workspaces or adapters.
"""

import functools
import threading
import time
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves

from unfreeze.core.errors import ConfigError
from unfreeze.kernels.choice import choose
from unfreeze.kernels.expert_mlp import (
    ExpertFactors,
    expert_mlp,
    loop_cpu,
    release_scratch,
    scratch_bytes,
    workspace,
)
from unfreeze.kernels.loops import cores
from unfreeze.quant.codec import Packed
from unfreeze.quant.int4 import Int4

# float32: sums of some hundred terms, 1e-6 observed at most 4e-7. bf16: 2**-9 per rounding and about five
# roundings in a row, observed 0.6 %.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 0.015}


def problem(
    E=6,
    D=64,
    I=32,
    R=4,
    T=50,
    K=2,
    dtype=torch.float32,
    packed=True,
    group=32,
    lora="both",
    ids=None,
    seed=0,
    codec=None,
):
    g = torch.Generator().manual_seed(seed)

    def randn(*shape, scale=1.0):
        return torch.randn(shape, generator=g) * scale

    codec = codec or Int4(group)
    bases = [randn(E, 2 * I, D, scale=D**-0.5), randn(E, D, I, scale=I**-0.5)]
    bases = [
        Packed(codec, codec.quantize(b.bfloat16())) if packed else b.to(dtype).requires_grad_() for b in bases
    ]
    factors = ExpertFactors(
        *(
            (randn(E, 2 * R, D, scale=D**-0.5), randn(E, 2 * I, R, scale=0.3))
            if lora in ("both", "gate_up")
            else (None, None)
        ),
        *(
            (randn(E, R, I, scale=I**-0.5), randn(E, D, R, scale=0.3))
            if lora in ("both", "down")
            else (None, None)
        ),
        scale=2.0,
        down_scale=1.37,
    )
    for name in FACTORS:
        if getattr(factors, name) is not None:
            getattr(factors, name).requires_grad_()
    if ids is None:
        ids = (
            torch.stack([torch.randperm(E, generator=g)[:K] for _ in range(T)])
            if T
            else torch.empty((0, K), dtype=torch.int64)
        )
    x = randn(ids.shape[0], D).to(dtype).requires_grad_()
    weights = torch.rand(ids.shape, generator=g).requires_grad_()
    return x, ids, weights, *bases, factors


FACTORS = ("gate_up_A", "gate_up_B", "down_A", "down_B")


def leaves(x, ids, weights, gate_up, down, factors):
    every = {
        "x": x,
        "weights": weights,
        "gate_up": gate_up,
        "down": down,
        **{n: getattr(factors, n) for n in FACTORS},
    }
    return {name: t for name, t in every.items() if isinstance(t, torch.Tensor)}


def merged_float64(x, ids, weights, gate_up, down, factors):
    """(y, gradients by name) of Σ_k w down(silu(gate x) * up x) with merged float64 weights, by dense one-hot
    routing."""
    grad = output_grad(x)

    def double(t):
        t = t.dequantize() if isinstance(t, Packed) else t
        return None if t is None else t.detach().double().requires_grad_()

    x, weights, gate_up, down = (double(t) for t in (x, weights, gate_up, down))
    f = replace(factors, **{n: double(getattr(factors, n)) for n in FACTORS})
    W1, W2 = gate_up, down
    if f.gate_up_A is not None:
        R, I = f.gate_up_B.shape[2], gate_up.shape[1] // 2
        delta = torch.cat(
            [f.gate_up_B[:, :I] @ f.gate_up_A[:, :R], f.gate_up_B[:, I:] @ f.gate_up_A[:, R:]], dim=1
        )
        W1 = gate_up + f.scale * delta
    if f.down_A is not None:
        W2 = down + f.down_scale * f.down_B @ f.down_A
    gate, up = torch.einsum("end,td->etn", W1, x).chunk(2, dim=-1)
    y_ETD = torch.einsum("edi,eti->etd", W2, F.silu(gate) * up)
    share_TE = torch.zeros(x.shape[0], gate_up.shape[0], dtype=torch.float64).scatter_add(1, ids, weights)
    y = torch.einsum("te,etd->td", share_TE, y_ETD)
    named = leaves(x, ids, weights, gate_up, down, f)
    return y, dict(
        zip(
            named, torch.autograd.grad(y, list(named.values()), grad.double(), allow_unused=True), strict=True
        )
    )


def output_grad(x):
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(99)).to(x.dtype)


def ours(args, impl="fused"):
    y = expert_mlp(*args, impl=impl)
    named = leaves(*args)
    return y, dict(
        zip(named, torch.autograd.grad(y, list(named.values()), output_grad(args[0])), strict=True)
    )


def error(got, want):
    got, want = got.detach().double(), want.detach()
    return float((got - want).norm() / want.norm().clamp_min(1e-12))


def check(args, tolerance, impl="fused"):
    y, grads = ours(args, impl)
    want_y, want = merged_float64(*args)
    assert y.dtype == args[0].dtype and error(y, want_y) <= tolerance
    for name, grad in grads.items():
        assert grad.dtype == leaves(*args)[name].dtype
        assert error(grad, want[name]) <= tolerance, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("rank", [3, 4, 8])
def test_equals_merged_float64(dtype, packed, rank):
    check(problem(R=rank, dtype=dtype, packed=packed), TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("lora", ["both", "none"])
@pytest.mark.parametrize("D, I", [(64, 32), (32, 96)])
def test_without_gradients_the_output_is_the_same_float64(dtype, packed, lora, D, I):
    """The pass that keeps nothing for backward works in scratch alone: no two buffers of it may share a
    name."""
    args = problem(D=D, I=I, dtype=dtype, packed=packed, lora=lora)
    with torch.no_grad():
        y = expert_mlp(*args, impl="fused")
    assert error(y, merged_float64(*args)[0]) <= TOLERANCE[dtype]


def test_that_comparison_sees_two_buffers_of_one_name(monkeypatch):
    args = problem(D=32, I=96, lora="none")
    real = loop_cpu.LoopCpu.rows
    monkeypatch.setattr(
        loop_cpu.LoopCpu,
        "rows",
        lambda self, name, *rest: real(self, "base gate_up" if name == "gate_up" else name, *rest),
    )
    with torch.no_grad():
        y = expert_mlp(*args, impl="fused")
    assert error(y, merged_float64(*args)[0]) > 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lora", ["none", "gate_up", "down"])
def test_without_some_factors(dtype, lora):
    check(problem(lora=lora, dtype=dtype), TOLERANCE[dtype])
    check(problem(lora=lora, dtype=dtype, packed=False), TOLERANCE[dtype])


@pytest.mark.parametrize("group", [32, 64])
def test_other_group_sizes_and_widths(group):
    check(problem(D=128, I=64, group=group), TOLERANCE[torch.float32])
    check(problem(D=192, I=24, packed=False, T=9, K=3), TOLERANCE[torch.float32])


ROUTINGS = {
    "one token": torch.tensor([[4, 1]]),
    "all on one expert": torch.full((40, 1), 3),
    "some experts empty": torch.tensor([[0, 5]] * 17 + [[5, 2]] * 4),
    "twice the same expert": torch.tensor([[2, 2], [2, 0], [1, 1]]),
}


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("packed", [True, False])
def test_unbalanced_routing(name, dtype, packed):
    args = problem(ids=ROUTINGS[name], dtype=dtype, packed=packed)
    check(args, TOLERANCE[dtype])
    _, grads = ours(args)
    silent = [e for e in range(6) if e not in ROUTINGS[name].unique().tolist()]
    for factor in FACTORS:
        assert bool((grads[factor][silent] == 0).all())


def test_no_tokens_at_all():
    x, ids, *rest = problem(T=0)
    y, grads = ours((x, ids, *rest))
    assert y.shape == (0, 64) and all(bool((g == 0).all()) for g in grads.values())


def test_an_input_with_strides_and_a_broadcast_gradient():
    x, *rest = problem(T=30)
    wide = torch.zeros(30, 128)
    wide[:, ::2] = x.detach()
    strided = wide[:, ::2].requires_grad_()
    assert torch.equal(expert_mlp(strided, *rest, impl="fused"), expert_mlp(x, *rest, impl="fused"))
    # .sum() hands back a gradient of stride 0
    one = torch.autograd.grad(expert_mlp(x, *rest, impl="fused").sum(), x)[0]
    two = torch.autograd.grad(expert_mlp(x, *rest, impl="reference").sum(), x)[0]
    torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-5)


def test_reference_equals_merged_float64():
    check(problem(), TOLERANCE[torch.float32], impl="reference")
    check(problem(dtype=torch.bfloat16), TOLERANCE[torch.bfloat16], impl="reference")


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-6), (torch.bfloat16, 0.005)])
def test_untrained_factors_leave_the_output(dtype, bound):
    """B = 0. reference: no bit changes. fused: within its tolerance (zeros join the GEMM's sums, which may
    then be blocked differently)."""
    x, ids, weights, gate_up, down, f = problem(dtype=dtype)
    zero = replace(f, gate_up_B=torch.zeros_like(f.gate_up_B), down_B=torch.zeros_like(f.down_B))
    base = [expert_mlp(x, ids, weights, gate_up, down, None, impl=impl) for impl in ("reference", "fused")]
    with_zero = [
        expert_mlp(x, ids, weights, gate_up, down, zero, impl=impl) for impl in ("reference", "fused")
    ]
    assert torch.equal(base[0], with_zero[0])
    assert error(with_zero[1], base[1].double()) <= bound
    # control arm: B is seen
    assert not torch.equal(base[0], expert_mlp(x, ids, weights, gate_up, down, f, impl="reference"))


def test_small_updates_survive_bf16():
    """A change of 1e-4 of a weight would round away if B A were merged into bf16 weights; beside them in the
    GEMM it is kept."""
    x, ids, weights, gate_up, down, f = problem(dtype=torch.bfloat16, lora="gate_up")
    small = replace(f, gate_up_B=(f.gate_up_B.detach() * 1e-4).requires_grad_())
    check((x, ids, weights, gate_up, down, small), TOLERANCE[torch.bfloat16])
    base = gate_up.dequantize()
    delta = 2.0 * torch.cat(
        [small.gate_up_B[:, :32] @ small.gate_up_A[:, :4], small.gate_up_B[:, 32:] @ small.gate_up_A[:, 4:]],
        dim=1,
    )
    lost = (base.float() + delta).bfloat16() == base
    assert float(lost[base != 0].float().mean()) > 0.9  # control arm: merged, nine weights of ten do not move


@pytest.mark.parametrize("group_bytes", [1, 1 << 14, 1 << 30])
def test_the_grouping_of_experts_changes_no_result(group_bytes, monkeypatch):
    args = problem(E=9, T=80)
    want, want_grads = ours(args)
    monkeypatch.setattr(loop_cpu, "GROUP_BYTES", group_bytes)
    got, grads = ours(args)
    assert torch.equal(got, want) and all(torch.equal(grads[n], want_grads[n]) for n in grads)


def test_only_the_experts_asked_for_are_expanded(monkeypatch):
    asked = []
    real = workspace.Base.stack
    monkeypatch.setattr(
        workspace.Base,
        "stack",
        lambda self, experts, *rest: asked.extend(experts) or real(self, experts, *rest),
    )
    args = problem(E=40, ids=torch.tensor([[7, 31], [31, 2]]))
    expert_mlp(*args, impl="fused")
    assert sorted(asked) == [2, 2, 7, 7, 31, 31]


def saved_tensors(run):
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = run()
    return y, kept


def expanded(kept, gate_up, down):
    """Saved floating point tensors as large as one expanded expert or more whose last dims are those of an
    expert matrix."""
    shapes = {tuple(gate_up.shape[1:]), tuple(down.shape[1:])}
    return [
        t
        for t in kept
        if t.is_floating_point()
        and (tuple(t.shape[-2:]) in shapes or tuple(t.t().shape if t.ndim == 2 else ()) in shapes)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_expanded_is_saved_for_backward(dtype):
    args = problem(dtype=dtype, T=23)
    _, kept = saved_tensors(lambda: expert_mlp(*args, impl="fused"))
    assert kept and not expanded(kept, args[3], args[4])
    # control arm: plain autograd keeps the expanded experts
    _, kept = saved_tensors(lambda: expert_mlp(*args, impl="reference"))
    assert expanded(kept, args[3], args[4])


def test_without_gradients_nothing_is_saved():
    args = problem()
    with torch.no_grad():
        y, kept = saved_tensors(lambda: expert_mlp(*args, impl="fused"))
    assert not kept and not y.requires_grad
    detached = [a.detach() if isinstance(a, torch.Tensor) else a for a in args[:5]]
    assert not expert_mlp(*detached, None, impl="fused").requires_grad


def test_workspace_is_flat_over_fifty_calls_and_independent_of_the_number_of_experts(monkeypatch):
    monkeypatch.setattr(loop_cpu, "GROUP_BYTES", 1 << 18)

    def peak(E):
        release_scratch()
        sizes, problems = [], [problem(E=E, D=256, I=128, T=16, seed=seed) for seed in range(3)]
        for call in range(50):
            ours(problems[call % 3])
            sizes.append(scratch_bytes())
        return sizes

    sizes = peak(4)
    assert sizes[3] > 0 and len(set(sizes[3:])) == 1
    one_expert = 4 * (2 * 128 * 256 + 256 * 128)
    assert sizes[-1] < 1.5 * one_expert + 4 * loop_cpu.GROUP_BYTES
    assert peak(12)[-1] <= sizes[-1]
    release_scratch()
    assert scratch_bytes() == 0


def test_an_id_that_is_no_expert_is_refused():
    x, ids, *rest = problem()
    for wrong in (6, -1, -2):
        bad = ids.clone()
        bad[7, 1] = wrong
        with pytest.raises(IndexError, match=f"expert id {wrong} outside 0..5"):
            expert_mlp(x, bad, *rest, impl="fused")


def test_auto_says_which_and_float64_goes_to_the_reference(caplog, monkeypatch):
    monkeypatch.setattr(choose, "_CHOSEN", {})  # it is said at the first call of a process
    x, ids, weights, gate_up, down, f = problem(packed=False, lora="none")
    with caplog.at_level("INFO"):
        y = expert_mlp(x.double(), ids, weights, gate_up.double(), down.double(), None)
    assert y.dtype == torch.float64 and "reference (fused cannot run: dtype torch.float64" in caplog.text
    with pytest.raises(ConfigError, match="float64"):
        expert_mlp(x.double(), ids, weights, gate_up.double(), down.double(), None, impl="fused")
    with pytest.raises(ConfigError, match="it has auto, reference, fused"):
        expert_mlp(x, ids, weights, gate_up, down, f, impl="quick")
    with pytest.raises(ValueError, match="come together"):
        ExpertFactors(gate_up_A=torch.zeros(1, 2, 2))


def test_row_counts_are_padded_for_bf16_only_and_stay_few():
    counts = {loop_cpu.padded_rows(n, torch.bfloat16) for n in range(1, 4097)}
    # one expert step uses nine kernels per count, and oneDNN keeps up to 1,024 of them
    assert len(counts) <= 80
    for n in range(17, 4097):
        padded = loop_cpu.padded_rows(n, torch.bfloat16)
        assert n <= padded <= max(n + 15, n * 1.125)  # multiples of 16, then eight sizes per octave
    assert loop_cpu.padded_rows(37, torch.float32) == 37


@pytest.mark.parametrize("width", [16, 40, 7])
def test_swiglu_backward_score_is_the_inner_product(width):
    """The gradient of a routing weight of zero exists too: <dh, h> does not pass through the weight."""
    args = problem(I=width, packed=False, lora="none")
    weights = args[2].detach().clone()
    weights[::3] = 0.0
    args = (args[0], args[1], weights.requires_grad_(), *args[3:])
    check(args, TOLERANCE[torch.float32])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shared_among_cores_it_agrees_with_float64_and_repeats_its_bits(dtype, monkeypatch):
    """Each core adds into sums of its own, in a fixed order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    monkeypatch.setattr(loop_cpu, "WORKERS_FROM", 0)
    used = []
    each = loop_cpu.LoopCpu.each
    monkeypatch.setattr(
        loop_cpu.LoopCpu,
        "each",
        lambda self, groups, workers, work: used.append(workers) or each(self, groups, workers, work),
    )
    monkeypatch.setattr(loop_cpu, "GROUP_BYTES", 1)
    try:
        args = problem(E=7, T=40, dtype=dtype)
        check(args, TOLERANCE[dtype])
        first, second = (ours(args) for _ in range(2))
        assert set(used) == {3} and torch.get_num_threads() == 3
        for one, other in zip(tree_leaves(first), tree_leaves(second), strict=True):
            assert torch.equal(one, other)
    finally:
        torch.set_num_threads(threads)
        release_scratch()


def test_an_error_in_a_cores_share_reaches_the_caller_when_all_have_stopped(monkeypatch):
    """The first core fails at once while the second still works: the error waits for it."""
    threads, finished, both = torch.get_num_threads(), [], threading.Barrier(2, timeout=20)

    def activate(self, activation, gate_up, group, out):
        both.wait()  # or one thread might take both shares
        if threading.current_thread().name.endswith("_0"):
            raise MemoryError("planted")
        time.sleep(0.2)
        finished.append(1)

    monkeypatch.setattr(loop_cpu, "WORKERS_FROM", 0)
    monkeypatch.setattr(loop_cpu, "GROUP_BYTES", 1)
    # threads of its own: which is _0 is then known
    monkeypatch.setattr(cores, "_pool", functools.cache(cores._pool.__wrapped__))
    monkeypatch.setattr(loop_cpu, "_shares", lambda groups, workers: [groups[:1], groups[1:2]])
    monkeypatch.setattr(loop_cpu.LoopCpu, "activate", activate)
    torch.set_num_threads(2)
    try:
        with pytest.raises(MemoryError, match="planted"):
            ours(problem())
        assert finished == [1]
    finally:
        torch.set_num_threads(threads)
