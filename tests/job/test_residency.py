"""A run whose experts come from disk: the events and the adapter of the resident run, to the bit."""

import json
import os
import shutil
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from unfreeze import cli, models
from unfreeze.adapters import LoraConfig
from unfreeze.checkpoint import open_checkpoint
from unfreeze.commands.demo import TINY_K2
from unfreeze.config.sft import Config
from unfreeze.core.layout import GIB, RESIDENT
from unfreeze.job.planning import plan as job_plan
from unfreeze.job.trained import Adapters
from unfreeze.parallel import machine
from unfreeze.parallel.machine import Hardware, hardware
from unfreeze.parallel.plan import USABLE, layouts, plan_here
from unfreeze.parallel.plan.aside import Aside
from unfreeze.parallel.processes.collectives import ALONE, Alone
from unfreeze.report.run import facts, read_run
from unfreeze.tracking import scalars
from unfreeze.train.host_state import InHost

STEPS = 3
SAME = ("loss", "grad_norm", "tokens", "expert_load", "correct", "learning_rate")


def sft(chat_rows, out, *flags, model=TINY_K2):
    line = ["sft", "--model", model, "--data", chat_rows, "--out", out, "--tokens-per-step", 64]
    line += ["--lora.rank", 2, "--threads", 1, "--quiet", "--learning-rate", "5e-3", "--steps", STEPS, *flags]
    code = cli.main([str(word) for word in line])
    lines = (out / "events.jsonl").read_text(encoding="utf-8").splitlines()
    return code, [json.loads(line) for line in lines]


def of(events, kind):
    return [event for event in events if event["kind"] == kind]


def numbers(events):
    return [{name: event[name] for name in SAME} for event in of(events, "train")]


def adapter(out):
    return (out / "adapter" / "adapter_model.safetensors").read_bytes()


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def resident(request, chat_rows, tmp_path_factory):
    """-> (dtype, folder, events) of a run with all experts in memory."""
    out = tmp_path_factory.mktemp("resident") / "run"
    flags = ["--watch.samples", 0, "--save-every", 1, "--validation-fraction", 0.3]
    code, events = sft(chat_rows, out, "--dtype", request.param, *flags)
    assert code == 0
    return request.param, out, events


def test_the_same_run_to_the_bit(resident, chat_rows, tmp_path):
    dtype, folder, wanted = resident
    out = tmp_path / "run"
    flags = ["--dtype", dtype, "--validation-fraction", 0.3, "--place.experts", "disk"]
    code, events = sft(chat_rows, out, *flags)
    assert code == 0 and numbers(events) == numbers(wanted) and len(numbers(events)) == STEPS
    assert adapter(out) == adapter(folder)
    assert of(events, "receipt")[0]["groups"] == of(wanted, "receipt")[0]["groups"]
    assert [e["loss"] for e in of(events, "eval")] == [e["loss"] for e in of(wanted, "eval")] != []
    assert of(events, "plan")[0]["experts"] == "disk" and of(wanted, "plan")[0]["experts"] == "device"

    # what came is said after each step, and that no samples are taken
    came = of(events, "stream")
    assert [event["step"] for event in came] == [1, 2, 3] and not of(wanted, "stream")
    assert all(event["source"] == "disk" and 0 <= event["hidden"] <= 1 for event in came)
    shown = dict(facts(read_run(out)))["Experts from disk"]
    assert "of transfers hidden" in shown and "layers per step" in shown
    assert scalars(came[0])["stream/reads"] == came[0]["reads"]
    assert not of(events, "sample")
    (said,) = [e["message"] for e in of(events, "warning") if "samples" in e["message"]]
    assert "an answer of 64 tokens 40.5 MiB; the held-out loss is measured instead" in said


