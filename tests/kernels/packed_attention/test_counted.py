"""Launches and bytes of a layer's attention on CUDA, counted on torch's meta device: the figures by which one call is
predicted to be faster. No GPU is used: a kernel's own traffic beyond its arguments is not counted.

    python tests/kernels/packed_attention/test_counted.py --write docs/measured/attention_cuda.md
"""

import re
import sys
from dataclasses import replace
from datetime import date
from pathlib import Path

import pytest
import torch

from benchmarks.harness.on_meta import Launches
from unfreeze.kernels.attention import DocumentLayout, Mask
from unfreeze.kernels.packed_attention import OP, flash_cuda
from unfreeze.kernels.packed_attention.by_buckets import by_buckets
from unfreeze.kernels.packed_attention.varlen import by

TOKENS, HEADS, GROUPS, WIDTH = 4096, 64, 8, 64  # gpt-oss
DOCUMENTS = [(512,) * 8, (2048,) * 2, (4096,), (1900, 900, 500, 300, 200, 150, 100, 46)]
WINDOWS = (128, None)


def counted(implementation, lengths, window):
    """[launches, GB] of forward and of backward, with sinks."""
    q, k, v, sinks = (
        torch.empty(size, dtype=torch.bfloat16, device="meta", requires_grad=True)
        for size in ((TOKENS, HEADS, WIDTH), (TOKENS, GROUPS, WIDTH), (TOKENS, GROUPS, WIDTH), (HEADS,))
    )
    starts = torch.tensor([0, *lengths[:-1]]).cumsum(0)
    layout = DocumentLayout.build(starts, TOKENS)
    slots = (None if x is None else x.to("meta") for x in (layout.source_N, layout.slot_T))
    layout = replace(layout, **dict(zip(("source_N", "slot_T"), slots, strict=True)))
    layout.bounds(q.device)  # once for all layers
    with Launches(rank=0) as forward:
        o = implementation(q, k, v, layout, 0.125, Mask(window), None, sinks)
    with Launches(rank=0) as backward:
        torch.autograd.grad(o, (q, k, v, sinks), torch.empty_like(o))
    return [(count.launches.total(), count.bytes.total() / 1e9) for count in (forward, backward)]


ONE_CALL = by(flash_cuda)


def total(implementation, lengths, window):
    """(launches, GB) of forward and backward."""
    return tuple(map(sum, zip(*counted(implementation, lengths, window), strict=True)))


def test_the_reason_of_the_prediction_says_what_is_counted():
    why = OP.candidates["varlen"].because
    gb, launches, low, high, fewest, most = re.search(
        r"([\d.]+) GB in (\d+) launches, blocks of queries (\d+) to (\d+) GB in (\d+) to ([\d,]+)", why
    ).groups()
    equal, _, whole, unequal = DOCUMENTS
    assert total(ONE_CALL, whole, None) == (int(launches), pytest.approx(float(gb), abs=0.005))
    assert total(ONE_CALL, unequal, 128) == (int(launches), pytest.approx(float(gb), abs=0.005))
    assert total(by_buckets, equal, 128) == (int(fewest), pytest.approx(int(low), abs=0.5))
    assert total(by_buckets, whole, None)[1] == pytest.approx(int(high), abs=0.5)
    assert total(by_buckets, unequal, 128)[0] == int(most.replace(",", ""))


def main():
    lines = [
        "# Attention of gpt-oss on CUDA, by count",
        "",
        f"`python tests/kernels/packed_attention/test_counted.py --write docs/measured/attention_cuda.md`,"
        f" {date.today()}, torch {torch.__version__}. Counted on the meta device, not measured: no GPU was used. A"
        f" layer with sinks: {HEADS} query heads over {GROUPS} key heads of width {WIDTH}, {TOKENS:,} tokens, bf16.",
        "",
        "As in [launches](launches.md): bytes are those of an operator's operands, each counted once. A flash kernel"
        " reads its keys several times and sums dq in float32 besides. By blocks: the path without a flash kernel, in float32."
        " It remains for softcapped scores and for float32.",
        "",
        "| documents | window | path | forward, launches | GB | backward, launches | GB |",
        "|---|---:|---|---:|---:|---:|---:|",
    ]
    for lengths in DOCUMENTS:
        name = " + ".join(map(str, lengths)) if len(set(lengths)) > 1 else f"{len(lengths)} x {lengths[0]:,}"
        for window in WINDOWS:
            for path, implementation in (("by blocks", by_buckets), ("one call", ONE_CALL)):
                cells = [f"{n:,} | {size:.2f}" for n, size in counted(implementation, lengths, window)]
                lines.append(f"| {name} | {window or 'none'} | {path} | {' | '.join(cells)} |")
    print("\n".join(lines))
    if "--write" in sys.argv:
        Path(sys.argv[sys.argv.index("--write") + 1]).write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
