"""Planted texts of evaluation files are found, all of them, and nothing else is."""

from __future__ import annotations

import json
import random

import pytest

from tests.data.clean.planted import HAN, WORDS, drawn, text_of
from unfreeze.config.clean import Contamination
from unfreeze.core.errors import DataError
from unfreeze.data.clean.contamination import Evaluation
from unfreeze.data.clean.document import Document

LANGUAGES = pytest.mark.parametrize("chinese", [False, True], ids=["english", "chinese"])


def corpus(chinese, tmp_path, lengths=(9, 13, 14, 40)):
    """(rows, numbers of those that hold a text of the evaluation file, the file)."""
    rng, vocabulary = random.Random(3), HAN if chinese else WORDS
    lengths = [2 * length for length in lengths] if chinese else lengths
    questions = [drawn(rng, vocabulary, lengths[i % len(lengths)]) for i in range(100)]
    file = tmp_path / "eval.jsonl"
    file.write_text(
        "".join(
            json.dumps({"question": text_of(q, chinese), "choices": ["yes", "no"], "answer": 1}) + "\n"
            for q in questions
        )
    )
    rows, planted = [], set()
    for i in range(400):
        tokens = drawn(rng, vocabulary, 200)
        if i % 4 == 0:
            at = rng.randrange(200)
            question = questions[i // 4]
            if len(question) > (20 if chinese else 13):  # a part of a long one is enough
                begin = rng.randrange(len(question) - (19 if chinese else 12))
                question = question[begin : begin + (20 if chinese else 13)]
            tokens = tokens[:at] + question + tokens[at:]
            planted.add(i)
        text = text_of(tokens, chinese)
        rows.append({"text": text.upper() if i % 8 == 0 else text, "id": i})
    return rows, planted, file


@LANGUAGES
def test_every_planted_text_is_dropped_and_no_other(cleaned, tmp_path, chinese):
    rows, planted, file = corpus(chinese, tmp_path)
    off = {"near": False, "exact": False}
    ledger, kept = cleaned(rows, contamination={"against": [str(file)]}, duplicates=off)
    assert {row["id"] for row in rows} - {row["id"] for row in kept} == planted
    assert ledger["dropped"]["contamination.ngram"]["documents"] == 100
    assert "eval.jsonl row 1:" in ledger["dropped"]["contamination.ngram"]["examples"][0]["why"]
    assert ledger["evaluation"] == {"texts": 100, "too_short": 200}
    # control arm: without the file nothing is dropped
    assert len(cleaned(rows, out="control", duplicates=off)[1]) == 400


def test_control_arm_n_grams_by_white_space_miss_chinese(cleaned, tmp_path, monkeypatch):
    from unfreeze.data.clean import document

    rows, _, file = corpus(True, tmp_path)
    monkeypatch.setattr(document, "units_of", str.split)
    with pytest.raises(DataError, match="no text of"):  # each question is one unit
        cleaned(rows, contamination={"against": [str(file)]})


def test_twelve_words_in_a_row_are_not_enough():
    evaluation = Evaluation(Contamination())
    evaluation.add([" ".join(WORDS[:20])], "e row 1")
    assert evaluation(Document(" ".join(["x", *WORDS[:12], "y"]))) is None
    assert evaluation(Document(" ".join(["x", *WORDS[:13], "y"]))) is not None


def test_a_short_text_counts_as_a_whole():
    evaluation = Evaluation(Contamination())
    evaluation.add([" ".join(WORDS[:9]), " ".join(WORDS[30:37])], "e row 1")
    assert (evaluation.texts, evaluation.too_short) == (1, 1)
    assert evaluation(Document(" ".join(WORDS[:8]))) is None
    assert evaluation(Document(" ".join(WORDS[30:40]))) is None
    reason = evaluation(Document(" ".join(["x", *WORDS[:9]])))
    assert reason is not None and reason.why == "e row 1: " + " ".join(WORDS[:9])


def test_columns_choose_what_is_looked_at(cleaned, tmp_path):
    file = tmp_path / "eval.jsonl"
    file.write_text(json.dumps({"question": " ".join(WORDS[:20]), "licence": " ".join(WORDS[50:70])}) + "\n")
    rows = [{"text": " ".join(WORDS[50:70])}]
    assert cleaned(rows, contamination={"against": [str(file)]})[1] == []
    against = {"against": [str(file)], "columns": ["question"]}
    assert cleaned(rows, out="b", contamination=against)[1] == rows
    with pytest.raises(DataError, match=r"no column 'questoin'; nearest: 'question'"):
        cleaned(rows, out="c", contamination={**against, "columns": ["questoin"]})
