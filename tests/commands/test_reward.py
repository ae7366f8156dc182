"""`unfreeze reward show`: answers with their rewards before any training; bad input is one line."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from unfreeze import cli
from unfreeze.commands.demo import TINY_K2
from unfreeze.commands.reward import write
from unfreeze.tracking.console import PipeConsole

sys.path.insert(0, str(Path(__file__).parents[1] / "teach"))
from servers import Judging, Server

PARTS = """
def reward(prompt, completion, answer, level=1):
    print("graded", prompt)
    return {"length": len(completion) / 100, "right": float(answer in completion), "level": level}
"""


@pytest.fixture
def my(tmp_path, monkeypatch):
    """A folder with my.py and rows.jsonl of three questions."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.py").write_text(PARTS)
    rows = [{"question": f"What is {n} and {n}?", "answer": str(2 * n), "level": n} for n in range(3)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def shown(*more, model=TINY_K2, file="my.py"):
    words = ["reward", "show", file, "--model", model, "--data", "rows.jsonl", "--dtype", "float32"]
    return [*map(str, words), "--max-new-tokens", "8", *map(str, more)]


def test_answers_their_parts_and_the_file(my, unfreeze_json, capsys):
    result = unfreeze_json(*shown("--sample", 2, "--answers", 2, "--out", "deep/out.jsonl"))
    lines = [json.loads(line) for line in (my / "deep" / "out.jsonl").read_text().splitlines()]
    assert result["answers"] == lines and result["outcomes"] == {"ok": 4}
    assert [(line["group"], line["answer"], line["row"]) for line in lines] == [
        (0, 0, 1),
        (0, 1, 1),
        (1, 0, 2),
        (1, 1, 2),
    ]
    for line in lines:
        right = float(str(2 * line["group"]) in line["text"])
        parts = {"length": len(line["text"]) / 100, "right": right, "level": float(line["group"])}
        assert line["parts"] == parts and line["reward"] == sum(parts.values())
        assert line["prompt"] == f"What is {line['group']} and {line['group']}?" and line["stop"]
    assert len({line["text"] for line in lines}) > 2  # seeds differ by answer
    again = unfreeze_json(*shown("--sample", 2, "--answers", 2))
    assert again["answers"] == lines  # and are the same every time
    assert cli.main(shown("--sample", 1)) == 0
    text = capsys.readouterr().out
    assert "row 1, answer 1 (" in text and re.search(r"reward [\d.]+ \(length [\d.]+, right ", text)
    assert "it printed: graded What is 0 and 0?" in text
    assert all(len(line) <= 80 for line in text.splitlines())


@pytest.mark.parametrize(
    ("source", "note"),
    [
        (
            "def reward(p, c): return 0",
            "note: every reward is 0, so nothing can be learnt from these answers",
        ),
        ("def reward(p, c): return float('nan')", "warning: 2 of 2 answers have no reward (2 not a number)"),
        ("def reward(p, c): raise ValueError(p)", "warning: 2 of 2 answers have no reward (2 error)"),
    ],
)
def test_rewards_that_teach_nothing_are_said(my, source, note, unfreeze_json):
    (my / "my.py").write_text(source)
    assert note in unfreeze_json(*shown("--sample", 2))["notes"]


@pytest.fixture
def judging(my):
    """judging(verdict, lines of its file) -> a judge at work, in judge.toml."""
    running = []

    def start(verdict, more=""):
        running.append(Server(Judging(verdict)))
        (my / "judge.toml").write_text(f'endpoint = "{running[-1].url}"\nrubric = "Be short."\n{more}')
        return running[-1]

    yield start
    for each in running:
        each.close()


def test_a_judge_s_words_are_shown_as_text(my, judging, unfreeze_json, capsys):
    server = judging(lambda shown: 'Short.\n\x1b[2J[bold]\n{"score": 7}')
    result = unfreeze_json(*shown("--sample", 2, file="judge.toml"))
    assert result["mean"] == 0.7 and result["outcomes"] == {"ok": 2} and len(server.asked) == 2
    assert cli.main(shown("--sample", 1, file="judge.toml")) == 0
    text = capsys.readouterr().out
    assert "reward 0.7\n" in text and r'the judge: Short. \x1b[2J[bold] {"score": 7}' in text
    assert "<reference>\n0\n" in server.asked[-1][2]["messages"][0]["content"]


def test_a_judge_of_pairs_needs_pairs(my, judging, unfreeze_json, capsys):
    server = judging(lambda shown: "1", 'mode = "pairs"')
    assert cli.main(shown(file="judge.toml")) == 2 and not server.asked
    assert "there is only one" in (said := capsys.readouterr().err) and "--answers 4" in said
    result = unfreeze_json(*shown("--sample", 1, "--answers", 3, file="judge.toml"))
    assert {line["reward"] for line in result["answers"]} == {0.5} and len(server.asked) == 6
    assert all(line["message"].startswith("tie, since the two orders differ") for line in result["answers"])
    assert cli.main(shown(file="none.toml")) == 2
    assert "there is no file none.toml" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message", "remedy"),
    [
        (["reward"], "reward takes the subcommand show, not nothing", "unfreeze reward show my.py"),
        (["reward", "shwo"], "not 'shwo'; nearest: 'show'", ""),
        (shown(file="none.py"), "reward = 'none.py': there is no file none.py in", ""),
        (shown(file="broken.py"), "reward: broken.py, line 1: ", "python broken.py"),
        (shown(file="my.py:other"), "my.py has no function 'other'; it has reward", "my.py:reward"),
        (shown(file="column.py"), "row 1: reward needs the column 'gold'; there are: answer, level, question", ""),
        (shown(file="same.py"), "its argument 'answer' is the model's answer, but the rows", "def reward(question, reply, answer, …)"),
        (shown("--columns", "question=task"), "there is no column 'task'", ""),
        (shown(file="agent.py:run"), "run(base_url, row) is an agent, not", "unfreeze grpo --agent my.py:run"),
        (shown(model="/nowhere"), "/nowhere does not exist", ""),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_before_the_model_is_loaded(my, words, message, remedy, capsys, monkeypatch):
    (my / "broken.py").write_text("def reward(p, c) return 1")
    (my / "column.py").write_text("def reward(p, c, gold): return 1")
    (my / "same.py").write_text("def reward(question, answer): return 1")
    (my / "agent.py").write_text("async def run(base_url, row): return 1")
    monkeypatch.setattr("unfreeze.generate.model.load_opened", None)
    assert cli.main(words) == 2
    said_lines = [
        line for line in capsys.readouterr().err.splitlines() if not line.startswith("warning: graders")
    ]
    assert message in said_lines[0] and len(said_lines) <= 2
    assert not remedy or remedy in said_lines[1]


def test_a_prompt_that_fills_the_window(my, capsys):
    (my / "rows.jsonl").write_text(json.dumps({"question": "word " * 9000, "answer": "1"}) + "\n")
    assert cli.main(shown()) == 2
    assert "row 1: the prompt fills the model's " in capsys.readouterr().err


def test_text_of_anyone_does_nothing_to_the_terminal(capsys):
    """Escape sequences, NULs, marks of rich and of direction; long lines and many lines are cut."""
    text = "\x1b[2J\0[bold]x[/]\u202e\r" + "z" * 10**6 + "\nline" * 100
    write(PipeConsole(width=60, highlight=False), text)
    out = capsys.readouterr().out
    assert r"\x1b[2J\x00[bold]x[/]\u202e\r" in out and "… 89 more lines" in out
    assert all(len(line) <= 60 and line.isprintable() for line in out.splitlines()) and len(out) < 4000
