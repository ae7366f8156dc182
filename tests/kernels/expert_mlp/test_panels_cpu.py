"""Experts straight from their codes in panels: against the float64 merged model, and against the part that
multiplies expanded matrices."""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_leaves

from unfreeze.core import cpu
from unfreeze.kernels.expert_mlp import (
    fused_expert_mlp,
    loop_cpu,
    panels_cpu,
    products,
    release_scratch,
    scratch_bytes,
)
from unfreeze.kernels.expert_mlp.loop_cpu import LoopCpu
from unfreeze.kernels.expert_mlp.panels_cpu import Panels
from unfreeze.kernels.loops import bf16_cpu
from unfreeze.kernels.loops.bf16_tile import ROWS
from unfreeze.kernels.loops.float_tile import BLOCK
from unfreeze.quant.fp8 import Fp8
from unfreeze.quant.fp8_scaled import MATRIX, Fp8Scaled
from unfreeze.quant.mxfp4 import BLOCKS, Mxfp4

_spec = importlib.util.spec_from_file_location(
    "expert_mlp_problem_of_panels", Path(__file__).with_name("test_expert_mlp.py")
)
assert _spec is not None and _spec.loader is not None
oracle = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(oracle)

needed = pytest.mark.skipif(not bf16_cpu.available(), reason="this CPU has no AVX512-bf16")
TOLERANCE = oracle.TOLERANCE
either = pytest.mark.parametrize(
    "dtype", [pytest.param(torch.bfloat16, marks=needed), torch.float32], ids=["bf16", "float32"]
)


def problem(dtype, **changes):
    return oracle.problem(**{"D": 128, "I": 64, "E": 6, "T": 60, "R": 4, "dtype": dtype, **changes})


def results(args, backend):
    y = fused_expert_mlp(*args, backend=backend)
    named = {name: leaf for name, leaf in oracle.leaves(*args).items() if leaf.requires_grad}
    return {
        "y": y.detach(),
        **dict(
            zip(named, torch.autograd.grad(y, list(named.values()), oracle.output_grad(args[0])), strict=True)
        ),
    }


def errors(args, backend):
    got = results(args, backend)
    y, grads = oracle.merged_float64(*args)
    return {name: oracle.error(found, y if name == "y" else grads[name]) for name, found in got.items()}


def wrong(args):
    """The errors where one is larger than its dtype's roundings explain."""
    found = errors(args, Panels())
    return {} if max(found.values()) <= TOLERANCE[args[0].dtype] else found


ROUTINGS = {
    "random": None,
    "one expert has all": torch.tensor([[2, 5]] * 41),
    "one row each": torch.arange(6)[:, None],
    "whole tiles": torch.arange(6).repeat(2 * ROWS)[:, None],
    "one row over": torch.cat(
        [torch.zeros(ROWS + 1, dtype=torch.int64), torch.ones(2 * ROWS - 1, dtype=torch.int64)]
    )[:, None],
}


@either
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("rank", [3, 8, 24])
def test_equals_merged_float64(dtype, routing, rank):
    assert wrong(problem(dtype, ids=ROUTINGS[routing], R=rank)) == {}


@either
@pytest.mark.parametrize("lora", ["both", "gate_up", "down", "none"])
@pytest.mark.parametrize(("D", "I", "group"), [(64, 64, 32), (64, 192, 64), (256, 128, 128)])
def test_whichever_matrices_have_adapters(dtype, lora, D, I, group):
    assert wrong(problem(dtype, D=D, I=I, group=group, lora=lora)) == {}


def test_many_rows_of_an_expert_and_a_wide_weight():
    """float32: more rows than a block, more inner indices than a part of a strip, and neither whole."""
    assert wrong(problem(torch.float32, D=320, I=384, E=2, T=2 * BLOCK + 7)) == {}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_frozen_dense_base_equals_merged_float64(dtype):
    """float32: weights that lie in bf16 are widened a panel at a time."""
    args = problem(dtype, packed=False)
    x, *routing, gate_up, down, factors = args
    args = (x.detach().float().requires_grad_(), *routing, gate_up.detach(), down.detach(), factors)
    assert panels_cpu.supports(torch.float32, *args[3:5])
    assert wrong(args) == {}


