"""ppl: every token once, with what transformers gives to it in the same windows; the file's bytes, exactly."""

from __future__ import annotations

import json
import math

import pytest
import torch
import transformers

from unfreeze import models
from unfreeze.core.built_in import TINY_K2
from unfreeze.core.errors import DataError
from unfreeze.data.tokens.masks import encode_prompt
from unfreeze.data.tokens.tokenizer import load_tokenizer
from unfreeze.evaluate.kept import Kept
from unfreeze.evaluate.tasks import Settings
from unfreeze.evaluate.text import Document, TextTask, document_of, first_bytes, texts_of, windows
from unfreeze.generate.model import Model

TEXT = "The baker carried a basket, “né” 北京.\n\nIt is 12:30 — no time to lose, he said. " * 12


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(TINY_K2)


@pytest.fixture(scope="module")
def pair(tokenizer):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.3,
    )
    theirs = transformers.LlamaForCausalLM(config).eval()
    ours = models.build(models.shape(config.to_dict()), dtype=torch.float32, device="cpu")
    ours.load_state_dict(theirs.state_dict())
    return Model(ours, tokenizer), theirs


def of_transformers(theirs, ids: list[int], window: int, stride: int) -> tuple[float, int]:
    """Nats and tokens, in windows as transformers' documentation of perplexity slides them."""
    total, count, end_before = 0.0, 0, 0
    for begin in range(0, len(ids), stride):
        end = min(begin + window, len(ids))
        part = torch.tensor([ids[begin:end]])
        labels = part.clone()
        labels[:, : -(end - end_before)] = -100
        scored = int((labels[:, 1:] != -100).sum())
        with torch.no_grad():
            total += float(theirs(part, labels=labels).loss.double()) * scored
        count, end_before = count + scored, end
        if end == len(ids):
            break
    return total, count


def test_perplexity_and_bits_per_byte_are_those_of_transformers(pair, tmp_path):
    model, theirs = pair
    (tmp_path / "book.txt").write_text(TEXT, encoding="utf-8")
    task = TextTask("ppl:book.txt", tmp_path / "book.txt", Settings())
    task.check()
    bits, perplexity = task.score(model, Kept())
    ids = encode_prompt(model.tokenizer, TEXT)
    total, count = of_transformers(theirs, ids, 64, 32)
    first = 0 if model.tokenizer.add_bos else len(model.tokenizer.token_bytes(ids[0]))
    assert (
        sum(bits.weights) == len(TEXT.encode()) - first and sum(perplexity.weights) == count == len(ids) - 1
    )
    nats = math.fsum(v * w for v, w in zip(perplexity.values, perplexity.weights, strict=True))
    assert nats == pytest.approx(total, rel=1e-6) and perplexity.exponent
    ours = math.fsum(v * w for v, w in zip(bits.values, bits.weights, strict=True)) / sum(bits.weights)
    assert ours == pytest.approx(total / math.log(2) / (len(TEXT.encode()) - first), rel=1e-6)
    # control arm: windows that don't overlap leave tokens without context
    assert abs(of_transformers(theirs, ids, 64, 64)[0] / total - 1) > 1e-3


def test_batches_change_rounding_alone_and_a_rerun_computes_nothing(pair, tmp_path, monkeypatch):
    (tmp_path / "book.txt").write_text(TEXT, encoding="utf-8")
    results = []
    for batch in (1, None):
        task = TextTask("ppl:book.txt", tmp_path / "book.txt", Settings(batch=batch))
        task.check()
        kept = Kept()
        results.append(task.score(pair[0], kept)[0])
    assert results[0].values == pytest.approx(results[1].values, rel=1e-5)
    monkeypatch.setattr("unfreeze.evaluate.forced.scored_answers", None)
    assert task.score(pair[0], kept)[0] == results[1]


@pytest.mark.parametrize("tokens", [1, 2, 7, 8, 9, 12, 13, 40])
def test_windows_score_every_token_once_with_half_a_window_before_it(tokens):
    parts = windows(Document(list(range(tokens)), []), 8)
    assert [each for _, scored in parts for each in scored] == list(range(1, tokens))
    for before, scored in parts:
        whole = [*before, *scored]
        assert whole == list(range(whole[0], whole[-1] + 1)) and len(whole) <= 8
        assert scored[0] < 8 or len(before) == 4


def test_sizes_are_the_bytes_of_the_text(tokenizer):
    document = document_of(TEXT, tokenizer)
    assert sum(document.sizes) == len(TEXT.encode()) and len(document.sizes) == len(document.tokens)

    class Normalising:
        """Drops a third of the bytes, as a tokenizer with a normaliser may."""

        add_bos, bos_id = True, 0

        def encode(self, text, specials):
            return [1, 2, 3]

        def token_bytes(self, id):
            return b"ab" if id < 3 else None

        def token_text(self, id):
            return "abcd"

    assert document_of("x" * 16, Normalising()).sizes == [0.0, 4.0, 4.0, 8.0]


def test_pieces_are_the_same_bytes_whatever_the_window(pair, tmp_path):
    (tmp_path / "book.txt").write_text(TEXT, encoding="utf-8")
    names = []
    for window in (16, 64):
        task = TextTask("ppl:book.txt", tmp_path / "book.txt", Settings(window=window, limit=2))
        task.check()
        bits = task.score(pair[0], Kept())[0]
        names.append((bits.items, bits.weights))
        assert sum(len(text.encode()) for text in task.texts) <= 2 * task.piece
    assert names[0] == names[1] and list(names[0][0]) == ["text 1, piece 1", "text 1, piece 2"]
    (tmp_path / "mark.txt").write_bytes(b"\xef\xbb\xbfab")  # as editors of Windows begin a file
    assert texts_of(tmp_path / "mark.txt", Settings()) == ["ab"]
    assert first_bytes(["a四", "b"], 3) == ["a"] and first_bytes(["a四", "b"], 5) == ["a四", "b"]


def test_rows_with_texts_are_texts_and_other_files_are_refused(pair, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": f"Number {n} of many."}) + "\n" for n in range(3)))
    task = TextTask("ppl:rows.jsonl", rows, Settings())
    task.check()
    bits = task.score(pair[0], Kept())[0]
    assert list(bits.items) == [f"text {n}, piece 1" for n in (1, 2, 3)]
    rows.write_text(json.dumps({"prompt": "?", "completion": "a"}) + "\n")
    with pytest.raises(DataError, match="row 1 is a conversation"):
        task.check()
    for content, words in ((b"\xff\xfe", "is not UTF-8: byte 1 is 0xff"), (b"", "has no text")):
        (tmp_path / "a.txt").write_bytes(content)
        with pytest.raises(DataError, match=words):
            TextTask("ppl:a.txt", tmp_path / "a.txt", Settings()).check()
