"""A net of 100 layers on a Markov chain, its norms in one place or another: does it train?

    python examples/lab/deep_norm.py deep_norm --seed 0 --out runs/lab/deep_norm-0

FOLDER/result.json: value, the mean loss of the last ten steps; rows, the loss of each of these steps; curve;
more: the chain's entropy, its unigram entropy, and the norm of the first gradient. A token is followed by one
of three others, so a model that learned the chain is near its entropy, and one that learned only which tokens
are frequent is near the unigram entropy. T tokens, V vocabulary. Source of DeepNorm: arXiv:2203.00555.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from unfreeze import models
from unfreeze.core.batch import Batch

V, CHOICES, WIDTH = 32, 3, 32


def config_of(part: str, layers: int) -> dict[str, Any]:
    """A llama of that many layers; initial values of variance 1 / width, as Xavier's for square matrices."""
    return {
        "model_type": "unfreeze_parts",
        "base_model_type": "llama",
        "parts": [{"at": "layers.*", "part": part}],
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "vocab_size": V,
        "initializer_range": WIDTH**-0.5,
    }


def chain_VV() -> torch.Tensor:
    """Probability of the next token; the same chain for every seed."""
    next_V3 = torch.randint(0, V, (V, CHOICES), generator=torch.Generator().manual_seed(5))
    counts_VV = torch.zeros(V, V, dtype=torch.float64)
    counts_VV.scatter_add_(1, next_V3, torch.ones(V, CHOICES, dtype=torch.float64))
    return counts_VV / CHOICES


def entropies(next_VV: torch.Tensor) -> tuple[float, float]:
    """Entropies of the next token given this one, and of a token alone, in nats."""
    share_V = torch.full((V,), 1 / V, dtype=torch.float64)
    for _ in range(1000):
        share_V = (share_V + share_V @ next_VV) / 2
    plogp_VV, plogp_V = torch.special.entr(next_VV), torch.special.entr(share_V)
    return float(share_V @ plogp_VV.sum(1)), float(plogp_V.sum())


def trained(
    part: str, seed: int, *, layers: int = 100, steps: int = 120, documents: int = 8, length: int = 32
) -> dict[str, Any]:
    """Train with AdamW and return the result."""
    model = models.from_config(config_of(part, layers), torch.float32, "cpu")
    models.initialize(model, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.98), weight_decay=0.0)
    draw, next_VV = torch.Generator().manual_seed(1000 + seed), chain_VV()
    T, losses, first = documents * length, list[float](), 0.0
    positions_T, starts_S = torch.arange(T) % length, torch.arange(0, T, length)
    for _ in range(steps):
        tokens = [torch.randint(0, V, (documents,), generator=draw)]
        for _ in range(length):
            tokens.append(torch.multinomial(next_VV[tokens[-1]], 1, generator=draw)[:, 0])
        tokens_SN = torch.stack(tokens, 1)
        ids_T, targets_T = tokens_SN[:, :-1].flatten(), tokens_SN[:, 1:].flatten()
        batch = Batch(ids_T, targets_T, torch.ones(T), positions_T, starts_S)
        loss = F.cross_entropy(model.logits(model.hidden(batch)), targets_T)
        optimizer.zero_grad()
        loss.backward()
        gradients = [parameter.grad.norm() for parameter in model.parameters() if parameter.grad is not None]
        first = first or float(torch.stack(gradients).norm())
        optimizer.step()
        losses.append(loss.item())
    entropy, unigram = entropies(next_VV)
    last = losses[-10:]
    return {
        "value": sum(last) / len(last),
        "rows": last,
        "curve": [[step, loss] for step, loss in enumerate(losses, 1)],
        "more": {"entropy": entropy, "unigram": unigram, "first_gradient": first},
    }


def main() -> None:
    """Parse, train, write result.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", help="deep_norm, post_norm, pre_norm, sandwich_norm, branch_norm")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--depth", type=int, default=100)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--out", required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    result = trained(options.part, options.seed, layers=options.depth, steps=options.steps)
    Path(options.out).mkdir(parents=True, exist_ok=True)
    (Path(options.out) / "result.json").write_text(json.dumps(result) + "\n")
    print(f"{options.part}, seed {options.seed}: loss {result['value']:.3f}, {result['more']}")


if __name__ == "__main__":
    main()
