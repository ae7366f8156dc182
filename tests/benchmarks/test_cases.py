"""Every case on tiny models: which rows it makes and what they say. Sides run in this process (conftest.py: here);
as processes of their own in test_sides.py. What loads several peers is nightly."""

import importlib

import pytest
import torch
from safetensors.torch import save_file

from benchmarks import BENCHMARKS
from benchmarks.cases import beyond, equal, growth, layer, plan, start
from benchmarks.harness import encoding, equality, fresh, generation, shapes, streamed
from benchmarks.harness.checkpoints import checkpoints
from benchmarks.harness.equality import Arm
from benchmarks.harness.rows import ROOT
from benchmarks.harness.targets import TARGETS, unequal
from unfreeze.core.errors import ConfigError, DoesNotFit, UserError
from unfreeze.data import load_tokenizer

pytestmark = pytest.mark.usefixtures("here")


def by_side(rows):
    return {row.side: row for row in rows}


def agrees(row):
    """float32 against float64: losses and gradients to 1e-4."""
    return all(error < 1e-4 for error in row.results["correctness"].values())


def test_moe(measure):
    ours, kept, rate = measure("moe", sides=("unfreeze", "unfreeze-nothing"))
    assert [row.side for row in (ours, kept, rate)] == ["unfreeze", "unfreeze-nothing", "torch.mm"]
    first = ours.results
    assert first["tokens_per_second"] == pytest.approx(64 / first["step_seconds"])
    rate = rate.results["gflops_per_second"] * 1e9
    assert first["share"] == pytest.approx(first["model_flops"] / first["step_seconds"] / rate)
    assert agrees(ours) and agrees(kept)
    assert kept.results["first_side_speed"] == pytest.approx(
        first["tokens_per_second"] / kept.results["tokens_per_second"]
    )


@pytest.mark.nightly
def test_moe_beside_every_peer(measure):
    rows = measure("moe")
    first = ["unfreeze", "unfreeze-nothing", "torch.mm", "peft-experts"]
    turns = [*((1, name) for name in first), (2, "unfreeze"), (2, "peft-checkpointing")]
    turns += [(3, "unfreeze"), (3, "peft-attention")]
    assert [(row.settings["turn"], row.side) for row in rows] == turns
    assert all(agrees(row) for row in rows if row.side != "torch.mm")


def test_dense_holds_what_each_side_says(measure):
    rows = by_side(measure("dense", dtype="bfloat16"))
    assert "need a GPU" in rows["transformers-liger"].not_run
    ours, theirs = rows["unfreeze"].results, rows["transformers"].results
    parameters = ours["trained_parameters"]
    assert parameters == theirs["trained_parameters"]
    for found, bytes_per in ((ours, (2, 2, 12)), (theirs, (2, 2, 4))):
        state = [found["state_bytes"][name] / parameters for name in ("weights", "gradients", "optimizer")]
        assert state == pytest.approx(bytes_per, rel=0.01)
        assert found["correctness"]["loss, against float64"] < 2e-3
        assert found["correctness"]["gradient norm, against float64"] < 0.03


def test_recompute_says_what_auto_chose(measure):
    rows = by_side(measure("recompute", sides=("auto", "dora", "peft")))
    assert rows["auto"].settings["recompute"] != "auto" and rows["peft"].settings["recompute"] == ""
    assert rows["dora"].settings["recompute"] == rows["auto"].settings["recompute"]
    trained = {name: row.results["trained_parameters"] for name, row in rows.items()}
    assert trained["dora"] > trained["auto"] == trained["peft"]
    assert all(map(agrees, rows.values())) and rows["peft"].results["first_side_speed"] > 0


@pytest.mark.nightly
def test_formats_are_compared_with_int4(measure, monkeypatch):
    blocks = {"hidden_size": 128, "moe_intermediate_size": 128}  # fp8's scales are of blocks of 128 x 128
    monkeypatch.setattr(shapes, "SIZES", shapes.SIZES | blocks)
    rows = measure("formats", dtype="bfloat16")
    assert [row.side for row in rows] == ["int4", "fp8", "mxfp4"] and rows[0].results["of_int4"] == 1.0


def test_growth_states_the_plan_beside_each_size(measure, monkeypatch):
    monkeypatch.setattr(growth, "SIZES", shapes.SIZES)
    monkeypatch.setattr(growth, "LENGTH", 32)
    small, large, line = measure("growth", tokens=(32, 64))
    assert (
        small.settings["tokens_per_step"] == 32
        and small.results["planned_bytes"] < large.results["planned_bytes"]
    )
    assert line.side == "growth" and line.results["spread"] >= 0 and "first_side_speed" not in large.results


