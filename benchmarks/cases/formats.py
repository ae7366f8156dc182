"""Time experts in each quantized format: whole training steps, and the expert op alone.

`unfreeze dev bench formats`, about 6 minutes.

Steps: the model and the job of `unfreeze dev bench moe` (LoRA rank 8 on attention and all experts, 2,048
tokens a step), its experts in INT4, FP8 with block scales and MXFP4, in turn. How much memory the process has after
the first and after the last step stands beside.
Experts: one layer's experts (hidden 1024, width 512, 32 of them, top-8, 512 tokens), forward and backward
with LoRA rank 8 in bf16, for every format that is read; beside it the same in plain torch, where each expert
is dequantized and multiplied.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import Field

from benchmarks.harness.training import (
    MeasuredInTurn,
    appended_to,
    both_sizes,
    command,
    computed_here,
    float64,
    say,
    show,
    step_in_turn,
)
from unfreeze.config.parse import parse
from unfreeze.core.command import Common
from unfreeze.report.tables import align

if TYPE_CHECKING:
    from torch import Tensor

    from benchmarks.harness.rows import Row
    from unfreeze.quant.codec import Codec, Packed

RANK, DOCUMENTS, LENGTH = 8, 4, 512
LORA: dict[str, Any] = {"rank": RANK, "alpha": 2.0 * RANK, "targets": ("attention", "experts")}
LAYER = {"experts": 32, "hidden": 1024, "width": 512, "tokens": 512, "per_token": 8}
SHARED = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"]
CONFIGS: dict[str, dict[str, Any] | None] = {
    "int4": None,  # as kimi.config has it
    "fp8": {
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["self_attn", "shared_experts", "model.layers.0.mlp"],
    },
    "mxfp4": {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    "num_bits": 4,
                    "type": "float",
                    "symmetric": True,
                    "strategy": "group",
                    "group_size": 32,
                },
            }
        },
        "ignore": SHARED,
    },
}
"""Format -> the quantization_config of the model that steps."""


class Config(MeasuredInTurn):
    """What is measured."""

    repeats: int = Field(default=9, ge=1, description="timed calls of each format's expert op; the median")
    skip_steps: bool = Field(default=False, description="measure the expert op only")


def main(arguments: list[str], common: Common) -> dict[str, Any]:
    """-> rows, file."""
    return measure(parse(Config, arguments, command="dev bench formats", description=__doc__ or ""), common)


def measure(
    config: Config,
    common: Common,
    sizes: Mapping[str, int] | None = None,
    checked: Mapping[str, int] | None = None,
    layer: Mapping[str, int] | None = None,
    documents: int = DOCUMENTS,
    length: int = LENGTH,
) -> dict[str, Any]:
    """Run the benchmark at any size: `sizes` and `checked` of the model, `layer` of the expert op."""
    from benchmarks.harness.rows import Stamp

    stamp = Stamp.now("formats", command("formats", config), "cpu", threads=config.threads or None)
    rows = []
    if not config.skip_steps:
        found, settings = _steps(config, common, sizes, checked, documents, length)
        rows = [stamp.row(name, settings, entry) for name, entry in found.items()]
    shape = {**LAYER, **(layer or {})}
    experts = _experts(shape, config.repeats, say(common))
    settings = {
        "op": "expert_mlp",
        **shape,
        "rank": RANK,
        "dtype": computed_here(),
        "repeats": config.repeats,
    }
    rows += [stamp.row(f"{name} experts", settings, entry) for name, entry in experts.items()]
    if not common.quiet:
        print(table(experts), file=sys.stderr if common.json else sys.stdout)
    return show(rows, appended_to(config), common)


def _steps(
    config: Config,
    common: Common,
    sizes: Mapping[str, int] | None,
    checked: Mapping[str, int] | None,
    documents: int,
    length: int,
) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """(format -> results, settings) of whole steps in turn."""
    from contextlib import ExitStack

    from benchmarks.harness import kimi
    from benchmarks.harness.checkpoints import checkpoints
    from benchmarks.harness.sides import Side

    model, small = both_sizes(kimi.config, sizes, kimi.CHECKED if checked is None else checked)
    tokens, found = documents * length, {}
    with ExitStack() as kept:
        sides, exact = [], {}
        for name, table in CONFIGS.items():
            change = {} if table is None else {"quantization_config": table}
            place, small_place = kept.enter_context(checkpoints("", model | change, small | change))
            job = {"checkpoint": str(place), "checked": str(small_place), "device": "cpu"}
            job |= {"documents": documents, "length": length, "dtype": computed_here(), "lora": LORA}
            job |= {"recompute": "selective"}
            sides.append(Side(name, "benchmarks.harness.job:trainer", job, threads=config.threads))
            exact[name] = float64(str(small_place), LORA, length, common)
        found = step_in_turn(sides, config, tokens, exact["int4"], common, own=exact)
        for side in sides:
            residents = side.values("step", "resident")
            ratios = [
                one / other
                for one, other in zip(
                    side.values("step", "seconds"), sides[0].values("step", "seconds"), strict=True
                )
            ]
            found[side.name] |= {
                "of_int4": statistics.median(ratios),
                "resident_first": residents[0],
                "resident_last": residents[-1],
            }
    settings = {
        "shape": {name: model[name] for name in kimi.SIZES},
        "documents": documents,
        "length": length,
        "rank": RANK,
        "recompute": "selective",
        "steps": config.steps,
        "warmup": config.warmup,
    }
    return found, settings


def codecs() -> dict[str, Codec]:
    """Every format as published models have it, by the name of its row."""
    from unfreeze.quant import Fp8, Int4
    from unfreeze.quant.awq import Awq
    from unfreeze.quant.bitsandbytes import Bits4
    from unfreeze.quant.fp8_scaled import MATRIX, Fp8Scaled
    from unfreeze.quant.gptq import Gptq
    from unfreeze.quant.integers import Integers
    from unfreeze.quant.mxfp4 import Mxfp4
    from unfreeze.quant.nvfp4 import Nvfp4

    return {
        "int4": Int4(32),
        "fp8": Fp8(),
        "fp8 per row": Fp8Scaled(),
        "fp8 per matrix": Fp8Scaled(MATRIX),
        "mxfp4": Mxfp4(),
        "nvfp4": Nvfp4(),
        "int4 with zero points": Integers(4, 128, zeros=True),
        "int8": Integers(8, 128),
        "awq": Awq(),
        "gptq": Gptq(),
        "nf4": Bits4(),
    }


def _experts(
    shape: Mapping[str, int], repeats: int, report: Callable[[str], None]
) -> dict[str, dict[str, Any]]:
    """Format -> results: the op as training calls it, and plain torch, in turn with INT4's."""
    import torch

    from unfreeze.kernels.expert_mlp import ExpertFactors, expert_mlp, reference_expert_mlp
    from unfreeze.kernels.loops.scratch import release_scratch
    from unfreeze.train.memory import peak_bytes, reset_peak_bytes

    cpu, generator = torch.device("cpu"), torch.Generator().manual_seed(0)

    def randn(*size: int, scale: float = 1.0) -> Tensor:
        return torch.randn(size, generator=generator) * scale

    E, D, I, T = (shape[name] for name in ("experts", "hidden", "width", "tokens"))
    pairs = [
        randn(*size, scale=0.02) for size in ((E, 2 * RANK, D), (E, 2 * I, RANK), (E, RANK, I), (E, D, RANK))
    ]
    factors = ExpertFactors(*(pair.requires_grad_() for pair in pairs), scale=2.0, down_scale=2.0)
    ids = torch.rand(T, E, generator=generator).topk(shape["per_token"], dim=1).indices
    weights = torch.rand(T, shape["per_token"], generator=generator).requires_grad_()
    x = randn(T, D).to(getattr(torch, computed_here())).requires_grad_()
    dense = [randn(E, 2 * I, D, scale=D**-0.5), randn(E, D, I, scale=I**-0.5)]

    def once(op: Callable[..., Tensor], bases: list[Packed]) -> tuple[float, list[Tensor]]:
        begun = time.perf_counter()
        y = op(x, ids, weights, *bases, factors)
        gradients = torch.autograd.grad(y.float().square().sum(), [x, weights, *pairs])
        return time.perf_counter() - begun, [y.detach(), *gradients]

    found: dict[str, dict[str, Any]] = {}
    int4 = [packed(codecs()["int4"], base) for base in dense]
    for name, codec in codecs().items():
        report(f"{name}: experts forward and backward, {repeats} times")
        bases = [packed(codec, base) for base in dense]
        spans: dict[str, list[float]] = {"ours": [], "torch": [], "int4": []}
        reset_peak_bytes(cpu)
        sides = {
            "ours": (expert_mlp, bases),
            "torch": (reference_expert_mlp, bases),
            "int4": (expert_mlp, int4),
        }
        outputs = {side: once(op, given)[1] for side, (op, given) in sides.items()}
        for _ in range(repeats):
            for side, (op, given) in sides.items():
                spans[side].append(once(op, given)[0])
        worst = max(
            float((ours.float() - theirs.float()).norm() / theirs.float().norm())
            for ours, theirs in zip(outputs["ours"], outputs["torch"], strict=True)
        )
        found[name] = {
            "ms": 1e3 * statistics.median(spans["ours"]),
            "torch_ms": 1e3 * statistics.median(spans["torch"]),
            "of_int4": _ratio(spans["ours"], spans["int4"]),
            "of_torch": _ratio(spans["torch"], spans["ours"]),
            "bytes_per_weight": sum(base.nbytes for base in bases) / sum(base.numel for base in bases),
            "peak_bytes": peak_bytes(cpu),
            "correctness": {"output and gradients, against plain torch": worst},
        }
        release_scratch()
    return found


