"""Attention to the last tokens and to entries that stand for windows of earlier ones (DeepSeek-V4).

entries.py makes the entries, attention.py attends to both. Plain torch, on any device.
"""

from unfreeze.kernels.compressed.attention import attend, attend_one, select
from unfreeze.kernels.compressed.entries import Entries, pool, pool_step

__all__ = ["Entries", "attend", "attend_one", "pool", "pool_step", "select"]
