"""Clients that end their own sending before they read, and requests whose end is not certain."""

import json
import socket
import struct
import time
from types import SimpleNamespace

import pytest

import unfreeze
from tests.serve.clients import request
from tests.serve.fakes import FakeSpeaker, served, until
from unfreeze.data.tokens.tokenizer import load_tokenizer
from unfreeze.serve import connection, gate
from unfreeze.serve.router import Router
from unfreeze.serve.running import Endpoint
from unfreeze.serve.session import Speech

PACE = 0.02


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(unfreeze.TINY_K2)


@pytest.fixture(scope="module")
def speaker(tokenizer):
    """Answers of as many tokens as the request allows."""
    return FakeSpeaker(lambda work: [65] * work.most, lambda id: tokenizer.decode([id]), pace=PACE)


@pytest.fixture(scope="module")
def endpoint(tokenizer, speaker):
    endpoint = Endpoint().serve(Router(speaker, tokenizer, "fake", Speech(tokenizer, 4096)))
    yield endpoint
    endpoint.close()


def connected(endpoint):
    return socket.create_connection(("127.0.0.1", endpoint.port), timeout=10)


def half_closed(endpoint, sent):
    """Send, end the sending, and read to the end."""
    with connected(endpoint) as client:
        client.sendall(sent)
        client.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: client.recv(65_536), b""))


