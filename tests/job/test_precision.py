"""The dtype of a run: what the hardware multiplies, kept by a run that goes on, one for all processes."""

from __future__ import annotations

import json

import pytest
import torch

import unfreeze
from unfreeze import cli
from unfreeze.commands.demo import TINY_K2
from unfreeze.job.opening import precision as module
from unfreeze.job.opening.precision import dtype_line, expected, settled
from unfreeze.kernels import precision as kernels
from unfreeze.parallel.processes.collectives import ALONE
from unfreeze.recipes import pretrain
from unfreeze.recipes.sft import Config
from unfreeze.report.run import read_run

pytestmark = pytest.mark.usefixtures("fewer_layers")

CPU = torch.device("cpu")
QUICK = ["--steps", "1", "--tokens-per-step", "128", "--watch.samples", "0", "--threads", "1", "--quiet"]


@pytest.fixture
def units(monkeypatch):
    """Says whether this CPU multiplies bfloat16."""

    def set_to(yes: bool) -> None:
        for place in (module, kernels):
            monkeypatch.setattr(place, "multiplies_bf16", lambda: yes)
        monkeypatch.setattr(kernels, "cpu_class", lambda: "cpu-amx" if yes else "cpu-avx2")

    return set_to


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "d.jsonl"
    row = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello there."}]}
    path.write_text((json.dumps(row) + "\n") * 12)
    return path


def config(tmp_path, **fields):
    return Config(model="m", data=("d.jsonl",), out=str(tmp_path / "run"), **fields)


class Others:
    """A group whose other process answers something else."""

    def __init__(self, *, first: str = "", other: str):
        self.first, self.other = first, other

    def texts(self, own: str) -> list[str]:
        return [self.first or own, self.other]


@pytest.mark.parametrize("yes, name", [(True, "bfloat16"), (False, "float32")])
def test_a_new_run_takes_what_the_hardware_multiplies(tmp_path, units, yes, name):
    units(yes)
    asked = config(tmp_path)
    assert asked.memory.dtype == "auto" and expected(asked) == name

    def said(**fields):
        settle, dtype = settled(config(tmp_path, **fields), None, CPU, ALONE)
        assert settle.memory.dtype == dtype.name
        return dtype_line(dtype)

    assert said() == (
        "dtype: bfloat16 (this CPU (amx) has bf16 matmul units)"
        if yes
        else "dtype: float32 (this CPU (avx2) has no bfloat16 units)"
    )
    here = "" if yes else "; this CPU (avx2) has no bfloat16 units, so it is slow"
    assert said(dtype="bfloat16") == f"dtype: bfloat16 (as asked{here})"
    too = "; this CPU (amx) is fast in bfloat16 too" if yes else ""
    assert said(dtype="float32") == f"dtype: float32 (as asked{too})"


def test_one_process_without_units_makes_all_take_float32(tmp_path, units):
    units(True)
    settle, dtype = settled(config(tmp_path), None, CPU, Others(other="float32"))  # type: ignore[arg-type]
    assert settle.memory.dtype == "float32"
    assert dtype_line(dtype) == "dtype: float32 (another process has no bfloat16 units)"
    same, _ = settled(config(tmp_path), None, CPU, Others(other="bfloat16"))  # type: ignore[arg-type]
    assert same.memory.dtype == "bfloat16"


def test_random_weights_begin_in_float32(units, tmp_path):
    units(True)

    class Start:
        tensors: tuple[()] = ()

    asked = pretrain.Config(model="m", data=("d.jsonl",), out=str(tmp_path / "run"))
    settle, dtype = settled(asked, Start(), CPU, ALONE)  # type: ignore[arg-type]
    assert settle.memory.dtype == "float32"
    assert dtype_line(dtype) == "dtype: float32 (new weights train in float32)"
    Start.tensors = ("w",)  # type: ignore[assignment]
    assert settled(asked, Start(), CPU, ALONE)[0].memory.dtype == "bfloat16"  # type: ignore[arg-type]


def test_a_run_keeps_its_dtype_elsewhere_and_says_that_it_is_slow(tmp_path, data, units, capsys):
    out = tmp_path / "run"
    fields = {"model": str(TINY_K2), "data": str(data), "out": str(out), "steps": 2, "tokens_per_step": 128}
    fields |= {"samples": 0, "threads": 1, "quiet": True}
    units(True)
    loop = unfreeze.prepare(**fields)
    for micro_batches in loop.batches:
        loop.forward_backward(micro_batches)
        loop.optim_step()
        break
    assert read_run(out).config["memory.dtype"] == "bfloat16"

    units(False)
    loop = unfreeze.prepare(**fields)
    assert loop.state.step == 1 and loop.model.dtype == torch.bfloat16
    loop.close()
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    assert [event["message"] for event in events if event["kind"] == "warning"][-1:] == [
        "dtype = bfloat16 is slow here: this CPU (avx2) has no bfloat16 units;"
        " faster: --dtype float32 --save.allow-changed dtype"
    ]

    # and its remedy works, in this form only
    command = ["sft", "--model", str(TINY_K2), "--data", str(data), "--out", str(out), "--steps", "2"]
    command += [*QUICK[2:-1]]
    assert cli.main([*command, "--steps", "3", "--save.allow-changed", "steps"]) == 0
    assert "dtype: bfloat16 (as when the run started)" in capsys.readouterr().err
    command += ["--steps", "4", "--dtype", "float32"]
    assert cli.main(command) == 2
    assert cli.main([*command, "--save.allow-changed", "dtype", "steps"]) == 0
    assert read_run(out).config["memory.dtype"] == "float32"


def test_doctor_checks_a_run_in_the_dtype_that_it_keeps(tmp_path, data, units, capsys):
    out, toml = tmp_path / "run", tmp_path / "run.toml"
    toml.write_text(
        f'model = "{TINY_K2}"\ndata = "{data}"\nout = "{out}"\nsteps = 1\ntokens_per_step = 128\n'
        "[watch]\nsamples = 0\n[memory]\nthreads = 1\n"
    )
    units(False)
    assert cli.main(["doctor", str(toml)]) == 0
    assert "dtype: float32 (this CPU (avx2) has no bfloat16 units)" in capsys.readouterr().out  # control arm
    units(True)
    assert cli.main(["sft", str(toml), "--quiet"]) == 0

    units(False)
    assert cli.main(["doctor", str(toml)]) == 0
    said = capsys.readouterr().out
    assert "is finished at step 1" in said and "memory.dtype differ" not in said
    assert "dtype = bfloat16 is slow here" in said and "32 tokens in bfloat16" in said
    assert "remedy: --dtype float32 --save.allow-changed dtype" in said


def test_the_start_says_dtype_and_why(tmp_path, data, units, capsys):
    units(False)
    out = tmp_path / "run"
    command = ["sft", "--model", str(TINY_K2), "--data", str(data), "--out", str(out)]
    assert cli.main([*command, *QUICK[:-1]]) == 0
    assert "dtype: float32 (this CPU (avx2) has no bfloat16 units)" in capsys.readouterr().err
    assert read_run(out).config["memory.dtype"] == "float32"
