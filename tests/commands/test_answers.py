"""`unfreeze generate --data`: what a teacher writes becomes rows that sft takes; broken off it goes on, and no row is
asked twice; a server that fails, cuts or refuses loses nothing."""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

import unfreeze
from unfreeze import cli
from unfreeze.commands.demo import TINY_K2
from unfreeze.core.errors import DataError
from unfreeze.data import read_rows
from unfreeze.generate.engine import Engine

sys.path.insert(0, str(Path(__file__).parents[1] / "teach"))
from servers import say, serve

ROWS = [
    {"prompt": "What is the capital of France?"},
    {"question": "Who are you?", "answer": "Nobody."},
    {
        "messages": [
            {"role": "user", "content": "Hello."},
            {"role": "assistant", "content": "Hi."},
            {"role": "user", "content": "Name the young of a frog."},
        ]
    },
    {"instruction": "Name the symbol of gold.", "input": ""},
]
ROWS += [{"prompt": f"What is {n} and {n}?"} for n in range(8)]


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "asked.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


@pytest.fixture
def serving():
    """serving(reply) -> a running Server."""
    with serve() as start:
        yield start


@pytest.fixture
def generate(capsys, rows, tmp_path):
    def run(teacher, *arguments, code=0):
        given = [
            teacher,
            "--data",
            rows,
            "--out",
            tmp_path / "answers.jsonl",
            "--max-new-tokens",
            24,
            *arguments,
        ]
        assert cli.main(list(map(str, ["generate", "--json", *given]))) == code
        said = capsys.readouterr()
        return said.err if code else json.loads(said.out.splitlines()[-1])

    return run


def records(tmp_path, name="answers.jsonl"):
    return [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]


def chat(answer=lambda said: f"{said} That is the question."):
    """/v1/chat/completions; an answer may be a text, (text, finish_reason), or a status."""

    def reply(server, connection, body):
        given = answer(body["messages"][-1]["content"])
        if isinstance(given, int):
            return say(connection, given, {"error": {"message": "maximum context length"}})
        text, reason = given if isinstance(given, tuple) else (given, "stop")
        message = {"role": "assistant", "content": text}
        return {"choices": [{"index": 0, "message": message, "finish_reason": reason}]}

    return reply


def asked(server):
    return [body["messages"][-1]["content"] for _, _, body in server.asked]


def test_a_local_teacher(generate, tmp_path):
    result = generate(TINY_K2)
    found = records(tmp_path)
    model = unfreeze.load(TINY_K2)
    assert result["answered"] == len(found) == len(ROWS) - result["left_out"]
    for record in found:
        *before, said = record["messages"]
        plain = [{"role": turn["role"], "content": turn["content"]} for turn in before]
        assert said["content"] == model.chat(plain, max_new_tokens=24)
        assert record["source"]["teacher"] == str(TINY_K2) and record["source"]["ended"] == "stop"
    # only the teacher's turn is taught
    (several,) = [row for row in read_rows(tmp_path / "answers.jsonl") if len(row.messages) > 2]
    assert several.taught == [3] and several.messages[1]["content"] == "Hi."


def test_broken_off_it_goes_on_to_the_same_file(generate, tmp_path):
    arguments = ["--temperature", 1, "--seed", 5]
    generate(TINY_K2, *arguments)
    path = tmp_path / "answers.jsonl"
    left = path.with_name("answers.jsonl.left-out.jsonl")
    whole, beside = path.read_bytes(), left.read_bytes() if left.exists() else b""
    lines = whole.split(b"\n")
    path.write_bytes(b"\n".join(lines[:2]) + b"\n" + lines[2][:30])  # killed while it wrote
    left.unlink(missing_ok=True)
    generate(TINY_K2, *arguments)
    assert sorted(path.read_bytes().splitlines()) == sorted(whole.splitlines())
    assert (left.read_bytes() if left.exists() else b"") == beside
    before = path.read_bytes()
    generate(TINY_K2, *arguments)  # nothing is missing
    assert path.read_bytes() == before


def test_ctrl_c_keeps_what_has_ended_and_the_same_command_continues(generate, tmp_path, monkeypatch, capsys):
    arguments = ["--temperature", 1, "--seed", 2**64 - 1]
    generate(TINY_K2, *arguments)
    path = tmp_path / "answers.jsonl"
    whole = {record["source"]["row"]: record for record in records(tmp_path)}
    path.unlink()
    path.with_name("answers.jsonl.left-out.jsonl").unlink(missing_ok=True)
    step, count = Engine._step, []

    def interrupts(self, step_of, tokens):
        count.append(len(tokens))
        if len(count) == 12:
            raise KeyboardInterrupt
        return step(self, step_of, tokens)

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "_step", interrupts)
        assert generate(TINY_K2, *arguments, code=130) == "interrupted: the same command continues\n"
    kept = records(tmp_path)
    assert 0 < len(kept) < len(whole) and 0 < count[-1] < count[0] == len(ROWS)
    assert all(record == whole[record["source"]["row"]] for record in kept)
    generate(TINY_K2, *arguments)
    assert {record["source"]["row"]: record for record in records(tmp_path)} == whole


