"""Claims about resolve: each fault of docs/why/trust.md L7 that names, dtypes and shapes can show is one
CheckpointError; a good checkpoint has none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from unfreeze.checkpoint import open_checkpoint
from unfreeze.checkpoint.resolve import resolve
from unfreeze.core.errors import CheckpointError, ConfigError
from unfreeze.quant.formats import FOREIGN

GATE = "model.layers.0.mlp.experts.1.gate_proj."


@pytest.fixture
def refusal(tmp_path: Path, kimi) -> Callable[..., str]:
    """Write the given tensors, resolve them, return the message of the one error."""

    def run(
        tensors: dict[str, torch.Tensor], *, config: dict | None = None, params: dict | None = None
    ) -> str:
        manifest = open_checkpoint(kimi.write(tmp_path / "bad", tensors, config=config))
        with pytest.raises(CheckpointError) as caught:
            resolve(manifest, kimi.rules, params or kimi.params())
        assert "unfreeze inspect" in caught.value.next
        return caught.value.message

    return run


def test_every_element_is_covered_once(tmp_path: Path, kimi) -> None:
    manifest = open_checkpoint(kimi.write(tmp_path / "m", kimi.tensors(), shards=2))
    placements = resolve(manifest, kimi.rules, kimi.params())
    assert {placement.info.name for placement in placements} == set(manifest.tensors)
    for name, (_dtype, shape) in kimi.params().items():
        times = torch.zeros(shape, dtype=torch.int64)
        for placement in placements:
            if placement.param == name and placement.expected is None:
                times[placement.index] += 1
                flat = torch.zeros(shape, dtype=torch.int64)
                flat[placement.index] = 1
                assert torch.equal(
                    flat.view(-1).nonzero().view(-1), torch.arange(placement.start, placement.stop)
                )
        assert bool((times == 1).all()), name
    assert sum(p.expanded_bytes for p in placements) == 3 * 3 * 64 * 32 * 2 + (48 * 64 * 2 + 64) * 2 + 3 * 4


def test_missing_scale(kimi, refusal) -> None:
    tensors = kimi.tensors()
    del tensors[GATE + "weight_scale"]
    message = refusal(tensors)
    assert "1 of 30 tensors are missing" in message and GATE + "weight_scale" in message


def test_missing_expert_is_counted_as_one_error(kimi, refusal) -> None:
    message = refusal({name: tensor for name, tensor in kimi.tensors().items() if ".experts.2." not in name})
    assert (
        "6 of 22 tensors are missing; first: model.layers.0.mlp.experts.2.gate_proj.weight_packed" in message
    )


def test_missing_shape(kimi, refusal) -> None:
    tensors = kimi.tensors()
    del tensors[GATE + "weight_shape"]
    assert GATE + "weight_shape" in refusal(tensors)


def test_unexpected_tensor(kimi, refusal) -> None:
    message = refusal(kimi.tensors() | {"model.layers.7.norm.weight": torch.zeros(3)})
    assert "1 of 32 tensors are not part of the model; first: model.layers.7.norm.weight F32 [3]" in message


def test_ignored_by_rule(tmp_path: Path, kimi) -> None:
    """Vision tensors and multi-token-prediction layers are left aside by the model's own rules, and only
    they."""
    tensors = kimi.tensors("language_model.") | {
        "vision_tower.x": torch.zeros(1),
        "language_model.model.layers.1.eh_proj.weight": torch.zeros(1),
    }
    manifest = open_checkpoint(kimi.write(tmp_path / "m", tensors))
    ignore = (r"vision_tower\.", r"model\.layers\.1\..*")
    assert len(resolve(manifest, kimi.rules, kimi.params(), ignore=ignore)) == len(kimi.tensors())
    with pytest.raises(
        CheckpointError, match=r"not part of the model; first: language_model\.model\.layers\.1\.eh_proj"
    ):
        resolve(manifest, kimi.rules, kimi.params(), ignore=ignore[:1])


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        (GATE + "weight_packed", torch.int64),
        (GATE + "weight_packed", torch.float32),
        (GATE + "weight_scale", torch.int32),
        ("model.norm.weight", torch.int8),
        ("model.norm.weight", torch.float64),
        (GATE + "weight_shape", torch.float32),
    ],
)
def test_wrong_dtype(kimi, refusal, name: str, dtype: torch.dtype) -> None:
    tensors = kimi.tensors()
    tensors[name] = tensors[name].to(dtype)
    message = refusal(tensors)
    assert "wrong dtype" in message and name in message


def test_fp8_weights_are_named(kimi, refusal) -> None:
    tensors = kimi.tensors() | {
        "model.norm.weight": kimi.tensors()["model.norm.weight"].to(torch.float8_e4m3fn)
    }
    assert "FP8" in refusal(tensors)


def test_shape_mismatch(kimi, refusal) -> None:
    message = refusal(kimi.tensors() | {"lm_head.weight": torch.zeros(47, 64).bfloat16()})
    assert "lm_head.weight is [47, 64] on disk, config.json makes it [48, 64]" in message


def test_other_group_size_than_the_config_says(kimi, refusal) -> None:
    tensors = kimi.tensors()
    tensors[GATE + "weight_scale"] = torch.ones(32, 4).bfloat16()
    message = refusal(tensors)
    assert "wrong shape" in message and "group_size" in message


@pytest.mark.parametrize("codes", FOREIGN)
def test_a_format_that_is_not_read_is_named_by_its_tensors(kimi, refusal, codes: str) -> None:
    tensors = {name: tensor for name, tensor in kimi.tensors().items() if not name.startswith(GATE)}
    assert FOREIGN[codes] in refusal(tensors | {GATE + codes: torch.zeros(32, 8, dtype=torch.int32)})


def test_an_asymmetric_variant_with_the_same_codes_is_refused(kimi, refusal) -> None:
    tensors = {name: tensor for name, tensor in kimi.tensors().items() if not name.startswith(GATE)}
    suffixes = ("weight_packed", "weight_scale", "weight_zero_point")
    tensors |= {GATE + suffix: torch.zeros(32, 8, dtype=torch.int32) for suffix in suffixes}
    assert "wrong" in refusal(tensors)


def test_a_method_that_is_not_read_is_refused_by_name(tmp_path: Path, kimi) -> None:
    config = {"quantization_config": {"quant_method": "made-up"}}
    manifest = open_checkpoint(kimi.write(tmp_path / "m", kimi.tensors(), config=config))
    with pytest.raises(ConfigError, match="made-up"):
        resolve(manifest, kimi.rules, kimi.params())


def test_packed_without_a_config_that_says_so(kimi, refusal) -> None:
    stack = "model.layers.0.mlp.experts."
    params = {name: kind for name, kind in kimi.params().items() if ".experts." not in name}
    params |= {
        stack + "gate_up_proj.weight": (torch.bfloat16, (3, 64, 64)),
        stack + "down_proj.weight": (torch.bfloat16, (3, 64, 32)),
    }
    assert "quantization_config does not say so" in refusal(kimi.tensors(), config={}, params=params)


def test_unpacked_although_the_config_says_packed(kimi, refusal) -> None:
    tensors = {name: tensor for name, tensor in kimi.tensors().items() if not name.startswith(GATE)} | {
        GATE + "weight": torch.zeros(32, 64)
    }
    assert "stored unpacked" in refusal(tensors)


def test_tied_head(tmp_path: Path, kimi) -> None:
    """The embedding alone, the head alone, or both may be stored; neither is an error."""
    params = {name: kind for name, kind in kimi.params().items() if name != "lm_head.weight"}
    tied = {"lm_head.weight": "model.embed_tokens.weight"}
    for i, drop in enumerate(["lm_head.weight", "model.embed_tokens.weight", None]):
        tensors = {name: tensor for name, tensor in kimi.tensors().items() if name != drop}
        manifest = open_checkpoint(kimi.write(tmp_path / str(i), tensors))
        filled = [
            p
            for p in resolve(manifest, kimi.rules, params, tied=tied)
            if p.param == "model.embed_tokens.weight"
        ]
        assert [p.alias for p in filled] == ([False] if drop else [False, True])
    tensors = {
        name: tensor
        for name, tensor in kimi.tensors().items()
        if name not in ("lm_head.weight", "model.embed_tokens.weight")
    }
    with pytest.raises(CheckpointError, match=r"1 of 29 tensors are missing; first: model\.embed_tokens"):
        resolve(open_checkpoint(kimi.write(tmp_path / "x", tensors)), kimi.rules, params, tied=tied)


def test_fused_experts_as_transformers_may_write_them(tmp_path: Path, kimi) -> None:
    name = "model.layers.0.mlp.experts.gate_up_proj"
    manifest = open_checkpoint(kimi.write(tmp_path / "m", {name: torch.zeros(3, 64, 64)}, config={}))
    (placement,) = resolve(manifest, kimi.rules, {name + ".weight": (torch.float32, (3, 64, 64))})
    assert (placement.index, placement.start, placement.stop) == ((), 0, 3 * 64 * 64)
