"""Convert rows that are asked to examples: the prompt, and room for the longest answer.

The answer's places hold the prompt's last token, with weight 1: lengths, packing and memory count them before
an answer exists. Sampling replaces them (rollout/rollouts.py).
"""

from __future__ import annotations

from unfreeze.core.errors import DataError
from unfreeze.data.rows.row import Answers, Conversation, columns_digest
from unfreeze.data.store.examples import Example
from unfreeze.data.tokens.masks import Dropped, Encoded, Encoder, encode_chat
from unfreeze.data.tokens.tokenizer import Tokenizer
from unfreeze.data.tokens.turns import Renderer


class Asking:
    """Convert conversations that end with the user's turn.

    room        tokens of the longest answer
    by_columns  rows of one prompt differ if another of their columns does: it is part of the task
    """

    answers: Answers = "asked"

    def __init__(self, encoder: Encoder, room: int, by_columns: bool = False):
        self._encoder, self.room, self.by_columns = encoder, room, by_columns

    @property
    def render(self) -> Renderer:
        return self._encoder.render

    @property
    def tokenizer(self) -> Tokenizer:
        return self._encoder.tokenizer

    def __call__(self, row: Conversation) -> Encoded:
        """Encode a prompt; nothing of it is cut. Raises DataError, or Dropped with truncation "drop"."""
        try:
            prompt = encode_chat(self.tokenizer, row.messages, row.tools)
        except DataError as error:
            raise DataError(f"row {row.row}: {error.message}", next=error.next) from None
        most = self._encoder.sequence_length
        if len(prompt) + self.room > most:
            kind = Dropped if self._encoder.truncation == "drop" else DataError
            raise kind(
                f"row {row.row}: a prompt of {len(prompt)} tokens and {self.room} new ones are more than"
                f" {most}",
                next="--data.truncation drop leaves such rows out; or fewer --max-new-tokens; or a larger"
                " --sequence-length and --tokens-per-step",
            )
        tokens = [*prompt, *[prompt[-1]] * self.room]
        example = Example(tokens, [0.0] * len(prompt) + [1.0] * self.room, row.row)
        return Encoded([example], digest=columns_digest(row) if self.by_columns else b"")


def prompt_of(example: Example) -> list[int]:
    """Return the tokens before the first with a weight."""
    return list(example.tokens[: example.num_tokens - example.num_supervised])
