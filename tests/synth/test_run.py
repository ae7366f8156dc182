"""A plan against a real server: rows with their origin, what is left out, stopping and resuming."""

from __future__ import annotations

import json
import os
import signal
import time
from types import SimpleNamespace

import pytest
from servers import say
from synth_plans import PRICES, RECIPE, SEEDS, answered, lines, yoda

from unfreeze.core.errors import ConfigError, DataError
from unfreeze.data.rows.files import read_rows
from unfreeze.synth.plan import make_plan, write_plan
from unfreeze.synth.run import Watch, connect, only_here, open_plan
from unfreeze.teach.address import EndpointError
from unfreeze.teach.budget import Price

UNFREEZE = "-c", "import sys; from unfreeze import cli; sys.exit(cli.main(sys.argv[1:]))"


@pytest.fixture
def planned(files, tmp_path):
    """planned(url, recipe, seeds, …) -> the folder of a plan, of which $1 may be spent."""

    def plan(url, recipe=RECIPE, seeds=None, say=lambda line: None, **changed):
        rows, file = files(recipe, seeds)
        fields = {"endpoint": url, **PRICES, "budget_usd": 1.0, **changed}
        made, folder = make_plan(rows, str(file), fields, str(tmp_path / "plan"), say)
        write_plan(made, folder)
        return folder

    return plan


def run(folder, shown=None):
    """-> (the error that ended it or None, what was written, the open plan)."""
    at = open_plan(folder, (shown if shown is not None else []).append, connect)
    try:
        fault = at.ask()
        return fault, at.rows(), at
    finally:
        at.close()


def test_rows_have_prompt_model_origin_and_cost_and_sft_reads_them(serving, planned):
    server = serving(yoda)
    folder = planned(server.url)
    fault, written, at = run(folder)
    rows = lines(folder / "rows.jsonl")
    assert fault is None and written.rows == len(rows) == len(SEEDS) and not written.left_out
    for seed, row in zip(SEEDS, rows, strict=True):
        source = row["source"]
        assert row["messages"][0] == {"role": "user", "content": seed["question"]}
        assert row["messages"][1]["content"].endswith("weighs. Hmm.")
        assert source["seed"] == seed["id"] and source["model"] == "fake-1"
        assert source["prompt"] == [{"role": "user", "content": f"Say it as Yoda: {seed['answer']}"}]
        assert source["endpoint"] in server.url and source["time"].startswith("20")
        assert source["usage"] == {"prompt_tokens": 20, "completion_tokens": 12}
        assert source["cost_usd"] >= (20 * 1.0 + 12 * 2.0) / 1e6
    assert sum(row["source"]["cost_usd"] for row in rows) == pytest.approx(at.ledger.spent)
    assert written.usage_usd == pytest.approx(len(rows) * 44e-6)
    read = list(read_rows(folder / "rows.jsonl"))
    assert [row.messages[-1]["content"] for row in read] == [row["messages"][-1]["content"] for row in rows]
    assert {"temperature": 0.7, "max_tokens": 100}.items() <= server.asked[0][2].items()


