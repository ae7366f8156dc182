"""The least time in which this machine can make one decode step.

    limit = the longer of   bytes that the step must read / read rate
                            arithmetic of the step / GEMM rate

Both rates are measured here, in the same run and with as many threads as the sides have. A share of 1 needs
every byte read once at the full rate, and nothing else in the way.

S rows, N positions in the cache, E experts, K experts per token, H heads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.harness.gemm import batched_rate, rate_here
from benchmarks.harness.job import multiplied
from benchmarks.harness.sides import Worker
from benchmarks.harness.timing import timed
from unfreeze.generate.engine import batch_of
from unfreeze.models import Decoder, Shape
from unfreeze.models.blocks.linear import PackedHolder

LEAST = 2**29  # bytes of the buffer that is read; 16 times a last cache of 32 MiB
TIMES = 16  # the buffer over the last cache, where that is larger
GEMM_SECONDS = 0.3  # that a rate is measured for
SQUARE = {"cpu": (512, 1024, 1024, True), "cuda": (4096, 4096, 4096, True)}
"""The GEMM of the rate, large enough to be limited by arithmetic."""
CONTEXT, ROUTED = 64, 8
"""Tokens of the prompt, and steps after it, that the experts of a step are counted over."""


class Work(NamedTuple):
    """One step. read: bytes; flop; weights: number of weights among the bytes, without adapters."""

    read: float
    flop: float
    weights: float


def work(model: Decoder, rows: int, length: float, experts: Sequence[float], size: int) -> Work:
    """The work of one step of S rows that attend to `length` positions each, on the mean.

    bytes    every tensor once, S rows of an embedding that is not also the head, of a layer's E experts the
             `experts` that the rows choose, and the cache of all rows
    flop     S · (2 · weights that a token is multiplied with + attention over its positions)
    size     bytes of a number in the run's format. Tensors that are not packed count in the narrower of this
             and the format they are held in: adapters in bf16, if the run is
    """
    shape, share = model.shape, _shares(model, rows, experts)
    packed = [m.packed for m in model.modules() if isinstance(m, PackedHolder) and m.codec is not None]
    codes = {id(next(iter(one.parts.values()))): one.numel for one in packed}
    of_packed = {id(part) for one in packed for part in one.parts.values()}

    read = weights = 0.0
    for name, tensor in _tensors(model).items():
        part, is_packed = share.get(id(tensor), 1.0), id(tensor) in of_packed
        read += part * tensor.numel() * (tensor.itemsize if is_packed else min(tensor.itemsize, size))
        if is_packed:
            weights += part * codes.get(id(tensor), 0)
        elif tensor.dim() > 1 and ".adapter." not in name:
            weights += part * tensor.numel()

    base, adapters = multiplied(model)
    attended = rows * length
    return Work(
        read=read + attended * cached(shape) * size,
        flop=2 * rows * (base + adapters) + attended * attention(shape),
        weights=weights,
    )


def _shares(model: Decoder, rows: int, experts: Sequence[float]) -> dict[int, float]:
    """id of a tensor -> its part that a step reads, where that is not all of it."""
    moes = model.moe_layers().values()
    share = {
        id(tensor): chosen / moe.experts.num_experts
        for moe, chosen in zip(moes, experts, strict=True)
        for tensor in _tensors(moe.experts).values()
    }
    if not model.shape.tied:
        share[id(model.model.embed_tokens.weight)] = rows / model.shape.vocab_size
    return share


def _tensors(module: torch.nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers as a checkpoint has them, by name, a tied one once and no counters."""
    once: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        once.setdefault(id(tensor), (name, tensor))
    return dict(once.values())


def cached(shape: Shape) -> int:
    """Numbers in the cache for one position: keys and values, or MLA's latent with its rotary key."""
    if shape.mla is not None:
        return shape.num_layers * (shape.mla.kv_lora_rank + shape.mla.rope)
    return shape.num_layers * 2 * shape.num_kv_heads * shape.head_dim


def attention(shape: Shape) -> int:
    """FLOP of one row for one position: scores and sums of H heads, over the cache as it is.

    MLA in the space of the latents, arXiv:2405.04434, 2.1.2: expanding a position takes more than that.
    """
    if shape.mla is not None:
        return shape.num_layers * 2 * shape.num_heads * (2 * shape.mla.kv_lora_rank + shape.mla.rope)
    return shape.num_layers * 4 * shape.num_heads * shape.head_dim


