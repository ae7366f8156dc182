"""Is a loss over the last 100 tokens alone (num_logits_to_keep = 100) unstable, and why?

    python examples/lab/kept_logits.py --arm last --seed 0 --out runs/kept
    unfreeze lab examples/lab/kept_logits.toml

Documents of 100 to 512 bytes. In a batch padded on the left, the last 100 columns are the last 100 tokens of
every document; so packed documents with these tokens taught have the same loss, without the padding.

    full     every token is taught
    last     the last 100 tokens of each document
    random   100 tokens of each document, drawn anew each time: as many as last

All arms see the same documents. With g the gradient of a step's mean loss, over 32 steps at the same weights
(those after a sixth of the full arm's steps):

    noise    tr Cov(g) / |E g|², both without bias: steps to average until noise and signal are equal
    cosine   between E g and the full arm's E g of other documents; without bias, so it may exceed 1
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from studying import arguments, each_loss, fit, fresh, gradient, packed, texts, write
from torch import Tensor

from unfreeze.core.batch import Batch
from unfreeze.models.decoder import Decoder

ARMS = ("full", "last", "random")
SHORTEST, LONGEST, KEPT, DOCUMENTS = 100, 512, 100, 8
EDGES = (0, 16, 64, 128, 256, 512)  # of the number of tokens before the predicted one
STEPS, SAMPLES = 240, 32


def taught(arm: str, length: int, drawn: torch.Generator) -> Tensor:
    """True at the positions of a document whose next token is taught; the last position has none."""
    chosen = torch.zeros(length, dtype=torch.bool)
    if arm == "full":
        chosen[: length - 1] = True
    elif arm == "last":
        chosen[max(0, length - 1 - KEPT) : length - 1] = True
    else:
        chosen[torch.randperm(length - 1, generator=drawn)[:KEPT]] = True
    return chosen


def batches(text: Tensor, arm: str, seed: int) -> Iterator[Batch]:
    """Endless batches. The documents depend on the seed alone, the drawn positions on their own generator."""
    drawn, positions = (torch.Generator().manual_seed(number) for number in (seed, seed + 10_000))
    while True:
        lengths = torch.randint(SHORTEST, LONGEST + 1, (DOCUMENTS,), generator=drawn).tolist()
        starts = [int(torch.randint(len(text) - n, (1,), generator=drawn)) for n in lengths]
        documents = [text[at : at + n] for at, n in zip(starts, lengths, strict=True)]
        yield packed(documents, [taught(arm, n, positions) for n in lengths])


def moments(model: Decoder, steps: Iterator[Batch], samples: int) -> tuple[Tensor, float, float]:
    """(mean gradient, |E g|² without bias, tr Cov g) over the next steps."""
    total = torch.zeros(())
    squares = 0.0
    for _ in range(samples):
        g = gradient(model, next(steps))
        total, squares = total + g, squares + float(g @ g)
    mean = total / samples
    variance = (squares - samples * float(mean @ mean)) / (samples - 1)
    return mean, float(mean @ mean) - variance / samples, variance


def by_context(model: Decoder, held_out: Tensor) -> tuple[float, list[float]]:
    """Held-out loss, and that of targets with few to many tokens before them."""
    rows = held_out[: len(held_out) // LONGEST * LONGEST].view(-1, LONGEST)[:64]
    losses = torch.cat(
        [each_loss(model, packed(list(part))).view(-1, LONGEST)[:, :-1] for part in rows.split(8)]
    )
    return float(losses.mean()), [float(losses[:, lo:hi].mean()) for lo, hi in itertools.pairwise(EDGES)]


def study(
    arm: str, seed: int, steps: int = STEPS, samples: int = SAMPLES
) -> tuple[float, dict[str, float], list]:
    """(held-out loss, further numbers, curve)."""
    train, held_out = texts()

    # gradients of every arm at the same weights
    model = fresh(seed)
    fit(model, batches(train, "full", seed), steps // 6, 3e-3)
    mean, signal, variance = moments(model, batches(train, arm, seed + 500), samples)
    whole, of_whole, _ = moments(model, batches(train, "full", seed + 900), samples)
    more = {
        "noise": variance / signal,
        "variance": variance,
        "signal": signal,
        "cosine": float(mean @ whole) / (signal * of_whole) ** 0.5,
    }

    # training by the arm itself
    model = fresh(seed)
    curve = fit(model, batches(train, arm, seed), steps, 3e-3)
    loss, parts = by_context(model, held_out)
    more |= {f"loss_{lo}_{hi}": part for (lo, hi), part in zip(itertools.pairwise(EDGES), parts, strict=True)}
    return loss, more, curve


if __name__ == "__main__":
    options = arguments(__doc__, ARMS)
    steps = options.steps or STEPS
    loss, more, curve = study(options.arm, options.seed, steps)
    tokens = steps * DOCUMENTS * (SHORTEST + LONGEST) // 2
    write(options.out, loss, more, model=fresh(options.seed), tokens=tokens, curve=curve)
