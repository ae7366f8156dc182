"""Near duplicates against exact Jaccard by brute force, in English and Chinese; exact duplicates."""

from __future__ import annotations

import numpy as np
import pytest

from tests.data.clean.planted import brute, planted, shingles
from unfreeze.config.clean import Duplicates
from unfreeze.data.clean import document
from unfreeze.data.clean.document import Document
from unfreeze.data.clean.duplicates import Near, jaccard

LANGUAGES = pytest.mark.parametrize("chinese", [False, True], ids=["english", "chinese"])


def dropped_near(ledger, rows, kept) -> set[int]:
    stayed = {row["id"] for row in kept}
    assert set(ledger["dropped"]) <= {"duplicate.near"}
    return {row["id"] for row in rows} - stayed


def scores(dropped: set[int], near: set[int]) -> tuple[float, float]:
    """(recall, precision)."""
    return len(dropped & near) / len(near), len(dropped & near) / max(1, len(dropped))


@LANGUAGES
def test_planted_near_duplicates_are_dropped_and_others_stay(cleaned, chinese):
    texts, near = planted(chinese)
    assert len(texts) == 1000 and len(near) == 200
    rows = [{"text": text, "id": i} for i, text in enumerate(texts)]
    dropped = dropped_near(*_swap(cleaned(rows), rows))
    recall, precision = scores(dropped, near)
    assert recall >= 0.95 and precision >= 0.98
    # and each decision is that of exact Jaccard, but for the pairs that no band joins
    exact = brute(texts, chinese, 0.7)
    assert dropped <= exact and len(exact - dropped) <= 2


def _swap(result, rows):
    ledger, kept = result
    return ledger, rows, kept


def test_the_planted_pairs_have_a_jaccard_of_about_point_8():
    texts, near = planted(chinese=False)
    sets = [shingles(text, False) for text in texts]
    best = [
        max(len(sets[i] & other) / len(sets[i] | other) for other in sets[:700]) for i in sorted(near)[:50]
    ]
    assert 0.78 < np.mean(best) < 0.82 and min(best) > 0.72


@LANGUAGES
def test_control_arm_shingles_of_what_white_space_divides_lose_recall(cleaned, chinese, monkeypatch):
    """A Chinese document is then one shingle per phrase between spaces: the usual mistake."""
    monkeypatch.setattr(document, "units_of", lambda text: text.replace("，", " ").split())
    texts, near = planted(chinese)
    rows = [{"text": text, "id": i} for i, text in enumerate(texts)]
    recall, _ = scores(dropped_near(*_swap(cleaned(rows), rows)), near)
    assert (recall < 0.5) if chinese else (recall >= 0.95)


@LANGUAGES
def test_control_arm_without_the_exact_check_precision_falls(cleaned, chinese, monkeypatch):
    monkeypatch.setattr("unfreeze.data.clean.duplicates.jaccard", lambda a, b: 1.0)
    texts, near = planted(chinese)
    rows = [{"text": text, "id": i} for i, text in enumerate(texts)]
    recall, precision = scores(dropped_near(*_swap(cleaned(rows), rows)), near)
    assert recall >= 0.95 and precision < 0.9


@LANGUAGES
def test_hashed_shingles_have_the_jaccard_of_their_strings(chinese, tmp_path):
    texts, _ = planted(chinese, documents=60, near=20, unlike=20)
    near = Near(Duplicates(), tmp_path)
    hashed = [near.signature(Document(text)).shingle_S for text in texts]
    near.close()
    strings = [shingles(text, chinese) for text in texts]
    for i in range(60):
        for j in range(i):
            exact = len(strings[i] & strings[j]) / len(strings[i] | strings[j])
            assert jaccard(hashed[i], hashed[j]) == pytest.approx(exact, abs=1e-12)


def test_the_signature_estimates_the_jaccard(tmp_path):
    """The share of equal values is binomial with p = J: over 200 pairs its mean is within 3 sigma."""
    texts, near = planted(chinese=False)
    index = Near(Duplicates(), tmp_path)
    signatures = [index.signature(Document(text)) for text in texts]
    index.close()
    errors = []
    for i in sorted(near):
        j = max(range(700), key=lambda j: (signatures[i].values_P == signatures[j].values_P).mean())
        estimate = (signatures[i].values_P == signatures[j].values_P).mean()
        errors.append(estimate - jaccard(signatures[i].shingle_S, signatures[j].shingle_S))
    assert abs(np.mean(errors)) < 3 * np.sqrt(0.8 * 0.2 / 125 / len(errors))


def test_the_first_of_equal_texts_stays_and_white_space_around_does_not_count(cleaned):
    rows = [
        {"text": "one two three", "id": 0},
        {"text": " one two three\n", "id": 1},
        {"text": "One two three!"},
    ]
    ledger, kept = cleaned(rows, duplicates={"near": False})
    assert [row.get("id") for row in kept] == [0, None]
    assert ledger["dropped"]["duplicate.exact"]["examples"][0]["why"].endswith("in.jsonl row 1")
    _, kept = cleaned(rows, out="near")  # case and punctuation: near, with a Jaccard of 1
    assert len(kept) == 1


def test_duplicates_can_stay(cleaned):
    rows = [{"text": "the same"}] * 3
    assert len(cleaned(rows, duplicates={"near": False, "exact": False})[1]) == 3


def test_texts_without_letters_are_never_near(cleaned):
    assert len(cleaned([{"text": "!!! ???"}, {"text": "--- ..."}])[1]) == 2


def test_a_missing_library_is_named(cleaned, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "datasketch", None)
    from unfreeze.core.errors import ConfigError

    with pytest.raises(ConfigError, match="datasketch") as error:
        cleaned([{"text": "a"}])
    assert "pip install datasketch" in error.value.next
