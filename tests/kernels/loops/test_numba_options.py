"""The kernels on disk follow every source they were inlined from; without that an edited helper would go on
computing its old result."""

import functools
import importlib
import os
import sys
import time

import numpy as np
import pytest
import torch

from unfreeze.kernels.loops import numba_options

HELPER = 'import numba\n\n\n@numba.njit(inline="always")\ndef helper(x):\n    return x * {factor}\n'
IMPORTS = "from staled_helper import helper\nfrom unfreeze.kernels.loops.numba_options import serial\n"
KERNEL = IMPORTS + "\n\n@serial\ndef kernel(x):\n    x[0] = helper(x[0])\n"


@pytest.fixture
def compute(tmp_path, monkeypatch):
    """3 through a kernel that inlines `helper` of another file, as a new process finds both: factor in its
    source -> (result, from disk)."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("numba.config.CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(numba_options, "ROOM", tmp_path)
    (tmp_path / "staled_kernel.py").write_text(KERNEL)

    def run(factor: int) -> tuple[float, bool]:
        (tmp_path / "staled_helper.py").write_text(HELPER.format(factor=factor))
        later = time.time() + factor  # or the import system's own cache of bytecode would be as stale
        os.utime(tmp_path / "staled_helper.py", (later, later))
        numba_options.sources.cache_clear()
        for name in ("staled_kernel", "staled_helper"):
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        kernel, x = importlib.import_module("staled_kernel").kernel, np.array([3.0])
        kernel(x)
        return float(x[0]), bool(kernel.stats.cache_hits)

    yield run
    numba_options.sources.cache_clear()


def test_an_edit_in_an_inlined_file_is_compiled(compute):
    assert compute(2) == (6.0, False) and compute(2) == (6.0, True)
    assert compute(5) == (15.0, False) and compute(5) == (15.0, True)


def test_control_arm_numba_alone_would_not_notice(compute, monkeypatch):
    monkeypatch.setattr(numba_options, "sources", functools.cache(lambda room: "the same"))
    assert compute(2) == (6.0, False)
    assert compute(5) == (6.0, True)


GONE = """import gone_types
from unfreeze.kernels.loops.numba_options import serial


@serial
def kernel(given):
    return given.value + 1
"""


def test_a_type_that_was_renamed_since_is_compiled_anew(compute, tmp_path):
    """A cached file names the types it was compiled for; one whose module is gone cannot be read."""
    module = tmp_path / "gone_types.py"
    module.write_text("from typing import NamedTuple\n\n\nclass Old(NamedTuple):\n    value: int\n")
    (tmp_path / "gone_kernel.py").write_text(GONE)
    gone, kernel = importlib.import_module("gone_types"), importlib.import_module("gone_kernel").kernel
    assert kernel(gone.Old(1)) == 2

    module.rename(tmp_path / "new_types.py")
    (tmp_path / "gone_kernel.py").write_text(GONE.replace("gone_types", "new_types"))
    for name in ("gone_types", "gone_kernel"):
        sys.modules.pop(name)
    numba_options.sources.cache_clear()
    importlib.invalidate_caches()
    later = time.time() + 5
    os.utime(tmp_path / "gone_kernel.py", (later, later))
    kernel = importlib.import_module("gone_kernel").kernel
    assert kernel(importlib.import_module("new_types").Old(1)) == 2


@pytest.fixture
def threads():
    """Sets torch's number of threads; it is as before afterwards."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@numba_options.Kernel
def _squares(start, stop, x, out, done):
    for r in range(start, stop):
        done[r] += 1
        for i in range(x.shape[1]):
            out[r, i] = x[r, i] * x[r, i]


@pytest.mark.parametrize("wanted", [1, 2, 3, 7])
def test_threads_share_the_parts_and_each_part_is_done_once(wanted, threads):
    threads(wanted)
    x = np.random.default_rng(0).standard_normal((5, numba_options.SERIAL)).astype(np.float32)
    out, done = np.empty_like(x), np.zeros(5, np.int64)
    _squares(x.size, 5, x, out, done)
    assert done.tolist() == [1] * 5 and np.array_equal(out, x * x)
    assert torch.get_num_threads() == wanted


def test_there_are_no_more_threads_than_parts(threads, monkeypatch):
    asked = []
    monkeypatch.setattr(numba_options, "in_runs", lambda parts, workers, work: asked.append((parts, workers)))
    threads(7)
    x, done = np.ones((5, numba_options.SERIAL), np.float32), np.zeros(5, np.int64)
    _squares(x.size, 5, x, np.empty_like(x), done)
    assert asked == [(5, 5)]


def test_control_arm_a_run_left_out_or_done_twice_is_seen(threads, monkeypatch):
    def overlapping(parts, workers, work):
        work(0, 3)
        work(2, 4)

    threads(2)
    monkeypatch.setattr(numba_options, "in_runs", overlapping)
    x, done = np.ones((5, numba_options.SERIAL), np.float32), np.zeros(5, np.int64)
    _squares(x.size, 5, x, np.empty_like(x), done)
    assert done.tolist() == [1, 1, 2, 1, 0]
