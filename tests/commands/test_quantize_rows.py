"""unfreeze quantize --calibrate and --measure as commands: what they say and write, and what they refuse."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.compress.conftest import LLAMA, MOE, random_model, sharded
from unfreeze import cli
from unfreeze.checkpoint import open_checkpoint
from unfreeze.commands.demo import TINY_K2
from unfreeze.compress.calibrate.calibration import Calibration
from unfreeze.data import encoded_files, load_tokenizer, validation_batches
from unfreeze.generate.open import open_model

SIZES = {"vocab_size": 1536, "max_position_embeddings": 256}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Random models with tiny-k2's tokenizer, 160 rows and 20 others."""
    root, made = tmp_path_factory.mktemp("models"), {}
    for name, kind, settings in (("llama", "Llama", LLAMA | SIZES), ("moe", "Qwen3Moe", LLAMA | MOE | SIZES)):
        tensors, config = random_model(kind, settings)
        half = {key: value.bfloat16() for key, value in tensors.items()}
        made[name] = sharded(root / name, half, config | {"dtype": "bfloat16"})
        for file in ("tiktoken.model", "tokenizer_config.json", "generation_config.json"):
            shutil.copy(TINY_K2 / file, made[name] / file)
    lines = (TINY_K2 / "yoda_train.jsonl").read_text().splitlines(keepends=True)
    for name, some in (("rows", lines[:160]), ("held", lines[300:320]), ("one", lines[:1])):
        made[name] = root / f"{name}.jsonl"
        made[name].write_text("".join(some))
    return made


def run(capsys, *words) -> tuple[int, str, dict]:
    code = cli.main(["quantize", *map(str, words), "--json"])
    printed = capsys.readouterr()
    return code, printed.err, json.loads(printed.out) if printed.out else {}


def directly(base: Path, other: Path, file: Path) -> tuple[float, float, float]:
    """(perplexity of both, KL) of whole models in memory, in float64 over all logits at once."""
    examples = encoded_files([file], load_tokenizer(base), 256).examples
    one, two = (open_model(open_checkpoint(folder)) for folder in (base, other))
    terms = []
    for batch in validation_batches(examples, 2048):
        where = batch.weights_T > 0
        with torch.no_grad():
            p, q = (model.logits(model.hidden(batch))[where].double().log_softmax(-1) for model in (one, two))
        target = batch.targets_T[where, None]
        terms.append(
            torch.stack([-p.gather(1, target)[:, 0], -q.gather(1, target)[:, 0], (p.exp() * (p - q)).sum(1)])
        )
    original, loss, kl = torch.cat(terms, 1).mean(1).tolist()
    return math.exp(original), math.exp(loss), kl


def test_a_calibrated_model_says_how_far_it_is_from_its_original(folders, tmp_path, capsys):
    out, base = tmp_path / "out", folders["llama"]
    words = [base, "--to", "int4", "--calibrate", folders["rows"], "--measure", folders["held"], "--out", out]
    code, said, result = run(capsys, *words)
    assert code == 0
    own, tallies = result["measured"], result["calibrated"]["groups"]
    original, written, kl = directly(base, out, folders["held"])
    assert own["original"]["perplexity"] == pytest.approx(original, rel=1e-5)
    assert own["written"]["perplexity"] == pytest.approx(written, rel=1e-5)
    assert own["written"]["kl"] == pytest.approx(kl, rel=1e-4)
    assert (own["rows"], own["source"]) == (20, "held.jsonl")
    assert {group: (tally["corrected"], tally["few"]) for group, tally in tallies.items()} == {
        "attention": (8, 0),
        "mlp": (6, 0),
    }
    assert all(tally["error"] < tally["nearest"] for tally in tallies.values())
    plain = tmp_path / "plain"
    assert run(capsys, base, "--to", "int4", "--out", plain)[0] == 0
    _, nearest, nearest_kl = directly(base, plain, folders["held"])
    assert own["nearest"]["perplexity"] == pytest.approx(nearest, rel=1e-5)
    assert own["nearest"]["kl"] == pytest.approx(nearest_kl, rel=1e-4)
    assert own["written"]["kl"] < own["nearest"]["kl"]

    # in output, record and card
    left = 100 * tallies["mlp"]["error"] / tallies["mlp"]["nearest"]
    assert (
        f"Corrected on {result['calibrated']['tokens']:,} tokens: mlp 6 of 6 matrices, {left:.0f} %" in said
    )
    assert f"{original:.4g} before, {written:.4g} in int4 (to nearest {nearest:.4g})" in said
    assert f"KL to the original: {kl:.3g} ± " in said
    record = json.loads((out / "quantize.json").read_text())
    assert record["measured"] == own and record["calibrated"] == result["calibrated"]
    card = (out / "README.md").read_text()
    assert (
        f"| this one | {written:.4g} | {kl:.3g} ± " in card
        and f"| rounded to the nearest | {nearest:.4g} |" in card
    )
    assert "GPTQ, arXiv:2210.17323" in card and str(tmp_path) not in card
    assert not (tmp_path / "out.calibration").exists()

    # again: nothing is done anew, and the same is said
    code, said, again = run(capsys, *words)
    assert code == 0 and again == result
    # and another way to round does not pass for this one
    code, said, _ = run(capsys, base, "--to", "int4", "--out", out)
    assert code == 2 and "holds a quantization with --calibrate" in said