def test_growth_fits_a_line():
    found = [
        {"tokens_per_second": speed, "peak_bytes": peak}
        for speed, peak in ((50, 1100), (51, 1200), (50, 1400))
    ]
    made = growth.growth((100, 200, 400), found, [600, 800, 1200])
    assert made["bytes_per_token"] == pytest.approx(1) and made["slope_ratio"] == pytest.approx(0.5)
    assert made["spread"] == pytest.approx(0.02)


def test_load_compares_every_tensor(measure):
    (row,) = measure("load", pairs=1)
    r = row.results
    assert r["ratio"] == pytest.approx(r["gb_per_second"] / r["raw_gb_per_second"])
    assert list(r["correctness"].values()) == [0.0] and r["promised_bytes"] > r["bytes"]


def test_the_judge_sees_a_wrong_token(tiny, tmp_path):
    with checkpoints(str(tmp_path), shapes.kimi(), shapes.kimi()) as (folder, _):
        prompt = generation.prompts_of(1, 8, 256)
        good = generation.generated(generation.ours(str(folder), dtype="float32"), prompt, 4)
        score = generation.judge(str(folder)).calls["score"]
        bad = score(prompt, [[(good[0][0] + 1) % 256, *good[0][1:]]])
        assert score(prompt, good)["nats"] < 1e-3 < bad["nats"] and bad["other"] > 0


def test_what_decode_refuses(measure):
    with pytest.raises(ConfigError, match="records CUDA graphs"):
        measure("decode", sides=("unfreeze-graphs",))
    for text in ("64", "0x64", "1x", "ax4"):
        with pytest.raises(ConfigError, match="is not BATCHxPROMPT"):
            measure("decode", cases=(text,))


def test_another_model_in_the_folder_is_refused(tiny, tmp_path):
    with checkpoints(str(tmp_path), shapes.kimi(), shapes.kimi()):
        pass
    with (
        pytest.raises(ConfigError, match="holds another model"),
        checkpoints(str(tmp_path), shapes.kimi(vocab_size=512), shapes.kimi()),
    ):
        pass


def test_beyond_streams_every_expert_and_has_the_same_losses(measure, monkeypatch, tmp_path):
    sizes = {name: size for name, size in shapes.SIZES.items() if name != "num_hidden_layers"}
    monkeypatch.setattr(beyond, "SIZES", sizes)
    monkeypatch.setattr(beyond, "LENGTH", 32)
    monkeypatch.setattr(streamed, "DRAWN", 2**16)
    given = {"gigabytes": 6e-5, "tokens": 256, "checkpoint": str(tmp_path / "kept"), "clean": True}
    disk, resident = measure("beyond", beside=True, **given)
    layers = disk.settings["shape"]["num_hidden_layers"] - 1
    assert disk.results["experts_trained"] == disk.results["experts"] == 8 * layers
    assert disk.results["reads"][0] > 0 and "reads" not in resident.results
    assert disk.results["losses"] == resident.results["losses"]
    assert not (tmp_path / "kept" / "model").exists()


def test_a_disk_without_room_is_refused_before_anything_is_written(measure, monkeypatch, tmp_path):
    monkeypatch.setattr(streamed.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 10**10}))
    with pytest.raises(DoesNotFit, match=r"gigabytes = 12 takes 13\.4 GiB"):
        measure("beyond", tokens=512, checkpoint=str(tmp_path / "none"))
    assert not list(tmp_path.rglob("*.safetensors"))


def test_the_model_of_beyond_is_as_large_as_asked():
    layers = streamed.model_of(12, {})["num_hidden_layers"] - 1
    each = 10 * 3 * 2048 * 8192 * (4 + 16 / 32) / 8
    assert (layers - 1) * each < 12e9 <= layers * each


@pytest.mark.nightly
def test_equal_compares_processes_with_one(measure, monkeypatch):
    arms = equal.ARMS[0], Arm("experts over 2, from disk", 2, 2, "disk"), *equal.ARMS[-2:]
    monkeypatch.setattr(equal, "ARMS", arms)
    one, two, whole, divided = rows = measure("equal", steps=2)
    assert [row.side for row in rows] == [arm.name for arm in arms]
    assert all(set(row.results["correctness"].values()) == {0.0} for row in (one, whole))
    for found in (two.results["correctness"], divided.results["correctness"]):
        assert 0 < found["gradients"] < 1e-5 and found["losses"] < 1e-5
    (target,) = [target for target in TARGETS if target.benchmark == "equal"]
    assert target.verdict(unequal(rows)) == "met"


