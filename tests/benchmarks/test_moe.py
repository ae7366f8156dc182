"""bench moe end to end on a tiny shape: every side runs, its rows are whole, and what is printed is what the
rows say."""

import pytest
import torch

from benchmarks.cases import moe
from benchmarks.harness import kimi
from benchmarks.harness.rows import read
from benchmarks.harness.training import appended_to
from unfreeze.core.command import Common
from unfreeze.core.errors import ConfigError
from unfreeze.kernels.choice.choose import device_key


@pytest.fixture(scope="module")
def measured(tmp_path_factory, tiny_sizes):
    folder = tmp_path_factory.mktemp("moe")
    config = moe.Config(
        append=str(folder / "rows.jsonl"), steps=2, warmup=1, threads=1, checkpoint=str(folder / "checkpoint")
    )
    found = moe.measure(config, Common(quiet=True), tiny_sizes, checked={}, documents=2, length=32)
    return found, read(folder / "rows.jsonl"), config


@pytest.mark.nightly
def test_every_side_has_a_row_in_its_turn(measured):
    found, rows, _ = measured
    assert [row.model_dump() for row in rows] == found["rows"]
    assert [(row.settings["turn"], row.side) for row in rows] == [
        (1, "unfreeze"),
        (1, "unfreeze-nothing"),
        (1, "peft-experts"),
        (1, "torch.mm"),
        (2, "unfreeze"),
        (2, "peft-attention"),
    ]


@pytest.mark.nightly
def test_speed_memory_and_state_add_up(measured):
    for row in [row for row in measured[1] if row.side != "torch.mm"]:
        r = row.results
        assert r["slowest"] <= r["tokens_per_second"] <= r["fastest"] and r["steps"] == 2
        assert r["tokens_per_second"] == pytest.approx(64 / r["step_seconds"])
        assert (
            r["above_state_bytes"] == r["peak_bytes"] - sum(r["state_bytes"].values())
            and r["load_peak_bytes"] > 10**7
        )
        assert (
            r["state_bytes"]["optimizer"] >= 8 * r["trained_parameters"]
            if row.side.startswith("unfreeze")
            else True
        )


@pytest.mark.nightly
def test_peers_say_how_the_first_side_compares(measured):
    rows = {(row.settings["turn"], row.side): row.results for row in measured[1]}
    for turn, peer in ((1, "peft-experts"), (2, "peft-attention")):
        ours, theirs = rows[turn, "unfreeze"], rows[turn, peer]
        assert theirs["first_side_speed"] == pytest.approx(
            ours["tokens_per_second"] / theirs["tokens_per_second"]
        )
        assert theirs["first_side_memory"] == pytest.approx(ours["peak_bytes"] / theirs["peak_bytes"])


@pytest.mark.nightly
def test_every_side_agrees_with_float64(measured):
    """bf16 has 8 bits: a loss is an average over tokens and agrees to 1e-3; a gradient norm is a sum of
    rounded products, 3 %."""
    for row in [row for row in measured[1] if row.side != "torch.mm"]:
        errors = row.results["correctness"]
        assert errors["loss, fresh adapters, against float64"] < 2e-3, (row.side, errors)
        assert ("gradient norm, against float64" in errors) == row.side.startswith("unfreeze")
        assert errors.get("gradient norm, against float64", 0) < 0.03


@pytest.mark.nightly
def test_the_share_is_flops_over_time_over_the_measured_rate(measured):
    rows = {row.side: row.results for row in measured[1] if row.settings["turn"] == 1}
    rate = rows["torch.mm"]["gflops_per_second"] * 1e9
    assert rate > 0
    ours, kept = rows["unfreeze"], rows["unfreeze-nothing"]
    assert ours["share"] == pytest.approx(ours["model_flops"] / ours["step_seconds"] / rate)
    assert ours["share_with_recompute"] > ours["share"] and kept["share_with_recompute"] == kept["share"]
    assert ours["model_flops"] == kept["model_flops"]


@pytest.mark.nightly
def test_the_checkpoint_is_reused_and_another_model_is_refused(measured, tiny_sizes):
    config = measured[2].model_copy(update={"sides": ("unfreeze",), "append": "", "steps": 1})
    with pytest.raises(ConfigError, match="holds another model"):
        moe.measure(config, Common(quiet=True), tiny_sizes | {"vocab_size": 512}, checked={})


@pytest.mark.nightly
def test_without_a_device_everything_runs_on_the_cpu(measured):
    assert (
        {row.settings["device"] for row in measured[1]}
        == {"cpu"}
        == {row.machine.device.split("-")[0] for row in measured[1]}
    )


@pytest.mark.parametrize("name", [*moe.RECOMPUTE, moe.GEMM, "peft-experts", "peft-attention"])
def test_the_device_reaches_every_side(name, tiny_sizes):
    for device in ("cpu", "cuda"):
        assert (
            moe._side(name, "a", "b", kimi.config(**tiny_sizes), 2, 32, moe.Config(device=device)).arguments[
                "device"
            ]
            == device
        )


def test_rows_of_a_gpu_go_to_its_own_file(monkeypatch):
    device_key.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    assert appended_to(moe.Config(device="cuda"), "cuda").name == "nvidia-h200.jsonl"
    device_key.cache_clear()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_here_is_refused_before_the_work(tiny_sizes):
    with pytest.raises(ConfigError, match="sees no CUDA device"):
        moe.measure(moe.Config(device="cuda"), Common(quiet=True), tiny_sizes, checked={})


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.gpu
def test_every_side_runs_on_a_gpu_and_agrees_with_float64(tmp_path, tiny_sizes):
    config = moe.Config(append=str(tmp_path / "rows.jsonl"), steps=1, device="cuda")
    moe.measure(config, Common(quiet=True), tiny_sizes, checked={}, documents=2, length=32)
    rows = read(tmp_path / "rows.jsonl")
    assert len(rows) == 6 and {row.machine.device for row in rows} == {device_key(torch.device("cuda"))}
    for row in [row for row in rows if row.side != "torch.mm"]:
        assert row.results["correctness"]["loss, fresh adapters, against float64"] < 2e-3, row.side
