"""Compiles this room's Triton kernels for the GPUs of gpu_targets.py, which needs none of them.

    python tests/kernels/loops/compile_triton.py [--ptxas] [--write docs/measured/ptxas.md] [--planted]
        [--only NAME …] [--first] [--targets sm_90 …]

The launchers are called with tensors on meta of true size, and what they would launch is compiled: their own
constants, warps, and which arguments are multiples of 16 or 1. Prints a line FAULT per kernel and GPU that does
not compile, and last the number of those that do. --ptxas: registers, spills, shared memory and the widest store
of each. Exit code 1 if one does not compile, or with --ptxas if a kernel on bf16 spills, shared memory is
above what a block may have, or the expansion's stores are not of 16 bytes at a rank of 1 to 32. --planted
adds a kernel that does not compile, AdamW of too few warps, and an expansion beside 8 columns of rank 8.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from gpu_targets import TARGETS, Report, Target, compiled, faults, report
from torch import Tensor
from triton.runtime.jit import JITFunction

from unfreeze.checkpoint.tensors import TORCH_DTYPE
from unfreeze.kernels.adamw import AdamWRule, AdamWUpdate
from unfreeze.kernels.adamw import triton_cuda as adamw
from unfreeze.kernels.expand import triton_cuda as expand
from unfreeze.kernels.expand.cases import KERNELS
from unfreeze.kernels.expert_mlp.factors import columns
from unfreeze.kernels.expert_mlp.grouped import Grouped
from unfreeze.kernels.grouped_mm import triton_cuda as grouped_mm
from unfreeze.kernels.int4_grouped_mm import triton_cuda as int4_grouped_mm
from unfreeze.kernels.linear_cross_entropy import triton_cuda as linear_cross_entropy
from unfreeze.kernels.rms_norm import triton_cuda as rms_norm
from unfreeze.kernels.rotary import triton_cuda as rotary
from unfreeze.kernels.state_scan import Steps
from unfreeze.kernels.state_scan import triton_cuda as state_scan
from unfreeze.kernels.swiglu import triton_cuda as swiglu
from unfreeze.kernels.swiglu.activation import SWIGLU, ClampedSwiGLU, GeGLU
from unfreeze.kernels.token_permute import triton_cuda as token_permute
from unfreeze.quant.codec import Packed
from unfreeze.quant.int4 import Int4

B, F, L, I = torch.bfloat16, torch.float32, torch.int64, torch.int32
NAMES = {B: "bf16", torch.float16: "fp16", F: "fp32", L: "i64", I: "i32", torch.uint8: "u8"} | {
    torch.int16: "i16",
    torch.int8: "i8",
}
T, D, WIDTH, E, K, V = 8192, 7168, 2048, 48, 8, 163840  # Kimi-K2: tokens, widths, experts here, per token


@dataclass(frozen=True, eq=False)
class Launch:
    """A kernel with the arguments of one launch."""

    label: str
    kernel: Any
    args: dict[str, Any]
    options: dict[str, Any]

    def key(self) -> tuple[Any, ...]:
        """Launches with one key are one program."""
        return (self.kernel.__name__, *map(str, self.specialised()), str(self.options))

    def specialised(self) -> tuple[dict[str, str], dict[Any, Any], dict[Any, Any]]:
        """(signature, constants, attributes), as Triton derives them from the arguments of a launch."""
        signature, constants, attributes = {}, {}, {}
        for position, parameter in enumerate(self.kernel.params):
            value = self.args[parameter.name]
            aligned = False
            if parameter.is_constexpr or value is None or (isinstance(value, int) and value == 1):
                signature[parameter.name] = "constexpr"
                constants[(position,)] = value
            elif isinstance(value, Tensor):
                signature[parameter.name] = f"*{NAMES[value.dtype]}"
                aligned = value.storage_offset() * value.itemsize % 16 == 0
            elif isinstance(value, float):
                signature[parameter.name] = "fp32"
            else:
                signature[parameter.name] = "i32" if value < 2**31 else "i64"
                aligned = value % 16 == 0
            if aligned:
                attributes[(position,)] = [["tt.divisibility", 16]]
        return signature, constants, attributes


@contextmanager
def recorded(label: str, launches: list[Launch]) -> Iterator[None]:
    """Launches in this block are put down, and run nothing."""
    run = JITFunction.run

    def put_down(self: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        values = dict(zip(self.arg_names, args, strict=False))
        values |= {name: value for name, value in named.items() if name in self.arg_names}
        options = {name: value for name, value in named.items() if name not in self.arg_names}
        launches.append(Launch(label, self, values, options))

    JITFunction.run = put_down  # type: ignore[method-assign]
    try:
        yield
    finally:
        JITFunction.run = run  # type: ignore[method-assign]


def on_meta(*shape: int, dtype: torch.dtype = B) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def packed(rows: int, inputs: int, experts: int = E, group: int = 32) -> Packed:
    parts = {
        "weight_packed": on_meta(experts, rows, inputs // 8, dtype=I),
        "weight_scale": on_meta(experts, rows, inputs // group),
    }
    return Packed(Int4(group), parts)


def expansion(
    label: str, rank: int, rows: int, inputs: int, kept: list[Launch], chosen: bool = False
) -> None:
    """Into the workspace of a backend for CUDA, beside the columns of an adapter of that rank."""
    beside = columns(rank, inputs, Grouped.row_stride) if rank else 0
    space = on_meta(2 if chosen else E, rows + beside, inputs + beside)
    with recorded(f"bf16, {label}", kept):
        expand.fill(packed(rows, inputs), on_meta(2, dtype=L) if chosen else 0, space[:, :rows, :inputs])


def expansions() -> list[Launch]:
    """Of gate_up and down at ranks 0 to 32, each program once."""
    kept: list[Launch] = []
    for rank in range(33):
        expansion(f"gate_up from rank {rank}", 2 * rank, 2 * WIDTH, D, kept)
        expansion(f"down from rank {rank}", rank, D, WIDTH, kept)
    expansion("down, chosen experts", 16, D, WIDTH, kept, chosen=True)
    return list({launch.key(): launch for launch in reversed(kept)}.values())[::-1]


def other_expansions() -> list[Launch]:
    """Of gate_up in every other format."""
    kept: list[Launch] = []
    space = on_meta(E, 2 * WIDTH, D)
    for kind, kernel in KERNELS.items():
        parts = {
            suffix: on_meta(E, *shape, dtype=TORCH_DTYPE[dtype])
            for suffix, (dtype, shape) in kernel.codec.parts(2 * WIDTH, D).items()
        }
        with recorded(f"bf16, gate_up in {kind}", kept):
            expand.fill(Packed(kernel.codec, parts), 0, space)
    return kept[1:]  # the first is INT4


def others() -> list[Launch]:
    """Every other kernel, at the sizes and dtypes of a step of Kimi-K2."""
    kept: list[Launch] = []

    def add(label: str, launch: Callable[[], object]) -> None:
        with recorded(label, kept):
            launch()

    gate_up, h, weight = on_meta(T * K, 2 * WIDTH), on_meta(T * K, WIDTH + 16), on_meta(T * K, dtype=F)
    rows = h[:, :WIDTH]
    for name, form in (
        ("", SWIGLU),
        (", gelu", GeGLU()),
        (", clamped", ClampedSwiGLU()),
        (", clamped, interleaved", ClampedSwiGLU(interleaved=True)),
    ):
        parts = form.split(gate_up)
        add(f"bf16{name}", lambda p=parts, a=form: swiglu.forward(*p, rows, a))
        add(f"bf16{name}", lambda p=parts, a=form: swiglu.backward(rows, *p, *p, a))
        add(
            f"bf16, weighted{name}",
            lambda p=parts, a=form: swiglu.backward_weighted(rows, *p, weight, rows, *p, weight, a),
        )

    cos = on_meta(T, 32, dtype=F)
    for heads, width in ((64, 192), (1, 64), (64, 64)):
        x = on_meta(T, heads, width)
        for read, write in ((False, False), (True, False), (False, True)):
            add(
                f"bf16, {heads} heads of {width}, {1 + read} to {1 + write}",
                lambda x=x, read=read, write=write: rotary.rotate(x, cos, cos, 1.0, read, write, x),
            )

    for label, dtype, half in (
        ("fp32", F, None),
        ("fp32, bf16 weights", F, B),
        ("bf16", B, B),
        ("fp16", torch.float16, torch.float16),
    ):
        master = on_meta(D, 16, dtype=F)
        beside = None if half is None else on_meta(D, 16, dtype=half)
        update = AdamWUpdate(master, on_meta(D, 16, dtype=dtype), master, master, beside, 0.0, step=1)
        rule = AdamWRule(1e-3, (0.9, 0.95), 1e-8, 1.0)
        add(label, lambda update=update, rule=rule: adamw.step([update], rule))

    ids, score = on_meta(2048, dtype=L), on_meta(2048, dtype=F)
    for label, dtype, wanted in (("bf16", B, True), ("fp32", F, False)):
        logits = on_meta(2048, V, dtype=dtype)
        add(label, lambda z=logits, w=wanted: linear_cross_entropy.softmax_gradient(z, ids, score, w))

    x, order = on_meta(T, D), on_meta(T * K, dtype=L)
    wide, sums = on_meta(T * K, D + 32), on_meta(T, D, dtype=F)
    add("ids", lambda: token_permute.sort(on_meta(T, K, dtype=L), E))
    add("bf16", lambda: token_permute.gather(x, order, K, wide))
    add("bf16", lambda: token_permute.combine(wide[:, :D], order, weight, sums))
    add("bf16, no weight", lambda: token_permute.combine(wide[:, :D], order, None, sums))
    add("bf16", lambda: token_permute.combine_backward(x, wide[:, :D], order, K, weight, wide[:, :D], weight))

    for width in (D, 1536, 128):
        y, of_row, norm = on_meta(T, width), on_meta(T, 1, dtype=F), on_meta(width)
        add(f"bf16, width {width}", lambda y=y, norm=norm: rms_norm.forward(y, norm, 1e-6))
        add(f"bf16, width {width}", lambda y=y, norm=norm, r=of_row: rms_norm.backward(y, y, norm, r))
        add(f"bf16, width {width}", lambda y=y, norm=norm, r=of_row: rms_norm.weight_gradient(y, y, norm, r))

    # Qwen3.5 (delta rule), Kimi-Linear (a decay per channel), Mamba-2: 32 heads, chunks of 64 tokens
    steps, chunks = Steps((4,) * 16, on_meta(16, dtype=I), on_meta(4, dtype=I)), (64, 32)
    for label, width, decays, delta in (
        ("delta", 128, 1, True),
        ("KDA", 128, 128, True),
        ("SSD", 64, 1, False),
    ):
        u, key = (on_meta(*chunks, 64, size, dtype=F) for size in (width, 128))
        state, first = (on_meta(documents, 32, 128, width, dtype=F) for documents in (64, 4))
        a, w = on_meta(*chunks, decays, 1, dtype=F), key if delta else None
        add(label, lambda u=u, w=w, k=key, a=a, s=first: state_scan.forward(u, w, k, a, s, steps))
        add(
            label, lambda b=state, u=u, s=first, w=w, k=key, a=a: state_scan.backward(b, u, s, w, k, a, steps)
        )

    multiply, ends = grouped_mm.GroupedMm(), on_meta(E, dtype=I)
    for label, dtype, per_experts in (("bf16", B, (8, 32, 128)), ("fp32", F, (128,))):
        wide = on_meta(E, 2 * WIDTH, D + 32, dtype=dtype)[:, :, :D].transpose(1, 2)
        for per_expert in per_experts:
            x = on_meta(per_expert * E, D, dtype=dtype)
            add(f"{label}, {per_expert} rows", lambda x=x, w=wide: multiply(x, w, ends))
            thin = on_meta(per_expert * E, 16, dtype=dtype)
            add(f"{label}, outer, {per_expert} rows", lambda x=x, b=thin: multiply(x.t(), b, ends))

    for experts in (E, 384):
        for per_expert in (8, 32, 64, 128):
            x = on_meta(per_expert * experts, D)
            add(
                f"bf16, {per_expert} rows of {experts} experts",
                lambda x=x, e=experts: int4_grouped_mm.int4_grouped_mm(
                    x, packed(2 * WIDTH, D, e), on_meta(e, dtype=I)
                ),
            )
    for label, dtype, group, per_expert in (
        ("bf16, groups of 128", B, 128, 128),
        ("bf16, groups of 128, 8 rows", B, 128, 8),
        ("fp32", F, 32, 128),
    ):
        x = on_meta(per_expert * E, D, dtype=dtype)
        add(
            label,
            lambda x=x, g=group: int4_grouped_mm.int4_grouped_mm(
                x, packed(2 * WIDTH, D, E, g), on_meta(E, dtype=I)
            ),
        )
    return list({launch.key(): launch for launch in reversed(kept)}.values())[::-1]


@triton.jit
def planted(x, BLOCK: tl.constexpr):
    tl.store(x + tl.arange(0, BLOCK), tl.zeros((2 * BLOCK,), tl.float32))


def planted_faults(launches: list[Launch]) -> list[Launch]:
    """What must be found."""
    step = next(x for x in launches if x.kernel is adamw._step and x.label == "bf16")
    kept: list[Launch] = []
    with recorded("bf16, planted", kept):
        expand.fill(packed(D, WIDTH), 0, on_meta(E, D, WIDTH + 8)[:, :, :WIDTH])
    slow = Launch("bf16, planted", step.kernel, step.args, step.options | {"num_warps": 4})
    return [Launch("planted", planted, dict(x=on_meta(64, dtype=F), BLOCK=64), {}), slow, *kept]


def planned(only: list[str], first: bool, planted: bool) -> list[Launch]:
    """The launches to compile. only: names that begin so; first: one launch of each kernel."""
    launches = [*expansions(), *other_expansions(), *others()]
    if planted:
        launches += planted_faults(launches)
    launches = [launch for launch in launches if not only or named(launch).startswith(tuple(only))]
    by_kernel = {named(launch): launch for launch in reversed(launches)}
    return list(by_kernel.values())[::-1] if first else launches


def named(launch: Launch) -> str:
    """ "expand._four": the op's folder and the kernel."""
    module = launch.kernel.__module__.removesuffix(".triton_cuda").removeprefix("unfreeze.kernels.")
    return f"{module}.{launch.kernel.__name__}"


