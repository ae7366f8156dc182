"""--place.split: what "auto" tries and in which order, what cannot be split, and a run of two processes that
share the experts, which come from disk, and keep half of the rest each. Process-heavy: one torchrun."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from unfreeze.job.places import (
    OF_CONFIG,
    Where,
    possible_boundaries,
    possible_optimizers,
    possible_places,
    possible_rests,
    possible_splits,
)

from unfreeze import cli
from unfreeze.adapters.files import read_files
from unfreeze.commands.demo import TINY_K2
from unfreeze.config.sft import Config
from unfreeze.core.errors import ConfigError
from unfreeze.job.residency import refuse_samples

MIXTURE, DENSE = SimpleNamespace(num_experts=6), SimpleNamespace(num_experts=0)
LORA, ALL = SimpleNamespace(lora=object()), SimpleNamespace(lora=None)
START = SimpleNamespace(tensors={"a": 1}, path="m")


def config(**place: Any) -> Config:
    return Config.model_validate({"model": "m", "data": ["d.jsonl"], "place": place})


def places(cpu: bool, processes: int, **place: Any) -> list[Where]:
    device = torch.device("cpu" if cpu else "cuda")
    return possible_places(config(**place), LORA, START, MIXTURE, device, processes)  # type: ignore[arg-type]


def test_auto_tries_what_is_fastest_first_and_the_smallest_split_that_may_fit():
    """All on the device; split; the rest from peers; and what streams is shared too. 6 experts are not
    divided among 8."""
    assert places(True, 1) == [Where("device"), Where("disk"), Where("disk", buffer=OF_CONFIG)]

    def each(experts: str, *splits: int) -> list[Where]:
        return [Where(experts, split, rest) for rest in ("device", "peers") for split in splits]

    def grouped(experts: str) -> list[Where]:
        """What is not shared: a layer's experts come in groups."""
        return [Where(experts, 1, rest, buffer=OF_CONFIG) for rest in ("device", "peers")]

    disk = [*each("disk", 2, 4), *grouped("disk")]
    assert places(True, 4) == [*each("device", 1, 2, 4), *disk]
    gpu = [*each("device", 1, 2, 4), *each("host", 2, 4), *grouped("host"), *disk]
    assert places(False, 8, boundary="device", optimizer="device") == gpu
    host = {"boundary": "host"}, {"optimizer": "host"}, {"boundary": "host", "optimizer": "host"}
    assert places(False, 8)[:5] == [gpu[0], *(gpu[0]._replace(**moved) for moved in host), gpu[1]]
    assert len(places(False, 8)) == 4 * len(gpu)
    assert places(True, 4, split=2) == [*each("device", 2), *each("disk", 2)]
    alone = {"experts": "disk", "split": 1, "rest": "device"}
    assert places(True, 4, **alone) == [Where("disk"), Where("disk", buffer=OF_CONFIG)]
    assert places(True, 4, **alone, buffer=0.5) == [Where("disk", buffer=OF_CONFIG)]
    assert places(True, 2, experts="device", split=1, rest="peers") == [Where("device", 1, "peers")]


@pytest.mark.parametrize(
    ("trained", "start", "processes", "said", "remedy"),
    [
        (LORA, START, 1, "there is one process", "torchrun"),
        (ALL, START, 2, "every weight trains", "--place.weights sharded"),
        (
            LORA,
            SimpleNamespace(tensors={}, path="m"),
            2,
            "no weights that could be read",
            "--place.rest auto",
        ),
    ],
)
def test_a_rest_that_cannot_lie_with_peers_is_one_line(trained, start, processes, said, remedy):
    with pytest.raises(ConfigError, match=f"place.rest is peers, but .*{said}") as caught:
        possible_rests(config(rest="peers"), trained, start, processes)  # type: ignore[arg-type]
    assert caught.value.next.startswith(remedy)
    assert possible_rests(config(), trained, start, processes) == ["device"]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("device", "trained", "recompute", "said", "remedy"),
    [
        ("cpu", LORA, "auto", "the device is a CPU", "--place.boundary auto"),
        ("cuda", ALL, "auto", "every weight trains", "--place.boundary auto"),
        ("cuda", LORA, "nothing", "recompute is nothing", "--recompute layers"),
    ],
)
def test_inputs_of_layers_that_cannot_leave_the_device_are_one_line(device, trained, recompute, said, remedy):
    def possible(boundary: str) -> list[str]:
        fields = {"model": "m", "data": ["d.jsonl"], "place": {"boundary": boundary}, "recompute": recompute}
        return possible_boundaries(Config.model_validate(fields), trained, torch.device(device))

    with pytest.raises(ConfigError, match=f"place.boundary is host, but .*{said}") as caught:
        possible("host")
    assert caught.value.next == remedy and possible("auto") == ["device"]


