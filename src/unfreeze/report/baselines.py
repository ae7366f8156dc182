"""A model's bits per byte beside those of byte n-grams on the same held-out rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from unfreeze.core.schema import BaselineEvent, Event
from unfreeze.report.events import evals_of, last, series

NAMES = {1: "unigram", 2: "bigram", 3: "trigram"}


class Scale(NamedTuple):
    """bits: of the model; ngrams: (order, bits) of each n-gram, all of the same rows."""

    bits: float
    ngrams: list[tuple[int, float]]


def name_of(order: int) -> str:
    """'trigram', '5-gram'."""
    return NAMES.get(order, f"{order}-gram")


def scale_of(events: Sequence[Event]) -> Scale | None:
    """Bits per byte of the last validation, and of the n-grams; None without either."""
    baseline = last(events, BaselineEvent)
    bits = series(evals_of(events), "eval", "bits_per_byte")[1]
    if baseline is None or not bits or not baseline.get("ngrams"):
        return None
    return Scale(bits[-1], [(each["order"], each["bits_per_byte"]) for each in baseline["ngrams"]])


def listed(ngrams: Sequence[tuple[int, float]]) -> str:
    """'unigram 4.55, trigram 2.70, 5-gram 2.15'."""
    return ", ".join(f"{name_of(order)} {bits:.3f}" for order, bits in ngrams)


def baseline_line(event: BaselineEvent) -> str:
    """Line on the n-grams: their bits per byte, and the text they were counted on."""
    ngrams = [(each["order"], each["bits_per_byte"]) for each in event["ngrams"]]
    counted = "all" if event["all_rows"] else "the first"
    part = "" if event["all_held_out"] else f", of the first {event['held_out_bytes']:,} held-out bytes"
    return (
        f"n-grams of bytes, for comparison: {listed(ngrams)} bits per byte{part} (counted on {counted}"
        f" {event['train_bytes']:,} bytes of training text)"
    )


def baseline_words(events: Sequence[Event]) -> str:
    """'2.310 held out: below the trigram; unigram 4.552, trigram 2.704, 5-gram 2.148', or ""."""
    scale = scale_of(events)
    if scale is None:
        return ""
    return f"{scale.bits:.3f} held out: {place_of(scale)}; {listed(scale.ngrams)}"


def place_of(scale: Scale) -> str:
    """'below the 5-gram', 'below the trigram, above the 5-gram', 'above the unigram'."""
    below = [order for order, bits in scale.ngrams if scale.bits < bits]
    above = [order for order, bits in scale.ngrams if scale.bits >= bits]
    parts = [f"below the {name_of(max(below))}"] if below else []
    parts += [f"above the {name_of(min(above))}"] if above else []
    return ", ".join(parts)
