"""bench plan: planned beside measured, and a miss is marked."""

from dataclasses import replace

import pytest

from benchmarks.cases import plan
from benchmarks.harness.plan_page import page
from benchmarks.harness.rows import Stamp
from benchmarks.harness.sides import SideFailed
from unfreeze.core.command import Common

GIB = 2**30


def test_a_run_is_measured_beside_its_plan(tmp_path):
    out = tmp_path / "checked.md"
    case = plan.Case("tiny-k2", documents=4, length=64, dtype="float32")
    found = plan.measure(plan.Config(out=str(out), steps=1), Common(quiet=True), [case])
    (row,) = found["rows"]
    assert row["measured_bytes"] > 0 and row["measured_seconds"] > 0
    assert row["planned_bytes"] == sum(row["terms"].values())
    assert row["peak_bytes"] > row["process_bytes"] + row["measured_bytes"]
    assert case.name in out.read_text() and "unfreeze dev bench plan" in out.read_text()


@pytest.mark.nightly
def test_two_processes_make_a_step_together(tmp_path):
    """The first one's bytes; and both must come, or there is no step."""
    case = plan.Case("tiny-k2", documents=2, length=64, dtype="float32", processes=2)
    config = plan.Config(out=str(tmp_path / "checked.md"), steps=1, threads=1)
    (row,) = plan.measure(config, Common(quiet=True), [case])["rows"]
    assert "2 processes of 2 x 64" in row["name"] and row["measured_seconds"] > 0
    alone = plan.planned(replace(case, processes=1), 1)
    # a process has its own documents: bytes and seconds are those of one that is alone
    assert row["planned_bytes"] == alone["bytes"]
    assert row["planned_seconds"] == alone["seconds"]


def test_control_arm_a_process_that_cannot_start_is_said(monkeypatch):
    for name in ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")  # put back afterwards
    with pytest.raises(SideFailed, match="process 1 failed at loading: KeyError: 'nonsense'"):
        plan.Others({**plan.Case("nonsense").__dict__}, 2)


@pytest.mark.parametrize("of_memory, of_seconds", [(1.0, 1.0), (1.09, 0.76), (0.85, 1.3), (1.2, 0.7)])
def test_a_miss_is_marked_and_counted(of_memory, of_seconds):
    row = {
        "name": "a run",
        "planned_bytes": of_memory * GIB,
        "measured_bytes": GIB,
        "peak_bytes": 2 * GIB,
        "beside_bytes": GIB,
        "planned_seconds": of_seconds,
        "measured_seconds": 1.0,
        "rates": "somewhere",
    }
    missed = of_memory in (0.85, 1.2)
    text = page(Stamp.now("plan", "unfreeze dev bench plan"), [row])
    assert (f"**{of_memory:.2f}**" in text, f"**{of_seconds:.2f}**" in text) == (missed, missed)
    assert f"Memory: {int(not missed)} of 1 within 10%. Seconds: {int(not missed)} of 1 within 25%" in text


def test_every_run_is_told_apart():
    assert len({case.name for case in plan.CASES}) == len(plan.CASES) >= 20
