"""--preference.reference cached: the numbers of the model as it began are those of --preference.reference live, to the bit where a document
is asked in the micro-batch that it trains in; asked once, whole or not at all, and of no other model."""

import json
import math
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from unfreeze import cli
from unfreeze.commands.demo import TINY_K2
from unfreeze.core.batch import Batch
from unfreeze.core.errors import DataError
from unfreeze.teach import kept

pytestmark = pytest.mark.usefixtures("fewer_layers")

WORDS = "--tokens-per-step 192 --micro-batches 2 --learning-rate 5e-3 --watch.samples 0 --dtype float32 --optimizer.warmup 0".split()
SMALL = ["--lora.rank", 2, "--lora.targets", "attention"]


def write(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def some(count: int, first: int = 0) -> list[dict]:
    return [
        {"prompt": f"What is {n}?", "chosen": f"{n}, it is. Hmm.", "rejected": f"It is the number {n}."}
        for n in range(first, first + count)
    ]


@pytest.fixture
def prefer(capsys, tmp_path):
    rows = write(tmp_path / "pairs.jsonl", some(6))

    def run(reference, *words, code=0, out=None, steps=3, small=SMALL, model=TINY_K2, data=rows):
        out = out or tmp_path / reference
        given = ["--model", model, "--data", data, "--out", out, "--steps", steps, *WORDS, *small]
        given += ["--preference.reference", reference, *words]
        assert cli.main(list(map(str, ["prefer", "--json", "--quiet", *given]))) == code
        return out if code == 0 else capsys.readouterr().err

    return run


def events(run, kind: str) -> list[dict]:
    found = [json.loads(line) for line in (Path(run) / "events.jsonl").read_text().splitlines()]
    return [event for event in found if event["kind"] == kind]


def numbers(run, kind: str = "train") -> list[tuple]:
    return [(e["loss"], e["margin"], e["accuracy"], e.get("reward_chosen")) for e in events(run, kind)]


def test_steps_and_held_out_pairs_are_those_of_a_live_reference_to_the_bit(prefer, tmp_path):
    held_out = write(tmp_path / "held.jsonl", some(4, 50))
    live, cached = (prefer(name, "--validation", held_out) for name in ("live", "cached"))
    assert numbers(live) == numbers(cached) and numbers(cached)[-1][1] > 0
    for (loss, margin, *_), (want, other, *_) in zip(
        numbers(cached, "eval"), numbers(live, "eval"), strict=True
    ):
        assert (loss, margin) == (pytest.approx(want, rel=1e-6), pytest.approx(other, rel=1e-5, abs=1e-6))
    adapters = [(run / "adapter" / "adapter_model.safetensors").read_bytes() for run in (live, cached)]
    assert adapters[0] == adapters[1]
    starts = [line for run in (live, cached) for event in events(run, "plan") for line in event["start"]]
    assert [line for line in starts if line.startswith("compares: ")] == [
        "compares: dpo, beta 0.1, with the model as it began (adapters off)",
        "compares: dpo, beta 0.1, with the model as it began (asked once)",
    ]


def test_labels_too_whose_answers_to_other_prompts_change_with_each_epoch(prefer):
    """9 steps are more than two epochs: from the second on a micro-batch holds other documents, hence 1e-6."""
    live, cached = (prefer(name, "--loss", "kto", steps=5) for name in ("live", "cached"))
    for ours, theirs in zip(numbers(cached), numbers(live), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-6)
    assert events(cached, "train")[-1]["kl"] == pytest.approx(
        events(live, "train")[-1]["kl"], rel=1e-4, abs=1e-6
    )
    # more than the 12 answers: those to other prompts, of every epoch
    assert len(load_file(next((cached / "reference").glob("part*")))["l_ref"]) > 24


def test_experts_from_disk_are_asked_as_those_in_memory(prefer):
    """`reference` of the resident model; sums in another order move a step's loss by 1e-6."""
    disk = prefer("cached", "--place.experts", "disk", steps=2)
    live = prefer("live", steps=2)
    for ours, theirs in zip(numbers(disk), numbers(live), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-5)


def test_what_was_broken_off_goes_on_and_nothing_is_asked_twice(prefer, tmp_path, monkeypatch):
    monkeypatch.setattr(kept, "ROUND", 1)
    asked: list[int] = []
    plain = kept.Kept._asked

    def fails(self, model, batch):
        asked.append(1)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return plain(self, model, batch)

    monkeypatch.setattr(kept.Kept, "_asked", fails)
    extra = ["--save.allow-changed", "steps", "--optimizer.schedule", "constant"]
    prefer("cached", *extra, code=130, steps=2)
    assert len(list((tmp_path / "cached" / "reference").glob("part*"))) == 2
    run = prefer("cached", *extra, steps=2)
    batches = len(list((run / "reference").glob("part*")))
    assert len(asked) == 3 + 1 + (batches - 2)  # broken off; the first again, for its model; the rest
    # a run that goes on is that of an unbroken one
    prefer("cached", *extra, steps=3)
    assert numbers(run) == numbers(prefer("cached", *extra, steps=3, out=tmp_path / "whole"))


def test_another_model_other_data_and_damage_are_refused_in_one_line(prefer, tmp_path):
    run = prefer("cached", steps=1)
    part = next((run / "reference").glob("part*"))
    there = load_file(part)
    again = ["--save.allow-changed", "steps"]
    save_file({**there, "l_ref": there["l_ref"] - np.float64(0.1)}, part)
    error = prefer("cached", *again, steps=2, code=2)
    assert "holds another model's outputs: log p of an answer was" in error
    part.write_bytes(b"nothing")
    assert "cannot be read" in prefer("cached", *again, steps=2, code=2)
    save_file(there, part)
    prefer("cached", *again, steps=2)  # control arm: untouched it goes on
    head = run / "reference" / kept.HEAD
    head.write_text(json.dumps({**json.loads(head.read_text()), "data": "other"}))
    assert "belongs to another data" in prefer("cached", *again, steps=3, code=2)


def test_every_weight_needs_no_frozen_copy(prefer, tmp_path, dense):
    words = ["--train", "all", "--learning-rate", "1e-3"]
    live, cached = (prefer(name, *words, model=dense, small=[], steps=2) for name in ("live", "cached"))
    assert numbers(cached) == numbers(live)
    assert numbers(live)[0][0] == pytest.approx(math.log(2), abs=1e-6) and numbers(live)[-1][1] > 0
    terms = [json.loads((run / "plan.json").read_text())["terms"] for run in (live, cached)]
    assert terms[0]["second model"] == terms[0]["base"] and not terms[1].get("second model")


@pytest.fixture(scope="module")
def dense(tmp_path_factory) -> Path:
    """tiny-k2's shape with its experts in bfloat16, so that every weight can train."""
    folder = tmp_path_factory.mktemp("dense")
    rows = write(folder / "rows.jsonl", [{"prompt": "a", "completion": "b"}])
    words = ["sft", "--quiet", "--model", TINY_K2, "--data", rows, "--out", folder / "run", "--steps", 1]
    assert cli.main(list(map(str, [*words, "--watch.samples", 0, "--dtype", "float32", *SMALL]))) == 0
    merged = ["merge", str(folder / "run"), "--to", "bf16", "--out", str(folder / "dense"), "--quiet"]
    assert cli.main(merged) == 0
    return folder / "dense"


def test_fields_of_another_loss(prefer):
    assert "reference needs loss = dpo or ipo or kto" in prefer("cached", "--loss", "simpo", code=2)


def test_a_process_without_a_held_out_batch_needs_no_number():
    """It computes along with the first batch at weights of 0 (evaluate.perplexity.dealt_batches), which nobody asked."""
    reference = kept.Kept("base", lambda reference: reference)
    batch = Batch(*(torch.zeros(4, dtype=torch.int64) for _ in range(4)), torch.tensor([0, 2]))
    model = SimpleNamespace(device="cpu")
    asked = reference.objective(model, None, "float32")
    assert asked(replace(batch, weights_T=torch.zeros(4))).tolist() == [0.0, 0.0]
    with pytest.raises(DataError, match="lacks 2 of 2 answers"):  # control arm
        asked(replace(batch, weights_T=torch.ones(4)))


@pytest.mark.nightly
def test_two_processes_share_the_asking(prefer, tmp_path):
    one = prefer("cached")
    two = torchrun(tmp_path, *SMALL)
    for single, double in zip(numbers(one), numbers(two), strict=True):
        assert double == pytest.approx(single, rel=1e-5, abs=1e-5)
    tables = [load_file(next((run / "reference").glob("part*"))) for run in (one, two)]
    assert (tables[0]["keys"] == tables[1]["keys"]).all() and (tables[0]["l_ref"] == tables[1]["l_ref"]).all()


@pytest.mark.nightly  # tests/parallel/test_fsdp.py: the weights stay divided, in every suite
def test_two_processes_train_every_weight_in_parts(prefer, dense, tmp_path):
    held_out = write(tmp_path / "held.jsonl", some(4, 50))
    words = ["--train", "all", "--validation", held_out]
    one = prefer("cached", *words, small=[], model=dense)
    two = torchrun(tmp_path, *words, "--place.weights", "sharded", model=dense)
    for kind in ("train", "eval"):
        for single, double in zip(numbers(one, kind), numbers(two, kind), strict=True):
            assert double[:3] == pytest.approx(single[:3], rel=1e-5, abs=1e-5)
    assert numbers(two)[-1][0] < numbers(two)[0][0]


def torchrun(folder: Path, *words, model=None) -> Path:
    """The run of two processes on `prefer`'s rows."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    given = [
        "--model",
        model or TINY_K2,
        "--data",
        folder / "pairs.jsonl",
        "--out",
        folder / "two",
        "--steps",
        3,
    ]
    given += [*WORDS, "--preference.reference", "cached", "--device", "cpu", "--quiet", *words]
    started = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    started += ["--master-addr", "127.0.0.1", "--master-port", str(port), "-m", "unfreeze", "prefer"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*started, *map(str, given)],
        timeout=120,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[:4000]
    return folder / "two"
