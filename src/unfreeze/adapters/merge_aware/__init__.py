"""Train through the rounding that merging will do: y = x Q(W + ΔW)ᵀ, straight-through gradients.

The merged checkpoint then computes what was trained. Called by job/merge_aware.py.
"""

from unfreeze.adapters.merge_aware.begin import begin
from unfreeze.adapters.merge_aware.experts import RoundedExperts
from unfreeze.adapters.merge_aware.linear import RoundedLowRank
from unfreeze.adapters.merge_aware.matrix import Rounding, rounded

__all__ = ["RoundedExperts", "RoundedLowRank", "Rounding", "begin", "rounded"]
