"""bench beyond: the whole on a tiny shape, with the same losses on both sides, and what it refuses."""

import shutil
from collections import namedtuple

import pytest

from benchmarks.cases import beyond
from benchmarks.harness.rows import read
from unfreeze.core.command import Common
from unfreeze.core.errors import ConfigError, DoesNotFit


def tiny(tiny_sizes):
    return {name: size for name, size in tiny_sizes.items() if name != "num_hidden_layers"}


@pytest.mark.nightly
def test_both_sides_have_a_row_and_the_same_losses(tmp_path, tiny_sizes):
    path, folder = tmp_path / "rows.jsonl", tmp_path / "kept"
    config = beyond.Config(
        append=str(path),
        gigabytes=1.2e-4,
        tokens=512,
        steps=2,
        beside=True,
        threads=1,
        checkpoint=str(folder),
    )
    beyond.measure(config, Common(quiet=True), tiny(tiny_sizes), length=32)
    rows = {row.side: row for row in read(path)}
    streamed, resident = rows["experts from disk"], rows["experts in memory"]
    layers = streamed.settings["shape"]["num_hidden_layers"] - 1
    assert layers == 5 and streamed.results["reads"] == [2 * layers - 4] * 2
    assert streamed.results["experts_trained"] == streamed.results["experts"] == 8 * layers
    assert streamed.results["losses"] == resident.results["losses"]
    assert streamed.results["correctness"] == {"losses, against the other side": 0.0}
    assert resident.results["first_side_speed"] > 0
    assert (folder / "model" / "config.json").is_file()

    # found the next time; another size is refused, and --clean removes it
    with pytest.raises(ConfigError, match="holds another model"):
        beyond.measure(config.model_copy(update={"gigabytes": 1.0}), Common(quiet=True), tiny(tiny_sizes), 32)
    with beyond.checkpoint(
        config.model_copy(update={"clean": True}),
        beyond.model_of(1.2e-4, tiny(tiny_sizes)),
        Common(quiet=True),
    ) as found:
        assert found == folder / "model"
    assert not found.exists()


def test_a_disk_without_room_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**10, 0, 10**10))
    config = beyond.Config(gigabytes=12, checkpoint=str(tmp_path))
    with pytest.raises(DoesNotFit, match=r"gigabytes = 12 takes 13\.4 GiB"):
        beyond.measure(config, Common(quiet=True))
    assert not list(tmp_path.rglob("*.safetensors"))


def test_the_model_is_as_large_as_asked():
    made = beyond.model_of(12, {})
    layers = made["num_hidden_layers"] - 1
    each = 10 * 3 * 2048 * 8192 * (4 + 16 / 32) / 8
    assert (layers - 1) * each < 12e9 <= layers * each and layers >= 24
