"""A whole file: every row is used, dropped or bad, and counted."""

import json

import pytest

from unfreeze.core.errors import ConfigError, DataError
from unfreeze.data import encode_file, load_tokenizer, pack


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
    path = write(tmp_path, GOOD, "{broken", LONG, {"text": "Paris. " * 200}, GOOD, {"question": 1, "answer": "x"})
    data = encode_file(path, tokenizer, 128, on_bad_row="skip")
    stats = data.stats
    assert (stats.rows, stats.bad, stats.dropped, stats.truncated, stats.examples) == (6, 2, 1, 1, 3)
    assert stats.rows == len(data.examples) + stats.dropped + stats.bad
    assert [item.row for item in stats.listed] == [2, 3, 6]
    assert "row 3: 0 of 128 tokens supervised (truncated before the answer?" in stats.listed[1].reason
    assert stats.tokens == sum(e.num_tokens for e in data.examples) == pack(data.examples).num_tokens
    assert stats.supervised == int((pack(data.examples).weights_T > 0).sum())
    assert "6 rows (question/answer 3, text 1)" in stats.summary() and "1 truncated (275 tokens cut), 1 dropped, 2 bad, 1 duplicates" in stats.summary()
    assert json.loads(json.dumps(stats.as_dict()))["listed"][0]["row"] == 2


def test_bad_rows_stop_by_default(tokenizer, tmp_path):
    with pytest.raises(DataError, match=r"data\.jsonl, row 2: broken JSON") as error:
        encode_file(write(tmp_path, GOOD, "{broken"), tokenizer, 128)
    assert "--on-bad-row skip" in error.value.next
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
    assert encode_file(mixed, tokenizer, 64, truncation="split").stats.shapes == {"question/answer": 1, "text": 1}
    with pytest.raises(DataError, match=r"row 1: .* a conversation is not split"):
        encode_file(write(tmp_path, LONG), tokenizer, 128, truncation="split")


def test_notes_tell_what_a_user_would_want_to_know(tokenizer, json_folder, tmp_path):
    marked = encode_file(write(tmp_path, {"text": "<|im_start|>user\nhi<|im_end|>"}), tokenizer, 128).stats
    assert any("read as plain text" in note for note in marked.notes)
    thought = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "reasoning_content": "c"}]}
    assert any("reasoning_content is not part" in note for note in encode_file(write(tmp_path, thought), tokenizer, 128).stats.notes)
    source = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    endless = load_tokenizer(json_folder(source))
    assert any("the end is not learned" in note for note in encode_file(write(tmp_path, GOOD), endless, 128).stats.notes)
    assert any("no chat template" in note for note in encode_file(write(tmp_path, GOOD), load_tokenizer(json_folder()), 128).stats.notes)
    assert not encode_file(write(tmp_path, GOOD), tokenizer, 128).stats.notes


def test_real_rows_on_two_real_tokenizers(yoda_file, kimi_folder, stories_folder):
    kimi = encode_file(yoda_file, load_tokenizer(kimi_folder), 512).stats
    assert (kimi.rows, kimi.examples, kimi.truncated, kimi.dropped, kimi.bad) == (700, 700, 0, 0, 0) and not kimi.notes
    stories = encode_file(yoda_file, load_tokenizer(stories_folder), 512).stats
    assert stories.rows == 700 == stories.examples + stories.dropped and 0.5 < stories.supervised_fraction < 0.95
