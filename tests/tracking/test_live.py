"""Live progress: plain lines off a terminal, a bar on one, silence when quiet, and a terminal that is left as
it was found."""

from __future__ import annotations

import io
import re
import subprocess
import sys

import pytest

from unfreeze.report.times import speed_words
from unfreeze.tracking.live import EncodeProgress, LiveProgress, LoadProgress, rollout_words

SHOW_CURSOR, HIDE_CURSOR = "\x1b[?25h", "\x1b[?25l"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    return Terminal()


def train(step: int, seconds: float = 1.0) -> dict:
    return {
        "kind": "train",
        "step": step,
        "time": 100.0 + step,
        "loss": 1.5,
        "tokens": 500,
        "seconds": seconds,
        "peak_bytes": 2**30,
    }


def test_plain_lines_first_last_and_every_five_seconds():
    out = io.StringIO()
    with LiveProgress(12, stream=out) as progress:
        for step in range(1, 13):
            progress(train(step))
    assert [line.split()[1] for line in out.getvalue().splitlines()] == ["1/12", "6/12", "11/12", "12/12"]
    # no forecast from a step that compiles
    assert out.getvalue().splitlines()[0] == "step 1/12  loss 1.500  500 tokens/s with compiling  1.0 GiB"
    assert out.getvalue().splitlines()[1] == "step 6/12  loss 1.500  6.0 s left  500 tokens/s  1.0 GiB"
    assert "\x1b" not in out.getvalue()


@pytest.mark.parametrize("steps", [1, 2, 3, 12])
def test_the_speed_of_the_last_step_is_the_one_of_the_summary(steps):
    """The first step compiles, for nine seconds. Control arm: its line says so, as the summary of two does."""
    out, events = io.StringIO(), [{"kind": "start", "step": 0, "time": 100.0}]
    events += [train(step, 10.0 if step == 1 else 1.0) for step in range(1, steps + 1)]
    with LiveProgress(steps, stream=out) as progress:
        for event in events:
            progress(event)
    first, *_, last = [*out.getvalue().splitlines(), out.getvalue().splitlines()[-1]]
    speed, words = speed_words(events).split("; ")
    assert first.endswith("50 tokens/s with compiling  1.0 GiB")
    assert f"  {speed} tokens/s" in last and (" with compiling" in last) == (words == "with compiling")
    assert words == ("without compiling" if steps > 2 else "with compiling")
    assert speed == {1: "50", 2: "91"}.get(steps, "500")


def test_quiet_prints_nothing():
    out = io.StringIO()
    with LiveProgress(2, quiet=True, stream=out) as progress, LoadProgress(quiet=True, stream=out) as load:
        for kind in ("warning", "end", "load", "save"):
            progress({"kind": kind, "step": 1, "message": "x", "bytes": 1, "warning": "y"})
        progress(train(1))
        load(5, 5)
    assert out.getvalue() == ""


def test_other_events_are_said_once():
    out = io.StringIO()
    progress = LiveProgress(0, stream=out)
    progress({"kind": "plan", "step": 0, "lines": ["peak 1.0 GiB"]})
    progress({"kind": "start", "step": 4, "steps": 8, "resumed": True})
    progress(
        {
            "kind": "data",
            "step": 0,
            "summary": "3 rows, 1 dropped",
            "dropped": 1,
            "bad": 0,
            "listed": [{"row": 2, "reason": "row 2: empty"}],
        }
    )
    progress(
        {"kind": "load", "step": 0, "bytes": 2_000_000_000, "seconds": 1.0, "expanded_bytes": 8_000_000_000}
    )
    progress(
        {
            "kind": "receipt",
            "step": 5,
            "groups": {"attention": {"parameters": 10, "trained": True, "moved": 0.1}},
        }
    )
    progress({"kind": "eval", "step": 8, "time": 3.0, "loss": 0.25, "style": 0.5})
    progress({"kind": "save", "step": 8, "path": "runs/[a]/state"})
    progress({"kind": "warning", "step": 8, "message": "one row skipped"})
    progress({"kind": "end", "step": 8, "reason": "done", "tokens_per_second": 1234.5})
    text = out.getvalue()
    load = "loaded 2.00 GB at 2.00 GB/s (8.00 GB unpacked); preparing step 1"
    for words in (
        "peak 1.0 GiB",
        "resumed after step 4",
        load,
        "attention",
        "step 8: held-out loss 0.25, style 0.5",
    ):
        assert text.count(words) == 1, words
    data = ("data: 3 rows, 1 dropped", "left out: row 2: empty")
    for words in (*data, "saved runs/[a]/state", "warning, step 8: one row skipped", "done after step 8"):
        assert text.count(words) == 1, words


