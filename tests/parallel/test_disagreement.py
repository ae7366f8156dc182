"""Processes that do not see the same: refused in one line by the one whose fault it is, and nothing is left.

This file is also the script that the two processes run: all cases one after the other, each in a group of its
own. They are two nodes with a folder each, or one node with two processes.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from unfreeze.commands.demo import TINY_K2
from unfreeze.core.errors import ConfigError
from unfreeze.job.opening.processes import _facts_of, agree

ROW = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
LINE = "sft --model model --data d.jsonl --out {out} --micro-batches 2 --tokens-per-step 4096 --steps 1 --watch.samples 0 --lora.rank 1"
ENOUGH_FOR_ONE = 52 * 2**20
CASES = {  # name -> (further arguments of process 1 alone, where both write)
    "model": ("", "out"),
    "config.json": ("", "out"),
    "data": ("", "out"),
    "content": ("", "out"),
    "flag": ("--learning-rate 0.5", "out"),
    "folder": ("", "relative"),
    "memory": ("", "out"),
}


def prepare(folder: Path) -> None:
    """A folder for each process and case, with a model and data, and what is wrong with the second's."""
    for case in CASES:
        for rank in (0, 1):
            here = folder / case / str(rank)
            shutil.copytree(TINY_K2, here / "model")
            (here / "d.jsonl").write_text(ROW * 4)
    second = {case: folder / case / "1" for case in CASES}
    shutil.rmtree(second["model"] / "model")
    config = json.loads((second["config.json"] / "model" / "config.json").read_text())
    (second["config.json"] / "model" / "config.json").write_text(json.dumps({**config, "rope_theta": 7.0}))
    (second["data"] / "d.jsonl").unlink()
    (second["content"] / "d.jsonl").write_text(ROW * 4 + ROW.replace("b", "c"))


def main(folder: Path, rank: int, ports: list[str]) -> None:
    """Run all cases; what was said, and with which exit code, goes to said-RANK.json."""
    from unfreeze import cli
    from unfreeze.job.end import folder as job_folder
    from unfreeze.parallel import machine

    job_folder.SEEN = 0.5
    said = {}
    for (case, (more, out)), port in zip(CASES.items(), ports, strict=True):
        same = case == "memory"
        os.environ |= {"MASTER_PORT": port, "LOCAL_WORLD_SIZE": "2" if same else "1"}
        os.environ |= {"LOCAL_RANK": str(rank if same else 0), "GROUP_RANK": str(0 if same else rank)}
        os.environ["GROUP_WORLD_SIZE"] = "1" if same else "2"
        os.chdir(folder / case / str(rank))
        where = str(folder / case / "out") if out == "out" else "run"
        with contextlib.redirect_stderr(io.StringIO()) as error, small_host(machine, same):
            code = cli.main([*LINE.format(out=where).split(), *(more.split() if rank else ())])
        said[case] = [code, error.getvalue()]
    (folder / f"said-{rank}.json").write_text(json.dumps(said))


@contextlib.contextmanager
def small_host(machine: Any, on: bool) -> Iterator[None]:
    """A host whose memory is enough for one process of this run, and not for two."""
    before = machine.host_memory, machine.container_memory
    if on:
        machine.host_memory, machine.container_memory = lambda: (ENOUGH_FOR_ONE, ENOUGH_FOR_ONE), lambda: None
    try:
        yield
    finally:
        machine.host_memory, machine.container_memory = before


@pytest.fixture(scope="module")
def said(tmp_path_factory, forkserver) -> tuple[Path, list[dict]]:
    folder = tmp_path_factory.mktemp("nodes")
    prepare(folder)
    with contextlib.ExitStack() as taken:
        sockets = [taken.enter_context(socket.socket()) for _ in CASES]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        ports = [str(each.getsockname()[1]) for each in sockets]
    common = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    processes = [
        forkserver.start([__file__, folder, rank, *ports], env={**common, "RANK": str(rank)})
        for rank in (0, 1)
    ]
    try:
        codes = [process.wait(200) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert codes == [0, 0], "\n".join(process.stderr.read_text() for process in processes)
    return folder, [json.loads((folder / f"said-{rank}.json").read_text()) for rank in (0, 1)]


def lines(said: tuple[Path, list[dict]], case: str) -> tuple[list[int], list[str]]:
    """(exit codes, the first line of the error that each process said)."""
    folder, both = said
    assert not (folder / case / "out").exists() and not (folder / case / "0" / "run").exists(), "half a run"
    errors = [
        [line for line in each[case][1].splitlines() if "Error" in line or "Fit" in line or "Gone" in line]
        for each in both
    ]
    assert all(len(each) == 1 for each in errors), errors
    return [each[case][0] for each in both], [each[0] for each in errors]


STOPS = "UserError: process 1 failed, so this one stops too"


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("model", "process 1: CheckpointError: model does not exist in {folder}/model/1"),
        ("data", "process 1: ConfigError: data = 'd.jsonl' is not a file or folder in "),
        ("folder", "process 1: ConfigError: {folder}/folder/1/run is not the run folder that process 0"),
    ],
)
def test_the_process_whose_node_lacks_it_says_so(said, case, words):
    codes, (first, second) = lines(said, case)
    assert codes == [2, 2] and first == STOPS
    assert second.startswith(words.format(folder=said[0])), second


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("config.json", "the processes differ in the checkpoint's config.json: process 1 has "),
        ("content", "the processes differ in data file 1 (d.jsonl, its size and hash): process 1 has "),
        ("flag", "the processes differ in optimizer.learning_rate: process 1 has 0.5, process 0 has 0.0"),
    ],
)
def test_what_differs_is_named_by_all(said, case, words):
    codes, (first, second) = lines(said, case)
    assert codes == [2, 2] and first.startswith(f"ConfigError: {words}") and second == f"process 1: {first}"


def test_a_host_is_too_small_for_its_processes_together(said):
    codes, each = lines(said, "memory")
    assert codes == [2, 2]
    for line in each:  # one of them would have room
        assert "DoesNotFit: peak " in line and "shared by 2 processes" in line, line
        peak, usable = (float(number) for number in re.findall(r"([\d.]+) MiB", line)[:2])
        assert usable < peak < 2 * usable


class Two:
    """A group in which the other process said something else."""

    size = 2

    def __init__(self, other: dict[str, str]):
        self.other = json.dumps(other)

    def texts(self, text: str) -> list[str]:
        return [self.other, text]


def test_another_number_of_files_and_another_version_are_named():
    files = [SimpleNamespace(name=f"model-{n}.safetensors") for n in range(3)]
    start = SimpleNamespace(files=files[:2], tensors={}, nbytes=7, config={})
    first = _facts_of(SimpleNamespace(files=files, tensors={}, nbytes=7, config={}))
    with pytest.raises(ConfigError) as refused:
        agree(Two(first), _facts_of(start))
    assert refused.value.message == (
        "the processes differ in the checkpoint's files: process 1 has 2, process 0 has 3"
    )
    agree(Two(first), first)
    with pytest.raises(ConfigError, match=r"the version of numba: process 1 has 0\.61, process 0 has 0\.60"):
        agree(Two({"the version of numba": "0.60"}), {"the version of numba": "0.61"})


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
