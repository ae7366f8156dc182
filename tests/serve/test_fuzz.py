"""Broken requests of every kind: the server never hangs, shows no traceback, and answers the next client."""

import json
import re
import socket
from random import Random
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import unfreeze
from tests.serve.clients import request
from tests.serve.fakes import FakeSpeaker, served, until
from unfreeze.data.tokens.tokenizer import load_tokenizer
from unfreeze.serve.connection import Patience
from unfreeze.serve.gate import Rules
from unfreeze.serve.router import Router
from unfreeze.serve.running import Endpoint
from unfreeze.serve.service import Service
from unfreeze.serve.session import Speech

LEAK = re.compile(rb"Traceback|File \"|/src/unfreeze|site-packages")
STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")
QUICK = Patience(head=0.3, take=0.5, linger=0.3)
SECONDS = 20.0  # until an answer that does not come is a hang


@pytest.fixture(scope="module")
def endpoint():
    tokenizer = load_tokenizer(unfreeze.TINY_K2)
    speaker = FakeSpeaker(lambda work: [65, 66], lambda id: tokenizer.decode([id]))
    service = Service(Rules(body_seconds=0.3))
    endpoint = Endpoint(patience=QUICK).open(service)
    service.ready(Router(speaker, tokenizer, "fake", Speech(tokenizer, 4096)))
    yield endpoint
    endpoint.close()


TEXTS = ["", "é", "𝕏", "\ud800", "\x00", "\u202e", "a" * 5000, "名", "<|im_end|>", "{{", "-1", "NaN", "1e999"]
PATHS = [
    "/v1/chat/completions",
    "/v1/completions",
    "/tokenize",
    "/detokenize",
    "/v1/models",
    "/health",
    "/metrics",
]
PATHS += [
    "/s/x/v1/models",
    "/../etc/passwd",
    "/v1/models/%2e%2e%2f",
    "/%00",
    "//",
    "*",
    "/v1/models/" + "x" * 3000,
]
FIELDS = [
    "messages",
    "prompt",
    "tokens",
    "model",
    "n",
    "stop",
    "tools",
    "temperature",
    "max_tokens",
    "logprobs",
]
FIELDS += ["response_format", "stream", "seed", "tool_choice", "logit_bias", "stream_options", "echo", "text"]


def value(random, depth=0):
    """Any JSON value; some texts have no UTF-8."""
    kind = random.randrange(8 if depth < 4 else 5)
    if kind < 2:
        return random.choice(TEXTS)
    if kind == 2:
        return random.choice([0, -1, 1, 2**63, 10**400, 0.5, -0.0, 1e308])
    if kind < 5:
        return random.choice([None, True, False, [], {}])
    if kind == 5:
        return [value(random, depth + 1) for _ in range(random.randrange(4))]
    if kind == 6:
        return {random.choice([*FIELDS, *TEXTS]): value(random, depth + 1) for _ in range(3)}
    return {"role": random.choice(["user", "system", "x"]), "content": value(random, depth + 1)}


