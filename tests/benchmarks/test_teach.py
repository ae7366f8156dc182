"""The language whose probabilities are known, and in small what is claimed of its students."""

from types import SimpleNamespace

import pytest
import torch

from benchmarks.cases.teach import ALONE, TEACHER, TOP, Config, Language, apart, arms, table, trained
from unfreeze.data import pack


def test_texts_follow_the_conditionals():
    """Of 20,000 pairs, how often each word follows the commonest (a, b): within 4 standard deviations."""
    language = Language(4, 0)
    tokens = torch.tensor([list(example.tokens) for example in language.texts(400, 52, seed=1)])
    a, b, c = tokens[:, :-2].flatten(), tokens[:, 1:-1].flatten(), tokens[:, 2:].flatten()
    pair = (4 * a + b).mode().values
    here = 4 * a + b == pair
    q = language.log_q(pair[None] // 4, pair[None] % 4).exp()[0]
    counts = torch.bincount(c[here], minlength=4) / here.sum()
    assert (counts - q).abs().max() < 4 * (0.25 / here.sum()) ** 0.5


def test_the_language_itself_as_a_student_is_0_away():
    language = Language(16, 0)
    batch = pack(language.texts(3, 10, seed=1))
    student = SimpleNamespace(
        hidden=lambda batch: torch.zeros(batch.num_tokens, 1), logits=lambda hidden: language.of(batch)
    )
    assert apart(student, language, batch) == pytest.approx(0, abs=1e-6)
    student.logits = lambda hidden: torch.zeros(len(hidden), 16)
    assert apart(student, language, batch) > 0.1


@pytest.mark.nightly
def test_a_teacher_recovers_half_of_the_gap_and_its_top_words_almost_all_of_that():
    config = Config(steps=150, documents=100, length=16, tokens=256, words=32, top_k=16)
    language = Language(config.words, 0)
    examples, held_out = language.texts(100, 16, seed=0), pack(language.texts(64, 16, seed=9))
    losses = arms(language, config.top_k)
    top = TOP.format(k=16)
    found = {
        name: [apart(trained(losses[name], examples, config, 0), language, held_out)]
        for name in (ALONE, TEACHER, top)
    }
    alone, taught, kept = (found[name][0] for name in (ALONE, TEACHER, top))
    assert taught < 0.5 * alone and abs(kept - taught) < 0.05 * (alone - taught)
    assert "gap recovered" in table(found) and table(found).count("\n") == 4
