"""Triton kernels compile for a GPU (here) and are right in the interpreter (tests of their ops); where they refuse to run, what they are given."""

import importlib.util
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from unfreeze.kernels.loops import triton_options
from unfreeze.kernels.loops.rows import rows_view

SCRIPT = Path(__file__).with_name("compile_triton.py")


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="triton brings an assembler for x86-64")
def test_every_kernel_compiles_for_an_h200_and_a_planted_fault_does_not(tmp_path):
    """The interpreter knows no types, layouts or tensor cores: a kernel it runs may still not compile."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, str(SCRIPT), "planted"], capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr
    *faults, good = done.stdout.strip().splitlines()
    kernels = [line for line in SCRIPT.read_text().splitlines() if "planted" not in line]
    assert int(good) >= sum("._" in line for line in kernels)
    assert "planted {'BLOCK': 64}" in faults[0] and not any("unfreeze.kernels" in line for line in faults), done.stdout


def test_where_they_refuse_to_run(monkeypatch):
    assert "not meta" in triton_options.refuses("meta", torch.float32) or not triton_options.installed()
    monkeypatch.setattr(triton_options, "installed", lambda: True)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert triton_options.refuses("cpu", torch.float32) == "it needs cuda, not cpu"
    assert triton_options.refuses("cuda", torch.bfloat16) == "" and "float64" in triton_options.refuses("cuda", torch.float64)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert triton_options.refuses("cpu", torch.float32) == "" and "interpreter" in triton_options.refuses("cpu", torch.bfloat16)
    monkeypatch.setattr(triton_options, "installed", lambda: False)
    assert triton_options.refuses("cuda", torch.bfloat16) == "triton is not installed"


def test_powers_of_two_and_rows():
    assert [triton_options.power_of_two(n) for n in (0, 1, 2, 3, 64, 65)] == [1, 1, 2, 4, 64, 128]
    wide = torch.randn(2, 3, 10)
    view = rows_view(wide[..., 2:7])
    assert view.shape == (6, 5) and view.data_ptr() == wide[..., 2:].data_ptr()  # a block of columns needs no copy
    assert rows_view(wide.transpose(1, 2)).is_contiguous() and rows_view(torch.ones(()).expand(4, 3)).stride(-1) == 1
