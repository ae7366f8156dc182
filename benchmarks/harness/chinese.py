"""Text that is like Chinese to a tokenizer, and the two sides that are trained on it."""

from __future__ import annotations

import json
import random
import time
from itertools import accumulate
from pathlib import Path
from typing import Any

import unfreeze

WORDS, CHARACTERS = 30_000, 3_500
SIZES = {1: 15, 2: 60, 3: 15, 4: 10}
"""Characters of a word -> share of words, in per cent."""


def write_chinese(path: Path, nbytes: float, seed: int = 0) -> None:
    """Draw documents of 50 clauses, each of 3 to 12 words; Zipf's law for words and their characters.

    There is nothing between words, and one of the usual signs after a clause.
    """
    drawn = random.Random(seed)
    characters = [chr(0x4E00 + i) for i in drawn.sample(range(20_000), CHARACTERS)]
    zipf = list(accumulate(1 / (rank + 3) for rank in range(WORDS)))
    sizes = drawn.choices([*SIZES], [*SIZES.values()], k=WORDS)
    words = ["".join(drawn.choices(characters, cum_weights=zipf[:CHARACTERS], k=size)) for size in sizes]
    size = 0
    with path.open("wb") as file:
        while size < nbytes:
            clauses = (
                "".join(drawn.choices(words, cum_weights=zipf, k=drawn.randint(3, 12))) for _ in range(50)
            )
            text = "".join(clause + drawn.choice("，。，、") for clause in clauses)
            size += len(text.encode())
            file.write(json.dumps({"text": text}, ensure_ascii=False).encode() + b"\n")


def train(file: str, vocab: int, out: str) -> dict[str, Any]:
    """Run the user's command -> seconds, bytes, bytes_per_token of all held-out documents."""
    facts = unfreeze.train_tokenizer(files=file, vocab=vocab, out=out, quiet=True)
    kinds = facts["held_out"].values()
    rate = sum(kind["bytes"] for kind in kinds) / sum(kind["tokens"] for kind in kinds)
    return {"seconds": facts["seconds"], "bytes": facts["bytes"], "bytes_per_token": rate}


def plain(file: str, vocab: int, out: str) -> dict[str, Any]:
    """The same documents and number of merges; words by the regular expression of ByteLevel (GPT-2's)."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    from unfreeze.data.tokens.corpus import Corpus
    from unfreeze.data.tokens.trained import NUM_BYTES, count_kinds, merges_in

    corpus, began = Corpus([Path(file)], (), 0.02, 0), time.monotonic()
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_BYTES + merges_in(vocab, 64),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        min_frequency=2,
        show_progress=False,
    )
    backend.train_from_iterator(corpus.texts(), trainer)
    kinds = count_kinds(backend, corpus.measured()).values()
    seconds, tokens = time.monotonic() - began, sum(kind.tokens for kind in kinds)
    rate = sum(kind.nbytes for kind in kinds) / tokens
    return {"seconds": seconds, "bytes": corpus.nbytes, "bytes_per_token": rate}
