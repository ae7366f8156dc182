"""examples/inspect: the task is one that Inspect makes; nightly it asks a server (others: an environment of its own)."""

import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from unfreeze.commands.demo import TINY_K2

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "inspect"
HOME = Path(os.environ.get("UNFREEZE_VENV_INSPECT", "inspect-env"))


def test_the_task_has_questions_and_a_scorer():
    pytest.importorskip("inspect_ai")
    spec = importlib.util.spec_from_file_location("capitals", FOLDER / "capitals.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made = module.capitals()
    assert len(made.dataset) == len(module.CAPITALS) and made.scorer


@pytest.mark.others("inspect")
@pytest.mark.skipif(
    not (HOME / "bin" / "inspect").is_file(), reason="UNFREEZE_VENV_INSPECT names no environment"
)
def test_inspect_scores_a_served_model(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}/v1"
    server = subprocess.Popen([sys.executable, "-m", "unfreeze", "serve", TINY_K2, "--port", str(port)])
    try:
        models = _models(url, server)
        names = {"UNFREEZE_BASE_URL": url, "UNFREEZE_API_KEY": "none", "INSPECT_LOG_DIR": str(tmp_path)}
        # Inspect takes no absolute path
        command = [HOME.absolute() / "bin" / "inspect", "eval", "capitals.py", "--model"]
        command += [f"openai-api/unfreeze/{models[0]}", "--display", "plain", "--log-format", "json"]
        subprocess.run(command, env={**os.environ, **names}, check=True, timeout=300, cwd=FOLDER)
    finally:
        server.terminate()
        server.wait(30)
    (log,) = tmp_path.glob("*.json")
    record = json.loads(log.read_text())
    assert record["status"] == "success" and len(record["samples"]) == 4
    assert all(sample["output"]["choices"][0]["message"]["content"] for sample in record["samples"])


def _models(url, server):
    until = time.monotonic() + 120
    while time.monotonic() < until and server.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/models", timeout=5) as answer:
                return [each["id"] for each in json.load(answer)["data"]]
        except OSError:
            time.sleep(0.5)
    raise AssertionError("the server did not answer")