def experts_read(
    model: Decoder, prompts: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]]
) -> list[float]:
    """Different experts that one step of all rows chooses, of each mixture layer, the mean of ROUTED steps.

    Counted from the tokens of a run in one packed pass, with the last CONTEXT tokens of each prompt. Prompts
    have one length.
    """
    context = min(CONTEXT, len(prompts[0]))
    steps = min(ROUTED, len(tokens[0]) - 1)
    documents = [
        [*prompt[-context:], *answer[:steps]] for prompt, answer in zip(prompts, tokens, strict=True)
    ]
    with torch.no_grad(), choices(model) as chosen:
        model.hidden(batch_of(documents, model.device))
    means = []
    for parts in chosen.values():
        ids_SNK = torch.cat(parts).unflatten(0, (len(documents), -1))[:, context:]
        means.append(sum(len(of_step.unique()) for of_step in ids_SNK.unbind(1)) / ids_SNK.shape[1])
    return means


@contextmanager
def choices(model: Decoder) -> Iterator[dict[int, list[Tensor]]]:
    """Within this context, collect the ids [T, K] that each router chooses, by layer."""
    moes = model.moe_layers()
    chosen: dict[int, list[Tensor]] = {layer: [] for layer in moes}

    def watched(layer: int, choose: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def choose_and_keep(scores_TE: Tensor) -> Tensor:
            ids_TK = choose(scores_TE)
            chosen[layer].append(ids_TK)
            return ids_TK

        return choose_and_keep

    for layer, moe in moes.items():
        moe.gate.choose = watched(layer, moe.gate.choose)  # type: ignore[method-assign]
    try:
        yield chosen
    finally:
        for moe in moes.values():
            del moe.gate.choose


READS: dict[str, Callable[[Tensor], Tensor]] = {
    "max of int32": lambda words: words.view(torch.int32).max(),
    "sum of float32": lambda words: words.view(torch.float32).sum(),
    "sum of bfloat16": lambda words: words.view(torch.bfloat16).sum(),
}
"""Loops of torch that do no more than read a buffer, on all threads. The fastest is the machine's rate."""


def read_rate(nbytes: int, device: str, repeats: int = 5) -> dict[str, float]:
    """bytes/s of each way in READS through a buffer of `nbytes`, the best of `repeats`."""
    words = torch.zeros(nbytes // 8, dtype=torch.int64, device=device)  # written, so that it has memory
    words += 1
    if device == "cuda":
        place = torch.device(device)
        return {
            name: 1e3 * nbytes / timed(lambda: read(words), place, repeats=repeats).low_ms  # noqa: B023
            for name, read in READS.items()
        }
    rates = {}
    for name, read in READS.items():
        times = []
        for _ in range(repeats):
            started = time.perf_counter()
            read(words)
            times.append(time.perf_counter() - started)
        rates[name] = nbytes / min(times)
    return rates


def buffer_bytes(caches: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """TIMES the largest cache of a core, at least LEAST: too large to stay in it."""
    sizes = [file.read_text().strip() for file in caches.glob("index*/size")]  # "32768K"
    return max([LEAST, *(TIMES * 1024 * int(size.removesuffix("K")) for size in sizes)])


def machine(device: str, dtype: str) -> Worker:
    """This machine's rates. calls: measure() -> read_rate (bytes/s), gemm_rate (FLOP/s)."""

    def measure() -> dict[str, float]:
        square = [SQUARE[device]]
        gemm = (
            rate_here(square, getattr(torch, dtype), seconds=GEMM_SECONDS)
            if device == "cpu"
            else batched_rate(square, 1, device)
        )
        return {
            "read_rate": max(read_rate(buffer_bytes(), device).values()),
            "gemm_rate": gemm()["gflops_per_second"] * 1e9,
        }

    return Worker({"measure": measure})


def limited(entry: Mapping[str, Any], rates: Mapping[str, float]) -> dict[str, Any]:
    """The limit of a row that has read_bytes, flop and step_seconds, and the share of it that was reached."""
    reading, computing = (entry["read_bytes"] / rates["read_rate"], entry["flop"] / rates["gemm_rate"])
    seconds = max(reading, computing)
    return {
        "limit_seconds": seconds,
        "limit": "bytes" if reading >= computing else "arithmetic",
        "limit_share": seconds / entry["step_seconds"],
        **rates,
    }
