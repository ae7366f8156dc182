"""Which implementation runs: the rule for a record, each way it can fail, whose records count, and what is
said when there are none."""

import json
import logging

import pytest
import torch

from unfreeze.core import cpu
from unfreeze.core.errors import ConfigError
from unfreeze.kernels.choice import choose as choosing
from unfreeze.kernels.choice import record
from unfreeze.kernels.choice.choose import by_record, choose, proves
from unfreeze.kernels.choice.op import Candidate, Case, Op

CPU, BF16 = torch.device("cpu"), torch.bfloat16


def runs(device, dtype):
    return ""


def planted(**fields):
    """Double, by two candidates: `quick` runs everywhere, `gpu` on CUDA only."""
    candidates = {
        "quick": Candidate(lambda: lambda x: x * 2, runs),
        "gpu": Candidate(
            lambda: pytest.fail("loaded"),
            lambda device, dtype: "" if device == "cuda" else f"device {device}",
        ),
        "named": Candidate(lambda: lambda x: 2 * x, runs, named_on=("cpu",)),
    }
    case = Case(
        "any",
        lambda device, dtype, generator: (
            torch.randn(8, generator=generator).to(device, dtype).requires_grad_(),
        ),
    )
    return Op("double", lambda x: x + x, candidates, (case,), {BF16: 1e-2}, **fields)


