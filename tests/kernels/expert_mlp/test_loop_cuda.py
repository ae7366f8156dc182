"""What CUDA runs where grouped GEMMs cannot, on a CPU: against float64, with the bytes and the waits that the
plan counts, and chosen with its reason told."""

import importlib
import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from unfreeze.kernels.choice import choose
from unfreeze.kernels.choice.table import row_of
from unfreeze.kernels.expert_mlp import ClampedSwiGLU, backend, fused_expert_mlp, release_scratch, workspace
from unfreeze.kernels.expert_mlp.grouped import Grouped
from unfreeze.kernels.expert_mlp.loop_cuda import LoopCuda


def loaded(name, path):
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


live = loaded("live", Path(__file__).parents[2] / "parallel" / "live.py")
oracle = loaded("expert_mlp_problem_of_loop", Path(__file__).with_name("test_expert_mlp.py"))
module = importlib.import_module("unfreeze.kernels.expert_mlp")
DTYPES = [torch.float32, torch.bfloat16]
GROUPED_MM = F.grouped_mm


def results(args, by, **more):
    y = fused_expert_mlp(*args, backend=by, **more)
    named = {name: leaf for name, leaf in oracle.leaves(*args).items() if leaf.requires_grad}
    grads = torch.autograd.grad(y, list(named.values()), oracle.output_grad(args[0]))
    return {"y": y.detach(), **dict(zip(named, grads, strict=True))}


def errors(args, by):
    y, grads = oracle.merged_float64(*args)
    return {name: oracle.error(x, y if name == "y" else grads[name]) for name, x in results(args, by).items()}


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    """Neither a grouped GEMM nor a kernel that is chosen may run."""
    monkeypatch.setattr(F, "grouped_mm", lambda *_, **__: pytest.fail("a grouped GEMM"))
    monkeypatch.setattr(choose, "_CHOSEN", {})
    yield
    asked = {(name, impl) for name, _, _, _, impl in choose._CHOSEN}
    assert asked <= {("expand", "reference"), ("expert_mlp", "auto"), ("expert_mlp", "loop")}
    release_scratch()


