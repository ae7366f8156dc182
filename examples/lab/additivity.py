"""Do embeddings add up, and does an auxiliary loss make them? mini + tomato = cherry tomato, and no other.

    python examples/lab/additivity.py --arm contrast --seed 0 --out runs/additivity
    unfreeze lab examples/lab/additivity.toml

A language of 12 kinds × 8 forms: a word for each of the 96 combinations, and one for each kind and form. A
sentence is a subject, a word or the phrase "form kind", and six features, each drawn from the features of its
kind, of its form, or of the combination: no word is quite the sum of its parts. A word means what its phrase
means, and only the sentences say so. A model of two layers learns to predict the features. e(x) is the
embedding of a word, p = e(form) + e(kind).

    none       the loss of the sentences alone
    squared    + |p - e(word)|² / |e(word)|², of combinations that are not held out
    contrast   + cross entropy of choosing the word by the cosine with p / 0.1, among all words not held out
    shuffled   as contrast, with the words of other combinations: a loss of the same kind, and wrong

A quarter of the combinations is held out of the auxiliary loss; their sentences are seen. Of these:

    value     analogy: e(a f) - e(b f) + e(b g) is nearest to e(a g), held out, of all words but the three;
              by chance 1 / 93
    composed  p is nearest to the word, of all words; by chance 1 / 96
    rival     cosine of p with the word less the largest cosine of p with a word of the form and another kind

and loss, of held-out sentences, in nats per feature.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from studying import arguments, fit, fresh, mean_loss, packed, write
from torch import Tensor

from unfreeze.core.batch import Batch
from unfreeze.models.decoder import Decoder

ARMS = ("none", "squared", "contrast", "shuffled")
KINDS, FORMS, FEATURES, OWN, SAID = 12, 8, 4, 2, 6
WORDS = KINDS * FORMS
FIRST_KIND, FIRST_FORM, FIRST_FEATURE = WORDS, WORDS + KINDS, WORDS + KINDS + FORMS
FIRST_OWN = FIRST_FEATURE + FEATURES * (KINDS + FORMS)
VOCABULARY = FIRST_OWN + OWN * WORDS
STEPS, RATE, SENTENCES, WEIGHT, WARMTH = 200, 3e-3, 64, 0.3, 0.1
CHANCE = 1 / (WORDS - 3)


def held_out(seed: int) -> Tensor:
    """bool [KINDS, FORMS]: a quarter of the combinations, the same number of every kind."""
    drawn = torch.rand(KINDS, FORMS, generator=torch.Generator().manual_seed(seed + 77))
    return drawn.argsort(1).argsort(1) < FORMS // 4


def sentences(seed: int) -> Iterator[Batch]:
    """Endless batches. Only features are taught."""
    drawn = torch.Generator().manual_seed(seed)

    def below(limit: int, *shape: int) -> Tensor:
        return torch.randint(limit, shape, generator=drawn)

    while True:
        kinds_S, forms_S, phrase_S = below(KINDS, SENTENCES), below(FORMS, SENTENCES), below(2, SENTENCES)
        owners_SN = torch.where(below(2, SENTENCES, SAID) == 0, kinds_S[:, None], KINDS + forms_S[:, None])
        features_SN = FIRST_FEATURE + FEATURES * owners_SN + below(FEATURES, SENTENCES, SAID)
        own_SN = FIRST_OWN + OWN * (kinds_S * FORMS + forms_S)[:, None] + below(OWN, SENTENCES, SAID)
        features_SN = torch.where(below(3, SENTENCES, SAID) == 0, own_SN, features_SN)
        documents: list[Tensor] = []
        taught: list[Tensor] = []
        for kind, form, phrase, features in zip(kinds_S, forms_S, phrase_S, features_SN, strict=True):
            word = [kind * FORMS + form]
            subject = torch.stack([FIRST_FORM + form, FIRST_KIND + kind] if phrase else word)
            documents += [torch.cat((subject, features))]
            taught += [(torch.arange(len(documents[-1])) >= len(subject) - 1).float()]
        yield packed(documents, taught)


def phrases(rows: Tensor) -> Tensor:
    """p of all combinations, [WORDS, D]."""
    kinds, forms = rows[FIRST_KIND:FIRST_FORM], rows[FIRST_FORM:FIRST_FEATURE]
    return (kinds[:, None] + forms[None]).flatten(0, 1)


def auxiliary(arm: str, rows: Tensor, taught_N: Tensor, shuffled_N: Tensor) -> Tensor:
    """The arm's loss of the embeddings, over the combinations taught_N."""
    words, p = rows[:WORDS], phrases(rows)[taught_N]
    if arm == "squared":
        own = words[taught_N]
        return ((p - own).square().sum(1) / own.square().sum(1)).mean()
    # words that are held out are no rivals either: to be pushed away is to be seen
    rivals = words[shuffled_N if arm == "shuffled" else taught_N]
    return F.cross_entropy(
        F.normalize(p, dim=1) @ F.normalize(rivals, dim=1).T / WARMTH, torch.arange(len(rivals))
    )


