"""Recording: buffers that serve several layers, waits, and what cannot be recorded."""

import random

import pytest
import torch

from unfreeze.kernels.decode_step import program as module
from unfreeze.kernels.decode_step.program import CannotRecord, Heads, Program, Row, Store
from unfreeze.quant.codec import Packed
from unfreeze.quant.int4 import Int4

WIDTHS = (32, 40, 64)
ROWS = 3


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / shape[-1] ** 0.5


class Watched(Program):
    """A Program that notes the memory which each operation reads and writes, as ranges of addresses."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.touched = []

    def add(self, *arguments, reads=(), writes=(), **options):
        reads, writes = list(reads), list(writes)
        self.touched.append(([_range(each) for each in reads], [_range(each) for each in writes]))
        super().add(*arguments, reads=reads, writes=writes, **options)


def _range(each):
    tensor = each.tensor if isinstance(each, Row) else each
    span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return range(tensor.data_ptr(), tensor.data_ptr() + span * tensor.element_size())


def _meet(these, those):
    return any(a.start < b.stop and b.start < a.stop for a in these for b in those)


def without_wait(made: Watched) -> list[tuple[int, int]]:
    """Pairs of operations that touch the same memory, one of them writing, while the later one may start before
    the earlier one is done. A thread comes to operation j after each k <= j waited for all from k.first on."""
    waited = [set[int]()]
    for k, operation in enumerate(made._operations):
        waited.append(waited[-1] | set(range(operation.first, k)))
    pairs = []
    for j, (reads, writes) in enumerate(made.touched):
        for i in set(range(j)) - waited[j + 1]:
            if _meet(made.touched[i][1], reads + writes) or _meet(made.touched[i][0], writes):
                pairs.append((i, j))
    return pairs


def record(made: Program, x: Row, seed: int, reuse: bool) -> Row:
    """Some layers of random operations on random rows of the layer, one of which is the next one's input."""
    choose = random.Random(seed)
    for layer in range(4):
        rows = [x]
        for number in range(choose.randint(2, 8)):
            source, kind = choose.choice(rows), choose.randrange(5)
            alike = [row for row in rows if row.width == source.width]
            if kind == 0:
                new = made.norm(source, draw(source.width, seed=number), 1e-5)
            elif kind == 1:
                wide = draw(choose.choice(WIDTHS), source.width, seed=100 * layer + number)
                adapter = (draw(2, source.width), draw(len(wide), 2), 0.5) if choose.random() < 0.3 else None
                added = [row for row in rows if row.width == len(wide)]
                add = choose.choice(added) if added and choose.random() < 0.5 else None
                new = made.linear(source, wide, adapter=adapter, add=add)
            elif kind == 2:
                new = made.combine(source, choose.choice(alike), 0.7, 0.5)
            elif kind == 3:
                new = made.activate(source, choose.choice(alike), 0)
            else:
                new = made.rotate(source, 4, None, 0)
            rows.append(new)
        x = choose.choice(rows[1:])  # what comes after it is read by nobody
        if reuse:
            made.reuse(x)
    return x


def result(seed: int, reuse: bool, kind=Watched, dtype=torch.float32):
    made, x = kind(ROWS, dtype), draw(ROWS, 64) * 8
    y = record(made, Row(x, made.pairs), seed, reuse)
    made.finish()
    for _ in range(2):  # the second step meets what the first left behind
        made.run(ROWS)
    return made, y.tensor.clone()


SEEDS = range(40)


def test_a_program_that_reuses_its_buffers_has_the_bits_of_one_that_does_not(dtype, threads):
    threads(3)
    saved = 0
    for seed in SEEDS:
        made, got = result(seed, True, dtype=dtype)
        plain, want = result(seed, False, dtype=dtype)
        assert torch.equal(got, want), seed
        rows = [len(each._taken) + sum(map(len, each._free.values())) for each in (made, plain)]
        saved += rows[1] - rows[0]
        assert without_wait(made) == [] and without_wait(plain) == [], seed
    assert saved > 100


class Forgets(Watched):
    """The planted bug: also the kept row may be taken again."""

    def reuse(self, *kept):
        super().reuse()


def test_control_a_kept_row_that_is_taken_again_is_seen():
    assert any(not torch.equal(result(seed, True, Forgets)[1], result(seed, False)[1]) for seed in SEEDS)


class Unread(Watched):
    """The planted bug: an operation may write what earlier ones still read."""

    _read = property(lambda self: set(), lambda self, value: None)


def test_control_a_hazard_that_is_not_seen_is_found(monkeypatch):
    assert any(without_wait(result(seed, True, Unread)[0]) for seed in SEEDS)
    monkeypatch.setattr(module, "memory_of", lambda each: object())
    assert all(without_wait(result(seed, True)[0]) for seed in SEEDS)


def test_parts_of_a_row_are_its_memory():
    made = Watched(ROWS, torch.float32)
    both = made.linear(Row(draw(ROWS, 64), False), draw(80, 64))
    made.activate(both.part(0, 40), both.part(40, 40), 0)
    assert made._operations[-1].first < len(made._operations) - 1 and without_wait(made) == []


