"""Claims about the key map: what is taken apart goes back together, names are exact, and the inverse writes
what was read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from unfreeze.checkpoint import StackRule, TensorInfo, disk_tensors, open_checkpoint, unstack
from unfreeze.checkpoint.keymap import tensor_sources
from unfreeze.checkpoint.resolve import resolve
from unfreeze.checkpoint.stream import stream
from unfreeze.core.errors import CheckpointError
from unfreeze.quant import Int4
from unfreeze.quant.codec import kept_suffixes


def test_sources_name_experts_in_order_with_their_regions(kimi) -> None:
    found = tensor_sources("model.layers.12.mlp.experts.gate_up_proj.weight", (2, 8, 4), kimi.rules)
    stack = "model.layers.12.mlp.experts."
    assert [(source.name, source.index, source.shape) for source in found] == [
        (stack + "0.gate_proj.weight", (0, slice(0, 4)), (4, 4)),
        (stack + "0.up_proj.weight", (0, slice(4, 8)), (4, 4)),
        (stack + "1.gate_proj.weight", (1, slice(0, 4)), (4, 4)),
        (stack + "1.up_proj.weight", (1, slice(4, 8)), (4, 4)),
    ]
    assert tensor_sources("model.norm.weight", (4,), kimi.rules)[0].name == "model.norm.weight"


def test_fields_match_one_component_and_dots_are_literal() -> None:
    rules = [StackRule("a.{layer}.{expert}.x.{part}", "a.{layer}.x.{part}")]
    for param in ("a.1.x.weight.more", "a.one.x.weight", "aQ1.x.weight", "b.a.1.x.weight"):
        assert tensor_sources(param, (2, 3), rules)[0].name == param  # no rule applies
    assert tensor_sources("a.1.x.weight", (2, 3), rules)[1].name == "a.1.1.x.weight"


def test_unstack_gives_views_that_rebuild_the_parameter(kimi) -> None:
    name = "model.layers.0.mlp.experts.gate_up_proj.weight"
    stacked = torch.randn(3, 8, 4)
    parts = dict(unstack(name, stacked, kimi.rules))
    base = "model.layers.0.mlp.experts."
    again = torch.stack(
        [
            torch.cat([parts[f"{base}{e}.gate_proj.weight"], parts[f"{base}{e}.up_proj.weight"]])
            for e in range(3)
        ]
    )
    assert torch.equal(again, stacked)
    assert all(
        part.untyped_storage().data_ptr() == stacked.untyped_storage().data_ptr() for part in parts.values()
    )


def test_disk_tensors_add_the_shape_of_each_packed_weight(kimi) -> None:
    codec = Int4(32)
    parts = codec.quantize(torch.randn(2, 16, 64).bfloat16())
    params = [(f"model.layers.0.mlp.experts.gate_up_proj.{suffix}", part) for suffix, part in parts.items()]
    disk = dict(disk_tensors(params, kimi.rules, lambda module: codec))
    assert len(disk) == 2 * 2 * 3
    shape = disk["model.layers.0.mlp.experts.1.up_proj.weight_shape"]
    assert shape.dtype == torch.int32 and shape.tolist() == [8, 64]
    assert kept_suffixes(codec) == ("weight_packed", "weight_scale")


TRANSPOSED = (StackRule("layers.{layer}.experts.down", "layers.{layer}.mlp.down.weight", transposed=True),)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_transposed_tensor_is_read_and_written_as_it_was(tmp_path, dtype, monkeypatch):
    """[E, in, out] on disk, [E, out, in] in memory; read in pieces of a few rows, which do not cross a matrix."""
    monkeypatch.setattr("unfreeze.checkpoint.stream.CHUNK", 100)
    stored = torch.randn(3, 7, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"layers.0.experts.down": stored}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    params = {"layers.0.mlp.down.weight": torch.empty(3, 5, 7)}
    wanted = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in params.items()}
    placements = resolve(open_checkpoint(folder), TRANSPOSED, wanted)
    stream(placements, params)
    assert torch.equal(params["layers.0.mlp.down.weight"], stored.float().mT)
    written = dict(unstack("layers.0.mlp.down.weight", params["layers.0.mlp.down.weight"], TRANSPOSED))
    assert torch.equal(written["layers.0.experts.down"].to(dtype), stored)


@pytest.mark.parametrize("stored, transposed", [((3, 7, 5), True), ((3, 5, 7), False)])
def test_a_tensor_that_may_be_either_way_round_is_what_its_shape_says(stored, transposed):
    rule = StackRule(TRANSPOSED[0].disk, TRANSPOSED[0].param, transposed=True, either=True)
    disk = {"layers.0.experts.down": TensorInfo("layers.0.experts.down", "F32", stored, 420, Path("file"), 0)}
    (source,) = tensor_sources("layers.0.mlp.down.weight", (3, 5, 7), (rule,), disk)
    assert (source.shape, source.transposed) == (stored, transposed)


def test_control_without_the_mark_its_shape_is_refused(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"layers.0.experts.down": torch.zeros(3, 7, 5)}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    plain = (StackRule(TRANSPOSED[0].disk, TRANSPOSED[0].param),)
    with pytest.raises(CheckpointError, match=r"is \[3, 7, 5\] on disk"):
        resolve(open_checkpoint(folder), plain, {"layers.0.mlp.down.weight": (torch.float32, (3, 5, 7))})