def test_a_run_whose_experts_come_in_groups(resident, chat_rows, tmp_path):
    """A layer's experts are 216 KiB, a buffer 105: three groups. To the bit in float32; in bf16 each of a token's
    rows is rounded before they are summed, by 2^-9 at most (parallel/placement/dispatch.py): of the loss before any update."""
    dtype, folder, wanted = resident
    out = tmp_path / "run"
    flags = ["--dtype", dtype, "--validation-fraction", 0.3, "--place.experts", "disk"]
    code, events = sft(chat_rows, out, *flags, "--place.buffer", 1e-4)
    assert code == 0 and len(numbers(events)) == STEPS
    if dtype == "float32":
        assert numbers(events) == numbers(wanted) and adapter(out) == adapter(folder)
        assert of(events, "receipt")[0]["groups"] == of(wanted, "receipt")[0]["groups"]
        assert [e["loss"] for e in of(events, "eval")] == [e["loss"] for e in of(wanted, "eval")] != []
    else:
        first, theirs = (of(them, "train")[0]["loss"] for them in (events, wanted))
        assert first == pytest.approx(theirs, rel=2**-9)

    # three layers of three groups: 9 come forward and 9 back, but for the two that are there at each turn
    (plan,) = of(events, "plan")
    assert (plan["buffer"], plan["groups"]) == (int(1e-4 * 2**30), 3) and "groups" not in of(wanted, "plan")[
        0
    ]
    assert any("3 groups of at most" in line and "14 in each later one" in line for line in plan["lines"])
    assert of(events, "stream")[-1]["reads"] == 14 and plan["terms"]["expert buffers"] <= 2 * plan["buffer"]


def test_auto_takes_groups_where_two_buffers_of_a_layer_are_too_large(chat_rows, tmp_path, monkeypatch):
    """The free memory lies between what whole layers and single experts take, with everything recomputed."""
    manifest = open_checkpoint(TINY_K2)
    here = Hardware("cpu", "small", 2, 2**40, 2**40)

    def least(buffer):
        monkeypatch.setattr("unfreeze.parallel.machine.hardware", lambda device: here)
        layout = RESIDENT.but(experts="disk", buffer=buffer / GIB)
        return plan_here(
            models.shape(manifest.config), manifest, LoraConfig(rank=1), tokens=64, dtype="float32",
            device="cpu", layout=layout, longest=64, receipt_bytes=2**20,
        ).total  # fmt: skip

    whole, single = least(0), least(2**14)
    assert single < whole
    small = replace(here, available=int((2 * single + whole) / 3 / USABLE))
    monkeypatch.setattr("unfreeze.parallel.machine.hardware", lambda device: small)
    more = ["--watch.samples", 0, "--dtype", "float32", "--lora.rank", 1]
    code, events = sft(chat_rows, tmp_path / "run", *more)
    (planned,) = of(events, "plan")
    assert code == 0 and planned["experts"] == "disk" and planned["groups"] > 1
    assert any("because everything on the device; recompute" in line for line in planned["lines"])
    assert len(of(events, "stream")) == STEPS


def test_a_run_whose_boundary_activations_are_copied_to_host_memory(
    resident, chat_rows, tmp_path, monkeypatch
):
    """Where a GPU would do so; here it is a plain copy."""
    dtype, folder, wanted = resident
    monkeypatch.setattr(layouts, "_boundaries", lambda *given: ["host"])
    here = hardware(torch.device("cpu"))
    monkeypatch.setattr(machine, "hardware", lambda place: replace(here, host=2**34))
    out = tmp_path / "run"
    code, events = sft(chat_rows, out, "--dtype", dtype, "--validation-fraction", 0.3, "--watch.samples", 0)
    (plan,) = of(events, "plan")
    assert code == 0 and plan["boundary"] == "host" and plan["recompute"] != "nothing"
    assert any("the inputs of 3 layers are in host memory until backward" in line for line in plan["lines"])
    assert numbers(events) == numbers(wanted) and adapter(out) == adapter(folder)


@pytest.mark.parametrize("moments", ["float32", "int8"])
def test_a_run_whose_moments_lie_in_host_memory_and_one_that_goes_on(
    chat_rows, tmp_path, monkeypatch, moments
):
    """Where a GPU would do so; here they are copied, and what nobody may read is NaN. Half of another run has them
    on the device."""
    flags = ["--dtype", "float32", "--watch.samples", 0, "--optimizer.moments", moments]
    _, wanted = sft(chat_rows, tmp_path / "resident", *flags, "--save-every", 1)
    here = hardware(torch.device("cpu"))
    monkeypatch.setattr(layouts, "_states", lambda *given: [{"adapters": "device", "optimizer": "host"}])
    monkeypatch.setattr(machine, "hardware", lambda place: replace(here, host=2**34))
    monkeypatch.setattr(InHost, "poison", True)
    monkeypatch.setattr(InHost, "chunk", 4096)
    half = tmp_path / "half"
    shutil.copytree(tmp_path / "resident", half)
    for path in (half / "state" / "step-000003", half / "adapter"):
        shutil.rmtree(path)
    for out, resumed in ((tmp_path / "whole", False), (half, True)):
        code, events = sft(chat_rows, out, *flags, "--save-every", 1)
        plan = of(events, "plan")[-1]
        assert code == 0 and plan["optimizer"] == "host" and "optimizer" not in of(wanted, "plan")[0]
        assert of(events, "start")[-1].get("resumed", False) == resumed
        assert any("the adapters' moments are in host memory" in line for line in plan["lines"])
        assert numbers(events)[-STEPS:] == numbers(wanted) and adapter(out) == adapter(tmp_path / "resident")
        saves = [
            run / "state" / "step-000003" / "tensors.safetensors" for run in (out, tmp_path / "resident")
        ]
        assert saves[0].read_bytes() == saves[1].read_bytes()
        assert plan["save_bytes"] == of(wanted, "plan")[0]["save_bytes"]


