"""Claims about saving: files the safetensors library and transformers read, byte for byte what was loaded,
and never half of one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from unfreeze.checkpoint import disk_tensors, open_checkpoint, save_checkpoint, write_safetensors
from unfreeze.checkpoint.resolve import resolve
from unfreeze.checkpoint.stream import stream
from unfreeze.core.errors import CheckpointError
from unfreeze.quant import Int4

SHARED = Path(__file__).resolve().parents[3] / "shared"


def raw(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    return tensor.dtype, tuple(tensor.shape), tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def test_the_safetensors_library_reads_every_dtype(tmp_path: Path) -> None:
    kinds = [
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
    ]
    tensors = {str(kind): torch.arange(6).view(2, 3).to(kind) for kind in kinds}
    tensors |= {
        "scalar": torch.tensor(1.5),
        "empty": torch.zeros(0, 3),
        "strided": torch.arange(12.0).view(3, 4).T,
    }
    write_safetensors(tmp_path / "x.safetensors", tensors, {"format": "pt"})
    back = load_file(tmp_path / "x.safetensors")
    assert back.keys() == tensors.keys()
    assert all(
        torch.equal(back[name], tensors[name]) and back[name].dtype == tensors[name].dtype for name in tensors
    )
    assert list(tmp_path.iterdir()) == [tmp_path / "x.safetensors"]


def test_unknown_dtype_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="complex64"):
        write_safetensors(tmp_path / "x.safetensors", {"a": torch.zeros(1, dtype=torch.complex64)})
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("max_shard_bytes", [10**9, 4000])
def test_load_then_save_gives_the_same_bytes(tmp_path: Path, kimi, max_shard_bytes: int) -> None:
    manifest = open_checkpoint(kimi.write(tmp_path / "m", kimi.tensors()))
    params = {name: torch.empty(shape, dtype=kind) for name, (kind, shape) in kimi.params().items()}
    stream(resolve(manifest, kimi.rules, kimi.params()), params)
    out = disk_tensors(params.items(), kimi.rules, lambda module: Int4(32))
    save_checkpoint(
        tmp_path / "out", kimi.config, out, max_shard_bytes=max_shard_bytes, extra={"note.txt": "hello"}
    )
    saved = open_checkpoint(tmp_path / "out")
    assert (len(saved.files) > 1) == (max_shard_bytes == 4000) and (
        tmp_path / "out" / "note.txt"
    ).read_text() == "hello"
    again = {name: raw(tensor) for file in saved.files for name, tensor in load_file(file).items()}
    assert again == {name: raw(tensor) for name, tensor in kimi.tensors().items()}
    assert saved.config == json.loads((tmp_path / "m" / "config.json").read_text())


def test_shared_kimi_checkpoint_survives_load_and_save_byte_for_byte(tmp_path: Path, kimi) -> None:
    folder = SHARED / "data" / "tiny-kimi-int4"
    if not folder.is_dir():
        pytest.skip(f"{folder} is not here; test_load_then_save_gives_the_same_bytes covers the same ground")
    disk = load_file(folder / "model-00001-of-00001.safetensors")
    params: dict[str, torch.Tensor] = {}
    for name, tensor in disk.items():
        if ".experts." in name:
            layer = name.split(".experts.")[0]
            part = name.rpartition(".")[2]
            if part == "weight_shape":
                continue
            stacked = (
                (8, tensor.shape[0], *tensor.shape[1:])
                if "down_proj" in name
                else (8, 2 * tensor.shape[0], *tensor.shape[1:])
            )
            params[f"{layer}.experts.{'down_proj' if 'down_proj' in name else 'gate_up_proj'}.{part}"] = (
                tensor.new_zeros(stacked)
            )
        else:
            params[name] = torch.zeros_like(tensor)
    kinds = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in params.items()}
    manifest = open_checkpoint(folder)
    stream(resolve(manifest, kimi.rules, kinds), params)
    save_checkpoint(
        tmp_path / "out", manifest.config, disk_tensors(params.items(), kimi.rules, lambda module: Int4(32))
    )
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert {name: raw(tensor) for name, tensor in saved.items()} == {
        name: raw(tensor) for name, tensor in disk.items()
    }


def test_an_interrupted_save_leaves_nothing(tmp_path: Path, kimi) -> None:
    def breaks():
        yield "a", torch.zeros(4)
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError):
        save_checkpoint(tmp_path / "out", {}, breaks())
    assert not any(tmp_path.iterdir())


def test_an_interrupted_write_keeps_the_old_file(tmp_path: Path, monkeypatch) -> None:
    file = tmp_path / "x.safetensors"
    write_safetensors(file, {"a": torch.zeros(2)})
    before = file.read_bytes()

    def fail(_: int) -> None:
        raise OSError("no space")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError):
        write_safetensors(file, {"a": torch.ones(2)})
    assert file.read_bytes() == before and list(tmp_path.iterdir()) == [file]


def test_a_folder_with_content_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    save_checkpoint(tmp_path / "out", {}, [("a", torch.zeros(1))])  # empty: taken
    with pytest.raises(CheckpointError, match="not empty"):
        save_checkpoint(tmp_path / "out", {}, [("a", torch.zeros(1))])
    with pytest.raises(CheckpointError, match="saved twice"):
        save_checkpoint(tmp_path / "out2", {}, [("a", torch.zeros(1)), ("a", torch.zeros(1))])


def test_transformers_loads_what_was_saved(tmp_path: Path, kimi) -> None:
    """Round trip through stacked experts with transformers on both ends: qwen3_moe, its weights back
    unchanged."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=1,
        num_experts=4,
        num_experts_per_tok=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=64,
    )
    theirs = AutoModelForCausalLM.from_config(config)
    theirs.save_pretrained(tmp_path / "hf")
    manifest = open_checkpoint(tmp_path / "hf")
    stack = "model.layers.0.mlp.experts."
    kinds = {
        name: (torch.float32, info.shape)
        for name, info in manifest.tensors.items()
        if ".experts." not in name
    }
    kinds |= {
        stack + "gate_up_proj.weight": (torch.float32, (4, 32, 32)),
        stack + "down_proj.weight": (torch.float32, (4, 32, 16)),
    }
    params = {name: torch.empty(shape, dtype=kind) for name, (kind, shape) in kinds.items()}
    stream(resolve(manifest, kimi.rules, kinds), params)
    save_checkpoint(
        tmp_path / "out", manifest.config, disk_tensors(params.items(), kimi.rules), max_shard_bytes=20_000
    )
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert again.keys() == theirs.state_dict().keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in theirs.state_dict().items())
    # transformers' other spelling, experts fused on disk, gives the same parameters
    theirs.save_pretrained(tmp_path / "fused", save_original_format=False)
    fused = {name: torch.empty_like(tensor) for name, tensor in params.items()}
    rules = (
        *kimi.rules,
        type(kimi.rules[0])(
            kimi.rules[3].disk.replace("gate_up", "down"), kimi.rules[3].param.replace("gate_up", "down")
        ),
    )
    stream(resolve(open_checkpoint(tmp_path / "fused"), rules, kinds), fused)
    assert all(torch.equal(fused[name], params[name]) for name in params)
