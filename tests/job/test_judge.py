"""A judge behind a server of these tests: planted biases, faults by name, the budget, what is kept; and one behind
this project's own endpoint."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import unfreeze
from unfreeze.config.judge import read_judge
from unfreeze.core.errors import CheckpointError, ConfigError, DataError, StepLeft, StepRefused
from unfreeze.data.rows.row import Conversation
from unfreeze.job.judge import Judge
from unfreeze.rollout.reward import outcomes
from unfreeze.rollout.verdicts import Pairs, Scores

sys.path.insert(0, str(Path(__file__).parents[1] / "teach"))
from servers import Judging, answers_in, say, serve


@pytest.fixture
def serving():
    """serving(reply) -> a running Server."""
    with serve() as start:
        yield start


@pytest.fixture
def judge(tmp_path):
    """judge(url, …) -> a Judge in a folder of its own; the last fields are lines of its file."""
    opened = []

    def start(url, folder="judge", **fields):
        file = tmp_path / "judge.toml"
        fields = {"rubric": "Short is good.", "timeout": 5.0, "at_once": 4, **fields, "endpoint": url}
        file.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in fields.items()))
        opened.append(Judge(read_judge(str(file)), tmp_path / folder))
        return opened[-1]

    yield start
    for each in opened:
        each.close()


def row(number):
    prompt = f"What is {number}?"
    return Conversation(
        [{"role": "user", "content": prompt}],
        row=number,
        shape="prompt/completion",
        columns={"prompt": prompt},
    )


def answers(*groups):
    return [(of, text) for of, texts in zip(map(row, range(1, 9)), groups, strict=False) for text in texts]


def by_length(shown):
    if len(shown) == 1:
        return f'It has {len(shown[0])} letters.\n{{"score": {min(10, len(shown[0]))}}}'
    return json.dumps({"better": 1 if len(shown[0]) > len(shown[1]) else 2})


THREE = (("a", "bbb", "cc"), ("dddd", "e", "ff"))


@pytest.mark.parametrize("mode", ["score", "pairs"])
def test_a_judge_of_length_ranks_by_length(serving, judge, mode):
    server = serving(Judging(by_length))
    graded = judge(server.url, mode=mode).grade(answers(*THREE))
    of = {
        "score": lambda text: len(text) / 10,
        "pairs": {"a": 0, "bbb": 1, "cc": 0.5, "dddd": 1, "e": 0, "ff": 0.5}.get,
    }
    assert [each.reward for each in graded] == [of[mode](text) for texts in THREE for text in texts]
    assert len(server.asked) == {"score": 6, "pairs": 12}[mode]
    path, _, body = server.asked[0]
    assert path == "/v1/chat/completions" and body["temperature"] == 0 and body["max_tokens"] == 512
    assert "Short is good." in body["messages"][0]["content"] and "model" not in body
    if mode == "pairs":  # within a group only
        met = {frozenset(answers_in(body)) for _, _, body in server.asked}
        assert all(pair <= set(THREE[0]) or pair <= set(THREE[1]) for pair in met) and len(met) == 6


def test_a_judge_that_prefers_the_first_gives_ties_only(serving, judge):
    graded = judge(serving(Judging(lambda shown: "1")).url, mode="pairs", model="m").grade(answers(*THREE))
    assert all(each.reward == 0.5 and each.parts == {"agreement": 0.0} for each in graded)


def hangs(server, connection, body):
    server.released.wait(20)


def status(code):
    return lambda server, connection, body: say(connection, code, {"error": {"message": "not this one"}})


def refuses(server, connection, body):
    return {
        "choices": [
            {"message": {"content": None, "refusal": "I cannot judge that."}, "finish_reason": "stop"}
        ]
    }


FAULTS = {
    "rubbish": (Judging(lambda shown: "I like it.\x1b[2J"), "unreadable", "I like it."),
    "nothing": (Judging(lambda shown: ""), "unreadable", "the judge wrote nothing"),
    "cut": (Judging(lambda shown: "Well, well", "length"), "unreadable", "cut at max_tokens = 512: Well"),
    "refusal": (refuses, "refused", "I cannot judge that."),
    "filter": (Judging(lambda shown: "", "content_filter"), "refused", "the server's filter ended it"),
    "400": (status(400), "refused", "answers 400: not this one"),
    "503": (status(503), "error", "answers 503: not this one; 3 tries"),
    "no message": (lambda server, connection, body: {"choices": []}, "error", "its answer has no message"),
}


@pytest.mark.parametrize("mode", ["score", "pairs"])
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_has_a_name_and_is_never_a_reward(serving, judge, monkeypatch, name, mode):
    monkeypatch.setattr("openai._base_client.time.sleep", lambda seconds: None)
    reply, outcome, words = FAULTS[name]
    graded = judge(serving(reply).url, mode=mode).grade(answers(*THREE))
    assert outcomes(graded) == {outcome: 6} and all(each.reward is None for each in graded)
    assert all(words in each.message and "\n" not in each.message for each in graded)


def test_one_fault_is_one_answers(serving, judge):
    server = serving(Judging(lambda shown: "?" if shown == ["e"] else by_length(shown)))
    graded = judge(server.url).grade(answers(*THREE))
    assert [each.outcome for each in graded] == ["ok"] * 4 + ["unreadable", "ok"]


def test_a_judge_that_hangs_is_left(serving, judge, monkeypatch):
    """As soon as all that are asked at once are late, without one verdict."""
    monkeypatch.setattr("openai._base_client.time.sleep", lambda seconds: None)
    server, began = serving(hangs), time.monotonic()
    graded = judge(server.url, timeout=0.2, at_once=2).grade(answers(*THREE))
    assert time.monotonic() - began < 3
    assert outcomes(graded) == {"timeout": 2, "skipped": 4}
    assert "no whole answer in 0.2 seconds; 3 tries" in graded[0].message


def test_too_many_late_verdicts_end_the_waiting(serving, judge, monkeypatch):
    """The first answer is judged; then more than a third are late."""
    monkeypatch.setattr("openai._base_client.time.sleep", lambda seconds: None)

    def reply(server, connection, body):
        return (
            Judging(by_length)(server, connection, body) if answers_in(body) == ["a"] else hangs(server, 0, 0)
        )

    slow = judge(serving(reply).url, timeout=0.1, at_once=1)
    assert outcomes(slow.grade(answers(*THREE), failing=0.3)) == {"ok": 1, "timeout": 2, "skipped": 3}


def test_ctrl_c_does_not_wait_for_the_judge(serving, judge):
    began = time.monotonic()
    with pytest.raises(StepLeft):
        judge(serving(hangs).url).grade(answers(*THREE), stop=lambda: time.monotonic() - began > 0.3)
    assert time.monotonic() - began < 2


def test_what_would_fail_for_each_answer_stops_the_step_with_its_remedy(serving, judge):
    server = serving(status(401))
    with pytest.raises(StepRefused, match="answers 401: not this one") as caught:
        judge(server.url, at_once=1).grade(answers(*THREE))
    assert "OPENAI_API_KEY" in caught.value.next and len(server.asked) <= 2


def test_the_budget_is_kept_and_a_verdict_is_asked_for_once(serving, judge, tmp_path):
    server = serving(Judging(by_length))
    fields = {"price_read": 0.0, "price_written": 1000.0, "max_tokens": 10, "at_once": 1}  # 1 cent each
    with pytest.raises(ConfigError, match=r"the budget is \$0\.0050") as caught:
        judge(server.url, budget_usd=0.005, **fields)
    assert "a larger budget_usd" in caught.value.next and not server.asked
    poor = judge(server.url, budget_usd=0.04, **fields)
    with pytest.raises(StepRefused, match=r"\$0\.0400 of the budget of \$0\.0400 is spent") as caught:
        poor.grade(answers(*THREE))
    assert len(server.asked) == 4 and "a larger budget_usd" in caught.value.next
    # it goes on with more money, in the same folder, and pays for no verdict twice
    poor.close()
    richer = judge(server.url, budget_usd=0.065, **fields)
    assert [each.reward for each in richer.grade(answers(*THREE))] == [0.1, 0.3, 0.2, 0.4, 0.1, 0.2]
    assert len(server.asked) == 6 and json.loads((tmp_path / "judge" / "spent.json").read_text()) == {
        "usd": pytest.approx(0.06)
    }
    again = judge(server.url, budget_usd=0.065, **fields)
    assert again.grade(answers(*THREE)) == richer.grade(answers(*THREE)) and len(server.asked) == 6
    with pytest.raises(ConfigError, match="its price is unknown"):
        judge("https://api.example.com/v1")  # in the same folder
    judge(server.url, budget_usd=1.0, **fields, rubric="Long is good.").grade(answers(*THREE))
    assert len(server.asked) == 12  # control: another rubric is another question


def test_equal_answers_are_one_request_and_a_cut_line_is_asked_again(serving, judge, tmp_path):
    server = serving(Judging(by_length))
    first = judge(server.url)
    assert [each.reward for each in first.grade(answers(("aa", "aa", "b")))] == [0.2, 0.2, 0.1]
    assert len(server.asked) == 2
    first.close()
    path = tmp_path / "judge" / "verdicts.jsonl"
    path.write_bytes(path.read_bytes()[:-5])
    second = judge(server.url)
    second.grade(answers(("aa", "aa", "b")))
    assert len(server.asked) == 3 and len(path.read_text().splitlines()) == 2
    second.close()
    judge(server.url).grade(answers(("aa", "aa", "b")))
    assert len(server.asked) == 3
    path.write_text('{"key": 1}\n')
    with pytest.raises(CheckpointError, match="line 1 holds no verdict"):
        judge(server.url)


def test_a_reference_that_is_named_must_be_in_each_row(serving, judge):
    url = serving(Judging(by_length)).url
    with pytest.raises(
        DataError, match="row 1 has no column 'prompt_', which is the judge's reference; nearest"
    ):
        judge(url, reference="prompt_").check([row(1)])
    judge(url).check([row(1)])


BAD = {
    "needs endpoint": "rubric = 'r'",
    "needs one rubric and has none": "endpoint = 'http://a'",
    "needs one rubric and has two": "endpoint = 'http://a'\nrubric = 'r'\nrubric_file = 'r.md'",
    "rubric_file = 'none.md' cannot be read": "endpoint = 'http://a'\nrubric_file = 'none.md'",
    "the rubric is empty": "endpoint = 'http://a'\nrubric = ' '",
    "rubrik.*nearest: 'rubric'": "endpoint = 'http://a'\nrubrik = 'r'",
    "pairs": "endpoint = 'http://a'\nrubric = 'r'\npairs = 1",
    "mode": "endpoint = 'http://a'\nrubric = 'r'\nmode = 'pair'",
    "not valid TOML": "endpoint: http",
    "not the address of a server": "endpoint = 'a'\nrubric = 'r'",
    "its price is unknown": "endpoint = 'https://api.example.com'\nrubric = 'r'",
}


@pytest.mark.parametrize("words", BAD)
def test_a_bad_file_is_one_line(tmp_path, words):
    file = tmp_path / "judge.toml"
    file.write_text(BAD[words])
    with pytest.raises(ConfigError, match=words) as caught:
        Judge(read_judge(str(file)), tmp_path / "judge")
    assert "--endpoint." not in caught.value.next


def test_the_rubric_may_be_a_file_and_the_hash_is_of_what_decides(tmp_path):
    file = tmp_path / "judge.toml"
    (tmp_path / "rubric.md").write_text("Be short.\n")

    def read(**fields):
        fields = {"endpoint": "http://a", **fields}
        file.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in fields.items()))
        return read_judge(str(file))

    beside = read(rubric_file="rubric.md")
    assert beside.rubric == "Be short."
    same = [{"endpoint": "http://b"}, {"budget_usd": 3.0}, {"timeout": 1.0}, {"at_once": 2}]
    assert {read(rubric="Be short.", **each).digest for each in same} == {beside.digest}
    other = [
        {"rubric": "Be long."},
        {"model": "m"},
        {"mode": "pairs"},
        {"temperature": 1.0},
        {"reference": "a"},
    ]
    assert len({read(**{"rubric": "Be short.", **each}).digest for each in other} | {beside.digest}) == 6
    with pytest.raises(ConfigError, match=r"there is no file .*juge\.toml"):
        read_judge(str(tmp_path / "juge.toml"))


@pytest.mark.parametrize("mode", ["score", "pairs"])
def test_this_project_s_own_endpoint_can_judge(judge, tmp_path, mode):
    """Oracle: the model's own greedy answers to the same messages. tiny-k2 judges nothing, and that has a name."""
    pytest.importorskip("starlette")
    from unfreeze.serve.router import Router
    from unfreeze.serve.running import Endpoint
    from unfreeze.serve.session import Speech
    from unfreeze.serve.speaker import Speaker

    model = unfreeze.load(unfreeze.TINY_K2, dtype="float32")
    speech = Speech(model.tokenizer, model.decoder.shape.max_positions)
    kind = Scores("Short is good.") if mode == "score" else Pairs("Short is good.", 4)
    questions = kind.questions(answers(("Two.", "Three.")))
    texts = [model.chat([{"role": "user", "content": each}], max_new_tokens=12) for each in questions]
    running = Endpoint().serve(Router(Speaker(model.engine), model.tokenizer, "tiny", speech))
    try:
        graded = judge(running.url, mode=mode, model="tiny", max_tokens=12).grade(answers(("Two.", "Three.")))
    finally:
        running.close()
    lines = [json.loads(line) for line in (tmp_path / "judge" / "verdicts.jsonl").read_text().splitlines()]
    assert sorted(line["text"] for line in lines) == sorted(texts) and len(texts) == 2
    assert outcomes(graded) == {"unreadable": 2}


def test_a_server_that_is_not_there_is_told_before_and_while_answers_are_graded(serving, judge, monkeypatch):
    monkeypatch.setattr(
        "openai._base_client.time", SimpleNamespace(sleep=lambda seconds: None, time=time.time)
    )
    server = serving(Judging(lambda shown: '{"score": 1}'))
    there = judge(server.url)
    there.check([row(1)])
    server.close()
    with pytest.raises(ConfigError, match=r"no server listens at http://127\.0\.0\.1:.*refused") as raised:
        there.check([row(1)])
    assert raised.value.next == "start it, or correct the address"
    with pytest.raises(StepRefused, match="onnection refused; 3 tries") as raised:
        there.grade(answers(*["a"] * 9))
    assert "check that the server runs" in raised.value.next
