"""Tasks needle and recall: does a model find in its context what it was told? Drawn from a seed, offline.

needle   one sentence about a city's number, hidden in other sentences; grid of length by depth
recall   pairs of a name and a number, spread over other sentences; grid of length by number of pairs

    The secret number of Lisbon is 48213. … The secret number of Lisbon is

The last sentence breaks off; the model is right if its greedy answer is the number, each of whose tokens is
then its likeliest (rank 0). Also measured: log p of the number, in nats per token, which moves before the
first answer is right. Texts are cut to their length with the model's own tokenizer, so models with other
tokenizers get other texts, with the same items.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from unfreeze.core.draws import number
from unfreeze.core.errors import ConfigError
from unfreeze.data.tokens.masks import encode_prompt
from unfreeze.evaluate.forced import forced
from unfreeze.evaluate.kept import Kept
from unfreeze.evaluate.rows import encoded, needs_tokenizer
from unfreeze.evaluate.tasks import Scores, Settings, Shown, unseen
from unfreeze.generate.model import Model

LENGTHS = (256, 512, 1024, 2048, 4096)
"""Tokens of a text, as far as the model has positions; half of its positions for a smaller model."""
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
PAIRS = (2, 4, 8, 16, 32)
REPEATS = 4  # texts of each cell
WHO = (
    "the baker",
    "a sailor",
    "my aunt",
    "the old teacher",
    "a farmer",
    "the clerk",
    "her brother",
    "a painter",
)
DID = ("carried", "found", "sold", "painted", "forgot", "mended", "counted", "borrowed")
WHAT = (
    "a basket",
    "the lamp",
    "two chairs",
    "an umbrella",
    "the blue door",
    "a letter",
    "some bread",
    "a boat",
)
WHERE = ("near the river", "in the market", "at noon", "before the rain", "behind the mill", "on the hill")
PLACES = tuple(
    "Lisbon Oslo Cairo Lima Quito Delhi Kyoto Riga Turin Perth Accra Dakar Hanoi Izmir Basel Malmo Leeds"
    " Nantes Porto Ghent Bergen Tampa Omaha Tulsa Fresno Austin Dallas Boston Denver Toledo Salem Mobile"
    " Aden Baku Minsk Sofia Tirana Split Graz Linz".split()
)
DIGITS = 5
SENTENCE = "The secret number of {place} is"


@dataclass(frozen=True)
class Cell:
    """One item: its row and column in the grid, and which of the cell's texts it is."""

    length: int
    column: float
    repeat: int


class RecallTask:
    """A grid of texts with hidden numbers.

    columns  depths, 0 the beginning to 1 the end; or numbers of pairs
    """

    counts = "text"

    def __init__(self, name: str, settings: Settings):
        self.name, self.settings = name, settings
        self.needle = name == "needle"
        self.columns: Sequence[float] = DEPTHS if self.needle else PAIRS
        fields = (name, settings.lengths, self.columns, REPEATS, settings.seed, settings.limit)
        self.digest = hashlib.blake2b(repr(fields).encode(), digest_size=16).hexdigest()

    def check(self) -> None:
        """Raise ConfigError for a length that holds nothing."""
        if least := next((each for each in self.settings.lengths if each < LENGTHS[0] // 4), None):
            raise ConfigError(
                f"lengths: {least} tokens are too few for a text with something hidden", next="--lengths 256"
            )

    def cells(self, positions: int) -> list[Cell]:
        """Return the items for a model of so many positions. Raises ConfigError for a length beyond them."""
        lengths = self.settings.lengths or tuple(each for each in LENGTHS if each <= positions)
        lengths = lengths or (positions // 2,)
        if beyond := next((each for each in lengths if each > positions), None):
            raise ConfigError(
                f"lengths: {beyond} tokens, but the model has {positions} positions",
                next=f"--lengths {positions}",
            )
        cells = [
            Cell(length, column, repeat)
            for repeat in range(REPEATS)  # a limit leaves fewer texts of each cell
            for length in lengths
            for column in self.columns
        ]
        return cells[: self.settings.limit]

    def score(self, model: Model, kept: Kept, shown: Shown = unseen) -> list[Scores]:
        """Score each cell's numbers after their texts, in one pass each."""
        needs_tokenizer(model)
        cells = self.cells(model.decoder.shape.max_positions)
        texts = [self.text(model, cell) for cell in cells]
        fitting = [i for i, each in enumerate(texts) if each is not None]
        scored = forced(
            model, [each for each in texts if each is not None], kept, shown, most=self.settings.batch
        )
        right: list[float | None] = [None] * len(cells)
        nats: list[float | None] = [None] * len(cells)
        for i, each in zip(fitting, scored, strict=True):
            right[i] = float(each.greedy)
            nats[i] = sum(each.log_p) / len(each.log_p)
        items = [f"length {c.length}, {self._column(c.column)}, text {c.repeat + 1}" for c in cells]
        grid: dict[str, dict[str, list[int]]] = {}
        for i, cell in enumerate(cells):
            row = grid.setdefault(f"{cell.length} tokens", {})
            row.setdefault(self._column(cell.column), []).append(i)
        notes = (
            [f"{len(cells) - len(fitting)} cells have more pairs than room"]
            if len(fitting) < len(cells)
            else []
        )
        return [
            Scores("right", items, right, grid=grid, notes=notes),
            Scores("log p", items, nats, unit="nats per token"),
        ]

    def _column(self, column: float) -> str:
        return f"depth {column:.0%}" if self.needle else f"{column:g} pairs"

    def text(self, model: Model, cell: Cell) -> tuple[list[int], list[int]] | None:
        """Return (the text up to its question, the number), together at most cell.length tokens.

        None if the pairs alone are longer.
        """
        key = number(self.settings.seed, cell.length, round(1000 * cell.column), cell.repeat)
        draw = random.Random(key)
        count = 1 if self.needle else int(cell.column)
        places = draw.sample(PLACES, count)
        numbers = draw.sample(range(10 ** (DIGITS - 1), 10**DIGITS), count)
        wanted = draw.randrange(count)
        question = encoded(model, " " + SENTENCE.format(place=places[wanted]))
        answer = encoded(model, f" {numbers[wanted]}")
        facts = [
            encoded(model, f" {SENTENCE.format(place=place)} {each}.")
            for place, each in zip(places, numbers, strict=True)
        ]
        begin = encode_prompt(needs_tokenizer(model), "Remember this.")
        room = cell.length - len(begin) - len(question) - len(answer) - sum(map(len, facts))
        if room < 0:
            return None
        others = sentences(lambda text: encoded(model, text), draw, room)
        if self.needle:
            at = [round(cell.column * len(others))]
        else:
            at = sorted(draw.randrange(len(others) + 1) for _ in facts)
        tokens = list(begin)
        for place in range(len(others) + 1):
            for fact, where in zip(facts, at, strict=True):
                tokens += fact if where == place else []
            tokens += others[place] if place < len(others) else []
        return [*tokens, *question], answer


def sentences(encode: Callable[[str], list[int]], draw: random.Random, room: int) -> list[list[int]]:
    """Return sentences of together at most `room` tokens, as many as fit."""
    lines: list[list[int]] = []
    while True:
        who, did, what, where = (draw.choice(words) for words in (WHO, DID, WHAT, WHERE))
        line = encode(f" {who[0].upper()}{who[1:]} {did} {what} {where}.")
        if len(line) > room:
            return lines
        room -= len(line)
        lines.append(line)
