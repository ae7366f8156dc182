"""The token store: memory-mapped, read in any order, mixed by weight, and resumed exactly from any step."""

import json
import mmap

import numpy as np
import pytest
import torch

from unfreeze.commands.demo import TINY_K2
from unfreeze.core.errors import DataError
from unfreeze.data import Batches, Mixed, load_tokenizer
from unfreeze.data.store import encoded
from unfreeze.data.store.encoded import encoded_files

WEIGHTS = (0.5, 2.0)


@pytest.fixture
def opened(tmp_path, monkeypatch):
    """opened() -> the examples of two files, from a store that is on the disk already."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(encoded, "LEAST_BYTES", 0)
    for name, count in (("a", 60), ("b", 20)):
        rows = [{"text": f"{name} document {i} " + "word " * (i % 40)} for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files, tokenizer = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"], load_tokenizer(TINY_K2)
    encoded_files(files, tokenizer, 64)
    return lambda: encoded_files(files, tokenizer, 64).examples


def batches(examples, start=None):
    return Batches(examples, 128, 5, start, order=Mixed(examples.sources_N, WEIGHTS, 5))


def test_the_store_is_memory_mapped_and_any_document_is_read_alone(opened):
    examples = opened()
    documents = examples._fetch.__self__
    assert isinstance(documents._tokens, mmap.mmap) and isinstance(documents._weights, mmap.mmap)
    in_order = [list(example.tokens) for example in examples]
    for index in np.random.default_rng(0).permutation(len(examples)).tolist():
        assert list(examples[index].tokens) == in_order[index]


def test_each_file_is_seen_as_often_as_its_weight_says(opened):
    examples = opened()
    epochs = 4
    drawn = [index for epoch in range(epochs) for batch in batches(examples).plan(epoch) for index in batch]
    sources = [examples[index].source for index in drawn]
    assert sources.count(0) == 0.5 * 60 * epochs and sources.count(1) == 2 * 20 * epochs


def test_a_mixture_resumes_exactly_from_a_store_opened_again(opened):
    straight = batches(opened())
    run = [next(straight) for _ in range(straight.len_steps(3))]
    for at in range(0, len(run) - 1, 3):
        again, cursor = next(batches(opened(), start=run[at][1]))  # another process would open it so too
        expected, after = run[at + 1]
        assert cursor == after
        assert all(torch.equal(x.tokens_T, y.tokens_T) for x, y in zip(again, expected, strict=True))


def test_control_arm_a_token_that_changes_on_the_disk_is_seen(opened, tmp_path):
    opened()
    (tokens,) = tmp_path.glob("cache/unfreeze/encoded/*/tokens")
    raw = bytearray(tokens.read_bytes())
    raw[4] ^= 1
    tokens.write_bytes(raw)
    with pytest.raises(DataError, match="damaged on disk"):
        list(opened())
