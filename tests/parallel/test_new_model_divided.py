"""unfreeze pretrain from [shape] in two processes that share every weight (FSDP2): one process's losses and model.
One torchrun of two processes."""

import json
import os
import socket
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from unfreeze import cli
from unfreeze.commands.demo import TINY_K2

SHAPE = (
    "--shape.family deepseek_v3 --shape.hidden-size 32 --shape.num-hidden-layers 2 --shape.num-attention-heads 2"
    " --shape.num-experts 4 --shape.moe-intermediate-size 16 --optimizer.balance-rate 0.01"
)
RUN = (
    "--tokens-per-step 512 --micro-batches 4 --steps 3 --watch.samples 0 --dtype float32 --threads 1 --quiet"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    here = tmp_path_factory.mktemp("divided")
    (here / "tok").mkdir()
    for name in ("tiktoken.model", "tokenizer_config.json"):
        (here / "tok" / name).write_bytes((TINY_K2 / name).read_bytes())
    rows = [{"text": f"The young of animal number {i} is small. " * (1 + i % 4)} for i in range(60)]
    (here / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return here


def command(folder, out):
    fixed = ["--tokenizer", folder / "tok", "--data", folder / "texts.jsonl", "--out", out]
    return ["pretrain", *map(str, fixed), *SHAPE.split(), *RUN.split(), "--validation-fraction", "0.2"]


def read(run, kind, field):
    lines = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [line[field] for line in lines if line["kind"] == kind]


@pytest.mark.nightly  # 12 s; every change divides a step (tests/parallel/test_fsdp.py) and balances one (test_balanced.py)
def test_two_processes_make_the_model_of_one(folder):
    assert cli.main(command(folder, folder / "one")) == 0
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", port]
    divided = [*command(folder, folder / "two"), "--place.weights", "sharded"]
    together = subprocess.run(
        [*start, "-m", "unfreeze", *divided],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert together.returncode == 0, together.stderr
    one, two = folder / "one", folder / "two"
    assert read(two, "start", "processes") == [2]
    for kind, field in (
        ("train", "loss"),
        ("train", "grad_norm"),
        ("eval", "loss"),
        ("eval", "bits_per_byte"),
    ):
        expected, found = read(one, kind, field), read(two, kind, field)
        assert found == pytest.approx(expected, rel=1e-5) and len(found) > 1, field
    assert read(one, "baseline", "ngrams") == read(two, "baseline", "ngrams")  # counted once, by process 0
    whole, parts = (
        {name: of for file in (run / "model").glob("*.safetensors") for name, of in load_file(file).items()}
        for run in (one, two)
    )
    assert whole.keys() == parts.keys()
    for name, tensor in whole.items():
        torch.testing.assert_close(parts[name], tensor, atol=1e-5, rtol=1e-4, msg=name)
    first, last = read(one, "train", "loss")[0], read(one, "train", "loss")[-1]
    assert last < first - 0.05  # control arm: the three steps did something that could have differed
