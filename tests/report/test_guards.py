"""The guards section: each row is worked out from a run whose events say what the guard saw."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from unfreeze.report.guards import GuardRow, guard_rows
from unfreeze.report.html import summary_lines, write_report
from unfreeze.report.run import read_run

TRAIN = {"kind": "train", "time": 1.0, "loss": 1.0, "tokens": 100, "seconds": 1.0, "supervised_tokens": 50, "expert_load": {"1": [3, 3]}}
CLEAN = [
    {"kind": "plan", "step": 0, "total": 2**20, "usable": 2**30, "fits": True},
    {"kind": "data", "step": 0, "rows": 10, "bad": 0, "dropped": 1, "truncated": 2},
    {"kind": "receipt", "step": 1, "groups": {"attention": {"parameters": 8, "trained": 8, "moved": 0.1}, "router": {"trained": 0, "moved": 0.0}}},
    {"kind": "gap", "step": 0, "when": "before", "logprob_gap_mean": 1e-6, "logprob_gap_max": 2e-6, "logprob_gap_tokens": 64},
    *({**TRAIN, "step": step, "grad_norm": norm} for step, norm in ((1, 3.0), (2, 0.5), (3, 1.5))),
]
CONFIG = {"clip": 1.0, "on_bad_row": "error", "truncation": "tail", "track": ["wandb"], "on_spike": "skip"}


def rows_of(folder: Path, events: list[dict], config: dict = CONFIG) -> dict[str, GuardRow]:
    folder.mkdir(exist_ok=True)
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (folder / "resolved_config.json").write_text(json.dumps(config))
    return {row.guard: row for row in guard_rows(read_run(folder))}


def test_a_clean_run_shows_every_guard_and_no_alarm(tmp_path: Path):
    rows = rows_of(tmp_path, CLEAN)
    assert {name: (row.setting, row.said) for name, row in rows.items()} == {
        "Memory plan": ("1.0 GiB usable", "planned 1.0 MiB"),
        "Data rows": ("on_bad_row error, truncation tail", "10 rows: 0 bad, 1 dropped, 2 truncated"),
        "Receipt of the first step": ("always", "all asked for moved: attention"),
        "Loss and gradients finite": ("always", "finite in all 3 steps"),
        "Loss and gradient spikes": ("skip", "none in 3 steps"),
        "Gradient norm clipped": ("at 1", "in 2 of 3 steps, largest 3"),
        "Supervised tokens": ("always", "50 at least in every step"),
        "Expert load": ("always", "no expert found dead or overloaded"),
        "Sampler against trainer": ("1e-4 nats in float32; shown in bfloat16", "at most 2e-06 nats, 1 times measured"),
        "Trackers": ("wandb", "no failure"),
    }
    assert not any(row.alarm for row in rows.values())


@pytest.mark.parametrize(
    "event, guard, words",
    [
        (
            {"kind": "train", "step": 4, "loss": None, "grad_norm": None, "error": "the loss is nan"},
            "Loss and gradients finite",
            "step 4: the loss is nan",
        ),
        (
            {"kind": "gap", "step": 4, "when": "after", "logprob_gap_max": 0.3, "warning": "the sampler and the trainer differ by 0.3 nats"},
            "Sampler against trainer",
            "step 4: the sampler and the trainer differ by 0.3 nats",
        ),
        ({**TRAIN, "step": 4, "supervised_tokens": 0}, "Supervised tokens", "none in 1 of 4 steps, first step 4"),
        ({"kind": "warning", "step": 4, "message": "expert load: layer 1: 1 of 2 …"}, "Expert load", "step 4: layer 1: 1 of 2 …"),
        ({"kind": "warning", "step": 4, "message": "track wandb failed: x"}, "Trackers", "step 4: track wandb failed: x"),
        (
            {"kind": "receipt", "step": 1, "groups": {"mlp": {"trained": 4, "moved": 0.0}}},
            "Receipt of the first step",
            "asked for, and not moved: mlp",
        ),
        ({"kind": "data", "step": 0, "rows": 10, "bad": 3}, "Data rows", "10 rows: 3 bad"),
        ({"kind": "plan", "step": 0, "total": 2**31, "usable": 2**30, "fits": False}, "Memory plan", "planned 2.0 GiB: refused"),
        ({**TRAIN, "step": 4, "warning": "loss 9 is above 3", "applied": False}, "Loss and gradient spikes", "step 4: loss 9 is above 3"),
    ],
)
def test_what_a_guard_said_is_an_alarm_in_its_row_alone(tmp_path: Path, event: dict, guard: str, words: str):
    rows = rows_of(tmp_path, [*CLEAN, event])
    assert rows[guard].said == words and [row.guard for row in rows.values() if row.alarm] == [guard]
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert f'<tr class="bad"><th scope="row">{guard}' in page and words in page


def test_many_are_counted(tmp_path: Path):
    spikes = [{**TRAIN, "step": step, "warning": "high"} for step in range(4, 9)]
    row = rows_of(tmp_path, [*CLEAN, *spikes])["Loss and gradient spikes"]
    assert row.setting == "skip" and row.said.endswith("step 6: high; and 2 more, see events.jsonl")
    assert "  warning, step 4: high" in summary_lines(tmp_path)


def test_a_run_that_says_nothing_has_no_rows(tmp_path: Path):
    assert rows_of(tmp_path, [], {}) == {}