@pytest.mark.nightly
def test_a_process_that_fails_is_named_by_its_arm(measure, monkeypatch, tmp_path):
    monkeypatch.setattr(equal, "unpacked", lambda model, folder: None)
    with pytest.raises(UserError, match="1 process: a process ended with"):
        measure("equal", model=str(tmp_path))


@pytest.mark.parametrize("train", ["adapters", "all"])
def test_control_arm_a_gradient_that_is_off_and_rows_of_another_process_show(train, tmp_path):
    """Of split experts and of weights that are divided: twice the gradient, or half of it, and other rows."""
    name = "model.layers.1.mlp.experts.adapter.down_A" if train == "adapters" else "lm_head.weight"
    whole = torch.arange(24.0).view(4, 6) + 1
    common = {"losses": torch.tensor([1.0, 2.0])}
    common |= {"op": torch.tensor(0.0)} if train == "adapters" else {}
    save_file({f"gradient.{name}": whole, **common}, tmp_path / "one-0")
    arm = Arm("two", 2, 2 if train == "adapters" else 1, train=train)
    for rank, rows in enumerate(([0, 2], [2, 4])):
        own = {f"rows.{name}": torch.tensor(rows), f"gradient.{name}": whole[slice(*rows)].clone(), **common}
        save_file(own, tmp_path / f"two-{rank}")
    assert set(equality.worst(tmp_path, arm, Arm("one", 1)).values()) == {0.0}
    for wrong in (2 * whole[2:], whole[2:] / 2, whole[1:3]):
        own = {f"rows.{name}": torch.tensor([2, 4]), f"gradient.{name}": wrong.clone(), **common}
        save_file(own, tmp_path / "two-1")
        found = equality.worst(tmp_path, arm, Arm("one", 1))
        assert (found["expert gradients"] > 0.1) == (train == "adapters") == ("expert op" in found)
        assert found["gradients"] > 0.1 and found["losses"] == 0.0


@pytest.mark.nightly
def test_data_beside_the_peer(measure):
    pytest.importorskip("datasets", reason="the peer's library, extra [data]")
    rows = measure("data", rows=220, pairs=1)
    made = {row.side: row.results for row in rows}
    assert list(made) == ["unfreeze", "one process", "datasets + transformers", "second start"]
    peer = made["datasets + transformers"]
    assert peer["equal_rows"] == peer["compared_rows"] == 200
    assert peer["first_side_rate"] == made["unfreeze"]["rows_per_second"] / peer["rows_per_second"]


def test_tokenizer_beside_the_librarys_split(measure):
    ours, plain = measure("tokenizer", megabytes=0.3, vocab=400, pairs=1)
    assert plain.results["of_first_side"] == plain.results["seconds"] / ours.results["seconds"]
    assert ours.results["bytes"] == plain.results["bytes"] > 250_000  # of 0.3 MB, 2 % held out
    assert all(1 < row.results["bytes_per_token"] < 6 for row in (ours, plain))


def test_our_side_of_data_encodes_the_rows_in_a_process_without_torch(tmp_path):
    encoding.write_rows(tmp_path / "rows.jsonl", 20)
    given = {"files": [str(tmp_path / "rows.jsonl")], "model": str(shapes.TINY_K2), "length": 4096}
    found = fresh.call("benchmarks.harness.encoding:encode", given | {"processes": 1, "first": 2}, tmp_path)
    said = load_tokenizer(str(shapes.TINY_K2)).decode(found["ids"][0])
    assert found["rows"] == 20 and "Name the capital" in said and len(found["ids"]) == 2
    assert 0 < found["own_peak_bytes"] < 150 * 2**20  # torch alone has 200 MiB


def test_a_function_that_fails_in_a_fresh_process_is_said(tmp_path):
    given = {"files": [], "model": str(tmp_path), "length": 8, "processes": 1}
    with pytest.raises(UserError, match=r"(?s)encode ended with 1.*no tokenizer"):
        fresh.call("benchmarks.harness.encoding:encode", given, tmp_path)


def test_the_store_is_read_in_a_process_of_its_own(tmp_path):
    encoding.write_rows(tmp_path / "rows.jsonl", 300)
    given = {"file": str(tmp_path / "rows.jsonl"), "model": str(shapes.TINY_K2), "length": 4096}
    found = fresh.call(
        "benchmarks.harness.stored:read", given | {"tokens": 4096, "reads": 3}, tmp_path / "cache"
    )
    assert found["documents"] == 300 and 0 < found["warm_seconds"] <= found["warm_slowest"]
    assert (tmp_path / "cache" / "unfreeze" / "encoded").is_dir()  # it was a store that was read


