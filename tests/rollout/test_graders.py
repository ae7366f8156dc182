"""Graders under code as no one should write it: nothing hangs, no failure is a reward of 0, nothing is left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from unfreeze.core.errors import ConfigError, StepLeft
from unfreeze.data.rows.asked import asked_from_dict
from unfreeze.rollout.graders import Graders
from unfreeze.rollout.limits import Limits
from unfreeze.rollout.pool import NETWORK, Pool
from unfreeze.rollout.reward import Graded
from unfreeze.rollout.worker import GRADER, Worker

BAD = Path(__file__).with_name("pathological.py")
ROW = asked_from_dict({"question": "What is 2 + 2?"}, 1)
QUICK = Limits(seconds=0.5, processes=24, memory_bytes=2**30, file_bytes=2**20)
PATIENT = Limits(seconds=30.0, processes=24, memory_bytes=2**30, file_bytes=2**20)


def alive(folder: str) -> list[psutil.Process]:
    """Processes whose temporary folder was in this one."""
    found_alive = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("TMPDIR", "").startswith(folder) and process.status() != "zombie":
                found_alive.append(process)
        except psutil.Error:
            continue
    return found_alive


def graded(name: str, limits: Limits = PATIENT, row=ROW, text="a", **options) -> Graded:
    """One answer's reward; afterwards nothing is left of the process, nor of its folder."""
    with Graders(f"{BAD}:{name}", limits, count=1, **options) as graders:
        folder = graders._pool._folder.name
        (result,) = graders.grade([(row, text)])
        walls = graders._pool.workers[0].confined
    assert not os.path.exists(folder)
    if walls.processes or name not in ("orphans", "orphan_left"):
        until = time.monotonic() + 2  # a killed process takes a moment to go
        while alive(folder) and time.monotonic() < until:
            time.sleep(0.01)
        assert not alive(folder)
    return result


@pytest.mark.parametrize("name", ["loop", "loop_in_c", "sleep", "stop", "power"])
def test_endless_code_is_a_timeout(name):
    began = time.monotonic()
    result = graded(name, QUICK)
    assert time.monotonic() - began < 20  # imports under load; alone it takes 0.8 s
    assert result == Graded(None, outcome="timeout", message="no answer within 0.5 s")


@pytest.mark.parametrize(
    ("name", "outcome", "message"),
    [
        ("fork_bomb", {"processes", "error"}, "more than 24 processes or threads|BlockingIOError"),
        ("orphans", {"processes", "error"}, "more than 24 processes or threads|BlockingIOError"),
        ("threads", {"processes", "error", "memory"}, "more than 24 processes or threads|can't start|Memory"),
        ("memory", {"memory"}, "MemoryError.*pathological.py, line"),
        ("leave", {"ended"}, "ended itself, with exit code 0"),
        ("kill_group", {"ended"}, "ended by SIGKILL"),
        ("kill_parent", {"error", "ended"}, "Operation not permitted|ended"),
        ("crash", {"ended"}, "ended by SIGSEGV"),
        ("close", {"ended"}, "ended itself, with exit code|closed the pipe"),
        ("spray", {"garbage"}, '"reward": 1.0'),
        ("flood", {"garbage"}, "more than 262,144 bytes"),
        ("full", {"error"}, "File too large"),
        ("full_in_c", {"ended"}, r"ended for a file of more than 1.0 MiB \(or ulimit -f\)"),
        ("leave_politely", {"error"}, r"SystemExit: 0 \(pathological.py, line \d+\)"),
        ("recursion", {"error"}, r"RecursionError: maximum recursion"),
        ("raises", {"error"}, r"KeyError: 'a answer' \(pathological.py, line \d+\)"),
        ("mute", {"error"}, r"^Mute \(pathological.py"),
        ("interrupt", {"error"}, "KeyboardInterrupt"),
        ("ask", {"error"}, "EOFError"),
        ("nan", {"not a number"}, "nan: b returned nan"),
        ("infinite", {"not a number"}, "the sum returned inf|OverflowError"),
        ("huge", {"not a number"}, "too large"),
        ("text", {"not a number"}, "returned a str, not a number: '1.0'"),
        ("batch", {"not a number"}, "a list of 2.*one answer, unlike TRL's"),
        ("nothing", {"no value"}, "nothing returned None"),
        ("nothing_in_parts", {"no value"}, "returned None"),
        ("many_parts", {"not a number"}, "1000000 parts; 1 to 64"),
    ],
)
def test_a_failure_is_a_named_outcome_and_never_a_reward(name, outcome, message):
    result = graded(name, text="a answer")
    assert result.reward is None and result.parts == {}
    assert result.outcome in outcome and re.search(message, result.message), result
    assert result.message.isprintable() and len(result.message) <= 500


