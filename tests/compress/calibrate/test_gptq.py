"""GPTQ against its formula in a float64 loop, against llm-compressor's, and by what it is for: a smaller error
on the inputs; and every format's columns against the format's own quantizer and reader."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

from tests.compress.calibrate.gptq_inputs import inputs
from unfreeze.compress.calibrate import gptq
from unfreeze.compress.calibrate.gptq import Hessian, correct, inverse_factor, output_error, rounded_in_order
from unfreeze.compress.quantize.formats import FORMATS, nearest
from unfreeze.core.errors import CheckpointError
from unfreeze.quant import Fp8, Int4
from unfreeze.quant.bitsandbytes import Bits4
from unfreeze.quant.columns import Run, columns_of
from unfreeze.quant.fp8_scaled import MATRIX, Fp8Scaled
from unfreeze.quant.integers import ROW, Integers
from unfreeze.quant.mxfp4 import BLOCKS, Mxfp4
from unfreeze.quant.nvfp4 import MODELOPT, Nvfp4

CODECS = {
    **FORMATS,
    "int8 groups": Integers(8, 64),
    "fp8 blocks": Fp8((4, 64)),
    "fp8 blocks, bytes": Fp8((4, 64), "F8_E8M0"),
    "fp8 matrix": Fp8Scaled(MATRIX),
    "mxfp4 blocks": Mxfp4(BLOCKS),
    "nvfp4 modelopt": Nvfp4(MODELOPT),
    "nf4 plain": Bits4(double=False),
    "fp4": Bits4("fp4", double=False),
}
RECORDED = json.loads((Path(__file__).parent / "llm_compressor.json").read_text())


def hessian_of(X: torch.Tensor) -> torch.Tensor:
    hessian = Hessian(X.shape[1])
    for part in X.split(250):
        hessian.add(part)
    return hessian.matrix


def by_the_formula(W: torch.Tensor, H: torch.Tensor, columns, damping: float = 0.01) -> torch.Tensor:
    """The paper's equations 2 and 3, one column at a time, with the inverse itself: no Cholesky, no blocks.

    After column j:  w -= (w_j - q_j) / [H⁻¹]_jj · [H⁻¹]_j,: and H⁻¹ -= [H⁻¹]_:,j [H⁻¹]_j,: / [H⁻¹]_jj.
    """
    W, H = W.clone(), H.double()
    inverse = (H + damping * H.diagonal().mean() * torch.eye(len(H), dtype=torch.float64)).inverse()
    Q = torch.zeros_like(W)
    for j in range(W.shape[1]):
        if j % columns.width == 0:
            run = columns.fit(W[:, j : j + columns.width], j)
        Q[:, j] = columns.nearest(W[:, j], run)
        W -= torch.outer((W[:, j] - Q[:, j]) / inverse[j, j], inverse[j])
        inverse = inverse - torch.outer(inverse[:, j], inverse[j]) / inverse[j, j]
    return Q


@pytest.mark.parametrize("name", ["int4", "int8", "fp8", "nvfp4", "nf4", "int8 groups", "fp8 blocks"])
def test_it_is_the_formula_in_float64(name: str) -> None:
    W, X = inputs(1)
    W, H = W.double(), hessian_of(X)
    columns = columns_of(CODECS[name], W)
    expected = by_the_formula(W, H, columns)
    Q, runs = rounded_in_order(W, inverse_factor(H), columns)
    assert torch.equal(Q, expected)
    assert len(runs) == W.shape[1] // columns.width
    # control arm: a wrong damping, which moves every correction a little, is seen
    assert not torch.equal(rounded_in_order(W, inverse_factor(H, 0.02), columns)[0], expected)


class Planted:
    """rounded_in_order with its correction of the wrong sign."""

    @staticmethod
    def upside_down(W, U, columns):
        turned = U.clone()
        turned[torch.ones_like(U).triu(1).bool()] *= -1
        return rounded_in_order(W, turned, columns)


@pytest.mark.parametrize("name, columns_in_all", [("int4", 320), ("mxfp4", 192)])
def test_float32_in_blocks_is_close_to_float64_without(name: str, columns_in_all: int) -> None:
    """Two blocks and more, the last one shorter: a tie aside, the same codes."""
    W, X = inputs(2, columns=columns_in_all)
    H = hessian_of(X)
    Q, _ = rounded_in_order(W, inverse_factor(H), columns_of(CODECS[name], W))
    expected = by_the_formula(W.double(), H, columns_of(CODECS[name], W))
    assert (Q.double() != expected).float().mean() < 0.005
    wrong, _ = Planted.upside_down(W, inverse_factor(H), columns_of(CODECS[name], W))
    assert (wrong.double() != expected).float().mean() > 0.2


@pytest.mark.parametrize("name", CODECS)
def test_its_error_on_the_inputs_is_smaller_than_that_of_the_nearest(name: str) -> None:
    W, X = inputs(3, rows=8)
    H, codec = hessian_of(X), CODECS[name]
    plain = nearest(W, codec, "")
    result = correct(W, H, inverse_factor(H), codec, plain)
    assert result is not None and result.kept and result.error < 0.9 * result.nearest

    def error(parts) -> float:  # ‖X(W − Ŵ)‖² from the inputs themselves, as a reader sees the weight
        return float((X.double() @ (W - codec.dequantize(parts).float()).double().t()).square().sum())

    assert error(result.parts) < 0.9 * error(plain)
    assert 2 / len(X) * error(result.parts) == pytest.approx(result.error, rel=1e-4)
    shapes = {suffix: part for suffix, (_, part) in codec.parts(*W.shape).items()}
    assert {suffix: tuple(part.shape) for suffix, part in result.parts.items()} == shapes
    assert {suffix: part.dtype for suffix, part in result.parts.items()} == {
        suffix: part.dtype for suffix, part in plain.items()
    }


def test_control_arm_a_wrong_sign_makes_the_error_larger(monkeypatch: pytest.MonkeyPatch) -> None:
    """And then the matrix is rounded to the nearest: never worse than that on the inputs."""
    W, X = inputs(3, rows=8)
    H, codec = hessian_of(X), CODECS["int4"]
    plain = nearest(W, codec, "")
    right = rounded_in_order
    assert gptq.rounded_in_order is right
    monkeypatch.setattr(gptq, "rounded_in_order", Planted.upside_down)
    result = correct(W, H, inverse_factor(H), codec, plain)
    assert result is not None and not result.kept and result.parts is plain
    assert result.error == result.nearest


@pytest.mark.parametrize("name", CODECS)
def test_independent_inputs_give_the_formats_own_rounding(name: str) -> None:
    """H diagonal: nothing to correct. Doubly quantized NF4 differs: bitsandbytes' codes are those of the
    unrounded absmax."""
    W, _ = inputs(4, rows=8)
    W, codec = W.bfloat16().float(), CODECS[name]
    U = inverse_factor(torch.rand(W.shape[1]).add(0.1).diag())
    columns = columns_of(codec, W)
    values, runs = rounded_in_order(W, U, columns)
    parts = columns.parts(values, runs)
    assert torch.equal(codec.dequantize(parts).float(), values)
    if isinstance(codec, Bits4) and codec.double:
        off, own = ((W - codec.dequantize(each).float()).norm() for each in (parts, codec.quantize(W)))
        assert off <= own
        return
    expected = nearest(W, codec, "")
    differs = (codec.dequantize(parts).float() != codec.dequantize(expected).float()).float().mean()
    # FP8 in blocks multiplies by 448 / absmax for codes, and stores absmax / 448: a tie may fall the other way
    assert differs == 0 or (name.startswith("fp8 blocks") and differs < 0.005)
    if not name.startswith(("fp8 blocks", "nvfp4")):  # NVFP4 has two codes of 0
        for suffix, part in parts.items():
            assert torch.equal(
                part.reshape(-1).view(torch.uint8), expected[suffix].reshape(-1).view(torch.uint8)
            )


def unpacked(rows: list[str]) -> torch.Tensor:
    return torch.tensor([list(bytes.fromhex(row)) for row in rows], dtype=torch.uint8).view(torch.int8)


def test_it_is_llm_compressors_int8_code_by_code() -> None:
    """Recorded with llmcompressor 0.14.0.1; one scale a row, so that both have the same scales."""
    W, X = inputs()
    codec = Integers(8, ROW, scale_dtype="F32")
    columns = columns_of(codec, W)
    parts = columns.parts(*rounded_in_order(W, inverse_factor(hessian_of(X)), columns))
    codes = (codec.dequantize(parts) / parts[codec.suffixes[1]]).round().to(torch.int8)
    assert torch.equal(codes, unpacked(RECORDED["int8"]))
    without = nearest(W, codec, "")
    plain = (codec.dequantize(without) / without[codec.suffixes[1]]).round().to(torch.int8)
    assert not torch.equal(plain, unpacked(RECORDED["int8"]))


def test_in_groups_it_is_llm_compressors_with_its_scales() -> None:
    """llm-compressor's scales of a group come from the weights before any correction: so here for once."""
    W, X = inputs()
    codec = Int4(32)
    scale_OG = codec.quantize(W)[codec.suffixes[1]].float()

    class Before(type(columns_of(codec, W))):
        def fit(self, weight_Ow: torch.Tensor, first: int) -> Run:
            place = first // self.width
            return Run(scale_OG[:, place : place + 1], scale_OG[:, place])

        def level(self, steps_O: torch.Tensor) -> torch.Tensor:
            return steps_O.round().clamp(-8, 7)

    columns = Before(codec, 32, {})
    values, _ = rounded_in_order(W, inverse_factor(hessian_of(X)), columns)
    codes = (values / scale_OG.repeat_interleave(32, 1)).round().to(torch.int8)
    assert torch.equal(codes, unpacked(RECORDED["int4"]))


