"""Launch parameters: listed by candidates, measured in turn, kept per card, and taken by choose()."""

from typing import ClassVar

import pytest
import torch

from unfreeze.commands.kernels import config_line
from unfreeze.kernels.choice import choose as choosing
from unfreeze.kernels.choice import configs, measure, ops, record
from unfreeze.kernels.choice.op import Candidate, Case, Op
from unfreeze.quant.codec import Packed

CPU, F32 = torch.device("cpu"), torch.float32


class Doubling:
    """x -> 2 x; with STEPS in its config it says which of them ran."""

    ran: ClassVar[list[int]] = []

    def __init__(self, config=None):
        self.steps = dict(config or {}).get("STEPS", 0)

    def configured(self, config):
        return Doubling(config)

    def __call__(self, x):
        self.ran.append(self.steps)
        if self.steps == 3:
            raise RuntimeError("out of resources: shared memory")
        return 2.01 * x if self.steps == 4 else 2 * x


FOUR = tuple({"STEPS": step} for step in (1, 2, 3, 4))


@pytest.fixture
def op(monkeypatch, tmp_path):
    """On a machine whose folder of records is empty, and whose CPU counts as a card."""
    monkeypatch.setattr(record, "user_folder", lambda: tmp_path)
    monkeypatch.setattr(record, "device_key", lambda device: "card")
    record.read.cache_clear()
    choosing._loaded.cache_clear()
    monkeypatch.setattr(Doubling, "ran", [])
    made = Candidate(Doubling, lambda *_: "", predicted_on=("cuda",), because="1 byte", configs={"any": FOUR})
    case = Case("any", lambda d, t, g: (torch.randn(8, generator=g).to(d, t),))
    yield Op("double", lambda x: x + x, {"quick": made}, (case,), {F32: 1e-6}, differentiable=False)
    record.read.cache_clear()


def planted(monkeypatch, microseconds):
    """Times by the config's number; "own" comes first."""

    def in_turn(calls, device, seconds):
        assert all(call() is not None for call in calls.values())
        return {label: [microseconds[label]] * 9 for label in calls}

    monkeypatch.setattr(measure, "in_turn", in_turn)


def measured(op):
    return configs.measure_configs(op, "quick", op.cases[0], CPU, F32, 0.1)


def test_the_fastest_right_one_is_kept_and_chosen_on_that_card_alone(op, monkeypatch):
    planted(monkeypatch, {"own": 10.0, "0": 9.0, "1": 7.0})
    row = measured(op)
    assert row["config"] == {"STEPS": 2} and row["own_median_us"] == 10.0
    assert (
        set(row["failed"]) == {str(FOUR[2]), str(FOUR[3])} and "shared memory" in row["failed"][str(FOUR[2])]
    )
    gpu = torch.device("cuda", 0)
    assert configs.best(op, "quick", gpu, F32, "any") == {"STEPS": 2}
    assert configs.best(op, "quick", CPU, F32, "any") == configs.OWN  # loops of a CPU have no configs
    assert configs.best(op, "quick", gpu, torch.bfloat16, "any") == configs.OWN
    assert configs.best(op, "quick", gpu, F32, "other") == configs.OWN
    chosen = choosing._choose(op, gpu, F32, "any", "quick")
    Doubling.ran.clear()
    chosen(torch.ones(2))
    assert Doubling.ran == [2]
    monkeypatch.setattr(record, "device_key", lambda device: "another")
    assert configs.best(op, "quick", gpu, F32, "any") == configs.OWN


def test_its_own_stays_where_the_others_gain_less_than_2_percent(op, monkeypatch):
    planted(monkeypatch, {"own": 10.0, "0": 9.9, "1": 11.0})
    assert measured(op)["config"] == {} and configs.best(op, "quick", torch.device("cuda"), F32, "any") == {}


