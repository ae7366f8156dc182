"""Which implementation runs: the rule for a record, each way it can fail, whose records count, and what is
said when there are none."""

import json
import logging

import pytest
import torch

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

    class Files:
        def __setitem__(self, name, rows):
            path = tmp_path / ("" if "/" in name else "committed") / f"{name}.json"
            path.write_text(rows if isinstance(rows, str) else json.dumps(rows))

    record.read.cache_clear(), choosing._log_unmeasured.cache_clear(), choosing._log_borrowed.cache_clear()
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
        and why == "no record for cpu-avx2; unfreeze kernels measure --op double makes one"
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
    for file, origin in (
        ("cpu-avx512", "measured on a near class"),
        ("cpu-avx2", "measured on its class"),
        ("user/cpu-avx2", "measured here"),
    ):
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


def test_where_the_preferred_one_cannot_run_the_records_decide(files):
    files["cpu-avx2"] = [row()]
    assert by_record(planted(preferred="gpu"), CPU, BF16, "any")[0] == "quick"


def test_a_users_own_records_win_where_they_speak(files):
    files["cpu-avx2"] = [row(), row(dtype="float32")]
    files["user/cpu-avx2"] = [row(median_us=99.0)]
    assert by_record(planted(), CPU, BF16, "any")[0] == "reference"
    assert record.speaking_for(planted(), CPU, torch.float32, "any")[1] == [row(dtype="float32")]


def test_a_cpu_without_records_goes_by_the_nearest_class_and_says_so_once(files, caplog):
    files["cpu-avx512-bf16"], files["cpu-amx"] = [row(median_us=30.0)], [row(median_us=99.0)]
    with caplog.at_level(logging.INFO):
        for bucket in ("any", "any"):
            assert by_record(planted(), CPU, BF16, bucket)[:2] == (
                "quick",
                "3.33 x the reference, 2026-01-31 on cpu-avx512-bf16",
            )
    assert [record.message for record in caplog.records] == [
        "kernels: cpu-avx2 has no records of its own, so those of cpu-avx512-bf16 decide; unfreeze kernels"
        " measure --to user makes its own"
    ]
    files["cpu-default"] = [row(median_us=98.0)]  # nearer: one class away, not two
    record.read.cache_clear()
    assert by_record(planted(), CPU, BF16, "any")[0] == "reference"


def test_a_gpu_without_records_borrows_nothing_and_says_so_once(files, caplog):
    files["cpu-avx2"], files["other-gpu"] = [row()], [row()]
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            assert by_record(planted(), torch.device("cuda"), BF16, "any")[0] == "reference"
    assert (
        len(caplog.records) == 1
        and "some-gpu has no records" in caplog.text
        and "unfreeze kernels measure" in caplog.text
    )


def test_the_nearest_class_is_the_humbler_of_two_as_near(files):
    files["cpu-avx512"], files["cpu-default"] = [row()], [row(median_us=99.0)]
    assert record.speaking_for(planted(), CPU, BF16, "any")[0] == "cpu-default"


@pytest.mark.parametrize("text", ["{", "[1]", '{"op": 1}', '[{"op": "double"}]'])
def test_a_broken_file_is_named(files, text):
    files["user/cpu-avx2"] = text
    with pytest.raises(ConfigError, match=r"cpu-avx2\.json .*kernel records"):
        by_record(planted(), CPU, BF16, "any")


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
    assert record.device_key(CPU) in record.CPU_CLASSES or record.device_key(CPU).startswith("cpu-")
    assert record.device_key(torch.device("meta")) == "meta"
