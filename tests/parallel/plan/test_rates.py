"""Rates of a machine come from its records, and only where every op has one."""

import json
from dataclasses import replace

import pytest
import torch

from unfreeze import models
from unfreeze.kernels.choice import ops, record
from unfreeze.kernels.choice.measure import arguments
from unfreeze.kernels.expert_mlp import bucket as bucket_of
from unfreeze.parallel.plan import rates_here
from unfreeze.parallel.plan.fleet import devices
from unfreeze.parallel.plan.rates import DOCUMENTS, ROWS_PER_EXPERT, WORK, of_device, of_records

LLAMA = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 8192,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
}
ASKED = {"length": 512, "narrow": False, "vocab": 8192, "every_weight": False, "experts": "packed"}


def row(op, bucket, dtype, seconds, candidate):
    return {
        "op": op,
        "bucket": bucket,
        "dtype": dtype,
        "candidate": candidate,
        "threads": 1,
        "date": "2026-11-22",
        "torch": "2",
        "device": "x",
        "repeats": 9,
        "error_forward": 0.0,
        "error_backward": 0.0,
        "median_us": seconds * 1e6,
        "reference_median_us": 10 * seconds * 1e6,
        "spread_us": 0.0,
        "reference_spread_us": 0.0,
    }


ROWS = [
    row("expert_mlp", "under 64", "bfloat16", 0.01, "fused"),
    row("expert_mlp", "64 on", "bfloat16", 0.02, "fused"),
    row("linear_cross_entropy", "large vocabulary, head frozen", "bfloat16", 0.1, "numba"),
    row("attention", "96 on", "bfloat16", 0.006, "blocked"),
    row("attention", "192 on", "bfloat16", 0.01, "blocked"),
    row("linear_cross_entropy", "small vocabulary, head frozen", "bfloat16", 0.04, "numba"),
    row("rms_norm", "many", "bfloat16", 0.004, "numba"),
    row("adamw", "large tensors, as they are", "float32", 0.02, "numba"),
]


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """-> write(rows): the user's own records of this device; there are no committed ones."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(record, "COMMITTED", tmp_path / "none")

    def write(rows):
        record.read.cache_clear()
        path = record.user_folder() / f"{record.device_key(torch.device('cpu'))}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(rows))

    yield write
    record.read.cache_clear()


def test_rates_are_the_work_of_a_case_over_its_median(mine):
    mine(ROWS)
    found = of_records(torch.bfloat16, 1, **ASKED)
    assert found is not None and found.source == "measured on this machine, 2026-11-22, on 1 thread"
    # 512 x 256 x 8192, logits and the hidden state's gradient
    assert found.head == pytest.approx(2 * 2 * 512 * 256 * 8192 / 0.04)
    assert found.norms == pytest.approx(2048 * 1024 / 0.004)
    # dense layers: 1.2 times a frozen head of a large vocabulary, 128 x 896 x 32768
    assert found.dense == found.routers == pytest.approx(1.2 * 2 * 2 * 128 * 896 * 32768 / 0.1)
    # both measured points lie on the curve
    flop = {m: 8 * m * 2 * (2 * 3 * 512 * 256 + 3 * 8 * 3 * 768) for m in (16, 128)}
    assert found.of_experts(16) == pytest.approx(flop[16] / 0.01)
    assert found.of_experts(128) == pytest.approx(flop[128] / 0.02)


def test_cores_multiply_what_one_thread_did(mine):
    mine(ROWS)
    one, two = (of_records(torch.bfloat16, cores, **ASKED) for cores in (1, 2))
    assert one is not None and two is not None
    assert two.head == pytest.approx(2 * one.head) and two.half_rows == pytest.approx(one.half_rows)


def test_a_record_of_two_threads_counts_for_two_cores(mine):
    mine([one | {"threads": 2} for one in ROWS])
    found = of_records(torch.bfloat16, 1, **ASKED)
    assert found is not None and found.head == pytest.approx(2 * 2 * 512 * 256 * 8192 / 0.04 / 2)


HALF_BF16 = ("adamw", "large tensors, half precision weights", "float32")


def attention(*buckets):
    return [("attention", bucket, "bfloat16") for bucket in buckets]


@pytest.mark.parametrize(
    "asked, instead",
    [
        ({"length": 64}, attention("under 96")),
        ({"length": 65}, attention("under 96", "96 on")),
        ({"length": 128}, attention("under 96", "96 on")),
        ({"length": 129}, []),
        ({"length": 512}, []),
        ({"length": 513}, attention("192 on", "1024 on")),
        ({"length": 1025}, attention("1024 on", "2048 on")),
        ({"length": 4096}, attention("1024 on", "2048 on")),
        ({"narrow": True}, attention("96 on, v < d", "192 on, v < d")),
        ({"vocab": (1 << 14) - 1}, []),
        ({"vocab": 1 << 14}, [("linear_cross_entropy", "large vocabulary, head frozen", "bfloat16")]),
        (
            {"experts": "unpacked"},
            [("expert_mlp", f"{rows}, unpacked", "bfloat16") for rows in ("under 64", "64 on")],
        ),
        (
            {"every_weight": True, "experts": "all weights"},
            [
                *(("expert_mlp", f"{rows}, all weights", "bfloat16") for rows in ("under 64", "64 on")),
                ("linear_cross_entropy", "small vocabulary, head trained", "bfloat16"),
                ("linear_cross_entropy", "large vocabulary, head frozen", "bfloat16"),
                HALF_BF16,
            ],
        ),
    ],
)
def test_each_kind_of_run_asks_for_its_own_records(mine, asked, instead):
    """With the records it asks for there are rates; without one of them, those of ASKED there, none."""
    ops_of = {op for op, _, _ in instead}
    kept = [one for one in ROWS if one["op"] not in ops_of]
    winner = {one["op"]: one["candidate"] for one in ROWS}
    rows = [row(op, bucket, dtype, 0.02, winner[op]) for op, bucket, dtype in instead]
    mine([*kept, *rows])
    assert of_records(torch.bfloat16, 1, **ASKED | asked) is not None
    for missing in range(len(rows)):
        mine([*ROWS, *rows[:missing], *rows[missing + 1 :]])
        known = instead[missing] in {(one["op"], one["bucket"], one["dtype"]) for one in ROWS}
        assert (of_records(torch.bfloat16, 1, **ASKED | asked) is not None) is known


def test_a_model_without_experts_needs_no_record_of_them(mine):
    mine([one for one in ROWS if one["op"] != "expert_mlp"])
    assert of_records(torch.bfloat16, 1, **ASKED | {"experts": None}) is not None
    assert of_records(torch.bfloat16, 1, **ASKED) is None  # control arm


@pytest.mark.parametrize("few, many", [(0.01, 0.01), (0.02, 0.01), (0.001, 0.02)])
def test_records_that_no_curve_goes_through_leave_the_rate_at_many_rows(mine, few, many):
    """128 rows an expert in the time of 16 or less; 16 in less than an eighth of 128's."""
    seconds = {"under 64": few, "64 on": many}
    mine([one | {"median_us": seconds.get(one["bucket"], 0.01) * 1e6} for one in ROWS])
    found = of_records(torch.bfloat16, 1, **ASKED)
    assert found is not None and found.half_rows == 0
    assert found.of_experts(1) == found.of_experts(1000) == pytest.approx(1_723_858_944 / many)


