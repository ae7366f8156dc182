"""JSON from a file: json.loads' values, or one error."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unfreeze.core.errors import DataError
from unfreeze.untrusted.json_object import parse_object, read_object

LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9)
VALUES = st.recursive(
    LEAVES, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(), v, max_size=3), max_leaves=5
)


@settings(max_examples=50, derandomize=True, deadline=None, database=None)
@given(st.dictionaries(st.text(), VALUES, max_size=4))
def test_equals_the_standard_library(value):
    assert parse_object(json.dumps(value).encode(), "x", DataError) == value


@settings(max_examples=100, derandomize=True, deadline=None, database=None)
@given(st.binary())
def test_any_bytes_are_an_object_or_one_error(raw):
    try:
        assert isinstance(parse_object(raw, "x", DataError), dict)
    except DataError as error:
        assert error.message.startswith("x ")


def test_a_field_that_stands_twice(tmp_path):
    assert parse_object(b'{"a": 1, "a": 1}', "x", DataError) == {"a": 1}
    with pytest.raises(DataError, match="field 'a' occurs twice with different values"):
        parse_object(b'{"a": 1, "a": 2}', "x", DataError)
    assert json.loads('{"a": 1, "a": 2}') == {"a": 2}  # control: the library takes the last in silence
    (tmp_path / "x.json").write_bytes(b'\xef\xbb\xbf{"a": 1}')
    assert read_object(tmp_path / "x.json", DataError) == {"a": 1}
