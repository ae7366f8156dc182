"""Rates of a machine come from its records, and only where every op has one."""

import json
from dataclasses import replace

import pytest
import torch

from unfreeze import models
from unfreeze.kernels.choice import ops, record
from unfreeze.kernels.choice.measure import arguments
from unfreeze.parallel.fleet import devices
from unfreeze.parallel.plan import rates_here
from unfreeze.parallel.plan.rates import ROWS_PER_EXPERT, WORK, of_device, of_records

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
ASKED = {"length": 512, "narrow": False, "vocab": 8192, "every_weight": False}


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
    row("dense_mlp", "adapters", "bfloat16", 0.2, "compiled"),
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
    # dense_mlp's candidate runs only where it is named: the reference's time counts
    base, adapter = 3 * 896 * 4864, 3 * 16 * (896 + 4864)
    assert found.dense == pytest.approx(2 * 512 * (2 * base + 3 * adapter) / 2.0)
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


@pytest.mark.parametrize(
    "asked, instead",
    [
        ({"length": 95}, [("attention", "under 96", "bfloat16")]),
        ({"length": 96}, [("attention", "96 on", "bfloat16")]),
        ({"length": 191}, [("attention", "96 on", "bfloat16")]),
        ({"length": 192}, []),
        ({"length": 1023}, []),
        ({"length": 1024}, [("attention", "1024 on", "bfloat16")]),
        ({"narrow": True}, [("attention", "192 on, v < d", "bfloat16")]),
        ({"vocab": (1 << 14) - 1}, []),
        ({"vocab": 1 << 14}, [("linear_cross_entropy", "large vocabulary, head frozen", "bfloat16")]),
        (
            {"every_weight": True},
            [
                ("dense_mlp", "all weights", "bfloat16"),
                ("linear_cross_entropy", "small vocabulary, head trained", "bfloat16"),
                HALF_BF16,
            ],
        ),
    ],
)
def test_each_kind_of_run_asks_for_its_own_records(mine, asked, instead):
    """With the records it asks for there are rates; with those of ASKED in their place there are none."""
    ops_of = {op for op, _, _ in instead}
    kept = [one for one in ROWS if one["op"] not in ops_of]
    winner = {one["op"]: one["candidate"] for one in ROWS}
    mine([*kept, *(row(op, bucket, dtype, 0.02, winner[op]) for op, bucket, dtype in instead)])
    assert of_records(torch.bfloat16, 1, **ASKED | asked) is not None
    if instead:
        mine(ROWS)
        assert of_records(torch.bfloat16, 1, **ASKED | asked) is None


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
    """Forward and the input's gradient; of adapters both factors' gradients too."""
    base = gate_up.shape[1] * gate_up.shape[2] + down.shape[1] * down.shape[2]
    parts = (factors.gate_up_A, factors.gate_up_B, factors.down_A, factors.down_B)
    adapter = sum(part[0].numel() for part in parts)
    return 2.0 * ids_TK.numel() * (2 * base + 3 * adapter)


def _dense(x_TD, norm_D, eps, *projections):
    base = sum(one.weight.numel() for one in projections)
    adapter = sum(one.A.numel() + one.B.numel() for one in projections if one.A is not None)
    return 2.0 * len(x_TD) * (base * (3 if projections[0].weight.requires_grad else 2) + 3 * adapter)


def _attention(q_SLHd, k_SLGd, v_SLGv, scale: float):
    """Causal: 2 · H · (d + v) FLOP a pair, and 2.5 times as much in backward."""
    S, L, H, d = q_SLHd.shape
    return 3.5 * S * L * L / 2 * 2 * H * (d + v_SLGv.shape[3])


def _head(hidden_ND, weight_VD, *_):
    return 2.0 * len(hidden_ND) * weight_VD.numel() * (3 if weight_VD.requires_grad else 2)


COUNTED = {
    "expert_mlp": _experts,
    "dense_mlp": _dense,
    "attention": _attention,
    "linear_cross_entropy": _head,
    "rms_norm": lambda x_TD, *_: float(x_TD.numel()),
    "adamw": lambda updates, _: float(sum(update.master.numel() for update in updates)),
}


def test_the_work_of_each_case_is_what_its_inputs_say():
    for (name, bucket), work in WORK.items():
        case = next(case for case in ops.load(name).cases if case.bucket == bucket)
        assert COUNTED[name](*arguments(case, torch.device("cpu"), torch.float32)) == work, (name, bucket)
    experts = [case for case in ops.load("expert_mlp").cases if case.bucket in ("under 64", "64 on")]
    given = [arguments(case, torch.device("cpu"), torch.float32) for case in experts]
    assert tuple(one[1].numel() / one[3].shape[0] for one in given) == ROWS_PER_EXPERT