def test_a_run_goes_on_from_another_place_with_the_same_bits(resident, chat_rows, tmp_path):
    """Half of it with all experts in memory, half from disk."""
    dtype, folder, wanted = resident
    out = tmp_path / "run"
    shutil.copytree(folder, out)
    for path in (out / "state" / "step-000003", out / "adapter"):
        shutil.rmtree(path)
    flags = ["--dtype", dtype, "--validation-fraction", 0.3, "--save-every", 1]
    code, events = sft(chat_rows, out, *flags, "--place.experts", "disk")
    assert code == 0 and of(events, "start")[-1]["resumed"]
    assert numbers(events)[-1:] == numbers(wanted)[-1:] and adapter(out) == adapter(folder)
    assert [event["step"] for event in of(events, "stream")] == [3]


def test_a_disk_that_fails_in_a_run_is_one_line_and_the_save_stays(chat_rows, tmp_path, monkeypatch, capsys):
    from unfreeze.parallel.placement.residency import ExpertsOnDisk

    begin, count = ExpertsOnDisk.begin, [0]
    copy = tmp_path / "model"
    shutil.copytree(TINY_K2, copy)

    def failing(self, layer, into):
        count[0] += 1
        if count[0] == 30:
            os.truncate(next(copy.glob("*.safetensors")), 4096)
        return begin(self, layer, into)

    monkeypatch.setattr(ExpertsOnDisk, "begin", failing)
    out = tmp_path / "run"
    flags = ["--watch.samples", 0, "--save-every", 1, "--place.experts", "disk", "--steps", 40]
    code, events = sft(chat_rows, out, *flags, model=copy)
    said = capsys.readouterr().err
    assert code == 2 and "longer when it was opened" in said and "Traceback" not in said
    saved = sorted(path.name for path in (out / "state").iterdir())
    assert saved and saved[-1] == f"step-{of(events, 'train')[-1]['step']:06d}"


def test_what_cannot_stream_is_refused_before_anything_is_loaded(chat_rows, tmp_path, capsys):
    config = json.loads((TINY_K2 / "config.json").read_text())
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in TINY_K2.iterdir():
        if file.suffix != ".safetensors" and file.is_file():
            shutil.copy(file, bare)
    (bare / "config.json").write_text(json.dumps(config))
    line = ["pretrain", "--model", str(bare), "--data", str(chat_rows), "--out", str(tmp_path / "run")]
    line += ["--place.experts", "disk", "--quiet", "--steps", "1"]
    assert cli.main(line) == 2
    assert "place.experts is disk, but every weight trains" in capsys.readouterr().err


def test_a_buffer_smaller_than_an_expert_is_refused_before_anything_is_loaded(chat_rows, tmp_path, capsys):
    line = [
        "sft",
        "--model",
        str(TINY_K2),
        "--data",
        str(chat_rows),
        "--out",
        str(tmp_path / "run"),
        "--quiet",
    ]
    assert cli.main([*line, "--place.experts", "disk", "--place.buffer", "1e-6"]) == 2
    assert "one expert of a layer takes 13.5 KiB, and a buffer may have 1.0 KiB" in capsys.readouterr().err