@pytest.mark.parametrize(
    ("device", "trained", "said"),
    [("cpu", LORA, "the device is a CPU"), ("cuda", ALL, "every weight trains")],
)
def test_moments_that_cannot_leave_the_device_are_one_line(device, trained, said):
    def possible(optimizer: str) -> list[str]:
        return possible_optimizers(config(optimizer=optimizer), trained, torch.device(device))

    with pytest.raises(ConfigError, match=f"place.optimizer is host, but .*{said}") as caught:
        possible("host")
    assert caught.value.next == "--place.optimizer auto" and possible("auto") == ["device"]


def test_auto_stays_inside_a_host(monkeypatch: pytest.MonkeyPatch):
    """Rows of tokens go through all processes of a split: 2 hosts of 2 are not split over 4."""
    for name, value in {"WORLD_SIZE": "4", "RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert possible_splits(config(), LORA, MIXTURE, 4) == [1, 2]  # type: ignore[arg-type]
    assert possible_splits(config(split=4), LORA, MIXTURE, 4) == [4]  # type: ignore[arg-type]


def test_nothing_is_split_by_itself_where_nothing_can_be():
    assert possible_splits(config(), LORA, DENSE, 4) == [1]  # type: ignore[arg-type]
    assert possible_splits(config(), ALL, MIXTURE, 4) == [1]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("trained", "shape", "said"), [(ALL, MIXTURE, "every weight trains"), (LORA, DENSE, "has no experts")]
)
def test_a_split_that_cannot_be_is_one_line(trained, shape, said):
    with pytest.raises(ConfigError, match=said) as caught:
        possible_splits(config(split=2), trained, shape, 2)  # type: ignore[arg-type]
    assert caught.value.next.startswith("--place.split 1")


@pytest.mark.parametrize(
    ("place", "said", "remedy"),
    [
        ({"split": 2}, "place.split is 2", "--place.split 1"),
        ({"experts": "device"}, "nothing comes through a buffer", "--place.experts auto"),
    ],
)
def test_a_buffer_that_nothing_could_use_is_one_line(place, said, remedy):
    with pytest.raises(ConfigError, match=f"place.buffer is 0.5, but .*{said}") as caught:
        places(True, 2, buffer=0.5, **place)
    assert caught.value.next == f"{remedy}, or --place.buffer auto"


def test_samples_are_refused_with_the_arithmetic_where_layers_are_gathered():
    said: list[str] = []
    emit = lambda kind, step, message: said.append(message)  # noqa: E731
    run = SimpleNamespace(step=0, events=SimpleNamespace(emit=emit))
    work = SimpleNamespace(experts="device", rest="peers", processes=4)
    plan = SimpleNamespace(work=work, sizes=SimpleNamespace(rest=(2**20,) * 4, streamed=()))
    refuse_samples(run, plan, 2, [], held_out=True)  # type: ignore[arg-type]
    assert "samples = 2): layers are gathered from peers" in said[0]
    assert "gathers all 3.0 MiB of them, an answer of 64 tokens 192.0 MiB; the held-out" in said[0]


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [event for event in lines if event["kind"] == kind]


@pytest.mark.nightly
def test_int8_moments_of_two_processes_are_those_of_one(chat_rows: Path, tmp_path: Path):
    """Stochastic rounding draws by row and place, whoever holds them: eight steps stay within 1e-5."""
    shared_and_alone(chat_rows, tmp_path, 8, "--optimizer-moments int8")
    losses = [[event["loss"] for event in events(tmp_path / run, "train")] for run in ("two", "one")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) and len(losses[0]) == 8


