"""Shares of repeated parts against datatrove's counts (recorded) and against strings."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from tests.data.clean.planted import HAN, WORDS, drawn, text_of
from unfreeze.config.clean import Repetition
from unfreeze.data.clean.document import Document
from unfreeze.data.clean.repetition import RepetitionFilter, duplicate_grams, duplicate_parts, top_gram


def repeating(seed: int, n: int) -> str:
    """300 different words, then 6 passages of n words of them, each followed by a new word."""
    rng = random.Random(seed)
    words = rng.sample(WORDS, 306)
    body = words[:300]
    for extra in words[300:]:
        at = rng.randrange(300 - n)
        body += [*words[at : at + n], extra]
    return " ".join(body)


# datatrove 0.10.1, gopher_repetition_filter, on repeating(seed, n).split():
#   find_all_duplicate(words, n), and find_top_duplicate(get_n_grams(words, n)), which counts spaces too; None
#   where several n-grams are the most frequent: it takes the first, Gopher does not say
DATATROVE = {
    (0, 2): (81, None),
    (0, 3): (117, None),
    (0, 5): (192, None),
    (0, 8): (288, None),
    (0, 10): (360, (156, 2)),
    (1, 2): (67, None),
    (1, 3): (106, None),
    (1, 5): (184, None),
    (1, 8): (296, None),
    (1, 10): (377, None),
    (2, 2): (74, None),
    (2, 3): (98, None),
    (2, 5): (169, None),
    (2, 8): (270, (126, 2)),
    (2, 10): (354, (158, 2)),
    (3, 2): (91, None),
    (3, 3): (129, None),
    (3, 5): (219, None),
    (3, 8): (342, (152, 2)),
    (3, 10): (417, None),
}


@pytest.mark.parametrize("case", DATATROVE)
def test_duplicate_and_top_n_grams_are_those_of_datatrove(case):
    seed, n = case
    repeated, most = DATATROVE[case]
    document = Document(repeating(seed, n))
    total = sum(map(len, document.text.split()))
    assert duplicate_grams(document, n) * total == pytest.approx(repeated)
    if most is not None:
        top, count = most
        assert top_gram(document, n) * total == pytest.approx(top - count * (n - 1))


def duplicate_parts_by_datatrove(parts):
    """datatrove's find_duplicates: (elements, characters) after the first of each."""
    counts = Counter(parts)
    return sum(c - 1 for c in counts.values()), sum((c - 1) * len(p) for p, c in counts.items())


def test_duplicate_lines():
    lines = ["a b", "c", "a b", "a b", "d"]
    again, size = duplicate_parts_by_datatrove(lines)
    assert duplicate_parts(lines) == (again / 5, size / 11)
    assert duplicate_parts([]) == (0.0, 0.0)


@pytest.mark.parametrize("n", [5, 10])
def test_characters_of_chinese_count_one_by_one(n):
    """By strings: the characters that lie in a 2n-gram seen before."""
    rng = random.Random(n)
    tokens = drawn(rng, HAN, 200)
    tokens += tokens[20:60] + drawn(rng, HAN, 50)
    grams = ["".join(tokens[i : i + 2 * n]) for i in range(len(tokens) - 2 * n + 1)]
    covered, seen = set(), set()
    for i, gram in enumerate(grams):
        if gram in seen:
            covered |= set(range(i, i + 2 * n))
        seen.add(gram)
    document = Document(text_of(tokens, chinese=True))
    assert document.by_characters and duplicate_grams(document, 2 * n) == len(covered) / len(tokens)
    assert len(covered) >= 40


@pytest.mark.parametrize("chinese", [False, True], ids=["english", "chinese"])
def test_a_repeated_passage_is_dropped_and_running_text_is_not(chinese):
    rng = random.Random(1)
    # a large vocabulary without Zipf's law: n-grams of 2 do not repeat by chance
    tokens = rng.sample(HAN if chinese else WORDS, 300)
    look = RepetitionFilter(Repetition())
    assert look(Document(text_of(tokens, chinese))) is None
    twice = look(Document(text_of(tokens + tokens[:100], chinese)))
    assert twice is not None and twice.name == "repetition.duplicate_5_grams"
    lines = look(Document("\n".join([text_of(tokens, chinese), *["read more here" * 10] * 20])))
    assert lines is not None and lines.name == "repetition.lines"


def test_control_arm_a_wrong_limit_lets_it_pass():
    tokens = random.Random(1).sample(WORDS, 300)
    loose = Repetition(duplicate_ngrams=(1,) * 6)
    assert RepetitionFilter(loose)(Document(text_of(tokens + tokens[:100], False))) is None
