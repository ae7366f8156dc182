"""Split training and validation data by a hash of content.

A row's side depends on its content and the seed, never on its position in the file. So a row stays on its
side when others are added, removed or reordered. Equal rows always land on the same side, so none leaks.
Of compared answers the prompt decides: all pairs of a prompt land on the same side. Pairs of
answers that are trained on would tell how a held-out pair of the same answers is ranked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from hashlib import blake2b

import numpy as np
import torch

from unfreeze.core.batch import Batch
from unfreeze.core.errors import ConfigError
from unfreeze.core.torch_types import from_numpy
from unfreeze.data.packing.answers import order_of
from unfreeze.data.packing.batches import pack
from unfreeze.data.rows.held_out import is_held_out
from unfreeze.data.store.examples import NO_CONTENT, TAUGHT, Example, Examples


def split_by_content(
    examples: Sequence[Example], fraction: float, seed: int = 0
) -> tuple[Examples, Examples]:
    """Return (training, validation) with about `fraction` of the documents held out.

    Both are in file order. Tokens are read only of compared answers, for their prompts.
    Raises ConfigError if one side would be empty, which can happen with few rows.
    """
    examples = Examples.of(examples)
    if not 0 < fraction < 1:
        raise ConfigError(
            f"validation_fraction is {fraction}; expected a number above 0 and below 1",
            next="--validation-fraction 0.05",
        )
    digests = examples.digests_N.tolist()
    held_N = _held(_prompts(examples, digests), fraction, seed)
    if held_N.all() or not held_N.any():  # few prompts, or one: their pairs are divided
        held_N = _held(digests, fraction, seed)
    if held_N.all() or not held_N.any():
        side = "training" if held_N.all() else "validation"
        raise none_left(fraction, f"{len(examples)} documents", side)
    return examples.part(~held_N), examples.part(held_N)


def _held(digests: Sequence[bytes], fraction: float, seed: int) -> np.ndarray:
    return np.array([is_held_out(digest, fraction, seed) for digest in digests], dtype=bool)


def _prompts(examples: Examples, digests: Sequence[bytes]) -> Sequence[bytes]:
    """Return a hash of each document's prompt if answers are compared; its digest if not, or if none."""
    if not (examples.chosen_N != TAUGHT).any():
        return digests
    prompts: list[bytes] = []
    for example, digest in zip(examples, digests, strict=True):
        begins = int(np.flatnonzero(np.asarray(example.weights))[0]) if any(example.weights) else 0
        tokens_T = np.asarray(example.tokens[:begins], dtype=np.int64)
        prompts.append(blake2b(tokens_T.tobytes(), digest_size=16).digest() if begins > 1 else digest)
    return prompts


def none_left(fraction: float, of: str, side: str) -> ConfigError:
    """Return the error for a split that leaves one side empty."""
    return ConfigError(
        f"validation_fraction {fraction} of {of} leaves none for {side} (a hash of each"
        " row decides its side)",
        next="another --validation-fraction, or --validation FILE",
    )


def validation_batches(examples: Sequence[Example], tokens_per_batch: int) -> Iterator[Batch]:
    """Pack every document once, in order, with up to `tokens_per_batch` tokens per batch.

    A longer document gets a batch of its own. Nothing is shuffled. Batch.documents["row"] is each document's
    row number, counted from 0, or -1 for an answer paired with another prompt (KTO). Documents of equal
    content, such as the pieces of one text, have the same row.
    """
    rows_N = distinct_rows(Examples.of(examples))
    group: list[Example] = []
    first = 0
    for example in examples:
        if group and sum(member.packed_tokens for member in group) + example.packed_tokens > tokens_per_batch:
            yield _of_rows(group, rows_N[first:])
            first, group = first + len(group), []
        group.append(example)
    if group:
        yield _of_rows(group, rows_N[first:])


def distinct_rows(examples: Examples) -> np.ndarray:
    """Return each document's row number, [N]; documents of equal content have the same one."""
    places: dict[bytes | tuple[int, int], int] = {}
    rows = zip(examples.sources_N.tolist(), examples.rows_N.tolist(), strict=True)
    keys = [
        row if digest == NO_CONTENT else digest
        for digest, row in zip(examples.digests_N.tolist(), rows, strict=True)
    ]
    return np.array([places.setdefault(key, len(places)) for key in keys], dtype=np.int64)


def _of_rows(group: Sequence[Example], rows_N: np.ndarray) -> Batch:
    """Return the packed batch; rows_N holds the rows of its examples, then those of later ones."""
    batch = pack(group)
    ordered = rows_N[order_of(group)]
    numbers_S = batch.documents.get("example", torch.arange(len(group))).numpy()
    row_S = np.where(numbers_S < 0, -1, ordered[numbers_S])
    return replace(batch, documents={**batch.documents, "row": from_numpy(row_S)})
