"""examples/pretrain: the entropy against counts of drawn texts, and small twins of both runs."""

import importlib.util
import json
import math
from pathlib import Path

import numpy as np
import pytest

from unfreeze import cli

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "pretrain"


def example(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def language(monkeypatch):
    """The language of the example, of four letters and texts of 32."""
    module = example("known_entropy")
    monkeypatch.setattr(module, "LETTERS", 4)
    monkeypatch.setattr(module, "LENGTH", 32)
    return module


def test_the_entropy_is_the_mean_surprise_of_drawn_texts():
    language = example("known_entropy")
    p = language.table(0)
    pi = language.stationary(p)
    assert np.allclose(np.einsum("ab,abc->bc", pi, p), pi, atol=1e-12) and pi.sum() == pytest.approx(1)
    drawn = np.array([[ord(c) - 97 for c in text] for text in language.texts(p, pi, 4000, 7)])
    first = np.log(pi[drawn[:, 0], drawn[:, 1]] / pi.sum(axis=1)[drawn[:, 0]])
    later = np.log(p[drawn[:, :-2], drawn[:, 1:-1], drawn[:, 2:]])
    surprise = -(first + later.sum(axis=1)) / (language.LENGTH - 1)
    error = surprise.std() / math.sqrt(len(surprise))
    assert abs(surprise.mean() - language.entropy(p, pi)) < 4 * error < 0.01


def test_the_entropy_of_a_fair_die_and_of_a_certain_sequence(monkeypatch):
    language = example("known_entropy")
    monkeypatch.setattr(language, "LETTERS", 4)
    fair = np.full((4, 4, 4), 0.25)
    assert language.entropy(fair, language.stationary(fair)) == pytest.approx(math.log(4))
    certain = np.zeros((4, 4, 4))
    certain[:, :, 0] = 1
    assert language.entropy(certain, language.stationary(certain)) == pytest.approx(0, abs=1e-12)


def test_a_small_twin_comes_close_to_the_entropy_and_its_trigram_too(
    language, tmp_path, monkeypatch, capsys, read_events
):
    monkeypatch.chdir(tmp_path)
    best = language.make(Path("build/known_entropy"), 4000, 200, 0)
    small = (
        "--shape.hidden-size 64 --shape.intermediate-size 128 --shape.moe-intermediate-size 32"
        " --shape.num-attention-heads 2 --shape.num-experts 4 --steps 150 --tokens-per-step 1024"
        " --watch.validate-every 0 --learning-rate 0.01 --sequence-length 32 --quiet"
    )
    assert cli.main(["pretrain", str(EXAMPLES / "known_entropy.toml"), *small.split()]) == 0
    run = Path("build/known_entropy/run")
    losses = [event["loss"] for event in read_events(run, "eval")]
    assert losses[0] > 4.5  # ln 256 = 5.5; a tied head begins by repeating letters
    assert best - 0.02 < losses[-1] < best + 0.1
    (baseline,) = read_events(run, "baseline")
    trigram = {each["order"]: each["bits_per_byte"] for each in baseline["ngrams"]}[3] * math.log(2)
    assert trigram == pytest.approx(best, abs=0.02)  # the same rows: it is what can be known
    capsys.readouterr()
    code = language.check(run)
    assert code == (losses[-1] - best > language.CLOSE) and f"entropy {best:.4f}" in capsys.readouterr().out


def test_control_arm_the_check_fails_above_the_entropy(language, tmp_path, capsys):
    run = tmp_path / "run"
    run.mkdir()
    (tmp_path / "entropy.json").write_text('{"nats_per_token": 1.0}')
    for loss, code in ((1.029, 0), (1.031, 1)):
        (run / "events.jsonl").write_text(json.dumps({"kind": "eval", "loss": loss}) + "\n")
        assert language.check(run) == code
    assert "more than 0.03 above the entropy" in capsys.readouterr().err


def test_pythons_documentation_and_a_small_twin_of_its_run(tmp_path, monkeypatch, capsys, read_events):
    pydoc = example("pydoc")
    monkeypatch.chdir(tmp_path)
    size = pydoc.make(Path("build/pydoc"), 512)
    assert size > 300_000 and len(Path("build/pydoc/topics.jsonl").read_text().splitlines()) > 50
    small = (
        "--shape.hidden-size 32 --shape.num-hidden-layers 1 --shape.intermediate-size 64 --epochs 0.1 --quiet"
    )
    assert cli.main(["pretrain", str(EXAMPLES / "pydoc.toml"), *small.split()]) == 0
    run = Path("build/pydoc/run")
    (baseline,) = read_events(run, "baseline")
    unigram, trigram, five = (each["bits_per_byte"] for each in baseline["ngrams"])
    assert five < trigram < unigram and 4 < unigram < 5 and 2 < trigram < 3.2
    assert pydoc.check(run) == 1  # ten steps of a tiny model are above it
    assert "not below the trigram" in capsys.readouterr().err
    events = [
        {"kind": "baseline", "ngrams": baseline["ngrams"]},
        {"kind": "eval", "bits_per_byte": trigram - 0.01},
    ]
    (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    assert pydoc.check(run) == 0