def page(rows: dict[Launch, dict[str, Report]], targets: list[Target]) -> str:
    """The page of the reports, a column for each GPU."""
    head = [
        "# ptxas: registers, spills and shared memory of the Triton kernels",
        "",
        "`python tests/kernels/loops/compile_triton.py --ptxas --write docs/measured/ptxas.md`,"
        f" {date.today()}, triton {triton.__version__}, at Kimi-K2's sizes. No GPU was used: this shows what a"
        " kernel needs, not how fast it is.",
        "",
        "A cell: registers a thread, KiB of shared memory, and in bold the bytes of spills, if any. The widest"
        " store is sm_90's, in bytes. gfx942: vector registers.",
        "",
        "| GPU | shared KiB a block may have | cards |",
        "|---|---:|---|",
        *(f"| {target.name} | {target.shared >> 10} | {target.cards} |" for target in targets),
        "",
        f"| kernel | of | warps | widest store | {' | '.join(target.name for target in targets)} |",
        f"|---|---|---:|---:|{'---|' * len(targets)}",
    ]
    for launch, found in rows.items():
        widest = found["sm_90"] if "sm_90" in found else next(iter(found.values()))
        cells = " | ".join(found[t.name].cell if t.name in found else "does not compile" for t in targets)
        head.append(f"| {named(launch)} | {launch.label} | {widest.warps} | {widest.store} | {cells} |")
    return "\n".join(head) + "\n"


