"""`dev bench decode` on tiny models: what its rows say, a generation that pauses, and the way transformers decodes in."""

import pytest
import torch

import unfreeze
from benchmarks.harness import decoding, generation, peers, shapes, ways
from benchmarks.harness.checkpoints import make
from benchmarks.harness.sides import Side, SideFailed
from benchmarks.harness.ways import Trial, Way

pytestmark = pytest.mark.usefixtures("here")


def decode(measure, **fields):
    rows = measure("decode", **{"new": 4, "rounds": 1, "compile_seconds": 0.0} | fields)
    assert all(row.results["correctness"]["worst of them, nats less likely"] < 1e-3 for row in rows)
    return rows


def test_rows_state_the_limit_and_are_scored_by_float32(measure):
    sides = ("unfreeze", "unfreeze-launched")
    rows = decode(measure, models=("moe",), sides=sides, cases=("1x8", "3x8"))
    assert [(row.settings["batch"], row.side) for row in rows] == [
        (n, side) for n in (1, 3) for side in sides
    ]
    for row in rows:
        r = row.results
        reading, computing = r["read_bytes"] / r["read_rate"], r["flop"] / r["gemm_rate"]
        assert r["limit_seconds"] == max(reading, computing) and r["limit"] in ("bytes", "arithmetic")
        assert r["limit_share"] == pytest.approx(r["limit_seconds"] / r["step_seconds"])
        assert r["python_calls_per_token"] > 10
    assert len({row.results["read_rate"] for row in rows}) == 1
    one, three = rows[0].results, rows[2].results
    assert one["experts_read"] == 2 < three["experts_read"] and one["read_bytes"] < three["read_bytes"]
    # a step of 3 rows makes 3 tokens
    assert three["python_calls_per_token"] < 0.5 * one["python_calls_per_token"]


def test_adapters_are_timed_beside_the_model_without_them(measure):
    ours, plain = decode(measure, models=("adapters",), sides=("unfreeze",), cases=("2x8",))
    assert [ours.side, plain.side] == ["unfreeze", "without adapters"]
    cost = ours.results["step_seconds"] / plain.results["step_seconds"]
    assert ours.results["adapters_cost"] == pytest.approx(cost)
    assert ours.results["read_bytes"] > plain.results["read_bytes"]
    assert "first_side_speed" not in plain.results


def test_formats_are_compared_by_weight_read(measure, monkeypatch):
    blocks = {"hidden_size": 128, "moe_intermediate_size": 128}  # FP8's scales are of blocks of 128 x 128
    monkeypatch.setattr(shapes, "SIZES", shapes.SIZES | blocks)
    monkeypatch.setattr(decoding, "FORMATS", {"vocab_size": 128})
    rows = decode(measure, models=("formats",), sides=("unfreeze",), cases=("1x8",))
    assert [row.side for row in rows] == ["int4", "fp8", "mxfp4", "nvfp4", "awq", "gptq"]
    first = rows[0].results
    for row in rows:
        r = row.results
        ratio = r["step_seconds"] / first["step_seconds"] * first["weights_read"] / r["weights_read"]
        assert r["of_int4"] == pytest.approx(ratio)
    assert rows[0].results["of_int4"] == 1.0 and rows[1].results["read_bytes"] > first["read_bytes"]


def test_the_peer_says_in_what_way_it_ran(measure):
    pytest.importorskip("transformers")
    ours, peer = decode(measure, models=("dense",), cases=("2x8",))
    assert ours.side == "unfreeze" and peer.side == "transformers" and "peer" not in ours.results
    way, tried = peer.results["peer"]["way"], peer.results["peer"]["tried"]
    assert way in tried and tried[way] == min(tried.values())
    assert {"bfloat16, dynamic", "float32, dynamic"} < tried.keys() and len(tried) == 3
    assert ours.results["read_bytes"] == peer.results["read_bytes"]
    assert peer.results["first_side_memory"] == 1.0


@pytest.mark.nightly
def test_every_model_beside_the_peer(measure, monkeypatch):
    models = ("moe", "adapters", "dense", "tiny-k2")
    rows = measure("decode", models=models, cases=("1x8",), new=4, rounds=1, compile_seconds=0.0)
    peer = {
        row.settings["model"]: row.results for row in rows if row.side in ("transformers", "peft, merged")
    }
    assert list(peer) == list(models)
    assert len(peer["moe"]["peer"]["tried"]) == 5  # two formats, two more for experts, the static cache
    # the same numbers as ours, adapters too
    assert all(r["correctness"]["worst of them, nats less likely"] < 0.2 for r in peer.values())


@pytest.fixture
def checkpoint(tiny, tmp_path):
    make(tmp_path / "model", shapes.kimi())
    return str(tmp_path / "model")


