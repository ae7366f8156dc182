"""torch.compile as a candidate: it says why it can't, and what it compiles is differentiable for every shape
by one graph."""

import pytest
import torch

from unfreeze.kernels import liger
from unfreeze.kernels.loops import compiled


@pytest.fixture(autouse=True)
def fresh():
    compiled.refuses.cache_clear()
    yield
    compiled.refuses.cache_clear()


def test_without_a_compiler_it_refuses_with_the_reason(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert (
        compiled.refuses("cpu", torch.float32)
        == "torch.compile needs a C++ compiler, and no-such-compiler is not on the PATH"
    )
    assert "device mps" in compiled.refuses("mps", torch.float32)


def test_without_triton_it_refuses_cuda(monkeypatch):
    monkeypatch.setattr(compiled.importlib.util, "find_spec", lambda name: None)
    assert compiled.refuses("cuda", torch.float32) == "torch.compile needs triton, which is not installed"


def test_on_a_cpu_it_runs_only_where_it_is_named():
    assert compiled.candidate(torch.sin).named_on == ("cpu",)


@pytest.mark.skipif(
    bool(compiled.refuses("cpu", torch.float32)), reason=compiled.refuses("cpu", torch.float32)
)
def test_one_graph_for_all_shapes_forward_and_backward():
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    # what candidate() passes on, without minutes of g++
    made = torch.compile(lambda x: torch.sin(x) * x, dynamic=True, backend=backend)
    for size in (3, 5, 1000):
        x = torch.randn(size, requires_grad=True)
        (gradient,) = torch.autograd.grad(made(x).sum(), x)
        torch.testing.assert_close(gradient, torch.cos(x) * x + torch.sin(x))
    assert len(graphs) == 1


def test_liger_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(liger.importlib.util, "find_spec", lambda name: None)
    assert liger.refuses("cuda", torch.bfloat16) == "liger-kernel is not installed"
    monkeypatch.setattr(liger.importlib.util, "find_spec", lambda name: object())
    assert liger.refuses("cuda", torch.bfloat16) == "" and "device cpu" in liger.refuses(
        "cpu", torch.bfloat16
    )
    assert "float64" in liger.refuses("cuda", torch.float64)
