"""unfreeze merge as a user meets it: rows, refusals, what is said, the gain that is kept."""

from __future__ import annotations

import json
import re
import shutil
from typing import Any

import pytest
import torch

import unfreeze
from unfreeze import cli
from unfreeze.commands import merge as command
from unfreeze.commands import merge_rows
from unfreeze.commands.demo import TINY_K2
from unfreeze.compress.rounding import Rounded
from unfreeze.evaluate.gain import Gain
from unfreeze.job import data as job_data
from unfreeze.report.events import LEAKED

pytestmark = pytest.mark.usefixtures("fewer_layers")


@pytest.fixture(scope="module")
def taught_rows(tmp_path_factory):
    """All of them different: copies would count as one."""
    rows = [{"question": f"What is {n}?", "answer": f"The number {n}, it is. Hmm."} for n in range(24)]
    return written(tmp_path_factory.mktemp("data") / "taught.jsonl", rows)


@pytest.fixture(scope="module")
def held_out_run(tmp_path_factory, taught_rows, fewer_layers):
    """A run of twelve steps that holds out a third of its rows."""
    out = tmp_path_factory.mktemp("runs") / "held out"
    words = f"sft --quiet --model {TINY_K2} --steps 12 --tokens-per-step 256 --watch.samples 0 --optimizer.warmup 0 --dtype float32"
    words += " --learning-rate 5e-3 --lora.rank 2 --validation-fraction 0.34"
    assert cli.main([*words.split(), "--data", str(taught_rows), "--out", str(out)]) == 0
    return out


def test_the_gain_is_measured_on_the_rows_that_the_run_held_out(
    held_out_run, unfreeze_json, tmp_path, capsys
):
    events = [json.loads(line) for line in (held_out_run / "events.jsonl").read_text().splitlines()]
    measured = [event["loss"] for event in events if event["kind"] == "eval"]
    result = unfreeze_json("merge", held_out_run, "--to", "bf16", "--out", tmp_path / "out")
    gain = result["gain"]
    # the run's own figures, before and after; and bf16 keeps nearly all
    assert gain["base"] == pytest.approx(measured[0], abs=1e-4)
    assert gain["adapter"] == pytest.approx(measured[-1], abs=1e-4)
    assert (
        gain["share"] == pytest.approx((gain["base"] - gain["merged"]) / (gain["base"] - gain["adapter"]))
        and abs(gain["share"] - 1) < 0.02
    )
    assert result["rounding"]["experts"]["modules"] == 48 and result["modules"] == 64
    record = json.loads((tmp_path / "out/merge.json").read_text())
    assert record["finished"] and record["gain"] == gain and record["settings"]["ranks"] == {"2": 17}
    rows = [row for shard in record["shards"].values() for row in shard["rounding"]]
    assert len(rows) == 64 and all(row["ways"]["BF16"]["cosine"] > 0.9 for row in rows)
    card = (tmp_path / "out/README.md").read_text()
    assert "held out" in card and str(tmp_path) not in card and "of what was learned survives" in card
    # the same command again: nothing is written anew, and the figures are the same
    before = (tmp_path / "out/model.safetensors").stat().st_ino
    assert unfreeze_json("merge", held_out_run, "--to", "bf16", "--out", tmp_path / "out")["gain"] == gain
    assert (tmp_path / "out/model.safetensors").stat().st_ino == before


def test_rows_of_ones_own_and_both_ways_of_scales_are_said(held_out_run, taught_rows, tmp_path, capsys):
    out = tmp_path / "out"
    words = ["merge", str(held_out_run), "--data", str(taught_rows), "--scales", "keep", "--out", str(out)]
    assert cli.main(words) == 0
    first, losses, *rest = [line for line in capsys.readouterr().err.splitlines() if "MiB" not in line]
    assert "of what was learned survives in this format" in first and f"loss on {taught_rows}, " in losses
    assert not [line for line in rest if "kept" in line]  # the table comes when it is asked for
    assert cli.main([*words, "--verbose"]) == 0
    said = capsys.readouterr().err
    assert "worst: model.layers" in said and "refit" in said and "keep" in said and "(written: keep)" in said
    assert "BF16 kept" in said
    assert f"loss on {taught_rows}, " in said and "held-out" not in said
    assert f"warning: the run trained on {taught_rows}" in said and ", noise " in said
    assert f"unfreeze chat {out}" in said
    assert unfreeze.load(out).chat("Hello.", max_new_tokens=2) is not None


