"""Agents in forks of a few processes: one that hangs, dies or lies ends no other, and reaches one port only."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from unfreeze.core.errors import ConfigError
from unfreeze.data.rows.asked import asked_from_dict
from unfreeze.rollout.agents import TOGETHER, Agents
from unfreeze.rollout.limits import Limits
from unfreeze.rollout.reward import Graded

FILE = Path(__file__).with_name("agents_file.py")


def rows(**columns):
    """A row for each value of the one column."""
    ((name, values),) = columns.items()
    return [asked_from_dict({"prompt": "?", name: value}, i) for i, value in enumerate(values)]


def runs(name, given, seconds=20.0, count=2, **limits):
    opened = []

    def open(number):
        opened.append(number)
        return f"http://127.0.0.1:7/s/{number}/v1"

    with Agents(f"{FILE}:{name}", Limits(seconds=seconds, **limits), count=count) as agents:
        return agents.run(given, open), opened, agents._pool.restarts


def test_every_row_has_its_own_run_and_session():
    graded, opened, _ = runs("echo", rows(n=range(2 * TOGETHER + 3)))
    assert [each.parts["n"] for each in graded] == list(range(2 * TOGETHER + 3))
    assert sorted(opened) == list(range(2 * TOGETHER + 3))


OUTCOMES = {
    "sleeps": ("timeout", "no answer within 2 s"),
    "raises": ("error", "KeyError: 'a key' (agents_file.py, line"),
    "nan": ("not a number", "mixed returned nan"),
    "leaves": ("ended", "ended itself, with exit code 3"),
    "long": ("garbage", "its reply is longer than 8,192 bytes"),
    "none": ("no value", "mixed returned None"),
    "forks": ("ok", ""),
    "fine": ("ok", ""),
}


def test_each_fault_is_named_and_ends_no_other():
    graded, opened, restarts = runs("mixed", rows(kind=OUTCOMES), seconds=2.0, count=1)
    for each, (outcome, message) in zip(graded, OUTCOMES.values(), strict=True):
        assert each.outcome == outcome and message in each.message, each
    assert len(opened) == len(OUTCOMES) and restarts == 0


def test_who_ends_the_process_of_all_is_found_out_alone():
    graded, opened, _ = runs("kills", rows(n=range(5)), count=1)
    assert [each.reward for each in graded] == [0.0, 1.0, 2.0, None, 4.0]
    assert graded[3].outcome == "ended"
    assert sorted(opened) == sorted([*range(5), *range(5)])  # each again, in a new session


@pytest.fixture
def served(tmp_path):
    """A port, and a socket file that leads to it."""
    import socket

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"x" * 300_000)

        def log_message(self, *_):
            pass

    class Local(ThreadingHTTPServer):
        address_family = socket.AF_UNIX

        def server_bind(self):
            self.socket.bind(self.server_address)

        def get_request(self):
            return self.socket.accept()[0], ("local", 0)

    port = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    local = Local(str(tmp_path / "socket"), Answer)
    for each in (port, local):
        threading.Thread(target=each.serve_forever, daemon=True).start()
    yield port.server_address[1], str(tmp_path / "socket")
    for each in (port, local):
        each.shutdown()
        each.server_close()


def test_an_agent_reaches_the_endpoint_and_nothing_else(served):
    port, socket_file = served
    urls = [f"http://127.0.0.1:{port}/", "http://127.0.0.1:9/", "http://10.255.255.1/"]
    lines = []
    with Agents(
        f"{FILE}:fetches", Limits(seconds=5, port=port, socket_file=socket_file), count=1, say=lines.append
    ) as agents:
        first, *others = agents.run(rows(url=urls), lambda number: "")
        walls = agents._pool.workers[0].confined.network
    assert first == Graded(300_000.0)
    if not walls:
        assert "can reach the network" in lines[0]
        pytest.skip("this system gives a process no network of its own")
    assert all("Errno 111" in each.message or "Errno 101" in each.message for each in others)
    # control arm: without the port there is nothing to reach
    (alone,), _, _ = runs("fetches", rows(url=urls[:1]), count=1)
    assert alone.outcome == "error"


BAD = {
    "three": "three needs 'more', which nothing gives it",
    "one": r"one\(base_url\) takes fewer than 2 arguments by position: the endpoint's address and the row",
    "run,echo": "agent: 2 functions; a run has one",
    "gone": "agents_file.py has no function 'gone'",
}


@pytest.mark.parametrize("name", BAD)
def test_a_function_of_another_kind_is_refused(name):
    with pytest.raises(ConfigError, match=BAD[name]):
        Agents(f"{FILE}:{name}", Limits(), count=1)
