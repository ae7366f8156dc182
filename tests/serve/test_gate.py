"""The gate: each guard refuses what it is for, and its control arm, the same request without the guard, passes."""

import asyncio
import json
import logging
import re
import socket
import threading
import time
from dataclasses import replace

import httpx
import pytest

import unfreeze
from tests.serve.fakes import served, until
from unfreeze.data.tokens.tokenizer import load_tokenizer
from unfreeze.serve import gate
from unfreeze.serve.connection import Patience
from unfreeze.serve.gate import Rules, hashed
from unfreeze.serve.request import Refused, read_chat
from unfreeze.serve.running import Endpoint
from unfreeze.serve.service import Service
from unfreeze.serve.session import Speech

KEY = "a-key-of-24-characters--"


async def echo(scope, receive, send):
    """Answer with the number of bytes of the body; /fail, /wait and /flood do otherwise."""
    body = (await receive())["body"]
    if scope["path"] == "/fail":
        raise FileNotFoundError("/home/somebody/secret.txt")
    if scope["path"] == "/wait":
        while (await receive())["type"] != "http.disconnect":
            pass
        LEFT.append(gate.VISIT.get())
        return
    if scope["path"] == "/flood":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        try:
            for _ in range(1000):
                await send({"type": "http.response.body", "body": b"x" * 65_536, "more_body": True})
                if gate.VISIT.get().gone:
                    break
        finally:
            LEFT.append(gate.VISIT.get())
        return
    text = json.dumps({"bytes": len(body)}).encode()
    await send(
        {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]}
    )
    await send({"type": "http.response.body", "body": text})


LEFT = []
RULES, PATIENCE = Rules(), Patience()


@pytest.fixture(scope="module")
def serving():
    """serving(rules, patience) -> a running Endpoint; one for each pair, closed at the end."""
    there = {}

    def serve(rules=RULES, patience=PATIENCE):
        key = (rules, patience)
        if key not in there:
            there[key] = served(echo, rules, patience)
        return there[key]

    yield serve
    for endpoint in there.values():
        endpoint.close()


def get(endpoint, path="/v1/models", **headers):
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.get(f"{endpoint.url}{path}", headers=named)


OPEN_RULES = Rules(hosts=frozenset())


@pytest.mark.parametrize(
    ("guard", "without", "headers", "status", "code"),
    [
        (Rules(), OPEN_RULES, {"host": "evil.example"}, 403, "wrong_host"),
        (Rules(), OPEN_RULES, {"host": "127.0.0.1.evil.example:80"}, 403, "wrong_host"),
        (Rules(), Rules(any_ip=True), {"host": "10.0.0.7"}, 403, "wrong_host"),
        (
            Rules(),
            Rules(origins=frozenset({"http://a.example"})),
            {"origin": "http://a.example"},
            403,
            "wrong_origin",
        ),
        (Rules(keys=(hashed(KEY),)), Rules(), {"authorization": f"Bearer {KEY}x"}, 401, "invalid_api_key"),
        (Rules(keys=(hashed(KEY),)), Rules(), {"authorization": KEY}, 401, "invalid_api_key"),
        (Rules(keys=(hashed(KEY),)), Rules(), {"authorization": f"Basic {KEY}"}, 401, "invalid_api_key"),
        (Rules(keys=(hashed(KEY),)), Rules(), {}, 401, "invalid_api_key"),
    ],
)
def test_who_may_not_ask_is_refused_in_openais_form(serving, guard, without, headers, status, code):
    refused = get(serving(guard), **headers)
    assert refused.status_code == status and refused.json()["error"]["code"] == code
    assert refused.headers["x-request-id"].startswith("req_")
    assert "access-control-allow-origin" not in refused.headers
    assert refused.headers.get("www-authenticate") == ("Bearer" if status == 401 else None)
    assert get(serving(without), **headers).status_code == 200  # control arm


