"""Load balance of a layer's experts, from the number of tokens routed to each.

Plain numbers, without torch: train/ writes them to events, report/ draws them.

E experts, n_e tokens of expert e, mean m = sum(n) / E.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def max_violation(counts_E: Sequence[int]) -> float | None:
    """max(n) / m - 1; None without tokens.

    0 if all experts have the same load, E / top_k - 1 if every token chooses the same top_k experts.
    Source: MaxVio in Wang et al., arXiv:2408.15664.
    """
    total = sum(counts_E)
    return max(counts_E) * len(counts_E) / total - 1 if total else None


def load_entropy(counts_E: Sequence[int]) -> float | None:
    """-sum p ln p / ln E with p = n / sum(n); None without tokens, 1 if there is one expert.

    1 if all experts have the same load, 0 if one has all of it.
    """
    total = sum(counts_E)
    if not total:
        return None
    entropy = -sum(n / total * math.log(n / total) for n in counts_E if n)
    return entropy / math.log(len(counts_E)) if len(counts_E) > 1 else 1.0


def dead(counts_E: Sequence[int]) -> int:
    """Number of experts without a token."""
    return sum(1 for n in counts_E if n == 0)


def balance(counts_E: Sequence[int]) -> dict[str, float | int | None]:
    """Compute all three, as in the event field expert_balance of a layer."""
    return {
        "max_violation": max_violation(counts_E),
        "entropy": load_entropy(counts_E),
        "dead": dead(counts_E),
    }
