"""Does a learned low-rank gate find the blocks of attention's mass better than the mean of their keys?

    python examples/lab/block_gate.py --arm rank_8 --seed 0 --out runs/gate
    unfreeze lab examples/lab/block_gate.toml

A byte model is trained with full attention. Then its weights are frozen, and the gate of every layer learns
to follow the mass of attention on blocks of BLOCK tokens (kernels/moba/divergence.py). The value of an arm is
recall@k: of the k earlier blocks with the most mass, the share that are the gate's best k; mean over layers,
heads and held-out tokens that have more than k earlier blocks. All arms have the same attention.

    mean     q · mean(k), as in MoBA; nothing is learned
    rank_r   (A q) · B [mean, max, min](k), with A [r, d] per query head, B [r, 3 d] per key head; d = 16
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from studying import arguments, fit, fresh, mean_loss, packed, texts, write
from torch import Tensor

from unfreeze.core.batch import Batch
from unfreeze.core.taps import Tap
from unfreeze.kernels.compressed import Entries
from unfreeze.kernels.moba import block_mass
from unfreeze.kernels.moba.choice import block_scores
from unfreeze.models.blocks.moba import MixtureOfBlocks
from unfreeze.models.blocks.taps import Taps
from unfreeze.models.decoder import Decoder
from unfreeze.models.factory import from_config
from unfreeze.models.indexers import mixtures_of_blocks, train_indexers
from unfreeze.models.init import initialize
from unfreeze.models.parts import ASSEMBLED

ARMS = ("mean", "rank_2", "rank_4", "rank_8", "rank_16")
LENGTH, BLOCK, DOCUMENTS = 256, 16, 8
K = 3  # blocks beside the own one, so a token would see 64 of 256
STEPS, RATE = 300, 3e-3
GATE_STEPS, GATE_RATE = 120, 1e-3


def batches(text: Tensor, seed: int) -> Iterator[Batch]:
    """Endless; they depend on the seed alone."""
    drawn = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - LENGTH, (DOCUMENTS,), generator=drawn).tolist()
        yield packed([text[at : at + LENGTH] for at in starts])


def with_gates(arm: str, seed: int) -> Decoder:
    """A model of which every token sees all blocks: full attention, and beside it the gates of the arm."""
    whole = {"at": "layers.*.self_attn", "part": "moba", "block": BLOCK, "chosen": LENGTH // BLOCK}
    gate = {"gate": "mean"} if arm == "mean" else {"gate": "low_rank", "rank": int(arm.removeprefix("rank_"))}
    config = {**fresh(seed).shape.config, "base_model_type": "llama", "model_type": ASSEMBLED}
    model = from_config({**config, "parts": [{**whole, **gate}]}, torch.float32, "cpu")
    initialize(model, seed)
    model.load_state_dict(fresh(seed).state_dict(), strict=False)
    return model


def differ(model: Decoder, batch: Batch) -> Tensor:
    """Mean divergence of the gates from attention's mass, over tokens, summed over layers."""
    taps = Taps([Tap(layer, "divergence") for layer in mixtures_of_blocks(model)])
    model.hidden(batch, taps=taps)
    return torch.stack([recalls.mean() for recalls in taps.found.values()]).sum()


@torch.no_grad()
def recall(model: Decoder, batch: Batch, k: int = K) -> float:
    """recall@k of the gates."""
    mixtures, shares = mixtures_of_blocks(model), []
    taps = Taps([Tap(layer, name) for layer in mixtures for name in ("q", "k")])
    model.hidden(batch, taps=taps)
    for layer, mixture in mixtures.items():
        q, keys = taps.found[Tap(layer, "q")], taps.found[Tap(layer, "k")]
        shares.append(_recall(model, mixture, batch, q, keys, k))
    return float(torch.cat(shares).mean())


def _recall(
    model: Decoder, mixture: MixtureOfBlocks, batch: Batch, q: Tensor, keys: Tensor, k: int
) -> Tensor:

    size, scale = mixture.block, q.shape[-1] ** -0.5
    entries = Entries.build(tuple(batch.starts_S.tolist()), len(q), size, "cpu")
    e = mixture.indexer.summary(keys[entries.first_E[:, None] + torch.arange(size)])
    q_gate, shares = mixture.indexer.queries(q), []
    for tokens, blocks, mass_nHe in block_mass(q, keys, scale, entries):
        if mass_nHe.shape[-1] <= k:
            continue
        score_nHe = block_scores(q_gate[tokens], e[blocks])
        own_n = batch.positions_T[tokens] // size
        score_nHe.masked_fill_((torch.arange(mass_nHe.shape[-1]) >= own_n[:, None])[:, None], -torch.inf)
        best, chosen = mass_nHe.topk(k).indices, score_nHe.topk(k).indices
        share_nH = (best[..., None] == chosen[..., None, :]).any(-1).float().mean(-1)
        shares.append(share_nH[own_n > k].flatten())
    return torch.cat(shares)


def study(
    arm: str, seed: int, steps: int = STEPS, gate_steps: int = GATE_STEPS
) -> tuple[Decoder, float, dict[str, float], list[list[float]]]:
    """(model, recall, further numbers, curve of the gates' loss)."""
    train, held_out = texts()
    model = with_gates(arm, seed)
    fit(model, batches(train, seed), steps, RATE, mean_loss)
    curve: list[list[float]] = []
    unseen = packed(list(held_out[: 16 * LENGTH].view(16, LENGTH)))
    before = recall(model, unseen)
    model.requires_grad_(False)
    if arm != "mean":
        train_indexers(model)
        curve = fit(model, batches(train, seed + 1), gate_steps, GATE_RATE, differ)
    learnt = sum(p.numel() for p in model.parameters() if p.requires_grad)
    more = {"parameters": learnt / len(model.layers), "before": before}
    return model, recall(model, unseen), more, curve


if __name__ == "__main__":
    options = arguments(__doc__, ARMS)
    steps = options.steps or STEPS
    model, value, more, curve = study(options.arm, options.seed, steps, min(steps, GATE_STEPS))
    write(options.out, value, more, model=model, tokens=steps * DOCUMENTS * LENGTH, curve=curve)