def test_a_paused_generation_of_transformers_has_the_tokens_of_an_undisturbed_one(checkpoint):
    pytest.importorskip("transformers")
    prompts = generation.prompts_of(3, 8, 256)
    calls = peers.generator(checkpoint, dtype="float32").calls
    calls["start"](prompts=prompts, new=7)
    calls["steps"](count=2)
    calls["steps"](count=4)
    tokens = calls["finish"]()["tokens"]
    model = peers.deepseek(checkpoint, "experts", "cpu", "float32").eval()
    ids_SL = torch.tensor(prompts)
    mask = torch.ones_like(ids_SL)
    whole = model.generate(ids_SL, attention_mask=mask, do_sample=False, min_new_tokens=7, max_new_tokens=7)
    assert tokens == whole[:, 8:].tolist()

    # every way computes the same in float32, and one more step than there are tokens is an error
    for experts, cache in (("eager", "static"), ("batched_mm", "dynamic")):
        calls["prepare"](dtype="float32", experts=experts, cache=cache)
        calls["start"](prompts=prompts, new=7)
        calls["steps"](count=6)
        assert calls["finish"]()["tokens"] == tokens
    calls["start"](prompts=prompts, new=2)
    with pytest.raises(ValueError, match="1 more steps were asked for than the 2 tokens"):
        calls["steps"](count=2)


def test_our_paused_generation_has_the_tokens_of_an_undisturbed_one(checkpoint):
    prompts = generation.prompts_of(3, 8, 256)
    worker = generation.ours(checkpoint, dtype="float32")
    worker.calls["start"](prompts=prompts, new=7)
    worker.calls["steps"](count=2)
    assert worker.calls["calls"](count=2)["calls"] > 100
    worker.calls["steps"](count=2)
    whole = unfreeze.load(checkpoint, dtype="float32").generate(prompts, max_new_tokens=7, temperature=0.0)
    assert worker.calls["finish"]()["tokens"] == whole == generation.generated(worker, prompts, 7)


def test_a_cast_of_the_peer_leaves_its_tables_in_float32(checkpoint):
    """In bfloat16 rotary frequencies are off by 0.4 %, and the router's biases choose other experts."""
    pytest.importorskip("transformers")
    model = peers.deepseek(checkpoint, "experts", "cpu", "bfloat16")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert {buffer.dtype for buffer in model.buffers()} == {torch.float32}


def test_python_calls_are_those_of_the_work():
    def leaf():
        return len("x")

    def work():
        for _ in range(5):
            leaf()

    assert generation.function_calls(lambda: None) == 0
    assert generation.function_calls(work) == 10  # leaf in Python, len in C


def planted(times):
    """An attempt whose milliseconds are planted; one that is a text fails with it."""

    def attempt(way):
        value = times.get(str(way), 50.0)
        if isinstance(value, str):
            raise SideFailed(value)
        return value

    return attempt


@pytest.mark.parametrize(
    "times, best",
    [
        (
            {"float32, grouped_mm, dynamic": 9.0, "float32, eager, static": 2.0},
            "float32, grouped_mm, dynamic",
        ),
        ({"bfloat16, eager, dynamic": 9.0, "bfloat16, eager, static": 8.0}, "bfloat16, eager, static"),
        ({"bfloat16, grouped_mm, dynamic": "no room"}, "float32, grouped_mm, dynamic"),
    ],
)
def test_a_trial_keeps_the_fastest_way_so_far(times, best):
    trial = Trial(planted(times))
    trial.eager("grouped_mm", copied=0)
    assert str(trial.best) == best and len(trial.tried) == 5
    assert trial.tried["bfloat16, grouped_mm, dynamic"] == times.get("bfloat16, grouped_mm, dynamic", 50.0)


def test_batched_experts_are_not_tried_where_their_copies_are_large():
    trial = Trial(planted({}))
    trial.eager("grouped_mm", copied=ways.MOST_COPIED + 1)
    assert len(trial.tried) == 4 and not any("batched_mm" in way for way in trial.tried)


def test_a_trial_has_all_rows_and_as_much_of_the_prompts_as_it_may_read():
    cases = (1, 64), (1, 512), (4, 512), (16, 512), (64, 64), (64, 512), (4096, 512)
    keys = [(1, 64), (1, 512), (4, 256), (16, 64), (64, 16), (64, 16), (4096, 1)]
    assert [ways.key_of(*case) for case in cases] == keys


def test_compiling_is_tried_once_at_the_fewest_rows_and_bounded(monkeypatch):
    asked = []

    def call(side, name, within=None, prompts=(), steps=0, seconds=0.0, **way):
        asked.append((len(prompts), str(Way(**way)), within))
        if within is not None:
            raise SideFailed("trial did not finish attempt within 7 s")
        return {"step_ms": 3.0}

    monkeypatch.setattr(Side, "start", lambda side: side.loaded.update(load_seconds=0.0))
    monkeypatch.setattr(Side, "call", call)
    prompts = {(rows, 4): generation.prompts_of(rows, 4, 64) for rows in (4, 1)}
    results = ways.trials(Side("trial", "x:y", {}), print, prompts, None, 7.0)
    assert [rows for rows, _, _ in asked] == [1, 1, 1, 4, 4, 4, 1]
    assert asked[-1] == (1, "bfloat16, static compiled", 7.0) and {one[2] for one in asked[:-1]} == {None}
    assert str(results[1, 4].best) == "bfloat16, dynamic"
    assert results[1, 4].tried["bfloat16, static compiled"] == "trial did not finish attempt within 7 s"
    assert "bfloat16, static compiled" not in results[4, 4].tried
