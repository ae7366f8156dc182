"""A split by content: stable when rows come and go, no leak, the same side for the same words."""

import json
import random
from dataclasses import replace

import pytest

from unfreeze.core.errors import ConfigError
from unfreeze.data import (
    Conversation,
    Example,
    Text,
    encode_file,
    load_tokenizer,
    read_rows,
    split_by_content,
    validation_batches,
)
from unfreeze.data.rows.row import content_digest
from unfreeze.data.store.account import duplicates


def rows(count, offset=0):
    return [
        {"question": f"Question number {offset + i}?", "answer": f"Answer {i} it is."} for i in range(count)
    ]


@pytest.fixture(scope="module")
def tokenizer(json_folder, templates):
    return load_tokenizer(json_folder(templates["chatml"]))


@pytest.fixture
def encode(tokenizer, tmp_path):
    def make(*written):
        path = tmp_path / "data.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in written))
        return encode_file(path, tokenizer, 256)

    return make


def words(examples):
    return {tuple(example.tokens) for example in examples}


def test_the_split_is_stable_when_rows_are_added_removed_and_reordered(encode):
    first = rows(300)
    training, validation = split_by_content(encode(*first).examples, 0.1, seed=1)
    # 30 expected, six standard deviations
    assert 12 <= len(validation) <= 50 and len(training) + len(validation) == 300
    assert not words(training) & words(validation)
    later = [*rows(200, offset=1000), *first]
    random.Random(0).shuffle(later)
    training_later, validation_later = split_by_content(encode(*later).examples, 0.1, seed=1)
    assert words(validation) <= words(validation_later) and words(training) <= words(training_later)
    fewer_training, fewer_validation = split_by_content(encode(*first[50:]).examples, 0.1, seed=1)
    assert words(fewer_validation) <= words(validation) and words(fewer_training) <= words(training)
    assert words(split_by_content(encode(*first).examples, 0.1, seed=2)[1]) != words(validation)


def test_control_arm_a_split_by_place_is_not_stable(encode):
    """What the test above must catch: each tenth row, by its place in the file."""
    first = rows(300)
    by_place = {tuple(e.tokens) for e in encode(*first).examples[::10]}
    later = {tuple(e.tokens) for e in encode(*rows(5, offset=1000), *first).examples[::10]}
    assert not by_place <= later


def test_equal_rows_are_never_on_both_sides_whatever_shape_they_have(encode):
    doubled = [
        shape
        for row in rows(100)
        for shape in (row, {"instruction": row["question"], "output": row["answer"]}, dict(row, id=7))
    ]
    training, validation = split_by_content(encode(*doubled).examples, 0.2)
    assert len(validation) % 3 == 0 and not words(training) & words(validation)


def test_pieces_of_a_text_stay_together(tokenizer, tmp_path):
    path = tmp_path / "book.txt"
    path.write_text(
        "\n\n".join(f"Chapter {i}. " + "The capital of France is Paris. " * 30 for i in range(40))
    )
    data = encode_file(path, tokenizer, 32, truncation="split")
    training, validation = split_by_content(data.examples, 0.3)
    assert len(data.examples) > 80 and not set(training.rows_N.tolist()) & set(validation.rows_N.tolist())


def test_a_fraction_that_leaves_one_side_empty_is_refused(encode):
    for fraction, side in ((0.001, "validation"), (0.999, "training")):
        with pytest.raises(ConfigError, match=f"of 5 documents leaves none for {side}") as error:
            split_by_content(encode(*rows(5)).examples, fraction)
        assert "--validation" in error.value.next
    with pytest.raises(ConfigError, match=r"validation_fraction is 1\.0"):
        split_by_content(encode(*rows(5)).examples, 1.0)


def test_content_not_its_shape_or_field_order_makes_the_digest(tmp_path):
    lines = [
        {"question": "Q", "answer": "A"},
        {"answer": "A", "question": "Q", "id": 3},
        {"prompt": "Q", "completion": "A"},
    ]
    path = tmp_path / "same.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    assert len({content_digest(row) for row in read_rows(path)}) == 1
    talk = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
    different = [
        Conversation(talk),
        Conversation(talk, [{"type": "function"}]),
        Conversation(talk[::-1]),
        Text("Q"),
        Text("QA"),
        Text("A"),
    ]
    assert len({content_digest(row) for row in different}) == len(different)