def test_a_second_run_sends_nothing_and_writes_the_same_bytes(serving, planned):
    server = serving(yoda)
    folder = planned(server.url)
    run(folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    run(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert len(server.asked) == len(SEEDS)


def test_killed_and_run_again_no_answer_is_asked_for_twice(serving, planned, forkserver):
    """SIGKILL of the real command in the middle; test_ceiling.py has many."""

    def slow(server, connection, body):
        time.sleep(0.15)
        return yoda(server, connection, body)

    server = serving(slow)
    folder = planned(server.url, RECIPE + "at_once = 2\n")
    command = [*UNFREEZE, "synth", "run", folder, "--json"]
    going = forkserver.start(command)
    while len(server.asked) < 5 and going.poll() is None:
        time.sleep(0.01)
    going.kill()
    going.wait()
    asked_before = {json.dumps(body) for _, _, body in server.asked}
    known = {line["key"] for line in lines(folder / "answers.jsonl")}
    assert 0 < len(known) < len(SEEDS)
    first = len(server.asked)
    time.sleep(0.3)
    done = forkserver.run(command)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["rows"] == len(SEEDS) and result["finished"]
    later = [headers["Idempotency-Key"].split("-")[1] for _, headers, _ in server.asked[first:]]
    assert not known & set(later) and len(later) == len(SEEDS) - len(known)
    assert len(asked_before) <= len(SEEDS)
    # each request that reached the server is booked, also those whose answer was lost
    booked = len(lines(folder / "ledger.jsonl"))
    assert booked >= len(server.asked) and result["booked_usd"] <= result["budget_usd"]
    # a request that was lost and one that was sent again have one key
    assert len({headers["Idempotency-Key"] for _, headers, _ in server.asked}) == len(SEEDS)


def test_ctrl_c_waits_for_the_requests_under_way(serving, planned, forkserver):
    def slow(server, connection, body):
        time.sleep(0.5)
        return yoda(server, connection, body)

    server = serving(slow)
    folder = planned(server.url, RECIPE + "at_once = 3\n")
    going = forkserver.start([*UNFREEZE, "synth", "run", folder])
    while len(server.asked) < 4:
        time.sleep(0.01)
    os.kill(going.pid, signal.SIGINT)
    code, said = going.wait(), going.stderr.read_text(encoding="utf-8")
    assert code == 130 and "waiting for the requests under way" in said
    kept = lines(folder / "answers.jsonl")
    assert len(kept) == len(server.asked) < len(SEEDS)  # nothing that was paid for is lost
    assert f"{len(kept)} answers kept; the same command continues" in said
    made = lines(folder / "rows.jsonl") + lines(folder / "left_out.jsonl")
    assert len(made) == len(kept)


def test_two_runs_of_one_plan_are_refused(serving, planned):
    folder = planned(serving(yoda).url)
    with only_here(folder), pytest.raises(ConfigError, match="another process is writing answers"):
        only_here(folder).__enter__()


@pytest.mark.parametrize("name", ["seeds", "recipe"])
def test_a_plan_whose_files_changed_is_refused(serving, planned, tmp_path, name):
    server = serving(yoda)
    folder = planned(server.url)
    file = tmp_path / {"seeds": "seeds.jsonl", "recipe": "recipe.toml"}[name]
    file.write_text(file.read_text() + "\n")
    with pytest.raises(ConfigError, match=f"the {name} .* changed since") as caught:
        run(folder)
    assert "not asked again" in caught.value.next and not server.asked
    file.unlink()
    with pytest.raises(ConfigError, match=f"the {name} of .* are gone"):
        run(folder)


def test_more_seeds_in_the_same_folder_ask_only_for_the_new_ones(serving, planned):
    server, shown = serving(yoda), []
    run(planned(server.url))
    more = [*SEEDS, {"id": "new", "question": "And this?", "answer": "This weighs nothing."}]
    folder = planned(server.url, seeds=more, say=shown.append)
    assert shown[0].startswith("13 seeds, 1 request (12 more have their answer)")
    _, written, _ = run(folder)
    assert written.rows == 13 and len(server.asked) == 13


def test_bookings_at_another_price_are_not_mixed(serving, planned):
    folder = planned(url := serving(yoda).url)
    run(folder)
    with pytest.raises(ConfigError, match=r"bookings with price_written = 2.0, but now it is 9.0"):
        planned(url, price_written=9.0)


def test_answers_that_fail_a_check_are_left_out_with_their_reason(serving, planned):
    texts = {
        "s0": "",
        "s1": "As an AI model, no.",
        "s2": "short",
        "s3": "这是一个很长的中文句子,里面有 3 个数字。",
        "s4": "No digit is in this answer of mine.",
        "s5": "The weight is 38 stones of the kind that we know, hmm.",
        "s6": "cut 3 in the middle of",
    }
    numbers = {seed["answer"]: seed["id"] for seed in SEEDS}

    def mixed(server, connection, body):
        name = numbers[body["messages"][-1]["content"].removeprefix("Say it as Yoda: ")]
        if name == "s8":
            return say(connection, 400, {"error": {"message": "content filter"}})
        text = texts.get(name, f"The weight of thing {name} is told by {name} elders of the north, hmm.")
        return answered(text, ended="length" if name == "s6" else "stop")

    checks = '[check]\nleast_chars = 10\nforbid = ["as an AI"]\nlanguage = "en"\nregex = "[0-9]"\n'
    folder = planned(serving(mixed).url, RECIPE + "at_once = 1\n" + checks, SEEDS[5:] + SEEDS[:5])
    fault, written, _ = run(folder)
    assert fault is None and dict(written.left_out) == {
        "empty": 1,
        "contains 'as an AI'": 1,
        "not of 10 to 100,000 characters": 1,
        "not in en": 1,
        "without check.regex": 1,
        "cut at max_tokens = 100": 1,
        "ended by server refused": 1,
    }
    left = {row["source"]["seed"]: row for row in lines(folder / "left_out.jsonl")}
    assert len(left) == 7 and left["s8"]["fault"] == "ended by server refused"
    assert written.rows == len(SEEDS) - 7


def test_repeats_and_evaluation_rows_are_left_out(serving, planned, tmp_path):
    exam = "the quick brown fox jumps over the lazy dog and then sleeps until noon in the shade"
    (tmp_path / "exam.jsonl").write_text(json.dumps({"question": exam}) + "\n")
    long = " ".join(f"word{i}" for i in range(60))

    def same(server, connection, body):
        name = body["messages"][-1]["content"].split()[5]
        text = {"0": long, "1": f"{long} hmm", "2": f"I say: {exam.title()}!"}.get(name)
        return answered(text or " ".join(f"w{name}x{i}" for i in range(20)))

    folder = planned(
        serving(same).url, f'{RECIPE}[check]\nagainst = ["{tmp_path / "exam.jsonl"}"]\n', SEEDS[:6]
    )
    _, written, _ = run(folder)
    assert written.rows == 4 and dict(written.left_out) == {
        "repeats another row": 1,
        "shares words with an evaluation set": 1,
    }
    left = {row["source"]["seed"]: row["source"] for row in lines(folder / "left_out.jsonl")}
    assert left["s1"]["repeats"] == "s0" and "exam.jsonl row 1" in left["s2"]["leaked"]


def test_reasoning_is_kept_apart_dropped_or_required(serving, planned):
    def thinking(server, connection, body):
        number = int(body["messages"][-1]["content"].split()[5])
        thought = f"I count the stones of {number} and their weights."
        if number == 0:
            return answered("No thought for thing zero.")
        if number % 2:
            return answered(f"<think>\n{thought}\n</think>\n\nThe answer is {number} stones.")
        return answered(f"The answer is {number} stones.", reasoning_content=thought)

    url = serving(thinking).url
    for mode, rows in (("keep", 6), ("drop", 6), ("require", 5)):
        folder = planned(url, f'{RECIPE}reasoning = "{mode}"\n', SEEDS[:6])
        _, written, _ = run(folder)
        turns = [row["messages"][-1] for row in lines(folder / "rows.jsonl")]
        assert written.rows == rows
        assert all("<think>" not in turn["content"] for turn in turns)
        thoughts = [turn.get("reasoning_content", "") for turn in turns]
        assert sum("I count the stones" in thought for thought in thoughts) == (0 if mode == "drop" else 5)


def test_a_usage_above_max_tokens_stops_the_run_and_is_named(serving, planned):
    def dear(server, connection, body):
        return answered("Much it costs.", {"prompt_tokens": 20, "completion_tokens": 5000})

    server = serving(dear)
    folder = planned(server.url, RECIPE + "at_once = 1\n")
    fault, written, at = run(folder)
    assert isinstance(fault, EndpointError) and len(server.asked) == 1
    assert "usage says 5,000 tokens written; at most 100 were asked" in fault.message
    assert at.ledger.spent <= 1.0 and written.rows == 1  # the answer is kept
    again, *_ = run(folder)
    assert again is not None and again.message == fault.message and len(server.asked) == 1
    # a recipe that prices the reasoning goes on
    folder = planned(server.url, RECIPE + "at_once = 1\nreasoning_tokens = 5000\n")
    assert run(folder)[0] is None and len(server.asked) == len(SEEDS)


def test_a_usage_below_the_answer_is_refused_and_named(serving, planned):
    text = "stones " * 200

    def cheap(server, connection, body):
        own = body["messages"][-1]["content"]
        return answered(f"{own} {text}", {"prompt_tokens": 20, "completion_tokens": 2})

    server = serving(cheap)
    folder = planned(server.url, RECIPE + "trust_usage = true\n", SEEDS[:3])
    fault, written, at = run(folder)
    assert fault is None and written.usage_refused == 3 and written.usage_usd == 0
    assert "usage says 2 tokens written; the answer alone has 6" in written.usage_fault
    assert at.ledger.written == 300  # booked at its worst
    row = lines(folder / "rows.jsonl")[0]
    assert "the answer alone has 6" in row["source"]["usage_refused"][0]


def test_a_usage_that_may_be_true_lowers_what_is_booked_where_it_is_trusted(serving, planned):
    url = serving(yoda).url
    _, _, at = run(planned(url))
    worst = at.ledger.spent
    (at.folder / "answers.jsonl").unlink()
    (at.folder / "ledger.jsonl").unlink()
    _, _, at = run(planned(url, RECIPE + "trust_usage = true\n"))
    assert at.ledger.spent == pytest.approx(len(SEEDS) * 44e-6) and at.ledger.spent < worst / 4


def test_a_server_that_fails_for_all_stops_early(serving, planned, waits):
    server = serving(lambda server, connection, body: say(connection, 500, {"error": {"message": "oops"}}))
    folder = planned(server.url, RECIPE + "at_once = 2\nretries = 1\n")
    fault, written, _ = run(folder)
    assert isinstance(fault, EndpointError) and "answers 500: oops; 2 tries" in fault.message
    assert written.rows == 0 and 4 <= len(server.asked) // 2 <= 5
    assert len(lines(folder / "ledger.jsonl")) == len(server.asked)


def test_a_wrong_key_or_model_stops_at_once(serving, planned):
    server = serving(
        lambda server, connection, body: say(connection, 404, {"error": {"message": "no model"}})
    )
    folder = planned(server.url, RECIPE + "at_once = 1\n")
    fault, *_ = run(folder)
    assert fault is not None and "404: no model" in fault.message and len(server.asked) == 1


def test_failures_are_asked_again_by_the_same_command(serving, planned, waits):
    moody = {"left": 3}

    def reply(server, connection, body):
        if moody["left"]:
            moody["left"] -= 1
            return say(connection, 503, {"error": {"message": "busy"}})
        return yoda(server, connection, body)

    server = serving(reply)
    folder = planned(server.url, RECIPE + "at_once = 1\nretries = 0\n")
    fault, written, _ = run(folder)
    assert fault is not None and written.rows == len(SEEDS) - 3
    fault, written, _ = run(folder)
    assert fault is None and written.rows == len(SEEDS)


def test_the_ceiling_is_said_when_lost_requests_have_used_it_up(serving, planned):
    folder = planned(serving(yoda).url, RECIPE + "retries = 0\nat_once = 1\n")
    plan = json.loads((folder / "plan.json").read_text())
    (folder / "plan.json").write_text(json.dumps(plan | {"budget_usd": plan["worst_usd"]}))
    at = open_plan(folder, [].append, None)
    at.ledger.book("lost", 300, 100)  # as of a request under way at a kill
    at.close()
    fault, written, at = run(folder)
    assert isinstance(fault, ConfigError) and "of the budget of" in fault.message
    assert written.rows == len(SEEDS) - 2 or written.rows == len(SEEDS) - 1
    assert at.ledger.spent <= plan["worst_usd"]


BAD = [
    ({"recipe": RECIPE.replace("{answer}", "{anwser}")}, "row 1 has no field 'anwser'.*nearest: 'answer'"),
    ({"recipe": RECIPE.replace("{answer}", "{answer")}, "prompt: '{' at character 17 is no {field}"),
    ({"recipe": RECIPE + "extra = '{\"n\": 4}'\n"}, "extra holds 'n', which decides the price"),
    ({"recipe": RECIPE + "kind = 'labels'\n"}, "kind = labels needs a rubric"),
    ({"recipe": RECIPE + "kind = 'pairs'\n"}, "kind = pairs needs a judge, or another second answer"),
    ({"recipe": RECIPE + "max_token = 3\n"}, "max_token"),
    ({"recipe": RECIPE + "[check]\nlanguage = 'xx'\n"}, "check.language = 'xx' is not known"),
    ({"recipe": RECIPE + "[check]\nagainst = 'gone.jsonl'\n"}, "check.against: there is no file gone.jsonl"),
    ({"recipe": RECIPE + "[check]\nregex = '(a+)+'\n"}, "could take forever"),
    ({"seeds": [{}]}, "row 1 has no field 'answer'"),
    ({"url": "https://api.example.com/v1", "price_read": None}, "its price is unknown"),
    ({"budget_usd": 0.0}, "at most \\$0.0144; the budget is \\$0.0000"),
    ({"url": "127.0.0.1:1"}, "is not the address of a server"),
]


@pytest.mark.parametrize("changed, says", BAD)
def test_bad_input_is_one_line_before_anything_is_sent(planned, tmp_path, changed, says):
    changed = {"url": "http://127.0.0.1:1/v1", **changed}
    with pytest.raises((ConfigError, DataError), match=says) as caught:
        planned(changed.pop("url"), **changed)
    assert "\n" not in caught.value.message and caught.value.next
    assert not (tmp_path / "plan").exists()


def test_a_server_that_is_not_there_is_said(planned, tmp_path):
    folder = planned("http://127.0.0.1:1/v1")
    with pytest.raises(ConfigError, match=r"no server listens at http://127.0.0.1:1/v1"):
        run(folder)
    assert not (folder / "ledger.jsonl").exists()
    with pytest.raises(ConfigError, match=r"is no plan: it has no plan.json"):
        run(tmp_path)


def test_repeated_seeds_are_asked_once(serving, planned):
    shown: list[str] = []
    server = serving(yoda)
    folder = planned(server.url, seeds=[*SEEDS, *SEEDS[:4]], say=shown.append)
    assert "4 seeds repeat another's request" in shown[0]
    assert run(folder)[1].rows == len(SEEDS) == len(server.asked)


def test_the_worst_case_is_arithmetic(planned, files, tmp_path):
    """Σ attempts × (bytes + what templates add) × price, by hand."""
    folder = planned(
        "http://127.0.0.1:1/v1", RECIPE + "reasoning_tokens = 400\nread_beside = 64\nretries = 3\n"
    )
    plan = json.loads((folder / "plan.json").read_text())
    asked = [f"Say it as Yoda: {seed['answer']}" for seed in SEEDS]
    read = 4 * sum(len(text.encode()) + 2 * 16 + 64 for text in asked)
    written = 4 * len(SEEDS) * 500
    assert (plan["requests"], plan["read"], plan["written"]) == (len(SEEDS), read, written)
    assert plan["worst_usd"] == pytest.approx((read * 1.0 + written * 2.0) / 1e6)


def test_a_named_tokenizer_counts_closer_than_bytes_and_never_too_few(planned):
    from unfreeze.commands.demo import TINY_K2

    by_bytes = json.loads((planned("http://127.0.0.1:1/v1") / "plan.json").read_text())
    by_tokens = json.loads(
        (planned("http://127.0.0.1:1/v1", f'{RECIPE}tokenizer = "{TINY_K2}"\n') / "plan.json").read_text()
    )
    assert by_tokens["read"] < by_bytes["read"]


def test_half_a_surrogate_pair_and_terminal_codes_of_a_server_are_left_out_as_text(serving, planned):
    """JSON can name half a pair as an escape, UTF-8 has no bytes for it; the other answers are written."""
    odd = {"s1": ("half \ud800 of it", "stop"), "s2": ("a whole answer", "\x1b[31mred")}
    numbers = {seed["answer"]: seed["id"] for seed in SEEDS}

    def mixed(server, connection, body):
        name = numbers[body["messages"][-1]["content"].removeprefix("Say it as Yoda: ")]
        text, ended = odd.get(name, (f"Thing {name}, it is, hmm.", "stop"))
        return answered(text, ended=ended)

    folder = planned(serving(mixed).url)
    fault, written, _ = run(folder)
    assert fault is None and written.rows == len(SEEDS) - 2
    assert dict(written.left_out) == {"holds half a surrogate pair": 1, r"ended by \x1b[31mred": 1}
    left = {row["source"]["seed"]: row for row in lines(folder / "left_out.jsonl")}
    assert left["s1"]["messages"][-1]["content"] == "half \ud800 of it"
    assert len(list(read_rows(folder / "rows.jsonl"))) == written.rows


def test_before_the_first_answer_no_time_is_forecast(tmp_path):
    ledger = SimpleNamespace(read=10, written=20, price=Price())
    watch = Watch(RECIPE, ledger, total=5, show=print, began=time.monotonic() - 60)
    assert watch.line().endswith("; time left unknown")
    watch.came = 1
    assert "; 4 min" in watch.line()
