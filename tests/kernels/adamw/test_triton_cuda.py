"""The tables of AdamW's launch: made once for tensors that stay where they are, and right when one moves."""

import importlib.util
from dataclasses import replace

import pytest
import torch

from unfreeze.kernels.adamw import AdamWRule, AdamWUpdate
from unfreeze.kernels.loops import triton_options

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
CPU, RULE = torch.device("cpu"), AdamWRule(1e-3, (0.9, 0.95), 1e-8)


@pytest.fixture
def triton_cuda():
    from unfreeze.kernels.adamw import triton_cuda

    triton_cuda._tables.cache_clear()
    yield triton_cuda
    triton_cuda._tables.cache_clear()


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
