"""Planted evaluation rows are found in training rows; rows that only look alike are not."""

import pytest

from unfreeze.config.clean import Contamination
from unfreeze.data.clean.leaks import Passage, contaminated, passage_of
from unfreeze.data.rows.row import Conversation, Text

LONG = (
    "The river that runs past the old mill carries more water in spring than in any other season of the year."
)


def passages(*texts, file="train.jsonl"):
    return [Passage(f"{file} row {i + 1}", text) for i, text in enumerate(texts)]


def chat(question, answer, row=1):
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return passage_of(Conversation(messages, row=row), "test.jsonl")


def test_planted_rows_are_found_with_their_numbers_and_others_are_not():
    training = passages("Nothing to see.", f"Before. {LONG} After.", "Rain.", "WHAT is 2 + 2 ?")
    evaluation = [*passages(LONG, "A short text.", file="book"), chat("What is 2+2?", "4", row=7)]
    found = contaminated(training, evaluation)
    assert [(match.training, match.evaluation, match.kind) for match in found] == [
        ("train.jsonl row 2", "book row 1", "n-gram"),
        ("train.jsonl row 4", "test.jsonl row 7", "exact"),
    ]
    assert found[0].words == "the river that runs past the old mill carries more water in spring"
    # control: without the planted rows there is nothing
    assert contaminated([training[0], training[2]], evaluation) == []


def test_a_prompt_counts_whatever_its_answer_is():
    assert contaminated([chat("Who are you?", "I am X.")], [chat("who are you", "Someone else")])
    assert not contaminated([chat("Who are they?", "Someone else")], [chat("who are you", "Someone else")])


def test_fewer_shared_words_than_an_n_gram_are_no_match():
    words = LONG.split()
    near = " ".join([*words[:12], "snow"])
    assert not contaminated(passages(near), passages(LONG))
    assert contaminated(passages(near), passages(LONG), Contamination(words=12))


@pytest.mark.parametrize(
    ("content", "text"), [([{"type": "text", "text": "a"}, {"type": "image"}], "a"), (None, ""), ("b", "b")]
)
def test_messages_of_parts_and_texts_are_passages(content, text):
    row = Conversation([{"role": "user", "content": content}], row=3)
    assert passage_of(row, "f") == Passage("f row 3", text, text)
    assert passage_of(Text("a text", 4), "f") == Passage("f row 4", "a text")
    assert passage_of(object(), "f") is None
