"""Claims about Reader: what stream reads, again and again into the same memory, from files that stay open; a file
that was written to meanwhile, that ends early or whose disk fails is one CheckpointError."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import psutil
import pytest
import torch

from unfreeze.checkpoint import open_checkpoint
from unfreeze.checkpoint.reader import TensorReader
from unfreeze.checkpoint.resolve import resolve
from unfreeze.checkpoint.stream import stream
from unfreeze.core.errors import CheckpointError


def empty(kimi, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {name: torch.full(shape, 77, dtype=kind) for name, (kind, shape) in kimi.params(dtype).items()}


@pytest.fixture
def folder(tmp_path: Path, kimi) -> Path:
    return kimi.write(tmp_path / "m", kimi.tensors(), shards=3)


@pytest.mark.parametrize("forget", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_it_reads_what_stream_reads_as_often_as_asked(folder: Path, kimi, dtype: torch.dtype, forget) -> None:
    placements = resolve(open_checkpoint(folder), kimi.rules, kimi.params(dtype))
    wanted, found = empty(kimi, dtype), empty(kimi, dtype)
    total = stream(placements, wanted).bytes
    reader = TensorReader(forget=forget)
    part = reader.part(placements, found)
    for _ in range(3):
        for tensor in found.values():
            tensor.fill_(0)
        part.read()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert part.nbytes == total
    reader.close()


def test_torch_does_not_know_that_it_wrote(folder: Path, kimi) -> None:
    placements = resolve(open_checkpoint(folder), kimi.rules, kimi.params())
    found = empty(kimi, torch.bfloat16)
    before = {name: tensor._version for name, tensor in found.items()}
    TensorReader().part(placements, found).read()
    assert {name: tensor._version for name, tensor in found.items()} == before


def test_files_are_opened_once_and_closed(folder: Path, kimi) -> None:
    manifest = open_checkpoint(folder)
    placements = resolve(manifest, kimi.rules, kimi.params())

    def opened() -> int:
        return sum(Path(file.path).is_relative_to(folder) for file in psutil.Process().open_files())

    reader = TensorReader()
    parts = [reader.part(placements, empty(kimi, torch.bfloat16)) for _ in range(5)]
    for part in parts:
        part.read()
    assert opened() == len(manifest.files)
    reader.close()
    assert opened() == 0


def test_a_file_that_was_written_to_since_is_refused(folder: Path, kimi) -> None:
    manifest = open_checkpoint(folder)
    part = TensorReader().part(resolve(manifest, kimi.rules, kimi.params()), empty(kimi, torch.bfloat16))
    part.read()
    os.utime(manifest.files[1], ns=(0, 1))
    with pytest.raises(
        CheckpointError, match=rf"{manifest.files[1].name} was written to while it was in use"
    ):
        part.read()


def test_one_that_was_replaced_is_read_as_it_was(folder: Path, kimi) -> None:
    """A rename leaves the opened file as it was: the run goes on with the weights that it began with."""
    manifest = open_checkpoint(folder)
    found = empty(kimi, torch.bfloat16)
    part = TensorReader().part(resolve(manifest, kimi.rules, kimi.params()), found)
    part.read()
    wanted = {name: tensor.clone() for name, tensor in found.items()}
    other = folder / "other"
    other.write_bytes(bytes(manifest.files[0].stat().st_size))
    other.rename(manifest.files[0])
    part.read()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_file_that_ends_early_is_named(folder: Path, kimi) -> None:
    manifest = open_checkpoint(folder)
    part = TensorReader().part(resolve(manifest, kimi.rules, kimi.params()), empty(kimi, torch.bfloat16))
    os.truncate(manifest.files[0], manifest.files[0].stat().st_size // 2)
    with pytest.raises(CheckpointError, match=f"{manifest.files[0].name} ends at byte .* longer when"):
        part.read()


def test_a_disk_that_fails_is_one_line(folder: Path, kimi, monkeypatch) -> None:
    manifest = open_checkpoint(folder)
    part = TensorReader().part(resolve(manifest, kimi.rules, kimi.params()), empty(kimi, torch.bfloat16))

    def fails(*arguments: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("os.preadv", fails)
    with pytest.raises(CheckpointError, match="cannot be read: Input/output error") as caught:
        part.read()
    assert "the same command resumes the run" in caught.value.next


def test_a_file_that_is_gone_is_named(folder: Path, kimi) -> None:
    manifest = open_checkpoint(folder)
    placements = resolve(manifest, kimi.rules, kimi.params())
    manifest.files[0].unlink()
    with pytest.raises(CheckpointError, match=f"{manifest.files[0].name} cannot be read: No such file"):
        TensorReader().part(placements, empty(kimi, torch.bfloat16))
