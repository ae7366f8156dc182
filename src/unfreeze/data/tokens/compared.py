"""Convert rows of compared answers to examples: each answer is encoded and checked as in sft.

So the compared tokens are what the row says: same template, masks and truncation as sft, checked word by word
(masks.py). Tokens that both answers share have weight 0: the prompt, or for two plain texts their common
first tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from unfreeze.core.errors import DataError
from unfreeze.data.rows.row import Answers, Conversation, Judged, Text
from unfreeze.data.store.examples import Example
from unfreeze.data.tokens.masks import LONGER, Dropped, Encoded, Encoder
from unfreeze.data.tokens.tokenizer import Tokenizer
from unfreeze.data.tokens.turns import Renderer


class Comparing:
    """Convert judged rows to examples of two documents, or of one labelled document (Example.chosen).

    answers   "pairs": a row with a label is refused. "labels": a pair becomes two labelled answers.
    Each answer has at most `encoder.sequence_length` tokens, so an example has at most twice as many.
    """

    def __init__(self, encoder: Encoder, answers: Answers):
        self._encoder = encoder
        self.answers: Answers = answers

    @property
    def render(self) -> Renderer:
        return self._encoder.render

    @property
    def tokenizer(self) -> Tokenizer:
        return self._encoder.tokenizer

    def __call__(self, row: Judged) -> Encoded:
        """Encode a row. Raises Dropped for an unusable row, DataError for a bad one; both name the row."""
        if self.answers == "pairs" and len(row.answers) < 2:
            raise DataError(
                f"row {row.row}: one answer with a label, and this loss compares pairs (chosen, rejected)",
                next="--loss kto takes labels",
            )
        notes: dict[str, None] = {}
        sides: list[Example] = []
        for name, answer in (("chosen", row.chosen), ("rejected", row.rejected)):
            if answer is not None:
                example, answer_notes = self._one(answer, name if len(row.answers) > 1 else "the answer")
                sides.append(example)
                notes |= dict.fromkeys(answer_notes)
        if len(sides) == 1:
            example = sides[0]
            chosen = example.num_tokens if row.chosen is not None else 0
            return Encoded([_with(example, chosen)], tuple(notes))
        if isinstance(row.chosen, Text):
            sides = _without_shared(sides)
        self._refuse_equal(sides, row)
        if self.answers == "labels":
            chosen, rejected = sides
            return Encoded([_with(chosen, chosen.num_tokens), _with(rejected, 0)], tuple(notes))
        return Encoded([_joined(*sides)], tuple(notes))

    def _one(self, answer: Conversation | Text, name: str) -> tuple[Example, tuple[str, ...]]:
        try:
            encoded = self._encoder(answer)
        except Dropped as error:
            raise Dropped(f"{error.message}, {name}", next=error.next) from None
        except DataError as error:
            raise DataError(f"{error.message} ({name})", next=error.next) from None
        if len(encoded.examples) + len(encoded.dropped) > 1:
            raise DataError(
                f"row {answer.row}: {name} has {len(encoded.examples) + len(encoded.dropped)} turns that the"
                " chat template does not show together, so they cannot be one answer",
                next="end both answers after their first turn, or --data.turns last",
            )
        return encoded.examples[0], encoded.notes

    def _refuse_equal(self, sides: Sequence[Example], row: Judged) -> None:
        """Refuse answers that are equal after rendering and truncation."""
        chosen, rejected = sides
        for side in sides:
            if not any(side.weights[1:]):
                raise Dropped(f"row {row.row}: 0 tokens are left of an answer", next=LONGER)
        if list(chosen.tokens) != list(rejected.tokens):
            return
        same = f"row {row.row}: chosen and rejected are the same {chosen.num_tokens} tokens"
        if chosen.cut or rejected.cut:
            raise Dropped(f"{same}, cut at {self._encoder.sequence_length}", next=LONGER)
        raise DataError(
            f"{same} as the chat template writes them", next="remove the row, or --data.on-bad-row skip"
        )


def _with(example: Example, chosen: int) -> Example:
    return Example(example.tokens, example.weights, example.row, example.cut, chosen=chosen)


def _joined(chosen: Example, rejected: Example) -> Example:
    """Concatenate both answers, the chosen one first; each starts with weight 0."""
    return Example(
        [*chosen.tokens, *rejected.tokens],
        [*chosen.weights, *rejected.weights],
        chosen.row,
        chosen.cut + rejected.cut,
        chosen=chosen.num_tokens,
    )


def _without_shared(sides: Sequence[Example]) -> list[Example]:
    """Set the weight of the tokens that both texts start with to 0: they are the prompt."""
    shared = sum(
        1 for _ in takewhile(lambda two: two[0] == two[1], zip(*(s.tokens for s in sides), strict=False))
    )
    return [
        Example(side.tokens, [*[0.0] * shared, *side.weights[shared:]], side.row, side.cut) for side in sides
    ]