def test_names_of_this_server_and_a_key_may_ask(serving):
    endpoint = serving(Rules(keys=(hashed("another-key-of-another"), hashed(KEY))))
    for host in ("localhost", f"LOCALHOST:{endpoint.port}", "[::1]:1", "127.0.0.1", "localhost."):
        assert get(endpoint, host=host, authorization=f"bearer  {KEY}").status_code == 200, host
    assert get(endpoint, "/health").status_code == 200  # without a key, and tells nothing
    assert get(endpoint, "/metrics").status_code == 401


def test_a_named_origin_gets_its_headers_and_its_preflight(serving):
    origin = "http://localhost:3000"
    endpoint = serving(Rules(origins=frozenset({origin}), keys=(hashed(KEY),)))
    before = httpx.options(f"{endpoint.url}/v1/models", headers={"origin": origin})
    assert before.status_code == 204 and before.headers["access-control-allow-origin"] == origin
    assert "authorization" in before.headers["access-control-allow-headers"]
    answer = get(endpoint, origin=origin, authorization=f"Bearer {KEY}")
    assert answer.headers["access-control-allow-origin"] == origin and answer.headers["vary"] == "origin"
    assert get(endpoint, origin="null").status_code == 403


def connected(endpoint):
    return socket.create_connection(("127.0.0.1", endpoint.port), timeout=10)


HEAD = b"POST /v1/x HTTP/1.1\r\nhost: localhost\r\n"


CHUNKED = b"transfer-encoding: chunked\r\n\r\nffffffff\r\n"  # one chunk of 4 GiB, of which a part comes


def sent_until_answered(endpoint, head, most=100_000_000):
    """Send a body of `most` bytes until an answer comes. -> bytes sent, the answer; b"" if none came."""
    with connected(endpoint) as client:
        client.sendall(head)
        client.settimeout(0)
        part, count = b"x" * 65_536, 0
        while count < most:
            try:
                return count, client.recv(65_536)
            except BlockingIOError:
                pass
            try:
                count += client.send(part)
            except BlockingIOError:
                time.sleep(0.001)
        return count, b""


@pytest.mark.parametrize("head", [b"content-length: 100000000\r\n\r\n", CHUNKED])
def test_a_body_of_100_mb_is_refused_before_it_is_read(serving, head):
    count, answer = sent_until_answered(serving(), HEAD + head)
    assert answer.startswith(b"HTTP/1.1 413") and count < 40_000_000
    # the rest of it holds nobody: the connection is cut, and the next client is served
    assert get(serving()).status_code == 200


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_may_have_its_last_byte_and_none_more(serving, chunked):
    endpoint = serving(replace(Rules(), body=1000))

    def post(count):
        body = b"x" * count
        return httpx.post(f"{endpoint.url}/v1/x", content=iter([body[:600], body[600:]]) if chunked else body)

    assert [post(count).json().get("bytes") for count in (999, 1000)] == [999, 1000]
    refused = post(1001)
    assert refused.status_code == 413 and "more than 1,000 bytes" in refused.json()["error"]["message"]


def test_control_arm_without_the_limit_all_of_it_is_read(serving):
    endpoint = serving(replace(Rules(), body=10**9))
    count, answer = sent_until_answered(endpoint, HEAD + CHUNKED, 40_000_000)
    assert count >= 40_000_000 and not answer


def dripped(endpoint, begin, drip, seconds):
    """Send `drip` a byte each 20 ms. -> the answer, None if nothing came within `seconds`."""
    with connected(endpoint) as client:
        client.sendall(begin)
        client.settimeout(0.02)
        end = time.monotonic() + seconds
        for i in range(10**6):
            try:
                return client.recv(65_536)
            except TimeoutError:
                pass
            except OSError:
                return b""
            if time.monotonic() > end:
                return None
            try:
                client.send(drip[i % len(drip) : i % len(drip) + 1])
            except OSError:
                return b""


SLOW = Patience(head=0.3, take=0.3, linger=0.3)