@pytest.mark.parametrize(
    "name, format, arguments",
    [
        ("int4", "pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32}),
        ("int8", "pack-quantized", {"num_bits": 8, "strategy": "channel"}),
        ("fp8", "float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
        (
            "nvfp4",
            "nvfp4-pack-quantized",
            {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
        ),
    ],
)
def test_compressed_tensors_reads_the_result(name: str, format: str, arguments: dict) -> None:
    W, X = inputs(5)
    H, codec = hessian_of(X), CODECS[name]
    result = correct(W, H, inverse_factor(H), codec, nearest(W, codec, ""))
    assert result is not None
    extras = codec.disk_extras(*W.shape)
    state = {**result.parts, **{suffix: torch.tensor(numbers) for suffix, numbers in extras.items()}}
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**arguments), format=format)
    read = BaseCompressor.get_value_from_registry(format).decompress(state, scheme)["weight"]
    assert torch.equal(read.float(), codec.dequantize(result.parts).float())


def test_a_column_without_input_is_rounded_to_the_nearest_and_moves_nothing() -> None:
    W, X = inputs(6)
    X[:, [3, 100]] = 0
    columns, H = columns_of(CODECS["int8"], W), hessian_of(X)
    Q, _ = rounded_in_order(W, inverse_factor(H), columns)
    plain = CODECS["int8"].dequantize(nearest(W, CODECS["int8"], "")).float()
    assert torch.equal(Q[:, 3], plain[:, 3])
    other = W.clone()
    other[:, 3] *= 0.5
    again, _ = rounded_in_order(other, inverse_factor(H), columns_of(CODECS["int8"], other))
    same = [column for column in range(W.shape[1]) if column != 3]
    assert torch.equal(again[:, same], Q[:, same])


def test_no_input_at_all_and_one_that_is_not_finite() -> None:
    W, _ = inputs(7)
    assert torch.equal(inverse_factor(torch.zeros(4, 4)), torch.eye(4, dtype=torch.float64))
    with pytest.raises(CheckpointError, match="NaN or infinite"):
        inverse_factor(torch.full((4, 4), float("nan")))
    indefinite = torch.ones(64, 64) - 0.02 * torch.eye(64)  # smallest eigenvalue -0.02: damped 10 times
    assert inverse_factor(indefinite).isfinite().all()
    assert output_error(W, torch.eye(W.shape[1])) == pytest.approx(float(W.double().square().sum()), rel=1e-6)


def test_formats_whose_codes_need_the_whole_matrix_are_left_to_the_nearest() -> None:
    W, _ = inputs(8)
    assert columns_of(Integers(4, 64, zeros=True), W) is None
    assert columns_of(Integers(4, 64, permuted=True), W) is None
    assert columns_of(Bits4(), W[:, :96]) is None and columns_of(Bits4(), W) is not None
    assert columns_of(replace(Bits4(), block=32), W[:, :96]) is not None