@pytest.mark.nightly
def test_reads_of_the_store_beside_a_step(measure):
    (row,) = measure("store", tokens=512, rows=200, reads=3)
    times, results = row.results["times"], row.results
    assert times["cold"] == results["step_seconds"] / results["cold_seconds"] and times["warm"] > 0
    assert results["documents"] == 200 and results["tokens"] > 20_000


def test_rows_are_the_same_every_time(tmp_path):
    for name in ("one", "two"):
        encoding.write_rows(tmp_path / name, 20)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_start_times_first_and_warm(measure, monkeypatch):
    seconds = iter((8.0, 3.0))
    monkeypatch.setattr(start, "first_step", lambda folder, side, config: next(seconds))
    first, warm = measure("start", pairs=1)
    assert (first.results["seconds"], warm.results["seconds"]) == (8.0, 3.0)


@pytest.mark.nightly
def test_start_runs(measure):
    first, warm = measure("start", pairs=1)
    assert first.results["seconds"] > warm.results["seconds"] > 0


@pytest.mark.parametrize("name", ["teach", "inside"])
def test_a_language_is_taught(measure, tmp_path, name):
    page = tmp_path / "page.md"
    sizes = {
        "seeds": 1,
        "steps": 2,
        "documents": 8,
        "length": 8,
        "tokens": 16,
        "words": 8,
        "write": str(page),
    }
    found = measure(name, **sizes, **({"teacher_steps": 2} if name == "inside" else {}))["kl"]
    assert len(found) == 7 and all(value > 0 for (value,) in found.values())
    text = page.read_text(encoding="utf-8")
    assert f"unfreeze dev bench {name} --seeds 1" in text and all(f"| {arm} |" in text for arm in found)


@pytest.mark.nightly
def test_prefer_trains_every_side(measure):
    rows = by_side(measure("prefer", sides=("sft", "dpo"), steps=2, questions=8))
    assert list(rows) == ["sft", "dpo", "sft, memory", "dpo, memory"]
    assert rows["dpo, memory"].results["over_sft"] > 0 and "style" in rows["dpo"].results["note"]


def test_a_run_is_measured_beside_its_plan(measure, monkeypatch, tmp_path):
    one = plan.One("tiny-k2", documents=2, length=32, dtype="float32")
    monkeypatch.setattr(plan, "RUNS", (one,))
    (row,) = measure("plan", out=str(tmp_path / "page.md"))["rows"]
    assert row["planned_bytes"] == sum(row["terms"].values()) and row["measured_seconds"] > 0
    assert one.name in (tmp_path / "page.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("job", ["moe", pytest.param("decode", marks=pytest.mark.nightly)])
def test_a_step_is_profiled_op_by_op(measure, tmp_path, job):
    found = measure("profile", job=job, out=str(tmp_path / "page.md"))
    (step,) = found["steps"].values()
    assert 0 < sum(op["seconds"] for op in step["ops"]) <= 1.05 * step["seconds"]
    assert any(op["op"].startswith("numba ") for op in step["ops"])
    assert "of torch.mm's rate" in (tmp_path / "page.md").read_text(encoding="utf-8")


def test_what_needs_a_gpu_is_refused_without_one(measure):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    for name in ("layer", "model", "moe"):
        with pytest.raises(ConfigError, match="sees no CUDA device"):
            measure(name, device="cuda", steps=3)


def test_a_prediction_is_met_missed_or_refuted():
    said = [layer.verdict("one whole layer", ms, "")["verdict"] for ms in (56.0, 60.0, 66.0)]
    assert said == ["met", "missed", "refuted"] and layer.verdict("head and loss", 1.0, "") == {}
    assert layer.verdict("one whole layer", 1.0, "smaller")["verdict"] == "smaller"


def test_a_case_gives_rows_or_writes_a_page():
    found = {
        name: importlib.import_module(f"benchmarks.cases.{name}") for name in BENCHMARKS if name != "report"
    }
    assert {name for name, made in found.items() if hasattr(made, "written")} == {
        "plan",
        "profile",
        "teach",
        "inside",
    }
    assert all(hasattr(made, "written") != hasattr(made, "rows") for made in found.values())


def test_a_case_has_at_most_60_lines():
    long = {
        file.name: len(file.read_text().splitlines()) for file in (ROOT / "benchmarks" / "cases").glob("*.py")
    }
    assert max(long.values()) <= 60, f"{long}: put what it shares, or how it is done, into benchmarks/harness"
