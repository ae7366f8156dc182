"""The protocol between the command and its sides, and every way a side can fail: the message says which, at
what, and why."""

import os
import signal
import subprocess
import time
from types import SimpleNamespace

import pytest

from benchmarks.harness import sides as harness
from benchmarks.harness.sides import Side, SideFailed, Sides, ending


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    """Workers import the planted sides by name."""
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([os.path.dirname(__file__), os.environ.get("PYTHONPATH", "")])
    )


BEGIN = """
import os, runpy, sys
ways = os.O_RDONLY, os.O_WRONLY, os.O_WRONLY | os.O_APPEND
for fd, (path, way) in enumerate(zip(sys.argv[1:4], ways)):
    file = os.open(path, way)
    os.dup2(file, fd)
    os.close(file)
sys.argv = ["sides", sys.argv[4]]
runpy.run_module("benchmarks.harness.sides", run_name="__main__")
"""


@pytest.fixture
def forked(forkserver, monkeypatch, tmp_path):
    """Sides begin where torch is imported already; test_ctrl_c_ends_a_side_at_once starts one as users do."""

    def popen(command, env, stderr, **options):
        pipes = [tmp_path / f"{len(list(tmp_path.iterdir()))}.{end}" for end in ("in", "out")]
        for pipe in pipes:
            os.mkfifo(pipe)
        said = f"/proc/{os.getpid()}/fd/{stderr.fileno()}"
        started = forkserver.start(["-c", BEGIN, *pipes, said, command[-1]], env=env)
        process = SimpleNamespace(wait=started.wait, kill=started.kill, poll=started.poll)
        process.terminate = lambda: os.kill(started.pid, signal.SIGTERM)
        process.stdin, process.stdout = pipes[0].open("w"), pipes[1].open()
        return process

    like = {"Popen": popen, "PIPE": subprocess.PIPE, "TimeoutExpired": subprocess.TimeoutExpired}
    monkeypatch.setattr(harness, "subprocess", SimpleNamespace(**like))


def side(name, function="good", **arguments):
    return Side(name, f"planted_sides:{function}", arguments, threads=1)


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_sides_take_turns_and_peaks_are_of_the_call(forked):
    """Forwards and backwards, the warm-up left out; two processes, which end with the last line."""
    said = []
    with Sides([side("a", start=10), side("b", start=20)], said.append) as sides:
        sides.take_turns("step", warmup=1, rounds=2, by=2)
        a, b = sides
        assert a.values("step", "total") == [14, 16] and b.values("step", "total") == [24, 26]
        assert a.median("total") == 15 and a.loaded["start"] == 10
        assert a.loaded["load_peak"] > 2**20 and a.loaded["load_seconds"] > 0
        pids = [one.loaded["pid"] for one in sides]
        assert pids[0] != pids[1]
        # what libraries print is not part of the protocol; an error leaves the process as it was
        assert a.call("chatter")["seconds"] >= 0
        for call, says in (("boom", "ZeroDivisionError: planted"), ("nothing", "KeyError")):
            with pytest.raises(SideFailed, match=f"a failed at {call}: {says}"):
                a.call(call)
        small, large, again = (a.call("touch", mib=mib, fresh_peak=True)["peak"] for mib in (1, 256, 1))
        held = a.call("touch", mib=1)
        assert large - small > 200 * 2**20 and abs(again - small) < 64 * 2**20
        assert again <= a.peak("touch") < large and 0 < held["resident"] <= held["peak"]
        for peaks, high in (("all", True), ("timed", False)):
            small = a.call("step", fresh_peak=True)["peak"]
            a.call("touch", mib=256)
            sides.take_turns("step", warmup=0, rounds=1, peaks=peaks)
            assert (a.peak() - small > 200 * 2**20) == high, peaks
    assert [line.split(":")[0] for line in said[:5]] == ["a", "b", "warm-up 1/1", "round 1/2", "round 2/2"]
    assert said[3].index("b ") < said[3].index("a ") and said[4].index("a ") < said[4].index("b ")
    assert not any(alive(pid) for pid in pids)


@pytest.mark.parametrize(
    "call, says",
    [
        ("crash", "talker died at crash: ended by SIGKILL, as the kernel does when memory is full"),
        ("leave", "talker died at leave: exit code 7; it said last: the last words"),
    ],
)
def test_a_side_that_dies_says_why_and_takes_the_others_along(call, says, forked):
    others = [side("other")] if call == "crash" else []
    with pytest.raises(SideFailed) as error, Sides([side("talker"), *others], lambda line: None) as sides:
        pids = [one.loaded["pid"] for one in sides]
        sides["talker"].call(call)
    assert says in str(error.value) and not any(alive(pid) for pid in pids)


@pytest.mark.parametrize(
    "function, says",
    [
        ("refuses", "peer failed at loading: there is no such peer\n  next: pip install peer"),
        ("dies", "peer died at loading: exit code 3; it said nothing"),
        ("absent", "peer failed at loading: AttributeError"),
    ],
)
def test_a_side_that_cannot_load_says_why_and_the_next_command(function, says, forked):
    with pytest.raises(SideFailed) as error, Sides([side("peer", function)], print):
        pass
    assert says in str(error.value)


def test_ctrl_c_ends_a_side_at_once():
    pids, started = [], time.monotonic()
    with pytest.raises(KeyboardInterrupt), Sides([side("a")], lambda line: None) as sides:
        pids = [one.loaded["pid"] for one in sides]
        assert sides["a"]._process is not None and sides["a"]._process.stdin is not None
        sides["a"]._process.stdin.write('{"call": "sleep"}\n')  # a side in the middle of a long call
        sides["a"]._process.stdin.flush()
        raise KeyboardInterrupt
    assert not any(alive(pid) for pid in pids) and time.monotonic() - started < 60


def test_a_call_that_takes_too_long_ends_its_side(forked):
    with (
        pytest.raises(SideFailed, match=r"slow did not finish sleep within 0\.2 s"),
        Sides([side("slow")], lambda line: None) as sides,
    ):
        pids = [sides["slow"].loaded["pid"]]
        assert sides["slow"].call("step", within=60.0)["total"] == 1
        sides["slow"].call("sleep", within=0.2)
    assert not any(alive(pid) for pid in pids)


def test_two_sides_of_one_name_are_refused():
    with pytest.raises(ValueError, match="one name"):
        Sides([side("a"), side("a")], print)


def test_endings_are_said_in_words():
    assert ending(1) == "exit code 1" and "SIGTERM" in ending(-15) and "memory is full" in ending(-9)


@pytest.mark.nightly
def test_cases_run_in_processes_of_their_own(measure):
    """What test_cases.py does in this one."""
    ours, rate, peer = measure("moe", sides=("unfreeze", "peft-experts"))
    assert [row.side for row in (ours, rate, peer)] == ["unfreeze", "torch.mm", "peft-experts"]
    assert max(*ours.results["correctness"].values(), *peer.results["correctness"].values()) < 1e-4
    assert ours.results["peak_bytes"] > 10**7 and peer.results["first_side_memory"] > 0
    (row,) = measure("load", pairs=1)
    assert list(row.results["correctness"].values()) == [0.0] and row.results["peak_bytes"] > 0
    few = {"models": ("moe",), "cases": ("1x8",), "new": 4, "rounds": 1, "compile_seconds": 0.0}
    rows = measure("decode", **few)
    assert all(row.results["correctness"]["worst of them, nats less likely"] < 1e-3 for row in rows)