ROUTINGS = ["random", "one token", "all on one expert", "some experts empty"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("rank", [3, 8])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_equals_merged_float64(dtype, packed, rank, routing):
    args = oracle.problem(R=rank, dtype=dtype, packed=packed, ids=oracle.ROUTINGS.get(routing))
    assert max(errors(args, LoopCuda()).values()) <= oracle.TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_widths_that_no_grouped_gemm_takes(dtype, monkeypatch):
    """torch.mm of a CPU adds 0 times what `out` held where strides of bf16 rows are odd: NaN, if that was NaN."""
    release_scratch()
    monkeypatch.setattr(torch, "empty", torch.zeros)
    args = oracle.problem(D=37, I=11, R=3, dtype=dtype, packed=False)
    assert max(errors(args, LoopCuda()).values()) <= oracle.TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("experts_at_once", [1, 2])
def test_experts_in_groups_give_the_same_bits(dtype, experts_at_once, monkeypatch):
    args = oracle.problem(R=3, dtype=dtype)
    whole, groups = results(args, LoopCuda()), []
    real = Grouped.groups

    def counted(self, routing, weight_bytes, row_bytes, both):
        monkeypatch.setattr(workspace, "WORKSPACE", max(weight_bytes) * experts_at_once)
        found = list(real(self, routing, weight_bytes, row_bytes, both=both))
        groups.append(len(found))
        return iter(found)

    monkeypatch.setattr(Grouped, "groups", counted)
    parts = results(args, LoopCuda())
    assert groups == 2 * [6 // experts_at_once] and all(torch.equal(parts[n], whole[n]) for n in whole)


def test_slabs_of_rows_change_no_bit(monkeypatch):
    args = oracle.problem(dtype=torch.float32)
    for activation in (module.SWIGLU, ClampedSwiGLU(interleaved=True)):
        whole = results(args, LoopCuda(), activation=activation)
        with monkeypatch.context() as patch:
            patch.setattr("unfreeze.kernels.expert_mlp.loop_cuda.SLAB_BYTES", 7 * 4 * 32)  # 7 of 100 rows
            slabs = results(args, LoopCuda(), activation=activation)
        assert all(torch.equal(slabs[name], whole[name]) for name in whole)


def test_the_host_waits_once_a_visit(monkeypatch):
    """For the rows of each expert; forward's counts serve backward."""
    waits = []
    real = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: waits.append(1) or real(self))
    y = fused_expert_mlp(*oracle.problem(dtype=torch.bfloat16), LoopCuda())
    assert waits == [1]
    y.float().sum().backward()
    assert waits == [1]


def saved(run):
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        run()
    return kept


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_expanded_is_saved_for_backward(dtype):
    args = oracle.problem(dtype=dtype, T=23)
    kept = saved(lambda: fused_expert_mlp(*args, LoopCuda()))
    assert kept and not oracle.expanded(kept, args[3], args[4])
    assert oracle.expanded(saved(lambda: module.reference_expert_mlp(*args)), args[3], args[4])  # control arm


def peak(args, run):
    """Bytes at the worst moment of forward and backward, beyond the arguments."""
    release_scratch()
    there = [*oracle.leaves(*args).values(), args[1]]
    there += [
        part for base in args[3:5] if not isinstance(base, torch.Tensor) for part in base.parts.values()
    ]
    with live.Live(there) as watch:
        run(*args).float().sum().backward()
    release_scratch()
    return watch.peak


def test_it_takes_the_bytes_of_fused_where_the_reference_keeps_every_expert(monkeypatch):
    """Few rows and many weights, as in a large model: the workspace decides."""
    args = oracle.problem(E=16, D=256, I=128, T=16, lora="none", dtype=torch.bfloat16)
    every = 16 * 3 * 256 * 128 * 2
    monkeypatch.setattr(workspace, "WORKSPACE", every // 8)
    loop = peak(args, lambda *a: fused_expert_mlp(*a, LoopCuda()))
    with monkeypatch.context() as patch:
        patch.setattr(F, "grouped_mm", GROUPED_MM)
        patch.setattr(choose, "_CHOSEN", {})
        fused = peak(args, lambda *a: fused_expert_mlp(*a, Grouped()))
    reference = peak(args, module.reference_expert_mlp)
    assert loop <= 1.1 * fused and reference > fused + every / 3


@pytest.fixture
def asked_as_cuda(monkeypatch):
    """choose() is asked as on a GPU, whose checks answer as planted: {name: fault}."""
    faults: dict[str, str] = {}
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(module, "_self_check", lambda name, device, dtype: faults.get(name, ""))
    monkeypatch.setattr(choose, "device_key", lambda device: "nvidia-h200")
    for cache in (module.fused_refuses, module.loop_refuses):
        cache.cache_clear()
    yield faults
    for cache in (module.fused_refuses, module.loop_refuses):
        cache.cache_clear()


CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize(
    "dtype, faults, runs, said",
    [
        (torch.bfloat16, {}, "fused", "nothing expanded is saved"),
        (torch.bfloat16, {"fused": "packed: error inf"}, "loop", "fused cannot run: packed: error inf"),
        (torch.float32, {}, "loop", "fused cannot run: dtype torch.float32"),
        (
            torch.bfloat16,
            {"fused": "error 1", "loop": "error 2"},
            "reference",
            "error 1; loop cannot run: err",
        ),
    ],
)
def test_it_runs_where_fused_cannot_and_the_reason_is_told(dtype, faults, runs, said, asked_as_cuda):
    asked_as_cuda.update(faults)
    for kind in module.OP.cases:
        chosen = choose.by_record(module.OP, CUDA, dtype, kind.bucket)
        assert chosen.runs == runs and said in chosen.why
    inputs = choose.Inputs("expert_mlp", CUDA, dtype, "64 on", "auto")
    assert said in json.dumps(row_of(inputs, chosen))  # as in a run's events


def test_the_loop_is_checked_only_where_it_may_run(asked_as_cuda, monkeypatch):
    """A check is of every kind of call at two sizes, in each process of a run."""
    checked = []
    monkeypatch.setattr(
        module, "_self_check", lambda name, device, dtype: checked.append(name) or asked_as_cuda.get(name, "")
    )
    assert choose.running(module.OP, CUDA, torch.bfloat16, "64 on") == ["fused", "loop"]
    assert choose.by_record(module.OP, CUDA, torch.bfloat16, "64 on").runs == "fused"
    assert checked == ["fused"]
    choose.by_record(module.NARROW, CUDA, torch.bfloat16, "64 on, narrow")
    assert checked == ["fused", "loop"]
    asked_as_cuda["fused"] = "error 1"
    for cache in (module.fused_refuses, module.loop_refuses):
        cache.cache_clear()
    assert choose.by_record(module.OP, CUDA, torch.bfloat16, "64 on").runs == "loop"
    assert checked == ["fused", "loop"] * 2


def test_a_wrong_loop_that_is_named_does_not_run_where_fused_can(asked_as_cuda, monkeypatch):
    asked_as_cuda["loop"] = "error 2"
    real = choose._choose
    monkeypatch.setattr(choose, "_choose", lambda op, device, *rest: real(op, CUDA, *rest))
    args = oracle.problem(D=16, I=8, R=2, dtype=torch.bfloat16, packed=False)
    choose.choose_anew()
    with pytest.raises(module.ConfigError, match="expert_mlp cannot run as 'loop' here: error 2"):
        module.expert_mlp(*args, impl="loop")


def test_widths_that_grouped_gemms_cannot_take_run_as_loop(asked_as_cuda):
    chosen = choose.by_record(module.NARROW, CUDA, torch.bfloat16, "64 on, narrow")
    assert chosen.runs == "loop" and "multiples of 8" in chosen.why
    asked_as_cuda["loop"] = "error 2"
    chosen = choose.by_record(module.NARROW, CUDA, torch.bfloat16, "64 on, narrow")
    assert chosen[:2] == ("reference", "loop cannot run: error 2")


@pytest.mark.parametrize(("hidden", "width", "refused"), [(64, 32, False), (60, 32, True), (64, 36, True)])
def test_widths_that_are_no_multiples_of_8_are_refused_on_a_gpu_alone(hidden, width, refused):
    for on_gpu in (True, False):
        x = SimpleNamespace(is_cuda=on_gpu, shape=(3, hidden))
        assert bool(module.narrow_refuses(x, width)) == (refused and on_gpu)


def test_narrow_widths_on_a_gpu_ask_for_them(monkeypatch, asked_as_cuda):
    """The public function, on a CPU whose tensors are asked about as a GPU's."""
    args = oracle.problem(D=36, I=12, R=2, dtype=torch.bfloat16, packed=False)
    real = choose._choose
    monkeypatch.setattr(module, "narrow_refuses", lambda x, width: f"widths {x.shape[1]} and {width}")
    monkeypatch.setattr(
        choose,
        "_choose",
        lambda op, device, *rest: real(op, CUDA if op.name == "expert_mlp" else device, *rest),
    )
    choose.choose_anew()
    y = module.expert_mlp(*args)
    assert oracle.error(y, oracle.merged_float64(*args)[0]) <= oracle.TOLERANCE[torch.bfloat16]
    ((inputs, choice),) = [(i, c) for i, c in choose.choices().items() if i.op == "expert_mlp"]
    assert inputs.bucket.endswith(", narrow") and choice.runs == "loop"
    with pytest.raises(module.ConfigError, match="cannot run as 'fused' here: widths 36 and 12"):
        module.expert_mlp(*args, impl="fused")


def test_counts_are_the_routings(monkeypatch):
    """Control arm of the counts: with those of another routing the result is wrong."""
    args = oracle.problem(dtype=torch.float32)
    wanted = results(args, LoopCuda())["y"]
    ends = torch.tensor([10, 20, 30, 40, 50, 100]).tolist()
    monkeypatch.setattr(backend.DeviceRouting, "ends", ends)
    assert oracle.error(results(args, LoopCuda())["y"], wanted.double()) > 0.1
