"""The tables of AdamW's launch: made once for tensors that stay where they are, and right when one moves."""

import importlib.util
from dataclasses import replace

import pytest
import torch

from unfreeze.kernels.adamw import AdamWRule, AdamWUpdate, adamw
from unfreeze.kernels.loops import triton_options

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
CPU, RULE = torch.device("cpu"), AdamWRule(1e-3, (0.9, 0.95), 1e-8)


@pytest.fixture
def triton_cuda():
    from unfreeze.kernels.adamw import triton_cuda

    triton_cuda._tables.cache_clear(), triton_cuda._multiples.cache_clear()
    yield triton_cuda
    triton_cuda._tables.cache_clear(), triton_cuda._multiples.cache_clear()


@pytest.mark.parametrize("sizes", [[1], [0], [4096, 4097, 0, 1, 8193], [5, 3 * 4096, 4095] * 40])
def test_a_chunk_for_each_block_of_each_tensor(sizes, triton_cuda):
    kept = tuple((10 * n, 10 * n + 1, 10 * n + 2, 0, size) for n, size in enumerate(sizes))
    chunks, addresses = triton_cuda._tables(CPU, kept)
    assert chunks.tolist() == [
        [index, first, size]
        for index, size in enumerate(sizes)
        for first in range(0, size, triton_cuda.BLOCK)
    ]
    assert addresses.tolist() == [list(row[:4]) for row in kept]


def updates(sizes):
    g = torch.Generator().manual_seed(0)
    return [AdamWUpdate(*(torch.rand(size, generator=g) for _ in range(4)), None, 0.1, 1) for size in sizes]


def test_later_steps_send_numbers_only(triton_cuda):
    """Gradients lie elsewhere at each step, weights and moments do not; a tensor that moved is read where it is."""
    if triton_options.refuses("cpu", torch.float32):
        pytest.skip("the interpreter is not on")
    made = updates([(3, 5), (5000,)])
    for step in range(1, 4):
        made = [replace(u, gradient=u.gradient.clone(), step=step) for u in made]
        triton_cuda.step(made, RULE)
    assert triton_cuda._tables.cache_info()[:2] == (2, 1)  # hits, misses
    made[1] = replace(made[1], master=made[1].master.clone())
    before = made[1].master.clone()
    triton_cuda.step(made, RULE)
    assert triton_cuda._tables.cache_info()[:2] == (2, 2) and not torch.equal(made[1].master, before)


@pytest.mark.parametrize(
    ("change", "aligned"),
    [(lambda t: t, True), (lambda t: t[:-1], False), (lambda t: torch.cat([t[:1], t])[1:], False)],
)
def test_16_bytes_are_read_at_once_where_every_address_and_size_allows_it(
    change, aligned, triton_cuda, monkeypatch
):
    """A view that begins between, or a size that ends between, is read 4 bytes at a time, with the same result."""
    if triton_options.refuses("cpu", torch.float32):
        pytest.skip("the interpreter is not on")
    launched, kernel = [], triton_cuda._step

    class Watched:
        def __getitem__(self, grid):
            return lambda *args, **options: (
                launched.append(options["ALIGNED"]),
                kernel[grid](*args, **options),
            )

    monkeypatch.setattr(triton_cuda, "_step", Watched())
    (whole,) = updates([(4096 + 32,)])
    parts = {
        name: change(getattr(whole, name).clone()) for name in ("master", "gradient", "exp_avg", "exp_avg_sq")
    }
    update = replace(whole, **parts)
    other = replace(update, **{name: part.clone() for name, part in parts.items()})
    triton_cuda.step([update], RULE)
    adamw([other], RULE, impl="reference")
    assert launched == [aligned]
    torch.testing.assert_close(update.master, other.master, rtol=0, atol=1e-6)
