"""The protocol between the command and its sides, and every way a side can fail: the message says which, at
what, and why."""

import os
import time

import pytest

from benchmarks.harness.sides import Side, SideFailed, Sides, ending


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    """Workers import the planted sides by name."""
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([os.path.dirname(__file__), os.environ.get("PYTHONPATH", "")])
    )


def side(name, function="good", **arguments):
    return Side(name, f"planted_sides:{function}", arguments, threads=1)


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_sides_take_turns_forwards_and_backwards_and_the_warm_up_is_left_out():
    said = []
    with Sides([side("a", start=10), side("b", start=20)], said.append) as sides:
        sides.take_turns("step", warmup=1, rounds=2, by=2)
        assert sides["a"].values("step", "total") == [14, 16] and sides["b"].values("step", "total") == [
            24,
            26,
        ]
        assert sides["a"].median("total") == 15 and sides["a"].loaded["start"] == 10
        pids = [one.loaded["pid"] for one in sides]
        assert pids[0] != pids[1]
    assert [line.split(":")[0] for line in said] == ["a", "b", "warm-up 1/1", "round 1/2", "round 2/2"]
    assert said[3].index("b ") < said[3].index("a ") and said[4].index("a ") < said[4].index("b ")
    assert not any(alive(pid) for pid in pids)


def test_peaks_are_of_the_call_and_begin_after_loading():
    with Sides([side("a")], lambda line: None) as sides:
        small = sides["a"].call("touch", mib=1, fresh_peak=True)["peak"]
        large = sides["a"].call("touch", mib=256, fresh_peak=True)["peak"]
        again = sides["a"].call("touch", mib=1, fresh_peak=True)["peak"]
        held = sides["a"].call("touch", mib=1)
    assert large - small > 200 * 2**20 and abs(again - small) < 64 * 2**20
    assert again <= sides["a"].peak("touch") < large and 0 < held["resident"] <= held["peak"]
    assert sides["a"].loaded["load_peak"] > 2**20 and sides["a"].loaded["load_seconds"] > 0


@pytest.mark.parametrize("peaks, high", [("all", True), ("timed", False)])
def test_what_the_warm_up_took_counts_unless_timed_peaks_are_asked_for(peaks, high):
    with Sides([side("a")], lambda line: None) as sides:
        small = sides["a"].call("step", fresh_peak=True)["peak"]
        sides["a"].call("touch", mib=256)
        sides.take_turns("step", warmup=0, rounds=2, peaks=peaks)
        assert (sides["a"].peak() - small > 200 * 2**20) == high


def test_what_libraries_print_is_not_part_of_the_protocol():
    with Sides([side("a")], lambda line: None) as sides:
        assert sides["a"].call("chatter")["seconds"] >= 0


@pytest.mark.parametrize(
    "call, says",
    [
        ("crash", "talker died at crash: ended by SIGKILL, as the kernel does when memory is full"),
        ("leave", "talker died at leave: exit code 7; it said last: the last words"),
        ("boom", "talker failed at boom: ZeroDivisionError: planted"),
        ("nothing", "talker failed at nothing: KeyError"),
    ],
)
def test_a_side_that_fails_says_why_and_takes_the_others_along(call, says):
    with (
        pytest.raises(SideFailed) as error,
        Sides([side("talker"), side("other")], lambda line: None) as sides,
    ):
        other = sides["other"].loaded["pid"]
        sides["talker"].call(call)
    assert says in str(error.value)
    assert not alive(other)


@pytest.mark.parametrize(
    "function, says",
    [
        ("refuses", "peer failed at loading: there is no such peer\n  next: pip install peer"),
        ("dies", "peer died at loading: exit code 3; it said nothing"),
        ("absent", "peer failed at loading: AttributeError"),
    ],
)
def test_a_side_that_cannot_load_says_why_and_the_next_command(function, says):
    with pytest.raises(SideFailed) as error, Sides([side("peer", function)], print):
        pass
    assert says in str(error.value)


def test_ctrl_c_ends_every_side_at_once():
    pids, started = [], time.monotonic()
    with pytest.raises(KeyboardInterrupt), Sides([side("a"), side("b")], lambda line: None) as sides:
        pids = [one.loaded["pid"] for one in sides]
        assert sides["a"]._process is not None and sides["a"]._process.stdin is not None
        sides["a"]._process.stdin.write('{"call": "sleep"}\n')  # a side in the middle of a long call
        sides["a"]._process.stdin.flush()
        raise KeyboardInterrupt
    assert not any(alive(pid) for pid in pids) and time.monotonic() - started < 60


def test_two_sides_of_one_name_are_refused():
    with pytest.raises(ValueError, match="one name"):
        Sides([side("a"), side("a")], print)


def test_endings_are_said_in_words():
    assert ending(1) == "exit code 1" and "SIGTERM" in ending(-15) and "memory is full" in ending(-9)
