"""A run says which kernels it used and what decided: in its events, its report, and at its start if any is
predicted."""

import dataclasses
import json

import pytest

from unfreeze import cli
from unfreeze.commands.demo import TINY_K2
from unfreeze.kernels.choice import choose as choosing
from unfreeze.kernels.choice import predicted, record
from unfreeze.kernels.rms_norm import OP
from unfreeze.kernels.skinny_linear import OP as FEW_ROWS
from unfreeze.kernels.swiglu import OP as SWIGLU
from unfreeze.report.html import summary_lines, write_report

CLAUSE = "1 kernel predicted"


@pytest.fixture
def plant(monkeypatch):
    """rms_norm's CPU loop as predicted, on a machine that has no record of it; everything else as it is."""

    def planted():
        real = choosing.record_rows
        as_predicted = {"predicted_on": ("cpu",), "predicted_buckets": (), "because": "4 bytes"}
        part = dataclasses.replace(OP.candidates["numba"], **as_predicted)
        monkeypatch.setitem(OP.candidates, "numba", part)
        monkeypatch.setattr(choosing, "record_rows", lambda op, *rest: [] if op is OP else real(op, *rest))
        monkeypatch.setattr(choosing, "_WRONG", {})
        monkeypatch.setattr(choosing, "CHECKED", ("cpu",))  # as a GPU's
        for other in (FEW_ROWS, SWIGLU):
            unpredicted = dataclasses.replace(other.candidates["numba"], predicted_on=())
            monkeypatch.setitem(other.candidates, "numba", unpredicted)

    return planted


@pytest.fixture(autouse=True)
def measured(monkeypatch):
    """The records that come with the package count here, whatever this CPU's class is."""
    for module in (choosing, record):
        monkeypatch.setattr(module, "device_key", lambda device: "cpu-avx512-bf16")


def trained(folder, rows):
    words = ["--model", TINY_K2, "--data", rows, "--out", folder, "--tokens-per-step", 128, "--steps", 2]
    words += ["--watch.samples", 0, "--lora.rank", 1, "--lora.targets", "attention", "--optimizer.warmup", 0]
    assert cli.main(["sft", *map(str, words)]) == 0
    lines = (folder / "events.jsonl").read_text(encoding="utf-8").splitlines()
    return [choice for line in lines for choice in json.loads(line).get("choices", [])]


def test_a_predicted_kernel_is_said_at_the_start_and_in_the_report(tmp_path, chat_rows, plant, capsys):
    plant()
    choices = trained(tmp_path / "run", chat_rows)
    norms = [choice for choice in choices if choice["op"] == "rms_norm"]
    assert norms and all(choice["origin"] == "predicted, not measured" for choice in norms)
    assert all(choice["runs"] == "numba" and "4 bytes" in choice["why"] for choice in norms)
    # what a step uses is there: forward, backward, optimizer
    assert {"linear_cross_entropy", "adamw", "expert_mlp"} <= {choice["op"] for choice in choices}
    start = capsys.readouterr().err.partition("\nstep ")[0].splitlines()
    assert sum(CLAUSE in line for line in start) == 1
    # a bar's where there is no terminal; and the rows of this test are there three times, which is said too
    start = [line for line in start if not line.startswith(("load ", "warning", "  "))]
    assert len(start) <= 6 and max(map(len, start)) <= 80, start
    assert json.loads((tmp_path / "run" / "plan.json").read_text())["predicted_kernels"] == ["rms_norm"]
    page = write_report(tmp_path / "run").read_text(encoding="utf-8")
    assert "predicted, not measured (rms_norm)" in page and "predicted, not measured here: 4 bytes" in page
    summary = " ".join(" ".join(summary_lines(tmp_path / "run")).split())  # lines are folded
    assert "predicted, not measured (rms_norm)" in summary


def test_control_arm_measured_kernels_are_listed_and_the_start_says_nothing(tmp_path, chat_rows, capsys):
    choices = trained(tmp_path / "run", chat_rows)
    assert "predicted_kernels" not in json.loads((tmp_path / "run" / "plan.json").read_text())
    assert not any("predicted" in choice["origin"] for choice in choices)
    assert any("measured on" in choice["origin"] for choice in choices)
    assert "predicted" not in capsys.readouterr().err
    page = write_report(tmp_path / "run").read_text(encoding="utf-8")
    assert "predicted" not in page.partition("Kernels")[2] and "measured on" in page
    # a second run of the process says what it used, though all of it was chosen before
    assert trained(tmp_path / "again", chat_rows) == choices


def test_what_is_expected_is_not_checked(plant, monkeypatch):
    import torch

    plant()
    monkeypatch.setattr(predicted, "wrong", lambda *_: pytest.fail("checked before the plan"))
    assert predicted.expected(torch.device("cpu"), torch.bfloat16) == ["rms_norm"]
    with pytest.raises(pytest.fail.Exception, match="checked"):  # control arm
        choosing.by_record(OP, torch.device("cpu"), torch.bfloat16, "many")
