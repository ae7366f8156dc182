"""Tasks by their names: what is wrong is said before a model is loaded, and the nearest name with it."""

from __future__ import annotations

import json
from contextlib import ExitStack

import pytest

from unfreeze.core.errors import ConfigError, DataError
from unfreeze.evaluate.tasks import Settings
from unfreeze.job import tasks
from unfreeze.job.tasks import split_names, tasks_of


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "test.jsonl").write_text(json.dumps({"prompt": "1+1", "answer": "2"}) + "\n")
    (tmp_path / "book.txt").write_text("One text.")
    code = "def metric(prompt, completion, answer):\n    return answer in completion\n"
    (tmp_path / "my.py").write_text(code + "def other(prompt, completion, **row):\n    return 0.5\n")
    (tmp_path / "old.py").write_text("def reward(prompt, completion, answer):\n    return 1.0\n")
    return tmp_path


def test_names_come_with_commas_and_spaces():
    assert split_names(["needle,recall", " ppl:a.txt ", "needle"]) == ["needle", "recall", "ppl:a.txt"]
    with pytest.raises(ConfigError, match="tasks is empty"):
        split_names([","])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("needel", "there is no task 'needel'; nearest: 'needle'"),
        ("row:test.jsonl", "there is no task 'row:test.jsonl'; nearest: 'rows'"),
        ("rows", "'rows' has no file"),
        ("ppl:bok.txt", r"there is no file bok.txt.*; nearest: 'book.txt'"),
        ("rows:test.jsonl:exat", "there is no metric 'exat'; nearest: 'exact'"),
        ("rows:test.jsonl:mine.py", "there is no file mine.py.*"),
        ("rows:test.jsonl:my.py:metrik", "has no function 'metrik'; nearest: 'metric'"),
        ("exact", "there is no task 'exact'"),
    ],
)
def test_what_is_not_there(here, name, words):
    with ExitStack() as ends, pytest.raises(ConfigError, match=words):
        tasks_of([name], Settings(), ends)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("test.jsonl", "rows:test.jsonl:contains"),
        ("test.jsonl:exact", "rows:test.jsonl:exact"),
        ("more.csv", "rows:more.csv:contains"),
        ("book.txt", "ppl:book.txt"),
    ],
)
def test_a_file_alone_is_answered_with_its_task(here, name, remedy):
    with ExitStack() as ends, pytest.raises(ConfigError, match="is a file") as raised:
        tasks_of([name], Settings(), ends)
    assert raised.value.next == f"--tasks {remedy}"


def test_every_kind_is_read_and_metrics_are_graded_in_processes(here):
    names = ["rows:test.jsonl", "rows:test.jsonl:regex", "ppl:book.txt", "needle", "recall"]
    names += [f"rows:test.jsonl:{metric}" for metric in ("my.py", "my.py:other", "old.py")]
    with ExitStack() as ends:
        made = tasks_of(names, Settings(), ends)
        assert [task.name for task in made] == names and len({task.digest for task in made}) == len(names)
        graded = [
            made[i]._grade([(made[i].rows[0], "so 2."), (made[i].rows[0], "3")])  # type: ignore[attr-defined]
            for i in (0, 1, 5, 6, 7)
        ]
    rewards = [[each.reward for each in pair] for pair in graded]
    assert rewards == [[0.0, 0.0], [1.0, 0.0], [1.0, 0.0], [0.5, 0.5], [1.0, 1.0]]


def test_a_column_that_a_metric_needs_is_missed_before_the_model(here):
    (here / "bare.jsonl").write_text(json.dumps({"prompt": "1+1"}) + "\n")
    with ExitStack() as ends:
        with pytest.raises(DataError, match="row 1: metric needs the column 'answer'"):
            tasks_of(["rows:bare.jsonl:my.py"], Settings(), ends)
        tasks_of(["rows:bare.jsonl:my.py:other"], Settings(), ends)


def test_math_verify_without_its_library_says_how_to_get_it(here, monkeypatch):
    monkeypatch.setattr(tasks.importlib.util, "find_spec", lambda name: None)
    with ExitStack() as ends, pytest.raises(ConfigError, match="math-verify needs a library") as caught:
        tasks_of(["rows:test.jsonl:math-verify"], Settings(), ends)
    assert caught.value.next == "pip install math-verify"


def test_other_names_go_to_lm_eval_in_their_place(here, monkeypatch):
    class Theirs:
        digest = "d"

        def __init__(self, name):
            self.name = name

        def check(self):
            pass

    monkeypatch.setattr(tasks, "_of_harness", lambda names, settings: [Theirs(name) for name in names])
    names = ["arc_easy", "needle", "mine.yaml"]
    with ExitStack() as ends:
        made = tasks_of(names, Settings(), ends)
    assert [task.name for task in made] == names and isinstance(made[2], Theirs)
