"""zstd files are read like the files they were made of, at any place, and damaged ones are named."""

from __future__ import annotations

import io
import json
import random
import sys

import pytest

from unfreeze.core.errors import DataError
from unfreeze.data import read_rows
from unfreeze.data.rows.files import Again, read_places
from unfreeze.data.rows.packed import open_bytes, unpacked_size

zstandard = pytest.importorskip("zstandard")
ROWS = [{"text": f"row {i} " + "words " * (i % 90)} for i in range(3000)]
CONTENT = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def test_rows_of_a_zstd_file_can_be_read_in_any_order(tmp_path):
    path = tmp_path / "rows.jsonl.zst"
    path.write_bytes(zstandard.compress(CONTENT))
    places = list(read_places(path))
    assert [row.text for _, row in places] == [row["text"] for row in ROWS]
    again = Again(path)
    for place, row in random.Random(0).sample(places, 20):
        assert again(place) == row
    assert unpacked_size(path) == len(CONTENT)


def test_reading_and_seeking_is_that_of_the_content(tmp_path):
    path = tmp_path / "rows.jsonl.zst"
    path.write_bytes(zstandard.compress(CONTENT[:1000]) + zstandard.compress(CONTENT[1000:]))  # two frames
    oracle, rng = io.BytesIO(CONTENT), random.Random(1)
    with open_bytes(path) as file:
        assert file.read() == CONTENT
        for _ in range(50):
            at, count = rng.randrange(len(CONTENT)), rng.randrange(5000)
            assert file.seek(at) == oracle.seek(at) and file.read(count) == oracle.read(count)


def test_a_text_file_is_read_twice(tmp_path):
    path = tmp_path / "a.txt.zst"
    path.write_bytes(zstandard.compress(b"one\n\ntwo\n<|endoftext|>\nthree\n"))
    assert [row.text for row in read_rows(path)] == ["one\n\ntwo", "three"]


@pytest.mark.parametrize("damage", ["cut", "noise", "frame"])
def test_a_damaged_file_is_named(tmp_path, damage):
    whole = zstandard.compress(CONTENT)
    path = tmp_path / "rows.jsonl.zst"
    path.write_bytes(
        {"cut": whole[: len(whole) // 2], "noise": b"{}\n" * 99, "frame": whole + whole[:20]}[damage]
    )
    with pytest.raises(DataError, match=r"rows\.jsonl\.zst cannot be decompressed as zstd"):
        list(read_rows(path))


def test_a_file_of_another_name_is_recognised(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(zstandard.compress(CONTENT))
    with pytest.raises(DataError, match=r"is \.zst, not \.jsonl") as error:
        list(read_rows(path))
    assert error.value.next.endswith("rows.jsonl.zst")


def test_a_bomb_is_read_in_bounded_pieces(tmp_path):
    """300 MB of zeros in a few kilobytes: at most 32 MiB are in memory at a time."""
    import tracemalloc

    path = tmp_path / "bomb.jsonl.zst"
    packer = zstandard.ZstdCompressor(level=1).compressobj()
    path.write_bytes(b"".join([*(packer.compress(bytes(2**20)) for _ in range(300)), packer.flush()]))
    tracemalloc.start()
    with open_bytes(path) as file:
        assert len(file.read(100)) == 100
    assert tracemalloc.get_traced_memory()[1] < 70 * 2**20  # the piece, and a copy while it is divided
    tracemalloc.stop()


def test_a_missing_library_is_named(tmp_path, monkeypatch):
    path = tmp_path / "rows.jsonl.zst"
    path.write_bytes(zstandard.compress(CONTENT))
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(DataError, match="needs the library zstandard") as error:
        list(read_rows(path))
    assert error.value.next == "pip install zstandard"