FORMATS = {
    "mxfp4": Mxfp4(),
    "mxfp4 in blocks": Mxfp4(BLOCKS),
    "fp8": Fp8((64, 32)),
    "fp8, powers of two": Fp8((128, 128), "F8_E8M0"),
    "fp8, a scale per row": Fp8Scaled(),
    "fp8, a scale per matrix": Fp8Scaled(MATRIX),
}


@needed
@pytest.mark.parametrize("name", FORMATS)
def test_other_formats_equal_merged_float64(name, monkeypatch):
    """bf16; of float32 the panels are compared (loops/test_strips.py), and all else is INT4's."""
    monkeypatch.setattr(panels_cpu, "available", lambda: True)  # beside AMX they do not pay, and are right
    args = problem(torch.bfloat16, D=256, I=128, codec=FORMATS[name])
    assert panels_cpu.supports(torch.bfloat16, args[3], args[4])
    assert wrong(args) == {}


@needed
def test_it_is_no_less_exact_than_gemms_over_expanded_matrices():
    """The last product of a direction isn't rounded before it is summed: errors of y and dx are smaller, the
    others as large."""
    args = problem(torch.bfloat16, D=256, I=128, T=400)
    panels, gemms = errors(args, Panels()), errors(args, LoopCpu())
    assert all(panels[name] <= 1.05 * gemms[name] for name in gemms), (panels, gemms)


@either
def test_without_gradients_it_is_the_same_to_the_bit(dtype):
    args = problem(dtype, T=200)
    with torch.no_grad():
        y = fused_expert_mlp(*args, backend=Panels())
    assert torch.equal(y, results(args, Panels())["y"])


@either
def test_x_without_gradient(dtype):
    """A first layer's experts: no dx is computed, and the rest is the same to the bit."""
    args = problem(dtype)
    want = results(args, Panels())
    frozen = (args[0].detach(), *args[1:])
    y = fused_expert_mlp(*frozen, backend=Panels())
    found = torch.autograd.grad(y, [args[5].gate_up_A, args[5].down_B], oracle.output_grad(args[0]))
    assert torch.equal(found[0], want["gate_up_A"]) and torch.equal(found[1], want["down_B"])


@either
def test_shared_among_cores_it_repeats_its_bits(dtype, monkeypatch):
    threads = torch.get_num_threads()
    monkeypatch.setattr(loop_cpu, "WORKERS_FROM", 0)
    monkeypatch.setattr(panels_cpu, "GROUP_EXPERTS", 1)
    torch.set_num_threads(3)
    try:
        args = problem(dtype, E=7)
        assert wrong(args) == {}
        first, second = (results(args, Panels()) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(tree_leaves(first), tree_leaves(second), strict=True))
    finally:
        torch.set_num_threads(threads)
        release_scratch()


@either
def test_nothing_expanded_is_held(dtype):
    """One panel, and one expert's rows: less than one expanded expert."""
    release_scratch()
    args = problem(dtype, E=3, D=512, I=512, T=24, K=1, lora="none")
    results(args, Panels())
    panels = scratch_bytes()
    release_scratch()
    results(args, LoopCpu())
    expanded = scratch_bytes()
    release_scratch()
    one_expert = 3 * 512 * 512 * dtype.itemsize
    assert panels < one_expert < expanded


