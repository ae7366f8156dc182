"""The forecast against a run whose clock is made up: compiling, validation, answers and saving counted apart."""

import json

import pytest

from unfreeze.config.tables import Save, Watch
from unfreeze.core.events import EventLog
from unfreeze.job.watch.forecast import AT, ForecastOnce
from unfreeze.report.forecast import (
    Rhythm,
    actual_seconds,
    forecast,
    forecast_and_actual,
    forecast_words,
    plain_cycles,
)


class Clock:
    """Events of a run that never happened: each takes the seconds that it says."""

    def __init__(self):
        self.now, self.events = 1000.0, []

    def emit(self, kind, step, took=0.0, **fields):
        self.now += took
        timed = {"seconds": took} if took else {}
        self.events.append({"kind": kind, "step": step, "time": self.now, **timed, **fields})


def run(
    until,
    steps,
    *,
    step=0.5,
    compile=(30.0, 4.0),
    validate_every=0,
    validation=7.0,
    save_every=0,
    save=3.0,
    begin=0,
    recompiled_at=None,
):
    """A session to step `until` of `steps`, as fit() and its hooks emit events."""
    clock = Clock()
    clock.emit("plan", begin, save_bytes=int(save * 5e8))
    if begin == 0 and validate_every:
        clock.emit("eval", 0, took=validation + 5)  # the first pass compiles
    clock.emit("start", begin, steps=steps, resumed=begin > 0)
    for number in range(begin + 1, until + 1):
        since = number - begin
        slow = compile[since - 1] if since <= len(compile) else 0.0
        slow += 60.0 if number == recompiled_at else 0.0
        clock.emit("train", number, took=step + slow)
        if since == 1:
            clock.emit("kernels", number)
            clock.emit("receipt", number)
        if number == recompiled_at:
            clock.emit("kernels", number)
        last = number == steps
        if validate_every and (number % validate_every == 0 or last):
            clock.emit("eval", number, took=validation)
            clock.emit("save", number, took=save)  # the loss is the lowest so far
        if last or (save_every and number % save_every == 0):
            clock.emit("save", number, took=save)
    if until == steps:
        clock.emit("end", steps, reason="done")
    return clock.events


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"validate_every": 40},
        {"save_every": 25},
        {"validate_every": 30, "save_every": 30, "validation": 20.0, "save": 10.0},
        {"compile": (300.0, 40.0)},
        {"recompiled_at": 20},
        {"steps": 101},
    ],
)
def test_after_50_steps_it_is_within_two_hundredths_of_what_the_run_takes(options):
    steps = options.pop("steps", 400)
    whole = run(steps, steps, **options)
    early = run(AT, steps, **options)
    # the hook is called right after the 50th train event and its validation, before its save
    early = early[: max(i for i, event in enumerate(early) if event["kind"] == "train") + 1]
    rhythm = Rhythm(
        steps,
        options.get("validate_every", 0),
        options.get("save_every", 0),
        validates="validate_every" in options,
    )
    made = forecast(early, rhythm)
    actual = whole[-1]["time"] - next(event["time"] for event in whole if event["kind"] == "start")
    assert made.per_step == pytest.approx(0.5)
    assert made.seconds == pytest.approx(actual, rel=0.02)


def test_control_arm_a_mean_over_all_steps_counts_the_compiling_again():
    steps, compile = 400, (300.0, 40.0)
    early, whole = run(AT, steps, compile=compile), run(steps, steps, compile=compile)
    start = early[0]["time"]
    naive = (early[-1]["time"] - start) / AT * steps
    assert naive > 4 * (whole[-1]["time"] - start)
    assert len(plain_cycles(early)) == AT - 3  # after the receipt, and the compiling second step


def test_a_resumed_session_forecasts_what_is_left_of_the_run():
    early = [*run(200, 400), *run(250, 400, begin=200)]
    made = forecast(early, Rhythm(400))
    assert made.left == pytest.approx(150 * 0.5, abs=5)
    assert made.seconds == pytest.approx(50 * 0.5 + 34 + 150 * 0.5, abs=5)


