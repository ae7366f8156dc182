"""Grouped matrix products against float64, expert by expert: every layout that the expert MLP hands over."""

import functools

import pytest
import torch

from unfreeze.kernels.choice import choose as choosing
from unfreeze.kernels.choice import op as ops
from unfreeze.kernels.choice.choose import by_record
from unfreeze.kernels.grouped_mm import OP, grouped_mm, loops_on

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
F32 = torch.float32
IMPLS = ["reference", "triton"] if not OP.candidates["triton"].refuses(DEVICE.type, F32) else ["reference"]


def ends(*counts):
    return torch.tensor(counts).cumsum(0).to(DEVICE, torch.int32)


def draw(*shape, dtype=F32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def by_expert(a, b, offsets):
    """In float64."""
    pieces, begin = [], 0
    for expert, end in enumerate(offsets.tolist()):
        matrix = b[begin:end] if b.dim() == 2 else b[expert]
        left = a[:, begin:end] if b.dim() == 2 else a[begin:end]
        pieces.append(left.double() @ matrix.double())
        begin = end
    return torch.stack(pieces) if b.dim() == 2 else torch.cat(pieces)


def close(found, a, b, offsets):
    """|difference| <= 2e-6 of the sum of absolute products, rounded once more in half precision."""
    exact, room = by_expert(a, b, offsets), by_expert(a.abs(), b.abs(), offsets)
    ulp = torch.finfo(found.dtype).eps
    assert found.shape == exact.shape
    assert bool(((found.double() - exact).abs() <= 2e-6 * room + ulp * exact.abs() + 1e-30).all())


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    "counts, M, N", [((5, 0, 40, 1), 96, 64), ((0, 0, 3), 16, 24), ((17,), 104, 136), ((33, 70), 40, 16)]
)
def test_rows_times_the_matrices_of_their_experts(impl, counts, M, N):
    """Widths that are no multiple of a tile, experts without rows; matrices as they are, and transposed views."""
    offsets = ends(*counts)
    a, b = draw(sum(counts), M), draw(len(counts), M, N, seed=1)
    for right in (b, b.transpose(1, 2).contiguous().transpose(1, 2)):
        close(grouped_mm(a, right, offsets, impl=impl), a, right, offsets)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("counts, M, N", [((5, 0, 40, 1), 96, 16), ((0, 0, 3), 16, 24), ((70, 33), 40, 136)])
def test_rows_times_rows_of_each_expert(impl, counts, M, N):
    """The gradient of a factor; zero for an expert without rows."""
    offsets = ends(*counts)
    a, b = draw(sum(counts), M), draw(sum(counts), N, seed=1)
    found = grouped_mm(a.t(), b, offsets, impl=impl)
    close(found, a.t(), b, offsets)
    assert not found[[i for i, n in enumerate(counts) if not n]].any()


@pytest.mark.parametrize("impl", IMPLS)
def test_a_block_of_the_workspace_and_a_place_to_write(impl):
    """[W | B] of a workspace: rows are wider than the matrix; x beside its projection; results in a wider buffer."""
    offsets, wide = ends(4, 0, 29), draw(3, 72, 56, seed=1)
    weights, x = wide[:, :40, :32], draw(33, 48)[:, :32]
    buffer = torch.full((33, 64), 7.0, device=DEVICE)
    out = buffer[:, 8:48]
    assert grouped_mm(x, weights.transpose(1, 2), offsets, out, impl).data_ptr() == out.data_ptr()
    close(out, x, weights.transpose(1, 2), offsets)
    assert bool((buffer[:, :8] == 7).all() and (buffer[:, 48:] == 7).all())
    close(
        grouped_mm(draw(33, 80)[:, 8:48], weights, offsets, impl=impl),
        draw(33, 80)[:, 8:48],
        weights,
        offsets,
    )


