"""Products of many rows by the matrix unit equal the loops, in every place of a program."""

import pytest
import torch

from unfreeze.kernels.decode_step import program as programs
from unfreeze.kernels.decode_step import team, wide
from unfreeze.kernels.decode_step.operation import Wide
from unfreeze.kernels.decode_step.pointer import Callee
from unfreeze.kernels.decode_step.program import Program, Row
from unfreeze.kernels.loops.amx_tile import available

HAS_TILES = pytest.mark.skipif(not available(), reason="no AMX")
WIDTH, HEIGHT, RANK, ROWS = 64, 96, 4, 41


def draw(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / shape[-1] ** 0.5


def step(wide_from: int | None, rows: int, *, calls: bool = False) -> torch.Tensor:
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
    program.finish()
    program.run(rows)
    return y.tensor[:rows].clone()


def _nothing(like, job, rows, arguments, numbers):
    pass


@HAS_TILES
@pytest.mark.parametrize("calls", [False, True])
@pytest.mark.parametrize("rows", [1, 16, 17, 33, 41])
def test_tiles_equal_the_loops(rows, calls, monkeypatch):
    loops, tiles = step(None, rows, calls=calls), step(1, rows, calls=calls)
    torch.testing.assert_close(
        tiles, loops, rtol=2e-3, atol=2e-3
    )  # sums of other order, rounded to bf16 between
    if rows > 1:
        assert not torch.equal(tiles, loops)  # it is another way
        # an answer of a row does not depend on the rows beside it
        assert torch.equal(tiles[: rows // 2], step(1, rows // 2, calls=calls))
    # control: x is not laid out in tiles, and it shows
    monkeypatch.setattr(programs, "tile_rows", Callee(_nothing))
    assert not torch.allclose(step(1, rows, calls=calls), loops, rtol=2e-3, atol=2e-3)


@HAS_TILES
@pytest.mark.parametrize(("height", "width"), [(96, 2048), (64, 32), (40, 64), (96, 48)])
def test_products_equal_float64(height, width):
    """Sizes that tiles cover and sizes that they do not, the latter by the loop."""
    weight, x = draw(height, width, seed=1).bfloat16(), draw(ROWS, width, seed=2).bfloat16()
    program = Program(ROWS, torch.bfloat16)
    y = program.linear(Row(x.float(), program.pairs), weight)
    assert any(each.only_wide for each in program._operations) == (height % 32 == 0 and width % 32 == 0)
    program.finish()
    program.run(ROWS)
    torch.testing.assert_close(y.tensor.double(), x.double() @ weight.double().T, rtol=1e-5, atol=1e-6)


@HAS_TILES
def test_blocks_of_a_job_change_no_bit(monkeypatch):
    """Three blocks of the first products, two of the last."""
    alone = step(1, ROWS)
    for blocks in (1, 2, 3, 4):
        monkeypatch.setattr(programs, "blocks_of", lambda _, blocks=blocks: blocks)
        assert torch.equal(step(1, ROWS), alone)
    # control: a job too few
    monkeypatch.setattr(programs, "blocks_of", lambda _: 2)
    monkeypatch.setattr(programs, "Wide", lambda loop, jobs: Wide(loop, jobs - 1))
    assert not torch.equal(step(1, ROWS), alone)


@HAS_TILES
def test_a_matrix_has_jobs_for_every_thread(monkeypatch):
    for threads, blocks in ((1, 4), (2, 4), (4, 2), (8, 1), (64, 1)):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert wide.blocks_of(1024) == blocks


@HAS_TILES
def test_each_product_knows_the_next_and_a_guess_changes_no_bit():
    program = Program(ROWS, torch.bfloat16)
    x, weights = Row(draw(ROWS, WIDTH, seed=1), program.pairs), [draw(HEIGHT, WIDTH, seed=i) for i in (2, 3)]
    first, second = (program.linear(x, weight.bfloat16()) for weight in weights)
    program.finish()
    one, other = (each.arguments for each in program._operations if each.wide is not None)
    assert (one[wide.FOLLOWING], other[wide.FOLLOWING]) == (other[1], one[1])
    program.run(ROWS)
    kept = [each.tensor.clone() for each in (first, second)]
    for table in program._tables:  # another number of threads, and a matrix that is not there
        for row, operation in zip(table, program._operations, strict=True):
            if operation.wide is not None:
                row[team.ARGUMENTS + wide.FOLLOWING :][:3] = 0, 1 << 40, 3
    for rows in (ROWS, 16):
        program.run(rows)
        assert all(torch.equal(a.tensor[:rows], b[:rows]) for a, b in zip((first, second), kept, strict=True))
    # control: a matrix that is read elsewhere does change them
    for table in program._tables:
        for row, operation in zip(table, program._operations, strict=True):
            if operation.wide is not None:
                row[team.ARGUMENTS + 1] = weights[0].data_ptr()
    program.run(ROWS)
    assert not torch.equal(second.tensor, kept[1])


@HAS_TILES
def test_torch_multiplies_as_before_after_a_step():
    """oneDNN keeps its own sizes of tiles: a step gives them back."""
    a, b = draw(70, 96, seed=1).bfloat16(), draw(90, 96, seed=2).bfloat16()
    before = a @ b.T
    step(1, 41)
    assert torch.equal(a @ b.T, before)


@HAS_TILES
def test_few_rows_keep_the_loops():
    assert torch.equal(step(6, 5), step(None, 5))
    assert not torch.equal(step(6, 6), step(None, 6))


@HAS_TILES
def test_an_attempt_taken_back_lays_x_out_again():
    def record(taken_back: bool) -> torch.Tensor:
        program = Program(ROWS, torch.bfloat16)
        x, weight = Row(draw(ROWS, WIDTH, seed=1), program.pairs), draw(HEIGHT, WIDTH, seed=2).bfloat16()

        def attempt():
            program.linear(x, weight)
            raise programs.CannotRecord("planted")

        if taken_back:
            assert program.attempt(attempt) is None
        y = program.linear(x, weight)
        program.finish()
        program.run(ROWS)
        return y.tensor

    assert torch.equal(record(True), record(False))


def test_only_a_matrix_unit_has_a_bound(monkeypatch):
    for has, bound in ((True, wide.FROM), (False, None)):
        monkeypatch.setattr(wide, "available", lambda has=has: has)
        assert wide.wide_from(True) == bound
        assert wide.wide_from(False) is None
