"""Causal attention inside documents of one length, and what all attention over packed documents shares.

`DocumentLayout.build` once per batch; kernels/packed_attention per layer.
"""

from unfreeze.kernels.attention.documents import OP, attend, bucket
from unfreeze.kernels.attention.form import CAUSAL, Mask
from unfreeze.kernels.attention.layout import Bucket, DocumentLayout
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
    "reference_attention",
]
