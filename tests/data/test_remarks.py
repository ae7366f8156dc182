"""Warnings about data that is lost or doubled beyond a tenth, and what a mixture became, against counting by hand."""

import json
import re

import pytest

from unfreeze.commands.demo import TINY_K2
from unfreeze.core.errors import DataError
from unfreeze.data import Mixed, encode_files, load_tokenizer
from unfreeze.data.store.remarks import labels, losses, mixture


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(TINY_K2)


@pytest.fixture
def encoded(tokenizer, tmp_path):
    """-> encode(rows per file, tokens) -> Dataset."""

    def encode(*files, tokens=64, **options):
        paths = []
        for number, rows in enumerate(files):
            paths.append(tmp_path / f"{number}.jsonl")
            paths[-1].write_text("".join(json.dumps(row) + "\n" for row in rows))
        return encode_files(paths, tokenizer, tokens, on_bad_row="skip", **options)

    return encode


def talk(number, answer="It is. Hmm."):
    return {"question": f"What is {number}?", "answer": answer}


LONG = {"question": "Why?", "answer": "Because. " * 200}
LATE = {"question": "Why? " * 200, "answer": "Because."}
BAD = {"question": "Why?"}


@pytest.mark.parametrize(
    "row, says",
    [
        (
            LONG,
            "rows ({share} %) are cut to 64 tokens; .* are never trained on: raise --sequence-length .*lower\\)$",
        ),
        (LATE, "rows ({share} %) are dropped .*0 of 64 tokens supervised.*: raise --sequence-length"),
        (BAD, "rows ({share} %) are bad and left out .*field 'answer' is missing"),
        (talk(0), "rows ({share} %) are duplicates \\(row \\d+ repeats row 1\\): remove them"),
    ],
    ids=["cut", "dropped", "bad", "doubled"],
)
def test_more_than_a_tenth_is_a_warning_with_its_remedy(row, says, encoded):
    many = losses(encoded([talk(i) for i in range(16)] + [row] * 4, tokens=64).stats, 64)
    pattern = says.replace("({share} %)", r"\(\d+ %\)")
    assert any(re.search(pattern, line) for line in many), many
    few = encoded([talk(i) for i in range(40)] + [row] * 2).stats
    said = [line for line in losses(few, 64) if re.search(pattern, line)]
    assert bool(said) == (few.tokens_cut > 0.1 * (few.tokens + few.tokens_cut)) and (row is LONG) == bool(
        said
    )


def test_the_remedy_is_one_that_can_work(encoded):
    """Not a length that the model does not take, and no split of conversations."""
    rows = [talk(i) for i in range(4)] + [LONG]
    (bounded,) = losses(encoded(rows).stats, 64, 64)
    assert bounded.endswith(
        "the model takes 64 positions at most: shorten the rows, or --data.truncation drop"
    )
    # control arms: a model that takes more, and texts
    (free,) = losses(encoded(rows).stats, 64, 128)
    assert "raise --sequence-length" in free and "split" not in free
    texts = [{"text": f"{i} " * 200} for i in range(4)]
    (of_texts,) = losses(encoded(texts).stats, 64, 64)
    assert of_texts.endswith("--data.truncation drop, or --data.truncation split for texts")


def test_a_single_row_that_loses_most_tokens_is_a_warning(encoded):
    """One row of forty, and nine tenths of all tokens."""
    rows = [talk(i) for i in range(39)] + [{"text": "word " * 20_000}]
    (said,) = losses(encoded(rows).stats, 64)
    assert said.startswith("1 of 40 rows (2 %) is cut to 64 tokens") and "(98 %) are never trained on" in said


def test_clean_data_has_no_warning(encoded):
    assert losses(encoded([talk(i) for i in range(20)]).stats, 64) == []