def test_bar_on_a_terminal_and_the_cursor_back_after_ctrl_c(terminal: Terminal):
    with pytest.raises(KeyboardInterrupt), LiveProgress(3, stream=terminal) as progress:
        progress(train(1))
        # control arm: it was really hidden
        assert HIDE_CURSOR in terminal.getvalue() and SHOW_CURSOR not in terminal.getvalue()
        raise KeyboardInterrupt
    assert terminal.getvalue().rindex(SHOW_CURSOR) > terminal.getvalue().rindex(HIDE_CURSOR)
    assert "step 1/3" in terminal.getvalue() and "loss 1.500" in terminal.getvalue()


def test_without_its_context_a_terminal_gets_plain_lines(terminal: Terminal):
    LiveProgress(3, stream=terminal)(train(1))
    assert HIDE_CURSOR not in terminal.getvalue() and "step 1/3" in terminal.getvalue()


def test_standard_output_is_left_alone(terminal: Terminal, capsys: pytest.CaptureFixture[str]):
    before = sys.stdout
    with LiveProgress(3, stream=terminal) as progress:
        progress(train(1))
        # rich would redirect it, and the line of --json would end in the progress stream
        assert sys.stdout is before
        print("result")
    assert capsys.readouterr().out == "result\n"


def test_load_progress_says_rate_and_time_left():
    now, out = [0.0], io.StringIO()
    with LoadProgress(stream=out, clock=lambda: now[0]) as progress:
        for second in range(1, 11):
            now[0] = float(second)
            progress(second * 500_000_000, 5_000_000_000)
    lines = out.getvalue().splitlines()
    assert lines == ["load  2.50 GB of 5.00 GB  0.50 GB/s  5.0 s left", "load  5.00 GB of 5.00 GB"]


def test_the_time_left_is_of_what_came_in_some_seconds_not_of_the_first_byte():
    """A checkpoint whose first byte comes after 30 s, and then 1 GB/s: not "53 h left"."""
    now, out = [0.0], io.StringIO()
    with LoadProgress(stream=out, clock=lambda: now[0]) as progress:
        for second, done in ((30, 1), (35, 5 * 10**9), (40, 10 * 10**9)):
            now[0] = float(second)
            progress(done, 60 * 10**9)
    first, *others = out.getvalue().splitlines()
    assert first == "load  0.0 kB of 60.00 GB"
    assert [line.partition("GB/s  ")[2] for line in others] == ["55 s left", "50 s left"]


def test_what_is_loaded_at_once_has_no_line():
    out = io.StringIO()
    with LoadProgress(stream=out, clock=lambda: 1.0) as progress:
        progress(1, 2)
        progress(2, 2)
    assert out.getvalue() == ""


@pytest.mark.parametrize("compiles", [True, False])
def test_compiling_is_announced_where_it_comes(compiles):
    out = io.StringIO()
    load = {"kind": "load", "step": 0, "bytes": 2_000_000, "seconds": 1.0, "compiles": compiles}
    LiveProgress(0, stream=out)(load)
    assert ("(compiles once)" in out.getvalue()) == compiles


