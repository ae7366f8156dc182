"""Byte n-grams (evaluate/ngrams.py): counted on the training rows, measured on the held-out rows."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

    from unfreeze.data import Example, Tokenizer
    from unfreeze.evaluate.ngrams import Text
    from unfreeze.job.job import Job

ORDERS = (1, 3, 5)
MOST_BYTES = 8_000_000
"""Of the training rows, and of the held-out rows: some 0.5 GB of memory. Of larger texts only the first part
is counted, which makes a 5-gram look weaker than it could be; the event says so."""


def measure_baselines(job: Job) -> None:
    """Emit the baseline event if rows are held out. Process 0 counts while the others wait."""
    job.group.on_rank0(lambda: _measure(job))


def _measure(job: Job) -> None:
    from unfreeze.evaluate.ngrams import bits_per_byte

    dataset, tokenizer = job.rows.dataset, job.setup.tokenizer
    if dataset.validation is None:
        return
    started = time.perf_counter()
    train, all_rows = counted_text(dataset.examples, tokenizer, targets_only=False)
    held_out, all_held_out = counted_text(dataset.validation, tokenizer, targets_only=True)
    if not held_out.bytes:
        return
    measured = bits_per_byte(train, held_out, ORDERS)
    job.state.run.events.emit(
        "baseline",
        job.state.step,
        ngrams=[{"order": order, "bits_per_byte": bits} for order, bits in measured.items()],
        train_bytes=train.bytes,
        all_rows=all_rows and dataset.stream is None,
        held_out_bytes=held_out.bytes,
        all_held_out=all_held_out,
        seconds=time.perf_counter() - started,
    )


def counted_text(
    examples: Sequence[Example], tokenizer: Tokenizer, *, targets_only: bool
) -> tuple[Text, bool]:
    """Return (the documents as symbols, True if all of them are in it), at most MOST_BYTES of them.

    targets_only: count what the model is measured on, tokens with a weight after the shift. The first token
    has none, so its bytes are only context here too. A special token is the symbol END.
    """
    import numpy as np

    from unfreeze.evaluate.ngrams import text_of

    table = TokenBytes(tokenizer)
    whole = True

    def documents() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        nonlocal whole
        left = MOST_BYTES
        for example in examples:
            if left <= 0:
                whole = False
                return
            tokens_T = np.asarray(example.tokens, dtype=np.int64)
            symbols, lengths_T = table.symbols(tokens_T)
            targets_T = (
                np.asarray(example.weights) > 0 if targets_only else np.ones(len(tokens_T), dtype=bool)
            )
            targets_T[:1] &= not targets_only
            left -= len(symbols)
            yield symbols, np.repeat(targets_T, lengths_T)

    text = text_of(documents(), max(ORDERS))
    return text, whole


class TokenBytes:
    """Bytes of tokens, as n-gram symbols. Each token is looked up once."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._known: dict[int, np.ndarray] = {}

    def symbols(self, tokens_T: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (symbols of all tokens, number of symbols of each token [T])."""
        import numpy as np

        parts = [self._of(token) for token in tokens_T.tolist()]
        lengths_T = np.array([len(part) for part in parts], dtype=np.int64)
        return (np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)), lengths_T

    def _of(self, token: int) -> np.ndarray:
        import numpy as np

        from unfreeze.evaluate.ngrams import END

        if token not in self._known:
            stored = bytes_of_token(self._tokenizer, token)
            symbols = list(stored) if stored else [END] * (token in self._tokenizer.special_ids)
            self._known[token] = np.array(symbols, dtype=np.int64)
        return self._known[token]


def bytes_of_token(tokenizer: Tokenizer, token: int) -> bytes:
    """Bytes of a token: exact for byte-level tokenizers.

    Of others the text as spelled in the vocabulary, with SentencePiece's mark of a blank and its byte tokens.
    """
    stored = tokenizer.token_bytes(token)
    if stored is not None:
        return stored
    text = tokenizer.token_text(token)
    if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
        return bytes([int(text[3:5], 16)])
    return text.replace("\u2581", " ").encode()
