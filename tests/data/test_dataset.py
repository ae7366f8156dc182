"""A whole file: every row is used, dropped or bad, and counted."""

import json
import re

import pytest

from unfreeze.core.errors import ConfigError, DataError
from unfreeze.data import encode_file, encode_files, load_tokenizer, pack
from unfreeze.data.rows import lines
from unfreeze.data.store import dataset


def write(tmp_path, *rows, name="data.jsonl"):
    path = tmp_path / name
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


GOOD = {"question": "Who wrote Hamlet?", "answer": "Shakespeare it was."}
LONG = {"question": "Who wrote Hamlet? " * 60, "answer": "Shakespeare it was."}


@pytest.fixture(scope="module")
def tokenizer(json_folder, templates):
    return load_tokenizer(json_folder(templates["chatml"]))


def test_nothing_vanishes_uncounted(tokenizer, tmp_path):
    path = write(
        tmp_path, GOOD, "{broken", LONG, {"text": "Paris. " * 200}, GOOD, {"question": 1, "answer": "x"}
    )
    data = encode_file(path, tokenizer, 128, on_bad_row="skip")
    stats = data.stats
    assert (stats.rows, stats.bad, stats.dropped, stats.truncated, stats.examples) == (6, 2, 1, 1, 3)
    assert stats.rows == len(data.examples) + stats.dropped + stats.bad
    assert [item.row for item in stats.listed] == [2, 3, 6]
    assert "row 3: 0 of 128 tokens supervised (truncated before the answer?" in stats.listed[1].reason
    assert stats.tokens == sum(e.num_tokens for e in data.examples) == pack(data.examples).num_tokens
    assert stats.supervised == int((pack(data.examples).weights_T > 0).sum())
    assert "6 rows (question/answer 3, text 1)" in stats.summary()
    assert "1 truncated (275 tokens cut), 1 dropped, 2 bad, 1 duplicate" in stats.summary()
    assert json.loads(json.dumps(stats.as_dict()))["listed"][0]["row"] == 2


def test_bad_rows_stop_by_default(tokenizer, tmp_path):
    with pytest.raises(DataError, match=r"data\.jsonl, row 2: broken JSON") as error:
        encode_file(write(tmp_path, GOOD, "{broken"), tokenizer, 128)
    assert "--data.on-bad-row skip" in error.value.next
    with pytest.raises(DataError, match=r"row 1: .* sequence_length is 128"):
        encode_file(write(tmp_path, LONG), tokenizer, 128, truncation="error")


def test_nothing_left_is_an_error_with_the_reason(tokenizer, tmp_path):
    with pytest.raises(DataError, match="no row left to train on, of 1: row 1: 0 of 128"):
        encode_file(write(tmp_path, LONG), tokenizer, 128)
    with pytest.raises(DataError, match="the file is empty"):
        encode_file(write(tmp_path), tokenizer, 128)
    with pytest.raises(ConfigError, match="sequence_length is 1"):
        encode_file(write(tmp_path, GOOD), tokenizer, 1)


def test_split_keeps_all_of_a_long_text(tokenizer, tmp_path):
    path = write(tmp_path, "The capital of France is Paris. " * 50, "", "Second.", name="book.txt")
    cut, split = (encode_file(path, tokenizer, 64, truncation=way) for way in ("tail", "split"))
    assert cut.stats.truncated == 1 and split.stats.truncated == 0
    whole = encode_file(path, tokenizer, 10_000).stats
    assert split.stats.supervised == whole.supervised > cut.stats.supervised
    mixed = write(tmp_path, GOOD, {"text": "The capital of France is Paris. " * 50})
    assert encode_file(mixed, tokenizer, 64, truncation="split").stats.shapes == {
        "question/answer": 1,
        "text": 1,
    }
    with pytest.raises(DataError, match=r"row 1: .* a conversation is not split"):
        encode_file(write(tmp_path, LONG), tokenizer, 128, truncation="split")


