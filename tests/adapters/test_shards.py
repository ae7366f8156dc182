"""An adapter in shards is the adapter in one file: to the bit, for every reader."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from unfreeze import models
from unfreeze.adapters import LoraConfig, attach, load_adapter, save_adapter
from unfreeze.adapters.attach import adapter_parameters
from unfreeze.adapters.files import read_files
from unfreeze.adapters.shards import remove_shards, save_index, save_shard, shard_name
from unfreeze.config.adapter import INDEX, WEIGHTS, lora_of
from unfreeze.core.errors import AdapterError
from unfreeze.parallel.placement.dispatch import split_experts
from unfreeze.parallel.processes.collectives import ALONE, Alone
from unfreeze.parallel.processes.mesh import Mesh

SHAPES = {
    "qwen2_moe": {
        "vocab_size": 40,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
        "num_experts": 7,
    },
    "gpt_oss": {  # its experts are transposed on disk, gate and up in turn
        "vocab_size": 40,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_local_experts": 5,
        "head_dim": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}
LORA = LoraConfig(rank=2, targets=("attention", "experts"), experts_rank=3)


class Place(Alone):
    def __init__(self, rank: int, size: int):
        self.rank, self.size = rank, size


def model(family: str, mesh: Mesh | None = None) -> models.Decoder:
    made = models.build(
        models.shape({**SHAPES[family], "model_type": family}), dtype=torch.float32, device="cpu"
    )
    models.initialize(made, 0)
    if mesh is not None:
        split_experts(made, mesh)
    attach(made, LORA, 0)
    return made


def trained(family: str) -> models.Decoder:
    made = model(family)
    torch.manual_seed(1)
    for _, parameter in adapter_parameters(made):
        parameter.data.normal_()
    return made


def in_shards(whole: models.Decoder, family: str, folder: Path, count: int, shift: int = 0) -> None:
    """What `count` processes write of the adapter. shift: each then writes other experts than its own."""
    values = dict(adapter_parameters(whole))
    sizes: list[int] = []
    for rank in range(count):
        mesh = Mesh(Place(rank, count), ALONE, Place(rank, count), whole.shape.num_experts)
        split = model(family, mesh)
        for name, parameter in adapter_parameters(split):
            rows = mesh.held(name).rows
            value = values[name] if rows is None else values[name].roll(shift, 0)[rows.slice]
            parameter.data.copy_(value)
        verified = save_shard(split, folder, rank, count)
        assert verified.max_difference < 1e-6 and verified.matrices
        sizes.append(len(mesh.rows_of(rank)))
    save_index(whole, folder, sizes, "base")


@pytest.mark.parametrize("family", SHAPES)
@pytest.mark.parametrize("count", [2, 3])
def test_shards_together_are_the_one_file(family, count, tmp_path):
    whole = trained(family)
    save_adapter(whole, tmp_path / "one", base_name="base")
    in_shards(whole, family, tmp_path / "many", count)
    assert sorted(file.name for file in (tmp_path / "many").glob("*.safetensors")) == [
        shard_name(index, count) for index in range(count)
    ]
    (config, tensors), (expected_config, expected) = (read_files(tmp_path / name) for name in ("many", "one"))
    assert config == expected_config and tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    assert lora_of(tmp_path / "many") == lora_of(tmp_path / "one")

    # onto a whole model, and onto one process's part
    read = model(family)
    load_adapter(read, tmp_path / "many")
    assert all(
        torch.equal(a, b)
        for (_, a), (_, b) in zip(adapter_parameters(read), adapter_parameters(whole), strict=True)
    )
    mesh = Mesh(Place(1, count), ALONE, Place(1, count), whole.shape.num_experts)
    part = model(family, mesh)
    load_adapter(part, tmp_path / "many")
    for (name, found), (_, value) in zip(adapter_parameters(part), adapter_parameters(whole), strict=True):
        rows = mesh.held(name).rows
        assert torch.equal(found, value if rows is None else value[rows.slice]), name


def test_shards_without_an_expert_are_the_first_alone(tmp_path):
    """Adapters on attention, here DoRA's: the second process has nothing to write."""
    whole = models.build(
        models.shape({**SHAPES["qwen2_moe"], "model_type": "qwen2_moe"}), dtype=torch.float32, device="cpu"
    )
    models.initialize(whole, 0)
    attach(whole, LoraConfig(rank=2, targets=("attention",), dora=True), 0)
    for rank in range(2):
        save_shard(whole, tmp_path / "many", rank, 2)
    save_index(whole, tmp_path / "many", [4, 3])
    assert [file.name for file in (tmp_path / "many").glob("*.safetensors")] == [shard_name(0, 2)]
    save_adapter(whole, tmp_path / "one")
    (config, tensors), (expected_config, expected) = (read_files(tmp_path / name) for name in ("many", "one"))
    assert config == expected_config and tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)


