"""The cost of MoBA in place of trained full attention, and the steps until the loss is back.

    python examples/lab/moba_from_full.py --bases build/lab/full_attention      # once: a model for each seed
    python examples/lab/moba_from_full.py --arm moba --seed 0 --out runs/moba
    unfreeze lab examples/lab/moba_from_full.toml

A byte model with full attention is trained for STEPS steps on documents of 256 bytes. Then `unfreeze.swap`
puts MoBA in its place, with the same weights: a token sees its own block of 16 bytes and the two earlier ones
whose mean keys fit its query best. Both are trained on, for a fifth of the steps, on the same documents.

    full   trained on as it is
    moba   trained on with MoBA
    fresh  MoBA from random weights, trained for as many steps as the others in all, by their schedules

    at once   held-out loss right after the swap, minus that of full attention before it, in nats
    lost      the same at the end, as a share of the loss of full attention before it, in %
    cache     bytes of the cache per token of a document of 256, in float32, measured
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from studying import arguments, each_loss, fit, fresh, packed, texts, write
from torch import Tensor

import unfreeze
from unfreeze.core.batch import Batch
from unfreeze.models.decoder import Decoder

ARMS = ("full", "moba", "fresh")
BASES = Path("build/lab/full_attention")
SEEDS = 3
LENGTH, DOCUMENTS, STEPS, PEAK = 256, 4, 300, 4e-3
BLOCK, CHOSEN = 16, 3
AGAIN = 5  # a fifth of the steps, at a quarter of the rate


def begun(seed: int) -> Decoder:
    """Random weights, with full attention."""
    return fresh(seed, positions=LENGTH, initializer_range=0.1)


def batches(text: Tensor, seed: int) -> Iterator[Batch]:
    """Endless batches of pieces of the text."""
    drawn = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - LENGTH, (DOCUMENTS,), generator=drawn).tolist()
        yield packed([text[at : at + LENGTH] for at in starts])


def bases(folder: Path, steps: int = STEPS, seeds: int = SEEDS) -> None:
    """Train the model of each seed and write its weights."""
    folder.mkdir(parents=True, exist_ok=True)
    train, _ = texts()
    for seed in range(seeds):
        model = begun(seed)
        fit(model, batches(train, seed), steps, PEAK)
        save_file(dict(model.state_dict()), folder / f"seed-{seed}.safetensors")


def with_moba(model: Decoder) -> Decoder:
    """The same weights with MoBA in every layer."""
    moba = unfreeze.swap(
        unfreeze.Model(model), "layers.*.self_attn", "moba", init="copy", block=BLOCK, chosen=CHOSEN
    )
    return moba.decoder


def losses(model: Decoder, held_out: Tensor, rows: int = 64) -> Tensor:
    """Mean loss of each held-out row."""
    rows_RL = held_out[: len(held_out) // LENGTH * LENGTH].view(-1, LENGTH)[:rows]
    parts = [each_loss(model, packed(list(part))).view(part.shape)[:, :-1] for part in rows_RL.split(8)]
    return torch.cat(parts).mean(dim=1)


@torch.no_grad()
def cache_bytes(model: Decoder) -> float:
    """Bytes per token of the cache after a document of LENGTH tokens."""
    cache = model.new_cache(1, LENGTH)
    model.prefill(packed([torch.zeros(LENGTH, dtype=torch.long)]), cache)
    return cache.nbytes / LENGTH


def study(
    arm: str, seed: int, folder: Path, steps: int = STEPS
) -> tuple[list[float], dict[str, float], list[list[float]]]:
    """(loss of each held-out row at the end, further numbers, curve of the training after the swap)."""
    train, held_out = texts()
    model = begun(seed)
    model.load_state_dict(load_file(folder / f"seed-{seed}.safetensors"))
    before = float(losses(model, held_out).mean())
    if arm == "fresh":
        model = begun(seed)
    if arm != "full":
        model = with_moba(model)
    if arm == "fresh":
        fit(model, batches(train, seed), steps, PEAK)
    after = float(losses(model, held_out).mean())
    curve = fit(model, batches(train, seed + 1_000), max(1, steps // AGAIN), PEAK / 4)
    end = losses(model, held_out)
    more = {"at once": after - before, "lost": 100 * (float(end.mean()) / before - 1)}
    return end.tolist(), {**more, "cache": cache_bytes(model)}, curve


if __name__ == "__main__":
    making = argparse.ArgumentParser(add_help=False)
    making.add_argument("--bases", type=Path)
    making.add_argument("--steps", type=int, default=STEPS)
    making.add_argument("--seeds", type=int, default=SEEDS)
    if (options := making.parse_known_args()[0]).bases:
        torch.set_num_threads(1)
        bases(options.bases, options.steps, options.seeds)
    else:
        options = arguments(__doc__, ARMS)
        steps = options.steps or STEPS
        rows, more, curve = study(options.arm, options.seed, BASES, steps)
        tokens = (steps + steps // AGAIN) * DOCUMENTS * LENGTH
        write(options.out, sum(rows) / len(rows), more, model=begun(0), tokens=tokens, curve=curve, rows=rows)