def final(came):
    """Status and body of each answer, without 100 Continue."""
    answers = [part for part in came.split(b"HTTP/1.1 ") if part and not part.startswith(b"100 ")]
    return [(int(part[:3]), part.partition(b"\r\n\r\n")[2]) for part in answers]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_only_ends_its_sending_gets_its_answer(endpoint, stream):
    came = half_closed(endpoint, request(1, max_tokens=40, stream=stream))
    # a stream may have begun before the end of sending is seen: then a comment asks, or nothing has to
    assert came.startswith(b"HTTP/1.1 100 Continue\r\n\r\n") or (stream and came.startswith(b"HTTP/1.1 200"))
    ((status, body),) = final(came)
    assert status == 200 and (body.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") if stream else json.loads(body))
    assert until(lambda: not endpoint.service.gate.visits)


def test_control_arm_without_it_there_is_no_answer(endpoint, monkeypatch):
    monkeypatch.setattr(connection.Connection, "eof_received", lambda self: None)  # as uvicorn has it
    assert half_closed(endpoint, request(1, max_tokens=40)) == b""


def test_pipelined_requests_before_the_end_are_all_answered(endpoint):
    came = half_closed(endpoint, b"".join(request(n, max_tokens=3) for n in range(3)))
    assert [status for status, _ in final(came)] == [200] * 3


@pytest.mark.parametrize("part", [b"GET /health HT", request(1)[:-1]])
def test_what_is_not_whole_is_refused(endpoint, part):
    ((status, body),) = final(half_closed(endpoint, part))
    assert status == 400 and "not whole" in json.loads(body)["error"]["message"]
    first, second = final(half_closed(endpoint, request(1, max_tokens=2) + part))
    assert (first[0], second[0]) == (200, 400)


def left(endpoint, speaker, how, **fields):
    with connected(endpoint) as client:
        client.sendall(request(1, max_tokens=4000, **fields))
        assert until(lambda: speaker.running)
        if how == "reset":
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if how == "half, then closed":
            client.shutdown(socket.SHUT_WR)
            time.sleep(0.1)


@pytest.mark.parametrize("how", ["closed", "reset", "half, then closed"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_is_gone_frees_its_row(endpoint, speaker, how, stream, monkeypatch):
    monkeypatch.setattr(connection, "WORDS", 0.2)  # the second word comes after 0.2 s, not after 4
    freed = speaker.freed
    left(endpoint, speaker, how, stream=stream)
    assert until(lambda: speaker.freed == freed + 1 and not endpoint.service.gate.visits, 5)


def test_control_arm_who_is_never_spoken_to_is_not_missed(endpoint, speaker, monkeypatch):
    monkeypatch.setattr(connection.Connection, "_send_word", lambda self: None)
    freed = speaker.freed
    left(endpoint, speaker, "closed")
    time.sleep(3 * connection.LOOK)
    assert speaker.freed == freed
    monkeypatch.undo()
    endpoint.service.gate.end_all()
    assert until(lambda: not endpoint.service.gate.visits)


def test_a_stream_that_is_silent_is_spoken_to_in_comments(monkeypatch):
    """A comment is between two events, never inside one."""
    monkeypatch.setattr(connection, "WORDS", 0.2)

    async def quiet(scope, receive, send):
        head = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
        await receive()
        while (await receive())["type"] != "http.disconnect":
            pass

    quiet_one = served(quiet)
    with connected(quiet_one) as client:
        client.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
        while b"data: 1" not in client.recv(65_536):
            pass
        client.shutdown(socket.SHUT_WR)
        assert client.recv(65_536).startswith(b"3\r\n:\n\n\r\n")
    assert until(lambda: not quiet_one.service.gate.visits)
    quiet_one.close()


HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
CHUNKS = b"2\r\n{}\r\n0\r\n\r\n"
HIDDEN = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n"


def answered(endpoint, sent):
    """All that comes within half a second."""
    with connected(endpoint) as client:
        client.sendall(sent)
        client.settimeout(0.5)
        came = b""
        try:
            while part := client.recv(65_536):
                came += part
        except TimeoutError:
            return came, "open"
        return came, "closed"


@pytest.mark.parametrize(
    "framing",
    [
        b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n" + CHUNKS,
        b"transfer-encoding: chunked\r\ncontent-length: 12\r\n\r\n" + CHUNKS,
    ],
)
def test_two_framings_are_refused_and_nothing_behind_is_read(endpoint, framing, monkeypatch):
    """A request that a proxy took for a part of the body is not answered as one."""
    came, end = answered(endpoint, HEAD + framing + HIDDEN)
    ((status, body),) = final(came)
    assert status == 400 and end == "closed" and b"Content-Length and Transfer-Encoding" in body
    monkeypatch.setattr(gate, "framing", lambda scope: "")  # control arm: what is hidden is answered
    statuses = [status for status, _ in final(answered(endpoint, HEAD + framing + HIDDEN)[0])]
    assert statuses == [400, 200]


def test_chunks_of_http_1_0_are_refused(endpoint):
    head = HEAD.replace(b"HTTP/1.1", b"HTTP/1.0") + b"transfer-encoding: chunked\r\n\r\n"
    assert final(answered(endpoint, head + CHUNKS)[0])[0][0] == 400
    scope = {"headers": [(b"transfer-encoding", b"chunked")], "http_version": "1.0"}
    assert "HTTP/1.1" in gate.framing(scope) and not gate.framing({**scope, "http_version": "1.1"})


@pytest.mark.parametrize("kind", ["gzip", "br", "identity, gzip"])
def test_a_packed_body_is_415(endpoint, kind):
    import httpx

    url = f"{endpoint.url}/v1/chat/completions"
    refused = httpx.post(url, content=b"\x1f\x8b", headers={"content-encoding": kind})
    assert refused.status_code == 415 and refused.headers["accept-encoding"] == "identity"
    assert "send plain JSON" in refused.json()["error"]["message"]
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    assert httpx.post(url, json=body, headers={"content-encoding": "identity"}).status_code == 200


def test_a_slash_at_the_end_is_no_other_address(endpoint):
    import httpx

    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    assert httpx.post(f"{endpoint.url}/v1/chat/completions/", json=body).status_code == 200
    asks = {"prompt": "Hi", "max_tokens": 2}
    assert httpx.post(f"{endpoint.url}/v1/completions/", json=asks).status_code == 200
    assert httpx.post(f"{endpoint.url}/tokenize/", json={"prompt": "Hi"}).json()["count"] > 0
    for path in ("/v1/nothing/", "/v1//completions", "/v1/completions//"):
        answer = httpx.post(f"{endpoint.url}{path}", json=asks)
        assert answer.status_code == 404 and answer.json()["error"]["message"], path


def test_the_kernel_looks_for_silent_peers():
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as client,
    ):
        connection._ask_if_alive(client)
        assert client.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert client.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 30
    connection._ask_if_alive(SimpleNamespace(family=socket.AF_UNIX))  # of this machine: nothing to ask
