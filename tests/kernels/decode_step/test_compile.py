"""A step's loops are compiled from both ends: which process takes which, and what the second one leaves."""

import os
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch

from unfreeze.kernels.decode_step import compile as compiling
from unfreeze.kernels.decode_step import ops, pointer


class Loop:
    """As pointer.Callee, without a compiler."""

    def __init__(self, name: str, cached: bool = False):
        self.name, self.compiled, self._cached, self.asked = name, False, cached, []

    def address(self, pairs: bool) -> int:
        self.asked.append(pairs)
        self.compiled = not self._cached
        return 1


@pytest.fixture
def started(monkeypatch):
    calls = []

    @contextmanager
    def beside(*command):
        calls.append(command)
        yield

    monkeypatch.setattr(compiling, "beside", beside)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    return calls


def test_a_second_process_takes_them_from_the_end(started):
    loops = [Loop("a", cached=True), Loop("b"), Loop("c"), Loop(""), Loop("e"), Loop("f")]
    compiling.compile_all([*loops, loops[2]], pairs=True)
    assert all(loop.asked == [True] for loop in loops)  # each once, in this process too
    # after the first that the cache did not have; a loop that a function made has no name
    assert started == [(compiling.MODULE, "bfloat16", "f", "e", "c")]


def test_none_starts_for_loops_on_disk_for_the_last_few_or_on_one_core(started, monkeypatch):
    compiling.compile_all([Loop(name, cached=True) for name in "abcdef"], pairs=False)
    compiling.compile_all([Loop(name) for name in "abc"], pairs=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    compiling.compile_all([Loop(name) for name in "abcdef"], pairs=False)
    assert started == []


def test_it_leaves_the_named_loop_in_the_cache(tmp_path):
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", compiling.MODULE, "float32", ops.add.name]
    subprocess.run(command, env=environment, check=True)
    (kept,) = tmp_path.rglob("*.nbc")
    assert kept.name.startswith("ops.add-") and ops.add.name == "unfreeze.kernels.decode_step.ops:add"
    # as the first process finds it: nothing is compiled
    look = (
        "from unfreeze.kernels.decode_step import ops\nops.add.address(False)\nassert not ops.add.compiled\n"
        "ops.norm.address(False)\nassert ops.norm.compiled"
    )
    subprocess.run([sys.executable, "-c", look], env=environment, check=True)


def test_ctrl_c_waits_for_the_compiler():
    """Control arm: without a signal nothing is raised, and the handler is the one of before."""
    former, done = signal.getsignal(signal.SIGINT), []
    with pytest.raises(KeyboardInterrupt), pointer._unbroken():
        os.kill(os.getpid(), signal.SIGINT)
        done.append("compiled")
    with pointer._unbroken():
        pass
    assert done == ["compiled"] and signal.getsignal(signal.SIGINT) is former