def shared_and_alone(chat_rows: Path, tmp_path: Path, steps: int, more: str = "") -> None:
    """The same run twice: "two" processes that share the experts, and "one"."""
    line = f"sft --model {TINY_K2} --data {chat_rows} --tokens-per-step 256 --micro-batches 2 --steps {steps}"
    line += f" {more} --lora.rank 2 --dtype float32 --samples 0 --validation-fraction 0.3 --threads 1 --save-every 2"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    start = f"-m torch.distributed.run --nproc-per-node 2 --master-port {port} -m unfreeze".split()
    two = f"{line} --out {tmp_path / 'two'} --place.split 2 --place.experts disk --place.rest peers".split()
    process = subprocess.Popen(
        [sys.executable, *start, *two],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        _, said = process.communicate(timeout=200)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun ends its workers
        raise
    assert process.returncode == 0, said[-4000:]
    assert cli.main([*f"{line} --quiet --out {tmp_path / 'one'}".split()]) == 0


def test_two_processes_that_share_the_experts_train_as_one(chat_rows: Path, tmp_path: Path):
    shared_and_alone(chat_rows, tmp_path, 3)
    one, many = tmp_path / "one", tmp_path / "two"

    # the numbers of a run, within rounding
    losses = [[event["loss"] for event in events(run, kind)] for run in (many, one) for kind in ("train",)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) and len(losses[0]) == 3
    held_out = [[event["loss"] for event in events(run, "eval")] for run in (many, one)]
    assert held_out[0] == pytest.approx(held_out[1], rel=1e-5) and held_out[0]
    assert [e["expert_load"] for e in events(many, "train")] == [
        e["expert_load"] for e in events(one, "train")
    ]

    # what each process holds is said, and the receipt is of all of it, with the experts' own numbers
    assert (events(many, "plan")[0]["split"], events(many, "plan")[0]["experts_held"]) == (2, 8)
    assert (
        events(many, "plan")[0]["rest"] == "peers" and not {"split", "rest"} & events(one, "plan")[0].keys()
    )
    # the start counts what trains in all of them
    trains = [events(run, "plan")[0]["start"][2] for run in (many, one)]
    assert trains[0] == trains[1] and "parameters" in trains[0]
    came = [(event["source"], event["reads"]) for event in events(many, "stream")[-2:]]
    assert came[0][0] == "disk" and came[1] == ("peers", 4)  # 2 L - 4 of 4 layers
    theirs, ours = (json.loads((run / "receipt.json").read_text()) for run in (one, many))
    assert ours["exceptions"] == theirs["exceptions"] and ours["groups"].keys() == theirs["groups"].keys()
    for group, entry in ours["groups"].items():
        for name, value in entry.items():
            other = theirs["groups"][group][name]
            if isinstance(other, float):
                # logits change by 1e-1 and are 10 large: their difference carries 1e-6 of 10
                assert value == pytest.approx(other, rel=1e-5, abs=2e-5), (group, name)
            else:
                assert value == other, (group, name)
    assert ours["groups"]["experts"]["experts"] == 3 * 16

    # the adapter is in shards, which together are the other's; updates of tiny gradients amplify rounding
    assert len(list((many / "adapter").glob("adapter_model-*.safetensors"))) == 2
    (config, shards), (other, whole) = (read_files(run / "adapter") for run in (many, one))
    assert config == other and shards.keys() == whole.keys()
    for name, tensor in shards.items():
        torch.testing.assert_close(tensor, whole[name], rtol=1e-4, atol=1e-5, msg=name)

    # and `unfreeze export` makes one file of them
    assert cli.main(["export", str(many), "--for", "peft", "--out", str(tmp_path / "joined")]) == 0
    joined = read_files(tmp_path / "joined")[1]
    assert all(torch.equal(joined[name], tensor) for name, tensor in shards.items())
    assert not list((tmp_path / "joined").glob("adapter_model-*"))
