"""SDPA against eager attention on a CPU: time and memory, by length and dtype.

    python examples/lab/sdpa.py --arm sdpa --seed 0 --out runs/sdpa
    unfreeze lab examples/lab/sdpa.toml

    eager    softmax(q kᵀ / √d + mask) v with all scores held, softmax in float32
    sdpa     torch's scaled_dot_product_attention, causal
    ours     unfreeze's packed_attention, as its models call it

Forward and backward of attention alone, 4 heads of 32, 4,096 tokens in documents of 128 to 2,048; and of a
whole training step of a small model on documents of 512. An arm and eager run in turn in one process,
A B B A …, and the value is the median of the ratios of neighbours: the machine's load meets both. The arm
eager is measured against itself, so its distance from 1 is the error of the method.

Memory: the kernel's own peak of resident memory (VmHWM), reset before each call, less what was resident then.
malloc keeps freed blocks, so they are returned first (malloc_trim). Linux only.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from studying import arguments, attend_eagerly, fresh, mean_loss, packed, write
from torch import Tensor

from unfreeze.kernels.attention.layout import DocumentLayout
from unfreeze.kernels.packed_attention import packed_attention
from unfreeze.models.blocks.attention import Attention
from unfreeze.models.blocks.passes import PackedPass
from unfreeze.models.decoder import Decoder

ARMS = ("eager", "sdpa", "ours")
LENGTHS, TOKENS, HEADS, WIDTH = (128, 512, 1024, 2048), 4096, 4, 32
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
STEP_LENGTH = 512
PAIRS = 7
MIB = 1 << 20


def attention(arm: str, q_SHLd: Tensor, k_SHLd: Tensor, v_SHLd: Tensor) -> Tensor:
    """Causal attention of S documents of one length -> [S, H, L, d]."""
    if arm == "sdpa":
        return F.scaled_dot_product_attention(q_SHLd, k_SHLd, v_SHLd, is_causal=True)
    documents, _, length, width = q_SHLd.shape
    if arm == "ours":
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q_SHLd, k_SHLd, v_SHLd))
        layout = DocumentLayout.build(torch.arange(documents) * length, documents * length, "cpu")
        o_THd = packed_attention(q, k, v, layout, width**-0.5)
        return o_THd.unflatten(0, (documents, length)).transpose(1, 2)
    hidden = ~torch.ones(length, length, dtype=torch.bool).tril()
    mask = torch.zeros((), dtype=q_SHLd.dtype).masked_fill(hidden, torch.finfo(q_SHLd.dtype).min)
    score = q_SHLd @ k_SHLd.transpose(2, 3) * width**-0.5 + mask
    return score.float().softmax(-1).to(q_SHLd.dtype) @ v_SHLd


def alone(arm: str, length: int, dtype: torch.dtype, seed: int) -> Callable[[], object]:
    """Forward and backward of attention over TOKENS tokens."""
    drawn = torch.Generator().manual_seed(seed)
    shape = TOKENS // length, HEADS, length, WIDTH
    q, k, v, do = (torch.randn(shape, generator=drawn).to(dtype) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    return lambda: torch.autograd.grad(attention(arm, *leaves), leaves, do)


def use(arm: str, model: Decoder, documents: int) -> None:
    """Let every layer attend as the arm says; `ours` is what it does already."""
    if arm == "eager":
        attend_eagerly(model, documents)
    if arm == "sdpa":
        for layer in model.layers:
            layer.self_attn.mix = _by_sdpa(layer.self_attn, documents)


def _by_sdpa(own: Attention, documents: int) -> Callable[..., Tensor]:
    from unfreeze.kernels.rotary import rotary

    def mix(q_THd: Tensor, k_THd: Tensor, v_THd: Tensor, run: PackedPass) -> Tensor:
        q_THd, k_THd = (rotary(x, *run.tables(own.rope), own.pairs) for x in (q_THd, k_THd))
        q, k, v = (x.unflatten(0, (documents, -1)).transpose(1, 2) for x in (q_THd, k_THd, v_THd))
        return attention("sdpa", q, k, v).transpose(1, 2).flatten(0, 1).flatten(1)

    return mix


def step(arm: str, seed: int) -> Callable[[], object]:
    """Forward and backward of a model of two layers over TOKENS tokens in documents of STEP_LENGTH."""
    model, documents = fresh(seed, width=HEADS * WIDTH), TOKENS // STEP_LENGTH
    use(arm, model, documents)
    drawn = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 256, (documents, STEP_LENGTH), generator=drawn)
    batch, parameters = packed(list(tokens)), [*model.parameters()]
    return lambda: torch.autograd.grad(mean_loss(model, batch), parameters)


def seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def ratio(one: Callable[[], object], other: Callable[[], object], pairs: int) -> tuple[float, float, float]:
    """(median of one / other, medians of their seconds); the order of a pair changes every time."""
    one(), other()
    each: list[tuple[float, float]] = []
    for number in range(pairs):
        if number % 2:
            b, a = seconds(other), seconds(one)
        else:
            a, b = seconds(one), seconds(other)
        each.append((a, b))
    ratios, ones, others = ([*column] for column in zip(*((a / b, a, b) for a, b in each), strict=True))
    return statistics.median(ratios), statistics.median(ones), statistics.median(others)


def peak_mib(call: Callable[[], object]) -> float | None:
    """MiB that a call adds to the resident memory at its peak; None where the kernel does not tell."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        before = _status("VmRSS")
        call()
        return (_status("VmHWM") - before) / MIB
    except (OSError, AttributeError):
        return None


def _status(name: str) -> int:
    """A number of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def study(arm: str, seed: int, pairs: int = PAIRS) -> tuple[float, dict[str, float]]:
    """(time of a training step as a share of eager's, further numbers)."""
    more: dict[str, float] = {}
    cases = {f"{name}_{n}": (n, dtype) for name, dtype in DTYPES.items() for n in LENGTHS}
    for name, (length, dtype) in cases.items():
        own, eager = (alone(which, length, dtype, seed) for which in (arm, "eager"))
        more[f"time_{name}"], more[f"ms_{name}"], _ = ratio(own, eager, pairs)
        more[f"ms_{name}"] *= 1000
        if (peak := peak_mib(own)) is not None:
            more[f"mib_{name}"] = peak
    own, eager = step(arm, seed), step("eager", seed)
    value, more["step_ms"], _ = ratio(own, eager, pairs)
    more["step_ms"] *= 1000
    if (peak := peak_mib(own)) is not None:
        more["step_mib"] = peak
    return value, more


if __name__ == "__main__":
    options = arguments(__doc__, ARMS)
    share, more = study(options.arm, options.seed, options.steps or PAIRS)
    write(options.out, share, more)