@pytest.mark.parametrize(
    "name", ["fork_bomb", "sleep", "process_left", "thread_left", "connect", "kill_group"]
)
def test_without_namespaces_the_group_is_killed(name, tmp_path, monkeypatch):
    """As in most containers: Python's own hook takes the walls away before the child asks for them."""
    hook = "import unfreeze.rollout.limits as limits\nlimits.separate = lambda network: limits.Confined()\n"
    (tmp_path / "sitecustomize.py").write_text(hook)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    lines: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        row = asked_from_dict({"question": "?", "port": server.getsockname()[1]}, 1)
        result = graded(name, QUICK if name == "sleep" else PATIENT, row, say=lines.append)
    expected = {"fork_bomb": "error", "sleep": "timeout", "kill_group": "ended"}
    assert result.outcome == expected.get(name, "ok") and lines == [f"warning: {NETWORK}"]


def test_cpu_time_is_limited_besides_the_clock(monkeypatch):
    """The clock of the parent is put off: SIGXCPU ends the process, here after 1 s of CPU at most."""
    monkeypatch.setattr(Worker, "ask", lambda self, request, seconds, ask=Worker.ask: (
        ask(self, request, seconds if request["do"] == "load" else 0.2),
        setattr(self, "deadline", time.monotonic() + 60),
    ))  # fmt: skip
    result = graded("processor", QUICK)
    assert (result.outcome, result.message) == ("timeout", "more than 0.2 s of CPU")


def test_after_each_failure_the_next_answer_is_graded(written):
    bad = ["leave", "spray", "loop", "raises"]
    with Graders([f"{BAD}:{name}" for name in bad] + [len_of], QUICK, count=2) as graders:
        names = [signature.name for signature in graders.signatures]
    assert names == [*bad, "len_of"]
    source = "import os\ndef reward(p, c):\n    if c == 'bad': os._exit(1)\n    return len(c)\n"
    with Graders(written(source), PATIENT, count=2) as graders:
        texts = ["bad" if i % 3 == 0 else "x" * i for i in range(12)]
        rewards = [each.reward for each in graders.grade([(ROW, text) for text in texts])]
        assert rewards == [None if i % 3 == 0 else i for i in range(12)]
        assert graders._pool.restarts in (3, 4)  # the last answers may be those of one process


def len_of(prompt, completion):
    return len(completion)


@pytest.fixture
def written(tmp_path):
    """A file my.py with that source. -> its path"""
    return lambda source: str(_write(tmp_path / "my.py", source))


def _write(path: Path, source: str) -> Path:
    path.write_text(source, encoding="utf-8")
    return path


def test_control_arm_without_the_token_a_forged_reward_counts(monkeypatch):
    monkeypatch.setattr(Worker, "_parsed", lambda self, line: __import__("json").loads(line))
    assert graded("spray").reward == 1.0


@pytest.mark.parametrize("name", ["thread_left", "process_left", "orphan_left"])
def test_what_a_grader_leaves_behind_is_ended(name):
    assert graded(name) == Graded(1.0)
    with Graders(f"{BAD}:{name}", PATIENT, count=1) as graders:
        assert [each.reward for each in graders.grade([(ROW, "a")] * 2)] == [1.0, 1.0]
        walls, ends = graders._pool.workers[0].confined, name != "orphan_left"
        assert graders._pool.restarts == ends and (graders._pool.workers[0].alive != ends)
        assert walls.processes or ends  # an orphan ends with its namespace