def test_rows_of_one_prompt_differ_by_their_columns_where_these_make_the_task(tokenizer, tmp_path):
    """An environment's rows: one prompt, and the secret in a column. With a reward alone the prompt counts."""
    path = tmp_path / "games.jsonl"
    games = [{"prompt": "Guess.", "secret": secret} for secret in range(100)]
    same = {"secret": 0, "prompt": "Guess."}  # in another order
    path.write_text("\n".join(map(json.dumps, [*games, same])))
    for by_columns, different in ((True, 100), (False, 1)):  # control arm: by the prompt, all are one
        for workers in (0, 1):
            examples = encode_file(
                path, tokenizer, 64, answers="asked", room=4, by_columns=by_columns, workers=workers
            ).examples
            assert len(set(examples.digests_N.tolist())) == different
        if by_columns:
            training, validation = split_by_content(examples, 0.3)
            assert len(training) + len(validation) == 101 and 10 < len(validation) < 60
        else:
            with pytest.raises(ConfigError, match="leaves none for"):
                split_by_content(examples, 0.3)


def test_exact_duplicates_are_counted_and_named_with_their_original(encode):
    stats = encode(*rows(3), *rows(3), {"question": "Other?", "answer": "Yes."}, *rows(1)).stats
    assert stats.duplicates == 4 and "4 duplicates" in stats.summary() and stats.examples == 8
    assert [item.reason for item in stats.repeats] == [
        f"row {row} repeats row {first}" for row, first in ((4, 1), (5, 2), (6, 3), (8, 1))
    ]
    near = encode(
        {"question": "Why?", "answer": "So."}, {"question": "Why?", "answer": "So. "}
    ).stats  # control arm: one blank more
    assert near.duplicates == 0


def test_duplicates_against_a_dictionary(encode):
    examples = encode(*[random.Random(i % 37).choice(rows(50)) for i in range(200)]).examples
    first: dict[bytes, int] = {}
    expected = [
        (i, first[d]) for i, d in enumerate(examples.digests_N.tolist()) if first.setdefault(d, i) != i
    ]
    assert duplicates(examples.digests_N) == expected and len(expected) > 100


def test_validation_batches_hold_every_document_once_in_order():
    documents = [Example([i + 1] * (2 + i % 7), [0.0] + [1.0] * (1 + i % 7), i) for i in range(40)] + [
        Example([99] * 60, [1.0] * 60, 40)
    ]
    batches = list(validation_batches(documents, 30))
    seen = [
        tuple(document.tolist()) for batch in batches for document in batch.tokens_T.split(batch.lengths())
    ]
    assert seen == [tuple(document.tokens) for document in documents]
    assert all(batch.num_tokens <= 30 for batch in batches[:-1]) and batches[-1].num_tokens == 60
    assert sum(float(batch.weights_T.sum()) for batch in batches) == sum(
        document.num_supervised for document in documents
    )


def test_a_validation_file_that_repeats_training_rows_is_noticed(encode):
    from dataclasses import replace

    data = encode(*rows(10))
    held_out = encode(*rows(3), *rows(5, offset=50)).examples
    assert replace(data, validation=held_out).leaked().tolist() == [True] * 3 + [False] * 5
    training, validation = split_by_content(data.examples, 0.3)
    assert not replace(data, examples=training, validation=validation).leaked().any()
    assert not len(data.leaked())


def pairs(prompts, answers):
    """All pairs of each prompt's answers, as tokens: two of prompt, one of answer."""
    return [
        Example(
            [7, prompt, 100 * prompt + i, 7, prompt, 100 * prompt + j],
            [0.0, 0.0, 1.0] * 2,
            row=10 * i + j,
            digest=(10_000 * prompt + 100 * i + j).to_bytes(16, "little"),
            chosen=3,
        )
        for prompt in prompts
        for i in range(answers)
        for j in range(i)
    ]


def test_all_pairs_of_a_prompt_land_on_the_same_side():
    examples = pairs(range(10, 110), 4)
    training, validation = split_by_content(examples, 0.2)
    sides = [{example.tokens[1] for example in side} for side in (training, validation)]
    assert not sides[0] & sides[1] and 5 <= len(sides[1]) <= 40
    assert len(training) + len(validation) == len(examples) and len(validation) == 6 * len(sides[1])
    # control arm: what is not compared is split row by row
    plain = [replace(example, chosen=-1) for example in examples]
    sides = [{example.tokens[1] for example in side} for side in split_by_content(plain, 0.2)]
    assert sides[0] & sides[1]


def test_the_pairs_of_a_single_prompt_are_divided():
    training, validation = split_by_content(pairs([10], 12), 0.3)
    assert len(training) and len(validation)
