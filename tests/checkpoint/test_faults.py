"""Claims about Faults: one error however many faults, counted by kind."""

from __future__ import annotations

from pathlib import Path

import pytest

from unfreeze.checkpoint.faults import Faults
from unfreeze.core.errors import CheckpointError


def test_many_faults_are_one_line() -> None:
    faults = Faults(Path("m"), total=69_120)
    for i in range(1152):
        faults.add("tensors are missing", f"t{i}", cause="a missing shard")
    faults.add("tensors have the wrong shape", "u", cause="something else")
    with pytest.raises(CheckpointError) as caught:
        faults.raise_if_any(next="do this")
    assert (
        caught.value.message
        == "m: 1,152 of 69,120 tensors are missing; 1 of 69,120 tensors have the wrong shape; first: t0."
        " Likely cause: a missing shard"
    )
    assert caught.value.next == "do this"


@pytest.mark.parametrize(
    ("kind", "one"),
    [
        ("files are truncated", "file is truncated"),
        ("tensors leave a gap before them", "tensor leaves a gap before it"),
        ("tensors are in two files", "tensor is in two files"),
        ("files named by the index are not there", "file named by the index is not there"),
        ("header entries are malformed", "header entry is malformed"),
        ("tensors do not fill their bytes", "tensor does not fill its bytes"),
    ],
)
def test_one_fault_is_told_as_one(kind, one):
    for count, words in ((1, one), (2, kind)):
        faults = Faults(Path("m"))
        for _ in range(count):
            faults.add(kind, "d")
        with pytest.raises(CheckpointError, match=f"^m: {count} {words}; first: d$"):
            faults.raise_if_any(next="")


def test_no_fault_no_error() -> None:
    Faults(Path("m")).raise_if_any(next="")