def test_validations_and_saves_to_come():
    rhythm = Rhythm(100, 30, 25, validates=True)
    assert [rhythm.validations(step) for step in (50, 60, 90, 99, 100)] == [3, 2, 1, 1, 0]
    assert Rhythm(100, 25, validates=True).validations(50) == 2  # the last is one of them
    assert Rhythm(100, 0, validates=True).validations(50) == 1 and Rhythm(100).validations(50) == 0
    # at 50, 75 and 100, and one after each validation; without any there is one at the end
    assert rhythm.saves(50, 10.0) == 3 + 3 and Rhythm(100).saves(50, 1e4) == 1
    assert Rhythm(100, save_minutes=10).saves(50, 3600.0) == 6


def test_a_save_that_was_not_measured_is_taken_from_its_bytes():
    assert forecast(run(AT, 400, save=2.0), Rhythm(400)).saving == pytest.approx(2.0)  # 1 GB at 0.5 GB/s
    measured = run(AT + 1, 400, save_every=10, save=7.0)
    assert forecast(measured, Rhythm(400)).saving == pytest.approx(7.0)


def test_too_few_steps_make_no_forecast():
    assert forecast(run(2, 400), Rhythm(400)) is None and forecast([], Rhythm(400)) is None


def test_the_report_compares_it_with_what_the_run_took():
    events = run(400, 400)
    place = next(i for i, event in enumerate(events) if event["step"] == AT) + 1
    event = {
        "kind": "forecast",
        "step": AT,
        "time": events[place - 1]["time"],
        "seconds": 200.0,
        "left": 150.0,
    }
    event |= {"per_step": 0.5, "validation": 0.0, "saving": 0.0, "usd": 1.5}
    events.insert(place, event)
    assert actual_seconds(events) == pytest.approx(237.0)
    assert forecast_and_actual(events) == "3 min 20 s; made at step 50. It took 3 min 57 s, 19% more"
    assert forecast_and_actual(events[:-1]) == "3 min 20 s; made at step 50"
    assert forecast_and_actual(run(400, 400)) == ""
    assert (
        forecast_words(event)
        == "forecast at step 50: 3 min 20 s in all, 2 min 30 s to go (0.5 s a step); 1.50 USD"
    )


class State:
    """What the hook looks at."""

    def __init__(self, path, steps):
        self.step, self.schedule, self.run = 0, type("S", (), {"steps": steps}), type("R", (), {})
        self.run.events = EventLog(path)


def test_the_hook_emits_it_once_with_its_price(tmp_path):
    state = State(tmp_path / "events.jsonl", 400)
    hook = ForecastOnce(Save(), Watch(usd_per_hour=36.0), validates=False)
    for event in run(60, 400):
        (tmp_path / "events.jsonl").open("a").write(json.dumps(event) + "\n")
        if event["kind"] == "train":
            state.step = event["step"]
            hook(state, None)
    state.run.events.close()
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    (made,) = [line for line in lines if line["kind"] == "forecast"]
    assert made["step"] == AT and made["usd"] == pytest.approx(made["seconds"] * 0.01)


@pytest.mark.parametrize(
    ("steps", "at"), [(100, 50), (99, 49), (80, 40), (60, 30), (40, 20), (39, 0), (1, 0)]
)
def test_a_short_run_has_it_when_half_of_it_is_done(tmp_path, steps, at):
    state = State(tmp_path / "events.jsonl", steps)
    hook = ForecastOnce(Save(), Watch(), validates=False)
    for event in run(steps - 1, steps):
        (tmp_path / "events.jsonl").open("a").write(json.dumps(event) + "\n")
        if event["kind"] == "train":
            state.step = event["step"]
            hook(state, None)
    state.run.events.close()
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "forecast"] == [at] * bool(at)
