"""/metrics as prometheus_client's own parser reads it."""

import math
import threading

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

import unfreeze
from tests.serve.clients import Load
from tests.serve.fakes import FakeSpeaker, until
from unfreeze.data.tokens.tokenizer import load_tokenizer
from unfreeze.serve.metrics import EACH, FIRST, OUTCOMES, Histogram, Metrics, outcome
from unfreeze.serve.router import Router
from unfreeze.serve.running import Endpoint
from unfreeze.serve.session import Speech
from unfreeze.serve.visit import Visit


def read(text):
    """(name, labels) -> value; and family -> type."""
    families = list(text_string_to_metric_families(text))
    values = {
        (sample.name, tuple(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }
    return values, {family.name: family.type for family in families}


def test_requests_tokens_and_times_are_counted():
    tokenizer = load_tokenizer(unfreeze.TINY_K2)
    speaker = FakeSpeaker(lambda work: [65, 66, 67], lambda id: "a", rows=0)
    endpoint = Endpoint().serve(Router(speaker, tokenizer, "fake", Speech(tokenizer, 4096)))
    url = endpoint.url

    def ask(messages):
        answers.append(httpx.post(f"{url}/v1/chat/completions", json={"messages": messages}, timeout=20))

    answers, asked = [], [{"role": "user", "content": "hello"}]
    threads = [threading.Thread(target=ask, args=(asked,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert until(lambda: endpoint.service.metrics.waiting == 2)
    values, _ = read(httpx.get(f"{url}/metrics").text)
    assert values["unfreeze_requests_waiting", ()] == 2 and values["unfreeze_requests_running", ()] == 0
    ask([])  # refused
    speaker.rows = 2
    for thread in threads:
        thread.join()
    assert until(lambda: not endpoint.service.gate.visits)

    values, types = read(httpx.get(f"{url}/metrics").text)
    count = {name: values["unfreeze_requests_total", (("outcome", name),)] for name in OUTCOMES}
    assert {name: n for name, n in count.items() if n} == {"answered": 2, "refused": 1}
    prompt = answers[-1].json()["usage"]["prompt_tokens"]
    assert values["unfreeze_prompt_tokens_total", ()] == 2 * prompt
    assert values["unfreeze_generation_tokens_total", ()] == 6
    assert values["unfreeze_time_to_first_token_seconds_count", ()] == 2
    assert values["unfreeze_time_per_token_seconds_count", ()] == 4
    assert values["unfreeze_requests_waiting", ()] == values["unfreeze_requests_running", ()] == 0
    assert types["unfreeze_requests"] == "counter" and types["unfreeze_requests_running"] == "gauge"
    assert types["unfreeze_time_to_first_token_seconds"] == "histogram"
    endpoint.close()


@pytest.mark.parametrize("limits", [FIRST, EACH])
def test_a_bucket_counts_all_values_up_to_its_limit(limits):
    values = [0.0, 0.001, 0.0011, 0.5, 0.5, 3.0, 1e6]
    histogram = Histogram(limits)
    for value in values:
        histogram.add(value)
    read_values, _ = read("\n".join([*histogram.lines("h", "words"), ""]))
    for limit in (*limits, math.inf):
        label = "+Inf" if math.isinf(limit) else str(limit)
        assert read_values["h_bucket", (("le", label),)] == sum(value <= limit for value in values)
    assert read_values["h_sum", ()] == pytest.approx(sum(values))


def test_an_outcome_is_of_the_status_or_of_who_ended_it():
    def of(status, words=""):
        visit = Visit()
        if words:
            visit.leave(words)
        visit.leave("done")
        return outcome(status, visit)

    statuses = {200: "answered", 404: "refused", 429: "busy", 503: "unavailable", 500: "failed", 0: "gone"}
    assert {status: of(status) for status in statuses} == statuses
    assert of(200, "gone") == "gone" and of(504, "too long") == "too long"


def test_retry_after_is_the_time_of_half_of_those_that_wait(monkeypatch):
    metrics = Metrics()
    assert metrics.retry_after() == 1
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    metrics._ends.extend([90.0, 92.0, 94.0, 96.0, 98.0, 100.0])  # one each 2 s
    metrics.waiting = 20
    assert metrics.retry_after() == 20
    metrics.waiting = 0
    assert metrics.retry_after() == 1


def test_what_clients_print_is_read():
    load = Load.read('{"statuses": {"200": 2}, "answers": {"7": ["is 7"]}, "bare": []}')
    assert load.statuses == {200: 2} and load.answers == {7: ["is 7"]}
