"""Comparing runs: every number worked out by hand from the events, the fields that differ and only those, and
curves that belong to their run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from unfreeze.core.errors import ConfigError
from unfreeze.report import compare, pictures, run
from unfreeze.report.compare import as_dict, caution, differences, read_runs, result, run_names


def made(folder: Path, losses: list[float], config: dict, evals: list[tuple[int, float]] = ()) -> Path:
    folder.mkdir(parents=True)
    train = [
        {
            "kind": "train",
            "step": step,
            "time": 60.0 + step,
            "loss": loss,
            "tokens": 1000,
            "seconds": 2.0,
            "peak_bytes": 2**20 * step,
        }
        | {"learning_rate": 1e-3, "grad_norm": 1.0 / step}
        for step, loss in enumerate(losses, start=1)
    ]
    held_out = [
        {"kind": "eval", "step": step, "time": 60.0 + step, "loss": loss, "style": 99.0}
        for step, loss in evals
    ]
    lines = [*train, *held_out, {"kind": "end", "step": len(losses), "reason": "done"}]
    (folder / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "resolved_config.json").write_text(
        json.dumps({"model": "m", "data": "d", "out": str(folder), **config})
    )
    return folder


@pytest.fixture
def two(tmp_path: Path) -> list[Path]:
    a = made(
        tmp_path / "a",
        [3.0, 2.0, 1.0],
        {"seed": 0, "lora": {"rank": 8, "alpha": 16}},
        evals=[(1, 2.5), (2, 1.75), (3, 1.9)],
    )
    b = made(
        tmp_path / "b",
        [3.0, 1.5],
        {"seed": 0, "lora": {"rank": 2, "alpha": 16}, "clip": 1.0, "effective": {"given": ["clip"]}},
    )
    return [a, b]


def test_results_are_those_of_the_events(two: list[Path]):
    first, second = (result(run, name) for run, name in zip(read_runs(two), "ab", strict=True))
    assert (first.steps, first.loss_last, first.best_validation, first.best_validation_step) == (
        3,
        1.0,
        1.75,
        2,
    )
    assert (first.tokens_per_second, first.peak_bytes, first.seconds, first.state) == (
        500.0,
        3 * 2**20,
        6.0,
        "done",
    )
    assert (
        second.best_validation is None
        and second.cells()[1] == "finished"
        and second.cells()[4] == "–"
        and second.cells()[3] == "1.5000"
    )


def test_only_what_differs_is_a_difference(two: list[Path]):
    # out names the run itself, seed and alpha are the same
    assert differences(read_runs(two)) == {"lora.rank": ["8", "2"], "optimizer.clip": ["–", "1.0"]}
    assert caution(read_runs(two)) == ""


def test_control_arm_a_comparison_by_the_first_runs_fields_would_miss_one(
    two: list[Path], monkeypatch: pytest.MonkeyPatch
):
    whole = compare.flatten
    known = whole(read_runs(two)[0].config)
    monkeypatch.setattr(
        compare,
        "flatten",
        lambda config: {field: value for field, value in whole(config).items() if field in known},
    )
    assert "optimizer.clip" not in differences(read_runs(two))


def test_losses_over_other_data_carry_a_caution(tmp_path: Path):
    runs = read_runs([made(tmp_path / "a", [1.0], {}), made(tmp_path / "b", [2.0], {"data": "other"})])
    assert caution(runs) == "Different data: the losses may not be comparable."
    assert caution(runs) in compare.comparison_page(runs) and as_dict(runs)["caution"] == caution(runs)


def test_runs_of_one_name_are_told_apart(tmp_path: Path):
    runs = read_runs([made(tmp_path / parent / "x", [1.0], {}) for parent in ("one", "two")])
    assert run_names(runs) == ["one/x", "two/x"]


def test_each_line_stands_in_its_runs_colour(two: list[Path]):
    """The run with three steps draws a path of three points in hue 0, the one with two steps two points in
    hue 1."""
    page = compare.comparison_page(read_runs(two))
    svg = next(part for part in re.findall(r"<svg.*?</svg>", page, re.DOTALL) if "Training loss" in part)
    drawn = {
        int(hue): path.count("L") + 1
        for path, hue in re.findall(r'<path d="([^"]+)"[^>]*var\(--hue-(\d)\)', svg)
    }
    assert drawn == {0: 3, 1: 2}
    assert re.findall(r'<i class="hue-(\d)"></i>(\w)<', page) == [("0", "a"), ("1", "b")]
    assert (
        "Last: a 1, b 1.5." in page
        and page.count("<script") == 1
        and not re.search(r'(src|href)="http', page)
    )


def test_the_seventh_run_is_dashed():
    svg = pictures.lines([([1, 2], [float(i), 2.0]) for i in range(8)], "alt", (300, 200))
    assert len(re.findall(r"stroke-dasharray: [\d.]+,", svg)) == 2
    assert re.findall(r"stroke: (var\(--hue-\d\))", svg) == [*pictures.HUES, *pictures.HUES[:2]]
    assert "base64" not in svg  # no bitmap: lines stay sharp


@pytest.mark.parametrize(
    "folders, words",
    [(["a"], "1 run given: give 2 to 12"), (["a", "a"], "is given twice"), (["a"] * 13, "13 runs")],
)
def test_what_cannot_be_compared_is_refused(tmp_path: Path, folders: list[str], words: str):
    made(tmp_path / "a", [1.0], {})
    with pytest.raises(ConfigError, match=words):
        read_runs([tmp_path / folder for folder in folders])


def test_a_run_without_steps_is_said_and_not_drawn(tmp_path: Path):
    runs = read_runs([made(tmp_path / name, [], {}) for name in "ab"])
    page = compare.comparison_page(runs)
    assert (
        "No run has made a training step" in page
        and "<svg" not in page
        and "The configurations are the same." in page
    )


@pytest.mark.parametrize(
    "first, second, validation, ranked_by",
    [
        ("9:aa", "9:bb", "", None),
        ("9:aa", "9:aa", "", "best_validation"),  # control arm: the same bytes under another name
        ("9:aa", "9:bb", "v.jsonl", "best_validation"),  # held-out loss of one file
    ],
)
def test_runs_on_other_data_are_not_ranked(tmp_path: Path, first, second, validation, ranked_by):
    config = {"validation": validation}
    a = {**config, "data": "a", "effective": {"contents": [first]}}
    b = {**config, "data": "b", "effective": {"contents": [second]}}
    runs = read_runs([made(tmp_path / "a", [2.0], a, [(1, 2.0)]), made(tmp_path / "b", [1.0], b, [(1, 1.0)])])
    told = as_dict(runs)
    assert told["ranked_by"] == ranked_by and "effective.contents" not in told["differences"]
    assert [run.name for run in compare.ranked(runs)] == (["b", "a"] if ranked_by else ["a", "b"])
    assert ("Different data" in told["caution"]) == (first != second)
    assert ("Not ranked: different data" in compare.comparison_page(runs)) == (ranked_by is None)


@pytest.mark.parametrize("other, ranked", [("b", False), ("a", True), ("", True)])
def test_losses_on_other_held_out_rows_are_not_ranked(tmp_path: Path, other, ranked):
    """Of an earlier version, which says no fingerprint, the file decides as before."""
    for name, told in (("first", "a"), ("second", other)):
        path = made(tmp_path / name, [1.0], {"validation": "v.jsonl"}, [(1, 1.0)]) / "events.jsonl"
        events = [json.loads(line) for line in path.read_text().splitlines()]
        events = [e | ({"fingerprint": told} if told and e["kind"] == "eval" else {}) for e in events]
        path.write_text("".join(json.dumps(event) + "\n" for event in events))
    found = compare.ranking(read_runs([tmp_path / "first", tmp_path / "second"]))
    assert found.field == ("best_validation" if ranked else "")
    assert ranked or found.words == "not ranked: different held-out rows"


def test_answers_stand_side_by_side_those_asked_of_all_first(tmp_path: Path):
    asked = {"a": {"Who?": "Me <b>.", "Where?": "Here."}, "b": {"When?": "Now.", "Who?": "I, it is."}}
    folders = []
    for name, answers in asked.items():
        folder = tmp_path / name
        folder.mkdir()
        samples = [
            {
                "kind": "sample",
                "step": step,
                "when": when,
                "index": i,
                "prompt": prompt,
                "text": text if step else "?",
            }
            for i, (prompt, text) in enumerate(answers.items())
            for step, when in ((0, "before"), (3, "after"))
        ]
        (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in samples))
        folders.append(folder)
    runs = compare.read_runs(folders)
    assert compare.answers(runs) == [
        ("Who?", ["Me <b>.", "I, it is."]),
        ("Where?", ["Here.", None]),
        ("When?", [None, "Now."]),
    ]
    source = compare.comparison_page(runs)
    assert "Me &lt;b&gt;." in source and source.count("not asked") == 2
    assert (
        source.index("<h2>Results</h2>") < source.index("<h2>Answers</h2>") < source.index("<h2>Curves</h2>")
    )


def test_losses_of_other_kinds_are_not_ranked(tmp_path: Path):
    """dpo's loss is a mean over pairs, with another beta another one; a cross entropy is of tokens."""
    kinds = [{"recipe": "sft"}, {"recipe": "prefer", "loss": "dpo", "beta": 0.1}]
    kinds += [{**kinds[1], "beta": 0.5}, {**kinds[1], "rank": 4}]
    runs = []
    for i, config in enumerate(kinds):
        folder = tmp_path / str(i)
        folder.mkdir()
        (folder / "events.jsonl").write_text('{"kind": "train", "step": 1, "loss": 1.0}\n')
        (folder / "resolved_config.json").write_text(json.dumps(config))
        runs.append(run.read_run(folder))
    for other in (runs[0], runs[2]):
        assert compare.ranking([other, runs[1]]) == ("", "not ranked: different loss functions")
        assert (
            compare.caution([other, runs[1]]) == "Different loss functions: the losses may not be comparable."
        )
    assert compare.ranking([runs[3], runs[1]]).field == "loss_last"


def test_runs_with_rewards_are_ranked_by_their_held_out_reward(tmp_path: Path):
    """Their held-out loss is minus the reward."""
    config = {"recipe": "grpo", "reward": "my.py"}
    low = made(tmp_path / "low", [0.1], config, evals=[(0, -0.2), (1, -0.25)])
    high = made(tmp_path / "high", [0.3], config, evals=[(0, -0.2), (1, -0.75)])
    runs = read_runs([low, high])
    assert compare.ranking(runs).words == "best first by best held-out reward"
    assert [each.path.name for each in compare.ranked(runs)] == ["high", "low"]
    assert result(runs[1], "high").cells()[4] == "reward 0.7500 (step 1)"
    # other environments have other rewards
    made(tmp_path / "other", [0.3], {**config, "env": "my.py:Adder"}, evals=[(0, -0.2)])
    assert "different loss functions" in compare.ranking(read_runs([low, tmp_path / "other"])).words
