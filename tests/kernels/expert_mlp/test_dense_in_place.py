"""Dense experts on CUDA are multiplied in place: no copy and no workspace of them, with the same results and bytes
planned. On a CPU with the backend for CUDA."""

import importlib.util
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from unfreeze.kernels.expert_mlp import fused_expert_mlp, release_scratch, scratch_bytes, workspace
from unfreeze.kernels.expert_mlp.grouped import Grouped
from unfreeze.kernels.expert_mlp.loop_cpu import LoopCpu
from unfreeze.kernels.expert_mlp.loop_cuda import LoopCuda
from unfreeze.models.blocks.experts import Experts
from unfreeze.quant.int4 import Int4

_spec = importlib.util.spec_from_file_location(
    "expert_mlp_problem_of_dense", Path(__file__).with_name("test_expert_mlp.py")
)
assert _spec is not None and _spec.loader is not None
oracle = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(oracle)

E, D, I = 6, 64, 32


def problem(frozen=True, **changes):
    args = list(oracle.problem(E=E, D=D, I=I, dtype=torch.bfloat16, packed=False, **changes))
    if frozen:
        args[3:5] = [base.detach() for base in args[3:5]]
    return args


class Copies(TorchDispatchMode):
    """Tensors made or written that have a whole matrix of every expert, W or [W | B], by the operation."""

    def __init__(self, own):
        super().__init__()
        self.own, self.found = {tensor.untyped_storage().data_ptr() for tensor in own}, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if (
            (
                isinstance(out, torch.Tensor)
                and out.dim() == 3
                and out.untyped_storage().data_ptr() not in self.own
            )
            and len(out) == E
            and out.shape[1] * out.shape[2] >= D * I
        ):
            self.found.append(str(function))
        return out


def visited(args, backend):
    """The operations that copy weights in a step of a recomputed layer: twice forward, then backward."""
    release_scratch()
    with Copies(args[3:5]) as copies:
        with torch.no_grad():
            fused_expert_mlp(*args, backend)
        fused_expert_mlp(*args, backend).float().sum().backward()
    return copies.found


@pytest.mark.parametrize("backend", [Grouped, LoopCuda])
def test_no_weight_is_copied_and_none_is_in_a_workspace(backend, monkeypatch):
    filled = []
    monkeypatch.setattr(workspace.Base, "_fill", lambda self, *_: filled.append(self.name))
    assert visited(problem(), backend()) == [] and filled == []
    assert 4 * 50 * D <= scratch_bytes() < 2 * E * D * I  # the float32 sums of 50 tokens
    release_scratch()


def test_control_arm_a_cpu_copies_them_beside_their_adapters(monkeypatch):
    """Two matrices at three visits, as the CUDA backend did too; packed ones are expanded."""
    filled, real = [], workspace.Base._fill
    monkeypatch.setattr(
        workspace.Base, "_fill", lambda self, *rest: (filled.append(self.name), real(self, *rest))
    )
    visited(problem(), LoopCpu())
    assert len(filled) == 6
    filled.clear()
    monkeypatch.setattr(Grouped, "dense_in_place", False)
    assert len(visited(problem(), Grouped())) > 0 and len(filled) == 6
    release_scratch()


ROUTINGS = ["random", "some experts empty", "one token", "all on one expert"]


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("lora", ["both", "gate_up", "down", "none"])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_results_and_every_gradient_equal_float64(routing, lora, frozen):
    args = problem(frozen, lora=lora, R=3, ids=oracle.ROUTINGS.get(routing))
    y = fused_expert_mlp(*args, Grouped())
    named = {name: leaf for name, leaf in oracle.leaves(*args).items() if leaf.requires_grad}
    grads = torch.autograd.grad(y, list(named.values()), oracle.output_grad(args[0]))
    want_y, want = oracle.merged_float64(*args)
    limit = oracle.TOLERANCE[torch.bfloat16]
    assert oracle.error(y, want_y) <= limit
    for name, grad in zip(named, grads, strict=True):
        assert oracle.error(grad, want[name]) <= limit, name


def test_control_arm_a_lost_product_is_seen(monkeypatch):
    """Without its second term the adapter is lost."""
    monkeypatch.setattr(Grouped, "add_up", lambda self, gemm, terms, group, out: gemm(*terms[0], group, out))
    args = problem(lora="gate_up")
    assert oracle.error(fused_expert_mlp(*args, Grouped()), oracle.merged_float64(*args)[0]) > 0.05


def experts(**changes):
    options = {"codec": None, "dtype": torch.bfloat16, "device": "meta", **changes}
    return Experts(128, 2048, 768, **options)


def test_the_plan_has_no_workspace_for_them():
    """Of Qwen3-30B-A3B 1.2 GB a layer less; packed, or narrower than the computation, they need one."""
    bf16, every = torch.bfloat16, 128 * 3 * 2048 * 768
    dense = experts().bytes(8, bf16, "cuda")
    assert (dense.scratch, dense.scratch_per_rank) == (0, 0)
    packed = experts(codec=Int4(32)).bytes(8, bf16, "cuda")
    assert packed.scratch == 2 * every and packed.scratch_per_rank > 0
    held = experts(dtype=torch.float32, held=bf16).bytes(8, torch.float32, "cuda")
    assert held.scratch == 4 * every
    assert experts().bytes(8, bf16, "cpu").scratch == experts(codec=Int4(32)).bytes(8, bf16, "cpu").scratch
