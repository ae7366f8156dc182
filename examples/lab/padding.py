"""Does the embedding of padding matter?

    python examples/lab/padding.py --arm seen --seed 0 --out runs/padding
    unfreeze lab examples/lab/padding.toml

Documents of 24 to 128 bytes; a batch has 16 of them. In every arm the same tokens are taught, but for
`counted`, which also teaches padding to follow padding.

    none      packed end to end, without padding
    masked    padded on the left; no token sees padding. Padding then is a document of its own
    right     padded on the right without a mask: nothing real comes after it
    seen      padded on the left without a mask: every token sees it
    counted   as seen, and padding is taught too

Measured of the padding's row of an untied embedding after training with weight decay 0.1:

    gradient        its norm, as a share of the mean norm of the rows of bytes
    tied_gradient   the same in a model whose head is the embedding
    kept            its norm after training, as a share of that before
    reach           largest change of the hidden states of real tokens when the row is drawn anew
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from studying import BYTES, arguments, each_loss, fit, fresh, mean_loss, packed, texts, write
from torch import Tensor

from unfreeze.core.batch import Batch
from unfreeze.models.decoder import Decoder

ARMS = ("none", "masked", "right", "seen", "counted")
PAD = BYTES
SHORTEST, LONGEST, DOCUMENTS = 24, 128, 16
STEPS, RATE, DECAY = 400, 1e-3, 0.1


def padded(arm: str, documents: list[Tensor]) -> tuple[Batch, Tensor]:
    """(the batch of an arm, True at its real tokens). In all arms the first real token is not taught."""
    parts: list[Tensor] = []
    taught: list[Tensor] = []
    for document in documents:
        pads = torch.full((LONGEST - len(document),), PAD)
        own = torch.ones(len(document))
        own[-1] = 0
        if arm == "none" or not len(pads):
            parts, taught = [*parts, document], [*taught, own]
        elif arm == "masked":
            parts, taught = [*parts, pads, document], [*taught, torch.zeros(len(pads)), own]
        elif arm == "right":
            parts += [torch.cat((document, pads))]
            taught += [torch.cat((own, torch.zeros(len(pads))))]
        else:
            of_pads = torch.full((len(pads),), float(arm == "counted"))
            of_pads[-1] = 0
            parts, taught = [*parts, torch.cat((pads, document))], [*taught, torch.cat((of_pads, own))]
    batch = packed(parts, taught)
    return batch, batch.tokens_T != PAD


def drawn_documents(text: Tensor, seed: int) -> Iterator[list[Tensor]]:
    """Endless lists of documents, the same for every arm."""
    drawn = torch.Generator().manual_seed(seed)
    while True:
        lengths = torch.randint(SHORTEST, LONGEST + 1, (DOCUMENTS,), generator=drawn).tolist()
        starts = [int(torch.randint(len(text) - n, (1,), generator=drawn)) for n in lengths]
        yield [text[at : at + n] for at, n in zip(starts, lengths, strict=True)]


def row_gradient(model: Decoder, batch: Batch) -> float:
    """Norm of the gradient of padding's row, as a share of the mean norm of the rows of the batch's bytes."""
    rows = model.model.embed_tokens.weight
    (gradient,) = torch.autograd.grad(mean_loss(model, batch), [rows])
    bytes_N = batch.tokens_T.unique()
    return float(gradient[PAD].norm() / gradient[bytes_N[bytes_N != PAD]].norm(dim=1).mean())


@torch.no_grad()
def reach(model: Decoder, batch: Batch, real_T: Tensor, seed: int) -> float:
    """Largest change of a real token's hidden state when padding's row is drawn anew, N(0, 1)."""
    row = model.model.embed_tokens.weight[PAD]
    own, before = row.clone(), model.hidden(batch)[real_T]
    row.copy_(torch.randn(row.shape, generator=torch.Generator().manual_seed(seed)))
    after = model.hidden(batch)[real_T]
    row.copy_(own)
    return float((after - before).abs().max())


def study(arm: str, seed: int, steps: int = STEPS) -> tuple[float, dict[str, float], list[list[float]]]:
    """(held-out loss without padding, further numbers, curve)."""
    train, held_out = texts()
    model, tied = (fresh(seed, BYTES + 1, LONGEST, tie_word_embeddings=tie) for tie in (False, True))
    before = float(model.model.embed_tokens.weight[PAD].norm().detach())
    documents = drawn_documents(train, seed)
    curve = fit(model, (padded(arm, each)[0] for each in documents), steps, RATE, decay=DECAY)

    # held-out documents alone, and padded as in training
    options = drawn_documents(held_out, 7)
    alone: list[Tensor] = []
    beside: list[Tensor] = []
    for _ in range(20):
        rows = next(options)
        for own, losses in (("none", alone), (arm, beside)):
            batch, real_T = padded(own, rows)
            counted_T = (batch.weights_T > 0) & real_T
            losses.append(each_loss(model, batch)[counted_T])
    batch, real_T = padded(arm, next(documents))
    more = {
        "padded_loss": float(torch.cat(beside).mean()),
        "gradient": row_gradient(model, batch),
        "tied_gradient": row_gradient(tied, batch),
        "kept": float(model.model.embed_tokens.weight[PAD].norm().detach()) / before,
        "reach": reach(model, batch, real_T, seed),
    }
    return float(torch.cat(alone).mean()), more, curve


if __name__ == "__main__":
    options = arguments(__doc__, ARMS)
    steps = options.steps or STEPS
    loss, more, curve = study(options.arm, options.seed, steps)
    tokens = steps * DOCUMENTS * (SHORTEST + LONGEST) // 2
    model = fresh(0, BYTES + 1)
    write(options.out, loss, more, model=model, tokens=tokens, curve=curve)
