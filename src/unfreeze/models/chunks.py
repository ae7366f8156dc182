"""Chunk size: tokens that go through a layer at once if its activations are recomputed in backward.

A layer's inner tensors are several times larger than what it keeps. On a CPU, glibc maps each block above 32
MiB anew and the kernel clears it: a quarter of the step at 65,536 tokens of hidden 256
(docs/measured/profiles/tried.md). In chunks of whole documents these tensors are small, and the heap reuses
them for the next chunk. All chunks pass before the next layer is visited, so a layer's weights are still read
once per pass.
"""

from __future__ import annotations

from collections.abc import Sequence

MIN_TOKENS = 4096
# on average; expanding an expert's INT4 weights again per chunk then costs a few per cent of its GEMM
ROWS_PER_EXPERT = 512


def chunk_tokens(num_experts: int, experts_per_token: int, device: str) -> int | None:
    """max(4,096, 512 · E / K) on a CPU.

    None (no chunks) on a GPU: its allocator keeps what it has mapped, and its GEMMs are faster with more
    rows.
    """
    if device != "cpu":
        return None
    return max(MIN_TOKENS, ROWS_PER_EXPERT * num_experts // max(1, experts_per_token))


def document_groups(lengths: Sequence[int], limit: int) -> list[list[int]]:
    """Group the lengths of neighbouring documents into about equal sums, at most `limit` each.

    A longer document is a group of its own.
    """
    even = -(-sum(lengths) // -(-sum(lengths) // limit))
    groups: list[list[int]] = []
    held = even
    for length in lengths:
        if held >= even or held + length > limit:
            groups.append([])
            held = 0
        groups[-1].append(length)
        held += length
    return groups
