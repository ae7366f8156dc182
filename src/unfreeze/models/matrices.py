"""The matrices of a model's hidden layers: what Muon orthogonalises (train/muon.py).

They are the weights of its linear layers [out, in], and each expert's of a stack [E, out, in]. Embeddings,
the head, norms, biases, routers, indexers, hyper-connections and short convolutions are none:
- a row of an embedding or of the head belongs to one token. Most rows of an embedding have no gradient in a
  step, and an orthogonal update would move them like the others (Jordan 2024, "Muon");
- a row of a router belongs to one expert: the same holds for experts that few tokens chose;
- vectors have no singular values.

Matrices that a family stores as one (gate and up of experts, q, k and v of Phi-3, a Mamba's in_proj) stay
one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import nn

from unfreeze.models.blocks.experts import ExpertWeight
from unfreeze.models.blocks.linear import Linear
from unfreeze.models.groups import group_of

HIDDEN = ("attention", "mlp", "shared_experts", "experts")
"""Groups (groups.py) whose matrices they are."""

STEPS = 5  # of Newton-Schulz
# numbers of a stack whose matrices are orthogonalised at once: few launches, and 240 MB beside the weights
PIECE = 1 << 24


def hidden_matrices(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return name -> weight of every trained matrix of a hidden layer, [out, in] or [E, out, in]."""
    named = {
        f"{name}.weight": module.weight
        for name, module in model.named_modules()
        if isinstance(module, (Linear, ExpertWeight)) and module.codec is None and group_of(name) in HIDDEN
    }
    return {name: weight for name, weight in named.items() if weight.requires_grad}


def workspace(shape: Sequence[int], size: int) -> int:
    """Return the bytes that Muon's update of this weight needs for a moment, in numbers of `size` bytes.

    Gradient and direction in float32; X, its successor and a product; two Gram matrices. Of a stack, those of
    the matrices that are orthogonalised at once.
    """
    out, inside = shape[-2:]
    together = max(1, min(math.prod(shape[:-2]), PIECE // (out * inside)))
    return together * (out * inside * (8 + 3 * size) + 2 * min(out, inside) ** 2 * size)


def flop(shape: Sequence[int]) -> int:
    """Return the FLOP of orthogonalising a matrix or a stack: per step 4 m² n + 2 m³ with m <= n."""
    m, n = sorted(shape[-2:])
    return math.prod(shape[:-2]) * STEPS * (4 * m * m * n + 2 * m**3)