def test_load_progress_bar(terminal: Terminal):
    with LoadProgress(stream=terminal) as progress:
        progress(5_000_000_000, 5_000_000_000)
    assert "5.00 GB of 5.00 GB" in terminal.getvalue() and terminal.getvalue().rstrip().endswith(SHOW_CURSOR)


@pytest.mark.parametrize("columns", [80, 60])
def test_the_bar_shows_step_epoch_loss_and_time_left_on_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, columns: int
):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    terminal = Terminal()
    with LiveProgress(9500, stream=terminal) as progress:
        for step in range(1, 4):
            progress(train(step) | {"loss": 10.72, "epoch": step / 2})
    last = terminal.getvalue().split("\r")[-2].split("\n")[-1]
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", last)
    assert (
        all(words in shown for words in ("step 3/9500", "epoch 1.5", "loss 10.720", "2 h 38 min left"))
        and len(shown) <= columns
    )


def test_a_resumed_run_goes_on_at_its_epoch_and_names_its_next_step():
    out = io.StringIO()
    progress = LiveProgress(40, stream=out)
    progress({"kind": "load", "step": 30, "bytes": 1, "seconds": 1.0, "expanded_bytes": 1, "rounded": 0})
    progress(train(31) | {"epoch": 15.5})
    progress(train(40))  # a cursor without passes
    assert "preparing step 31" in out.getvalue() and "step 31/40  epoch 15.5" in out.getvalue()
    assert out.getvalue().count("epoch") == 1


BROKEN_PIPE = """
import json, sys
from unfreeze.tracking.live import LiveProgress
progress = LiveProgress(3)
for step in range(200):
    progress({"kind": "warning", "step": step, "message": "x" * 1000})
print("said to nobody", file=sys.stderr, flush=True)
print("went on")
"""