def test_notes_tell_what_a_user_would_want_to_know(tokenizer, json_folder, tmp_path):
    marked = encode_file(write(tmp_path, {"text": "<|im_start|>user\nhi<|im_end|>"}), tokenizer, 128).stats
    assert any("read as plain text" in note for note in marked.notes)
    source = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt"
        " %}assistant: {% endif %}"
    )
    endless = load_tokenizer(json_folder(source))
    assert any(
        "does not learn to stop" in note
        for note in encode_file(write(tmp_path, GOOD), endless, 128).stats.notes
    )
    assert any(
        "no chat template" in note
        for note in encode_file(write(tmp_path, GOOD), load_tokenizer(json_folder()), 128).stats.notes
    )
    assert not encode_file(write(tmp_path, GOOD), tokenizer, 128).stats.notes


def test_real_rows_on_two_real_tokenizers(yoda_file, kimi_folder, stories_folder):
    kimi = encode_file(yoda_file, load_tokenizer(kimi_folder), 512).stats
    assert (kimi.rows, kimi.examples, kimi.truncated, kimi.dropped, kimi.bad) == (
        700,
        700,
        0,
        0,
        0,
    ) and not kimi.notes
    stories = encode_file(yoda_file, load_tokenizer(stories_folder), 512).stats
    assert (
        stories.rows == 700 == stories.examples + stories.dropped and 0.5 < stories.supervised_fraction < 0.95
    )


def test_a_template_whose_mask_is_lost_leaves_no_row(json_folder, templates, tmp_path):
    """docs/why/trust.md N4: also with on_bad_row "skip", because every row is wrong."""
    forced = "{%- if add_generation_prompt -%}{{- '?' -}}{%- endif -%}"
    lost = load_tokenizer(
        json_folder("{% generation %}" + templates["chatml"] + "{% endgeneration %}" + forced)
    )
    with pytest.raises(
        DataError,
        match=(
            r"no row left to train on, of 1: row 1: messages\[0\].content .* is the user's and would be"
            r" trained on"
        ),
    ):
        encode_file(write(tmp_path, GOOD), lost, 128, on_bad_row="skip")
    # no false alarm
    assert encode_file(write(tmp_path, {"text": "Texts use no template."}), lost, 128).stats.examples == 1
    assert encode_file(write(tmp_path, GOOD), lost, 128, supervise="all").stats.examples == 1


def test_the_supervised_fraction_tells_a_lost_mask_from_a_right_one(tokenizer, tmp_path):
    """docs/why/trust.md N4: the number in the line. Control arm: supervise "all" is the mask of all ones, and
    reads otherwise."""
    path = write(tmp_path, GOOD, GOOD)
    right, ones = (encode_file(path, tokenizer, 128, supervise=way).stats for way in ("assistant", "all"))
    assert (
        f"{100 * right.supervised_fraction:.1f} % supervised" in right.summary()
        and right.supervised_fraction < 0.6
    )
    assert ones.supervised_fraction == 1 - 2 / ones.tokens  # all but the first token of each


def test_a_row_without_a_supervised_token_is_named_and_does_not_enter_a_batch(tokenizer, tmp_path):
    """docs/why/trust.md N2: `row 2: 0 of 128 tokens supervised (truncated before the answer? …)`; head truncation
    keeps the answer."""
    stats = encode_file(write(tmp_path, GOOD, LONG), tokenizer, 128).stats
    assert stats.dropped == 1 and stats.listed[0].reason.startswith(
        "row 2: 0 of 128 tokens supervised (truncated before the answer?"
    )
    head = encode_file(write(tmp_path, GOOD, LONG), tokenizer, 128, truncation="head")
    assert (
        head.stats.dropped == 0
        and head.stats.truncated == 1
        and head.examples[1].num_supervised == head.examples[0].num_supervised
    )
    assert (
        head.stats.cuts[0].reason
        == f"row 2: 128 of {128 + head.stats.tokens_cut} tokens kept, {head.stats.tokens_cut} cut"
    )


def test_every_truncation_counts_what_it_does(tokenizer, tmp_path):
    """Nothing is shortened in silence: rows = whole + truncated + dropped, or an error; tokens kept and cut
    add up."""
    path = write(tmp_path, GOOD, {"text": "The capital of France is Paris. " * 50}, GOOD)
    whole = encode_file(path, tokenizer, 10_000).stats
    for truncation in ("tail", "head"):
        stats = encode_file(path, tokenizer, 64, truncation=truncation).stats
        assert (
            (stats.truncated, stats.dropped) == (1, 0)
            and stats.tokens + stats.tokens_cut == whole.tokens
            and len(stats.cuts) == 1
        )
        assert f"1 truncated ({stats.tokens_cut} tokens cut)" in stats.summary()
    dropped = encode_file(path, tokenizer, 64, truncation="drop").stats
    assert (dropped.truncated, dropped.dropped) == (0, 1) and "sequence_length is 64" in dropped.listed[
        0
    ].reason
    with pytest.raises(DataError, match=r"row 2: .* sequence_length is 64"):
        encode_file(path, tokenizer, 64, truncation="error")


