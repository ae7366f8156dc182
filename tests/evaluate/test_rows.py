"""rows: answers are kept as they come, an interrupt loses none; choices; metrics that fail."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

import unfreeze
from unfreeze.core.built_in import TINY_K2
from unfreeze.core.errors import ConfigError, DataError
from unfreeze.data.rows.row import Conversation
from unfreeze.data.tokens.tokenizer import load_tokenizer
from unfreeze.evaluate.forced import Forced
from unfreeze.evaluate.kept import Kept
from unfreeze.evaluate.metrics import Simple, simple
from unfreeze.evaluate.rows import RowsTask, choices_of, content_of
from unfreeze.evaluate.tasks import Settings
from unfreeze.generate.answer import Piece


class Engine:
    """Answers every prompt with "It is N." by its number; Ctrl-C comes before answer `stops`."""

    def __init__(self, stops: int | None = None):
        self.asked: list[list[int]] = []
        self.stops = stops

    def stream(self, prompts, sampling, max_rows=None):
        for row, prompt in enumerate(prompts):
            if row == self.stops:
                raise KeyboardInterrupt
            self.asked.append(prompt)
            yield [Piece(row, 1, "It ", None)]
            yield [Piece(row, 1, f"is {len(self.asked)}.", "length" if row == 1 else "end")]


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(TINY_K2)


@pytest.fixture
def model_of(tokenizer):
    def make(engine, positions=64):
        decoder = SimpleNamespace(shape=SimpleNamespace(max_positions=positions))
        return SimpleNamespace(decoder=decoder, tokenizer=tokenizer, engine=engine)

    return make


def file_of(tmp_path, rows):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def numbers(tmp_path, count=6):
    return file_of(tmp_path, [{"prompt": f"{n}?", "answer": str(n)} for n in range(1, count + 1)])


def test_ctrl_c_loses_no_answer_and_the_same_again_asks_only_the_rest(tmp_path, model_of):
    path, engine = tmp_path / "kept.jsonl", Engine(stops=4)
    task = RowsTask("rows:r:numeric", numbers(tmp_path), "numeric", Settings(), simple("numeric"))
    task.check()
    seen: list[tuple[int, int]] = []
    with Kept(path, "m") as kept, pytest.raises(KeyboardInterrupt):
        task.score(model_of(engine), kept, lambda *done: seen.append(done))
    assert len(Kept(path)) == 4 and seen == [(n, 6) for n in (1, 2, 3, 4)]
    rest = Engine()
    rest.asked = list(engine.asked)
    with Kept(path, "m") as kept:
        (scores,) = task.score(model_of(rest), kept)
    assert len(rest.asked) == 6 and scores.values == [1.0] * 6 and len({*map(tuple, rest.asked)}) == 6
    assert scores.notes == ["2 of 6 answers were cut at 256 tokens (--max-new-tokens 512)"]
    other = Engine()  # control arm: another model's answers are its own
    with Kept(path, "other") as kept:
        task.score(model_of(other), kept)
    assert len(other.asked) == 6


def test_another_metric_asks_nothing_again(tmp_path, model_of):
    kept = Kept()
    for metric, values in (("numeric", [1.0] * 6), ("exact", [0.0] * 6), ("contains", [1.0] * 6)):
        engine = Engine()
        task = RowsTask("rows:r", numbers(tmp_path), metric, Settings(), simple(metric))
        task.check()
        assert task.score(model_of(engine), kept)[0].values == values
        assert len(engine.asked) == (6 if metric == "numeric" else 0)


def test_failures_are_counted_and_named_and_too_many_end_the_task(tmp_path, model_of):
    def grading(bad):
        def grade(answers):
            fault = Simple(None, "error", "ValueError: no")
            return [fault if row.row in bad else Simple(1.0) for row, _ in answers]

        return grade

    task = RowsTask("rows:r:my.py", numbers(tmp_path), "my.py", Settings(), grading({2}), own=True)
    task.check()
    (scores,) = task.score(model_of(Engine()), Kept())
    assert scores.values == [1.0, None, 1.0, 1.0, 1.0, 1.0] and scores.failed == {"error": 1}
    assert scores.notes[0] == "1 without a score (error): row 2: ValueError: no"
    five = RowsTask("rows:r:my.py", numbers(tmp_path), "my.py", Settings(limit=5), grading({2}), own=True)
    five.check()
    assert five.score(model_of(Engine()), Kept())[0].failed == {
        "error": 1
    }  # a fifth is not more than a fifth
    task = RowsTask("rows:r:my.py", numbers(tmp_path), "my.py", Settings(), grading({2, 3}), own=True)
    task.check()
    with pytest.raises(
        ConfigError, match=r"2 of 6 answers have no score, more than 20% \(error\): row 2: Val"
    ):
        task.score(model_of(Engine()), Kept())


def test_a_prompt_without_room_has_no_score(tmp_path, model_of):
    rows = [{"prompt": "short", "answer": "a"}] * 5 + [{"prompt": "long " * 60, "answer": "a"}]
    task = RowsTask("rows:r:exact", file_of(tmp_path, rows), "exact", Settings(), simple("exact"))
    task.check()
    (scores,) = task.score(model_of(Engine()), Kept())
    assert scores.values == [0.0] * 5 + [None] and scores.failed == {"no room": 1}


def test_rows_are_read_before_a_model_is_loaded(tmp_path):
    def task_of(rows, metric="exact", limit=None, most=9):
        settings = Settings(limit=limit, max_new_tokens=most)
        return RowsTask("rows:r", file_of(tmp_path, rows), metric, settings, simple("exact"))

    for rows, words in (([], "has no rows"), ([{"prompt": "a"}], "row 1 has no answer to compare with")):
        with pytest.raises(DataError, match=words):
            task_of(rows).check()
    with pytest.raises(DataError, match="row 1: its answer 'x' has no number"):
        task_of([{"prompt": "a", "answer": "x"}], "numeric").check()
    digests = set()
    for answer, metric, most in (
        ("a", "exact", 9),
        ("b", "exact", 9),
        ("b", "contains", 9),
        ("b", "exact", 8),
    ):
        task = task_of([{"prompt": "a", "answer": answer}, {"prompt": "b"}], metric, limit=1, most=most)
        task.check()
        digests.add(task.digest)
    assert len(digests) == 4


def test_choices_are_weighed_by_their_whole_probability(tmp_path, model_of, monkeypatch):
    rows = [
        {"prompt": "1?", "choices": ["a", "b c d", "e"], "answer": 1},
        {"prompt": "2?", "choices": ["a", "b"], "answer": "a"},
        *[{"prompt": f"{n}?", "choices": ["a", "b"], "answer": "b"} for n in range(6)],
        {"prompt": "3?", "choices": ["", "b"], "answer": "b"},
        {"prompt": "4?", "choices": ["a " * 300, "b"], "answer": "b"},
    ]
    task = RowsTask("rows:r:choice", file_of(tmp_path, rows), "choice", Settings(), None)
    task.check()

    def forced(model, asked, kept, shown, *, most):
        """A sum of -1 for the first choice, of -1.5 for all others."""
        first = [place == 0 or asked[place - 1][0] != before for place, (before, _) in enumerate(asked)]
        return [
            Forced([(-1.0 if one else -1.5) / len(tokens)] * len(tokens), [0] * len(tokens))
            for one, (_, tokens) in zip(first, asked, strict=True)
        ]

    monkeypatch.setattr("unfreeze.evaluate.rows.forced", forced)
    scores = task.score(model_of(Engine()), Kept())[0]
    assert scores.values == [0.0, 1.0, *[0.0] * 6, None, None] and scores.failed == {"no room": 2}
    for row, words in (({"choices": ["a"]}, "'choices' with two"), ({"answer": "z"}, "none of its choices")):
        row = {"prompt": "?", "choices": ["a", "b"], "answer": "a"} | row
        bad = RowsTask("rows:r:choice", file_of(tmp_path, [row]), "choice", Settings(), None)
        with pytest.raises(DataError, match=words):
            bad.check()
    assert choices_of(task.rows[0]) == (["a", "b c d", "e"], {1})


def test_a_real_model_answers_and_chooses_what_it_knows(tmp_path):
    """tiny-k2 knows its facts, by greedy answers and by probability; the batch changes nothing in float32."""
    lines = (TINY_K2 / "held_out.jsonl").read_text(encoding="utf-8").splitlines()[:6]
    facts = [json.loads(line) for line in lines]
    rows = [
        {"prompt": fact["question"], "answer": fact["fact"], "choices": [f"{fact['fact']}.", "Zzz, no."]}
        for fact in facts
    ]
    model = unfreeze.load(TINY_K2, dtype="float32")
    path = file_of(tmp_path, rows)
    values = []
    for batch in (1, None):
        settings = Settings(max_new_tokens=16, batch=batch)
        task = RowsTask("rows:r:contains", path, "contains", settings, simple("contains"))
        task.check()
        values.append(task.score(model, Kept())[0].values)
    assert values[0] == values[1] and sum(values[0]) >= 5
    rows = [{**row, "answer": 0} for row in rows]
    task = RowsTask("rows:r:choice", file_of(tmp_path, rows), "choice", Settings(), None)
    task.check()
    assert sum(task.score(model, Kept())[0].values) >= 5


def test_rows_that_ask_the_same_have_one_content():
    def row(prompt, **columns):
        return Conversation([{"role": "user", "content": prompt}], columns=columns)

    one = content_of(row("Who are you?", answer="I", id=1))
    assert content_of(row(" who are\nYou?", answer="I", id=2)) == one
    others = [
        row("Who are you", answer="I"),
        row("Who are you?", answer="We"),
        row("Who are you?", choices=["I"]),
    ]
    assert len({one, *map(content_of, others)}) == 4