def test_a_head_of_a_byte_at_a_time_is_cut(serving):
    answer = dripped(serving(Rules(), SLOW), b"GET / HTTP/1.1\r\nx: ", b"a", 8)
    assert answer is not None and (not answer or answer.startswith(b"HTTP/1.1 408"))
    assert dripped(serving(), b"GET / HTTP/1.1\r\nx: ", b"a", 0.9) is None  # control arm
    with connected(serving(Rules(), SLOW)) as silent:  # nothing sent at all
        assert silent.recv(100) == b""


def test_a_second_head_is_timed_too(serving):
    """uvicorn's own timer of an idle connection ends with the first byte that comes."""
    whole = b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n"
    with connected(serving(Rules(), SLOW)) as client:
        client.sendall(whole)
        assert b"200 OK" in client.recv(65_536)
        client.sendall(b"GET / HT")
        client.settimeout(8)
        rest = b"".join(iter(lambda: client.recv(65_536), b""))
        assert rest.rpartition(b"HTTP/1.1 ")[2].startswith(b"408")


def test_a_body_of_a_byte_at_a_time_is_cut(serving):
    begin = HEAD + b"content-length: 1000000\r\n\r\n"
    answer = dripped(serving(Rules(body_seconds=0.3), SLOW), begin, b" ", 8)
    assert answer is not None and (not answer or answer.startswith(b"HTTP/1.1 408"))
    assert dripped(serving(), begin, b" ", 0.9) is None  # control arm