def packed(codec: Codec, weight: Tensor) -> Packed:
    """A stack [E, N, M] in that format."""
    from unfreeze.quant.codec import Packed
    from unfreeze.quant.halves import stacked

    codec = stacked(codec, *weight.shape[1:])
    return Packed(codec, codec.quantize(weight.bfloat16().float()))


def _ratio(ones: list[float], others: list[float]) -> float:
    return statistics.median(one / other for one, other in zip(ones, others, strict=True))


def table(experts: Mapping[str, Mapping[str, Any]]) -> str:
    """The expert op of each format, for a terminal."""
    lines = [("experts in", "bytes per weight", "ms", "of INT4's time", "torch dequantizing", "error")]
    for name, found in experts.items():
        lines.append(
            (
                name,
                f"{found['bytes_per_weight']:.3f}",
                f"{found['ms']:.1f}",
                f"{found['of_int4']:.2f}",
                f"{found['of_torch']:.2f} x as long",
                f"{max(found['correctness'].values()):.1e}",
            )
        )
    return align(lines)


def format_tables(rows: Sequence[Row]) -> list[str]:
    """For docs/performance.md: whole steps, then the expert op."""
    from benchmarks.harness.report import error, markdown, number, size

    steps = [
        [
            row.side,
            number(row.results, "tokens_per_second"),
            number(row.results, "of_int4", "{:.2f}"),
            size(row.results, "peak_bytes"),
            size(row.results, "resident_first"),
            size(row.results, "resident_last"),
            error(row.results),
        ]
        for row in rows
        if "tokens_per_second" in row.results
    ]
    experts = [
        [
            row.side.removesuffix(" experts"),
            number(row.results, "bytes_per_weight", "{:.3f}"),
            number(row.results, "ms"),
            number(row.results, "of_int4", "{:.2f}"),
            number(row.results, "of_torch", "{:.2f} x"),
            error(row.results),
        ]
        for row in rows
        if "bytes_per_weight" in row.results
    ]
    resident = ["resident after the first step", "after the last"]
    return [
        "A step with experts in each format, in turn:",
        markdown(["experts in", "tokens/s", "time of INT4's", "peak", *resident, "error"], steps),
        "One layer's experts, forward and backward; dequantizing in plain torch takes so many times as long:",
        markdown(
            ["experts in", "bytes a weight", "ms", "time of INT4's", "plain torch", "error against it"],
            experts,
        ),
    ]