def test_a_tokens_attention_lies_on_a_line_between_measured_lengths(mine):
    """One document of 1,024 tokens in 20 ms, of 2,048 in 60: a token takes 19.5 and 29.3 us, of 4,096 48.8."""
    long = [
        row("attention", "1024 on", "bfloat16", 0.02, "b"),
        row("attention", "2048 on", "bfloat16", 0.06, "b"),
    ]
    mine([*ROWS, *(one | {"candidate": "blocked"} for one in long)])
    token_1k, token_2k = 0.02 / 1024, 0.06 / 2048

    def seconds(length):
        """Of a token, with 4 heads of 64 and 64: 3.5 · L / 2 · 2 · 4 · 128 FLOP."""
        found = of_records(torch.bfloat16, 1, **ASKED | {"length": length})
        assert found is not None
        return 3.5 * length / 2 * 2 * 4 * 128 / found.attention

    assert seconds(1024) == pytest.approx(token_1k) and seconds(2048) == pytest.approx(token_2k)
    assert seconds(1536) == pytest.approx((token_1k + token_2k) / 2)
    assert seconds(4096) == pytest.approx(token_2k + 2 * (token_2k - token_1k))
    # control arm: with the rate at 1,024 tokens a longer document took more
    assert seconds(4096) < 4 * token_1k


def test_committed_records_are_of_a_class_and_those_of_another_class_are_none(mine, tmp_path, monkeypatch):
    key = record.device_key(torch.device("cpu"))
    mine([])
    monkeypatch.setattr(record, "COMMITTED", tmp_path)
    (tmp_path / f"{key}.json").write_text(json.dumps(ROWS))
    record.read.cache_clear()
    found = of_records(torch.bfloat16, 1, **ASKED)
    assert found is not None and found.source.startswith(f"measured on a machine of class {key}")
    (tmp_path / f"{key}.json").rename(tmp_path / ("cpu-avx2.json" if key != "cpu-avx2" else "cpu-sse2.json"))
    record.read.cache_clear()
    assert of_records(torch.bfloat16, 1, **ASKED) is None


