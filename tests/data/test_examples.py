"""Examples and files read on demand: the same documents, batches and cursors as from memory, in bounded
memory."""

import gc
import json
import tracemalloc

import numpy as np
import pytest

from unfreeze.core.errors import DataError
from unfreeze.data import Batches, Example, Examples, encode_files, load_tokenizer
from unfreeze.data.store import encoding
from unfreeze.data.store.dataset import HELD_BYTES


@pytest.fixture(scope="module")
def tokenizer(json_folder, templates):
    return load_tokenizer(json_folder(templates["chatml"]))


@pytest.fixture
def files(tmp_path):
    """Two files of all kinds of rows: byte order mark, blank lines, Windows line ends, several bytes per
    character, texts to be split."""
    rows = [
        {"question": f"Who wrote Hamlet {i}?", "answer": "Shakespeare it was. \U0001f642" * (1 + i % 3)}
        for i in range(30)
    ]
    rows[7] = {"text": "naïve 中文 The capital of France is Paris. " * 12}
    lines = [json.dumps(row, ensure_ascii=bool(i % 2)).encode() for i, row in enumerate(rows)]
    (tmp_path / "a.jsonl").write_bytes(
        b"\xef\xbb\xbf" + b"\r\n".join(lines[:15]) + b"\n\n  \n" + b"\n".join(lines[15:])
    )
    (tmp_path / "b.txt").write_text(
        "\ufeffThe capital of France is Paris.\nSecond line.\n\n\nWho wrote the play Hamlet?\n" * 3,
        encoding="utf-8",
    )
    return [tmp_path / "a.jsonl", tmp_path / "b.txt"]


@pytest.mark.parametrize("truncation", ["tail", "head", "split"])
def test_files_read_on_demand_give_the_same_batches_and_cursors(truncation, tokenizer, files):
    held, on_demand = (
        encode_files(files, tokenizer, 64, truncation=truncation, held_bytes=limit)
        for limit in (HELD_BYTES, 0)
    )
    assert (held.stats.reading, on_demand.stats.reading) == (
        "memory",
        "on demand",
    ) and "files read on demand" in on_demand.stats.summary()
    assert {**held.stats.as_dict(), "reading": ""} == {**on_demand.stats.as_dict(), "reading": ""}
    first, second = (Batches(data.examples, 200, seed=1) for data in (held, on_demand))
    for _ in range(2 * first.len_steps(1)):
        ((batch,), cursor), ((again,), cursor_again) = next(first), next(second)
        assert (
            batch.tokens_T.equal(again.tokens_T)
            and batch.weights_T.equal(again.weights_T)
            and cursor == cursor_again
        )


CHANGES = {
    "another word": lambda text: text.replace(b"Hamlet 3", b"Hamlet 9"),
    "a row more at the beginning": lambda text: b'{"text": "new"}\n' + text,
    "shorter": lambda text: text[:300],
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_changes_while_it_is_trained_on_is_refused(change, tokenizer, files):
    examples = encode_files(files, tokenizer, 64, held_bytes=0).examples
    assert examples.rows_N[3] == 4
    files[0].write_bytes(CHANGES[change](files[0].read_bytes()))
    with pytest.raises(DataError, match="row 4: the file changed during training"):
        examples[3]


def test_control_arm_without_checksums_the_changed_row_is_trained_on(tokenizer, files, monkeypatch):
    monkeypatch.setattr(Example, "checksum", property(lambda self: bytes(16)))
    monkeypatch.setattr(encoding, "checksum_of", lambda *_: bytes(16))
    before = list(encode_files(files, tokenizer, 64).examples[3].tokens)
    examples = encode_files(files, tokenizer, 64, held_bytes=0).examples
    files[0].write_bytes(CHANGES["another word"](files[0].read_bytes()))
    assert list(examples[3].tokens) != before


def test_memory_does_not_grow_with_the_file(tokenizer, tmp_path):
    """The bound of data/store/dataset.py: 90 bytes a document and 40 where it is read on demand; the control arm
    holds the tokens."""
    path = tmp_path / "large.jsonl"
    row = json.dumps({"question": "Who wrote Hamlet? " * 20, "answer": "Shakespeare it was. " * 20})
    path.write_text((row + "\n") * 300)

    def grown(held_bytes: int) -> float:
        tracemalloc.start()
        data = encode_files([path], tokenizer, 4096, held_bytes=held_bytes)
        gc.collect()  # a template's contexts are cycles
        used = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert len(data.examples) == 300
        return used / 300

    on_demand, held = grown(0), grown(HELD_BYTES)
    assert on_demand < 300 < 1000 < held


def test_a_part_of_a_store_gives_its_own_documents_and_fingerprint():
    documents = [Example([1, 2, 3 + i], [0.0, 1.0, 1.0], i, digest=bytes([i] * 16)) for i in range(6)]
    whole = Examples.of(documents)
    part = whole.part(np.array([False, True, False, True, True, False])).part(np.array([True, False, True]))
    assert (
        [example.row for example in part] == [1, 4] == part.rows_N.tolist()
        and part[-1].row == 4
        and len(part) == 2
    )
    assert (
        part.fingerprint() == Examples.of([documents[1], documents[4]]).fingerprint() != whole.fingerprint()
    )
    assert [example.row for example in whole[2:4]] == [2, 3] and Examples.of(whole) is whole


@pytest.mark.parametrize("change", ["token", "weight", "order", "length"])
def test_a_fingerprint_tells_every_change(change):
    a, b = Example([1, 2, 3], [0.0, 1.0, 1.0]), Example([4, 5], [0.0, 1.0])
    other = {
        "token": [Example([1, 2, 4], a.weights), b],
        "weight": [Example(a.tokens, [0.0, 0.0, 1.0]), b],
        "order": [b, a],
        "length": [Example([1, 2, 3, 4], [0.0, 1.0, 1.0, 0.0]), Example([5], [1.0])],
    }[change]
    assert Examples.of([a, b]).fingerprint() != Examples.of(other).fingerprint()
