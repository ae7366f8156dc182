"""A failed test is named while the others still run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import os, signal, time
def test_bad(): assert 1 + 1 == 3
def test_stopped():
    time.sleep(0.5)
    os.killpg(os.getpgrp(), signal.SIGKILL)  # all processes at once: nothing is printed at the end
"""
WITHOUT = "-p", "no:cacheprovider", "-p", "xdist"
PLAIN = {"PYTEST_ADDOPTS": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


@pytest.mark.parametrize("more", [[], ["-n", "1"]], ids=["here", "xdist"])
@pytest.mark.parametrize("plugin", ["failures", pytest.param("no:failures", id="control arm")])
def test_a_run_that_is_stopped_has_named_what_failed(tmp_path, more, plugin):
    (tmp_path / "test_it.py").write_text(TESTS, encoding="utf-8")
    ended = subprocess.run(
        [sys.executable, "-u", "-m", "pytest", "-q", *WITHOUT, "-p", plugin, *more],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parent), **PLAIN},
        start_new_session=True,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == -9 and "F" in ended.stdout
    named = "\nFAILED test_it.py::test_bad (call): test_it.py:3: AssertionError\n" in ended.stdout
    assert named == (plugin == "failures"), ended.stdout