def test_an_op_that_was_only_refused_leaves_no_rates(mine):
    refused = {key: value for key, value in ROWS[-1].items() if not key.endswith("_us")} | {"refused": "why"}
    mine([*ROWS[:-1], refused])
    assert of_records(torch.bfloat16, 1, **ASKED) is None


@pytest.mark.parametrize("missing", range(len(ROWS)))
def test_an_op_without_a_record_leaves_no_rates(mine, missing):
    mine([*ROWS[:missing], *ROWS[missing + 1 :]])
    assert of_records(torch.bfloat16, 1, **ASKED) is None


@pytest.mark.parametrize(
    ("width", "moments", "device", "there"),
    [
        (256, "float32", "cpu", True),
        (255, "float32", "cpu", False),
        (256, "int8", "cpu", False),
        (256, "float32", "cuda", False),
    ],
)
def test_there_are_seconds_only_for_what_was_measured(mine, width, moments, device, there):
    mine(ROWS)
    shape = replace(models.shape(LLAMA), hidden_size=width)
    rates = rates_here(
        shape,
        dtype=torch.bfloat16,
        device=torch.device(device),
        length=512,
        every_weight=False,
        packed=True,
        optimizer_moments=moments,
        threads=1,
    )
    assert (rates is not None) is there


def test_nothing_is_measured_here(mine, monkeypatch):
    def timed(*_, **__):
        raise AssertionError("the plan measured something")

    monkeypatch.setattr("unfreeze.kernels.choice.measure.measure", timed)
    mine([])
    assert of_records(torch.bfloat16, 1, **ASKED) is None
    mine(ROWS)
    assert of_records(torch.bfloat16, 1, **ASKED) is not None


def test_facts_of_a_device_say_that_they_are_not_measured():
    device = devices()["H200"]
    found = of_device(device)
    assert "not measured" in found.source and found.experts == pytest.approx(0.66 * 989e12)
    assert replace(found, half_rows=0.0).of_experts(1) == found.experts
    assert WORK["adamw", "large tensors, as they are"] == 8 * 128 * 16 * 1024


def _experts(x_TD, ids_TK, _, gate_up, down, factors):
    """Forward and the input's gradient, and the weights' where they train; of adapters both factors' too."""
    base = gate_up.shape[1] * gate_up.shape[2] + down.shape[1] * down.shape[2]
    if factors is None:
        return 2.0 * ids_TK.numel() * base * (3 if gate_up.requires_grad else 2)
    parts = (factors.gate_up_A, factors.gate_up_B, factors.down_A, factors.down_B)
    adapter = sum(part[0].numel() for part in parts)
    return 2.0 * ids_TK.numel() * (2 * base + 3 * adapter)


def _attention(q_SLHd, k_SLGd, v_SLGv, scale: float):
    """Causal: 2 · H · (d + v) FLOP a pair, and 2.5 times as much in backward."""
    S, L, H, d = q_SLHd.shape
    return 3.5 * S * L * L / 2 * 2 * H * (d + v_SLGv.shape[3])


def _head(hidden_ND, weight_VD, *_):
    return 2.0 * len(hidden_ND) * weight_VD.numel() * (3 if weight_VD.requires_grad else 2)


COUNTED = {
    "expert_mlp": _experts,
    "attention": _attention,
    "linear_cross_entropy": _head,
    "rms_norm": lambda x_TD, *_: float(x_TD.numel()),
    "adamw": lambda updates, _: float(sum(update.master.numel() for update in updates)),
}


def test_the_work_of_each_case_is_what_its_inputs_say():
    for (name, bucket), work in WORK.items():
        case = next(case for case in ops.import_op(name).cases if case.bucket == bucket)
        assert COUNTED[name](*arguments(case, torch.device("cpu"), torch.float32)) == work, (name, bucket)
    cases = ops.import_op("expert_mlp").cases
    assert {("expert_mlp", case.bucket) for case in cases} == {key for key in WORK if key[0] == "expert_mlp"}
    given = [arguments(case, torch.device("cpu"), torch.float32) for case in cases]
    rows = [one[1].numel() / one[3].shape[0] for one in given]
    assert rows == [*ROWS_PER_EXPERT] * 3
    asked = [bucket_of(one[1], one[3]) for one in given]
    assert asked == [case.bucket for case in cases]
    of_attention = {
        case.bucket: case for case in ops.import_op("attention").cases if "v < d" not in case.bucket
    }
    lengths = {
        name: arguments(case, torch.device("cpu"), torch.float32)[0].shape[1]
        for name, case in of_attention.items()
    }
    assert lengths == DOCUMENTS
