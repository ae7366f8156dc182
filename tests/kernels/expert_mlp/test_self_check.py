"""The check that the expert MLP passes on a GPU before its first use, here on a CPU with the GPU's backend: it
finds what is wrong, at small and at hot shapes, wherever the first call comes from."""

import importlib
from dataclasses import replace

import pytest
import torch

from unfreeze.kernels.choice import choose, predicted
from unfreeze.kernels.choice.op import Candidate
from unfreeze.kernels.expert_mlp import cases, fused_expert_mlp, workspace
from unfreeze.kernels.expert_mlp.grouped import Grouped, Part
from unfreeze.kernels.expert_mlp.loop_cuda import LoopCuda
from unfreeze.quant.codec import Packed

module = importlib.import_module("unfreeze.kernels.expert_mlp")
CPU, BF16 = torch.device("cpu"), torch.bfloat16
HOT = replace(cases.HOT, tokens=48, experts=6, hidden=64, intermediate=32, used=5)  # the true one takes 20 s


def computed(args, backend):
    return fused_expert_mlp(*args[:6], backend, *args[6:])


@pytest.fixture
def self_check(monkeypatch):
    """The check of `name`; `change` (y, arguments) -> y makes it wrong."""

    def run(change=lambda y, *_: y, name="fused", dtype=BF16):
        backend = {"fused": Grouped, "loop": LoopCuda}[name]
        made = Candidate(lambda: lambda *args: change(computed(args, backend()), *args), lambda *_: "")
        monkeypatch.setattr(module, "OP", replace(module.OP, candidates={name: made}))
        return module._self_check.__wrapped__(name, CPU, dtype)

    monkeypatch.setattr(cases, "HOT", HOT)
    return run


def not_a_number(y, x, *_):
    x.register_hook(lambda grad: grad * float("nan"))
    return y


@pytest.mark.parametrize("name, dtype", [("fused", BF16), ("loop", BF16), ("loop", torch.float32)])
def test_what_is_right_passes(name, dtype, self_check):
    assert self_check(name=name, dtype=dtype) == ""


@pytest.fixture
def two_kinds(monkeypatch):
    """Of every kind, which test_what_is_right_passes has."""
    kinds = [kind for kind in cases.EVERY_KIND if kind.name in ("packed", "all weights")]
    monkeypatch.setattr(cases, "EVERY_KIND", kinds)