def body(random):
    fields = {random.choice(FIELDS): value(random) for _ in range(random.randrange(5))}
    if random.random() < 0.6:
        fields["messages"] = [{"role": "user", "content": random.choice(TEXTS)}]
    text = json.dumps(fields).encode()
    return random.choice(
        [text, text, text, text[: len(text) // 2], b"[" * 2000, b"\xff\xfe", text + text, b""]
    )


def head(random, length):
    lines = [f"{random.choice(['POST', 'POST', 'GET', 'PUT', 'BREW'])} {random.choice(PATHS)} HTTP/1.1"]
    lines += [random.choice(["host: localhost"] * 6 + ["host: evil", "x: y", "host: localhost\r\nhost: b"])]
    lines += [
        random.choice([f"content-length: {length}"] * 6 + ["content-length: -1", "content-length: 1, 2"])
    ]
    odd = [
        "x: " + "a" * 40_000,
        "a b: c",
        "transfer-encoding: gzip",
        "expect: 100-continue",
        "authorization: ",
    ]
    odd += ["content-length: 3", "connection: upgrade\r\nupgrade: websocket", "origin: null", ": x", "é: ü"]
    lines += random.sample(odd, random.choice([0, 0, 0, 1, 2]))
    return "\r\n".join(lines).encode("utf-8", "surrogatepass") + b"\r\n\r\n"


def broken(random):
    """Bytes that a client sends, in parts."""
    whole = b""
    for _ in range(random.choice([1, 1, 1, 3])):  # pipelined
        each = body(random)
        whole += head(random, len(each)) + each
    if random.random() < 0.2:  # bytes turned
        place = random.randrange(len(whole))
        whole = whole[:place] + bytes([random.randrange(256)]) + whole[place + 1 :]
    if random.random() < 0.2:
        whole = whole[: random.randrange(1, len(whole))]
    cut = random.randrange(len(whole))
    return [whole[:cut], whole[cut:]]


def spoken(endpoint, parts, end):
    """Send parts, then half-close, close or wait. -> all that came. Raises TimeoutError for a hang."""
    with socket.create_connection(("127.0.0.1", endpoint.port), timeout=SECONDS) as client:
        try:
            for part in parts:
                client.sendall(part)
            if end == "close":
                return b""
            if end == "half":
                client.shutdown(socket.SHUT_WR)
            came = b""
            while part := client.recv(65_536):
                came += part
                if end == "wait" and STATUS.search(came):
                    return came  # the connection may stay open for the next request
            return came
        except TimeoutError:
            raise
        except OSError:  # it was cut off
            return b""


def faults_of(endpoint, random):
    """What one broken client sees that it should not."""
    came = spoken(endpoint, broken(random), random.choice(["wait", "wait", "half", "close"]))
    bad = [b"a traceback"] if LEAK.search(came) else []
    return bad + [status for status in STATUS.findall(came) if status in (b"500", b"502")]


@settings(
    max_examples=60, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
@given(random=st.randoms(use_true_random=True))
def test_a_broken_request_is_refused_and_the_next_is_answered(endpoint, random):
    assert not faults_of(endpoint, Random(random.getrandbits(64)))
    assert STATUS.findall(spoken(endpoint, [request(7)], "wait"))[-1] == b"200"


@pytest.mark.nightly
def test_3000_broken_requests(endpoint):
    for seed in range(3000):
        assert not (bad := faults_of(endpoint, Random(seed))), (seed, bad)
    assert STATUS.findall(spoken(endpoint, [request(7)], "wait"))[-1] == b"200"
    assert until(lambda: not endpoint.service.gate.visits)


def test_pipelined_requests_are_answered_in_their_order(endpoint):
    whole = b"".join(request(n) for n in range(5)) + b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
    with socket.create_connection(("127.0.0.1", endpoint.port), timeout=SECONDS) as client:
        client.sendall(whole)
        came = b""
        while b'"ready"' not in came:
            came += client.recv(65_536)
    assert STATUS.findall(came) == [b"200"] * 6


def test_control_arm_a_traceback_and_a_hang_are_seen():
    async def leaking(scope, receive, send):
        await send({"type": "http.response.start", "status": 500, "headers": []})
        await send({"type": "http.response.body", "body": b'Traceback\n  File "/src/unfreeze/x.py"'})

    endpoint = served(leaking, patience=QUICK)
    whole = [b"GET /v1 HTTP/1.1\r\nhost: localhost\r\n\r\n"]
    came = spoken(endpoint, whole, "wait")
    assert LEAK.search(came) or LEAK.search(spoken(endpoint, [*whole, b"x"], "half"))
    assert STATUS.findall(came) == [b"500"]
    endpoint.close()

    # a server that never answers
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "SECONDS", 0.2)
        with pytest.raises(TimeoutError):
            spoken(SimpleNamespace(port=silent.getsockname()[1]), whole, "wait")
