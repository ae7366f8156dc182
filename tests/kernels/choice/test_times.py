"""The file of what was timed on this machine: of this machine alone, whole or not at all."""

import json
import stat

import pytest
import torch

from unfreeze.kernels.choice import times


def row(bucket="any", runs="quick"):
    return {
        "op": "double",
        "dtype": "float32",
        "bucket": bucket,
        "runs": runs,
        "us": {"reference": 2.0, "quick": 1.0},
        "wrong": {},
        "date": "2026-01-31",
    }


@pytest.fixture(autouse=True)
def own(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("UNFREEZE_KERNELS", raising=False)
    monkeypatch.setattr(times, "_UNWRITTEN", {})
    times._read.cache_clear()
    yield
    times._read.cache_clear()


def runs():
    return {key[2]: row["runs"] for key, row in times.known().items()}


def test_rows_are_kept_and_newer_ones_replace_them(tmp_path):
    assert times.known() == {}
    times.keep([row(), row("large")])
    times.keep([row("large", "reference"), row("small")])
    assert runs() == {"any": "quick", "large": "reference", "small": "quick"}
    assert times.known()["double", "float32", "any"] == row()
    (file,) = (tmp_path / "unfreeze" / "kernels").iterdir()  # no temporary one beside it
    assert file == times.path() and json.loads(file.read_text())["machine"] == times.machine()


@pytest.mark.parametrize(
    "changed",
    [
        ("cpu_class", lambda: "cpu-of-another-class"),
        ("processor", lambda: "another CPU"),
        ("machine", lambda device: {"loops": "edited"}),
    ],
)
def test_another_machine_has_another_file(changed, monkeypatch):
    times.keep([row()])
    monkeypatch.setattr(times, *changed)
    assert times.known() == {}


def test_other_threads_have_another_file():
    before = torch.get_num_threads()
    times.keep([row()])
    try:
        torch.set_num_threads(before + 1)
        assert times.known() == {}
    finally:
        torch.set_num_threads(before)
    assert runs() == {"any": "quick"}


DAMAGED = (
    ("us", {"reference": 10.0, "quick": 0}),
    ("us", {"reference": "10", "quick": "5"}),
    ("us", [1]),
    ("wrong", None),
    ("date", None),
    ("runs", 5),
)


def damaged(field, value):
    """A file whose row has another value in one field."""
    whole = {"op": "d", "dtype": "float32", "bucket": "b", "runs": "quick", "wrong": {}, "date": "2026-11-24"}
    whole["us"] = {"reference": 10.0, "quick": 5.0}
    return json.dumps({"rows": [whole | {field: value}]})


def test_what_was_too_dear_to_be_timed_is_not_tried_again_and_decides_nothing():
    times.keep([row(), row("dear", "") | {"us": {}, "untimed": "it takes 6.0 s or more, of 2"}])
    assert runs() == {"any": "quick"}
    assert [key[2] for key in times.tried()] == ["any", "dear"]


def test_control_arm_the_undamaged_row_is_read():
    times.path().parent.mkdir(parents=True, exist_ok=True)
    times.path().write_text(damaged("runs", "quick"))
    times._read.cache_clear()
    assert times.known()["d", "float32", "b"]["us"]["quick"] == 5.0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"rows": 1}',
        '{"rows": [1]}',
        '{"rows": [{"op": "double"}]}',
        '{"rows": [{"op": "d", "dtype": "float32", "bucket": "b", "runs": "gone", "us": {"reference": 1}}]}',
        *(damaged(field, value) for field, value in DAMAGED),
        "[" * 100_000,
    ],
)
def test_a_damaged_file_counts_as_none_and_is_made_anew(text):
    times.keep([row()])
    times.path().write_text(text)
    times._read.cache_clear()
    assert times.known() == {}
    times.keep([row("small")])
    assert runs() == {"small": "quick"}


def test_where_the_cache_cannot_be_written_it_goes_on(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))  # a file where a folder should be
    times.keep([row()])
    assert runs() == {"any": "quick"}  # of this process alone
    monkeypatch.setattr(times, "_UNWRITTEN", {})
    assert times.known() == {} and stat.S_ISREG((tmp_path / "file").stat().st_mode)


def test_nothing_is_known_where_the_choice_is_fixed(monkeypatch):
    times.keep([row()])
    monkeypatch.setenv("UNFREEZE_KERNELS", "records")
    assert times.known() == {}
