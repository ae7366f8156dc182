"""The dense block by torch.compile: equal to the reference forward and backward, one graph for all numbers of
rows, and a bounded number of graphs.

Most tests compile with a backend that runs the graph as it is (what dynamo and autograd make of the block, in
a second); one has inductor's code.
"""

import logging

import pytest
import torch

from unfreeze.kernels.choice import measure
from unfreeze.kernels.dense_mlp import FEWEST, OP, Projection, bucket, dense_mlp, reference, torch_compiled
from unfreeze.kernels.dense_mlp.torch_compiled import MAX_KINDS, Compiled
from unfreeze.kernels.loops import compiled

D, INNER = 24, 40


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    torch_compiled._LOGGED.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def graphs():
    return []


def counting(graphs):
    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    return backend


def arguments(rows, adapters=True, scale=2.0, dtype=torch.float32, width=D, seed=0):
    """x, norm, eps, gate, up, down."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape, spread=1.0):
        return torch.randn(shape, generator=generator) * spread

    def projection(out, into):
        weight, bias = random(out, into, spread=into**-0.5).to(dtype), random(out, spread=0.1).to(dtype)
        if not adapters:
            return Projection(weight.requires_grad_(), bias.requires_grad_())
        A, B = random(4, into, spread=into**-0.5), random(out, 4, spread=0.3)
        return Projection(weight, bias, A.requires_grad_(), B.requires_grad_(), scale)

    x, norm = (
        random(rows, width).to(dtype).requires_grad_(),
        (1 + random(width, spread=0.1)).to(dtype).requires_grad_(not adapters),
    )
    return x, norm, 1e-6, projection(INNER, width), projection(INNER, width), projection(width, INNER)


def errors(implementation, args):
    """Largest relative error of the output and of any gradient against the reference in float64."""
    got = measure.visit(OP, implementation, args)
    want = measure.visit(OP, reference.dense_mlp, measure.converted(args, torch.float64))
    return [
        max(measure.relative_error(a.detach(), b.detach()) for a, b in zip(*pair, strict=True))
        for pair in zip(got, want, strict=True)
    ]


@pytest.mark.parametrize("adapters", [True, False])
def test_one_graph_serves_every_number_of_rows_and_every_scale(adapters, graphs):
    block = Compiled(counting(graphs))
    for seed, (rows, scale) in enumerate([(256, 2.0), (300, 2.0), (1024, 0.0), (257, 0.5)]):
        assert max(errors(block, arguments(rows, adapters, scale, seed=seed))) < OP.tolerance[torch.float32]
    assert len(graphs) == 1


def test_the_reference_is_the_formula_in_float64():
    x, norm, eps, gate, up, down = measure.converted(arguments(9), torch.float64)
    n = norm * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()

    def by(x, p):
        return x @ (p.weight + p.scale * p.B @ p.A).t() + p.bias

    g = by(n, gate)
    torch.testing.assert_close(
        dense_mlp(x, norm, eps, gate, up, down), x + by(g * torch.sigmoid(g) * by(n, up), down)
    )


@pytest.mark.parametrize("planted", ["no residual", "no adapter's scale", "norm by the wrong eps"])
def test_control_arm_a_wrong_graph_is_seen(planted, graphs, monkeypatch):
    true, parts = torch_compiled.block, torch_compiled._parts
    if planted == "no residual":
        monkeypatch.setattr(torch_compiled, "block", lambda x, *rest: true(x, *rest) - x)
    elif planted == "no adapter's scale":
        monkeypatch.setattr(torch_compiled, "_parts", lambda by: (*parts(by)[:4], torch.tensor(1.0)))
    else:
        monkeypatch.setattr(
            torch_compiled, "block", lambda x, norm, eps, *rest: true(x, norm, eps + 1e-3, *rest)
        )
    assert max(errors(Compiled(counting(graphs)), arguments(256))) > OP.tolerance[torch.float32]


def test_graphs_are_bounded_and_kinds_beyond_run_the_reference_said_once(graphs, caplog):
    block = Compiled(counting(graphs))
    with caplog.at_level(logging.WARNING, logger="unfreeze"):
        for width in (8, 16, 24, 32, 40, 48):
            args = arguments(256, width=width)
            torch.testing.assert_close(block(*args), reference.dense_mlp(*args), rtol=1e-4, atol=1e-5)
    made = len(graphs)  # fewer than kinds: from the second width on torch makes widths dynamic by itself
    assert (
        made <= len(block.kinds) == MAX_KINDS
        and len(caplog.records) == 1
        and "further kinds run the reference" in caplog.text
    )
    with torch.no_grad():
        block(*arguments(256, width=8))
    assert len(graphs) == made, "without gradients is a kind of its own, and there is no room for it"


def test_torchs_own_limit_is_no_end_of_a_run(graphs, caplog):
    """It raises where a graph must be whole; a global switch such as deterministic algorithms is something it
    guards on and a kind doesn't name."""
    block = Compiled(counting(graphs))
    with torch._dynamo.config.patch(recompile_limit=1), caplog.at_level(logging.WARNING, logger="unfreeze"):
        assert max(errors(block, arguments(256))) < OP.tolerance[torch.float32]
        try:
            torch.use_deterministic_algorithms(True)
            for rows in (256, 300):
                assert max(errors(block, arguments(rows))) < OP.tolerance[torch.float32]
        finally:
            torch.use_deterministic_algorithms(False)
    assert (
        len(graphs) == 1
        and sum("further kinds run the reference" in entry.message for entry in caplog.records) == 1
    )


def test_backward_of_a_recomputation_and_a_visit_without_gradients_make_two_graphs(graphs):
    block = Compiled(counting(graphs))
    for rows in (256, 512, 700):
        args = arguments(rows)
        with torch.no_grad():
            first = block(*args)
        torch.testing.assert_close(first, block(*args).detach())
    assert len(graphs) == 2


def test_few_rows_and_mixed_dtypes_are_not_measured():
    *_, gate, up, down = arguments(2)
    assert (
        bucket(torch.empty(FEWEST - 1, D), gate, up, down)
        == "other"
        == bucket(torch.empty(FEWEST, D, dtype=torch.bfloat16), gate, up, down)
    )
    assert bucket(torch.empty(FEWEST, D), gate, up, down) == "adapters"
    *_, gate, up, down = arguments(2, adapters=False)
    assert bucket(torch.empty(FEWEST, D), gate, up, down) == "all weights"


@pytest.mark.skipif(
    bool(compiled.refuses("cpu", torch.float32)), reason=compiled.refuses("cpu", torch.float32)
)
def test_what_inductor_builds_equals_float64_forward_and_backward():
    """g++ takes half a minute of a core with a cold cache, so one dtype, one kind of call, and two numbers of
    rows by one compilation."""
    block = OP.candidates["compiled"].load()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows in (256, 333):
            assert max(errors(block, arguments(rows))) < OP.tolerance[torch.float32]