def test_a_fork_of_the_users_code_does_not_answer():
    with Graders(f"{BAD}:twin", PATIENT, count=1) as graders:
        assert [each.reward for each in graders.grade([(ROW, "a")] * 3)] == [1.0] * 3


def test_each_answer_has_an_empty_folder_and_no_trace_of_the_last():
    with Graders(f"{BAD}:folder", PATIENT, count=1) as graders:
        assert [each.reward for each in graders.grade([(ROW, "a")] * 3)] == [1.0] * 3


def test_prints_are_kept_and_cut_and_never_reach_the_terminal(capfd):
    result = graded("prints")
    assert result.reward == 1.0 and result.outcome == "ok"
    assert result.printed.startswith(r"\x1b[31mred\x00 xxx") and len(result.printed) <= 500
    assert capfd.readouterr() == ("", "")


def test_async_functions_are_awaited():
    assert graded("later").reward == 0.25


def test_the_network_is_cut_where_the_system_allows_it_else_it_is_said():
    said_lines: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        row = asked_from_dict({"question": "?", "port": server.getsockname()[1]}, 1)
        result = graded("connect", PATIENT, row, say=said_lines.append)
        if said_lines:
            assert said_lines == [f"warning: {NETWORK}"] and result.reward == 1.0
        else:
            assert result.outcome == "error" and "Network is unreachable" in result.message
        assert graded("connect", Limits(network=True), row).reward == 1.0


def test_answers_that_cannot_matter_any_more_are_not_waited_for():
    """Above the share of answers that may fail the step is refused: 3 of 12 end it, not 12 times .3 s."""
    limits = Limits(seconds=0.3)
    with Graders(f"{BAD}:sleep", limits, count=1) as graders:
        result = graders.grade([(ROW, "a")] * 12, failing=0.2)
        assert [each.outcome for each in result] == ["timeout"] * 3 + ["skipped"] * 9
        assert all(each.reward is None and each.message for each in result)
        assert [each.outcome for each in graders.grade([(ROW, "a")] * 2)] == [
            "timeout"
        ] * 2  # none may matter


def test_a_signal_ends_the_grading_at_once():
    asked = []

    def stop():
        asked.append(time.monotonic())
        return len(asked) > 3

    with Graders(f"{BAD}:later", PATIENT, count=2) as graders:
        began = time.monotonic()
        slow = Graders(f"{BAD}:sleep", PATIENT, count=2)
        with slow, pytest.raises(StepLeft):
            slow.grade([(ROW, "a")] * 8, stop=stop)
        assert time.monotonic() - began < 15  # of 30 s for one answer; imports under load
        assert not any(worker and worker.alive for worker in slow._pool.workers)
        assert graders.grade([(ROW, "a")], stop=lambda: False)[0].reward == 0.25


def test_no_folder_for_temporary_files_is_one_line(monkeypatch):
    def full(**options):
        raise FileNotFoundError(2, "No usable temporary directory")

    monkeypatch.setattr("tempfile.TemporaryDirectory", full)
    with pytest.raises(
        ConfigError, match="need a folder for temporary files: No usable temporary"
    ) as refused:
        Graders(f"{BAD}:later")
    assert "TMPDIR" in refused.value.next


