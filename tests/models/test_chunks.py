"""How many tokens go through a layer at once, and which documents go together."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unfreeze.models.chunks import MIN_TOKENS, chunk_tokens, document_groups


@pytest.mark.parametrize(
    ("experts", "top", "expected"), [(0, 0, 4096), (16, 2, 4096), (128, 8, 8192), (384, 8, 24576)]
)
def test_every_expert_has_its_rows_on_average(experts, top, expected):
    assert (
        chunk_tokens(experts, top, "cpu") == expected >= MIN_TOKENS
        and chunk_tokens(experts, top, "cuda") is None
    )
    assert not experts or expected * top / experts >= 512


@given(st.lists(st.integers(1, 40), min_size=1, max_size=60), st.integers(1, 50))
def test_documents_stay_whole_in_order_and_below_the_limit(lengths, limit):
    groups = document_groups(lengths, limit)
    assert [length for group in groups for length in group] == lengths and all(groups)
    assert all(sum(group) <= limit or len(group) == 1 for group in groups)


def test_groups_are_about_as_large_as_each_other():
    assert [sum(group) for group in document_groups([512] * 10, 4096)] == [2560, 2560]
    assert [sum(group) for group in document_groups([512] * 128, 4096)] == [4096] * 16