def test_a_server_is_asked_once_for_each_row_whatever_fails(generate, serving, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret-123")
    fails = {"on": True}

    def moody(said):
        return 500 if fails["on"] and said == "What is 2 and 2?" else f"{said} Hmm."

    from unfreeze.teach import client

    monkeypatch.setattr(client, "Client", partial(client.Client, tries=2))
    monkeypatch.setattr(
        "openai._base_client.time", SimpleNamespace(sleep=lambda seconds: None, time=time.time)
    )
    server = serving(chat(moody))
    said = generate(server.url, "--endpoint.served-name", "big", code=2)
    assert "answers 500" in said and "the same command continues" in said and "sk-secret" not in said
    kept = records(tmp_path)
    assert len(kept) == 7  # of the first eight rows only the one that failed is missing
    fails["on"] = False
    result = generate(server.url, "--endpoint.served-name", "big")
    assert result["answered"] == len(ROWS) and result["left_out"] == 0
    counts = {text: asked(server).count(text) for text in asked(server)}
    assert counts.pop("What is 2 and 2?") == 3 and set(counts.values()) == {1}
    assert server.asked[0][1]["Authorization"] == "Bearer sk-secret-123"
    assert not any("sk-secret" in path.read_text() for path in tmp_path.iterdir())
    assert server.asked[0][2]["model"] == "big" and server.asked[0][2]["max_tokens"] == 24


def test_answers_that_cannot_be_taught_are_beside_and_not_asked_for_again(
    generate, serving, tmp_path, capsys
):
    def mixed(said):
        return {
            "What is 1 and 1?": ("Two, and", "length"),
            "What is 2 and 2?": "  ",
            "What is 3 and 3?": 400,
        }.get(said, "Fine.")

    server = serving(chat(mixed))
    result = generate(server.url)
    assert (result["answered"], result["left_out"]) == (len(ROWS) - 3, 3)
    beside = {record["source"]["ended"] for record in records(tmp_path, "answers.jsonl.left-out.jsonl")}
    assert {"length", "stop"} < beside and any("maximum context length" in ended for ended in beside)
    count = len(server.asked)
    assert generate(server.url) == result and len(server.asked) == count


def test_a_server_that_refuses_everything_is_no_row_s_fault(generate, serving, tmp_path):
    server = serving(chat(lambda said: 400))
    assert "maximum context length" in generate(server.url, code=2)
    assert records(tmp_path) == [] and not (tmp_path / "answers.jsonl.left-out.jsonl").read_text()


def test_another_teacher_other_settings_or_other_data_do_not_mix(generate, serving, tmp_path, rows):
    server = serving(chat())
    generate(server.url)
    assert "temperature = 0.0, but now it is 1.0" in generate(server.url, "--temperature", 1, code=2)
    assert "answered with teacher" in generate(serving(chat()).url, code=2)
    rows.write_text(rows.read_text().replace("France", "Spain"))
    assert "row 1 differs from the one" in generate(server.url, code=2)
    assert len(records(tmp_path)) == len(ROWS)


def test_what_costs_is_said_first_and_refused_by_default(generate, tmp_path):
    said = generate("https://api.example.com/v1", code=2)
    assert "its price is unknown" in said
    said = generate(
        "https://api.example.com/v1", "--endpoint.price-read", 1, "--endpoint.price-written", 3, code=2
    )
    assert "written at $3 per million" in said and "the budget is $0" in said


@pytest.mark.parametrize(
    "arguments, says",
    [(["--prompt", "x"], "without prompt"), (["--out", "x.txt"], "JSON lines"), (["--top-k", "3"], "top_k")],
)
def test_flags_that_do_not_go_together(generate, arguments, says):
    assert says in generate("http://127.0.0.1:1", *arguments, code=2)


def test_rows_that_ask_nothing(tmp_path):
    path = tmp_path / "rows.jsonl"
    for row, says in [
        ({"text": "Paris."}, "a plain text has no prompt to answer"),
        ({"messages": [{"role": "assistant", "content": "Hi."}]}, "starts with the assistant"),
        ({"messages": []}, "empty"),
        ({"words": "x"}, "no known field"),
    ]:
        path.write_text(json.dumps(row) + "\n")
        with pytest.raises(DataError, match=says):
            list(read_rows(path, answers="asked"))