@pytest.mark.parametrize("weights", [(1, 0.5), (2.0, 0.25), (0.0, 1.5)])
def test_what_a_mixture_became_is_what_its_order_shows(weights, encoded):
    """Oracle: documents and tokens counted in the order of eight epochs."""
    examples = encoded(
        [talk(i) for i in range(12)], [talk(i, "Long, it is. " * 3) for i in range(8)]
    ).examples
    order = Mixed(examples.sources_N, weights, seed=0)
    shown = [index for epoch in range(8) for index in order(epoch)]
    tokens = [sum(int(examples.lengths_N[i]) for i in shown if examples.sources_N[i] == f) for f in (0, 1)]
    for f, line in enumerate(mixture(examples, ["a", "b"], weights, 8)):
        documents = sum(examples.sources_N[i] == f for i in shown) / 8
        assert f"{round(documents)} " in line and f"each {weights[f] * 8:.3g} times in 8 epochs" in line
        share = float(line.partition(" % of the tokens")[0].rpartition(" ")[2])
        assert abs(share - 100 * tokens[f] / sum(tokens)) < 1.5, line


def test_files_of_one_pattern_are_one_line(encoded):
    examples = encoded(
        [talk(i) for i in range(4)], [talk(i + 9) for i in range(4)], [talk(i + 50) for i in range(8)]
    )
    lines = mixture(examples.examples, ["d", "d", "c.csv"], [1, 1, 0.5], 2)
    assert [line.split(":")[0] for line in lines] == ["d x 1", "c.csv x 0.5"]
    assert "8 of 8 documents per epoch" in lines[0] and "4 of 8 documents per epoch" in lines[1]


def test_nothing_left_says_each_reason_once_and_what_to_do(encoded):
    with pytest.raises(DataError) as error:
        encoded([{"prompt": "a", "chosen": "b", "rejected": "c"}] * 60)
    assert (
        error.value.message.count("chosen, rejected") == 1 and "of 60: row 1: a pair" in error.value.message
    )
    assert "--columns completion=chosen" in error.value.message
    assert error.value.next == "unfreeze prefer --model MODEL --data pairs.jsonl"
    assert (
        len(
            encoded([{"prompt": "a", "chosen": "b", "rejected": "c"}], columns=["completion=chosen"]).examples
        )
        == 1
    )
    with pytest.raises(DataError, match="the file is empty") as error:
        encoded([])
    assert "give a file with rows, such as" in error.value.next


def test_labels_that_are_all_the_same_are_said(encoded):
    """Control arms: both labels, pairs (which are two labels), and rows of sft."""
    answers = [{"prompt": f"What is {n}?", "completion": "It is.", "label": True} for n in range(3)]
    (said,) = labels(encoded(answers, answers="labels").examples)
    assert "all 3 answers have the label true" in said
    (said,) = labels(encoded([{**answer, "label": 0} for answer in answers], answers="labels").examples)
    assert "all 3 answers have the label false" in said
    both = [*answers, {**answers[0], "completion": "No.", "label": False}]
    pair = [{"prompt": "What?", "chosen": "It is.", "rejected": "No."}]
    for rows, kind in ((both, "labels"), (pair, "labels"), (pair, "pairs"), ([talk(1)], "taught")):
        assert labels(encoded(rows, answers=kind).examples) == []


def question(number):
    talk = [("user", f"What is {number}?"), ("assistant", "It is. Hmm."), ("user", "And then?")]
    return {"messages": [{"role": role, "content": text} for role, text in talk]}


def test_rows_that_end_with_a_question_are_counted(encoded):
    rows = [talk(i) for i in range(16)] + [question(i) for i in range(4)]
    (warning,) = losses(encoded(rows).stats, 64)
    assert warning.startswith("4 of 20 rows end without an answer, and their last turn is not trained on")
    assert losses(encoded([talk(i) for i in range(38)] + rows[-2:]).stats, 64) == []


@pytest.mark.parametrize("mark", ["<|im_start|>", "<|start_header_id|>", "[INST]", "<start_of_turn>"])
def test_texts_that_hold_chat_markup_are_a_warning(mark, encoded):
    texts = [{"text": f"{mark}user {i}\n{mark}assistant It is."} for i in range(8)]
    (warning,) = losses(encoded(texts).stats, 64)
    assert warning.startswith(f"8 of 8 texts hold chat markup ({mark}), which is read as plain text")
    assert '{"messages": [{"role": "user"' in warning
    # control arm: a few texts about templates among others
    others = [{"text": f"The answer is {i}."} for i in range(8)]
    assert losses(encoded(texts[:3] + others).stats, 64) == []
