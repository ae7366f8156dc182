"""The loops of a training step, compiled by a second process: what it leaves is what a run would compile."""

import os
import subprocess
import sys

import pytest
import torch

from unfreeze.kernels.choice import prepare


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_the_second_process_leaves_compiled_loops_and_its_stamp(tmp_path):
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", prepare.__name__, "float32"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.rglob("compiled-float32-*"))) == 1
    # experts' backward is compiled, their forward is left to the run
    kept = [path for path in tmp_path.rglob("*.nbc")]
    assert any(path.name.startswith("numba_kernels.swiglu_backward") for path in kept)
    assert not any(path.name.startswith("numba_kernels.swiglu-") for path in kept)
    # and so is a loop of every op it names
    named = {"linear_cross_entropy": "_softmax_gradient", "adamw": "_step", "swiglu": "_backward"}
    named |= {"rms_norm": "_backward", "rotary": "_halves_to_adjacent"}
    assert named.keys() == prepare.TRAINED.keys()
    for op, loop in named.items():
        assert any(op in str(path.parent) and f"numba_cpu.{loop}-" in path.name for path in kept), op
    # as a run finds it: AdamW's loop comes from the disk, nothing is compiled
    look = (
        "from unfreeze.kernels.choice import ops; from unfreeze.kernels.choice.measure import arguments, visit;"
        "from unfreeze.kernels.adamw.numba_cpu import _step, step; import torch; op = ops.load('adamw');"
        "visit(op, step, arguments(op.cases[0], torch.device('cpu'), torch.float32)); seen = _step.loop.stats;"
        "print(sum(seen.cache_hits.values()), sum(seen.cache_misses.values()))"
    )
    found = subprocess.run([sys.executable, "-c", look], env=environment, capture_output=True, text=True)
    assert found.stdout.split() == ["1", "0"], found.stderr


def test_it_runs_beside_the_body_and_ends_with_it(tmp_path, monkeypatch, two_threads):
    monkeypatch.setattr(prepare, "cache_folder", lambda: tmp_path)
    with prepare.compiling(torch.device("cpu"), "float32") as process:
        assert process is not None and process.poll() is None
    assert process.returncode < 0  # by a signal, not when it was done


@pytest.mark.parametrize(
    "device, threads, stamped, rank",
    [("cuda", 2, False, "0"), ("cpu", 1, False, "0"), ("cpu", 2, True, "0"), ("cpu", 2, False, "1")],
)
def test_nothing_is_started_where_there_is_nothing_to_compile(
    device, threads, stamped, rank, tmp_path, monkeypatch, two_threads
):
    monkeypatch.setattr(prepare, "cache_folder", lambda: tmp_path)
    monkeypatch.setenv("LOCAL_RANK", rank)
    torch.set_num_threads(threads)
    if stamped:
        prepare._stamp("float32").touch()
    with prepare.compiling(torch.device(device), "float32") as process:
        assert process is None
