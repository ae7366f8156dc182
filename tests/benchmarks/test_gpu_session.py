"""The script of the first hour with a GPU, with a stand-in for Python that says what it was called with."""

import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_session.sh"
PARTS = ["doctor", "tests", "kernels", "kimi", "gpt-oss", "qwen3", "llama", "moe", "decode"]
pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")


@pytest.fixture
def session(tmp_path):
    """(parts …, fails=words of the call that fails) -> (exit code, summary, calls)."""

    def run(*parts, fails="", **environment):
        python = tmp_path / "python"
        python.write_text(
            f'#!/bin/bash\necho "$*" >> {tmp_path}/calls\n'
            f'case "$*" in *"{fails or "nothing fails"}"*) echo planted; exit 3 ;; *sleeps*) sleep 9 ;; esac\n'
        )
        python.chmod(python.stat().st_mode | stat.S_IXUSR)
        names = {"OUT": str(tmp_path / "out"), "PYTHON": str(python), **environment}
        done = subprocess.run(
            ["bash", str(SCRIPT), *parts],
            cwd=tmp_path,
            env=os.environ | names,
            capture_output=True,
            text=True,
        )
        calls = (tmp_path / "calls").read_text().splitlines()
        return done.returncode, (tmp_path / "out" / "summary.txt").read_text(), calls

    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_one.py").write_text("torch.cuda.is_available()")
    return run


def test_it_begins_with_the_doctor_and_runs_every_part(session, tmp_path):
    code, summary, calls = session()
    assert code == 0 and [line.split(":")[0] for line in summary.splitlines() if ": done" in line] == PARTS
    assert calls[1] == "-m unfreeze doctor --gpu --json" and calls[2] == "-m pytest -q tests/test_one.py"
    assert any("model --traces" in call and "qwen3-30b-a3b-int4 qwen3-30b-a3b-bf16" in call for call in calls)
    assert (tmp_path / "out" / "records.patch").exists()


def test_a_doctor_that_fails_stops_it(session):
    code, summary, calls = session(fails="doctor --gpu")
    assert code == 1 and "doctor: FAILED with exit code 3" in summary and "stopped" in summary
    assert not any("measure" in call or "pytest" in call for call in calls)


def test_unless_one_wants_to_go_on(session):
    code, summary, _ = session(fails="doctor --gpu", KEEP_GOING="1")
    assert code == 1 and summary.count(": done") == len(PARTS) - 1


def test_another_part_that_fails_is_counted_and_the_rest_runs(session):
    code, summary, _ = session(fails="gpt-oss-20b")
    assert code == 1 and "gpt-oss: FAILED" in summary and "decode: done" in summary


def test_parts_run_alone_and_end_at_their_limit(session):
    code, summary, calls = session("gpt-oss", fails="", LIMIT_gpt_oss="600")
    assert code == 0 and "gpt-oss: done" in summary and "doctor: " not in summary and len(calls) == 3


def test_no_part_takes_more_than_ten_minutes_and_every_model_is_one_that_is_known():
    import re
    from typing import get_args

    from benchmarks.cases.model import Named

    text = SCRIPT.read_text()
    limits = re.findall(r"^part (\S+) (\d+) |if ! part (doctor) (\d+) ", text, re.MULTILINE)
    assert [a or b for a, _, b, _ in limits] == PARTS and all(int(a or b) <= 600 for _, a, _, b in limits)
    named = {name for words in re.findall(r"'model ([^']+)'", text) for name in words.split()}
    assert named <= set(get_args(Named)) and len(named) == 4


def test_the_doctor_ends_by_itself_before_its_part_is_ended():
    """Otherwise a cold compiler would stop the whole session, and its table would be lost."""
    from unfreeze.job.doctor.gpu import LIMIT

    assert "part doctor 600 " in SCRIPT.read_text() and LIMIT <= 540
