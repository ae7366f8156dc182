"""The client against a real server: what may pass is tried again, what won't is said at once, a server that hangs
or trickles is left, and the key goes nowhere else."""

from __future__ import annotations

import time

import pytest
from servers import say

from unfreeze.core.errors import ConfigError
from unfreeze.teach.client import Client, EndpointError, base_url, is_own

FINE = {"choices": []}


def in_turn(*replies):
    """The first request gets the first reply, …; the last one stays."""

    def reply(server, connection, body):
        return replies[min(len(server.asked), len(replies)) - 1](server, connection, body)

    return reply


def status(code, words="", **headers):
    return lambda server, connection, body: say(connection, code, {"error": {"message": words}}, **headers)


def fine(server, connection, body):
    return FINE


def hangs(server, connection, body):
    server.released.wait(20)


def trickles(server, connection, body):
    """A byte now and then: no timeout of a socket ever comes."""
    connection.send_response(200)
    connection.send_header("Content-Length", "1000")
    connection.end_headers()
    for _ in range(200):
        if server.released.wait(0.05):
            return
        try:
            connection.wfile.write(b" ")
        except OSError:
            return


def half(server, connection, body):
    connection.send_response(200)
    connection.send_header("Content-Length", "1000")
    connection.end_headers()
    connection.wfile.write(b'{"choices": [')


def no_json(server, connection, body):
    connection.send_response(200)
    connection.end_headers()
    connection.wfile.write(b"<html>502 Bad Gateway</html>")


def drops(server, connection, body):
    connection.connection.close()


def post(server, waits=None, **options):
    client = Client(
        server.url, **{"timeout": 5.0, "sleep": (waits if waits is not None else []).append} | options
    )
    return client.post("completions", {"prompt": [1]})


@pytest.mark.parametrize("fault", [status(429), status(500), status(503), half, no_json, drops])
def test_what_may_pass_is_asked_again(serving, fault):
    server, waits = serving(in_turn(fault, fault, fine)), []
    assert post(server, waits) == FINE
    assert waits == [0.5, 1.0] and len(server.asked) == 3


def test_the_wait_is_what_the_server_asks_for_within_reason(serving):
    server, waits = serving(in_turn(status(429, Retry_After="7"), status(503, Retry_After="86400"), fine)), []
    assert post(server, waits) == FINE and waits == [7.0, 60.0]


@pytest.mark.parametrize(
    "fault, says",
    [
        (status(500, "out of memory"), "the server answers 500: out of memory; 3 tries"),
        (half, "half an answer: 13 of 1,000 bytes"),
        (no_json, "is not JSON"),
        (drops, "3 tries"),
    ],
)
def test_a_fault_that_stays_is_one_line(serving, fault, says):
    server, waits = serving(fault), []
    with pytest.raises(EndpointError) as caught:
        post(server, waits, tries=3)
    assert says in str(caught.value) and "\n" not in caught.value.message
    assert len(server.asked) == 3 and len(waits) == 2


@pytest.mark.parametrize(
    "code, says", [(400, ""), (401, "OPENAI_API_KEY"), (404, "/v1/models"), (422, ""), (301, "not sent on")]
)
def test_what_will_not_pass_is_said_at_once(serving, code, says):
    server, waits = serving(status(code, "no such thing", Location="http://127.0.0.1:1/")), []
    with pytest.raises(EndpointError, match=f"answers {code}: no such thing") as caught:
        post(server, waits)
    assert says.replace("not sent on", "nothing is sent on") in caught.value.next
    assert caught.value.status == code and len(server.asked) == 1 and not waits


@pytest.mark.parametrize("fault", [hangs, trickles])
def test_a_server_that_hangs_is_left_after_the_deadline(serving, fault):
    server, started = serving(fault), time.monotonic()
    with pytest.raises(EndpointError, match=r"answer in 0\.3 seconds; 2 tries"):
        post(server, timeout=0.3, tries=2)
    assert time.monotonic() - started < 3


def test_nobody_there_is_one_line(serving):
    server = serving(fine)
    server.close()
    with pytest.raises(EndpointError, match=r"refused; 2 tries"):
        post(server, tries=2)


def test_the_key_comes_from_the_environment_and_is_in_no_message(serving):
    server = serving(status(401, "wrong key: sk-secret-123"))
    with pytest.raises(EndpointError) as caught:
        post(server, environment={"OPENAI_API_KEY": "sk-secret-123"})
    assert server.asked[0][1]["Authorization"] == "Bearer sk-secret-123"
    assert "sk-secret" not in str(caught.value) and "wrong key: …" in str(caught.value)
    with pytest.raises(EndpointError):
        post(server, environment={})
    assert "Authorization" not in server.asked[1][1]


def test_over_http_the_key_stays_on_this_machine():
    key = {"OPENAI_API_KEY": "sk-secret-123"}
    sent = {
        url: bool(Client(url, environment=key)._key) for url in ("http://10.0.0.5:8000", "https://a.example")
    }
    assert sent == {"http://10.0.0.5:8000": False, "https://a.example": True}


@pytest.mark.parametrize(
    "url, says",
    [
        ("http://", "no address"),
        ("ftp://host", "no address"),
        ("http://host:99999", "no address"),
        ("https://me:secret@host/v1", "no name, password"),
        ("https://host/v1?key=secret", "no name, password"),
    ],
)
def test_an_address_that_cannot_be_is_refused_without_its_secret(url, says):
    with pytest.raises(ConfigError, match=says) as caught:
        Client(url)
    assert "secret" not in str(caught.value)


def test_addresses():
    assert (
        base_url("http://localhost:8000")
        == base_url("http://localhost:8000/v1/")
        == "http://localhost:8000/v1"
    )
    assert base_url("https://host/api/v2") == "https://host/api/v2"
    assert base_url("http://[::1]:80") == "http://[::1]:80/v1"
    own = "http://127.0.0.1 http://192.168.1.2:1 http://gpu-box:8000 http://a.local https://10.1.1.1".split()
    assert all(map(is_own, own)) and not any(map(is_own, ["https://api.example.com", "http://8.8.8.8"]))