def as_there(launch: Launch, target: Target) -> Launch:
    """The launch as on that GPU: AMD's has no products of three TF32 parts, and less shared memory."""
    if target.gpu.backend != "hip" or "PRECISION" not in launch.args:
        return launch
    args, options = {**launch.args, "PRECISION": "ieee"}, {**launch.options, "num_stages": 1}
    return replace(launch, args=args, options=options)


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--ptxas", action="store_true")
    options.add_argument("--planted", action="store_true")
    options.add_argument("--only", nargs="+", default=[], help="kernels, as expand or expand._four")
    options.add_argument("--first", action="store_true", help="one launch of each kernel")
    options.add_argument("--targets", nargs="+", default=list(TARGETS), choices=TARGETS)
    options.add_argument("--write", type=Path, help="the page of the report")
    given = options.parse_args()
    good, bad, targets = 0, 0, [TARGETS[name] for name in given.targets]
    rows: dict[Launch, dict[str, Report]] = {}
    for launch in planned(given.only, given.first, given.planted):
        rows[launch] = {}
        for target in targets:
            where = f"{named(launch)} ({launch.label}) on {target.name}"
            try:
                made = compiled(as_there(launch, target), target)
                found = report(made) if given.ptxas else None
            except Exception as error:
                print(f"FAULT {where}: {type(error).__name__}: {str(error).splitlines()[0]}")
                bad += 1
                continue
            good += 1
            if found is None:
                continue
            wrong = faults(launch, found, target, launch.kernel is expand._four)
            bad += bool(wrong)
            rows[launch][target.name] = found
            print(f"FAULT {where}: {wrong}" if wrong else f"{where}: {found.cell}", flush=True)
    if given.write:
        given.write.write_text(page(rows, targets), encoding="utf-8")
    print(good)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