@pytest.mark.skipif("triton" not in IMPLS, reason="triton does not run here")
def test_odd_strides_which_torch_refuses():
    offsets = ends(4, 0, 6)
    x, weights = draw(10, 37)[:, :33], draw(3, 35, 29)[:, :33, :27]
    close(grouped_mm(x, weights, offsets, impl="triton"), x, weights, offsets)
    if DEVICE.type == "cpu":
        with pytest.raises(RuntimeError, match="16 bytes"):
            grouped_mm(x, weights, offsets, impl="reference")


@pytest.mark.skipif("triton" not in IMPLS, reason="triton does not run here")
def test_what_lies_beside_rows_and_matrices_is_not_read():
    """M = 40 is no multiple of a tile: the rest of a tile would be NaN."""
    offsets = ends(4, 0, 6)
    x, weights = (
        torch.full((12, 64), torch.nan, device=DEVICE),
        torch.full((3, 64, 40), torch.nan, device=DEVICE),
    )
    x[:10, :40], weights[:, :40, :24] = draw(10, 40), draw(3, 40, 24, seed=1)
    x, weights = x[:10, :40], weights[:, :40, :24]
    close(grouped_mm(x, weights, offsets, impl="triton"), x, weights, offsets)
    close(grouped_mm(x.t(), x[:, :24], offsets, impl="triton"), x.t(), x[:, :24], offsets)


@pytest.mark.skipif("triton" not in IMPLS, reason="triton does not run here")
def test_half_precision_is_rounded_once():
    from unfreeze.kernels.grouped_mm.triton_cuda import GroupedMm

    offsets = ends(9, 0, 24)
    x, weights = draw(33, 96, dtype=torch.float16), draw(3, 96, 40, dtype=torch.float16, seed=1)
    close(GroupedMm()(x, weights, offsets), x, weights, offsets)
    close(GroupedMm()(x.t(), x[:, :40], offsets), x.t(), x[:, :40], offsets)


@pytest.mark.parametrize("impl", IMPLS)
def test_rows_beyond_the_last_offset_are_left_out(impl):
    offsets = ends(4, 6)
    x, weights = draw(16, 32), draw(2, 32, 24, seed=1)
    close(grouped_mm(x, weights, offsets, impl=impl)[:10], x[:10], weights, offsets)
    assert grouped_mm(x[:0], weights, ends(0, 0), impl=impl).shape == (0, 24)


@pytest.mark.skipif("triton" not in IMPLS, reason="triton does not run here")
def test_control_arm_an_offset_that_is_one_off_is_seen():
    offsets = ends(4, 6)
    x, weights = draw(10, 32), draw(2, 32, 24, seed=1)
    with pytest.raises(AssertionError):
        close(grouped_mm(x, weights, ends(5, 5), impl="triton"), x, weights, offsets)


CARDS = {"A100": (8, 0), "3090": (8, 6), "4090": (8, 9), "H200": (9, 0), "B200": (10, 0), "5090": (12, 0)}


@pytest.mark.parametrize("card", CARDS)
def test_it_is_predicted_on_cards_where_torchs_is_a_loop(card, monkeypatch):
    """The rule of torch's GroupedBlas.cpp: one kernel for major 9 and 10."""
    monkeypatch.setattr(
        ops, "capability", functools.partial(dict.__getitem__, {torch.device("cuda"): CARDS[card]})
    )
    monkeypatch.setattr(choosing, "record_rows", lambda *_: [])
    monkeypatch.setattr(choosing, "device_key", lambda device: card)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr("unfreeze.kernels.loops.triton_options.installed", lambda: True)
    runs = by_record(OP, torch.device("cuda"), torch.bfloat16, "over 64", check=False).runs
    assert loops_on(CARDS[card]) == (card in ("A100", "3090", "4090", "5090"))
    assert runs == ("triton" if loops_on(CARDS[card]) else "reference")


def test_on_a_cpu_torchs_own_runs():
    assert by_record(OP, torch.device("cpu"), torch.bfloat16, "over 64").runs == "reference"