def test_it_differentiates_wherever_the_first_call_is(self_check, two_kinds):
    """Answers before step 1 come under no_grad, a recomputed layer in a Function's forward."""
    found = []

    def check():
        found.append((self_check(), self_check(not_a_number)))

    class Layer(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            check()
            return x.clone()

    check()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            check()
    Layer.apply(torch.ones(1, requires_grad=True))
    assert [right for right, _ in found] == [""] * 4 and all("error inf" in wrong for _, wrong in found)


def raises(*_):
    raise RuntimeError("no kernel image")


def without_adapters(y, *args):
    return computed((*args[:5], None, *args[6:]), Grouped())


def without_the_gradient_of_routing_weights(y, x, ids, weights, *rest):
    return computed((x, ids, weights.detach(), *rest), Grouped())


def only(wrong):
    """y is off by 5 % where `wrong` (arguments) says so."""
    return lambda y, *args: y * (1.05 if wrong(*args) else 1.0)


@pytest.mark.parametrize(
    "change, said",
    [
        (not_a_number, "packed: error inf"),
        (raises, "packed: RuntimeError: no kernel image"),
        (without_adapters, "packed: "),
        (without_the_gradient_of_routing_weights, "packed: "),
        (only(lambda x, i, w, gate_up, *_: not isinstance(gate_up, Packed)), "unpacked: error"),
        (only(lambda x, i, w, gate_up, down, factors, *_: factors is None), "all weights: error"),
        (only(lambda *args: len(args) > 6 and args[7].kind == "gelu"), "unpacked, gelu: error"),
        (only(lambda *args: len(args) > 6 and args[7].interleaved), "packed, clamped: error"),
        (only(lambda *_: workspace.WORKSPACE < 1 << 28), "packed, in groups: error"),
        (only(lambda x, *_: len(x) == HOT.tokens), "packed: error"),  # right at small shapes
    ],
)
def test_it_names_what_is_wrong(change, said, self_check):
    assert said in self_check(change)


@pytest.mark.parametrize("factor, runs", [(1.0, "fused"), (1.05, "loop")])
def test_a_wrong_fused_gives_way_to_the_loop_which_is_checked_too(
    factor, runs, two_kinds, monkeypatch, caplog
):
    """From the check to the result, by the choice that a GPU makes; here its backends run on a CPU."""
    checked = []

    def candidate(name, function):
        def refuses(device, dtype):
            checked.append(name)
            return module._self_check.__wrapped__(name, CPU, dtype)

        return replace(module.OP.candidates[name], load=lambda: function, refuses=refuses)

    by = {
        "fused": lambda *args: computed(args, Grouped()) * factor,
        "loop": lambda *args: computed(args, LoopCuda()),
    }
    op = replace(module.OP, candidates={name: candidate(name, function) for name, function in by.items()})
    monkeypatch.setattr(module, "OP", op)
    monkeypatch.setattr(cases, "HOT", HOT)
    choose.choose_anew()
    args = cases.SMALL.arguments(CPU, BF16, torch.Generator().manual_seed(5))
    y = choose.choose(op, CPU, BF16, "64 on")(*args)
    assert torch.equal(y, by[runs](*args)) and "loop" in checked
    (choice,) = [c for inputs, c in choose.choices().items() if inputs.op == "expert_mlp"]
    assert choice.runs == runs and ("fused cannot run: its self-check on cpu, packed" in choice.why) == (
        runs == "loop"
    )
    assert ("fused does not run: its self-check" in caplog.text) == (runs == "loop")


def test_several_groups_and_experts_without_rows_are_among_what_it_checks(self_check, monkeypatch):
    groups, empty = set(), set()
    real = Grouped.groups

    def seen(self, routing, weight_bytes, row_bytes, both):
        counts = routing.offsets_E.diff(prepend=routing.offsets_E.new_zeros(1))
        empty.add(bool((counts == 0).any()))
        for group in real(self, routing, weight_bytes, row_bytes, both=both):
            groups.add(group.number if isinstance(group, Part) else -1)
            yield group

    monkeypatch.setattr(Grouped, "groups", seen)
    assert self_check() == "" and groups == {-1, 0, 1} and empty == {True}
    assert workspace.WORKSPACE == 9 << 29  # as it was


def test_the_hot_shape_is_hot():
    """64 to 512 rows for most experts, as a layer of Qwen3-30B-A3B has; one without."""
    _x, ids, *_ = replace(cases.HOT, hidden=8, intermediate=8, kind="unpacked").arguments(
        CPU, BF16, torch.Generator().manual_seed(0)
    )
    counts = ids.flatten().bincount(minlength=16).tolist()
    assert counts[-1] == 0 and 30 < min(counts[:-1]) < 100 and 300 < max(counts) < 600
    assert (cases.HOT.hidden, cases.HOT.intermediate) == (2048, 768)


def test_where_there_is_no_memory_for_the_hot_shape_the_small_ones_decide(self_check, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(predicted, "Truth", full)
    monkeypatch.setattr(predicted, "_error", lambda *_: 0.0)
    assert self_check() == ""
    monkeypatch.setattr(predicted, "_error", full)  # at a small shape it is a fault
    assert "OutOfMemoryError" in self_check()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name, dtype", [("fused", BF16), ("loop", BF16), ("loop", torch.float32)])
def test_on_a_gpu_the_check_passes_under_no_grad(name, dtype):
    with torch.no_grad():
        device = torch.device("cuda", torch.cuda.current_device())
        assert module._self_check.__wrapped__(name, device, dtype) == ""
