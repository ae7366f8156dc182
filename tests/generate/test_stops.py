"""Stop strings against a character-by-character definition, for every way of cutting the text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unfreeze.generate.stops import StopText

SMALL = st.text("ab\n", max_size=12)


def by_definition(text, stops):
    """Grow the text one character at a time; at the first length at which it ends in a stop string, cut the
    longest such string off."""
    for n in range(len(text) + 1):
        hits = [stop for stop in stops if text[:n].endswith(stop)]
        if hits:
            return text[: n - max(map(len, hits))], True
    return text, False


def streamed(pieces, stops):
    stream, shown = StopText(stops), ""
    for piece in pieces:
        safe, hit = stream.push(piece)
        shown += safe
        if hit:
            return shown, True
    return shown + stream.flush(), False


@given(st.lists(SMALL, max_size=6), st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3))
def test_any_cutting_gives_the_defined_text(pieces, stops):
    assert streamed(pieces, stops) == by_definition("".join(pieces), stops)


def test_looking_into_single_pieces_would_miss_a_stop_string():
    """Control arm: the definition applied piece by piece lets a stop string through that lies across two
    pieces."""
    pieces = ["Paris.\nUs", "er: and"]
    assert not any(by_definition(piece, ["\nUser:"])[1] for piece in pieces)
    assert streamed(pieces, ["\nUser:"]) == ("Paris.", True)


@pytest.mark.parametrize("text", ["abc", "abx"])
def test_nothing_is_lost_where_no_stop_string_completes(text):
    assert streamed(list(text), ["bcd", "xyz"]) == (text, False)