def test_a_client_that_does_not_read_holds_nobody(serving):
    endpoint = serving(Rules(), SLOW)
    LEFT.clear()
    with connected(endpoint) as client:
        client.sendall(b"GET /flood HTTP/1.1\r\nhost: localhost\r\n\r\n")
        for _ in range(400):  # a byte each 10 ms
            client.recv(1)
            if LEFT:
                break
            time.sleep(0.01)
        assert until(lambda: LEFT) and LEFT[0].words == "gone"
    assert until(lambda: not endpoint.service.gate.visits)
    control = serving()
    LEFT.clear()
    with connected(control) as client:
        client.sendall(b"GET /flood HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert not until(lambda: LEFT, 0.9)  # control arm: 30 s of patience


def test_too_many_connections_are_refused(serving):
    endpoint = serving(Rules(), Patience(connections=3))
    held = [connected(endpoint) for _ in range(3)]
    time.sleep(0.05)
    with connected(endpoint) as one_more:
        answer = one_more.recv(65_536)
    assert answer.startswith(b"HTTP/1.1 503") and b"retry-after: 1\r\n" in answer
    held.pop().close()
    assert until(lambda: get(endpoint).status_code == 200)
    for each in held:
        each.close()


LEAK = re.compile(r"Traceback|File \"|/home/|secret")


def test_a_planted_fault_is_an_id_here_and_a_traceback_in_the_log(serving, caplog, monkeypatch):
    with caplog.at_level(logging.ERROR, "unfreeze.serve"):
        answer = get(serving(), "/fail")
    id = answer.headers["x-request-id"]
    assert answer.status_code == 500 and id in answer.json()["error"]["message"]
    assert not LEAK.search(answer.text)
    (record,) = caplog.records
    assert id in record.getMessage() and "secret.txt" in (record.exc_text or "")

    def leaking(error):
        return gate.Refused(500, str(error))

    monkeypatch.setattr(gate, "fault", leaking)
    assert LEAK.search(get(serving(), "/fail").text)  # control arm


def test_an_answer_has_so_many_seconds(serving):
    LEFT.clear()
    answer = get(serving(Rules(seconds=0.2)), "/wait")
    assert answer.status_code == 504 and answer.json()["error"]["code"] == "timeout"
    with pytest.raises(httpx.ReadTimeout):  # control arm
        httpx.get(f"{serving().url}/wait", timeout=0.5)
    assert until(lambda: LEFT) and LEFT[0].words == "gone"  # the one that left


def test_requests_that_run_end_and_new_ones_are_refused():
    endpoint = served(echo)
    gate_of = endpoint.service.gate
    with connected(endpoint) as client:
        client.sendall(b"GET /wait HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert until(lambda: gate_of.visits)
        thread = threading.Thread(target=endpoint.service.drain, args=(0.5,))
        thread.start()
        assert until(lambda: gate_of.draining)
        refused = get(endpoint)
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
        assert get(endpoint, "/health").json() == {"status": "draining"}
        thread.join()
        answer = b""
        while b"}}" not in answer:
            answer += client.recv(65_536)
    assert answer.startswith(b"HTTP/1.1 503") and b'"code": "draining"' in answer
    endpoint.close()


def test_loading_is_told_from_ready():
    service = Service()
    endpoint = Endpoint().open(service)
    service.loaded = 0.25
    health = get(endpoint, "/health")
    assert health.status_code == 503 and health.json() == {"status": "loading", "loaded": 0.25}
    early = get(endpoint)
    assert early.status_code == 503 and "25%" in early.json()["error"]["message"]
    assert early.headers["retry-after"] == "1"
    endpoint.close()


def test_a_host_header_without_its_port():
    hosts = {"localhost:80": "localhost", "[::1]:8": "::1", "::1": "::1", "A.b": "a.b", "[::1": "::1"}
    hosts |= {
        host: host for host in ("localhost:x@evil.com", "[localhost]evil.com")
    }  # no name that is served
    assert {host: gate.name_of(host) for host in hosts} == hosts


def test_every_wrong_key_is_compared_in_constant_time(monkeypatch):
    seen = []
    monkeypatch.setattr(gate.hmac, "compare_digest", lambda a, b: seen.append((len(a), len(b))) or a == b)
    scope = {"path": "/v1/x", "headers": [(b"authorization", b"Bearer z")]}
    with pytest.raises(gate.Refused):
        gate.admitted(scope, Rules(keys=(hashed("a" * 20), hashed("b" * 20))))
    assert seen == [(32, 32), (32, 32)]


def test_only_http_is_answered():
    async def websocket():
        await Service()({"type": "websocket"}, None, None)

    asyncio.run(websocket())


@pytest.mark.parametrize(("longest", "most"), [(5, 5), (None, 50)])
def test_an_answer_has_so_many_tokens(longest, most):
    tokenizer = load_tokenizer(unfreeze.TINY_K2)
    speech = Speech(tokenizer, 4096, 20, longest)
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 50}
    assert speech.begin(read_chat(json.dumps(body).encode())).most == most
    del body["max_tokens"]
    assert speech.begin(read_chat(json.dumps(body).encode())).most == min(20, most)


@pytest.mark.parametrize(
    ("most", "over", "words"),
    [
        ({"n": 128}, {"n": 129}, "n: 129 is too large; at most 128"),
        ({"n": 1}, {"n": 0}, "n: 0 is too small; at least 1"),
        ({"max_tokens": 1}, {"max_tokens": 0}, "max_tokens: 0 is too small; at least 1"),
        ({"stop": ["a"] * 16}, {"stop": ["a"] * 17}, "stop"),
        ({"stop": ["a"]}, {"stop": [""]}, "stop"),
        ({"logprobs": True, "top_logprobs": 20}, {"logprobs": True, "top_logprobs": 21}, "top_logprobs: 21"),
        ({"temperature": 2.0}, {"temperature": 2.1}, "temperature: 2.1"),
        ({"top_p": 1.0}, {"top_p": 0.0}, "top_p"),
    ],
)
def test_a_field_at_its_limit_is_taken_and_one_beyond_is_not(most, over, words):
    def read(fields):
        return read_chat(json.dumps({"messages": [{"role": "user", "content": "Hi"}], **fields}).encode())

    assert read(most).n == most.get("n", 1)
    with pytest.raises(Refused) as refused:
        read(over)
    assert refused.value.status == 400 and words in refused.value.message