def test_a_run_outlives_the_reader_of_its_output():
    run = subprocess.Popen(
        [sys.executable, "-c", BROKEN_PIPE], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert run.stderr is not None and run.stdout is not None
    run.stderr.close()
    assert run.stdout.read() == b"went on\n" and run.wait() == 0


def test_a_run_starts_in_five_lines_and_the_whole_plan_is_there_on_request():
    plan = {
        "kind": "plan",
        "step": 0,
        "lines": [f"term {i}" for i in range(16)],
        "start": ["model: m", "memory: 1 MiB", "trains: all"],
    }
    data = {
        "kind": "data",
        "step": 0,
        "rows": 60,
        "tokens": 1470,
        "supervised_fraction": 0.48,
        "truncated": 0,
        "bad": 2,
        "summary": "long",
    }
    load = {"kind": "load", "step": 0, "bytes": 10**6, "seconds": 1.0, "expanded_bytes": 10**6}
    said = {}
    for whole in (False, True):
        out = io.StringIO()
        progress = LiveProgress(0, stream=out, whole_plan=whole)
        for event in (data, plan, load):
            progress(event)
        said[whole] = out.getvalue().splitlines()
    assert len(said[False]) == 5 and said[False][0] == "data: 60 rows, 1.47 K tokens, 48 % supervised; 2 bad"
    assert said[False][1:4] == plan["start"] and "preparing step 1" in said[False][4]
    assert said[True][1:17] == plan["lines"]


def test_the_lines_of_a_start_fit_80_columns_with_the_longest_numbers():
    lost = dict.fromkeys(("truncated", "dropped", "bad", "duplicates"), 1_234_567)
    data = {"kind": "data", "step": 0, "rows": 10**9, "tokens": 10**12, "supervised_fraction": 0.48, **lost}
    memory = (
        "memory: 123.4 GiB planned, 127.0 GiB usable; disk: 123.4 GiB of 127.0 GiB free, but " + "so on " * 9
    )
    plan = {"kind": "plan", "step": 0, "lines": [], "start": [memory]}
    out = io.StringIO()
    progress = LiveProgress(0, stream=out)
    for event in (data, plan):
        progress(event)
    said = out.getvalue()
    assert all(len(line) <= 80 for line in said.splitlines()) and len(said.splitlines()) == 4
    flat = " ".join(said.split())
    assert "1,234,567 duplicates" in flat and memory.strip() in flat  # nothing is lost


@pytest.mark.parametrize("expanded, says", [(0, "preparing step 1, 8 kernels"), (2 * 10**12, "; 8 kernels")])
def test_predicted_kernels_are_said_once_in_a_line_that_is_there(expanded, says):
    plan = {"kind": "plan", "step": 0, "lines": ["whole"], "start": ["memory"]}
    load = {"kind": "load", "step": 0, "bytes": 594 * 10**9, "seconds": 200.0, "expanded_bytes": expanded}
    start = {"kind": "start", "step": 0, "steps": 3}

    def said(*events):
        out = io.StringIO()
        progress = LiveProgress(0, stream=out)
        for event in events:
            progress(event)
        return out.getvalue().splitlines()

    predicted = plan | {"predicted_kernels": [f"op {n}" for n in range(8)]}
    lines = said(predicted, load, start)
    assert f"{says} predicted" in lines[1] and len(lines[1]) <= 80
    assert len(lines) == len(said(plan, load, start)) and "predicted" not in " ".join(said(plan, load, start))
    # a model that is not loaded
    assert said(predicted, start) == ["memory", "preparing step 1, 8 kernels predicted"]


def test_the_receipt_has_a_title_and_a_verdict():
    out = io.StringIO()
    groups = {
        "attention": {"trained": 8, "moved": 0.1, "sites_reached": 4, "sites_moved": 4},
        "norms": {"trained": 0},
    }
    LiveProgress(0, stream=out)({"kind": "receipt", "step": 1, "groups": groups, "exceptions": []})
    assert out.getvalue().startswith(
        "receipt of step 1: all 4 matrices that got a gradient moved; frozen: norms\n"
    )
    dead = {
        "group": "attention",
        "sites": "model.layers.1.self_attn.q_b_proj",
        "count": 1,
        "why": "no gradient",
    }
    LiveProgress(0, stream=out)({"kind": "receipt", "step": 1, "groups": groups, "exceptions": [dead]})
    assert "receipt of step 1: no gradient: model.layers.1.self_attn.q_b_proj" in out.getvalue()


@pytest.mark.parametrize(
    "faults, says",
    [({}, []), ({"unreadable call": 1}, ["1 call failed"]), ({"a": 1, "b": 2}, ["3 calls failed"])],
)
def test_failed_calls_of_a_step_are_counted(faults, says):
    event = {"kind": "rollout", "step": 1, "reward": 0.5, "groups": 4, "signal": 2, "faults": faults}
    assert rollout_words(event) == ["reward 0.500", "2/4 groups differ", *says]


def test_encoding_is_shown_once_it_takes_a_second_and_never_when_quiet():
    out, now = io.StringIO(), [0.0]
    with EncodeProgress(stream=out, clock=lambda: now[0]) as progress:
        for second in (0.5, 2.0, 4.0, 8.0):
            now[0] = second
            progress(int(1000 * second), int(100 * second), 1000)
    assert out.getvalue().splitlines() == [
        "encode  2,000 rows  1,000 rows/s  8.0 s left",
        "encode  8,000 rows  1,000 rows/s  2.0 s left",
    ]
    with EncodeProgress(quiet=True, stream=out, clock=lambda: now[0]) as progress:
        now[0] = 100.0
        progress(1, 1, 2)
    terminal = Terminal()
    with EncodeProgress(stream=terminal, clock=lambda: now[0]) as progress:
        now[0] = 200.0
        progress(300, 1, 2)
    assert "300 rows  3 rows/s" in terminal.getvalue()
