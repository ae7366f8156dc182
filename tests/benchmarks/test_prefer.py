"""bench prefer: its pairs are Yoda's answer and the model's own; a run's memory stands beside sft's."""

import json

import pytest

from benchmarks.cases import prefer
from benchmarks.harness.rows import read
from unfreeze.commands.demo import TINY_K2
from unfreeze.core.command import Common
from unfreeze.data.rows.judged import judged_from_dict
from unfreeze.evaluate.style import style_obeyed


def test_pairs_are_yodas_answer_and_the_models_own(tmp_path):
    rows = prefer.lines(TINY_K2 / "yoda_train.jsonl")[:8]
    made = [json.loads(line) for line in prefer.pairs_of(rows, tmp_path).read_text().splitlines()]
    assert len(made) == 8
    for pair in made:
        judged_from_dict(pair)
        assert style_obeyed(pair["chosen"]) and not style_obeyed(pair["rejected"])


def test_a_run_that_fails_is_said(tmp_path):
    config = prefer.Config(steps=2)
    with pytest.raises(RuntimeError, match=r"ended with 2.*nowhere\.jsonl"):
        prefer.trained("dpo", config, tmp_path / "nowhere.jsonl", tmp_path)


@pytest.mark.nightly
def test_the_whole_on_few_questions(tmp_path):
    config = prefer.Config(
        append=str(tmp_path / "kept.jsonl"), sides=("sft", "orpo", "sft+dpo"), steps=4, questions=16
    )
    prefer.measure(config, Common(quiet=True))
    rows = {row.side: row.results for row in read(tmp_path / "kept.jsonl")}
    assert rows.keys() == {"sft", "orpo", "sft+dpo", "sft, memory", "orpo, memory"}
    assert all(0 <= rows[side]["facts_after"] <= 100 for side in ("sft", "orpo", "sft+dpo"))
    assert rows["orpo, memory"]["over_sft"] < 1.1
