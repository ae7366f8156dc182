"""What `layer` and `model` do on a GPU, at small sizes on the CPU."""

import pytest
import torch

from benchmarks.cases import layer, model
from benchmarks.harness import shapes, whole
from benchmarks.harness.kimi_slice import DENSE, HEAD, KimiSlice, Slice, derive, fitting, route
from unfreeze.core.errors import DoesNotFit
from unfreeze.kernels import expert_mlp
from unfreeze.kernels.expert_mlp.grouped import Grouped
from unfreeze.kernels.loops.scratch import release_scratch
from unfreeze.parallel.machine import Hardware

SMALL = shapes.KIMI_K2 | {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 128}
SMALL |= {"moe_intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 32}
SMALL |= {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}


def gpu(gib):
    return Hardware("cuda", "GPU", 8, int(gib * 2**30), int(gib * 2**30))


def test_every_part_of_the_layer_runs_and_is_exact(monkeypatch):
    monkeypatch.setattr(expert_mlp, "backend_for", lambda *_: Grouped())
    built = KimiSlice(Slice(SMALL, experts=16, tokens=128, sequence=64, rank=8), torch.device("cpu"))
    parts = []
    for name, routing, works, errors in built.parts():
        for work in works:
            work()
        parts.append((name, routing))
        # bf16 products of bf16 inputs; the experts as tests/kernels/expert_mlp allows
        assert all(error < 0.02 for what, error in errors.items() if " against " in what), name
    release_scratch()
    assert set(layer.PREDICTED) <= {name for name, _ in parts} and len(parts) == len(set(parts)) == 10


@pytest.mark.parametrize("routing", ["balanced", "zipf"])
def test_each_token_gets_different_experts(routing):
    ids = route(routing, 6000, 8, 48, torch.Generator().manual_seed(0))
    assert ids.shape == (6000, 8) and all(len(set(row)) == 8 for row in ids.tolist())
    counts = ids.flatten().bincount(minlength=48).double() / 1000
    balanced = bool(counts.eq(1).all())
    assert balanced == (routing == "balanced") and (balanced or 3.0 < counts.max() < 3.4)


def test_the_node_formula_gives_what_was_predicted_from_the_predicted_times():
    """4.1 s, 15.9 k tokens/s without overlap and 17.9 k with 65 % of it, from the predicted slice."""
    ms = {(DENSE, "balanced"): 19.5, (HEAD, "balanced"): 60.0}
    for routing in ("balanced", "zipf"):
        ms |= {("MoE layer forward", routing): 12.75, ("MoE layer recompute + backward", routing): 21.0}
    names = ("routing", "gb_per_second_between_gpus", "imbalance", "overlap")
    found = {tuple(row[name] for name in names): row["derived_tokens_per_second"] for row in derive(ms)}
    assert found["balanced", 300, 1.0, 0.0] == pytest.approx(15900, rel=0.03)
    assert found["balanced", 300, 1.0, 0.65] == pytest.approx(17900, rel=0.03)
    assert (
        found["balanced", 300, 1.3, 0.0] < found["balanced", 300, 1.0, 0.0] < found["balanced", 400, 1.0, 0.0]
    )


def test_the_slice_shrinks_with_the_gpu():
    assert fitting(layer.WHOLE, gpu(139)) == layer.WHOLE and 15 < layer.WHOLE.nbytes() / 2**30 < 70
    smaller = fitting(layer.WHOLE, gpu(24))
    assert smaller != layer.WHOLE and smaller.nbytes() < layer.WHOLE.nbytes()
    with pytest.raises(DoesNotFit, match="the smallest slice"):
        fitting(layer.WHOLE, gpu(1))


def test_whole_models_are_sized_by_the_plan_or_refused(monkeypatch):
    monkeypatch.setattr(whole, "block_cost", lambda *given, **more: (1024, 4.0))
    job = model.JOBS["qwen3-0.6b-full"]
    made = whole.sized(job, 65536, "selective", gpu(139), "cuda", 4096)
    assert made.fits and made.work.tokens * made.work.micro_batches == 65536
    with pytest.raises(DoesNotFit):
        whole.sized(job, 65536, "selective", gpu(1), "cuda", 4096)


@pytest.mark.parametrize("experts, rank", [("int4", 4), ("", None)])
def test_a_model_learns_and_has_results(tiny, experts, rank):
    config = shapes.kimi() if experts else shapes.qwen("qwen3", shapes.QWEN3_06B)
    job = whole.Job(config, experts, rank, 1e9)
    made = whole.sized(job, 128, "selective", gpu(139), "cpu", 64)
    model = whole.Whole(job, "cpu")
    found = model.train(made, 3, 64)
    again = model.train(made, 2, 64)  # of the same model, which goes on
    model.close()
    assert again["loss_first"] < found["loss_first"]
    results = whole.results(job, made, found, "NVIDIA H200")
    assert found["learned"] and found["loss_last"] < found["loss_first"]
    assert results["verdict"] == "missed" and 0 < results["mfu"] < 1
    assert found["tokens_per_second"] == pytest.approx(results["mfu"] * 989e12 / found["flop_per_token"])


def test_a_model_that_does_not_learn_has_no_speed(measure, monkeypatch):
    class Made:
        layout = work = type("Any", (), {"micro_batches": 1, "recompute": "selective"})

    monkeypatch.setattr(model, "sized", lambda *given: Made)

    class Dull:
        def __init__(self, *given): ...

        def train(self, *given):
            return {"learned": False, "loss_first": 1.0, "loss_last": 1.0}

        def close(self): ...

    monkeypatch.setattr(model, "Whole", Dull)
    monkeypatch.setattr(model, "hardware", lambda device: gpu(139))
    config = type("Config", (), model.Config(models=("qwen2.5-7b",)).model_dump())
    run = type("Run", (), {"say": print, "row": lambda name, settings, **more: more})
    rows = list(model.rows(config, run))
    assert len(rows) == 2 and all("did not fall" in row["not_run"] for row in rows)
