"""Is a smoother RoPE needed for long inputs? Trained on 256 positions, asked at 256 to 1,024.

    python examples/lab/smoother_rope.py --arm yarn --seed 0 --out runs/rope
    unfreeze lab examples/lab/smoother_rope.toml

A text is letters of a Markov chain, and between them needles, each a token of a colour and a value. Later
comes the question for a colour, and its value. A model of two layers learns texts of 256 tokens with few to
many questions. Asked: a needle at a depth of 0 to 1 of a text, three of other colours to distract, and the
question at the end. Chance is 1 / 16.

    none     the frequencies as trained
    linear   all divided by 4 (position interpolation)
    ntk      a larger theta: the highest stays, the lowest is divided by 4
    yarn     low ones divided by 4, high ones kept, and the scores a little larger

The scaling is that of --rope-scaling, factor 4. All arms of a seed begin with the same trained weights, which
the first of them leaves in --bases. The value is the share of right answers at 1,024 tokens, over all depths,
without further training; tuned_… are the same after 40 steps on texts of 1,024.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save
from studying import arguments, each_loss, fit, packed, write
from torch import Tensor

from unfreeze.core.batch import Batch
from unfreeze.core.files import write_file
from unfreeze.core.longer import Longer
from unfreeze.models.decoder import Decoder
from unfreeze.models.factory import from_config
from unfreeze.models.from_shape import config_of
from unfreeze.models.init import initialize
from unfreeze.models.longer import config_for

ARMS = ("none", "linear", "ntk", "yarn")
FACTOR, TRAINED = 4, 256
LENGTHS, DEPTHS = (256, 512, 768, 1024), (0.0, 0.25, 0.5, 0.75, 1.0)
LETTERS, COLOURS, VALUES = 32, 8, 16
FIRST_VALUE = LETTERS + COLOURS
FIRST_NEEDLE = FIRST_VALUE + VALUES
VOCABULARY = FIRST_NEEDLE + COLOURS * VALUES
BOUND, PAIRS = 6, (8, 100)  # colours of a text, and needles and questions of 256 tokens: few to many
STEPS, TUNING, RATE, TOKENS = 400, 40, 3e-3, 4096
LETTER_WEIGHT = 0.1  # beside 1 for an answer
ASKED = 32  # texts per cell of the grid
BASES = Path("build/lab/smoother_rope_bases")


def config(arm: str) -> dict[str, object]:
    """config.json of the arm: two layers, 4 heads of 32."""
    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256}
    own = config_of("llama", sizes, {}, vocabulary=VOCABULARY, positions=TRAINED)
    return own if arm == "none" else config_for(own, Longer(arm, float(FACTOR)))


def letters(count: int, length: int, drawn: torch.Generator) -> Tensor:
    """Texts of the Markov chain, [count, length]: each letter has four that can follow it."""
    follow = torch.randint(LETTERS, (LETTERS, 4), generator=torch.Generator().manual_seed(5))
    choice = torch.randint(4, (length, count), generator=drawn)
    text = [torch.randint(LETTERS, (count,), generator=drawn)]
    for step in range(1, length):
        text.append(follow[text[-1], choice[step]])
    return torch.stack(text, 1)


def lessons(seed: int, length: int) -> Iterator[Batch]:
    """Endless batches of TOKENS tokens: letters weigh little, the values of keys seen before 1."""
    drawn = torch.Generator().manual_seed(seed)
    count = TOKENS // length
    while True:
        text = letters(count, length, drawn)
        weights = torch.full((count, length), LETTER_WEIGHT)
        for row in range(count):
            pairs = int(torch.randint(*PAIRS, (1,), generator=drawn)) * length // TRAINED
            colours = torch.randperm(COLOURS, generator=drawn)[:BOUND]
            values = torch.randint(VALUES, (BOUND,), generator=drawn)
            places = torch.randperm(length // 2 - 1, generator=drawn)[:pairs].sort().values * 2
            which = torch.randint(BOUND, (len(places),), generator=drawn)
            scored = (which[:, None] == which[None]).tril(-1).any(1)  # a colour's first place is its needle
            needles = FIRST_NEEDLE + VALUES * colours[which] + values[which]
            text[row, places] = torch.where(scored, LETTERS + colours[which], needles)
            text[row, places[scored] + 1] = FIRST_VALUE + values[which][scored]
            weights[row, places[scored]] = 1
        yield packed(list(text), list(weights))


def questions(length: int, depth: float, seed: int, count: int) -> tuple[Tensor, Tensor]:
    """(texts that end with a question [count, length], its values [count])."""
    drawn = torch.Generator().manual_seed(seed)
    text = letters(count, length, drawn)
    answers = torch.randint(VALUES, (count,), generator=drawn)
    at = round(depth * (length - 4))
    for row in range(count):
        colours = torch.randperm(COLOURS, generator=drawn)[:4]
        places = torch.randperm(length - 1, generator=drawn)[:4]
        others = places[places != at][:3]
        values = torch.randint(VALUES, (3,), generator=drawn)
        text[row, others] = FIRST_NEEDLE + VALUES * colours[1:] + values
        text[row, at] = FIRST_NEEDLE + VALUES * colours[0] + answers[row]
        text[row, -1] = LETTERS + colours[0]
    return text, answers


@torch.no_grad()
def grid(model: Decoder, seed: int, count: int = ASKED) -> dict[str, float]:
    """Share of right answers, "length_depth" -> share."""
    cells: dict[str, float] = {}
    for length in LENGTHS:
        for depth in DEPTHS:
            text, answers = questions(length, depth, seed, count)
            right: list[Tensor] = []
            for part, own in zip(text.split(8), answers.split(8), strict=True):
                last = model.hidden(packed(list(part))).unflatten(0, part.shape)[:, -1]
                right += [model.logits(last).argmax(-1) == FIRST_VALUE + own]
            cells[f"{length}_{depth:g}"] = float(torch.cat(right).float().mean())
    return cells


def by_position(model: Decoder, seed: int) -> dict[str, float]:
    """Nats per letter of texts without needles, by quarters of 1,024 positions; the best is about ln 4."""
    text = letters(8, LENGTHS[-1], torch.Generator().manual_seed(seed))
    losses = each_loss(model, packed(list(text))).view(8, -1)[:, :-1]
    quarters = zip((0, *LENGTHS), LENGTHS, strict=False)
    return {f"loss_{lo}_{hi}": float(losses[:, lo:hi].mean()) for lo, hi in quarters}


def base(seed: int, folder: Path, steps: int) -> Decoder:
    """The model trained on 256 positions, from `folder` if an arm before left it there."""
    model = from_config(config("none"), torch.float32, "cpu")
    file = folder / f"seed-{seed}-{steps}.safetensors"
    if file.is_file():
        model.load_state_dict(load_file(file))
        return model
    initialize(model, seed)
    fit(model, lessons(seed, TRAINED), steps, RATE)
    folder.mkdir(parents=True, exist_ok=True)
    write_file(file, save(model.state_dict()))
    return model


def study(
    arm: str, seed: int, steps: int = STEPS, tuning: int = TUNING, folder: Path = BASES, count: int = ASKED
) -> tuple[float, dict[str, float]]:
    """(share of right answers at 1,024 tokens, further numbers)."""
    model = from_config(config(arm), torch.float32, "cpu")
    model.load_state_dict(base(seed, folder, steps).state_dict())
    cells = grid(model, seed + 300, count)
    more = {**_by_length(cells, ""), **by_position(model, seed + 400), **cells}
    value = more[f"right_{LENGTHS[-1]}"]
    if tuning:
        fit(model, lessons(seed + 200, LENGTHS[-1]), tuning, RATE / 10)
        more |= _by_length(grid(model, seed + 300, count), "tuned_")
    return value, more


def _by_length(cells: dict[str, float], before: str) -> dict[str, float]:
    each = {n: [share for name, share in cells.items() if name.startswith(f"{n}_")] for n in LENGTHS}
    return {f"{before}right_{n}": sum(shares) / len(shares) for n, shares in each.items()}


if __name__ == "__main__":
    options = arguments(__doc__, ARMS)
    value, more = study(options.arm, options.seed, options.steps or STEPS)
    model = from_config(config(options.arm), torch.float32, "cpu")
    write(options.out, value, more, model=model, tokens=(STEPS + TUNING) * TOKENS)