def test_without_held_out_rows_it_merges_and_says_what_would_measure(run_dir, held_out_run, tmp_path, capsys):
    assert cli.main(["merge", str(run_dir), "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().err
    assert "Not measured how much survives: this run held out no rows. Give --data HELD_OUT.jsonl.\n" in said
    shutil.copytree(held_out_run / "adapter", tmp_path / "adapter")
    words = ["merge", str(tmp_path / "adapter"), "--base", str(TINY_K2), "--out"]
    assert cli.main([*words, str(tmp_path / "other")]) == 0
    assert "adapter without its run" in capsys.readouterr().err
    assert cli.main([*words, str(tmp_path / "third"), "--no-check"]) == 0
    assert "Not measured how much survives: --no-check.\n" in capsys.readouterr().err


def test_the_best_step_is_named_and_knows_its_run(held_out_run, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(held_out_run, run)
    assert cli.main(["merge", str(run), "--no-check", "--out", str(tmp_path / "last")]) == 0
    assert "the last step" not in capsys.readouterr().err
    shutil.copytree(run / "adapter", run / "adapter-best")
    with (run / "events.jsonl").open("a") as events:
        events.write('{"kind": "eval", "step": 7, "time": 1.0, "loss": 0.57}\n')
    assert cli.main(["report", str(run)]) == 0
    assert re.search(r"Best +step 7 \(0.570\), in adapter-best/", capsys.readouterr().out)
    assert "step 7 (0.570)" in (run / "report.html").read_text()
    assert cli.main(["merge", str(run), "--no-check", "--out", str(tmp_path / "other")]) == 0
    assert (
        "This merges the last step; the held-out loss was lowest at step 7 (0.570). To merge that: unfreeze merge"
        f" {run}/adapter-best\n"
    ) in capsys.readouterr().err
    assert (
        cli.main(["merge", str(run / "adapter-best"), "--to", "bf16", "--out", str(tmp_path / "best")]) == 0
    )
    said = capsys.readouterr().err
    assert "of what was learned survives in this format" in said and "adapter without its run" not in said


def test_what_cannot_be_merged_is_refused(run_dir, tmp_path, capsys):
    for words, says in (
        ([str(TINY_K2)], "has no adapter to merge; it is a whole model"),
        ([str(TINY_K2), "--to", "int4"], "has no adapter to merge; it is a whole model"),  # in INT4
        ([str(tmp_path / "gone")], "is not a folder"),
        ([str(run_dir), "--no-check", "--out", str(unfreeze.TINY_K2)], "is the folder being merged"),
        ([str(run_dir), "--to", "bf16", "--scales", "keep"], "bf16 has no scales"),
        ([str(run_dir), "--to", "bf16", "--scales", "keep-change"], "bf16 has no scales"),
        ([str(run_dir), "--columns", "prompt=q"], "columns needs --data"),
    ):
        assert cli.main(["merge", *words]) == 2
        assert says in capsys.readouterr().err


def test_scales_that_keep_the_change_are_written_and_said(run_dir, unfreeze_json, tmp_path, capsys):
    """The figures of the way that was written, in the result and on the card; a rerun is the same merge."""
    words = ("merge", run_dir, "--no-check", "--out", tmp_path / "out")
    result = unfreeze_json(*words, "--scales", "keep-change")
    experts = result["rounding"]["experts"]
    assert experts["written"] == ["keep-change"] and experts["ways"]["keep-change"]["kept"] == pytest.approx(
        1, abs=0.01
    )
    assert experts["ways"]["keep"]["kept"] < 0.97  # the control arm: the nearest codes
    assert (
        "| experts | " in (card := (tmp_path / "out" / "README.md").read_text())
        and "| keep-change | " in card
    )
    assert cli.main([*map(str, words)]) == 2  # to the nearest is another merge
    capsys.readouterr()


def test_several_processes_are_refused(run_dir, monkeypatch, capsys):
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    assert cli.main(["merge", str(run_dir)]) == 2
    said = capsys.readouterr().err
    assert "merge runs in one process, but torchrun started 2" in said
    assert f"next: without torchrun (also for a run that was split): unfreeze merge {run_dir}" in said


@pytest.mark.parametrize(
    ("merged", "first"),
    [
        (4.9, "2.5 % of what was learned survives in this format"),
        (5.1, "nothing of what was learned survives in this format"),
        (1.1, "97.5 % of what was learned survives in this format"),
    ],
)
def test_a_small_share_is_warned_about_with_the_remedy(merged, first, run_dir, monkeypatch, tmp_path, capsys):
    gain = Gain(base=5.0, adapter=1.0, merged=merged, tokens=100, rows=10)
    monkeypatch.setattr(command, "gain_of", lambda *_: gain)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "Who?", "answer": "I."}\n')
    assert cli.main(["merge", str(run_dir), "--data", str(rows), "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().err
    assert first in said
    warned = merged > 2
    assert ("warning: " in said and "--to bf16, or" in said) == warned
    # what is lost by group, and what bf16 would keep, is said where something is lost
    assert ("the experts lose most (" in said and "bf16 keeps " in said) == warned


def test_the_first_line_has_the_worst_group_and_what_bf16_keeps():
    def ways(kept, noise, plain):
        of = {"size": 1.0, "cosine": kept, "kept": kept, "noise": noise, "anew": 0}
        return {"refit": of, "BF16": {**of, "kept": plain, "noise": 0.01}}

    groups = {
        "experts": {"written": ["refit"], "ways": ways(0.03, 0.5, 0.9996)},
        "attention": {"written": ["BF16"], "ways": ways(1.0, 0.0, 1.0)},
    }
    assert command.loses_most(groups) == "the experts lose most (3 % of their change is kept)"
    mlp = command.loses_most({"mlp": groups["experts"]})
    assert mlp == "the mlp layers lose most (3 % of their change is kept)"
    config = command.Config(run="runs/mine")
    assert command.in_bf16(groups, config) == "bf16 keeps 99.9 %"  # never rounded up to all of it
    assert command.rounding_remedy(groups, config).startswith("--to bf16, or serve")  # no scales to keep
    groups["experts"]["ways"]["keep"] = {**groups["experts"]["ways"]["refit"], "kept": 0.02}
    assert command.rounding_remedy(groups, config).startswith("--to bf16, or --scales keep-change, or serve")
    assert command.in_bf16(groups, config.model_copy(update={"to": "bf16"})) == ""
    noisy = {"experts": {"written": ["refit"], "ways": ways(0.95, 0.6, 1.0)}}
    whole = {"mlp": {"written": ["refit"], "ways": ways(1.0, 0.11, 1.0)}}
    assert command.loses_most(whole) == "largest rounding error: mlp layers (11 % noise)"
    assert "95 % of their change is kept, under noise of 60 %" in command.loses_most(noisy)
    fine = {"experts": {"written": ["refit"], "ways": ways(0.99, 0.05, 1.0)}}
    assert command.loses_most(fine) == ""


def test_data_that_the_run_trained_on_is_known_by_name_and_by_its_bytes(held_out_run, taught_rows, tmp_path):
    copy, other = tmp_path / "copy.jsonl", tmp_path / "other.jsonl"
    shutil.copy(taught_rows, copy)
    other.write_text('{"question": "Who?", "answer": "I."}\n')
    for file, known in ((taught_rows, True), (copy, True), (other, False)):
        assert bool(merge_rows.heldout_rows(held_out_run, str(file)).trained_on) == known
    assert not merge_rows.heldout_rows(held_out_run, "").trained_on  # what it held out


def test_columns_of_ones_own_rows(held_out_run, tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"frage": "Who is there?", "antwort": "Me, I think."}\n')
    words = ["merge", str(held_out_run), "--to", "bf16", "--data", str(rows), "--out", str(tmp_path / "out")]
    assert cli.main(words) == 2
    assert "frage" in capsys.readouterr().err
    assert cli.main([*words, "--columns", "prompt=frage", "completion=antwort"]) == 0
    said = capsys.readouterr().err
    assert f"loss on {rows}, 1 row:" in said and "warning: the run trained" not in said


def test_kept_and_noise_are_along_and_across_delta():
    rounded = Rounded(size=1.3, cosine=0.77)
    delta, across = torch.tensor([1.0, 0.0]), 1.3 * (1 - 0.77**2) ** 0.5
    written = torch.tensor([1.3 * 0.77, across])
    assert rounded.kept == pytest.approx(1.001) and rounded.noise == pytest.approx(across)
    assert rounded.error == pytest.approx(float((written - delta).norm()), abs=1e-6)


def test_an_unfinished_merge_is_called_so(run_dir, tmp_path, capsys):
    out = tmp_path / "out"
    assert cli.main(["merge", str(run_dir), "--no-check", "--out", str(out), "--quiet"]) == 0
    assert cli.main(["inspect", str(out)]) == 0  # control arm
    (out / "config.json").unlink()
    capsys.readouterr()
    assert cli.main(["inspect", str(out)]) == 2
    said = capsys.readouterr().err
    assert "is a merge that was stopped" in said and "give the same merge command again" in said


def test_ctrl_c_says_how_to_go_on(run_dir, monkeypatch, tmp_path, capsys):
    def stopped(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("unfreeze.compress.merge.write_weight", stopped)
    assert cli.main(["merge", str(run_dir), "--no-check", "--out", str(tmp_path / "out")]) == 130
    assert "to continue, run the same command again" in capsys.readouterr().err
    monkeypatch.undo()
    assert cli.main(["merge", str(run_dir), "--no-check", "--out", str(tmp_path / "out"), "--quiet"]) == 0


SHORT = "--steps 4 --tokens-per-step 256 --watch.samples 0 --optimizer.warmup 0 --dtype float32 --learning-rate 5e-3 --lora.rank 1"


def trained(recipe, out, data, *more):
    words = [recipe, "--quiet", "--model", TINY_K2, "--data", data, "--out", out, *SHORT.split(), *more]
    assert cli.main([str(word) for word in words]) == 0
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    return [event["loss"] for event in events if event["kind"] == "eval"]


def written(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("state", ["saved", "without a save"])
def test_rows_held_out_of_windows_are_found_by_their_bytes(
    state, unfreeze_json, tmp_path, monkeypatch, capsys
):
    """As the run drew them. Control arm: drawn from what they say, they are other rows, trained on."""
    for room in (job_data, merge_rows):
        monkeypatch.setattr(room, "MANY_ROWS", 60)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rows = [{"question": f"What is {n}?", "answer": f"{n}, it is. " * (1 + n % 4)} for n in range(90)]
    data, run = written(tmp_path / "rows.jsonl", rows), tmp_path / "run"
    measured = trained("sft", run, data, "--validation-fraction", 0.1)
    if state != "saved":
        shutil.rmtree(run / "state")
    gain = unfreeze_json("merge", run, "--to", "bf16", "--out", tmp_path / "out")["gain"]
    assert [gain["base"], gain["adapter"]] == pytest.approx([measured[0], measured[-1]], abs=1e-4)
    monkeypatch.setattr(merge_rows, "_of_windows", lambda *_: None)
    other = unfreeze_json("merge", run, "--to", "bf16", "--out", tmp_path / "out")["gain"]
    assert abs(other["adapter"] - measured[-1]) > 1e-3


def pair(n):
    return {"prompt": f"What is {n}?", "chosen": f"{n}, it is. Hmm.", "rejected": f"It is the number {n}."}


def label(n):
    return {"prompt": f"What is {n}?", "completion": f"{n}, it is." if n % 2 else "No.", "label": bool(n % 2)}


@pytest.mark.parametrize(
    ("row", "flags", "held"),
    [
        (pair, ["--preference.nll", 0.2], "--validation"),
        (pair, ["--loss", "simpo"], "--validation-fraction"),
        (label, ["--loss", "kto"], "--validation-fraction"),
    ],
)
def test_pairs_and_labels_have_the_loss_of_the_run(row, flags, held, unfreeze_json, tmp_path, capsys):
    data = written(tmp_path / "rows.jsonl", [row(n) for n in range(24)])
    other = written(tmp_path / "other.jsonl", [row(n) for n in range(50, 58)])
    run = tmp_path / "run"
    share = other if held == "--validation" else 0.3
    measured = trained("prefer", run, data, held, share, *flags)
    result = unfreeze_json("merge", run, "--to", "bf16", "--out", tmp_path / "out")
    gain = result["gain"]
    assert [gain["base"], gain["adapter"]] == pytest.approx([measured[0], measured[-1]], abs=1e-5)
    assert gain["loss"].startswith({"--preference.nll": "dpo", "--loss": str(flags[1])}[flags[0]])
    # pairs of one's own, and rows without pairs: their cross entropy
    own = unfreeze_json("merge", run, "--to", "bf16", "--out", tmp_path / "out", "--data", other)["gain"]
    assert own["loss"] == gain["loss"] and own["rows"] == 8
    taught = written(
        tmp_path / "taught.jsonl", [{"prompt": f"{n}?", "completion": "It is."} for n in range(4)]
    )
    own = unfreeze_json("merge", run, "--to", "bf16", "--out", tmp_path / "out", "--data", taught)["gain"]
    assert own["loss"] == "" and own["rows"] == 4


@pytest.mark.parametrize(("kind", "form"), [("sft", None), ("prefer", pair), ("kto", label)])
def test_copies_of_a_row_count_as_one_row(
    kind, form, held_out_run, taught_rows, unfreeze_json, tmp_path, capsys
):
    """Figures, error and number of rows are those of each row once; of one row nothing can be said."""
    run, flags = tmp_path / "run", {"kto": ["--loss", "kto"]}.get(kind, [])
    rows = [json.loads(line) for line in taught_rows.read_text().splitlines()[:6]]
    if form is None:
        run = held_out_run
    else:
        rows = [form(n) for n in range(6)]
        data = written(tmp_path / "rows.jsonl", [form(n) for n in range(24)])
        trained("prefer", run, data, "--validation-fraction", 0.3, *flags)

    def gain(*counts):
        data = written(
            tmp_path / "own.jsonl", [row for row, n in zip(rows, counts, strict=False) for _ in range(n)]
        )
        words = ["merge", run, "--to", "bf16", "--out", tmp_path / "out", "--data", data]
        return unfreeze_json(*words)["gain"]

    once, alone, copies = gain(1, 1, 1, 1, 1, 1), gain(1), gain(50)
    assert copies["rows"] == alone["rows"] == 1 and copies["share"] is alone["share"] is None
    assert copies["error"] == alone["error"] == 0.0
    if kind == "kto":  # its loss compares answers of a micro-batch
        assert gain(3, 3, 3, 3, 3, 3)["rows"] == 6
        return
    assert copies["base"] == pytest.approx(alone["base"], abs=1e-5)
    thrice = gain(3, 3, 3, 3, 3, 3)
    assert thrice["tokens"] == 3 * once["tokens"] and once["rows"] == 6 and once["error"] > 0
    for name in ("base", "adapter", "merged", "error", "rows"):
        assert thrice[name] == pytest.approx(once[name], rel=1e-3)


def test_pairs_of_a_run_that_went_on_from_an_adapter_are_compared_with_that(
    held_out_run, unfreeze_json, tmp_path, capsys
):
    data, run = written(tmp_path / "rows.jsonl", [pair(n) for n in range(24)]), tmp_path / "run"
    begun = tmp_path / "begun"
    shutil.copytree(held_out_run, begun)
    words = ["prefer", "--quiet", "--data", data, "--out", run, "--adapter", begun]
    words += ["--validation-fraction", 0.3, *SHORT.split()[:-2]]
    assert cli.main([str(word) for word in words]) == 0
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    measured = [event["loss"] for event in events if event["kind"] == "eval"]
    gain = unfreeze_json("merge", run, "--to", "bf16", "--out", tmp_path / "out")["gain"]
    assert gain["adapter"] == pytest.approx(measured[-1], abs=1e-5) and gain["base"] > measured[0] + 0.01
    shutil.rmtree(begun)
    result = unfreeze_json("merge", run, "--to", "bf16", "--out", tmp_path / "out")
    assert result["gain"] is None and "the adapter it started from" in result["not_measured"]


def test_a_validation_file_is_read_with_the_columns_of_the_run(unfreeze_json, tmp_path, capsys):
    rows = [{"q": f"What is {n}?", "a": f"{n}, it is."} for n in range(30)]
    data, held = written(tmp_path / "c1.jsonl", rows[:20]), written(tmp_path / "c2.jsonl", rows[20:])
    run, columns = tmp_path / "run", ["--columns", "prompt=q", "completion=a"]
    measured = trained("sft", run, data, "--validation", held, *columns)
    gain = unfreeze_json("merge", run, "--to", "bf16", "--out", tmp_path / "out")["gain"]
    assert [gain["base"], gain["adapter"]] == pytest.approx([measured[0], measured[-1]], abs=1e-4)
    held.unlink()  # what cannot be measured any more is merged nevertheless
    result = unfreeze_json("merge", run, "--to", "bf16", "--out", tmp_path / "out")
    assert result["gain"] is None and "c2.jsonl" in result["not_measured"]
    assert cli.main(["merge", str(run), "--data", str(held), "--out", str(tmp_path / "other")]) == 2


@pytest.mark.parametrize("windows", [False, True])
def test_rows_of_a_validation_file_that_were_trained_on_are_left_out_as_the_run_did(
    windows, unfreeze_json, tmp_path, monkeypatch, capsys
):
    """Control arm: without the run's finding all of the file is measured, and the figures are others."""
    if windows:
        monkeypatch.setattr(job_data, "MANY_ROWS", 60)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rows = [{"question": f"What is {n}?", "answer": f"{n}, it is. " * (1 + n % 4)} for n in range(90)]
    data, held = written(tmp_path / "rows.jsonl", rows[:80]), written(tmp_path / "held.jsonl", rows[70:])
    run = tmp_path / "run"
    measured = trained("sft", run, data, "--validation", held)
    capsys.readouterr()
    assert cli.main(["merge", str(run), "--to", "bf16", "--out", str(tmp_path / "out")]) == 0
    assert f"10 of 20 {LEAKED}: left out" in capsys.readouterr().err
    gain = json.loads((tmp_path / "out" / "merge.json").read_text())["gain"]
    assert gain["rows"] == 10
    assert [gain["base"], gain["adapter"]] == pytest.approx([measured[0], measured[-1]], abs=1e-4)
    (run / "events.jsonl").write_text("")
    other = unfreeze_json("merge", run, "--to", "bf16", "--out", tmp_path / "out")["gain"]
    assert other["rows"] == 20 and abs(other["adapter"] - measured[-1]) > 1e-3


@pytest.mark.parametrize(("kept", "named"), [(0.99, True), (0.12, False)])
def test_bf16_is_a_remedy_only_where_it_keeps_nearly_all(kept, named):
    from types import SimpleNamespace

    from unfreeze.commands.merge import rounding_remedy

    ways = {"refit": {"kept": 0.01}, "BF16": {"kept": kept}}
    groups = {"experts": {"ways": ways, "written": ["refit"]}}
    config: Any = SimpleNamespace(scales="refit", to="int4")
    words = rounding_remedy(groups, config)
    assert ("--to bf16" in words) == named and "serve the adapter" in words
