"""Byte n-grams beside a brute-force count in dictionaries, and on sources whose entropy is known."""

import math
from collections import Counter, defaultdict

import numpy as np
import pytest

from unfreeze.evaluate.ngrams import END, START, SYMBOLS, bits_per_byte, text_of


def documents(texts, ends=True):
    for text in texts:
        symbols = np.array([*text, *([END] if ends else [])], dtype=np.int64)
        yield symbols, np.ones(len(symbols), dtype=bool)


def by_dictionaries(train, held_out, order):
    """Witten and Bell's method C, symbol by symbol, as the paper has it."""
    seen = defaultdict(Counter)
    for text in train:
        symbols = [START] * (order - 1) + [*text, END]
        for i in range(order - 1, len(symbols)):
            for n in range(1, order + 1):
                seen[tuple(symbols[i - n + 1 : i])][symbols[i]] += 1

    def probability(context, symbol):
        lower = probability(context[1:], symbol) if context else 1 / 257
        counts = seen.get(context)
        if not counts:
            return lower
        kinds, total = len(counts), sum(counts.values())
        return (counts[symbol] + kinds * lower) / (total + kinds)

    bits, size = 0.0, 0
    for text in held_out:
        symbols = [START] * (order - 1) + [*text, END]
        for i in range(order - 1, len(symbols)):
            bits -= math.log2(probability(tuple(symbols[i - order + 1 : i]), symbols[i]))
            size += symbols[i] != END
    return bits / size


@pytest.mark.parametrize("seed", range(3))
def test_it_is_the_count_in_dictionaries(seed):
    drawn = np.random.default_rng(seed)
    words = [bytes(drawn.integers(97, 101, drawn.integers(1, 6))) for _ in range(8)]

    def text():
        return b" ".join(words[i] for i in drawn.integers(0, 8, drawn.integers(1, 30)))

    train, held_out = [text() for _ in range(20)], [text() for _ in range(5)] + [b"\xffnew"]
    train_text, held_text = (text_of(documents(texts), 5) for texts in (train, held_out))
    measured = bits_per_byte(train_text, held_text, (1, 2, 3, 5))
    for order, bits in measured.items():
        assert bits == pytest.approx(by_dictionaries(train, held_out, order), rel=1e-12), order


def markov(drawn, length, order=2, letters=4):
    """A chain in which a letter hangs on the `order` before it. -> (text, its entropy in bits per letter)."""
    table = drawn.dirichlet(np.full(letters, 0.4), size=letters**order)
    states = letters**order
    text, state = np.empty(length, dtype=np.int64), 0
    uniform = drawn.random(length)
    ends = table.cumsum(axis=1)
    for i in range(length):
        letter = min(int(np.searchsorted(ends[state], uniform[i])), letters - 1)
        text[i], state = letter, (state * letters + letter) % states
    step = np.zeros((states, states))
    for s in range(states):
        for letter in range(letters):
            step[s, (s * letters + letter) % states] += table[s, letter]
    share = np.linalg.matrix_power(step, 4000)[0]
    return text + 97, float(-(share[:, None] * table * np.log2(np.maximum(table, 1e-300))).sum())


def test_a_trigram_reaches_the_entropy_of_a_second_order_chain_and_a_bigram_cannot():
    drawn = np.random.default_rng(0)
    text, entropy = markov(drawn, 220_000)
    counted = np.ones(len(text), dtype=bool)
    train = text_of([(text[:200_000], counted[:200_000])], 5)
    held_out = text_of([(text[200_000:], counted[200_000:])], 5)
    bits = bits_per_byte(train, held_out, (1, 2, 3, 5))
    assert bits[3] == pytest.approx(entropy, abs=0.02) and bits[5] == pytest.approx(entropy, abs=0.03)
    assert bits[1] > bits[2] > bits[3] + 0.05  # control arm: too short a context costs


def test_a_context_ends_with_its_document():
    """ "ab" is always followed by "c" inside documents; at the start of one nothing stands before "c"."""
    train = text_of(documents([b"abc"] * 50 + [b"x"] * 50), 3)
    joined, apart = (text_of(documents(texts), 3) for texts in ([b"abc"], [b"ab", b"c"]))
    assert bits_per_byte(train, apart, (3,))[3] > 3 * bits_per_byte(train, joined, (3,))[3]


def test_only_counted_symbols_cost_and_the_others_are_context():
    train = text_of(documents([b"ab"] * 20 + [b"xb"] * 20, ends=False), 2)
    symbols = np.array([97, 98], dtype=np.int64)
    whole = bits_per_byte(train, text_of([(symbols, np.array([True, True]))], 2), (2,))[2]
    second = bits_per_byte(train, text_of([(symbols, np.array([False, True]))], 2), (2,))[2]
    # 20 of 20 times "b" follows "a", and nothing else does
    assert second == pytest.approx(-math.log2((20 + (40 + 3 / 257) / 83) / 21), rel=1e-12)
    assert whole > second + 0.4  # "a" begins half of the documents: 1 bit more for 2 bytes


def test_without_training_text_a_byte_costs_as_much_as_any_of_257():
    nothing = text_of([], 5)
    bits = bits_per_byte(nothing, text_of(documents([b"abc"], ends=False), 5), (1, 5))
    assert bits == {1: pytest.approx(math.log2(257)), 5: pytest.approx(math.log2(257))}
    with pytest.raises(ValueError, match="no byte is counted"):
        bits_per_byte(nothing, text_of([], 5), (1,))
    with pytest.raises(ValueError, match="not within 1 to 7"):
        bits_per_byte(nothing, nothing, (8,))


def test_an_n_gram_of_the_highest_order_fits_its_integer():
    assert SYMBOLS**7 < 2**63 <= SYMBOLS**8
    train = text_of(documents([bytes(range(250, 256)) * 3]), 7)
    assert bits_per_byte(train, train, (7,))[7] < 1.5
