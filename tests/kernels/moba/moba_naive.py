"""Mixture of Block Attention in loops over documents, heads and tokens, from the paper's formulas and from the
semantics of the authors' moba_naive.py: each query head scores the mean of every earlier block's keys, the own block
counts among the `chosen`, a block ends with the document. Nothing is shared with the implementation."""

import torch


def documents(lengths):
    start = 0
    for length in lengths:
        yield start, length
        start += length


def seen_blocks(q, k, lengths, block, chosen, score=None):
    """{(token, head): sorted places of its blocks}. score(q of a token and head, keys of a block, head) -> number."""
    heads, groups, seen = q.shape[1], k.shape[1], {}
    mean = lambda query, keys, head: query @ keys.mean(0)  # noqa: E731
    for start, length in documents(lengths):
        for t in range(length):
            own = t // block
            for h in range(heads):
                g = h * groups // heads
                scores = [
                    (score or mean)(q[start + t, h], k[start + j * block : start + (j + 1) * block, g], h)
                    for j in range(own)
                ]
                best = sorted(range(own), key=lambda j: -float(scores[j]))[: chosen - 1]
                seen[start + t, h] = sorted([*best, own])
    return seen


def attention(q, k, v, lengths, block, scale, seen):
    """o [T, H, v]: a softmax over the tokens of the seen blocks, up to the query."""
    heads, groups, out = q.shape[1], k.shape[1], []
    for start, length in documents(lengths):
        for t in range(length):
            row = []
            for h in range(heads):
                g = h * groups // heads
                places = [
                    start + s
                    for j in seen[start + t, h]
                    for s in range(j * block, min((j + 1) * block, t + 1))
                ]
                share = (k[places, g] @ q[start + t, h] * scale).softmax(0)
                row.append(share @ v[places, g])
            out.append(torch.stack(row))
    return torch.stack(out)
