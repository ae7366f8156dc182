"""The blocks of docs/start and docs/howto run, in order, on tiny models: nightly, about ten minutes."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from blocks import PAGES, blocks_of, commands_of, lay_out

from benchmarks.golden import make_models
from unfreeze.commands.demo import TINY_K2

DENSE = (
    "every_weight",
    "long_context",
    "optimizers",
    "pretrain",
    "swap",
)  # pages whose MODEL has plain weights
RUN = ["sft", "--model", "MODEL", "--data", "chat.jsonl", "--steps", "2", "--quiet", "--threads", "1"]


def run(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """One command in `folder`, by the Python of the tests."""
    if words[0] == "torchrun":
        words = [sys.executable, "-m", "torch.distributed.run", "--master-port", "29547", *words[1:]]
    elif words[0] == "unfreeze":
        words = [sys.executable, "-m", *words]
    return subprocess.run(
        words,
        cwd=folder,
        input="What is the capital of France?\nexit\n",
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with MODEL, DENSE, runs/mine and runs/other; each page gets a copy."""
    folder = tmp_path_factory.mktemp("pages")
    lay_out(folder, made=False)
    shutil.copytree(TINY_K2, folder / "MODEL")
    dense, _ = make_models(folder)
    dense.rename(folder / "DENSE")
    for name in ("mine", "other", "demo"):
        done = run(["unfreeze", *RUN, "--out", f"runs/{name}", "--validation-fraction", "0.1"], folder)
        assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.nightly
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_blocks_of_a_page_run(page, made, tmp_path):
    folder = tmp_path / "here"
    shutil.copytree(made, folder)
    if page.stem in DENSE:
        shutil.rmtree(folder / "MODEL")
        (folder / "DENSE").rename(folder / "MODEL")
    shutil.copytree(folder / "runs" / "mine", folder / "TEACHER")
    count = 0
    for block in blocks_of(page):
        if block.title:
            (folder / block.title).write_text(block.text)
        commands = [["python", block.title]] if block.language == "python" and block.title else []
        commands += commands_of(block) if block.language == "sh" else []
        for words in commands:
            words = [sys.executable, *words[1:]] if words[0] == "python" else words
            if "--out" in words and words[words.index("--out") + 1] == "runs/mine":
                shutil.rmtree(folder / "runs" / "mine")  # the page's own run takes its place
            done = run(words, folder)
            assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
            count += 1
    assert count or not any(b.language == "sh" and commands_of(b) for b in blocks_of(page))
