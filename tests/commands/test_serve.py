"""`unfreeze serve`: what is refused before anything is loaded, and one server from its start to SIGTERM."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import httpx
import openai
import pytest

import unfreeze
from tests.serve.fakes import FakeSpeaker, until
from unfreeze import cli
from unfreeze.commands import serve, serve_models
from unfreeze.commands.serve import Config, Signals, keys_of, other_port, rules_of, usage
from unfreeze.commands.serve_models import Served, named, same_base
from unfreeze.core.errors import ConfigError
from unfreeze.data.tokens.tokenizer import load_tokenizer
from unfreeze.serve import running
from unfreeze.serve.router import Router
from unfreeze.serve.session import Speech

KEY = "a-key-of-24-characters--"


@pytest.fixture
def refused(capsys, monkeypatch):
    """refused(*arguments) -> the two lines of the error."""
    monkeypatch.delenv(serve.KEY, raising=False)

    def run(*arguments):
        assert cli.main(["serve", *map(str, arguments), "--quiet"]) == 2
        return capsys.readouterr().err.strip().splitlines()

    return run


def test_a_port_in_use_is_one_line_and_the_next_command(refused):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        lines = refused("tiny-k2", "--port", port)
    assert lines[0] == f"ConfigError: port {port}: Address already in use"
    assert lines[1].startswith("  next: unfreeze serve tiny-k2 --quiet --port ") or lines[1].startswith(
        "  next: unfreeze serve tiny-k2 --port "
    )
    free = int(lines[1].rpartition(" ")[2])
    with socket.create_server(("127.0.0.1", free)):
        pass
    assert other_port(["m", "--port=80", "--name", "x"]).startswith("unfreeze serve m --name x --port ")


def test_an_address_that_others_reach_needs_a_key(refused, tmp_path, monkeypatch):
    lines = refused("tiny-k2", "--host", "0.0.0.0", "--port", 0)
    assert lines[0] == "ConfigError: host is 0.0.0.0: others can reach it, so it needs a key"
    assert "--api-key-file" in lines[1]
    file = tmp_path / "key.txt"
    assert "No such file" in refused("tiny-k2", "--api-key-file", file)[0]
    file.write_text("\n")
    file.chmod(0o600)
    assert "is empty" in refused("tiny-k2", "--api-key-file", file)[0]
    file.write_text("short")
    assert "at least 16" in refused("tiny-k2", "--api-key-file", file)[0]
    lines = []
    file.write_text(f"{KEY}\nanother-key-of-another\n")
    file.chmod(0o644)
    config = Config(models=("m",), host="0.0.0.0", api_key_file=str(file))
    assert keys_of(config, lines.append) == [KEY, "another-key-of-another"] and "chmod 600" in lines[0]
    file.chmod(0o600)
    assert keys_of(config, lines.append) and len(lines) == 1
    monkeypatch.setenv(serve.KEY, KEY)
    assert keys_of(Config(models=("m",), host="::"), lines.append) == [KEY]
    rules = rules_of(config, [KEY])
    assert rules.any_ip and socket.gethostname().lower() in rules.hosts
    assert not rules_of(Config(models=("m",), host="127.0.0.2"), []).any_ip


def test_a_key_on_the_command_line_is_not_offered(refused):
    assert (
        "api_key" in refused("tiny-k2", "--api-key", KEY)[0]
        or "api-key" in refused("tiny-k2", "--api-key", KEY)[0]
    )


@pytest.mark.parametrize("origin", ["*", "localhost:3000", "http://a.example/page", "file://"])
def test_an_origin_is_one_pages(origin):
    with pytest.raises(ConfigError, match="is not the origin of a page"):
        rules_of(Config(models=("m",), allow_origin=(origin,)), [])


def test_what_is_no_adapter_of_this_base_is_refused_at_once(refused, run_dir, tmp_path):
    """Nothing listens and nothing is loaded before that."""
    other = tmp_path / "other"
    shutil.copytree(run_dir / "adapter", other)
    config = json.loads((other / "adapter_config.json").read_text())
    (other / "adapter_config.json").write_text(
        json.dumps({**config, "base_model_name_or_path": "Qwen/Qwen3"})
    )
    (line, next) = refused("tiny-k2", other, "--port", 0)
    assert line == f"AdapterError: {other} was trained on Qwen3; this server's base is tiny-k2"
    assert next.endswith(f"on another port: unfreeze serve {other} --port 0")
    assert "is a checkpoint, not an adapter of" in refused("tiny-k2", unfreeze.TINY_K2, "--port", 0)[0]
    assert "is no run and has no adapter_config.json" in refused("tiny-k2", tmp_path / "no", "--port", 0)[0]
    assert "two of the models are called 'x'" in refused(f"x={run_dir}", f"x={run_dir}", "--port", 0)[0]


def test_a_model_that_is_not_here_is_refused_before_anybody_is_listened_to(refused, tmp_path, monkeypatch):
    """And the Hub is not asked for a name that is a path."""
    from unfreeze.checkpoint import hub

    def never(*_, **__):
        raise AssertionError("listens, or asks the Hub")

    monkeypatch.setattr(running.Endpoint, "__init__", never)
    monkeypatch.setattr(hub, "download", never)
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for name, words in (
        ("nosuch", f"nosuch does not exist in {tmp_path}"),
        ("runs/mien", "nearest: 'mine'"),
        ("run/mine", "nearest: 'runs/mine'"),
    ):
        line, next = refused(name)
        assert line.startswith(f"CheckpointError: {name} does not exist") and words in line and next
    assert "has no adapter_config.json" in refused("tiny-k2", "runs/mine")[0]
    assert cli.main(["generate", "runs/missing", "--prompt", "x"]) == 2
    for words in (["serve", "org/name"], ["generate", "org/name", "--prompt", "x"]):
        assert cli.main(words) == 1  # control arm: a name of the Hub is looked up, for serve while it listens


def test_a_base_is_the_same_folder_or_has_the_same_last_name(tmp_path):
    one, two = tmp_path / "a" / "base", tmp_path / "b" / "base"
    for folder in (one, two):
        folder.mkdir(parents=True)
    assert same_base(str(one), str(one), one) and same_base("org/base", "org/base", tmp_path)
    assert not same_base(str(two), str(one), one)  # both are here, and they differ
    assert same_base("/elsewhere/base", str(one), one) and same_base("org/base", str(one), one)
    assert not same_base("org/other", str(one), one)
    assert not same_base("/elsewhere/runs/x/model", "runs/y/model", Path("runs/y/model"))


def test_a_source_may_have_a_name(tmp_path):
    assert named("mine=runs/a") == ("mine", "runs/a") and named("runs/a") == ("", "runs/a")
    odd = tmp_path / "a=b"
    odd.mkdir()
    assert named(str(odd)) == ("", str(odd)) and named("a/b=c") == ("", "a/b=c")


def test_lines_to_copy_hold_no_key(tmp_path, monkeypatch):
    monkeypatch.setenv(serve.KEY, KEY)
    text = usage("http://127.0.0.1:1", "it's", Config(models=("m",)))
    assert KEY not in text and f'"Authorization: Bearer ${serve.KEY}"' in text
    assert f"os.environ['{serve.KEY}']" in text
    monkeypatch.delenv(serve.KEY)
    assert "Authorization" not in usage("u", "m", Config(models=("m",)))


def test_a_first_signal_stops_and_a_second_ctrl_c_hurries():
    with Signals() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.stop.wait(5) and not signals.hurry.is_set()
        os.kill(os.getpid(), signal.SIGTERM)  # a scheduler may send it twice
        time.sleep(0.01)
        assert not signals.hurry.is_set()
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.hurry.wait(5)
    with Signals() as signals:
        signals.loading = True
        with pytest.raises(SystemExit):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)


def test_the_command_from_loading_to_its_end(monkeypatch, capsys):
    """With an engine that is quick: requests that run when SIGTERM comes are answered, later ones get 503."""
    tokenizer = load_tokenizer(unfreeze.TINY_K2)
    speaker = FakeSpeaker(lambda work: [65] * 20, lambda id: "A", rows=4, pace=0.02)
    health, statuses = [], Counter()

    def opened(config, service, common):
        url = f"http://127.0.0.1:{endpoints[0].port}"
        health.append(httpx.get(f"{url}/health").json()["status"])
        threading.Thread(target=load, args=(url,)).start()
        return Served(Router(speaker, tokenizer, "fake", Speech(tokenizer, 4096)), None)

    def ask(url):
        body = {"messages": [{"role": "user", "content": "Hi"}], "model": "fake"}
        while not statuses[503] and not statuses["gone"]:
            try:
                statuses[httpx.post(f"{url}/v1/chat/completions", json=body, timeout=30).status_code] += 1
            except httpx.TransportError:  # nobody listens any more
                statuses["gone"] += 1

    def load(url):
        assert until(lambda: httpx.get(f"{url}/health").json()["status"] == "ready")
        threads = [threading.Thread(target=ask, args=(url,)) for _ in range(6)]
        for thread in threads:
            thread.start()
        until(lambda: statuses[200] >= 6)
        os.kill(os.getpid(), signal.SIGTERM)

    endpoints, listen = [], running.Endpoint.__init__

    def kept(self, **options):
        listen(self, **options)
        endpoints.append(self)

    monkeypatch.setattr(running.Endpoint, "__init__", kept)
    monkeypatch.setattr(serve_models, "opened", opened)
    assert cli.main(["serve", "tiny-k2", "--port", "0", "--json"]) == 0
    out, err = capsys.readouterr()
    result = json.loads(out.splitlines()[-1])
    assert health == ["loading"] and result["models"] == ["fake"]
    assert "ended; every request was answered" in err and f"curl {result['url']}/chat/completions" in err
    assert until(lambda: statuses[200] == result["requests"]["answered"]) and statuses[200] >= 6
    assert set(statuses) <= {200, 503, "gone"}


def started(*arguments, **options):
    """A server of its own process, and its base_url once it is ready."""
    command = [sys.executable, "-m", "unfreeze", "serve", *map(str, arguments), "--port", "0", "--json"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)
    lines = []
    for line in server.stderr:
        lines.append(line)
        if line.startswith("http"):
            url = line.split()[0]
        if "client = " in line:
            return server, url, lines
    raise AssertionError("".join(lines))


@pytest.mark.nightly
def test_a_run_is_served_to_openais_client_until_sigterm(run_dir):
    """The run's base and its adapter are models; under load SIGTERM ends every request with 0."""
    server, url, _ = started(run_dir, "--dtype", "float32", "--max-rows", 4, "--drain", 20)
    try:
        assert httpx.get(f"{url.removesuffix('/v1')}/health").json() == {"status": "ready"}
        client = openai.OpenAI(base_url=url, api_key="-", max_retries=0)
        names = [model.id for model in client.models.list()]
        assert names == [unfreeze.TINY_K2.name, run_dir.name]

        def ask(name, tokens=8):
            done = client.chat.completions.create(
                model=name, messages=[{"role": "user", "content": "Hi"}], max_tokens=tokens, temperature=0
            )
            return done.choices[0].message.content

        alone = unfreeze.load(run_dir, dtype="float32").chat("Hi", max_new_tokens=8)
        assert ask(run_dir.name) == alone
        answers, refused, until = [], [], time.monotonic() + 60

        def keep_asking():
            while not refused and time.monotonic() < until:
                try:
                    answers.append(ask(names[len(answers) % 2]))
                except openai.APIError as error:  # 503, then nobody listens
                    refused.append(error)

        threads = [threading.Thread(target=keep_asking) for _ in range(8)]
        for thread in threads:
            thread.start()
        while len(answers) < 16 and time.monotonic() < until:
            time.sleep(0.01)
        server.send_signal(signal.SIGTERM)
        out, err = server.communicate(timeout=60)
        for thread in threads:
            thread.join(30)
    finally:
        server.kill()
    assert server.returncode == 0, err
    result = json.loads(out.splitlines()[-1])
    assert result["models"] == names and "ended; every request was answered" in err
    assert result["requests"]["answered"] == len(answers) + 2  # and those of alone and models
    assert all(
        isinstance(error, (openai.APIConnectionError, openai.InternalServerError)) for error in refused
    )
    assert alone in answers and "Traceback" not in err


def test_without_its_libraries_one_command_installs_all_of_them(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "starlette", None)
    assert cli.main(["serve", "tiny-k2"]) == 2
    assert "next: pip install starlette uvicorn llguidance\n" in capsys.readouterr().err
