"""The contract of two vocabularies: the same token under every id (docs/why/trust.md N5).

Rows of a head beyond the tokenizer's ids are padding; their number may differ, and no divergence reads them.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from unfreeze.core.errors import CheckpointError

if TYPE_CHECKING:
    from unfreeze.data.tokens.tokenizer import Tokenizer

NEXT = (
    "use a teacher with the same tokenizer; for another one use its texts: unfreeze generate TEACHER --data F"
    " --out rows.jsonl, then unfreeze sft"
)


@dataclass(frozen=True)
class Vocabulary:
    """size: ids with a name. hash: of every id's text and special flag, 12 hex digits."""

    size: int
    hash: str

    def __str__(self) -> str:
        return f"{self.size:,} ids, hash {self.hash}"


def vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    """Return a tokenizer's vocabulary.

    Merges are not in it: equal ids mean equal tokens, however text is split.
    """
    size, special = tokenizer.named_size, tokenizer.special_ids
    digest = hashlib.blake2b(digest_size=6)
    for id in range(size):
        word = tokenizer.token_text(id).encode()
        digest.update(b"%d %d %d " % (id, id in special, len(word)) + word)
    return Vocabulary(size, digest.hexdigest())


def refuse_other(student: Vocabulary, teacher: Vocabulary, name: str) -> None:
    """Raise CheckpointError, with both sizes and hashes, if ids differ in meaning or number."""
    if student != teacher:
        raise CheckpointError(
            f"the teacher {name} has another vocabulary ({teacher}) than the model ({student}): its"
            " ids mean other tokens",
            next=NEXT,
        )
