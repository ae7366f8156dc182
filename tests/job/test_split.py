"""--place.split: over how many "auto" may split, and a run of two processes that share the experts, which come from
disk, and keep half of the rest each. Process-heavy: two processes at once."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import unfreeze
from unfreeze import cli
from unfreeze.adapters.files import read_files
from unfreeze.commands.demo import TINY_K2
from unfreeze.config.sft import Config
from unfreeze.core.layout import RESIDENT
from unfreeze.job.planning.plan import Planning
from unfreeze.job.planning.residency import refuse_samples

pytestmark = pytest.mark.usefixtures("whole_looks")  # receipts of this process beside those of others


def splits(processes: int, **place: Any) -> list[int]:
    """How many processes may share six experts, fewest first."""
    config = Config.model_validate({"model": "m", "data": ["d.jsonl"], "place": place})
    start, shape = SimpleNamespace(tensors={"a": 1}, path="m", on_load=None), SimpleNamespace(num_experts=6)
    given: Any = config, SimpleNamespace(lora=object()), start, shape, torch.device("cpu")
    layouts = Planning(*given, processes=processes).layouts()
    return list(dict.fromkeys(layout.sharing for layout in layouts if layout.experts == "device"))


def test_auto_stays_inside_a_host(monkeypatch: pytest.MonkeyPatch):
    """Rows of tokens go through all processes of a split: 2 hosts of 2 are not split over 4."""
    for name, value in {"WORLD_SIZE": "4", "RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert splits(4) == [1, 2]
    assert splits(4, split=4) == [4]


def test_samples_are_refused_with_the_arithmetic_where_layers_are_gathered():
    said: list[str] = []
    emit = lambda kind, step, message: said.append(message)  # noqa: E731
    run = SimpleNamespace(step=0, events=SimpleNamespace(emit=emit))
    layout, work = RESIDENT.but(rest="peers"), SimpleNamespace(processes=4)
    plan = SimpleNamespace(layout=layout, work=work, sizes=SimpleNamespace(rest=(2**20,) * 4, streamed=()))
    refuse_samples(run, plan, 2, [], held_out=True)  # type: ignore[arg-type]
    assert "samples = 2): layers are gathered from peers" in said[0]
    assert "gathers all 3.0 MiB of them, and an answer of 64 tokens 192.0 MiB; the held-out" in said[0]


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [event for event in lines if event["kind"] == kind]


@pytest.mark.nightly
def test_int8_moments_of_two_processes_are_those_of_one(chat_rows: Path, tmp_path: Path, forkserver: Any):
    """Stochastic rounding draws by row and place, whoever holds them: eight steps stay within 1e-5."""
    shared_and_alone(forkserver, chat_rows, tmp_path, 8, "--optimizer.moments int8")
    losses = [[event["loss"] for event in events(tmp_path / run, "train")] for run in ("two", "one")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) and len(losses[0]) == 8


def shared_and_alone(forkserver: Any, chat_rows: Path, tmp_path: Path, steps: int, more: str = "") -> None:
    """The same run twice: "two" processes that share the experts, forked as torchrun starts them, and "one"."""
    line = f"sft --model {TINY_K2} --data {chat_rows} --tokens-per-step 256 --micro-batches 2 --steps {steps}"
    line += f" {more} --lora.rank 2 --dtype float32 --watch.samples 0 --validation-fraction 0.3 --threads 1 --save-every 2"
    forked = Path(__file__).parents[1] / "examples" / "trainers" / "forked.py"
    program = Path(unfreeze.__file__).with_name("__main__.py")
    two = f"{line} --out {tmp_path / 'two'} --place.split 2 --place.experts disk --place.rest peers".split()
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = forkserver.run([forked, "2", program, *two], env=env, timeout=200)
    assert done.returncode == 0, done.stderr[-4000:]
    assert cli.main([*f"{line} --quiet --out {tmp_path / 'one'}".split()]) == 0


def test_two_processes_that_share_the_experts_train_as_one(chat_rows: Path, tmp_path: Path, forkserver: Any):
    shared_and_alone(forkserver, chat_rows, tmp_path, 3)
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
    assert trains[0].replace(" (128 in each of 2 processes)", "") == trains[1]
    assert trains[0] != trains[1] and "parameters" in trains[0]
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
