"""Mixture of Block Attention: a query sees its own block and the best earlier blocks of its document.

choice.py has the formula of the choice, attention.py the attention of whole documents and of a step,
divergence.py the loss by which a learned gate follows attention.
"""

from unfreeze.kernels.moba.attention import attend, scratch_bytes
from unfreeze.kernels.moba.choice import Gated, attend_one, select, select_one
from unfreeze.kernels.moba.divergence import block_divergence, block_mass

__all__ = [
    "Gated",
    "attend",
    "attend_one",
    "block_divergence",
    "block_mass",
    "scratch_bytes",
    "select",
    "select_one",
]