def test_auto_takes_the_disk_where_the_device_is_too_small(chat_rows, tmp_path, monkeypatch):
    """The free memory lies between what the two take with everything recomputed."""
    manifest = open_checkpoint(TINY_K2)
    here = Hardware("cpu", "small", 2, 2**40, 2**40)

    def least(experts):
        monkeypatch.setattr("unfreeze.parallel.machine.hardware", lambda device: here)
        return plan_here(
            models.shape(manifest.config), manifest, LoraConfig(rank=2), tokens=256, dtype="float32",
            device="cpu", layout=RESIDENT.but(experts=experts), longest=64, receipt_bytes=2**20,
        ).total  # fmt: skip

    between = (least("device") + least("disk")) // 2
    small = replace(here, available=int(between / USABLE))
    monkeypatch.setattr("unfreeze.parallel.machine.hardware", lambda device: small)
    more = ["--watch.samples", 0, "--dtype", "float32", "--tokens-per-step", 256]
    code, events = sft(chat_rows, tmp_path / "run", *more)
    (planned,) = of(events, "plan")
    assert code == 0 and planned["experts"] == "disk" and planned["recompute"] == "layers"
    assert any(
        "because everything on the device; recompute layers would take" in line for line in planned["lines"]
    )
    assert len(of(events, "stream")) == STEPS


def test_a_second_model_is_measured_once_for_all_places_that_are_tried(chat_rows, monkeypatch):
    """None of them fits, so all are tried."""
    monkeypatch.setattr(machine, "hardware", lambda place: Hardware("cpu", "here", 2, 2**20, 2**20))
    tried, asked = [], []
    real = job_plan.Planning.plan
    monkeypatch.setattr(
        job_plan.Planning, "plan", lambda *given, **more: tried.append(given) or real(*given, **more)
    )
    config = Config.model_validate({"model": str(TINY_K2), "data": [str(chat_rows)]})
    start = open_checkpoint(TINY_K2)
    given = config, Adapters(LoraConfig(rank=2), 0), start, models.shape(start.config)
    second = SimpleNamespace(aside=lambda *of: asked.append(of) or Aside(stays=2**30))
    folder = SimpleNamespace(step=0)
    planning = job_plan.Planning(*given, torch.device("cpu"), [5, 7], second=second)
    plan = job_plan.agreed_plan(planning, folder, ALONE)
    assert len(tried) > 3 and plan.terms["second model"] == 2**30
    assert [(beside.tokens, beside.longest) for (beside,) in asked] == [(config.tokens_per_micro_batch, 7)]


class Together(Alone):
    """Two threads as the processes of a group, of which only texts are exchanged."""

    size = 2

    def __init__(self, rank, said, barrier):
        self.rank, self._said, self._barrier = rank, said, barrier

    def texts(self, text):
        self._barrier.wait(60)
        self._said[self.rank] = text
        self._barrier.wait(60)
        return [*self._said]


def test_processes_with_unequal_memory_agree_on_the_smaller_buffer(chat_rows, monkeypatch):
    """One has room for whole layers, one for groups of experts alone; each plans by itself, then both the same.
    Control arm: a process alone takes what it has room for."""
    rooms = threading.local()
    monkeypatch.setattr(
        machine, "hardware", lambda place: Hardware("cpu", "here", 2, rooms.bytes, rooms.bytes)
    )
    place = {"experts": "disk", "split": 1, "rest": "device", "recompute": "layers"}
    fields = {"data": [str(chat_rows)], "place": place, "training": {"tokens_per_step": 16}}
    fields["memory"] = {"dtype": "float32"}
    config = Config.model_validate({"model": str(TINY_K2), **fields})
    start = open_checkpoint(TINY_K2)
    given = config, Adapters(LoraConfig(rank=2), 0), start, models.shape(start.config)
    rooms.bytes = 2**40
    needed = job_plan.Planning(*given, torch.device("cpu"), [5, 7]).first()[1]
    most = needed.total - needed.terms["expert buffers"] // 4
    folder, said, found, barrier = SimpleNamespace(step=0), ["", ""], {}, threading.Barrier(2)

    def agree(rank, room, group):
        rooms.bytes = group.size * (int(room / USABLE) + 2**10)
        planning = job_plan.Planning(*given, torch.device("cpu"), [5, 7], processes=group.size)
        made = job_plan.agreed_plan(planning, folder, group)
        found[rank] = (made.fits, made.layout.experts, made.layout.buffer_bytes)

    for rank, room in enumerate((2**40, most)):
        agree(f"alone {rank}", room, ALONE)
    threads = [
        threading.Thread(target=agree, args=(rank, room, Together(rank, said, barrier)))
        for rank, room in enumerate((2**40, most))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert found["alone 0"] == (True, "disk", None) and found["alone 1"][2] is not None
    assert found[0] == found[1] == found["alone 1"] and found[0][0]