def test_a_grader_removes_its_own_folder_and_no_other(tmp_path):
    """TMPDIR may be anybody's."""
    others, own = tmp_path / "others", tmp_path / "graders" / "own"
    others.mkdir()
    own.mkdir(parents=True)
    (others / "kept").write_text("mine")
    words = [json.dumps(Limits(seconds=5).as_json()), str(own)]
    command = [sys.executable, "-u", "-P", "-m", "unfreeze.rollout.child", *words]
    environment = {**os.environ, "TMPDIR": str(others), "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    process.communicate(timeout=60)  # closes its input, as a parent that is gone
    assert (others / "kept").read_text() == "mine" and not own.exists()


def test_a_killed_parent_takes_its_graders_along(tmp_path):
    """kill -9 of the run: a grader in an endless loop does not outlive it, nor does its folder."""
    script = (
        "import sys; from unfreeze.rollout.graders import Graders\n"
        "from unfreeze.data.rows.asked import asked_from_dict\n"
        "graders = Graders(sys.argv[1], count=1); print(graders._pool._folder.name, flush=True)\n"
        "graders.grade([(asked_from_dict({'question': '?'}), 'a')])\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, f"{BAD}:sleep"], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    assert process.stdout is not None
    folder = process.stdout.readline().strip()
    assert alive(folder)
    process.send_signal(signal.SIGKILL)
    process.wait()
    until = time.monotonic() + 5
    while (alive(folder) or os.path.exists(folder)) and time.monotonic() < until:
        time.sleep(0.02)
    assert not alive(folder) and not list(tmp_path.iterdir())


def test_ctrl_c_leaves_no_late_reply(monkeypatch):
    with Graders(f"{BAD}:later", PATIENT, count=1) as graders:
        real = Worker.advance

        def interrupted(self):
            raise KeyboardInterrupt

        monkeypatch.setattr(Worker, "advance", interrupted)
        with pytest.raises(KeyboardInterrupt):
            graders.grade([(ROW, "a")])
        monkeypatch.setattr(Worker, "advance", real)
        assert graders.grade([(ROW, "a")])[0].reward == 0.25


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "1 / 0\ndef reward(p, c): return 1",
            r"my.py: .*cannot be loaded: ZeroDivisionError: .*\(my.py, line 1\)",
        ),
        ("import os\nos._exit(3)", "my.py cannot be loaded: its process ended itself, with exit code 3"),
        ("print('hello'); import os; os._exit(3)", "it printed: hello"),
        ("while True: pass", "my.py cannot be loaded: no answer within 0.5 s"),
        (
            "def rewrad(p, c): return 1",
            "no function 'reward'; nearest: 'rewrad'; it has rewrad\n  next: my.py:rewrad",
        ),
        ("x = 1", "my.py has no function 'reward'; it has no function"),
        ("reward = 1", "reward is a int, not a function"),
        ("def reward(p): return 1", r"reward\(p\) takes fewer than 2 arguments by position"),
        ("def reward(completions, **kw): return [1]", r"reward\(completions, \*\*kw\) is of TRL's form"),
        ("def reward(prompts, completions): return [1]", "is of TRL's form, which gets all answers"),
        ("def reward(p, c, x, /): return 1", "'x' takes none"),
    ],
)
def test_a_file_that_cannot_be_loaded_is_refused_in_one_line(source, message, written):
    with pytest.raises(ConfigError, match=message) as refused:
        Graders(written(source), Limits(load_seconds=0.5 if "while" in source else 30), count=1)
    assert "\n" not in refused.value.message


def test_a_run_keeps_the_reward_that_it_began_with(tmp_path):
    file = _write(tmp_path / "my.py", "import os\ndef reward(p, c):\n    if c: os._exit(1)\n    return 1.0\n")
    with Graders(str(file), PATIENT, count=1) as graders:
        digest = graders.digest
        file.write_text("def reward(p, c): return 2.0")
        assert [each.reward for each in graders.grade([(ROW, "x"), (ROW, "")])] == [None, 1.0]
        assert graders.digest == digest
    with Graders(str(file), PATIENT, count=1) as graders:
        assert graders.digest != digest


def test_a_program_that_starts_itself_in_a_grader_is_refused(monkeypatch):
    monkeypatch.setenv(GRADER, "1")
    with pytest.raises(ConfigError, match="__name__") as refused:
        Pool((), Limits())
    assert "grader's process" in refused.value.message


def test_pathological_expressions_of_sympy(written):
    """verl#5635: math-verify in threads scored 0 for all of MATH. Each of these hangs, or asks for all memory."""
    source = "import sympy\ndef reward(p, c):\n    return float(float(sympy.sympify(c)) == 4)\n"
    texts = ["2+2", "9**9**9**9", "2*2"]
    limits = Limits(seconds=1.0, memory_bytes=2**30)
    with Graders(written(source), limits, count=2) as graders:
        result = graders.grade([(ROW, text) for text in texts])
    assert [each.reward for each in result if each.outcome == "ok"] == [1.0, 1.0]
    outcomes = Counter(each.outcome for each in result)
    assert outcomes["timeout"] + outcomes["memory"] + outcomes["error"] == 1
