"""What was planned beside what was measured: a miss beyond the limits is something to look at."""

import json
from pathlib import Path

import pytest

from unfreeze.report.guards import guard_rows
from unfreeze.report.run import read_run

GIB = 2**30
PLAN = {
    "kind": "plan",
    "step": 0,
    "terms": {"base": 4 * GIB, "optimizer": GIB},
    "total": 5 * GIB,
    "usable": 20 * GIB,
    "fits": True,
    "hardware": {"kind": "cpu", "process": GIB // 2},
    "seconds_per_pass": 2.0,
    "rates": "measured on this machine, 2026-11-22, on 2 threads",
}


def states(folder: Path, seconds: float, peak: float, micro_batches: int = 1, **plan) -> dict[str, str]:
    train = [
        {
            "kind": "train",
            "step": step,
            "loss": 1.0,
            "seconds": taken,
            "tokens": 9,
            "peak_bytes": int(peak if step == 3 else peak / 2),
        }
        # the first step compiles, one is disturbed
        for step, taken in enumerate((9 * seconds, seconds, 0.5 * seconds, 5 * seconds, seconds), start=1)
    ]
    folder.mkdir(exist_ok=True)
    lines = [json.dumps(event) + "\n" for event in [PLAN | plan, *train]]
    (folder / "events.jsonl").write_text("".join(lines))
    (folder / "resolved_config.json").write_text(json.dumps({"micro_batches": micro_batches}))
    return {row.guard: row.state for row in guard_rows(read_run(folder))}


@pytest.mark.parametrize("peak, state", [(6.0, "ok"), (6.9, "ok"), (3.0, "ok"), (7.1, "look")])
def test_a_peak_below_a_tenth_more_than_plan_process_and_compiled_code_is_ok(tmp_path, peak, state):
    """5 planned, 0.5 of the process, up to 0.8 compiled: 6.3 + 10 %. Less is fine."""
    assert states(tmp_path, 2.0, peak * GIB)["Planned peak"] == state


def test_the_row_says_plainly_what_was_planned_and_what_it_took(tmp_path):
    states(tmp_path, 2.0, 6 * GIB)
    row = next(row for row in guard_rows(read_run(tmp_path)) if row.guard == "Planned peak")
    assert row.setting == "between 5.5 GiB and 6.3 GiB, at most 10% more"
    assert row.result == (
        "peak 6.0 GiB; planned 5.0 GiB for a step + 512.0 MiB for the process itself + up to"
        " 0.8 GiB of compiled code"
    )


def test_a_gpus_peak_is_the_plans_and_a_quarter_gib_of_workspaces(tmp_path):
    gpu = {"hardware": {"kind": "cuda", "process": 0}}
    assert states(tmp_path, 2.0, 5.7 * GIB, **gpu)["Planned peak"] == "ok"
    assert states(tmp_path, 2.0, 5.8 * GIB, **gpu)["Planned peak"] == "look"


@pytest.mark.parametrize(
    "taken, state", [(2.0, "ok"), (2.6, "ok"), (1.7, "ok"), (2.7, "look"), (1.5, "look")]
)
def test_seconds_within_a_quarter_are_ok(tmp_path, taken, state):
    assert states(tmp_path, taken, 6 * GIB)["Planned seconds"] == state


def test_a_step_of_four_micro_batches_takes_four_passes(tmp_path):
    assert states(tmp_path, 8.0, 6 * GIB, micro_batches=4)["Planned seconds"] == "ok"
    assert states(tmp_path, 2.0, 6 * GIB, micro_batches=4)["Planned seconds"] == "look"


def test_rates_of_another_machine_are_no_reason_to_look(tmp_path):
    other = {"rates": "measured on a machine of class cpu-avx2, 2026-11-21, on 1 thread"}
    assert states(tmp_path, 20.0, 6 * GIB, **other)["Planned seconds"] == "ok"
    assert "Planned seconds" not in states(tmp_path, 2.0, 6 * GIB, seconds_per_pass=None)
