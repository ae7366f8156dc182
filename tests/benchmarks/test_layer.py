"""bench layer's own code, at small sizes on the CPU through the part for CUDA: what it measures is right, and
it refuses without a GPU."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.cases import layer
from benchmarks.cases.layer import PREDICTED, RATE, Item, derive, fitting, measure
from benchmarks.harness.kimi_slice import KIMI, ExpertOps, KimiSlice, Slice, route
from benchmarks.harness.rows import Stamp, append, read
from benchmarks.harness.timing import Timing
from unfreeze.core.command import Common
from unfreeze.core.errors import ConfigError, DoesNotFit
from unfreeze.kernels import expert_mlp
from unfreeze.kernels.expert_mlp.grouped import Grouped
from unfreeze.kernels.loops.scratch import release_scratch
from unfreeze.parallel.machine import Hardware

SMALL = KIMI | {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
}
SIZES = Slice(SMALL, experts=16, tokens=128, sequence=64, rank=8)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def measured():
    """Every row once."""
    before = expert_mlp.backend_for
    expert_mlp.backend_for = lambda *_: Grouped()
    try:
        yield measure(SIZES, CPU, repeats=3)
    finally:
        expert_mlp.backend_for = before
        release_scratch()


def test_every_predicted_row_is_measured_and_exact(measured):
    items, memory = measured
    names = [item.name for item in items]
    assert set(PREDICTED) <= set(names) and names.count("one whole layer") == 2
    for item in items:
        assert item.timing.ms > 0 and item.timing.low_ms <= item.timing.ms <= item.timing.high_ms
        for what, error in item.correctness.items():
            if "codec" in what:
                assert error == 0
            elif isinstance(error, float) and "busiest" not in what:
                # bf16 products of bf16 inputs; the experts as tests/kernels/expert_mlp allows
                assert error < 0.02, (item.name, what)
    # down has 64 columns and 8 of the adapter: 8 more make a row a multiple of 16 (factors.columns)
    aligned = 2 * SIZES.experts * ((128 + 16) * (64 + 16) - (128 + 8) * (64 + 8))
    stated = memory["workspace stated"]
    assert stated <= memory["workspace measured"] <= 1.125 * stated + 2**14 + aligned


def test_flop_is_the_arithmetic_of_the_full_slice():
    """gate/up forward is 3.85 TFLOP at 65,536 rows, as the prediction says."""
    whole = Slice(KIMI, 48, 8192, 2048, 16)
    assert (
        whole.whole
        and whole.rows == 65536
        and 4.0 * whole.rows * 7168 * 2048 == pytest.approx(3.85e12, rel=1e-3)
    )
    assert not SIZES.whole


def test_a_wrong_product_is_seen():
    built = KimiSlice(SIZES, CPU)
    ops = ExpertOps(built, built.routed("balanced"))
    right = ops.errors()
    ops.gate_up_WS[0][3] = 0
    broken = ops.part.nt

    def other_expert(a, weights, index, group, out):
        return broken(a, weights.roll(1, 0), index, group, out)

    ops.part.nt = other_expert  # Grouped has no slots: an instance may carry its own
    assert max(right.values()) < 0.01 < ops.errors()["down forward"]
    release_scratch()


@pytest.mark.parametrize("routing", ["balanced", "zipf"])
def test_each_token_gets_different_experts(routing):
    ids = route(routing, 6000, 8, 48, torch.Generator().manual_seed(0))
    assert ids.shape == (6000, 8) and all(len(set(row)) == 8 for row in ids.tolist())
    counts = ids.flatten().bincount(minlength=48).double() / 1000
    if routing == "balanced":
        assert counts.eq(1).all()
    else:
        assert 3.0 < counts.max() < 3.4 and 0.5 < counts.min() < 0.7


def item(name: str, ms: float, routing="balanced", flop: float = 0.0) -> Item:
    return Item(name, routing, Timing(ms, ms, ms, 10, 1), {"compared": "nothing"}, flop)


def test_verdicts():
    assert [item("gate/up forward", ms).verdict("") for ms in (6.4, 7.0, 7.8)] == ["met", "missed", "refuted"]
    assert [item(RATE, 1.0, flop=rate * 1e9).verdict("") for rate in (430, 400, 340)] == [
        "met",
        "missed",
        "refuted",
    ]
    assert (
        item("gate/up forward", 1.0).verdict("smaller slice, not comparable")
        == "smaller slice, not comparable"
    )


def test_the_node_formula_gives_what_was_predicted_from_the_predicted_times():
    """4.1 s, 15.9 k tokens/s without overlap and 17.9 k with 65 % of it, from the predicted slice."""
    items = [
        item(name, ms, routing)
        for routing in ("balanced", "zipf")
        for name, ms in (("MoE layer forward", 12.75), ("MoE layer recompute + backward", 21.0))
    ]
    items += [item("attention, shared expert and norms, all passes", 19.5), item("head and loss", 60.0)]
    found = {
        (r["routing"], r["gb_per_second_between_gpus"], r["imbalance"], r["overlap"]): r[
            "derived_tokens_per_second"
        ]
        for r in derive(items)
    }
    assert found["balanced", 300, 1.0, 0.0] == pytest.approx(15900, rel=0.03)
    assert found["balanced", 300, 1.0, 0.65] == pytest.approx(17900, rel=0.03)
    assert (
        found["balanced", 300, 1.3, 0.0] < found["balanced", 300, 1.0, 0.0] < found["balanced", 400, 1.0, 0.0]
    )


def test_the_slice_shrinks_with_the_gpu():
    def gpu(gib: float) -> Hardware:
        return Hardware("cuda", "GPU", 8, int(gib * 2**30), int(gib * 2**30))

    whole = Slice(KIMI, 48, 8192, 2048, 16)
    assert fitting(whole, gpu(139)) == whole and 15 < whole.nbytes() / 2**30 < 70
    small = fitting(whole, gpu(22))
    assert not small.whole and small.nbytes() < 22 * 2**30 and small.experts % 8 == 0
    with pytest.raises(DoesNotFit, match="8 experts, 1,024 tokens"):
        fitting(whole, gpu(4))


def test_rows_can_be_written_and_read(measured, tmp_path):
    items, memory = measured
    rows = layer.as_rows(
        Stamp.now("layer", "unfreeze dev bench layer"),
        SIZES,
        items,
        memory,
        derive(items),
        "smaller slice, not comparable",
    )
    append(rows, tmp_path / "rows.jsonl")
    assert [row.side for row in read(tmp_path / "rows.jsonl")] == [
        *(item.name for item in items),
        "memory",
        "node",
    ]
    json.dumps([row.model_dump() for row in rows], allow_nan=False)
    assert layer.as_rows(Stamp.now("layer", "x"), SIZES, items, memory, [], "")[-1].not_run


def test_the_table_names_every_row(measured, capsys):
    from rich.console import Console

    items, memory = measured
    layer.show(items, memory, derive(items), "", Console(width=250))
    said = capsys.readouterr().out
    assert all(item.name in said for item in items) and "derived from one-GPU slices, not measured" in said


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_one_line_and_exit_2():
    from unfreeze import cli

    with pytest.raises(ConfigError, match=r"needs a CUDA device .* stay not measured"):
        layer.main([], Common())
    assert cli.main(["bench", "layer"]) == 2
