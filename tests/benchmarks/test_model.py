"""bench model's own code at small sizes on the CPU through the part for CUDA, and its arithmetic at the real
ones."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from benchmarks.cases import model as bench
from benchmarks.cases.model import JOBS, QWEN3_06B, QWEN3_30B, QWEN25_7B, Config, Job, built, run, sized
from benchmarks.harness.flops import step_flops
from benchmarks.harness.rows import Stamp, append, read
from unfreeze import models
from unfreeze.core.command import Common
from unfreeze.core.errors import ConfigError, DoesNotFit
from unfreeze.kernels.expert_mlp import fused_expert_mlp
from unfreeze.kernels.expert_mlp.grouped import Grouped
from unfreeze.models.blocks import experts
from unfreeze.parallel.machine import Hardware

SMALL = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
TINY = {
    "int4": Job(
        QWEN3_30B
        | SMALL
        | {"head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        "int4",
        8,
        1.0,
    ),
    "bf16": Job(
        QWEN3_30B
        | SMALL
        | {"head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        "bf16",
        8,
        None,
    ),
    "dense": Job(QWEN25_7B | SMALL, "", 8, 1e12),
    "full": Job(QWEN3_06B | SMALL | {"head_dim": 16}, "", None, None),
}
CPU = torch.device("cpu")
CONFIG = Config(tokens_per_step=128, steps=4)


def with_part(part, x_TD, ids_TK, weights_TK, gate_up, down, factors=None, impl="auto", reuse=None, **rest):
    return fused_expert_mlp(x_TD, ids_TK, weights_TK, gate_up, down, factors, part, reuse, **rest)


@pytest.mark.parametrize("name", TINY)
def test_a_job_runs_learns_and_makes_a_row(name, monkeypatch, tmp_path):
    monkeypatch.setattr(experts, "expert_mlp", partial(with_part, Grouped()))
    row = run(name, TINY[name], CONFIG, CPU, Stamp.now("model", "unfreeze dev bench model"), sequence=32)
    assert row.results["learned"] and row.results["tokens"] == 128 and row.results["tokens_per_second"] > 0
    assert row.results["verdict"] == {"int4": "met", "dense": "missed"}.get(name, "")
    assert row.results["mfu"] is None and row.settings["micro_batches"] == 1
    append([row], tmp_path / "rows.jsonl")
    assert read(tmp_path / "rows.jsonl") == [row]
    bench.show([row], __import__("rich.console").console.Console(width=220))


def test_a_model_that_does_not_learn_is_seen(monkeypatch):
    monkeypatch.setattr(bench, "train_step", partial(frozen, bench.train_step))
    row = run("dense", TINY["dense"], CONFIG, CPU, Stamp.now("model", "x"), sequence=32)
    assert (
        bench.failed(row) and row.results["correctness"]["loss at the first and last step"] == "DID NOT FALL"
    )


def frozen(step, *arguments, **settings):
    return step(*arguments, **{**settings, "learning_rate": 0.0})


@pytest.mark.parametrize(("config", "billions"), [(QWEN3_30B, 30.53), (QWEN25_7B, 7.616), (QWEN3_06B, 0.596)])
def test_the_shapes_have_the_published_number_of_parameters(config, billions):
    model = models.build(models.shape(config), dtype=torch.bfloat16)
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, rel=2e-3)


def test_flop_per_token_is_the_formula():
    """Qwen3-30B-A3B by hand: 6 N + 3 attention without adapters; N and the embedding are 3.35 B, its card
    says 3.3 B active."""
    model = built(models.shape(QWEN3_30B), JOBS["qwen3-30b-a3b-int4"], "meta")
    active = 48 * (2048 * 128 * (32 + 2 * 4 + 32) + 2048 * 128 + 8 * 3 * 2048 * 768) + 151936 * 2048
    assert (active + 151936 * 2048) / 1e9 == pytest.approx(3.35, rel=0.01)
    attention = 48 * 2 * 2 * 128 * 32 * 4097 / 2
    # nothing attached: every weight
    assert step_flops(model, [4096], "nothing").model / 4096 == pytest.approx(6 * active + 3 * attention)


def gpu(gib: float) -> Hardware:
    return Hardware("cuda", "GPU", 8, int(gib * 2**30), int(gib * 2**30))


@pytest.mark.parametrize("name", JOBS)
def test_every_job_fits_an_h200_in_at_most_four_micro_batches(name):
    made = sized(JOBS[name], Config(), gpu(139), CPU, 4096)
    assert made.fits and made.work.micro_batches <= 4 and made.work.tokens * made.work.micro_batches == 65536


def test_it_sizes_itself_or_refuses_with_arithmetic():
    smaller = sized(JOBS["qwen2.5-7b"], Config(), gpu(44), CPU, 4096)
    assert smaller.fits and smaller.work.tokens < 65536
    with pytest.raises(DoesNotFit, match="usable on GPU: base"):
        sized(JOBS["qwen3-30b-a3b-bf16"], Config(), gpu(40), CPU, 4096)
    row = run(
        "x",
        Job(QWEN3_30B | {"num_hidden_layers": 4800}, "bf16", 16, None),
        Config(),
        CPU,
        Stamp.now("model", "x"),
    )
    assert "No number of tokens" in row.not_run and not row.results


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_one_line():
    with pytest.raises(ConfigError, match=r"needs a CUDA device .* stay not measured"):
        bench.main([], Common())
    with pytest.raises(ConfigError, match="knows no 'gpt-2'"):
        bench.main(["--models", "gpt-2"], Common())
