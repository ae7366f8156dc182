"""Saves in parts: any number of processes reads what any other wrote, to the bit; a kill or a full disk on any
process leaves the save before (docs/why/trust.md R1)."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from unfreeze.core.errors import CheckpointError
from unfreeze.core.rows import Rows, share
from unfreeze.train.moments import BLOCK, Int8, Uncut
from unfreeze.train.shards import SavedShards, dealt, file_name, write_part


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, forkserver: Any) -> tuple[Path, dict[str, Any]]:
    """What sharding.py found: its processes are started once for all claims here."""
    folder = tmp_path_factory.mktemp("sharding")
    path = os.pathsep.join(p for p in sys.path if p)
    process = forkserver.run(
        [Path(__file__).with_name("sharding.py"), folder],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        timeout=240,
    )
    assert process.returncode == 0, process.stderr
    return folder, json.loads(process.stdout.splitlines()[-1])


def saved_at(save: Path) -> SavedShards:
    return SavedShards(save, json.loads((save / "state.json").read_text()).get("files"))


@pytest.mark.parametrize("kind", ["float32", "half"])
def test_saved_by_2_gone_on_with_by_1_and_by_4_is_the_unbroken_run_to_the_bit(runs, kind: str):
    folder, found = runs
    files = [file_name(index, 2) for index in range(2)]
    assert found["counts"][kind] == {"codes": [0] * 6, "first": ["state.json", *files], "said": ""}
    straight = load_file(folder / "counts" / kind / "straight/state/step-000006/tensors.safetensors")
    broken = saved_at(folder / "counts" / kind / "broken/state/step-000006")
    assert broken.names == straight.keys() and len(straight) == (14 if kind == "float32" else 17)
    for name, whole in straight.items():
        assert torch.equal(broken.read(name, whole), whole), name


def test_every_number_is_written_once_and_all_write_about_as_much(runs):
    """The files of 4 processes, of which pairs share the experts, hold no more than one file of 1 process."""
    folder, _ = runs
    save = folder / "counts/float32/broken/state/step-000006"
    one = folder / "counts/float32/straight/state/step-000006/tensors.safetensors"
    sizes = json.loads((save / "state.json").read_text())["files"]
    written = [load_file(save / name) for name in sizes]
    assert len(written) == 4 and {name: (save / name).stat().st_size for name in sizes} == sizes
    numbers = sum(tensor.numel() for file in written for tensor in file.values())
    assert numbers == sum(tensor.numel() for tensor in load_file(one).values())
    rows = [tensor for file in written for name, tensor in file.items() if name == "model.experts.up"]
    assert sorted(len(tensor) for tensor in rows) == [3, 4]


def test_the_best_saves_weights_come_back_into_the_rows_of_each_process(runs):
    assert runs[1]["counts"]["best"] == [0, 0]


def test_int8_moments_whose_scales_are_no_whole_rows_are_not_divided(runs):
    found = runs[1]["counts"]["int8"]
    assert "optimizer.exp_avg_scale.experts.bias has a scale for every 256 numbers" in found["said"]
    assert "moments in int8, saved by 2 processes, cannot be divided differently" in found["said"]
    assert "resume with 2 processes, as it was saved" in found["said"]
    assert found["codes"] == [0, 0, 0, 0]  # which then works


def test_a_full_disk_on_one_process_is_heard_of_by_all_and_leaves_no_half_save(runs):
    stop, go_on = runs[1]["full"]["stop"], runs[1]["full"]["continue"]
    assert stop["codes"] == [0, 0] and stop["left"] == ["step-000001", "step-000002"]
    for said in stop["said"]:
        assert said.startswith("DiskFull: process 1: could not save ") and "the disk is full" in said
        assert "full/stop/state/step-000003" in said and "the last is step-000002" in said
    assert go_on["said"] == ["", ""] and go_on["left"] == ["step-000002", "step-000004"]


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_kill_of_any_process_at_any_file_leaves_the_save_before(runs, rank: str):
    found = runs[1]["none"][rank]
    assert {"open", "write", "fsync", "os.rename"} <= set(found["operations"])
    # from the rename of the folder on, which is process 0's, the new one is there
    assert found["left"] == sorted(found["left"]) and len(found["left"]) >= 7
    assert set(found["left"]) == ({2, 3} if rank == "0" else {2})


def test_control_arm_files_under_the_final_name_are_read_half(runs):
    assert runs[1]["in place"]["1"]["left"] == ["unreadable"]


# ----------------------------------------------------------------------- the files


def written_by(folder: Path, processes: int, whole: torch.Tensor, name: str = "model.w") -> SavedShards:
    """A save in which each of so many processes has its rows of one tensor."""
    files = {}
    for index in range(processes):
        rows = share(len(whole), index, processes)
        file = file_name(index, processes)
        files[file] = write_part(folder / file, {name: whole[rows.slice]}, {name: rows})
    return SavedShards(folder, files)


@pytest.mark.parametrize("writers", [1, 2, 3, 5])
def test_rows_are_read_from_whichever_files_have_them(tmp_path: Path, writers: int):
    whole = torch.randn(4, 3)  # with 5 writers one has no row
    saved = written_by(tmp_path, writers, whole)
    assert torch.equal(saved.read("model.w", whole), whole)
    for readers in (1, 2, 3, 4, 6):
        for index in range(readers):
            rows = share(4, index, readers)
            own = whole[rows.slice]
            assert torch.equal(saved.read("model.w", own, rows), own)


def test_what_does_not_fit_is_named_with_both_shapes(tmp_path: Path):
    saved = written_by(tmp_path, 2, torch.zeros(4, 3))
    with pytest.raises(
        CheckpointError, match=r"model.w is torch.float32 \[4, 3\], this model has .* \[6, 3\]"
    ):
        saved.read("model.w", torch.zeros(3, 3), Rows(0, 3, 6))
    with pytest.raises(CheckpointError, match=r"\[4, 3\], this model has torch.bfloat16 \[4, 3\]"):
        saved.read("model.w", torch.zeros(2, 3, dtype=torch.bfloat16), Rows(0, 2, 4))
    nan = written_by(tmp_path, 2, torch.full((4, 3), torch.nan))
    with pytest.raises(CheckpointError, match=r"model.w holds NaN or infinity"):
        nan.read("model.w", torch.zeros(4, 3))


def test_a_file_that_is_gone_short_or_of_another_save_is_named(tmp_path: Path):
    written_by(tmp_path, 2, torch.zeros(4, 3))
    files = {file_name(index, 2): (tmp_path / file_name(index, 2)).stat().st_size for index in range(2)}
    second = tmp_path / file_name(1, 2)
    one = {file_name(0, 2): files[file_name(0, 2)]}
    with pytest.raises(CheckpointError, match=r"rows 2 to 3 of model.w are in no file"):
        SavedShards(tmp_path, one).read("model.w", torch.zeros(4, 3))
    second.write_bytes(second.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match=r"tensors-00002-of-00002.safetensors cannot be read: it has"):
        SavedShards(tmp_path, files)
    second.unlink()
    with pytest.raises(CheckpointError, match=r"tensors-00002-of-00002.safetensors cannot be read"):
        SavedShards(tmp_path, files)


@pytest.mark.parametrize("said", ["no json", '{"model.w": [0, 2]}', '{"model.w": [3, 2, 4]}', "[]"])
def test_rows_in_a_header_that_are_none_are_refused(tmp_path: Path, said: str):
    from safetensors.torch import save_file

    file = tmp_path / file_name(0, 1)
    save_file({"model.w": torch.zeros(2, 3)}, file, {"rows": said})
    with pytest.raises(CheckpointError, match="cannot be read: its rows"):
        SavedShards(tmp_path, {file.name: file.stat().st_size})


def test_scales_are_rows_and_those_of_narrow_rows_are_uncut():
    whole = Int8("w", torch.zeros(4, 2, BLOCK)).parts(Rows(1, 3, 4))
    assert whole["exp_avg_scale"] == Rows(2, 6, 8) and whole["exp_avg"] == Rows(1, 3, 4)
    odd = Int8("w", torch.zeros(4, BLOCK + 1)).parts(Rows(1, 3, 4))  # a row has two blocks, one of 1 number
    assert odd["exp_avg_scale"] == Rows(2, 6, 8)
    assert Int8("w", torch.zeros(4, 5)).parts(Rows(1, 3, 4))["exp_avg_scale"] == Uncut(Rows(1, 3, 4))


def test_int8_moments_of_an_earlier_version_are_refused_by_name(tmp_path: Path):
    """They had a scale for every 256 numbers, end to end across rows; norms had them too. Where a row is a whole
    number of blocks, the layout is the same, and such a save goes on."""
    from safetensors.torch import save_file

    old = {"optimizer.exp_avg_scale.w": torch.zeros(-(-4 * (BLOCK + 1) // BLOCK))}
    save_file(old, tmp_path / "tensors.safetensors")
    now = Int8("w", torch.zeros(4, BLOCK + 1)).exp_avg_scale
    with pytest.raises(
        CheckpointError, match=r"exp_avg_scale.w is .* \[5\], this model has .* \[8\]"
    ) as raised:
        SavedShards(tmp_path).read("optimizer.exp_avg_scale.w", now)
    assert "int8 moments of an earlier version have another layout" in raised.value.next
    save_file({"optimizer.exp_avg_scale.w": torch.ones(8)}, tmp_path / "tensors.safetensors")
    same = Int8("w", torch.zeros(4, 2 * BLOCK)).exp_avg_scale
    assert SavedShards(tmp_path).read("optimizer.exp_avg_scale.w", same).tolist() == [1.0] * 8


def test_what_all_hold_is_dealt_so_that_all_write_about_as_much():
    by = dealt({"a": 7, "b": 4, "c": 3, "d": 0}, 2)
    assert by["a"] != by["b"] == by["c"] and set(by) == {"a", "b", "c", "d"}
