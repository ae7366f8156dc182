"""The loops of a training step, compiled by a second process: what it leaves is what a run would compile."""

import os
import subprocess
import sys

import pytest
import torch

from unfreeze.kernels.choice import ahead, prepare


@pytest.fixture
def several_cores(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)


def test_a_second_process_leaves_a_compiled_loop_and_its_stamp(tmp_path, forkserver):
    """Of one op; all of them are compiled nightly."""
    program = (
        f"import numba\nnumba.config.CACHE_DIR = {str(tmp_path)!r}\n"  # read from the environment at its import
        "from pathlib import Path\nfrom unfreeze.kernels.choice import prepare, record\n"
        "record.COMMITTED = Path('no records')\n"  # of some classes of CPU they choose plain torch
        "prepare.expert_mlp.fused_expert_mlp = lambda x, *_: x\n"
        "prepare.TRAINED = {'swiglu': 0}\nprepare.compile_ahead('float32', 'cpu')"
    )
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "2"}
    done = forkserver.run(["-c", program], env=environment)
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.rglob("compiled-float32-*"))) == 1
    kept = [path for path in tmp_path.rglob("*.nbc")]
    assert kept and all("swiglu" in str(path.parent) for path in kept)


@pytest.mark.nightly
def test_the_second_process_leaves_compiled_loops_and_its_stamp(tmp_path):
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-m", ahead.COMPILER, "float32", "cpu"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.rglob("compiled-float32-*"))) == 1
    # experts' backward is compiled, their forward is left to the run
    kept = [path for path in tmp_path.rglob("*.nbc")]
    assert any(path.name.startswith("numba_kernels.swiglu_backward") for path in kept)
    assert not any(path.name.startswith("numba_kernels.swiglu-") for path in kept)
    # and so is a loop of every op it names
    named = {"linear_cross_entropy": "_softmax_gradient", "adamw": "_step", "swiglu": "_backward"}
    named |= {"rms_norm": "_backward", "rotary": "_halves_to_adjacent", "expand": "_expand_float32"}
    files = {op: f"numba_cpu.{loop}-" for op, loop in named.items()}
    files |= {"few_rows": "numba_cpu._linear-", "attention": "tiled_loops.backward-"}
    assert files.keys() == prepare.TRAINED.keys()
    for op, file in files.items():
        folder = "skinny_linear" if op == "few_rows" else op
        assert any(folder in str(path.parent) and file in path.name for path in kept), op
    # as a run finds it: SwiGLU's loop comes from the disk, nothing is compiled
    look = (
        "from unfreeze.kernels.choice import choose, ops; from unfreeze.kernels.choice.measure import arguments, visit;"
        "from unfreeze.kernels.swiglu.numba_cpu import _backward; import torch; op = ops.import_op('swiglu');"
        "visit(op, choose.choose(op, torch.device('cpu'), torch.float32, op.cases[0].bucket, 'numba'),"
        " arguments(op.cases[0], torch.device('cpu'), torch.float32)); seen = _backward.loop.stats;"
        "print(sum(seen.cache_hits.values()), sum(seen.cache_misses.values()))"
    )
    found = subprocess.run([sys.executable, "-c", look], env=environment, capture_output=True, text=True)
    assert found.stdout.split() == ["1", "0"], found.stderr


def test_it_runs_beside_the_body_and_ends_with_it(tmp_path, monkeypatch, several_cores):
    monkeypatch.setattr(ahead, "stamp", lambda dtype: tmp_path / dtype)
    with ahead.compiling("cpu", 2, "float32") as process:
        assert process is not None and process.poll() is None
    assert process.returncode < 0  # by a signal, not when it was done


def test_where_no_second_process_can_start_the_body_runs_alone(tmp_path, monkeypatch, several_cores):
    monkeypatch.setattr(ahead, "stamp", lambda dtype: tmp_path / dtype)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no python"))
    with ahead.compiling("cpu", 2, "float32") as process:
        assert process is None
    assert not ahead._RUNNING


@pytest.mark.parametrize(
    "device, threads, set_for_all, stamped, rank",
    [
        ("cuda", 2, "", False, "0"),
        ("cuda:1", 0, "", False, "0"),
        ("cpu", 1, "", False, "0"),
        ("auto", 0, "1", False, "0"),
        ("cpu", 2, "", True, "0"),
        ("cpu", 2, "", False, "1"),
    ],
)
def test_nothing_is_started_where_there_is_nothing_to_compile(
    device, threads, set_for_all, stamped, rank, tmp_path, monkeypatch, several_cores
):
    monkeypatch.setattr(ahead, "stamp", lambda dtype: tmp_path / dtype)
    monkeypatch.setenv("LOCAL_RANK", rank)
    monkeypatch.setenv("OMP_NUM_THREADS", set_for_all)
    if stamped:
        (tmp_path / "float32").touch()
    with ahead.compiling(device, threads, "float32") as process:
        assert process is None


@pytest.mark.parametrize("device, threads, gpu", [("auto", 2, True), ("cpu", 1, False)])
def test_the_second_process_ends_at_once_where_the_run_needs_no_loops(device, threads, gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    compiled = []
    monkeypatch.setattr(prepare, "compile_loops", compiled.append)
    monkeypatch.setattr(prepare, "stamp", lambda dtype: None)
    prepare.compile_ahead("float32", device)
    assert compiled == []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    prepare.compile_ahead("float32", device)
    assert compiled == [torch.float32]


def test_the_second_process_starts_before_torch_is_imported():
    look = f"import sys, {ahead.__name__}; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True)
    assert found.stdout.strip() == "False", found.stderr
