"""Claims about stream: the bytes that the safetensors library reads, in place; what only the contents can
show is refused (docs/why/trust.md L7)."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from unfreeze.checkpoint import LoadStats, open_checkpoint
from unfreeze.checkpoint.resolve import resolve
from unfreeze.checkpoint.stream import stream
from unfreeze.core.errors import CheckpointError
from unfreeze.quant import Int4


def load(
    manifest, kimi, dtype: torch.dtype = torch.bfloat16, **options: object
) -> tuple[dict[str, torch.Tensor], LoadStats]:
    params = kimi.params(dtype)
    tensors = {name: torch.full(shape, 77, dtype=kind) for name, (kind, shape) in params.items()}
    stats = stream(resolve(manifest, kimi.rules, params, **options), tensors)
    return tensors, stats


def expected(disk: dict[str, torch.Tensor], part: str) -> tuple[torch.Tensor, torch.Tensor]:
    """gate_up and down, stacked with plain torch."""
    base = "model.layers.0.mlp.experts."
    gate_up = torch.stack(
        [
            torch.cat([disk[f"{base}{e}.gate_proj.{part}"], disk[f"{base}{e}.up_proj.{part}"]])
            for e in range(3)
        ]
    )
    return gate_up, torch.stack([disk[f"{base}{e}.down_proj.{part}"] for e in range(3)])


@pytest.mark.parametrize("chunk", [64, 4096, 16 * 2**20])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_values_arrive_where_they_belong(
    tmp_path: Path, kimi, monkeypatch, chunk: int, dtype: torch.dtype
) -> None:
    # the package exports the function under its name
    monkeypatch.setattr(sys.modules[stream.__module__], "CHUNK", chunk)
    manifest = open_checkpoint(kimi.write(tmp_path / "m", kimi.tensors(), shards=3))
    tensors, stats = load(manifest, kimi, dtype)
    disk = kimi.tensors()
    for part in ("weight_packed", "weight_scale"):
        gate_up, down = expected(disk, part)
        assert torch.equal(tensors[f"model.layers.0.mlp.experts.gate_up_proj.{part}"], gate_up)
        assert torch.equal(tensors[f"model.layers.0.mlp.experts.down_proj.{part}"], down)
    for name in (
        "model.embed_tokens.weight",
        "model.norm.weight",
        "lm_head.weight",
        "model.layers.0.mlp.gate.e_score_correction_bias",
    ):
        assert torch.equal(tensors[name], disk[name].to(tensors[name].dtype))
    assert stats.bytes == manifest.nbytes and stats.rounded == 0 and stats.expanded_bytes > stats.bytes


def test_progress_counts_to_the_end(tmp_path: Path, kimi) -> None:
    manifest = open_checkpoint(kimi.write(tmp_path / "m", kimi.tensors(), shards=2))
    tensors = {name: torch.empty(shape, dtype=kind) for name, (kind, shape) in kimi.params().items()}
    seen: list[tuple[int, int]] = []
    stream(
        resolve(manifest, kimi.rules, kimi.params()), tensors, lambda done, total: seen.append((done, total))
    )
    assert seen[-1] == (manifest.nbytes, manifest.nbytes) and seen == sorted(seen)


def test_f16_scales_and_i64_shapes_of_other_writers(tmp_path: Path, kimi) -> None:
    tensors = kimi.tensors()
    for name in tensors:
        if name.endswith("weight_scale"):
            tensors[name] = tensors[name].to(torch.float16)
        if name.endswith("weight_shape"):
            tensors[name] = tensors[name].to(torch.int64)
    loaded, stats = load(open_checkpoint(kimi.write(tmp_path / "m", tensors)), kimi)
    assert torch.equal(
        loaded["model.layers.0.mlp.experts.down_proj.weight_scale"],
        expected(kimi.tensors(), "weight_scale")[1],
    )
    assert stats.rounded == 0  # these F16 scales came from bf16 and are exact in it
    name = "model.layers.0.mlp.experts.0.down_proj.weight_scale"
    tensors[name] = torch.full_like(tensors[name], 0.1)  # F16 has 3 more bits than bf16: not exact
    loaded, stats = load(open_checkpoint(kimi.write(tmp_path / "n", tensors)), kimi)
    assert (
        stats.rounded == 1
        and loaded["model.layers.0.mlp.experts.down_proj.weight_scale"][0, 0, 0]
        == torch.tensor(0.1).half().bfloat16()
    )


def test_weight_shape_that_disagrees_with_the_packed_tensor(tmp_path: Path, kimi) -> None:
    """A format that packs along the output dimension has the same names and, on a square matrix, the same
    shapes, but another weight_shape."""
    tensors = kimi.tensors()
    tensors["model.layers.0.mlp.experts.1.down_proj.weight_shape"] = torch.tensor([32, 64], dtype=torch.int32)
    manifest = open_checkpoint(kimi.write(tmp_path / "m", tensors))
    with pytest.raises(
        CheckpointError,
        match=(
            r"experts\.1\.down_proj\.weight_shape says \[32, 64\], .* holds \[64, 32\].*another nibble format"
        ),
    ):
        load(manifest, kimi)


def test_file_that_shrank_since_it_was_opened(tmp_path: Path, kimi) -> None:
    manifest = open_checkpoint(kimi.write(tmp_path / "m", kimi.tensors()))
    os.truncate(manifest.files[0], manifest.files[0].stat().st_size // 2)
    with pytest.raises(CheckpointError, match="longer when it was opened"):
        load(manifest, kimi)


def test_tied_head_that_differs(tmp_path: Path, kimi) -> None:
    tensors = kimi.tensors()
    params = {name: kind for name, kind in kimi.params().items() if name != "lm_head.weight"}
    memory = {name: torch.empty(shape, dtype=kind) for name, (kind, shape) in params.items()}
    tied = {"lm_head.weight": "model.embed_tokens.weight"}
    manifest = open_checkpoint(kimi.write(tmp_path / "m", tensors))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs"):
        stream(resolve(manifest, kimi.rules, params, tied=tied), memory)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    manifest = open_checkpoint(kimi.write(tmp_path / "n", tensors))
    stream(resolve(manifest, kimi.rules, params, tied=tied), memory)
    assert torch.equal(memory["model.embed_tokens.weight"], tensors["lm_head.weight"])


def test_loaded_experts_dequantize_as_on_disk(tmp_path: Path, kimi) -> None:
    tensors, _stats = load(open_checkpoint(kimi.write(tmp_path / "m", kimi.tensors())), kimi)
    disk, base = kimi.tensors(), "model.layers.0.mlp.experts."
    stacked = Int4(32).dequantize(
        {part: tensors[f"{base}gate_up_proj.{part}"] for part in ("weight_packed", "weight_scale")}
    )
    alone = Int4(32).dequantize(
        {part: disk[f"{base}2.up_proj.{part}"] for part in ("weight_packed", "weight_scale")}
    )
    assert torch.equal(stacked[2, 32:], alone)
