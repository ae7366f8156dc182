"""The guards section: each row is worked out from a run whose events say what the guard saw."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from unfreeze.report import guards
from unfreeze.report.guards import GuardRow, guard_rows
from unfreeze.report.html import summary_lines, write_report
from unfreeze.report.run import read_run

ROOT = Path(__file__).resolve().parents[2]
TRAIN = {
    "kind": "train",
    "time": 1.0,
    "loss": 1.0,
    "tokens": 100,
    "seconds": 1.0,
    "supervised_tokens": 50,
    "expert_load": {"1": [3, 3]},
}
CLEAN = [
    {"kind": "plan", "step": 0, "total": 2**20, "usable": 2**30, "fits": True},
    {"kind": "data", "step": 0, "rows": 10, "bad": 0, "dropped": 1, "truncated": 2},
    {
        "kind": "receipt",
        "step": 1,
        "groups": {
            "attention": {"parameters": 8, "trained": 8, "moved": 0.1},
            "router": {"trained": 0, "moved": 0.0},
        },
    },
    {
        "kind": "gap",
        "step": 0,
        "when": "before",
        "logprob_gap_mean": 1e-6,
        "logprob_gap_max": 2e-6,
        "logprob_gap_tokens": 64,
    },
    *({**TRAIN, "step": step, "grad_norm": norm} for step, norm in ((1, 3.0), (2, 0.5), (3, 0.75))),
]
CONFIG = {
    "clip": 1.0,
    "on_bad_row": "error",
    "truncation": "tail",
    "track": ["wandb"],
    "on_spike": "skip",
    "dtype": "float32",
}


def rows_of(folder: Path, events: list[dict], config: dict = CONFIG) -> dict[str, GuardRow]:
    folder.mkdir(exist_ok=True)
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (folder / "resolved_config.json").write_text(json.dumps(config))
    return {row.guard: row for row in guard_rows(read_run(folder))}


def test_a_clean_run_shows_every_guard_and_nothing_to_look_at(tmp_path: Path):
    rows = rows_of(tmp_path, CLEAN)
    assert {name: (row.setting, row.result) for name, row in rows.items()} == {
        "Memory plan": ("1.0 GiB usable", "planned 1.0 MiB"),
        "Data rows": (
            "data.on_bad_row error, data.truncation tail",
            "10 rows: 0 bad, 1 dropped, 2 truncated",
        ),
        "Receipt of the first step": ("always", "every matrix that got a gradient moved: attention"),
        "Loss and gradients finite": ("always", "finite in 3 steps"),
        "Loss and gradient spikes": ("skip", "none in 3 steps"),
        "Gradient norm clipped": ("at 1", "in 1 of 3 steps, largest 3"),
        "Supervised tokens": ("always", "at least 50 in every step"),
        "Expert load": (
            "always",
            (
                "no expert without tokens or with most of them; max violation 0.00 at step 1, 0.00 at"
                " step 3, mean of the layers"
            ),
        ),
        "Sampler against trainer": (
            "0.0001 nats at a token (float32)",
            "mean 1e-06, at the worst token 2e-06 nats; measured once",
        ),
        "Trackers": ("wandb", "no failure"),
    }
    assert {row.state for row in rows.values()} == {"ok"}
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert re.findall(r'<li class="(\w+)"><i></i>([^<]+)</li>', page) == [("ok", name) for name in rows]
    assert "Guards to look at" not in page and all(row.result in page for row in rows.values())


GAP = {"kind": "gap", "step": 4, "when": "after"}
SAID = [  # one event more, the guard that speaks of it, its state, what it says
    (
        {"kind": "train", "step": 4, "loss": None, "grad_norm": None, "error": "the loss is nan"},
        "Loss and gradients finite",
        "fault",
        "step 4: the loss is nan",
    ),
    (
        {**TRAIN, "step": 4, "grad_norm": None},
        "Loss and gradients finite",
        "fault",
        "step 4: gradient norm not finite",
    ),
    (
        {**GAP, "logprob_gap_max": 0.3, "warning": "the sampler and the trainer differ by 0.3 nats"},
        "Sampler against trainer",
        "fault",
        "step 4: the sampler and the trainer differ by 0.3 nats",
    ),
    (
        {**GAP, "logprob_gap_max": 2e-4},
        "Sampler against trainer",
        "fault",
        "at the worst token 0.0002 nats; measured 2 times",
    ),
    (
        {**TRAIN, "step": 4, "supervised_tokens": 0},
        "Supervised tokens",
        "look",
        "none in 1 of 4 steps, first step 4",
    ),
    (
        {"kind": "warning", "step": 4, "message": "expert load: layer 1: 1 of 2 …"},
        "Expert load",
        "look",
        "step 4: layer 1: 1 of 2 …",
    ),
    (
        {**TRAIN, "step": 4, "expert_load": {"1": [40, 0]}},
        "Expert load",
        "look",
        "layer 1: 1 time an expert got no token in a step where 10 or more were due (expert 1)",
    ),
    (
        {"kind": "warning", "step": 4, "message": "track wandb failed: x"},
        "Trackers",
        "look",
        "step 4: track wandb failed: x",
    ),
    (
        {"kind": "receipt", "step": 1, "groups": {"mlp": {"trained": 4, "moved": 0.0}}},
        "Receipt of the first step",
        "fault",
        "requested but did not move: mlp",
    ),
    ({"kind": "data", "step": 0, "rows": 10, "bad": 3}, "Data rows", "look", "10 rows: 3 bad"),
    (
        {"kind": "plan", "step": 0, "total": 2**31, "usable": 2**30, "fits": False},
        "Memory plan",
        "fault",
        "planned 2.0 GiB: refused",
    ),
    (
        {**TRAIN, "step": 4, "peak_bytes": 2**31},
        "Memory plan",
        "look",
        "planned 1.0 MiB, peak of all 2.0 GiB",
    ),
    (
        {**TRAIN, "step": 4, "warning": "loss 9 is above 3", "applied": False},
        "Loss and gradient spikes",
        "look",
        "step 4: loss 9 is above 3",
    ),
]


@pytest.mark.parametrize("event, guard, state, words", SAID)
def test_what_a_guard_said_marks_its_row_alone(
    tmp_path: Path, event: dict, guard: str, state: str, words: str
):
    rows = rows_of(tmp_path, [*CLEAN, event])
    assert words in rows[guard].result and {
        name: row.state for name, row in rows.items() if row.state != "ok"
    } == {guard: state}
    page = write_report(tmp_path).read_text(encoding="utf-8")
    mark = {"look": "look", "fault": "bad"}[state]
    assert (
        f'<tr class="{mark}"><th scope="row">{guard}</th><td data-head="state">{state}</td>' in page
        and words in page
    )
    open_at_first = re.sub(r"<details>.*?</details>", "", page, flags=re.DOTALL)
    assert words in open_at_first and not any(
        row.result in open_at_first for row in rows.values() if row.state == "ok"
    )
    assert re.findall(r'<li class="(?!ok)(\w+)"><i></i>([^<]+)</li>', page) == [(state, f"{guard}: {state}")]


@pytest.mark.parametrize(
    "losses, norms, state",
    [
        ([3] * 20 + [2] * 20 + [1] * 10, [9.0] * 50, "ok"),  # all clipped, and the loss falls: a fact
        ([3] * 50, [9.0] * 50, "look"),
        ([3] * 50, [9.0] * 25 + [0.5] * 25, "ok"),  # half of them
        ([3] * 50, [0.5] * 2 + [9.0] * 48, "look"),  # warm-up does not count: rates rise to step 3
        ([3] * 41, [9.0] * 41, "ok"),  # 39 steps behind the warm-up: too few to say that nothing is gained
    ],
)
def test_clipping_is_a_fact_unless_nearly_all_is_cut_and_nothing_gained(tmp_path: Path, losses, norms, state):
    steps = [
        {**TRAIN, "step": step, "loss": loss, "grad_norm": norm, "learning_rate": 1e-4 * min(step, 3)}
        for step, (loss, norm) in enumerate(zip(losses, norms, strict=True), start=1)
    ]
    row = rows_of(tmp_path, steps)["Gradient norm clipped"]
    count = sum(norm > 1 for norm in norms)
    said = f"in {count} of {len(norms)} steps, largest 9"
    look = f"{said}: nearly every update is cut, and the loss did not fall"
    assert (row.state, row.result) == (state, look if state == "look" else said)


@pytest.mark.parametrize("shares, state", [([0.0, 0.15, 0.0, 0.21], "ok"), ([0.0, 0.7, 0.0, 0.1], "look")])
def test_clipped_tokens_are_looked_at_above_a_fifth_of_the_updates_that_can_clip(tmp_path, shares, state):
    """The first update of a rollout has ratios of 1."""
    steps = [{**TRAIN, "step": step, "clip_fraction": share} for step, share in enumerate(shares, start=1)]
    row = rows_of(tmp_path, steps)["Clipped tokens"]
    assert row.state == state and row.result == f"{sum(shares) / 2:.0%} where any were clipped"
    assert "Clipped tokens" not in rows_of(tmp_path / "none", [{**TRAIN, "step": 1, "clip_fraction": 0.0}])


@pytest.mark.parametrize(
    "mean, worst, state", [(0.008, 0.3, "ok"), (0.03, 0.3, "look"), (0.002, 2.0, "look")]
)
def test_in_bfloat16_the_gap_is_looked_at_beyond_what_rounding_makes(
    tmp_path: Path, mean: float, worst: float, state: str
):
    event = {**GAP, "logprob_gap_mean": mean, "logprob_gap_max": worst}
    row = rows_of(tmp_path, [event], {"dtype": "bfloat16"})["Sampler against trainer"]
    assert row[:4] == (
        "Sampler against trainer",
        state,
        "mean 0.024, 1 nats at a token (bfloat16)",
        f"mean {mean:g}, at the worst token {worst:g} nats; measured once",
    )


def test_the_limits_of_the_gap_are_those_it_is_measured_with(tmp_path: Path):
    from unfreeze.evaluate.gap import TOLERANCE

    assert guards.GAP_FLOAT32 == TOLERANCE
    means, token = guards.ROUNDING_BFLOAT16
    assert all(limit >= 3 * made for limit, made in zip(guards.GAP_BFLOAT16, (means, token), strict=True))
    assert (
        f"a mean of 0.0005 to {means:g}, and sometimes {token:g}"
        in (ROOT / "docs" / "reference" / "events.md").read_text()
    )


def test_many_are_counted(tmp_path: Path):
    spikes = [{**TRAIN, "step": step, "warning": "high"} for step in range(4, 9)]
    row = rows_of(tmp_path, [*CLEAN, *spikes])["Loss and gradient spikes"]
    assert row.setting == "skip" and row.result.endswith("step 6: high; and 2 more, see events.jsonl")
    assert "  warning, step 4: high" in summary_lines(tmp_path)


def test_a_run_that_says_nothing_has_no_rows(tmp_path: Path):
    assert rows_of(tmp_path, [], {}) == {}


def test_whatever_a_guard_asks_to_look_at_it_says_what_to_do(tmp_path: Path):
    """Each name of a row has a remedy; a row that is ok has none."""
    source = Path(guards.__file__).read_text(encoding="utf-8")
    named = set(re.findall(r'GuardRow\(\s*"([^"]+)"', source))
    assert named == set(guards.REMEDY)
    rows_of(tmp_path / "r", CLEAN)
    assert not any(row.remedy for row in guard_rows(read_run(tmp_path / "r")))
    assert not any("report.html says what to do" in line for line in summary_lines(tmp_path / "r"))
    clipped = [{**TRAIN, "step": step, "loss": 3.0, "grad_norm": 9.0} for step in range(4, 60)]
    rows = rows_of(tmp_path / "clipped", [*CLEAN, *clipped])
    assert rows["Gradient norm clipped"].remedy == guards.REMEDY["Gradient norm clipped"]
    page = write_report(tmp_path / "clipped").read_text()
    assert rows["Gradient norm clipped"].remedy in page
    assert any(
        "Gradient norm clipped (look): report.html" in line for line in summary_lines(tmp_path / "clipped")
    )
