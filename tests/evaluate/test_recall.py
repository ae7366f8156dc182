"""needle and recall: a model that copies finds everything, one that forgets only what stands near the end."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from unfreeze.core.built_in import TINY_K2
from unfreeze.core.errors import ConfigError
from unfreeze.data.tokens.tokenizer import load_tokenizer
from unfreeze.evaluate.kept import Kept
from unfreeze.evaluate.recall import DEPTHS, REPEATS, RecallTask
from unfreeze.evaluate.tasks import Settings


@pytest.fixture(scope="module")
def model():
    shape = SimpleNamespace(max_positions=1024)
    return SimpleNamespace(decoder=SimpleNamespace(shape=shape), tokenizer=load_tokenizer(TINY_K2))


def copying(window: int):
    """In place of scored_answers: the likeliest token is the one that followed the longest equal end before."""

    def likeliest(context: list[int]) -> int | None:
        best, token = 0, None
        for at in range(1, len(context)):
            same = 0
            while same < at and context[at - 1 - same] == context[-1 - same]:
                same += 1
            if same > best:
                best, token = same, context[at]
        return token

    def scored(decoder, prompts, answers):
        results = []
        for prompt, answer in zip(prompts, answers, strict=True):
            contexts = [[*prompt, *answer[:i]][-window:] for i in range(len(answer))]
            right = [likeliest(context) == token for context, token in zip(contexts, answer, strict=True)]
            results.append([(-0.1, 0) if each else (-9.0, 5) for each in right])
        return results

    return scored


@pytest.mark.parametrize("name", ["needle", "recall"])
def test_a_model_that_copies_is_right_everywhere(name, model, monkeypatch):
    monkeypatch.setattr("unfreeze.evaluate.forced.scored_answers", copying(10_000))
    task = RecallTask(name, Settings(lengths=(256, 512)))
    task.check()
    right, log_p = task.score(model, Kept())
    assert {value for value in right.values if value is not None} == {1.0}
    assert log_p.unit == "nats per token" and list(log_p.items) == list(right.items)
    assert len(set(right.items)) == len(right.items) == 2 * 5 * REPEATS
    if name == "recall":  # 32 facts of 14 tokens are more than 256
        assert right.values[list(right.items).index("length 256, 32 pairs, text 1")] is None
        assert right.notes == [f"{right.values.count(None)} cells have more pairs than room"]


def test_one_that_forgets_finds_only_what_is_near_the_end(model, monkeypatch):
    """Control arm: the columns of the grid are depths."""
    monkeypatch.setattr("unfreeze.evaluate.forced.scored_answers", copying(150))
    right = RecallTask("needle", Settings(lengths=(512,))).score(model, Kept())[0]
    row = right.grid["512 tokens"]
    assert list(row) == [f"depth {depth:.0%}" for depth in DEPTHS]
    means = [sum(right.values[i] for i in cells) / REPEATS for cells in row.values()]
    assert means == [0.0, 0.0, 0.0, 1.0, 1.0]


def test_texts_are_of_their_length_and_come_from_the_seed(model):
    task = RecallTask("needle", Settings(seed=3))
    cells = task.cells(1024)
    texts = [task.text(model, cell) for cell in cells]
    for cell, (before, number) in zip(cells, texts, strict=True):
        assert cell.length - 20 < len(before) + len(number) <= cell.length
    assert {cell.length for cell in cells} == {256, 512, 1024}
    assert texts == [task.text(model, cell) for cell in cells]
    assert texts != [RecallTask("needle", Settings(seed=4)).text(model, cell) for cell in cells]
    written = model.tokenizer.decode(texts[0][0] + texts[0][1])
    place, number = written.rpartition("number of ")[2].split(" is ")
    assert written.count(f"The secret number of {place} is {number}") == 2 and len(number) == 5


def test_lengths_that_cannot_be_are_refused(model):
    with pytest.raises(ConfigError, match="2048 tokens, but the model has 1024 positions"):
        RecallTask("needle", Settings(lengths=(2048,))).score(model, Kept())
    with pytest.raises(ConfigError, match="8 tokens are too few"):
        RecallTask("needle", Settings(lengths=(8,))).check()
    assert {cell.length for cell in RecallTask("needle", Settings()).cells(128)} == {64}
    assert len(RecallTask("needle", Settings(limit=3)).cells(1024)) == 3
    digests = {RecallTask("needle", Settings(seed=seed)).digest for seed in (0, 0, 1)}
    assert len(digests) == 2
