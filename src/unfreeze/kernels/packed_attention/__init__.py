"""Causal attention inside each document of a flat packed batch.

Either documents of similar length are gathered into rectangles, and each rectangle attends in a call of its
own, or one call reads the bounds of all documents.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from unfreeze.kernels import cards
from unfreeze.kernels.attention.form import CAUSAL, Mask
from unfreeze.kernels.attention.layout import DocumentLayout
from unfreeze.kernels.choice.choose import choose
from unfreeze.kernels.choice.op import Arguments, Candidate, Case, Implementation, Op
from unfreeze.kernels.packed_attention.by_buckets import by_buckets
from unfreeze.kernels.recompute import Reuse

__all__ = ["OP", "bucket", "in_one_call", "packed_attention"]

FORMS = ("window and sinks", "sinks", "window", "causal", "causal, v < d")
"""The buckets of which each has a case."""
FLASH = (8, 0)  # the oldest compute capability of torch's flash kernel


def packed_attention(
    q_THd: Tensor,
    k_TGd: Tensor,
    v_TGv: Tensor,
    layout: DocumentLayout,
    scale: float,
    mask: Mask = CAUSAL,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
    reuse: Reuse | None = None,
    impl: str = "auto",
) -> Tensor:
    """Causal attention inside each document of a packed batch -> [T, H, v].

        o[t, h] = Σ_s softmax_s(scale · q[t, h]·k[s, g]) v[s, g], g = h·G/H, over s <= t of the same document

    Never attends across documents. v may be narrower than d (MLA: d 192, v 128). `mask`: a window or chunks.
    `softcap` bounds the scores; `sinks_H` are scores without a value (attention/by_blocks.py). `reuse`: of a
    layer that is recomputed. [T, T] scores are never held.

    Raises ValueError for a layout of another batch.
    """
    num_tokens = q_THd.shape[0]
    if num_tokens != layout.num_tokens:
        raise ValueError(f"q has {num_tokens} tokens, the layout was built for {layout.num_tokens}")
    if mask.chunk is not None:  # a chunk attends to itself only, as a document does
        layout, mask = layout.cut(mask.chunk), Mask(mask.window)
    width, value_width = q_THd.shape[-1], v_TGv.shape[-1]
    window = mask.window is not None and mask.window < layout.longest
    name = bucket(width, value_width, window=window, softcap=softcap is not None, sinks=sinks_H is not None)
    implementation = choose(OP, q_THd.device, q_THd.dtype, name, impl)
    return implementation(q_THd, k_TGd, v_TGv, layout, scale, mask, softcap, sinks_H, reuse)


def bucket(width: int, value_width: int, *, window: bool, softcap: bool, sinks: bool) -> str:
    """The bucket's name, for q and k of `width` and values of `value_width`.

    FORMS, with ", v < d" for MLA. Or the reason why only the reference takes these inputs: "softcap",
    "v > d", or a width that flash kernels do not take. They take multiples of 8 up to 256; between 192 and
    224 only data center GPUs have the shared memory that backward needs (FlashAttention-2).
    """
    if softcap:
        return "softcap"
    if value_width > width:
        return "v > d"
    if width % 8 or width > 256 or 192 < width <= 224:
        return "width that flash kernels do not take"
    words = " and ".join(name for name, there in (("window", window), ("sinks", sinks)) if there)
    return (words or "causal") + (", v < d" if value_width < width else "")


def in_one_call(device: str, dtype: torch.dtype, name: str) -> bool:
    """True if inputs of that bucket are predicted to attend in one call there; the plan counts by it."""
    varlen = OP.candidates["varlen"]
    return not varlen.refuses(device, dtype) and varlen.predicted(device, name) and name in FORMS


def _varlen() -> Implementation:
    from unfreeze.kernels.packed_attention import flash_cuda, varlen

    return varlen.by(flash_cuda)


def _refuses(device: str, dtype: torch.dtype) -> str:
    if device != "cuda":
        return f"device {device}; flash attention over documents of any lengths runs on cuda"
    if dtype != torch.bfloat16:
        return f"dtype {dtype}; it takes bfloat16"
    card = cards.here()
    if card is not None and not card.rocm and card.capability < FLASH:
        return f"compute capability {card.capability[0]}.{card.capability[1]}; flash attention needs 8.0"
    from unfreeze.kernels.packed_attention.flash_cuda import missing

    return missing()


# Documents of very different lengths, as packing makes them. The exact result is torch's in float64, which
# holds all scores: 1 GB for two documents of 2,048 tokens and 16 heads.
ON_GPU = (2048, 2048, 1024, 1024, 512, 512, 300, 300, 200, 100, 64, 33, 20, 6, 1)
LENGTHS = {"cpu": (1, 70, 33, 2, 5, 200, 1, 72), "cuda": ON_GPU}


def _case(name: str) -> Case:
    """384 tokens of 4 heads over 2; on a GPU 8,192 tokens of 16 over 2. MLA has no groups."""
    window, sinks, narrow = "window" in name, "sinks" in name, "v < d" in name

    def inputs(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> Arguments:
        on_gpu = device.type == "cuda"
        lengths: Sequence[int] = LENGTHS["cuda" if on_gpu else "cpu"]
        heads, groups = (16, 2) if on_gpu else (4, 2)
        d, v = ((192, 128) if on_gpu else (48, 32)) if narrow else (64, 64)

        def random(*size: int) -> Tensor:
            return torch.randn(size, generator=generator).to(device, dtype).requires_grad_()

        tokens, key_heads = sum(lengths), heads if narrow else groups
        starts = torch.tensor((0, *lengths[:-1])).cumsum(0)
        layout = DocumentLayout.build(starts, tokens, device)
        q, k, values = random(tokens, heads, d), random(tokens, key_heads, d), random(tokens, key_heads, v)
        mask = Mask(window=(128 if on_gpu else 33) if window else None)
        return q, k, values, layout, d**-0.5, mask, None, random(heads) if sinks else None

    return Case(name, inputs, (torch.bfloat16,))


OP = Op(
    name="packed_attention",
    reference=by_buckets,
    candidates={
        "varlen": Candidate(
            _varlen,
            _refuses,
            predicted_on=("cuda",),
            because="one call for all documents, without copies of q, k, v and o; with sinks or a window"
            " 0.61 GB in 17 launches, blocks of queries 8 to 49 GB in 441 to 1,819 (counted bytes of a layer"
            " of gpt-oss, 4,096 tokens)",
            waits_on=("cuda",),
        )
    },
    # checked by the first before the first use: it has all that the others have, but narrow values
    cases=tuple(map(_case, FORMS)),
    # P, dS and outputs are rounded to 8 bits (2^-9 = 0.2 % each), outputs with sinks twice
    tolerance={torch.bfloat16: 1e-2},
)
