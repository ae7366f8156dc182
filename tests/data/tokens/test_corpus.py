"""Texts of a tokenizer's corpus: which kind a document is, what of a row counts, and which side it is on."""

import json

import pytest

from unfreeze.data.rows.row import Conversation, Text
from unfreeze.data.tokens.corpus import PIECE, Corpus, cut_long, kind_of, text_of_row

KINDS = {
    "今天天气很好，我们去公园散步。": "zh",
    "我们用 Python 和 PyTorch 训练语言模型。": "zh",
    "The quick brown fox (a fox) jumps over the lazy dog; it doesn't look back.": "en",
    "def f(x):\n    return {'a': x[0]}  # done\n": "code",
    "今日はとても天気がいいので公園へ行きました。": "other",  # Japanese: Han letters among kana
    "Привет, как дела?": "other",
    "12345 67890": "other",
    "𠮷野家": "zh",  # of an extension of CJK
}


@pytest.mark.parametrize("text", KINDS)
def test_a_document_is_of_the_kind_of_its_letters(text):
    assert kind_of(text) == KINDS[text]


def test_all_that_a_conversation_says_counts():
    call = {"id": "a", "type": "function", "function": {"name": "看", "arguments": {"x": 1}}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
        {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [call]},
        {"role": "tool", "content": "seven", "tool_call_id": "a"},
    ]
    text = text_of_row(Conversation(messages, [{"type": "function", "function": {"name": "看"}}]))
    assert text.split("\n") == [
        '{"type": "function", "function": {"name": "看"}}',
        *("Hello", "Hm.", '{"name": "看", "arguments": {"x": 1}}', "seven"),
    ]
    assert text_of_row(Text("as it is \n")) == "as it is \n"


def test_a_long_text_is_cut_behind_line_breaks_and_nothing_is_lost():
    for text in ("a line\n" * 50_000, "x" * (3 * PIECE + 1), "", "short"):
        parts = list(cut_long(text))
        assert "".join(parts) == text and max(map(len, parts)) <= PIECE
    assert all(part.endswith("\n") for part in cut_long("a line\n" * 50_000))


def test_the_same_documents_are_held_out_whatever_the_order(tmp_path):
    rows = [json.dumps({"text": f"document {i}"}) + "\n" for i in range(200)]
    sides = []
    for name, lines in (("a", rows), ("b", [rows[0], *rows[:0:-1]])):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(lines), encoding="utf-8")
        corpus = Corpus([path], (), 0.1, 7)
        assert corpus.documents == 0 and len(set(corpus.texts())) == corpus.documents
        sides.append(corpus.measured())
    assert sides[0] == sides[1] and 5 < len(sides[0]) < 40


def test_a_table_gives_the_same_texts(tmp_path):
    tables = pytest.importorskip("pyarrow", reason="extra [data]")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [{"text": f"document {i}"} for i in range(20)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    parquet.write_table(tables.Table.from_pylist(rows), tmp_path / "a.parquet")
    read = [Corpus([tmp_path / name], (), 0.2, 0) for name in ("a.jsonl", "a.parquet")]
    lines, cells = (list(corpus.texts()) for corpus in read)
    assert lines == cells and read[0].held == read[1].held != []


def test_the_first_document_is_always_trained_on(tmp_path):
    path = tmp_path / "one.txt"
    path.write_text("one line", encoding="utf-8")
    corpus = Corpus([path], (), 0.99, 0)
    assert list(corpus.texts()) == ["one line"] and not corpus.held
    assert corpus.done == corpus.total == 8
