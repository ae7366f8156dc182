"""Real runs of tiny-k2, in make nightly: what learns is called so with every seed, and what doesn't never is.

The settings of Yoda rows and Yoda pairs are those of docs/measured/prefer.md, with a tenth of the rows held out.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from benchmarks.harness.yoda import lines, pairs_of
from unfreeze import cli
from unfreeze.commands.demo import TINY_K2
from unfreeze.report.run import read_run
from unfreeze.report.verdict import judged

pytestmark = pytest.mark.nightly
YODA = TINY_K2 / "yoda_train.jsonl"
ALIKE = ["--dtype", "float32", "--threads", 1, "--watch.samples", 0, "--quiet"]
MEASURED = ["--steps", 80, "--tokens-per-step", 1024, "--sequence-length", 512, "--learning-rate", "1e-3"]
MEASURED += ["--optimizer.weight-decay", 0.3, "--lora.rank", 16, "--validation-fraction", 0.1]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> Path:
    return pairs_of(lines(YODA), tmp_path_factory.mktemp("pairs"))


def told(recipe: str, data: Path, out: Path, *more: object) -> tuple[str, bool]:
    command = [recipe, "--model", TINY_K2, "--data", data, "--out", out, *ALIKE, *more]
    assert cli.main(list(map(str, command))) == 0
    return judged(read_run(out))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_yoda_rows_are_learnt(seed, tmp_path):
    words, learnt = told("sft", YODA, tmp_path / "run", *MEASURED, "--seed", seed)
    assert learnt and " learnt 1," in words and "held-out loss 5." in words, words


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_yoda_pairs_are_learnt_with_nll_and_alone_make_it_ramble(seed, pairs, tmp_path):
    words, learnt = told("prefer", pairs, tmp_path / "nll", *MEASURED, "--seed", seed, "--preference.nll", 5)
    assert learnt and "accuracy 0.50 → 1.00" in words, words
    words, learnt = told("prefer", pairs, tmp_path / "alone", *MEASURED, "--seed", seed)
    assert not learnt and "Both answers became less likely" in words, words


def test_the_demo_is_learnt(tmp_path):
    assert cli.main(["demo", "--out", str(tmp_path / "demo"), "--quiet"]) == 0
    words, learnt = judged(read_run(tmp_path / "demo"))
    assert learnt and "style 0 → 9" in words, words


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_random_preferences_are_not_learnt(seed, tmp_path):
    """Chosen and rejected are answers to other questions, drawn by lot."""
    draw, rows = random.Random(seed), lines(YODA)[:140]
    answers = sorted({row["answer"] for row in rows})  # two equal ones are no pair
    made = []
    for row in rows:
        chosen, rejected = draw.sample(answers, 2)
        made.append({"prompt": row["question"], "chosen": chosen, "rejected": rejected})
    data = tmp_path / "noise.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in made))
    flags = ["--steps", 50, "--tokens-per-step", 512, "--learning-rate", "2e-3", "--validation-fraction", 0.3]
    words, learnt = told("prefer", data, tmp_path / "run", *flags, "--seed", seed)
    assert not learnt and "held-out loss 0.693 → " in words, words
    words, learnt = told("prefer", data, tmp_path / "by heart", *flags[:-2], "--seed", seed)
    assert not learnt and "No pairs were held out" in words, words


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_rate_of_nothing_is_not_learnt(seed, tmp_path):
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in lines(YODA)[:60]))
    flags = ["--steps", 40, "--tokens-per-step", 128, "--learning-rate", "1e-8", "--seed", seed]
    words, learnt = told("sft", data, tmp_path / "run", *flags)
    assert not learnt and "was trained on 60 answers" in words, words


def test_an_overfitted_run_is_called_so(tmp_path):
    """Answers of words drawn by lot, learned by heart: held-out loss falls to their frequency, then rises."""
    draw, rows = random.Random(0), lines(YODA)[:60]
    words = sorted({word for row in rows for word in row["answer"].split()})
    made = [{**row, "answer": " ".join(draw.choices(words, k=6))} for row in rows]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in made))
    flags = [
        "--steps",
        120,
        "--tokens-per-step",
        256,
        "--learning-rate",
        "3e-3",
        "--validation-fraction",
        0.3,
    ]
    said, learnt = told("sft", data, tmp_path / "run", *flags, "--watch.validate-every", 10)
    assert not learnt and " Overfitted: held-out loss rose since its lowest point" in said, said
    assert "Use adapter-best/" in said