def row(**changes):
    return {
        "op": "double",
        "device": "cpu-avx2",
        "dtype": "bfloat16",
        "bucket": "any",
        "candidate": "quick",
        "error_forward": 1e-3,
        "error_backward": 2e-3,
        "median_us": 50.0,
        "reference_median_us": 100.0,
        "spread_us": 2.0,
        "reference_spread_us": 2.0,
        "repeats": 9,
        "threads": 1,
        "torch": "2.13.0",
        "date": "2026-01-31",
        **changes,
    }


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Records of the test's own: files["cpu-avx2"] = rows (committed), files["user/cpu-avx2"] = rows (the
    user's). This machine is a cpu-avx2."""
    for name in ("committed", "user"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(record, "COMMITTED", tmp_path / "committed")
    monkeypatch.setattr(record, "user_folder", lambda: tmp_path / "user")
    monkeypatch.setattr(
        choosing, "device_key", lambda device: "cpu-avx2" if device.type == "cpu" else "some-gpu"
    )
    monkeypatch.setattr(
        record, "device_key", lambda device: "cpu-avx2" if device.type == "cpu" else "some-gpu"
    )
    monkeypatch.setattr(choosing, "_CHOSEN", {})
    monkeypatch.setattr(choosing, "_TABLE", {})

    class Files:
        def __setitem__(self, name, rows):
            path = tmp_path / ("" if "/" in name else "committed") / f"{name}.json"
            path.write_text(rows if isinstance(rows, str) else json.dumps(rows))

    record.read.cache_clear(), choosing._log_once.cache_clear()
    yield Files()
    record.read.cache_clear()


def test_a_proven_record_is_chosen(files):
    files["cpu-avx2"] = [row()]
    assert by_record(planted(), CPU, BF16, "any")[:2] == ("quick", "2.00 x the reference, 2026-01-31")


@pytest.mark.parametrize(
    "fault",
    [
        dict(error_forward=2e-2),  # too inexact, either way
        dict(error_backward=2e-2),
        dict(median_us=96.0),  # only 4 % faster
        dict(
            median_us=90.0, spread_us=12.0, reference_spread_us=10.0
        ),  # 10 us faster, and half the spreads are 11
        dict(median_us=150.0),
        dict(error_forward=float("nan")),
        dict(error_backward=float("nan")),
    ],
)
def test_control_arms_of_the_rule(files, fault):
    """Each is the proven record with one number changed, and is not chosen."""
    assert proves(row(), planted()) and not proves(row(**fault), planted())
    files["cpu-avx2"] = [row(**fault)]
    assert by_record(planted(), CPU, BF16, "any")[0] == "reference"


def test_the_edges_of_the_rule():
    assert proves(row(median_us=95.0, spread_us=0.0, reference_spread_us=0.0), planted())
    assert proves(row(error_backward=1e-2), planted())


def test_a_refused_record_is_not_chosen(files):
    refused = {
        key: value
        for key, value in row(refused="RuntimeError: no").items()
        if not key.endswith("_us") and not key.startswith("error")
    }
    files["cpu-avx2"] = [refused]
    assert by_record(planted(), CPU, BF16, "any")[:2] == (
        "reference",
        "1 measured, none 5 % faster within the tolerance",
    )


def test_a_candidate_that_cannot_run_here_or_only_by_name_is_not_chosen_whatever_its_record_says(files):
    files["cpu-avx2"] = [row(candidate="gpu", median_us=1.0), row(candidate="named", median_us=2.0), row()]
    assert by_record(planted(), CPU, BF16, "any")[0] == "quick"
    assert choose(planted(), CPU, BF16, "any", "named")(3) == 6


def test_the_fastest_of_several_by_its_own_ratio(files):
    op = planted()
    op = Op(op.name, op.reference, {**op.candidates, "other": op.candidates["quick"]}, op.cases, op.tolerance)
    files["cpu-avx2"] = [row(candidate="other", median_us=60.0, reference_median_us=180.0), row()]
    assert by_record(op, CPU, BF16, "any")[0] == "other"


@pytest.mark.parametrize(
    "other", [dict(dtype="float32"), dict(bucket="small"), dict(op="halve"), dict(candidate="gone")]
)
def test_a_record_of_something_else_says_nothing(files, other):
    files["cpu-avx2"] = [row(**other)]
    name, why, _ = by_record(planted(), CPU, BF16, "any")
    assert (
        name == "reference"
        and why == "no record for cpu-avx2; unfreeze dev kernels measure --op double makes one"
    )


def test_inputs_that_no_case_stands_for_and_an_op_without_a_runner_need_no_record(files):
    assert by_record(planted(), CPU, BF16, "odd")[:2] == ("reference", "inputs of this kind are not measured")
    alone = Op("double", lambda x: x, {"gpu": planted().candidates["gpu"]}, planted().cases, {})
    assert by_record(alone, CPU, BF16, "any")[:2] == ("reference", "no candidate runs here")


def test_a_preferred_candidate_needs_no_record_but_still_must_run(files):
    assert by_record(planted(preferred="quick", because="it keeps a promise"), CPU, BF16, "any")[:2] == (
        "quick",
        "it keeps a promise",
    )
    alone = Op(
        "double", lambda x: x, {"gpu": planted().candidates["gpu"]}, planted().cases, {}, preferred="gpu"
    )
    assert by_record(alone, CPU, BF16, "any")[:2] == ("reference", "gpu cannot run: device cpu")


def test_a_choice_says_what_decided(files):
    assert by_record(planted(), CPU, BF16, "any").origin == "not measured"
    assert by_record(planted(preferred="quick"), CPU, BF16, "any").origin == "by design"
    for file, origin in (("cpu-avx2", "measured on its class"), ("user/cpu-avx2", "measured here")):
        record.read.cache_clear()
        files[file] = [row()]
        assert by_record(planted(), CPU, BF16, "any") == (*by_record(planted(), CPU, BF16, "any")[:2], origin)
        record.read.cache_clear()
        files[file] = [row(median_us=99.0)]  # a record decides for the reference too
        assert by_record(planted(), CPU, BF16, "any")[::2] == ("reference", origin)


def test_what_was_chosen_is_listed_until_it_is_forgotten(files):
    files["cpu-avx2"] = [row()]
    choosing.choose_anew()
    for impl in ("auto", "auto", "reference"):
        choose(planted(), CPU, BF16, "any", impl)
    assert [(inputs.op, inputs.bucket, choice.runs) for inputs, choice in choosing.choices().items()] == [
        ("double", "any", "quick"),
        ("double", "any", "reference"),
    ]
    assert [choice.origin for choice in choosing.choices().values()] == ["measured on its class", "as asked"]
    choosing.choose_anew()
    assert choosing.choices() == {}
    choose(planted(), CPU, BF16, "any")  # not lost in a dictionary of before
    assert len(choosing.choices()) == 1


def test_what_runs_instead_of_the_preferred_one_tells_why(files, monkeypatch):
    """By design without a record, and as well where it was timed or measured."""
    op = planted(preferred="gpu", instead="quick", because="it keeps a promise")
    assert by_record(op, CPU, BF16, "any")[:2] == ("quick", "it keeps a promise; gpu cannot run: device cpu")
    row_of_it = {"runs": "quick", "us": {"reference": 2.0, "quick": 1.0}, "wrong": {}, "date": "2026-01-31"}
    monkeypatch.setattr(choosing, "known", lambda device: {("double", "bfloat16", "any"): row_of_it})
    runs, why, origin = by_record(op, CPU, BF16, "any")
    assert (runs, origin) == ("quick", "timed here") and why.endswith(
        "2026-01-31; gpu cannot run: device cpu"
    )


def test_where_the_preferred_one_cannot_run_the_records_decide(files):
    files["cpu-avx2"] = [row()]
    assert by_record(planted(preferred="gpu"), CPU, BF16, "any")[0] == "quick"


def test_a_users_own_records_win_where_they_speak(files):
    files["cpu-avx2"] = [row(), row(dtype="float32")]
    files["user/cpu-avx2"] = [row(median_us=99.0)]
    assert by_record(planted(), CPU, BF16, "any")[0] == "reference"
    assert record.record_rows(planted(), CPU, torch.float32, "any") == [row(dtype="float32")]


def test_a_record_of_another_class_says_nothing(files, caplog):
    files["cpu-avx512"], files["cpu-avx512-bf16"] = [row()], [row()]
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            assert by_record(planted(), CPU, BF16, "any")[::2] == ("reference", "not measured")
    assert len(caplog.records) == 1 and "cpu-avx2 has no records for some ops" in caplog.text


def timed(monkeypatch, runs="quick", **us):
    """This machine has timed the planted op so."""
    key, us = ("double", "bfloat16", "any"), {"reference": 100.0, "quick": 40.0, **us}
    row = {"op": key[0], "dtype": key[1], "bucket": key[2], "runs": runs, "us": us, "wrong": {}, "date": "d"}
    monkeypatch.setattr(choosing, "known", lambda device: {key: row})


def test_what_this_machine_has_timed_beats_every_record(files, monkeypatch):
    """A record that promises the double, of a candidate that is slow here; and one that forbids a fast one."""
    files["cpu-avx2"] = files["user/cpu-avx2"] = [row()]
    timed(monkeypatch, "reference", quick=250.0)
    assert by_record(planted(), CPU, BF16, "any") == (
        "reference",
        "quick 0.40 x plain torch, d",
        "timed here",
    )
    record.read.cache_clear()
    files["cpu-avx2"] = files["user/cpu-avx2"] = [row(median_us=99.0)]
    timed(monkeypatch)
    assert by_record(planted(), CPU, BF16, "any")[::2] == ("quick", "timed here")


def test_a_time_of_a_candidate_that_cannot_run_any_more_says_nothing(files, monkeypatch):
    timed(monkeypatch, "gpu", gpu=1.0)
    assert by_record(planted(), CPU, BF16, "any")[::2] == ("reference", "not measured")


def test_what_the_run_began_with_beats_a_time(files, monkeypatch):
    timed(monkeypatch)
    choosing.fix({("double", "bfloat16", "any"): choosing.Choice("reference", "then", "timed here")})
    assert by_record(planted(), CPU, BF16, "any") == ("reference", "then", "timed here")
    choosing.fix({})
    assert by_record(planted(), CPU, BF16, "any").runs == "quick"


def test_on_a_cpu_what_is_predicted_runs_unchecked_until_a_record_or_a_time_says_otherwise(
    files, monkeypatch
):
    quick = Candidate(lambda: lambda x: x * 2, runs, predicted_on=("cpu",), because="one pass")
    op = Op("double", lambda x: x + x, {"quick": quick}, planted().cases, {BF16: 0.0})
    assert by_record(op, CPU, BF16, "any") == (
        "quick",
        "predicted, not measured here: one pass",
        "predicted, not measured",
    )
    timed(monkeypatch, "reference", quick=110.0)
    assert by_record(op, CPU, BF16, "any").runs == "reference"


def test_a_gpu_without_records_borrows_nothing_and_says_so_once(files, caplog):
    files["cpu-avx2"], files["other-gpu"] = [row()], [row()]
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            assert by_record(planted(), torch.device("cuda"), BF16, "any")[0] == "reference"
    assert (
        len(caplog.records) == 1
        and "some-gpu has no records" in caplog.text
        and "unfreeze dev kernels measure" in caplog.text
    )


@pytest.mark.parametrize("text", ["{", "[1]", '{"op": 1}', '[{"op": "double"}]'])
def test_a_broken_file_is_named_once_and_stops_no_run(files, text, caplog):
    files["user/cpu-avx2"] = text
    record._warn_once.cache_clear()
    for _ in range(2):
        assert by_record(planted(), CPU, BF16, "any").runs == "reference"
    (warning,) = [line.message for line in caplog.records if line.levelno == logging.WARNING]
    assert "cpu-avx2.json" in warning and "kernel records" in warning and "it is not read" in warning


def test_the_second_call_looks_up_and_says_nothing(files, caplog, monkeypatch):
    files["cpu-avx2"] = [row()]
    op = planted()
    with caplog.at_level(logging.INFO):
        first = choose(op, CPU, BF16, "any")
        assert "double on cpu in bfloat16, any: quick (2.00 x" in caplog.text
        monkeypatch.setattr(choosing, "_choose", lambda *_: pytest.fail("chosen again"))
        assert choose(op, CPU, BF16, "any") is first and len(caplog.records) == 1


def test_impl_by_name(files):
    op = planted()
    assert (
        choose(op, CPU, BF16, "any", "reference") is op.reference
        and choose(op, CPU, BF16, "any", "quick")(2) == 4
    )
    with pytest.raises(
        ConfigError,
        match=(
            "double has no implementation 'quik'; nearest: 'quick'; it has auto, reference, quick, gpu, named"
        ),
    ):
        choose(op, CPU, BF16, "any", "quik")
    with pytest.raises(ConfigError, match="double cannot run as 'gpu' here: device cpu"):
        choose(op, CPU, BF16, "any", "gpu")


def test_the_devices_own_key():
    record.device_key.cache_clear()
    assert record.device_key(CPU) == cpu.cpu_class()
    assert record.device_key(torch.device("meta")) == "meta"


@pytest.mark.parametrize("missing", ["median_us", "error_backward"])
def test_a_row_without_its_numbers_is_not_read(files, missing):
    files["cpu-avx2"] = [{name: value for name, value in row().items() if name != missing}]
    assert by_record(planted(), CPU, BF16, "any").runs == "reference"
    record.read.cache_clear()
    files["cpu-avx2"] = [row()]  # control arm
    assert by_record(planted(), CPU, BF16, "any").runs != "reference"