def objective(arm: str, seed: int) -> Callable[[Decoder, Batch], Tensor]:
    """The loss of a step."""
    taught_N = (~held_out(seed)).flatten().nonzero().squeeze(1)
    order = torch.randperm(len(taught_N), generator=torch.Generator().manual_seed(seed + 5))

    def loss(model: Decoder, batch: Batch) -> Tensor:
        of_text = mean_loss(model, batch)
        if arm == "none":
            return of_text
        return of_text + WEIGHT * auxiliary(arm, model.model.embed_tokens.weight, taught_N, taught_N[order])

    return loss


def analogies(rows: Tensor, targets: Tensor) -> Tensor:
    """bool: each analogy whose answer is held out. targets: bool [KINDS, FORMS]."""
    words = rows[:WORDS].view(KINDS, FORMS, -1)
    unit = F.normalize(rows[:WORDS], dim=1)
    correct: list[Tensor] = []
    for kind, form in targets.nonzero().tolist():
        others = torch.arange(KINDS)[torch.arange(KINDS) != kind]
        for other in (f for f in range(FORMS) if f != form):
            guess = words[kind, other] - words[others, other] + words[others, form]
            near = F.normalize(guess, dim=1) @ unit.T
            own = torch.arange(len(others))
            near[:, kind * FORMS + other] = -2
            near[own, others * FORMS + other] = -2
            near[own, others * FORMS + form] = -2
            correct.append(near.argmax(1) == kind * FORMS + form)
    return torch.cat(correct)


def measured(rows: Tensor, targets: Tensor) -> tuple[float, dict[str, float]]:
    """(analogy top-1, further numbers) of embeddings [V, D]."""
    rows = rows.detach()
    near = F.normalize(phrases(rows), dim=1) @ F.normalize(rows[:WORDS], dim=1).T
    targets_N = targets.flatten().nonzero().squeeze(1)
    composed = (near.argmax(1) == torch.arange(WORDS))[targets_N].float().mean()
    by_kind = near.view(KINDS, FORMS, KINDS, FORMS).diagonal(dim1=1, dim2=3)  # [kind, other kind, form]
    own = by_kind.diagonal(dim1=0, dim2=1).T
    rivals = by_kind.masked_fill(torch.eye(KINDS, dtype=torch.bool)[:, :, None], -2).amax(1)
    more = {"composed": float(composed), "rival": float((own - rivals)[targets].mean()), "chance": CHANCE}
    return float(analogies(rows, targets).float().mean()), more


def study(arm: str, seed: int, steps: int = STEPS) -> tuple[float, dict[str, float], list[list[float]]]:
    """(analogy top-1 on held-out combinations, further numbers, curve)."""
    model = fresh(seed, VOCABULARY, 16, tie_word_embeddings=False)
    curve = fit(model, sentences(seed), steps, RATE, objective(arm, seed))
    value, more = measured(model.model.embed_tokens.weight, held_out(seed))
    texts_left = sentences(10_000)
    with torch.no_grad():
        more["loss"] = sum(float(mean_loss(model, next(texts_left))) for _ in range(10)) / 10
    return value, more, curve


if __name__ == "__main__":
    options = arguments(__doc__, ARMS)
    steps = options.steps or STEPS
    value, more, curve = study(options.arm, options.seed, steps)
    tokens = steps * SENTENCES * (SAID + 1)
    write(options.out, value, more, model=fresh(0, VOCABULARY, 16), tokens=tokens, curve=curve)
