"""Scripts that are forked from a process which has imported everything run as `python SCRIPT` would run them."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import os, sys, torch
from pathlib import Path
print(sys.argv[1:], __name__, Path(__file__).name, Path.cwd().name, os.environ["WORD"], torch.get_num_threads())
print("on the other", file=sys.stderr)
import beside
sys.exit(beside.CODE)
"""


@pytest.fixture
def script(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "beside.py").write_text("CODE = 3\n")
    return tmp_path / "script.py"


def test_a_script_has_its_words_folder_environment_output_and_code(forkserver, script, tmp_path):
    env = os.environ | {"WORD": "mine", "OMP_NUM_THREADS": "1"}
    done = forkserver.run([script, "one", 2], env=env, cwd=tmp_path)
    real = subprocess.run(
        [sys.executable, script, "one", "2"],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (
        3,
        real.stdout,
        real.stderr,
    ) and real.returncode == 3


def test_each_is_a_process_of_its_own_and_nothing_of_one_is_left_for_the_next(forkserver, tmp_path):
    code = "import os, torch; print(os.getpid(), hasattr(torch, 'planted')); torch.planted = 1"
    first, second = (forkserver.run(["-c", code]).stdout.split() for _ in range(2))
    assert first[1] == second[1] == "False" and first[0] != second[0] != str(os.getpid())


@pytest.mark.parametrize(
    ("code", "ended", "said"),
    [
        ("raise ValueError('planted')", 1, "ValueError: planted"),
        ("import sys; sys.exit('a word')", 1, "a word"),
        ("import os; os.kill(os.getpid(), 9)", -9, ""),
        ("import os; os._exit(7)", 7, ""),
    ],
)
def test_how_it_ends_is_told(forkserver, code, ended, said):
    done = forkserver.run(["-c", code])
    assert done.returncode == ended and said in done.stderr


def test_one_that_hangs_is_killed(forkserver):
    with pytest.raises(subprocess.TimeoutExpired):
        forkserver.run(["-c", "import time; time.sleep(60)"], timeout=0.2)
    started = forkserver.start(["-c", "import time; time.sleep(60)"])
    assert started.poll() is None
    started.kill()
    assert started.wait(5) == -9
