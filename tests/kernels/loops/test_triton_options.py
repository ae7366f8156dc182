"""Triton kernels compile for a GPU (here) and are right in the interpreter (tests of their ops); where they
refuse to run, what they are given."""

import importlib.util
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from unfreeze.kernels import cards
from unfreeze.kernels.loops import triton_options
from unfreeze.kernels.loops.rows import rows_view

SCRIPT = Path(__file__).with_name("compile_triton.py")
KERNELS = Path(triton_options.__file__).parents[1]


needs_triton = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="triton brings an assembler for x86-64"),
]


def compiling(folder, *options):
    """(its exit code, the lines of what it found, the number of programs that compile)."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {
        "TRITON_CACHE_DIR": str(folder)
    }
    command = [sys.executable, str(SCRIPT), "--ptxas", *options]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=1800, check=False)
    assert done.stdout, done.stderr
    *lines, good = done.stdout.strip().splitlines()
    return done.returncode, lines, int(good)


class TestCompiling:
    """The interpreter knows no types, layouts, registers or tensor cores: a kernel it runs may still not compile,
    or spill. ptxas is the oracle."""

    pytestmark = needs_triton

    def test_a_kernel_compiles_for_a_card_of_99_kib_and_for_amd(self, tmp_path):
        only = ("--only", "grouped_mm._rows", "--first", "--targets", "sm_86", "gfx942")
        code, lines, good = compiling(tmp_path, *only)
        assert code == 0 and good == len(lines) == 2
        assert "on sm_86" in lines[0] and "on gfx942" in lines[1]

    @pytest.mark.nightly
    def test_every_kernel_compiles_for_every_gpu_without_spills_and_planted_faults_are_found(self, tmp_path):
        code, lines, good = compiling(tmp_path, "--planted")
        assert code == 1
        found = [line for line in lines if line.startswith("FAULT")]
        assert all("planted" in line for line in found)
        here = [line for line in found if " on sm_90:" in line]
        compiled, spilled, narrow = here
        assert "__main__.planted (planted)" in compiled
        assert "adamw._step (bf16, planted)" in spilled and "bytes of spills" in spilled
        assert "expand._four (bf16, planted)" in narrow and "stores of 2 bytes" in narrow
        assert good == len(lines) - sum("__main__.planted" in line for line in found)
        kernels = {
            name
            for file in KERNELS.glob("*/triton_cuda.py")
            for name in re.findall(r"^def (_\w+)\($", launched(file), re.M)
        }
        assert kernels and all(any(f"{name} " in line for line in lines) for name in kernels), kernels


def launched(file):
    """The text of its kernels that are launched, one definition a line."""
    text = re.sub(r"\(\s*", "(\n", file.read_text())
    return "\n".join(m[0] for m in re.finditer(r"^def (_\w+)\($", text, re.M) if f"{m[1]}[" in text)


def test_where_they_refuse_to_run(monkeypatch):
    assert "not meta" in triton_options.refuses("meta", torch.float32) or not triton_options.installed()
    monkeypatch.setattr(triton_options, "installed", lambda: True)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert triton_options.refuses("cpu", torch.float32) == "it needs cuda, not cpu"
    assert triton_options.refuses("cuda", torch.bfloat16) == "" and "float64" in triton_options.refuses(
        "cuda", torch.float64
    )
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert triton_options.refuses("cpu", torch.float32) == "" and "interpreter" in triton_options.refuses(
        "cpu", torch.bfloat16
    )
    monkeypatch.setattr(triton_options, "installed", lambda: False)
    assert triton_options.refuses("cuda", torch.bfloat16) == "triton is not installed"


def test_a_card_that_triton_compiles_nothing_for_is_refused(monkeypatch):
    monkeypatch.setattr(triton_options, "installed", lambda: True)
    card = cards.Card("Tesla T4", (7, 5), 15 << 30, "580.65", "CUDA 13.0")
    monkeypatch.setattr(cards, "here", lambda: card)
    assert triton_options.refuses("cuda", torch.float32) == "compute capability 7.5; Triton needs 8.0"


def test_powers_of_two_and_rows():
    assert [triton_options.power_of_two(n) for n in (0, 1, 2, 3, 64, 65)] == [1, 1, 2, 4, 64, 128]
    wide = torch.randn(2, 3, 10)
    view = rows_view(wide[..., 2:7])
    # a block of columns needs no copy
    assert view.shape == (6, 5) and view.data_ptr() == wide[..., 2:].data_ptr()
    assert (
        rows_view(wide.transpose(1, 2)).is_contiguous()
        and rows_view(torch.ones(()).expand(4, 3)).stride(-1) == 1
    )