def test_control_arm_shards_of_other_experts_are_another_adapter(tmp_path):
    whole = trained("qwen2_moe")
    in_shards(whole, "qwen2_moe", tmp_path / "right", 2)
    in_shards(whole, "qwen2_moe", tmp_path / "shifted", 2, shift=1)
    right, shifted = (read_files(tmp_path / name)[1] for name in ("right", "shifted"))
    assert not all(torch.equal(right[name], shifted[name]) for name in right)


def test_a_fresh_adapter_is_the_same_on_any_number_of_processes():
    """Each A is drawn by its expert's own number (adapters/lora.py)."""
    whole = dict(adapter_parameters(model("qwen2_moe")))
    for rank in range(3):
        mesh = Mesh(Place(rank, 3), ALONE, Place(rank, 3), 7)
        for name, parameter in adapter_parameters(model("qwen2_moe", mesh)):
            rows = mesh.held(name).rows
            assert torch.equal(parameter, whole[name] if rows is None else whole[name][rows.slice]), name


def test_one_form_takes_the_place_of_the_other(tmp_path):
    whole = trained("qwen2_moe")
    in_shards(whole, "qwen2_moe", tmp_path, 3)
    in_shards(whole, "qwen2_moe", tmp_path, 2)
    assert not (tmp_path / shard_name(2, 3)).exists()
    save_adapter(whole, tmp_path)
    remove_shards(tmp_path)
    assert not (tmp_path / INDEX).exists() and not list(tmp_path.glob("adapter_model-*"))
    in_shards(whole, "qwen2_moe", tmp_path, 2)
    assert not (tmp_path / WEIGHTS).exists()


BROKEN = {
    "experts is": lambda index: index | {"experts": [7]},
    "experts is [4, 'x']": lambda index: index | {"experts": [4, "x"]},
    "do not fit each other": lambda index: index | {"experts": [1, 6]},
    "no weight_map": lambda index: index | {"weight_map": []},
    "not a shard's name": lambda index: index | {"weight_map": {"a": "../../secret.safetensors"}},
    "shards are missing": lambda index: (
        index | {"weight_map": {"a": "adapter_model-00009-of-00009.safetensors"}}
    ),
    "not in the shard that the index names": lambda index: (
        index | {"weight_map": index["weight_map"] | {"absent": shard_name(0, 2)}}
    ),
    "in a shard and not in the index": lambda index: (
        index | {"weight_map": dict(list(index["weight_map"].items())[1:])}
    ),
}


@pytest.mark.parametrize("said", BROKEN)
def test_an_index_that_is_none_is_refused_in_one_line(said, tmp_path):
    in_shards(trained("qwen2_moe"), "qwen2_moe", tmp_path, 2)
    path = tmp_path / INDEX
    path.write_text(json.dumps(BROKEN[said](json.loads(path.read_text()))))
    with pytest.raises(AdapterError) as caught:
        read_files(tmp_path)
    assert said in caught.value.message


def test_a_shard_that_is_cut_short_is_refused(tmp_path):
    in_shards(trained("qwen2_moe"), "qwen2_moe", tmp_path, 2)
    file = tmp_path / shard_name(1, 2)
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(AdapterError, match="damaged file"):
        read_files(tmp_path)
