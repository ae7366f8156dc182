"""The bytes that the plan counts for attention on a CPU, against the scratch that a forward and backward left."""

import pytest
import torch

from unfreeze.kernels.attention import blocked_cpu, workspace
from unfreeze.kernels.attention.tiled_cpu import tiled_attention
from unfreeze.kernels.attention.workspace import workspace_bytes
from unfreeze.kernels.choice import record
from unfreeze.kernels.loops import bf16_cpu
from unfreeze.kernels.loops.scratch import release_scratch, scratch_bytes


@pytest.fixture(autouse=True)
def released():
    release_scratch()
    yield
    release_scratch()


def left(S, L, H, G, d, v, dtype, attention=blocked_cpu.blocked_attention):
    """Bytes of scratch after a forward and backward over S documents of L tokens."""
    q, k, value = (torch.randn(S, L, n, w, dtype=dtype) for n, w in ((H, d), (G, d), (G, v)))
    inputs = [x.requires_grad_() for x in (q, k, value)]
    attention(*inputs, d**-0.5).sum().backward()
    return scratch_bytes()


@pytest.mark.parametrize("tiles", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("S", "L", "H", "G", "d", "v"), [(1, 1100, 4, 4, 96, 64), (2, 300, 4, 2, 64, 64), (3, 200, 2, 2, 32, 32)]
)
def test_the_planned_bytes_are_those_that_are_left(S, L, H, G, d, v, dtype, tiles, monkeypatch):
    """Buffers grow in eighths (scratch.py), so at most a seventh more is left."""
    if tiles and not bf16_cpu.available():
        pytest.skip("this CPU has no vdpbf16ps")
    monkeypatch.setattr(bf16_cpu, "panels_pay", lambda: tiles)
    monkeypatch.setattr(workspace, "by_record", lambda *_: Blocked)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        planned = workspace_bytes(H, G, d, v, tokens=S * L, length=L, dtype=dtype, threads=1)
        measured = left(S, L, H, G, d, v, dtype)
    finally:
        torch.set_num_threads(threads)
    assert planned <= measured <= 1.15 * planned


class Blocked:
    runs = "blocked"


class Tiled:
    runs = "tiled"


@pytest.mark.parametrize(("S", "L", "H", "G", "d", "v"), [(1, 1100, 4, 4, 96, 64), (2, 300, 4, 2, 64, 64)])
def test_the_planned_bytes_of_tiles_are_those_that_are_left(S, L, H, G, d, v, monkeypatch):
    monkeypatch.setattr(workspace, "by_record", lambda *_: Tiled)
    shape = {"tokens": S * L, "length": L, "dtype": torch.float32}
    planned = workspace_bytes(H, G, d, v, **shape, threads=1)
    assert workspace_bytes(H, G, d, v, **shape, threads=2) == 2 * planned
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        measured = left(S, L, H, G, d, v, torch.float32, tiled_attention)
    finally:
        torch.set_num_threads(threads)
    assert planned <= measured <= 1.15 * planned


def test_two_workers_have_a_workspace_each(monkeypatch):
    monkeypatch.setattr(record, "device_key", lambda device: "cpu-avx512-bf16")  # where blocks run
    shape = {"tokens": 8192, "length": 1024, "dtype": torch.bfloat16}
    one, two = (workspace_bytes(8, 8, 64, 64, **shape, threads=threads) for threads in (1, 2))
    assert two == 2 * one > 0


def test_where_the_reference_runs_there_is_none():
    assert workspace_bytes(8, 8, 64, 64, tokens=512, length=64, dtype=torch.float32, threads=2) == 0
