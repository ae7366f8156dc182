"""Documents with planted near-duplicates, in English and Chinese, and exact Jaccard by brute force."""

from __future__ import annotations

import random
import re
from collections import Counter, defaultdict
from itertools import accumulate

LETTERS = "etaoinshrdlucmfwypvbgk"
WORDS = sorted({"".join(random.Random(i).choices(LETTERS, k=2 + i % 9)) for i in range(4000)})
HAN = [chr(0x4E00 + 5 * i) for i in range(3000)]


def text_of(tokens: list[str], chinese: bool) -> str:
    """Tokens as a document: words with spaces, or characters with punctuation and no space."""
    if not chinese:
        return " ".join(tokens) + "."
    return "，".join("".join(tokens[i : i + 12]) for i in range(0, len(tokens), 12)) + "。"


def drawn(rng: random.Random, vocabulary: list[str], count: int) -> list[str]:
    """Tokens with frequencies by Zipf's law."""
    weights = list(accumulate(1 / rank for rank in range(1, len(vocabulary) + 1)))
    return rng.choices(vocabulary, cum_weights=weights, k=count)


def edited(rng: random.Random, tokens: list[str], vocabulary: list[str], edits: int) -> list[str]:
    """Replace tokens at `edits` places that are at least 5 apart."""
    changed = list(tokens)
    for place in rng.sample(range(0, len(tokens), 5), edits):
        changed[place] = rng.choice(vocabulary)
    return changed


def planted(chinese: bool, documents: int = 1000, near: int = 200, unlike: int = 100, seed: int = 0):
    """(texts, numbers of the near-duplicates): each comes after the document it is made of.

    near      documents of Jaccard about .8 with one before
    unlike    documents of Jaccard about .5 with one before; they should stay
    """
    rng, vocabulary = random.Random(seed), HAN if chinese else WORDS
    length = 225
    base = [drawn(rng, vocabulary, length) for _ in range(documents - near - unlike)]
    rows = [(tokens, False) for tokens in base]
    # 5 edits change 25 of 221 shingles on either side: 196 / 246 = .80; 15 edits: 146 / 296 = .49
    for tokens in rng.sample(base, near):
        rows.append((edited(rng, tokens, vocabulary, 5), True))
    for tokens in rng.sample(base, unlike):
        rows.append((edited(rng, tokens, vocabulary, 15), False))
    late = rows[len(base) :]
    rng.shuffle(late)
    rows = rows[: len(base)] + late
    return [text_of(tokens, chinese) for tokens, _ in rows], {
        i for i, (_, is_near) in enumerate(rows) if is_near
    }


def shingles(text: str, chinese: bool) -> frozenset[str]:
    """5-grams as strings, without the package."""
    tokens = re.findall(r"[\u4e00-\u9fff]", text) if chinese else re.findall(r"\w+", text.lower())
    return frozenset(" ".join(tokens[i : i + 5]) for i in range(len(tokens) - 4))


def brute(texts: list[str], chinese: bool, threshold: float) -> set[int]:
    """Numbers of documents whose Jaccard with one that stayed before is at least the threshold, exactly."""
    stayed: list[frozenset[str]] = []
    holders: dict[str, list[int]] = defaultdict(list)
    dropped = set()
    for number, text in enumerate(texts):
        own = shingles(text, chinese)
        shared = Counter(index for shingle in own for index in holders[shingle])
        if any(
            count / (len(own) + len(stayed[index]) - count) >= threshold for index, count in shared.items()
        ):
            dropped.add(number)
            continue
        for shingle in own:
            holders[shingle].append(len(stayed))
        stayed.append(own)
    return dropped
