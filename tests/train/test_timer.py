"""Saves by the clock (train/timer.py), with a clock that the test moves."""

import json

import pytest

from unfreeze.objectives.cross_entropy import cross_entropy
from unfreeze.train.fit import fit
from unfreeze.train.optim import AdamW
from unfreeze.train.run import Run
from unfreeze.train.schedule import Schedule
from unfreeze.train.state import start_or_resume
from unfreeze.train.timer import Saves, SaveTimer


class Clock:
    """Seconds that pass only where a step adds them."""

    now = 0.0

    def __call__(self):
        return self.now

    def pass_by(self, seconds):
        self.now += seconds


def test_due_from_the_minutes_on_and_again_after_a_restart():
    clock = Clock()
    timer = SaveTimer(10, clock)
    clock.now = 599.9
    assert not timer.due()
    clock.now = 600.0
    assert timer.due()
    timer.restart()
    assert not timer.due()
    assert not SaveTimer(0, Clock()).due()


@pytest.fixture
def train(tiny, tmp_path):
    def run(name, steps=9, **options):
        clock = Clock()
        with Run(tmp_path / name, {"model": "tiny", "data": "d.jsonl"}) as folder:
            model = tiny.Model()
            state = start_or_resume(
                folder, model, optimizer=AdamW(model), schedule=Schedule(3e-2, 9, "cosine", 2)
            )
            saves = Saves(**options.pop("saves", {}), clock=clock)
            hooks = [lambda state, result: clock.pass_by(100), *options.pop("hooks", [])]
            source = tiny.endless(state.cursor)
            fit(state, source, cross_entropy, recompute=tiny.recompute, on_step=hooks, saves=saves)
        lines = (tmp_path / name / "events.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    return run


def steps_of(events, kind):
    return [event["step"] for event in events if event["kind"] == kind]


def test_a_run_saves_when_the_minutes_have_passed_since_the_last_save(train):
    """A step takes 100 s, so 5 minutes have passed at the read of the fourth step, which is saved."""
    events = train("by-clock", saves={"minutes": 5})
    assert steps_of(events, "save") == [4, 8, 9]
    assert all(event["bytes"] > 0 and event["seconds"] > 0 for event in events if event["kind"] == "save")
    assert steps_of(train("never"), "save") == [9]


def test_a_save_for_another_reason_starts_the_minutes_anew(train):
    assert steps_of(train("both", saves={"minutes": 5, "every": 3}), "save") == [3, 6, 9]


def test_a_run_that_goes_on_from_such_a_save_is_the_unbroken_one(train, monkeypatch):
    class Killed(Exception):
        pass

    def killed(state, result):
        if state.step == 6:
            raise Killed

    unbroken = train("unbroken", saves={"minutes": 5})
    with pytest.raises(Killed):
        train("killed", saves={"minutes": 5}, hooks=[killed])
    resumed = train("killed", saves={"minutes": 5})
    assert [e["loss"] for e in resumed if e["kind"] == "train"] == [
        e["loss"] for e in unbroken if e["kind"] == "train"
    ]
    assert steps_of(resumed, "start") == [0, 4]
