"""Pairs and labels as examples: each answer is what sft makes of it, and a pair stays whole wherever it goes."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from unfreeze.commands.demo import TINY_K2
from unfreeze.core.errors import DataError
from unfreeze.data import Batches, Encoder, Example, encode_files, encoded_files, load_tokenizer, pack
from unfreeze.data.packing.packers import PACKERS
from unfreeze.data.packing.windows import InWindows
from unfreeze.data.rows.judged import judged_from_dict
from unfreeze.data.rows.shapes import row_from_dict
from unfreeze.data.store.streamed import streamed_files
from unfreeze.data.tokens.compared import Comparing

TOKENIZER = load_tokenizer(TINY_K2)
ASKED = {"role": "user", "content": "What colour is the sky?"}


def compare(fields: dict[str, object], answers: str = "pairs", length: int = 128, **options) -> list[Example]:
    return Comparing(Encoder(TOKENIZER, length, **options), answers)(judged_from_dict(fields, 5)).examples


def write(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_each_answer_is_what_sft_makes_of_it():
    """Of a prompt with an earlier answer, too: that is asked, in both."""
    for asked in ([ASKED], [ASKED, {"role": "assistant", "content": "Which?"}, ASKED]):
        said = {
            name: [{"role": "assistant", "content": text}]
            for name, text in (("chosen", "Blue."), ("rejected", "A green one."))
        }
        (pair,) = compare({"prompt": asked, **said})
        for document, answer in zip(pair.documents(), said.values(), strict=True):
            taught = Encoder(TOKENIZER, 128)(row_from_dict({"prompt": asked, "completion": answer})).examples[
                0
            ]
            assert (list(document.tokens), list(document.weights)) == (taught.tokens, taught.weights)
        assert pair.num_supervised == sum(document.num_supervised for document in pair.documents())


def test_of_two_texts_the_shared_tokens_are_the_prompt():
    (pair,) = compare({"chosen": "The sky is blue today.", "rejected": "The sky is green."})
    chosen, rejected = pair.documents()
    first = next(i for i, (a, b) in enumerate(zip(chosen.tokens, rejected.tokens, strict=False)) if a != b)
    assert first > 0
    for side in (chosen, rejected):
        assert list(side.weights) == [0.0] * first + [1.0] * (side.num_tokens - first)


def test_labels_and_pairs_as_labels():
    (good,) = compare({"prompt": "a", "completion": "b", "label": True}, "labels")
    (bad,) = compare({"prompt": "a", "completion": "b", "label": False}, "labels")
    assert (good.chosen, bad.chosen) == (good.num_tokens, 0) and good.has_label and bad.has_label
    assert good.checksum != bad.checksum  # a label that is turned is other data
    both = compare({"prompt": "a", "chosen": "b", "rejected": "c"}, "labels")
    assert [example.chosen for example in both] == [both[0].num_tokens, 0]
    with pytest.raises(DataError, match="compares pairs") as refused:
        compare({"prompt": "a", "completion": "b", "label": True})
    assert "--loss kto" in refused.value.next


def test_what_differs_only_before_the_template_is_refused():
    """Reasoning that is left out, or an end that is cut: nothing is left to compare."""
    sides = {
        name: [ASKED, {"role": "assistant", "content": "Blue.", "reasoning_content": text}]
        for name, text in (("chosen", "Rayleigh."), ("rejected", "No idea."))
    }
    assert compare(sides, reasoning="inline")
    with pytest.raises(DataError, match="as the chat template writes them"):
        compare(sides, reasoning="drop")
    long = {
        "prompt": "a",
        "chosen": "one two three four five six",
        "rejected": "one two three four five seven",
    }
    (whole,) = compare(long)
    length = whole.chosen - 3
    with pytest.raises(DataError, match=f"cut at {length}"):
        compare(long, length=length)


def test_a_pair_is_two_documents_side_by_side():
    pairs = [compare({"prompt": "a" * n, "chosen": "b", "rejected": "c" * n})[0] for n in (1, 3)]
    batch = pack(pairs)
    assert batch.documents["side"].tolist() == [1, -1, 1, -1]
    assert batch.documents["example"].tolist() == [0, 0, 1, 1] and batch.examples == 2 == batch.count
    assert batch.lengths() == [side.num_tokens for pair in pairs for side in pair.documents()]
    starts = set(batch.starts_S.tolist())
    assert [i for i, position in enumerate(batch.positions_T.tolist()) if position == 0] == sorted(starts)


def test_labels_are_joined_by_answers_to_other_prompts():
    """Each prompt with the answer before it: z is of answers that were not given to it."""
    made = [
        compare({"prompt": prompt, "completion": answer, "label": label}, "labels")[0]
        for prompt, answer, label in (("one", "eins", False), ("two", "zwei", True), ("three", "drei", True))
    ]
    batch = pack(made)
    assert batch.examples == 3 and batch.documents["side"].tolist() == [1, 1, -1, 0, 0, 0]
    assert batch.num_tokens == sum(example.packed_tokens for example in made)
    starts = [*batch.starts_S.tolist(), batch.num_tokens]
    texts = [TOKENIZER.decode(batch.tokens_T[a:b].tolist()) for a, b in pairwise(starts)]
    for text, words in zip(
        texts, ("two zwei", "three drei", "one eins", "two eins", "three zwei", "one drei"), strict=True
    ):
        prompt, answer = words.split()
        assert prompt in text and answer in text
    assert len(pack(made[:1]).starts_S) == 1  # alone it has no other answer


def judged(count: int, label: bool = False) -> list[dict[str, object]]:
    rows = [
        {"prompt": f"Question {n}", "chosen": "yes " * (1 + n % 7), "rejected": "no " * (1 + n % 5)}
        for n in range(count)
    ]
    if not label:
        return rows
    return [
        {"prompt": row["prompt"], "completion": row["chosen"], "label": n % 3 == 0}
        for n, row in enumerate(rows)
    ]


@pytest.mark.parametrize("answers", ["pairs", "labels"])
def test_every_store_and_every_packer_keep_a_pair_whole(answers: str, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("unfreeze.data.store.encoded.LEAST_BYTES", 0)
    path = write(tmp_path / "rows.jsonl", judged(40, answers == "labels"))
    options = {"answers": answers, "workers": 0}
    held = encode_files([path], TOKENIZER, 64, **options).examples
    ways: dict[str, Callable[[], object]] = {
        "on demand": lambda: encode_files([path], TOKENIZER, 64, held_bytes=0, **options).examples,
        "written": lambda: encoded_files([path], TOKENIZER, 64, **options).examples,
        "read": lambda: encoded_files([path], TOKENIZER, 64, **options).examples,
        "processes": lambda: encode_files([path], TOKENIZER, 64, answers=answers, workers=1).examples,
    }
    for name, way in ways.items():
        found = way()
        assert found.fingerprint() == held.fingerprint(), name
        assert [(list(e.tokens), e.chosen) for e in found] == [(list(e.tokens), e.chosen) for e in held], name
    for packing in PACKERS:
        batches = Batches(held, 160, 0, packing=packing)
        for _ in range(batches.len_steps(1)):
            (batch,), _ = next(batches)
            assert batch.num_tokens <= 160
            sides = batch.documents["side"].tolist()
            if answers == "pairs":
                assert sides == [1, -1] * batch.examples
            else:
                assert len(sides) == batch.examples * (2 if batch.examples > 1 else 1)


def test_windows_of_pairs_hold_every_row_once_and_go_on_where_they_stopped(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("unfreeze.data.store.streamed.WINDOW", 400)
    monkeypatch.setattr("unfreeze.data.store.streamed.FULL", 2)
    path = write(tmp_path / "rows.jsonl", judged(60))
    stream = streamed_files(
        [path], TOKENIZER, 64, least=10, tokens_per_step=160, seed=0, answers="pairs", workers=0
    )
    assert stream is not None and stream.windows > 1
    batches = Batches(InWindows(stream), 160, stream.seed)
    seen, cursors = 0, []
    while True:
        (batch,), cursor = next(batches)
        if batches.epoch:
            break
        cursors.append((cursor, batch))
        seen += batch.examples or 0
        assert batch.documents["side"].tolist() == [1, -1] * (batch.examples or 0)
    assert seen == 60
    middle = len(cursors) // 2
    again = Batches(InWindows(stream), 160, stream.seed, cursors[middle - 1][0])
    assert next(again)[0][0].tokens_T.tolist() == cursors[middle][1].tokens_T.tolist()
    stream.close()