def test_a_kept_config_that_the_kernel_no_longer_has_is_not_taken(op, monkeypatch):
    planted(monkeypatch, {"own": 10.0, "0": 9.0, "1": 7.0})
    measured(op)
    monkeypatch.setitem(op.candidates["quick"].configs, "any", FOUR[:1])
    assert configs.best(op, "quick", torch.device("cuda"), F32, "any") == configs.OWN


def test_a_newer_row_replaces_the_older(op, monkeypatch, tmp_path):
    planted(monkeypatch, {"own": 10.0, "0": 5.0, "1": 7.0})
    measured(op)
    planted(monkeypatch, {"own": 10.0, "0": 9.0, "1": 7.0})
    measured(op)
    assert configs.best(op, "quick", torch.device("cuda"), F32, "any") == {"STEPS": 2}
    assert len(record.read(tmp_path / "card-configs.json")) == 1


def test_all_are_kept_beside_the_records_and_the_users_own_come_first(op, monkeypatch, tmp_path):
    gpu, package = torch.device("cuda", 0), tmp_path / "package"
    monkeypatch.setattr(record, "COMMITTED", package)
    planted(monkeypatch, {"own": 10.0, "0": 9.0, "1": 7.0})
    rows = configs.measure_all(op, op.cases[0], CPU, F32, 0.1, package / "card.json")
    assert [row["config"] for row in rows] == [{"STEPS": 2}]
    assert config_line(rows[0]) == "quick with STEPS=2: 7 us, its own 10 us; 2 did not run"
    assert configs.best(op, "quick", gpu, F32, "any") == {"STEPS": 2}
    planted(monkeypatch, {"own": 10.0, "0": 5.0, "1": 7.0})
    measured(op)
    assert configs.best(op, "quick", gpu, F32, "any") == {"STEPS": 1}


def test_a_record_times_a_candidate_with_its_best(op, monkeypatch):
    planted(monkeypatch, {"own": 10.0, "0": 9.0, "1": 7.0})
    measured(op)
    monkeypatch.setattr(configs, "best", lambda *_: {"STEPS": 2})  # as on a GPU
    Doubling.ran.clear()
    good, errors, refused = measure.candidates_of(op, op.cases[0], CPU, F32)
    assert Doubling.ran == [2] and not refused and errors["quick"].forward == 0
    assert good["quick"].steps == 2


def test_a_candidate_without_configs_is_not_measured(op):
    assert configs.measure_configs(op, "absent", op.cases[0], CPU, F32, 0.1) is None


def test_which_kernels_have_configs():
    found = {
        name: sorted(bucket for c in ops.import_op(name).candidates.values() for bucket in c.configs)
        for name in ops.OPS
    }
    assert {name: buckets for name, buckets in found.items() if buckets} == {
        "expand": ["large"],
        "grouped_mm": ["outer", "over 64", "up to 64"],
        "int4_grouped_mm": ["up to 512", "up to 64", "up to 8"],
    }


@pytest.mark.parametrize(
    "name, index", [("expand", 1), ("grouped_mm", 0), ("grouped_mm", 2), ("int4_grouped_mm", 0)]
)
def test_every_config_computes_the_same(name, index, interpreted):
    """In the interpreter, on the op's smallest case of those configs."""
    op = ops.import_op(name)
    candidate, case = op.candidates["triton"], op.cases[index]
    if candidate.refuses("cpu", F32):
        pytest.skip("the interpreter is not on")
    args = measure.arguments(case, CPU, F32)
    if name == "expand":  # of the large matrices, 8 rows
        packed, _, out = args
        parts = {suffix: part[:, :8].contiguous() for suffix, part in packed.parts.items()}
        args = Packed(packed.codec, parts), 0, out[:8]
    want = [x.clone() for x in measure.visit(op, op.reference, args)[0]]
    assert len(candidate.configs[case.bucket]) > 2
    for config in candidate.configs[case.bucket]:
        got, _ = measure.visit(op, configs.configured(candidate.load(), config), args)
        assert max(map(measure.relative_error, got, want)) <= op.tolerance[F32], config
