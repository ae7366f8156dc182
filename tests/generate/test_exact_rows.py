"""Rows of one batch: each is what it is alone, whatever the others are, and wherever they leave."""

from __future__ import annotations

import pytest
import torch
from exact import SEEN, Row, apart, assert_exact, each_maker, family, rows_of, some, uncached, walked

from unfreeze.generate.steps import launched
from unfreeze.models.blocks.step_pass import StepPass

NAMES = (
    "llama-gqa-tied",
    "gemma3-window",
    "phi3-longrope-tied",
    "deepseek-v3-groups-yarn",
    "gpt-oss-window-all-full",
    "qwen3-moe-mixed",
    "glm-moe-dsa-shared",
)


def uneven(width: int) -> list[Row]:
    """Prompts of 1 to 23 tokens, 3 to 22 steps; every third row goes its own greedy way."""
    rows = []
    for row in range(width):
        prompt, steps = 1 + 7 * row % 23, 3 + 13 * row % 20
        rows.append(Row(some(prompt, 2 * row), steps if row % 3 == 0 else some(steps, 2 * row + 1)))
    return rows


@each_maker
@pytest.mark.parametrize(
    ("name", "width"),
    [(name, 5) for name in NAMES] + [(name, width) for name in NAMES[::3] for width in (2, 16, 64)],
)
def test_a_row_among_others_is_what_it_is_alone(name, width, steps):
    """Logits of every step, tokens of greedy rows. Of 16 and 64 rows six are run alone; all are compared with the
    packed pass."""
    _, model = family(name)
    rows = uneven(width)
    walks = walked(model, steps, rows)
    assert len({len(walk.tokens) for walk in walks}) > 1
    for place in range(0, width, -(-width // 6)):
        (alone,) = walked(model, steps, [rows[place]])
        assert alone.tokens == walks[place].tokens
        assert_exact([walks[place]], [torch.stack(alone.logits)])
    assert_exact(walks, uncached(model, walks))


@each_maker
@pytest.mark.parametrize("leaves", [0, 1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_the_first_the_middle_or_the_last_row_leaves(name, leaves, steps):
    _, model = family(name)
    sizes = [(9, 16), (2, 16), (5, 16)]
    sizes[leaves] = (sizes[leaves][0], 8)
    rows = rows_of(*sizes, greedy=3)
    for row, walk in zip(rows, walked(model, steps, rows), strict=True):
        (alone,) = walked(model, steps, [row])
        assert alone.tokens == walk.tokens
        assert_exact([walk], [torch.stack(alone.logits)])


@pytest.mark.parametrize("name", NAMES[:-1])  # where keys are chosen, no mask is read
def test_control_a_shorter_row_that_sees_the_longest_rows_places_is_seen(name, monkeypatch):
    """Of launched steps: the mask of uneven rows is left out."""
    _, model = family(name)
    rows = uneven(2)
    made = StepPass.__post_init__

    def bare(self):
        made(self)
        self.mask_S11N = None

    monkeypatch.setattr(StepPass, "__post_init__", bare)
    walks = walked(model, launched, rows)
    assert apart(walks, uncached(model, walks)) > SEEN
