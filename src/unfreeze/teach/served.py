"""Write a server's top tokens into a teacher's store (store.py), so that training needs no network.

N supervised tokens of a document, K top tokens each.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from unfreeze.core.units import plural
from unfreeze.teach.budget import Budget, Price
from unfreeze.teach.coding import LEAST, Coding
from unfreeze.teach.endpoint import Endpoint, Scored
from unfreeze.teach.store import StoreParts, StoreWriter, is_store

if TYPE_CHECKING:
    from unfreeze.config.endpoint import EndpointConfig
    from unfreeze.data.store.examples import Example
    from unfreeze.data.tokens.tokenizer import Tokenizer

LOST = 0.05  # share of lost tokens above which to warn
KEEP_EVERY = 30.0  # seconds between writes: the maximum that a power cut costs


class Asking:
    """Requests to a server, with their price; refused if necessary before a folder is created.

    lacking: the documents that a store in `folder` doesn't have
    """

    def __init__(
        self,
        url: str,
        settings: EndpointConfig,
        folder: Path,
        coding: Coding,
        examples: Sequence[Example],
        say: Callable[[str], None],
    ):
        from unfreeze.teach.client import Client  # the library openai: optional, and takes a second to import

        self.client, self.name, self.say = Client(url, timeout=settings.timeout), settings.served_name, say
        taken = set(StoreParts(folder, coding).places) if is_store(folder) else set[bytes]()
        self.lacking: list[Example] = []
        for example in examples:
            if example.checksum not in taken:
                taken.add(example.checksum)
                self.lacking.append(example)
        self.budget = Budget(folder, settings.budget_usd, Price(settings.price_read, settings.price_written))
        read = sum(example.num_tokens for example in self.lacking)
        if line := self.budget.worst(self.client.url, read, len(self.lacking)):
            say(f"{plural(len(self.lacking), 'document')}: {line}")

    def into(self, writing: StoreWriter, tokenizer: Tokenizer) -> None:
        """Send the requests. Whatever ends it, everything received is in the store.

        Raises EndpointError at a document that cannot be used, ConfigError if the budget is spent.
        """
        coding, last_write = writing.coding, time.monotonic()
        endpoint = Endpoint(self.client, self.name, tokenizer, top=coding.top_k, reserve=self.budget.reserve)
        scored = endpoint.scored([list(example.tokens) for example in self.lacking])
        try:
            for done, (example, scored_document) in enumerate(zip(self.lacking, scored, strict=True), 1):
                writing.add(example.checksum, store_rows(scored_document, example, coding))
                if time.monotonic() - last_write > KEEP_EVERY:
                    writing.flush()
                    self.say(f"asked about {done:,} of {plural(len(self.lacking), 'document')}")
                    last_write = time.monotonic()
        finally:
            writing.flush()
        if endpoint.shared > LOST * endpoint.listed:
            share = f"{endpoint.shared / endpoint.listed:.0%}"
            self.say(
                f"warning: {share} of the words that {endpoint!r} listed have a text that several ids share;"
                " these count as unlisted. A server that returns ids (vLLM) loses none"
            )


def store_rows(scored: Scored, example: Example, coding: Coding) -> np.ndarray:
    """Encode a server's output for a document's supervised tokens in the store's form: uint8 [N, bytes].

    If fewer than K tokens are known (texts shared by several ids), the missing ones get probability zero
    under the last ids of the vocabulary, which are special tokens. Their probability counts as the rest.
    """
    places = [place for place in range(1, example.num_tokens) if example.weights[place]]
    ids_NK = np.empty((len(places), coding.top_k), dtype=np.int64)
    log_q_NK = np.full((len(places), coding.top_k), LEAST)
    for row, place in enumerate(places):
        top = scored.top[place - 1]
        listed = {id for id, _ in top}
        free = (id for id in range(coding.words - 1, -1, -1) if id not in listed)
        ids_NK[row] = [id for id, _ in top] + [next(free) for _ in range(coding.top_k - len(top))]
        log_q_NK[row, : len(top)] = [max(min(log_q, 0.0), LEAST) for _, log_q in top]
    with np.errstate(divide="ignore"):
        rest_N = np.log(np.clip(1 - np.exp(log_q_NK).sum(1), 0.0, 1.0))
    return coding.encode(ids_NK, log_q_NK, np.maximum(rest_N, LEAST))
