"""Products of many rows by a GEMM equal the loops, part by part, in every place of a program."""

import pytest
import torch

from unfreeze.kernels.decode_step import wide
from unfreeze.kernels.decode_step.program import Program, Row
from unfreeze.kernels.loops.bf16_cpu import available

pytestmark = pytest.mark.skipif(not available(), reason="no AVX512-bf16")
WIDTH, HEIGHT, RANK, ROWS = 64, 96, 4, 9


def draw(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / shape[-1] ** 0.5


def step(wide_from: int | None, rows: int, *, calls: bool = False, skip: str = "") -> torch.Tensor:
    """norm, two products (bias, adapter, sum, factor), activation, product; the sums of all in the last."""
    program = Program(ROWS, torch.bfloat16)
    program._wide_from = wide_from
    W1, W2, W3 = (
        draw(*size, seed=i).bfloat16() for i, size in enumerate([(HEIGHT, WIDTH)] * 2 + [(WIDTH, HEIGHT)])
    )
    adapter = draw(RANK, HEIGHT, seed=4).bfloat16(), draw(WIDTH, RANK, seed=5).bfloat16(), 0.7
    x = Row(draw(ROWS, WIDTH, seed=6) * 8, program.pairs)
    h = program.norm(x, torch.ones(WIDTH), 1e-6)
    gate, up = program.linear(h, W1, draw(HEIGHT, seed=7)), program.linear(h, W2, factor=1.5)
    if calls:
        program.call(lambda rows: gate.tensor[:rows].mul_(2))
    y = program.linear(program.activate(gate, up, 0), W3, adapter=adapter, add=x, factor=0.5)
    if skip:
        program._wide = [(i, lambda rows: None) for i, _ in program._wide]
    program.finish()
    program.run(rows)
    return y.tensor[:rows].clone()


@pytest.mark.parametrize("calls", [False, True])
@pytest.mark.parametrize("rows", [1, 5, 9])
def test_gemm_equals_the_loops_within_bf16(rows, calls):
    loops, gemm = step(None, rows, calls=calls), step(1, rows, calls=calls)
    torch.testing.assert_close(gemm, loops, rtol=2e-2, atol=2e-2)
    assert not torch.equal(gemm, loops)  # it is another way
    # control: the products are not computed, and it shows
    assert not torch.allclose(step(1, rows, calls=calls, skip="all"), loops, rtol=2e-2, atol=2e-2)


def test_few_rows_keep_the_loops():
    assert torch.equal(step(6, 5), step(None, 5))
    assert not torch.equal(step(6, 6), step(None, 6))


def test_only_classes_with_a_matrix_unit_have_a_bound(monkeypatch):
    for kind, bound in (("cpu-amx", 6), ("cpu-avx512-bf16", None), ("cpu-avx2", None)):
        monkeypatch.setattr(wide, "cpu_class", lambda kind=kind: kind)
        assert wide.wide_from(True) == bound
        assert wide.wide_from(False) is None
