"""The contract of two vocabularies: the same word under every id (docs/why/trust.md N5).

Rows of a head beyond the tokenizer's ids are padding; they may be more or fewer, and no divergence looks at
them.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from unfreeze.core.errors import CheckpointError

if TYPE_CHECKING:
    from unfreeze.data.tokens.tokenizer import Tokenizer

NEXT = (
    "a teacher with the same tokenizer; of another one take its texts: unfreeze generate TEACHER --data F"
    " --out rows.jsonl, then unfreeze sft"
)


@dataclass(frozen=True)
class Vocabulary:
    """size: ids with a name. hash: over every id's word and whether it is special, 12 hex digits."""

    size: int
    hash: str

    def __str__(self) -> str:
        return f"{self.size:,} ids, hash {self.hash}"


def vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    """Of a tokenizer. Merges are not in it: the same ids mean the same words, however texts are cut."""
    size, special = tokenizer.named_size, tokenizer.special_ids
    digest = hashlib.blake2b(digest_size=6)
    for id in range(size):
        word = tokenizer.token_text(id).encode()
        digest.update(b"%d %d %d " % (id, id in special, len(word)) + word)
    return Vocabulary(size, digest.hexdigest())


def refuse_other(student: Vocabulary, teacher: Vocabulary, name: str) -> None:
    """Raise CheckpointError, with both sizes and hashes, where a word has another id or there are others."""
    if student != teacher:
        raise CheckpointError(
            f"the teacher {name} has another vocabulary ({teacher}) than the model ({student}): what it says"
            " of an id is about another word",
            next=NEXT,
        )