PLANTED = {
    "the last pairs": (products, "panel.ctypes.data, pairs, there", "panel.ctypes.data, pairs - 8, there"),
    "a part in place of the sum": (products, "1 if k == 0 else 0", "1"),
    "the routing weight": (products, "target[j] += w * product[j]", "target[j] += product[j]"),
    "an adapter of the wrong expert": (panels_cpu, "append(factors.A1[g],", "append(factors.A1[0],"),
    "backward through the next expert": (panels_cpu, "pack_columns(down, e,", "pack_columns(down, e - 1,"),
}
OF_FLOAT32 = ["a part in place of the sum"]  # the others in bf16
HERE = [
    "a part in place of the sum",
    "an adapter of the wrong expert",
]  # one a module; each compiles for seconds


def compiled_anew(module, old="", new=""):
    """A copy of a module with `old` replaced, whose loops no cache holds."""
    source = Path(module.__file__).read_text(encoding="utf-8")
    assert source.count(old) == 1 or not old
    source = source.replace(old, new) if old else source
    source = source.replace("@serial", "@njit").replace(
        "from typing import", "from numba import njit\nfrom typing import", 1
    )
    copy = types.ModuleType(module.__name__)
    copy.__file__ = module.__file__
    exec(compile(source, "planted", "exec"), vars(copy))
    return copy


@pytest.mark.parametrize(
    "bug",
    [
        pytest.param(
            bug, marks=[needed] * (bug not in OF_FLOAT32) + [pytest.mark.nightly] * (bug not in HERE)
        )
        for bug in PLANTED
    ],
)
def test_a_planted_bug_is_seen(bug, monkeypatch):
    """Control arm: the errors are then far outside."""
    module, old, new = PLANTED[bug]
    if module is products:
        monkeypatch.setitem(sys.modules, products.__name__, compiled_anew(products, old, new))
        planted = compiled_anew(panels_cpu)
    else:
        planted = compiled_anew(panels_cpu, old, new)
    dtype = torch.float32 if bug in OF_FLOAT32 else torch.bfloat16
    found = errors(problem(dtype, D=320), planted.Panels())  # so wide that a strip has parts
    assert max(found.values()) > 10 * TOLERANCE[dtype]


def test_what_it_refuses(monkeypatch):
    bf16, float32 = torch.bfloat16, torch.float32
    _, _, _, gate_up, down, _ = problem(bf16)
    monkeypatch.setattr(panels_cpu, "available", lambda: True)
    assert panels_cpu.supports(bf16, gate_up, down) and panels_cpu.supports(float32, gate_up, down)
    assert not panels_cpu.supports(torch.float64, gate_up, down)
    # dense: of float32 alone, and only where it is frozen
    dense = gate_up.dequantize(), down.dequantize()
    assert not panels_cpu.supports(bf16, *dense) and panels_cpu.supports(float32, *dense)
    assert not panels_cpu.supports(float32, dense[0].requires_grad_(), dense[1])
    for dtype in (bf16, float32):
        # widths
        assert not panels_cpu.supports(dtype, *problem(dtype, D=96)[3:5])
        assert not panels_cpu.supports(dtype, *problem(dtype, I=32)[3:5])
        assert not panels_cpu.supports(dtype, *problem(dtype, group=16)[3:5])
        # a block of FP8 that ends within a panel, and within what is read at a time
        assert not panels_cpu.supports(dtype, *problem(dtype, codec=Fp8((32, 32)))[3:5])
        assert not panels_cpu.supports(dtype, *problem(dtype, codec=Fp8((64, 16)))[3:5])
        assert not panels_cpu.supports(dtype, gate_up, down, gate_up_bias=torch.zeros(6, 128))
    monkeypatch.setattr(panels_cpu, "available", lambda: False)  # no instruction for bf16
    assert not panels_cpu.supports(bf16, gate_up, down) and panels_cpu.supports(float32, gate_up, down)


def test_with_amx_it_leaves_the_work_to_onednn(monkeypatch):
    monkeypatch.setattr(cpu, "cpu_class", lambda: "cpu-amx")
    assert not bf16_cpu.panels_pay()