def test_operations_that_do_not_meet_do_not_wait():
    made = Watched(ROWS, torch.float32)
    x = made.norm(Row(draw(ROWS, 64), False), draw(64), 1e-5)
    for _ in range(3):
        made.linear(x, draw(64, 64))
    first, *others = made._operations[1:]
    assert first.first == 0
    assert [each.first for each in others] == [2, 3]  # their own numbers: none


# --- attempts


def attempt(made: Program, x: Row) -> Row | None:
    """Several operations, a call, and then a part that cannot be recorded."""

    def fails() -> Row:
        y = made.linear(made.combine(x, a=2.0), draw(64, 64))
        made.linear(x, draw(64, 64), adapter=(draw(2, 64), draw(64, 2), 1.0))
        made.call(lambda rows: pytest.fail("called"))
        made.norm(y, draw(64), 1e-5)
        return made.linear(y, draw(64, 64).double())

    return made.attempt(fails)


def test_an_attempt_takes_back_what_was_appended(dtype):
    x = draw(ROWS, 64) * 8
    results = []
    for tries in (False, True):
        made = Watched(ROWS, dtype)
        row = Row(x.clone(), made.pairs)
        first = made.combine(row, a=0.5)  # its packed form is first asked for inside the attempt
        before = len(made._operations)
        if tries:
            assert attempt(made, first) is None
            assert len(made._operations) == before and made._calls == []
            del made.touched[before:]
        y = made.linear(first, draw(64, 64, seed=1))
        assert without_wait(made) == []
        made.finish()
        made.run(ROWS)
        results.append(y.tensor.clone())
    assert torch.equal(*results) and results[0].abs().max() > 0.1


def test_an_attempt_that_succeeds_stays():
    made = Program(ROWS, torch.float32)
    row = Row(draw(ROWS, 64), False)
    y = made.attempt(lambda: made.linear(row, draw(64, 64)))
    assert y is not None and len(made._operations) == 2
    with pytest.raises(ZeroDivisionError):  # other errors are not swallowed
        made.attempt(lambda: 1 / 0)


# --- what has no operation

UNREADABLE = {
    "float64": draw(64, 64).double(),
    "not contiguous": draw(64, 64).t(),
    "groups of 48": Packed(Int4(48), Int4(48).quantize(draw(64, 192))),
    "groups of 16": Packed(Int4(16), Int4(16).quantize(draw(64, 192))),
    "groups of 96": Packed(Int4(96), Int4(96).quantize(draw(64, 192))),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_a_format_without_an_operation_cannot_be_recorded(dtype, name):
    with pytest.raises(CannotRecord):
        Program(ROWS, dtype).weight(UNREADABLE[name])
    Program(ROWS, dtype).weight(Packed(Int4(64), Int4(64).quantize(draw(64, 192))))  # control


def test_factors_of_float16_cannot_be_recorded(dtype):
    """An operation reads them itself, without products: as bf16 they would be other numbers."""
    made, row = Program(ROWS, dtype), Row(draw(ROWS, 64), False)
    A, B = draw(2, 64), draw(64, 2)
    with pytest.raises(CannotRecord, match="a factor of"):
        made.linear(row, draw(64, 64), adapter=(A, B.half(), 1.0))
    with pytest.raises(CannotRecord, match="a factor of"):
        made.dots(row, draw(64, 64).half())


def test_a_cache_without_an_operation_cannot_be_recorded(dtype):
    made = Program(ROWS, dtype)
    q, store = Row(draw(ROWS, 64), made.pairs), torch.zeros(ROWS, 8, 2, 32, dtype=torch.float16)
    with pytest.raises(CannotRecord, match="a cache of"):
        made.rotate(q, 2, None, 0, cache=Store(store))
    with pytest.raises(CannotRecord, match="a cache of"):
        made.attend(q, Store(store), Store(store), 1.0, Heads(2, 2, 32, 32))


# --- memory


def test_a_program_keeps_the_memory_that_its_operations_touch():
    """Its addresses are all that the loop has: rows, weights and caches may have no other owner."""
    made, x = Program(ROWS, torch.float32), draw(ROWS, 64)

    def recorded():
        weight = torch.nn.Parameter(draw(64, 64))
        y = made.linear(Row(x.clone(), False), weight, draw(64), add=Row(x.clone(), False))
        held = weight.detach().clone()
        weight.data = torch.zeros(64, 64)  # the parameter is given other memory
        return y, held

    y, weight = recorded()
    made.finish()
    junk = [torch.full((ROWS, 64), float("nan")) for _ in range(50)]  # takes freed memory
    junk += [torch.full((64, 64), float("nan")) for _ in range(50)]
    made.run(ROWS)
    torch.testing.assert_close(y.tensor, x + x @ weight.t() + draw(64))
    del junk


def test_a_weight_that_changes_in_place_is_seen():
    made, x, weight = Program(ROWS, torch.float32), draw(ROWS, 64), draw(64, 64)
    y = made.linear(Row(x, False), weight)
    made.finish()
    for factor in (1.0, -2.0):
        weight.mul_(factor)
        made.run(ROWS)
        torch.testing.assert_close(y.tensor, x @ weight.t())
