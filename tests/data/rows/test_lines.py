"""JSON arrays and gzip: the same rows as JSON Lines, at bounded memory."""

import gzip
import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unfreeze.core.errors import DataError
from unfreeze.data import BadRow, Text, read_rows
from unfreeze.data.rows import lines
from unfreeze.data.rows.files import Again, read_places

ROWS = [{"text": text} for text in ("a", 'b "quoted" [x] {y}, \\', "c\nd\té \U0001f600", "e" * 300)]


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("chunk", [7, 64, 2**18])
def test_an_array_is_its_rows_wherever_the_pieces_part(indent, chunk, tmp_path, monkeypatch):
    monkeypatch.setattr(lines, "CHUNK", chunk)
    path = tmp_path / "data.json"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(ROWS, indent=indent, ensure_ascii=indent is None).encode())
    found = list(read_places(path))
    assert [row for _, row in found] == [Text(row["text"], i + 1) for i, row in enumerate(ROWS)]
    again = Again(path)
    assert all(again(place) == row for place, row in reversed(found))


json_texts = st.recursive(
    st.text(max_size=6) | st.integers() | st.booleans() | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.fixed_dictionaries({"text": st.text(min_size=1), "more": json_texts})), st.integers(1, 40))
def test_any_array_gives_what_json_reads(tmp_path_factory, rows, seed):
    path = tmp_path_factory.mktemp("array") / "data.json"
    text = json.dumps(rows, ensure_ascii=seed % 2 == 0, indent=seed % 3 or None)
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    found = [json.loads(raw) for _, raw in lines.JsonArray(path, {}).rows()]
    assert found == json.loads(text)


@pytest.mark.parametrize(
    "text, says",
    [
        ('[{"text": "a"}, {"text": ', "row 2: the file ends inside its JSON array"),
        ('[{"text": "a', "row 1: the file ends inside its JSON array"),
        ('[{"text": "a"}]\n{"text": "b"}', "row 1: the JSON array ends here, but more follows: b'{"),
        ('[{"text": "a"}, 7]', "row 2: expected a JSON object, got a number"),
        ('[{"text": "a"},]', "row 2: broken JSON at column 1"),
        ('[{"text" "a"}]', "row 1: broken JSON at column"),
    ],
)
def test_a_broken_array_is_named(text, says, tmp_path):
    (tmp_path / "data.json").write_text(text)
    with pytest.raises(DataError, match=says) as error:
        list(read_rows(tmp_path / "data.json"))
    assert "data.json" in error.value.message and error.value.next


def test_a_bad_element_is_skipped_and_counted(tmp_path):
    (tmp_path / "data.json").write_text('[{"text": "a"}, {"text": NaN}, {"text": "]"}]')
    bad: list[BadRow] = []
    assert [row.row for row in read_rows(tmp_path / "data.json", bad.append)] == [1, 3]
    assert [item.row for item in bad] == [2]


def test_an_element_beyond_the_limit_is_not_held(tmp_path, monkeypatch):
    """The control arm has a limit that it meets."""
    (tmp_path / "data.json").write_text(json.dumps([{"text": "x" * 5000}]))
    monkeypatch.setattr(lines, "CHUNK", 100)
    monkeypatch.setattr(lines, "MAX_ROW_BYTES", 1000)
    with pytest.raises(DataError, match="row 1: more than 1000 B in one row"):
        list(read_rows(tmp_path / "data.json"))
    monkeypatch.setattr(lines, "MAX_ROW_BYTES", 6000)
    assert len(list(read_rows(tmp_path / "data.json"))) == 1


def test_an_empty_array_has_no_rows(tmp_path):
    (tmp_path / "data.json").write_text(" [ \n ] ")
    assert list(read_rows(tmp_path / "data.json")) == []


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.json.gz", "a.txt.gz", "a.csv.gz"])
def test_gzip_gives_the_rows_of_what_is_packed(name, tmp_path):
    text = {
        "a.jsonl.gz": '{"text": "a"}\n{"text": "b"}\n',
        "a.json.gz": '[{"text": "a"}, {"text": "b"}]',
        "a.txt.gz": "a\n\nb\n",
        "a.csv.gz": "text,id\na,1\nb,2\n",
    }[name]
    packed = gzip.compress(text.encode())
    (tmp_path / name).write_bytes(packed)
    found = list(read_places(tmp_path / name))
    assert [row.text for _, row in found] == ["a", "b"]
    again = Again(tmp_path / name)
    assert [again(place) for place, _ in reversed(found)] == [row for _, row in reversed(found)]
    damaged = bytearray(packed)
    random.Random(1).shuffle(damaged)
    for bytes_ in (packed[:-9], bytes(damaged), text.encode()):
        (tmp_path / name).write_bytes(bytes_)
        with pytest.raises(DataError, match=f"{name} cannot be decompressed as gzip"):
            list(read_rows(tmp_path / name))


def test_one_object_over_several_lines_gets_the_command_that_makes_rows(tmp_path):
    (tmp_path / "data.json").write_text(json.dumps({"text": "a"}, indent=1))
    with pytest.raises(DataError, match="row 1: broken JSON") as error:
        list(read_rows(tmp_path / "data.json"))
    assert "jq -c" in error.value.next
