"""DocumentLayout: every token has exactly one slot, and many documents cost few attention calls."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unfreeze.kernels.attention import DocumentLayout


def build(lengths):
    starts = torch.tensor([0, *lengths[:-1]]).cumsum(0)
    return DocumentLayout.build(starts, sum(lengths))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=40))
def test_slots_are_a_bijection_inside_documents(lengths):
    layout = build(lengths)
    assert sum(b.num_documents for b in layout.buckets) == len(lengths)
    if layout.source_N is None:
        assert len(set(lengths)) == 1 and layout.num_slots == sum(lengths)
        return
    assert torch.equal(layout.source_N[layout.slot_T], torch.arange(sum(lengths)))  # each token finds itself
    assert layout.slot_T.unique().numel() == sum(lengths)
    document_T = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    for bucket, source in zip(
        layout.buckets, layout.source_N.split([b.num_slots for b in layout.buckets]), strict=True
    ):
        rows = document_T[source].view(bucket.num_documents, bucket.length)
        assert bool((rows == rows[:, :1]).all())  # a row holds one document, padding included
        tokens = source.view(bucket.num_documents, bucket.length)
        for row, document in zip(tokens, rows[:, 0].tolist(), strict=True):
            length = lengths[document]
            assert torch.equal(row[:length] - row[0], torch.arange(length))  # in order, padding on the right


def test_fifty_short_documents_cost_three_calls_at_most():
    lengths = [int(n) for n in torch.randint(12, 97, (50,), generator=torch.Generator().manual_seed(0))]
    layout = build(lengths)
    assert len(layout.buckets) <= 3
    assert layout.num_slots <= 1.6 * sum(lengths)


def test_long_documents_are_padded_by_a_third_at_most():
    layout = build([2048, 1500, 1100, 700, 300, 100])
    assert layout.num_slots <= (2048 + 1500 + 1100 + 700 + 300 + 100) / 0.75


@pytest.mark.parametrize(
    "starts, num_tokens", [([1, 4], 6), ([0, 4, 4], 6), ([0, 6], 6), ([], 6), ([0, 5, 3], 6)]
)
def test_starts_that_leave_an_empty_document_are_refused(starts, num_tokens):
    with pytest.raises(ValueError, match="starts must begin with 0"):
        DocumentLayout.build(torch.tensor(starts, dtype=torch.int64), num_tokens)
