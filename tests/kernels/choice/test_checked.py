"""`doctor --gpu` on a card of the test's own: kernels that are wrong in every way are found and banned."""

import json
import time
from dataclasses import replace

import pytest
import torch

from unfreeze.kernels.choice import checked, choose, ops, record, times
from unfreeze.kernels.choice.choose import by_record
from unfreeze.kernels.choice.op import Candidate, Case, Op
from unfreeze.kernels.loops.scratch import scratch, scratch_bytes
from unfreeze.kernels.swiglu.activation import SWIGLU

CPU, F32, BF16 = torch.device("cpu"), torch.float32, torch.bfloat16


@pytest.fixture(autouse=True)
def mock_card(monkeypatch, tmp_path):
    """The CPU, as a card that nothing is known of: candidates are checked before they run."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("UNFREEZE_KERNELS", raising=False)
    monkeypatch.setattr(choose, "CHECKED", ("cpu",))
    monkeypatch.setattr(choose, "_WRONG", {})
    monkeypatch.setattr(record, "COMMITTED", tmp_path)
    caches = (choose._loaded, times._read, record.read)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def square(x):
    time.sleep(2e-4)  # plain torch is slower
    return x * x


class WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * x  # half of it


def late(x):
    time.sleep(1e-3)
    return x * x


def raises(x):
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


WRONG = {
    "off by a per mille": (lambda x: 1.001 * x * x, "tolerance"),
    "NaN": (lambda x: x * x * torch.nan, "error inf"),
    "NaN in one place": (lambda x: (x * x).index_fill(0, torch.tensor([3]), torch.nan), "error inf"),
    "a wrong gradient": (WrongGradient.apply, "tolerance"),
    "no gradient": (lambda x: (x * x).detach(), "gradients in []"),
    "another shape": (lambda x: (x * x)[:4], "shape"),
    "another dtype": (lambda x: (x * x).double(), "float64"),
    "raises": (raises, "illegal memory access"),
    "wrong without gradients": (lambda x: x * x if torch.is_grad_enabled() else 1.1 * x * x, "tolerance"),
    "writes to its input": (lambda x: x.detach().mul_(x.detach()).requires_grad_(), ""),
}


def op_of(**candidates):
    made = {name: Candidate(lambda part=part: part, lambda *_: "") for name, part in candidates.items()}
    case = Case("any", lambda d, t, g: (torch.randn(64, generator=g).to(d, t).requires_grad_(),))
    return Op("square", square, made, (case,), {F32: 1e-6, BF16: 4e-3})


def rows_of(op, dtype=F32):
    cells = [cell for cell in checked.cells_of([op], CPU) if cell.dtype == dtype]
    return list(checked.check_all(cells, CPU, seconds=60.0, sampling=0.0))


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_kernel_is_found_banned_and_told(kind):
    planted, words = WRONG[kind]
    op = op_of(quick=planted)
    (row,) = rows_of(op)
    assert row["runs"] == "reference" and words in row["wrong"]["quick"] and "quick" not in row["us"]
    times.keep([row])
    choice = by_record(op, CPU, F32, "any")
    assert choice.runs == "reference" and choice.origin == "timed here"
    assert choice.why.startswith("quick is wrong: ") and words in choice.why


def test_a_right_and_faster_one_runs_and_a_slower_one_does_not():
    for quick, runs in ((lambda x: x * x, "quick"), (late, "reference")):
        op = op_of(quick=quick)
        choose._loaded.cache_clear()
        (row,) = rows_of(op)
        assert (
            row["runs"] == runs
            and not row["wrong"]
            and row["error"]["quick"] == pytest.approx([0, 0], abs=1e-7)
        )
        times.keep([row])
        assert by_record(op, CPU, F32, "any").runs == runs


def test_the_preferred_one_runs_however_slow_and_what_shares_its_promise_if_it_is_wrong():
    op = replace(op_of(fused=late, loop=late), preferred="fused")
    assert rows_of(op)[0]["runs"] == "fused"
    op = replace(op_of(fused=lambda x: x, loop=late), preferred="fused")
    choose._loaded.cache_clear()
    (row,) = rows_of(op)
    assert row["runs"] == "loop" and row["wrong"].keys() == {"fused"}


def test_a_wrong_function_beside_the_op_bans_it_too():
    def inputs(device, dtype, generator):
        return (torch.randn(8, generator=generator).to(device, dtype),)

    use = Case("any", inputs, function=lambda f: f if f is square else lambda x: 0.99 * x * x, name="beside")
    (row,) = rows_of(replace(op_of(quick=lambda x: x * x), uses=(use,)))
    assert row["runs"] == "reference" and row["wrong"]["quick"].startswith("beside: error 1.0e-02")


def test_a_function_that_an_implementation_lacks_is_not_checked():
    use = Case("any", lambda *_: (torch.ones(2),), function=lambda f: f if f is square else None, name="none")
    assert not rows_of(replace(op_of(quick=lambda x: x * x), uses=(use,)))[0]["wrong"]


def test_a_function_that_the_reference_cannot_compute_blames_nobody():
    def full(x):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")

    use = Case("any", lambda *_: (torch.ones(2),), function=lambda f: full if f is square else f, name="full")
    (row,) = rows_of(replace(op_of(quick=lambda x: x * x), uses=(use,)))
    assert row["runs"] == "quick" and not row["wrong"]


def test_a_cell_that_the_reference_cannot_compute_is_said_to_be_unchecked():
    def full(x):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")

    op = replace(op_of(quick=lambda x: x * x), reference=full)
    (row,) = rows_of(op)
    assert row["untimed"].startswith("OutOfMemoryError: CUDA out of memory") and row["runs"] == ""
    times.keep([row])
    assert times.known() == {} and times.tried().keys() == {("square", "float32", "any")}


def test_a_kernel_without_memory_is_unchecked_and_not_wrong():
    """Another process may fill the card today."""

    def full(x):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")

    (row,) = rows_of(op_of(quick=full))
    assert row["untimed"].startswith("OutOfMemoryError: CUDA out of memory") and not row["wrong"]


def test_a_check_leaves_no_buffers_behind():
    """The plan follows, and counts what is free."""

    def buffered(x):
        scratch("test", (1000,), x.dtype, x.device)
        return x * x

    assert rows_of(op_of(quick=buffered))[0]["runs"] == "quick" and scratch_bytes() == 0


def test_it_ends_when_its_time_is_over():
    cells = checked.cells_of([op_of(quick=late)] * 50, CPU)
    begun = time.perf_counter()
    rows = list(checked.check_all(cells, CPU, seconds=0.2, sampling=0.0))
    assert 1 <= len(rows) < len(cells) and time.perf_counter() - begun < 2.0


def test_another_driver_has_another_file(monkeypatch):
    """What was right with one torch, Triton, driver or source is checked again with another."""
    from unfreeze.kernels import cards

    card = cards.Card("Mock 9000", (9, 0), 80 << 30, "580.65", "CUDA 13.0")
    device = torch.device("cuda", 0)
    monkeypatch.setattr(times, "device_key", lambda device: "mock-9000")
    monkeypatch.setattr(cards, "card_of", lambda device: card)
    monkeypatch.setattr(cards, "present", lambda device: True)
    times.keep(rows_of(op_of(quick=lambda x: x * x)), device)
    assert times.known(device) and times.path(device).name.startswith("checked-mock-9000-")
    monkeypatch.setattr(cards, "card_of", lambda device: replace(card, driver="590.10"))
    assert times.known(device) == {}
    monkeypatch.setattr(cards, "card_of", lambda device: card)
    for module, name, value in (
        (cards, "triton_version", lambda: "9.9.9"),
        (torch, "__version__", "9.9.9"),
        (times, "_kernels", lambda: "edited" * 4),
    ):
        with monkeypatch.context() as changed:
            changed.setattr(module, name, value)
            assert times.known(device) == {}, name
        assert times.known(device)


def breaks(x):
    raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


def test_a_kernel_that_breaks_the_card_is_banned_and_nothing_else_is_checked_there():
    """Every later call fails: those rows would say of right kernels that they could not be checked."""
    first, second = op_of(quick=breaks), replace(op_of(quick=lambda x: x * x), name="other")
    cells = checked.cells_of([first, second], CPU)
    rows = list(checked.check_all(cells, CPU, seconds=60.0, sampling=0.0))
    assert len(rows) == 1 and checked.is_broken(rows[0]) and checked.is_kept(rows[0])
    times.keep(rows, checks=True)
    choice = by_record(first, CPU, F32, "any")
    assert choice.runs == "reference" and "quick is wrong: AcceleratorError: CUDA error" in choice.why


def test_a_row_that_had_no_memory_is_made_again_at_the_next_start(monkeypatch):
    def full(x):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")

    (row,) = rows_of(replace(op_of(quick=lambda x: x * x), reference=full))
    assert not checked.is_kept(row)
    choose._loaded.cache_clear()
    (row,) = rows_of(op_of(quick=full))
    assert not row["wrong"] and not checked.is_kept(row)


def test_an_error_without_bound_is_null_in_json():
    (row,) = rows_of(op_of(quick=lambda x: x * x * torch.nan))
    assert row["error"]["quick"][0] is None and "Infinity" not in json.dumps(row)


def test_a_ban_of_a_cpu_holds_for_any_number_of_threads_and_ends_with_a_right_check(monkeypatch):
    op, before = op_of(quick=lambda x: 1.1 * x * x), torch.get_num_threads()
    times.keep(rows_of(op), checks=True)
    try:
        torch.set_num_threads(before + 1)
        monkeypatch.setenv("UNFREEZE_KERNELS", "records")
        assert "quick is wrong: error 1.0e-01" in by_record(op, CPU, F32, "any").why
    finally:
        torch.set_num_threads(before)
    choose.fix(
        {("square", "float32", "any"): choose.Choice("quick", "then", "timed here")}
    )  # a run of before
    assert by_record(op, CPU, F32, "any").runs == "reference"
    right = op_of(quick=lambda x: x * x)
    choose._loaded.cache_clear()
    times.keep(rows_of(right), checks=True)
    assert by_record(right, CPU, F32, "any").runs == "quick"


@pytest.mark.parametrize(
    ("name", "candidate", "bug", "words"),
    [
        ("rms_norm", "numba", "eps", "small numbers: error"),
        ("adamw", "numba", "step", "first step: error"),
        ("swiglu", "numba", "rows", "silu: error"),
    ],
)
def test_what_the_timed_shapes_do_not_show_is_seen_beside_them(name, candidate, bug, words, monkeypatch):
    """A norm without its eps, an update without its first steps' correction, rows of no whole block left out."""
    op = ops.import_op(name)
    right = op.candidates[candidate].load()

    def norm_without_eps(x, weight, eps):
        return right(x, weight, 0.0)

    def late_correction(updates, rule):
        return right([replace(update, step=max(10, update.step)) for update in updates], rule)

    def whole_blocks(gate, up=None, activation=SWIGLU):
        h = right(gate, up, activation)
        return torch.cat([h[: len(h) // 16 * 16], 0 * h[len(h) // 16 * 16 :]])

    planted = {"eps": norm_without_eps, "step": late_correction, "rows": whole_blocks}[bug]
    monkeypatch.setattr(checked, "implementation_of", lambda *_: planted)
    monkeypatch.setattr(checked, "running", lambda *_: [candidate])
    uses = tuple(use for use in op.uses if not use.name.startswith("backward"))  # of the class of the module
    assert checked.of_uses(replace(op, uses=uses), CPU, F32)[candidate].startswith(words)
    monkeypatch.setattr(checked, "implementation_of", lambda *_: right)
    assert not checked.of_uses(replace(op, uses=uses), CPU, F32)