def test_a_folder_damaged_after_the_end_is_corrected_again(folders, tmp_path, capsys):
    out, base = tmp_path / "out", folders["llama"]
    words = [base, "--to", "nvfp4", "--calibrate", folders["rows"], "--out", out]
    code, _, result = run(capsys, *words)
    held, _, name = result["measured"]["source"].partition(" rows held out of ")
    assert code == 0 and name == "rows.jsonl"
    whole = int(encoded_files([folders["rows"]], load_tokenizer(base), 256).examples.lengths_N.sum())
    assert 0 < int(held) < 40 and result["calibrated"]["tokens"] < 0.97 * whole  # what is measured on is not
    file = next(out.glob("*.safetensors"))
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    code, _, again = run(capsys, *words)
    assert code == 0 and file.read_bytes() == whole and again["measured"] == result["measured"]


def test_a_calibration_stopped_before_the_end_is_used_again(folders, tmp_path, capsys, monkeypatch):
    """Ctrl-C while the result is measured: its matrices are not corrected a second time, and records from before
    --method was there are gptq's."""
    out = tmp_path / "out"
    words = [
        folders["moe"],
        "--to",
        "int4",
        "--calibrate",
        folders["rows"],
        "--measure",
        folders["held"],
        "--out",
        out,
    ]

    def stopped(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as within:
        within.setattr("unfreeze.commands.quantize_rows.measured", stopped)
        assert run(capsys, *words)[0] != 0
    assert (tmp_path / "out.calibration").is_dir()
    for file in (out / "quantize.json", tmp_path / "out.calibration/calibration.json"):
        record = json.loads(file.read_text())
        assert record["inputs"].pop("method") == "gptq"  # as of before there were others
        file.write_text(json.dumps(record))
    code, said, _ = run(capsys, *words, "--method", "awq")
    assert code == 2 and "holds a quantization with --method gptq" in said
    monkeypatch.setattr(Calibration, "run", stopped)
    code, _, result = run(capsys, *words)
    assert code == 0 and result["calibrated"]["groups"]["experts"]["corrected"] == 24
    assert not (tmp_path / "out.calibration").exists()


def test_measuring_without_calibrating(folders, tmp_path, capsys):
    out = tmp_path / "out"
    code, said, result = run(
        capsys, folders["moe"], "--to", "fp8", "--measure", folders["held"], "--out", out
    )
    assert code == 0 and result["calibrated"] is None and result["measured"]["nearest"] is None
    original, written, kl = directly(folders["moe"], out, folders["held"])
    assert result["measured"]["written"]["kl"] == pytest.approx(kl, rel=1e-3)
    assert f"{original:.4g} before, {written:.4g} in fp8\n" in said
    assert (
        "Corrected on" not in said and "rounded to nearest with unfreeze" in (out / "README.md").read_text()
    )


@pytest.mark.parametrize(
    "flags, words, next_words",
    [
        (["--calibrate", "one"], "has 1 row; a tenth is to be held out", "--measure FILE"),
        (
            ["--calibrate", "one", "--measure", "held"],
            "calibration tokens; model.layers.0.",
            "more rows with",
        ),
        (["--calibrate", "none.jsonl"], "none.jsonl", "--calibrate"),
        (["--measure", "held", "--columns", "prompt=q"], "held.jsonl", ""),
    ],
)
def test_rows_that_do_not_serve_are_refused_in_one_line(flags, words, next_words, folders, tmp_path, capsys):
    out = tmp_path / "out"
    flags = [folders.get(flag, flag) for flag in flags]
    code, said, _ = run(capsys, folders["llama"], "--to", "int4", "--out", out, *flags)
    message, _, following = said.strip().partition("\n")
    assert code == 2 and words in message and next_words in following, said
    assert not out.exists() and not (tmp_path / "out.calibration").exists()


def test_what_does_not_fit_is_refused_before_any_work(folders, tmp_path, capsys, monkeypatch):
    words = [folders["llama"], "--to", "int4", "--calibrate", folders["rows"], "--out", tmp_path / "out"]
    monkeypatch.setattr("unfreeze.compress.calibrate.layers.memory_of", lambda *_: 10**18)
    code, said, _ = run(capsys, *words)
    assert (
        code == 2 and "memory: one layer and the states of" in said and "fewer rows with --calibrate" in said
    )
    monkeypatch.undo()
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    code, said, _ = run(capsys, *words)
    assert code == 2 and " for 3 files;" in said  # two layers, and the result's
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.calibration").exists()


@pytest.mark.parametrize("flag", ["--calibrate", "--measure"])
def test_an_empty_file_is_refused_without_a_flag_that_quantize_lacks(flag, folders, tmp_path, capsys):
    (empty := tmp_path / "empty.jsonl").touch()
    code, words, _ = run(capsys, folders["llama"], "--to", "int4", "--out", tmp_path / "out", flag, empty)
    assert code == 2 and "empty.jsonl: no rows; the file is empty" in words
    assert "next: give a file with rows" in words and "--data" not in words
    assert not (tmp_path / "out").exists()