def test_several_files_are_told_apart(tokenizer, tmp_path):
    first, second = write(tmp_path, GOOD, LONG), write(tmp_path, GOOD, "{broken", name="more.jsonl")
    data = encode_files([first, second], tokenizer, 128, on_bad_row="skip")
    assert [(item.file, item.row) for item in data.stats.listed] == [("data.jsonl", 2), ("more.jsonl", 2)]
    assert data.examples.sources_N.tolist() == [0, 1] and data.stats.files == {
        "data.jsonl": 2,
        "more.jsonl": 1,
    }
    with pytest.raises(DataError, match=r"more\.jsonl, row 2: broken JSON"):
        encode_files([first, second], tokenizer, 128)


BAD_ROWS = {  # docs/why/trust.md R7: the kind -> the line, and what names its row and field
    "broken JSON": ('{"question": "Q", ', "row 3: broken JSON at column"),
    "missing field": ({"question": "Q"}, "row 3: field 'answer' is missing; fields: question"),
    "wrong type": (
        {"question": 7, "answer": "A"},
        r"row 3: field question is a number \(7\), expected a text",
    ),
    "empty": ({"question": "Q", "answer": " "}, "row 3: field answer is empty"),
    "too long": (LONG, "row 3: 0 of 128 tokens supervised"),
    "no shape": ({"query": "Q", "reply": "A"}, "row 3: no known field"),
    "byte order mark inside": ('\ufeff{"text": "a"}', "row 3: broken JSON"),
    "duplicate keys": (
        '{"question": "Q", "question": "R", "answer": "A"}',
        "row 3: broken JSON: field 'question' occurs twice",
    ),
    "a line over the limit": (
        json.dumps({"text": "x" * 9000}),
        "row 3: the row has 8.8 KiB, the limit is 4.0 KiB",
    ),
}


@pytest.mark.parametrize("kind", BAD_ROWS)
def test_each_bad_row_stops_or_is_counted_and_named(kind, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(lines, "MAX_ROW_BYTES", 4096)
    line, says = BAD_ROWS[kind]
    path = write(tmp_path, GOOD, {"text": "Mixed shapes are fine."}, line, GOOD)
    stats = encode_file(path, tokenizer, 128, on_bad_row="skip").stats
    assert (stats.rows, stats.examples, stats.bad + stats.dropped) == (4, 3, 1) and stats.listed[0].row == 3
    assert re.match(says, stats.listed[0].reason)
    if kind != "too long":  # that one is whole, and counted either way
        with pytest.raises(DataError, match=rf"data\.jsonl, {says}") as error:
            encode_file(path, tokenizer, 128)
        assert error.value.next


def test_control_arm_a_reader_that_swallows_bad_rows_does_not_add_up(tokenizer, tmp_path, monkeypatch):
    """What the count above must catch: rows that vanish. Clean files have none listed."""
    path = write(tmp_path, GOOD, "{broken", GOOD)
    lines = len(path.read_text().splitlines())
    assert encode_file(path, tokenizer, 128, on_bad_row="skip").stats.rows == lines
    monkeypatch.setattr(dataset.Account, "unreadable", lambda self, source, found: None)
    assert encode_file(path, tokenizer, 128, on_bad_row="skip").stats.rows != lines
    monkeypatch.undo()
    clean = encode_file(write(tmp_path, GOOD, {**GOOD, "answer": "Marlowe it was."}), tokenizer, 128).stats
    assert (
        not (clean.listed or clean.cuts or clean.repeats or clean.notes)
        and clean.bad == clean.dropped == clean.truncated == 0
    )


def test_a_byte_order_mark_at_the_beginning_is_no_fault(tokenizer, tmp_path):
    path = tmp_path / "bom.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(GOOD).encode())
    assert encode_file(path, tokenizer, 128).stats.rows == 1
