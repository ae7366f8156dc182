"""`unfreeze dev bench` works in a clone; where only the package is installed it says where the benchmarks are."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import unfreeze

SOURCE = Path(unfreeze.__file__).parents[1]


def said(words, cwd, path) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, *words],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(path)},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("words", [["-m", "unfreeze", "dev", "bench"], ["-m", "benchmarks"]])
def test_a_clone_has_them(words, tmp_path):
    path = f"{SOURCE}{os.pathsep}{SOURCE.parent}"
    code, text = said([*words, "--help"], tmp_path, path if "benchmarks" in words else SOURCE)
    assert code == 0 and "unfreeze dev bench moe " in text


def test_an_installed_package_has_none_and_says_the_next_command(tmp_path):
    shutil.copytree(SOURCE / "unfreeze", tmp_path / "site" / "unfreeze")
    code, text = said(["-m", "unfreeze", "dev", "bench", "moe"], tmp_path, tmp_path / "site")
    assert code == 2 and "an installed package has no benchmarks" in text
    assert "next: git clone" in text and "unfreeze dev bench" in text
