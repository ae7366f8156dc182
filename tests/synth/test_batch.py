"""Batch files in OpenAI's form, booked before they are there, and their results."""

from __future__ import annotations

import json

import pytest
from synth_plans import PRICES, RECIPE, SEEDS, answered, lines
from synth_plans import batch_result as result

from unfreeze.core.errors import ConfigError, DataError
from unfreeze.synth import batch
from unfreeze.synth.batch import read_results, refuse_waiting, write_batches
from unfreeze.synth.plan import make_plan, write_plan
from unfreeze.synth.run import open_plan

URL = "https://api.example.com/v1"


@pytest.fixture
def opened(files, tmp_path):
    """opened(recipe, …) -> an open plan without a server."""
    open_ones = []

    def start(recipe=RECIPE, **changed):
        rows, file = files(recipe)
        made, folder = make_plan(
            rows,
            str(file),
            {"endpoint": URL, **PRICES, "budget_usd": 1.0, **changed},
            str(tmp_path / "plan"),
            lambda line: None,
        )
        write_plan(made, folder)
        open_ones.append(open_plan(folder, lambda line: None, None))
        return open_ones[-1]

    yield start
    for at in open_ones:
        at.close()


def test_files_have_openai_s_form_and_every_request_once(opened, tmp_path):
    at = opened(RECIPE + "batch_requests = 5\n")
    files = write_batches(at, tmp_path / "out", again=False)
    assert [len(lines(file)) for file in files] == [5, 5, 2]
    every = [line for file in files for line in lines(file)]
    assert {tuple(line) for line in every} == {("custom_id", "method", "url", "body")}
    assert {(line["method"], line["url"]) for line in every} == {("POST", "/v1/chat/completions")}
    assert len({line["custom_id"] for line in every}) == len(SEEDS)
    assert every[0]["body"]["max_tokens"] == 100 and every[0]["body"]["messages"][0]["role"] == "user"
    # one attempt each: a batch is not retried
    assert at.ledger.written == 100 * len(SEEDS)
    assert at.ledger.spent == pytest.approx(
        json.loads((at.folder / "plan.json").read_text())["worst_usd"] / 3
    )


def test_a_file_has_at_most_so_many_bytes(opened, tmp_path):
    at = opened(RECIPE.replace("Say it", "Say it " + "very " * 500) + "batch_bytes = 10000\n")
    files = write_batches(at, tmp_path / "out", again=False)
    assert len(files) > 3 and all(file.stat().st_size <= 10_000 for file in files)
    assert sum(len(lines(file)) for file in files) == len(SEEDS)


def test_nothing_is_written_above_the_ceiling(opened, tmp_path):
    at = opened(RECIPE + "retries = 0\n")
    at.ledger.usd = at.plan.worst_usd * 0.99
    with pytest.raises(ConfigError, match="of the budget of"):
        write_batches(at, tmp_path / "out", again=False)
    assert not list((tmp_path / "out").iterdir()) and at.ledger.spent == 0


def test_what_waits_is_not_written_or_sent_again_unless_asked(opened, tmp_path):
    at = opened()
    write_batches(at, tmp_path / "out", again=False)
    booked = at.ledger.spent
    with pytest.raises(ConfigError, match=r"12 requests wait in .*batch-0001.jsonl") as caught:
        write_batches(at, tmp_path / "out", again=False)
    assert "--batch-results" in caught.value.next and at.ledger.spent == booked
    files = write_batches(at, tmp_path / "out", again=True)
    assert files[0].name == "batch-0002.jsonl" and at.ledger.spent == pytest.approx(2 * booked)


def test_results_become_rows_and_those_that_failed_may_be_asked_again(opened, tmp_path):
    at = opened()
    (file,) = write_batches(at, tmp_path / "out", again=False)
    keys = [line["custom_id"] for line in lines(file)]
    results = tmp_path / "results.jsonl"
    body = answered("Cut it was in the", ended="length")
    given = [result(key) for key in keys[:8]]
    given += [result(keys[8], error={"code": "expired"}), result(keys[9], {"error": {}}, 500)]
    given += [result(keys[10], {"error": {"message": "filtered"}}, 400), result(keys[11], body)]
    results.write_text("\n".join(given[::-1]) + "\n\n", encoding="utf-8")
    assert read_results(at, results) == {"answers": 10, "failed": 2, "known": 0}
    written = at.rows()
    assert written.rows == 8
    assert dict(written.left_out) == {"ended by server refused": 1, "cut at max_tokens = 100": 1}
    refuse_waiting(at.folder)  # nothing waits
    assert [request.key for request in at.missing()] == keys[8:10]
    before = (at.folder / "answers.jsonl").read_bytes()
    assert read_results(at, results) == {"answers": 0, "failed": 2, "known": 10}
    assert (at.folder / "answers.jsonl").read_bytes() == before
    (again,) = write_batches(at, tmp_path / "out", again=False)
    assert [line["custom_id"] for line in lines(again)] == keys[8:10]


@pytest.mark.parametrize(
    "line, says",
    [
        (result("0" * 24), "line 1 answers '0+', which this plan did not ask"),
        ('{"custom_id": "a", "method": "POST"}', "line 1 is no result of a batch"),
        ("{", "line 1 is not JSON"),
        (json.dumps({"custom_id": "a", "response": {"status_code": 200, "body": {}}}), "has no message"),
    ],
)
def test_a_line_that_is_no_result_is_named(opened, tmp_path, line, says):
    at = opened()
    (tmp_path / "results.jsonl").write_text(line + "\n")
    with pytest.raises((DataError, ConfigError, Exception), match=says):
        read_results(at, tmp_path / "results.jsonl")
    with pytest.raises(DataError, match="there is no file"):
        read_results(at, tmp_path / "gone.jsonl")


def test_control_arm_files_before_they_are_booked(opened, tmp_path, monkeypatch):
    """With the booking after the files, a file that may be submitted is there although nothing is booked."""
    real = batch._write
    seen: list[float] = []
    at = opened()
    monkeypatch.setattr(batch, "_write", lambda *all: (seen.append(at.ledger.spent), real(*all)))
    write_batches(at, tmp_path / "out", again=False)
    assert seen and min(seen) > 0
    monkeypatch.setattr(at.ledger, "book_all", lambda attempts: None)
    late = tmp_path / "late"
    at.ledger.read = at.ledger.written = 0
    write_batches(at, late, again=True)
    assert seen[-1] == 0


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_stopped_between_two_files_no_request_is_in_two(opened, tmp_path, monkeypatch, error):
    """All are booked before the first file; the same command then refuses, so none is submitted twice."""
    at, real, written = opened(RECIPE + "batch_requests = 5\n"), batch._write, []

    def stops(path, requests):
        if written:
            raise error
        written.append(path)
        real(path, requests)

    monkeypatch.setattr(batch, "_write", stops)
    with pytest.raises(error):
        write_batches(at, tmp_path / "out", again=False)
    booked = at.ledger.spent
    monkeypatch.setattr(batch, "_write", real)
    with pytest.raises(ConfigError, match="5 requests wait in"):
        write_batches(at, tmp_path / "out", again=False)
    assert at.ledger.spent == booked > 0 and at.ledger.written == 100 * len(SEEDS)
    assert [len(lines(file)) for file in sorted((tmp_path / "out").glob("*.jsonl"))] == [5]
