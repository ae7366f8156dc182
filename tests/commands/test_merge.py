"""unfreeze merge as a user meets it: rows, refusals, what is said, the gain that is kept."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

import unfreeze
from unfreeze import cli
from unfreeze.commands import merge as command
from unfreeze.commands import merge_rows
from unfreeze.commands.demo import TINY_K2
from unfreeze.compress.rounding import Rounded
from unfreeze.evaluate.gain import Gain


@pytest.fixture(scope="module")
def held_out_run(tmp_path_factory, chat_rows):
    """A run of twelve steps that holds out a third of its rows."""
    out = tmp_path_factory.mktemp("runs") / "held out"
    words = f"sft --quiet --model {TINY_K2} --steps 12 --tokens-per-step 256 --samples 0 --warmup 0 --dtype float32"
    words += " --learning-rate 5e-3 --lora.rank 2 --validation-fraction 0.34"
    assert cli.main([*words.split(), "--data", str(chat_rows), "--out", str(out)]) == 0
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
    assert result["rounding"]["experts"]["modules"] == 144 and result["modules"] == 176
    record = json.loads((tmp_path / "out/merge.json").read_text())
    assert record["finished"] and record["gain"] == gain and record["settings"]["ranks"] == {"2": 35}
    rows = [row for shard in record["shards"].values() for row in shard["rounding"]]
    assert len(rows) == 176 and all(row["ways"]["BF16"]["cosine"] > 0.9 for row in rows)
    card = (tmp_path / "out/README.md").read_text()
    assert "held out" in card and str(tmp_path) not in card and "of the gain kept" in card
    # the same command again: nothing is written anew, and the figures are the same
    before = (tmp_path / "out/model.safetensors").stat().st_ino
    assert unfreeze_json("merge", held_out_run, "--to", "bf16", "--out", tmp_path / "out")["gain"] == gain
    assert (tmp_path / "out/model.safetensors").stat().st_ino == before


def test_rows_of_ones_own_and_both_ways_of_scales_are_said(held_out_run, chat_rows, tmp_path, capsys):
    out = tmp_path / "out"
    words = ["merge", str(held_out_run), "--data", str(chat_rows), "--scales", "keep", "--out", str(out)]
    assert cli.main(words) == 0
    said = capsys.readouterr().err
    assert "worst: model.layers" in said and "refit" in said and "keep" in said and "(written: keep)" in said
    assert f"loss on {chat_rows}, " in said and "held-out" not in said
    assert f"warning: the run trained on {chat_rows}" in said and ", noise " in said
    assert f"unfreeze chat {out}" in said
    assert unfreeze.load(out).chat("Hello.", max_new_tokens=2) is not None


def test_without_held_out_rows_it_merges_and_says_what_would_measure(run_dir, held_out_run, tmp_path, capsys):
    assert cli.main(["merge", str(run_dir), "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().err
    assert "was not measured" in said and "held out no rows" in said and "--data FILE" in said
    shutil.copytree(held_out_run / "adapter", tmp_path / "adapter")
    words = ["merge", str(tmp_path / "adapter"), "--base", str(TINY_K2), "--out"]
    assert cli.main([*words, str(tmp_path / "other")]) == 0
    assert "adapter without its run" in capsys.readouterr().err
    assert cli.main([*words, str(tmp_path / "third"), "--no-check"]) == 0
    assert "was not measured: --no-check" in capsys.readouterr().err


def test_what_cannot_be_merged_is_refused(run_dir, tmp_path, capsys):
    for words, says in (
        ([str(TINY_K2)], "has no adapter to merge"),
        ([str(tmp_path / "gone")], "is not a folder"),
        ([str(run_dir), "--no-check", "--out", str(TINY_K2)], "is what is merged"),
        ([str(run_dir), "--to", "bf16", "--scales", "keep"], "bf16 has no scales"),
        ([str(run_dir), "--columns", "prompt=q"], "columns are those of --data"),
    ):
        assert cli.main(["merge", *words]) == 2
        assert says in capsys.readouterr().err


@pytest.mark.parametrize(("merged", "warned"), [(4.9, True), (1.1, False)])
def test_a_small_share_is_warned_about_with_the_remedy(
    merged, warned, run_dir, monkeypatch, tmp_path, capsys
):
    gain = Gain(base=5.0, adapter=1.0, merged=merged, tokens=100, rows=10)
    monkeypatch.setattr(command, "gain_of", lambda *_: gain)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "Who?", "answer": "I."}\n')
    assert cli.main(["merge", str(run_dir), "--data", str(rows), "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().err
    assert f"{100 * gain.share:.1f} % of the gain kept" in said
    assert ("warning: rounding took most" in said and "--to bf16" in said) == warned


def test_data_that_the_run_trained_on_is_known_by_name_and_by_its_bytes(held_out_run, chat_rows, tmp_path):
    copy, other = tmp_path / "copy.jsonl", tmp_path / "other.jsonl"
    shutil.copy(chat_rows, copy)
    other.write_text('{"question": "Who?", "answer": "I."}\n')
    for file, known in ((chat_rows, True), (copy, True), (other, False)):
        assert bool(merge_rows.rows_of(held_out_run, str(file)).trained_on) == known
    assert not merge_rows.rows_of(held_out_run, "").trained_on  # what it held out


def test_columns_of_ones_own_rows(held_out_run, tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"frage": "Who is there?", "antwort": "Me, I think."}\n' * 4)
    words = ["merge", str(held_out_run), "--to", "bf16", "--data", str(rows), "--out", str(tmp_path / "out")]
    assert cli.main(words) == 2
    assert "frage" in capsys.readouterr().err
    assert cli.main([*words, "--columns", "prompt=frage", "completion=antwort"]) == 0
    said = capsys.readouterr().err
    assert f"loss on {rows}, 4 rows" in said and "warning: the run trained" not in said


def test_a_share_above_one_is_explained():
    gain = Gain(base=5.0, adapter=1.0, merged=0.5, tokens=100, rows=10)
    assert "112.5 % of the gain kept: more than the adapter gained" in gain.words()
    assert Gain(base=5.0, adapter=1.0, merged=0.99, tokens=100, rows=10).words().endswith("gain kept")


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
    assert "is a merge that was stopped" in said and "give the command of the merge again" in said


def test_an_adapter_that_is_no_better_than_its_base_has_no_gain():
    gain = Gain(base=1.0, adapter=1.2, merged=1.1, tokens=100, rows=10)
    assert gain.share is None and "no gain to keep" in gain.words()


def test_ctrl_c_says_how_to_go_on(run_dir, monkeypatch, tmp_path, capsys):
    def stopped(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("unfreeze.compress.merge.write_weight", stopped)
    assert cli.main(["merge", str(run_dir), "--no-check", "--out", str(tmp_path / "out")]) == 130
    assert "give the same command again" in capsys.readouterr().err
    monkeypatch.undo()
    assert cli.main(["merge", str(run_dir), "--no-check", "--out", str(tmp_path / "out"), "--quiet"]) == 0
