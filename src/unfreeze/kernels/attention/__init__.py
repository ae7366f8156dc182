"""Causal attention inside each document of a flat packed batch.

`DocumentLayout.build` once per batch, `packed_attention` per layer.
"""

from unfreeze.kernels.attention.documents import OP, attend, bucket
from unfreeze.kernels.attention.form import CAUSAL, Mask
from unfreeze.kernels.attention.layout import Bucket, DocumentLayout
from unfreeze.kernels.attention.packed import packed_attention
from unfreeze.kernels.attention.reference import attention_map, reference_attention

__all__ = [
    "CAUSAL",
    "OP",
    "Bucket",
    "DocumentLayout",
    "Mask",
    "attend",
    "attention_map",
    "bucket",
    "packed_attention",
    "reference_attention",
]
