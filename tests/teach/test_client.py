"""The client against a real server: what may pass is tried again, what won't is said at once, a server that hangs
or trickles is left, and the key goes nowhere else."""

from __future__ import annotations

import sys
import time

import pytest
from servers import say

from unfreeze.core.errors import ConfigError
from unfreeze.teach.address import EndpointError, base_url, is_own_network, refuse_without_library
from unfreeze.teach.client import Client

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


def post(server, **options):
    return Client(server.url, **{"timeout": 5.0} | options).post("completions", {"prompt": [1]})


@pytest.mark.parametrize("fault", [status(429), status(500), status(503), half, no_json, drops])
def test_what_may_pass_is_asked_again(serving, waits, fault):
    server = serving(in_turn(fault, fault, fine))
    assert post(server) == FINE and len(server.asked) == 3
    assert len(waits) == 2 and 0.375 <= waits[0] <= 0.5 and 0.75 <= waits[1] <= 1.0


def test_the_wait_is_what_the_server_asks_for_within_reason(serving, waits):
    server = serving(in_turn(status(429, Retry_After="7"), status(503, Retry_After="86400"), fine))
    with pytest.raises(EndpointError, match="answers 503; 2 tries") as caught:
        post(server)
    assert waits == [7.0] and "the same command continues" in caught.value.next
    assert post(server) == FINE


@pytest.mark.parametrize(
    "fault, says",
    [
        (status(500, "out of memory"), "the server answers 500: out of memory; 3 tries"),
        (half, "received 13 bytes, expected 1000"),
        (no_json, "is not JSON"),
        (drops, "3 tries"),
    ],
)
def test_a_fault_that_stays_is_one_line(serving, waits, fault, says):
    server = serving(fault)
    with pytest.raises(EndpointError) as caught:
        post(server, tries=3)
    assert says in str(caught.value) and "\n" not in caught.value.message
    assert len(server.asked) == 3 and len(waits) == 2


@pytest.mark.parametrize(
    "code, says", [(400, ""), (401, "OPENAI_API_KEY"), (404, "/v1/models"), (422, ""), (301, "not sent on")]
)
def test_what_will_not_pass_is_said_at_once(serving, waits, code, says):
    server = serving(status(code, "no such thing", Location="http://127.0.0.1:1/"))
    with pytest.raises(EndpointError, match=f"answers {code}: no such thing") as caught:
        post(server)
    assert says.replace("not sent on", "nothing is sent on") in caught.value.next
    assert caught.value.status == code and len(server.asked) == 1 and not waits


@pytest.mark.parametrize("fault", [hangs, trickles])
def test_a_server_that_hangs_is_left_after_the_deadline(serving, waits, fault):
    server, started = serving(fault), time.monotonic()
    with pytest.raises(EndpointError, match=r"answer in 0\.3 seconds; 2 tries"):
        post(server, timeout=0.3, tries=2)
    assert time.monotonic() - started < 3


def test_nobody_there_is_one_line(serving, waits):
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


def test_what_the_library_finds_in_the_environment_stays_here(serving, monkeypatch):
    """Its own keys and names go to no server, with or without ours."""
    for name in ("OPENAI_ADMIN_KEY", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID"):
        monkeypatch.setenv(name, f"secret-{name}")
    monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", "Authorization: Bearer secret-header")
    server = serving(fine)
    post(server, environment={})
    post(server, environment={"OPENAI_API_KEY": "sk-1"})
    sent = [headers for _, headers, _ in server.asked]
    assert not any("secret" in value for headers in sent for value in headers.values())
    assert [headers.get("Authorization") for headers in sent] == [None, "Bearer sk-1"]


def test_a_redirect_is_not_followed_and_the_key_stays(serving):
    other = serving(fine)
    server = serving(status(307, "moved", Location=f"{other.url}/completions"))
    with pytest.raises(EndpointError, match="answers 307") as caught:
        post(server, environment={"OPENAI_API_KEY": "sk-1"})
    assert "nothing is sent on" in caught.value.next and len(server.asked) == 1 and not other.asked
    assert post(other) == FINE  # control arm: it would have answered


def test_without_the_library_it_is_one_line(monkeypatch):
    refuse_without_library("http://host")
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(ConfigError, match=r"extra \[teach\]") as caught:
        refuse_without_library("http://host")
    assert caught.value.next == "pip install openai"


def test_over_http_the_key_stays_on_this_machine():
    key = {"OPENAI_API_KEY": "sk-secret-123"}
    sent = {
        url: bool(Client(url, environment=key)._key) for url in ("http://10.0.0.5:8000", "https://a.example")
    }
    assert sent == {"http://10.0.0.5:8000": False, "https://a.example": True}


@pytest.mark.parametrize(
    "url, says",
    [
        ("http://", "not (a valid|the) address"),
        ("ftp://host", "not (a valid|the) address"),
        ("http://host:99999", "not (a valid|the) address"),
        ("https://me:secret@host/v1", "not have a name, password"),
        ("https://host/v1?key=secret", "not have a name, password"),
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
    assert all(map(is_own_network, own)) and not any(
        map(is_own_network, ["https://api.example.com", "http://8.8.8.8"])
    )


def keys(server):
    return [headers.get("Idempotency-Key") for _, headers, _ in server.asked]


def test_a_lost_answer_is_asked_for_with_the_same_key_and_a_refused_one_with_another(serving, waits):
    """A server that knows the header gives a stored answer again; a stored 500, too."""
    server = serving(in_turn(drops, drops, status(500), fine))
    Client(server.url, timeout=5.0).post("completions", {}, key="k")
    assert keys(server) == ["k-0", "k-0", "k-0", "k-1"]
    Client(server.url, timeout=5.0).post("completions", {})
    assert keys(server)[-1] is None


def test_what_had_no_connection_is_released_and_what_was_sent_is_not(serving, waits):
    counts = {"reserved": 0, "released": 0}

    def count(name):
        counts[name] += 1

    def post(url):
        Client(url, tries=3, timeout=5.0).post(
            "completions", {}, lambda: count("reserved"), release=lambda: count("released")
        )

    with pytest.raises(EndpointError):
        post("http://127.0.0.1:1/v1")
    assert counts == {"reserved": 3, "released": 3}
    with pytest.raises(EndpointError):
        post(serving(drops).url)
    assert counts == {"reserved": 6, "released": 3}
