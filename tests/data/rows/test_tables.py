"""Every form of the same rows gives the same tokens; pandas, pyarrow and datasets are the writers."""

import gzip
import json
import sys

import pytest

from unfreeze.commands.demo import TINY_K2
from unfreeze.core.errors import DataError
from unfreeze.data import BadRow, encode_file, load_tokenizer, read_rows
from unfreeze.data.rows import tables
from unfreeze.data.rows.files import Again, read_places, reader
from unfreeze.data.store.dataset import OnDemand

pandas = pytest.importorskip("pandas")
pyarrow = pytest.importorskip("pyarrow")
feather = pytest.importorskip("pyarrow.feather")
parquet = pytest.importorskip("pyarrow.parquet")
datasets = pytest.importorskip("datasets")

ASKED = ["What is 6 * 7?", "Write a table:\na,b", 'Say "no".', "Grüße, wer?", "=1+1;\t'x'"]
PAIRS = [{"prompt": asked, "completion": f"{asked[::-1]}. Hmm."} for asked in ASKED]
CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"at": "sky"}'}}
TALKS = [
    {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": f"{i}, it is."}]}
    for i, asked in enumerate(ASKED)
] + [
    {
        "messages": [
            {"role": "user", "content": "Look."},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "content": "blue", "tool_call_id": "call_1"},
            {"role": "assistant", "content": "Blue, it is."},
        ]
    }
]


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(TINY_K2)


def write(folder, rows):
    """The same rows in every form, written by others' libraries."""
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "a.jsonl").write_text(lines)
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (folder / "a.json").write_text(json.dumps(rows, indent=1))
    table = pyarrow.Table.from_pylist(rows)
    pyarrow.parquet.write_table(table, folder / "a.parquet", row_group_size=2)
    feather.write_feather(table, folder / "a.feather")
    stream = pyarrow.ipc.new_stream(folder / "a.arrow", table.schema)
    stream.write_table(table, max_chunksize=2)
    stream.close()
    cells = [{name: json.dumps(v) if isinstance(v, list) else v for name, v in row.items()} for row in rows]
    frame = pandas.DataFrame(cells)
    frame.to_csv(folder / "a.csv")  # with pandas' unnamed index
    frame.to_csv(folder / "a.tsv", index=False, sep="\t")
    frame.to_csv(folder / "semicolon.csv", index=False, sep=";")
    return sorted(folder.iterdir())


@pytest.mark.parametrize("rows", [PAIRS, TALKS], ids=["pairs", "talks"])
def test_every_form_gives_the_same_tokens(rows, tokenizer, tmp_path):
    files = write(tmp_path, rows)
    want = encode_file(tmp_path / "a.jsonl", tokenizer, 512).examples
    assert len(files) == 9 and len(want) == len(rows)
    for path in files:
        examples = encode_file(path, tokenizer, 512).examples
        assert examples.fingerprint() == want.fingerprint(), path.name
        assert [list(e.tokens) for e in examples] == [list(e.tokens) for e in want], path.name
        on_demand = encode_file(path, tokenizer, 512, held_bytes=0)
        assert on_demand.stats.reading == "on demand" and isinstance(
            on_demand.examples._fetch.__self__, OnDemand
        )
        for i in reversed(range(len(want))):
            assert list(on_demand.examples[i].tokens) == list(want[i].tokens), path.name


@pytest.mark.parametrize("name", ["a.csv", "a.parquet"])
def test_rows_of_tables_go_to_other_processes(name, tokenizer, tmp_path):
    """What a reader gives is plain: bad rows too."""
    write(tmp_path, TALKS)
    with (tmp_path / "a.csv").open("a") as file:
        file.write("x,y,z\n")
    here, there = (
        encode_file(tmp_path / name, tokenizer, 512, on_bad_row="skip", workers=count) for count in (0, 1)
    )
    assert here.examples.fingerprint() == there.examples.fingerprint()
    assert here.stats.as_dict() == there.stats.as_dict() and here.stats.bad == (name == "a.csv")


def test_rows_are_those_that_datasets_reads(tmp_path):
    """datasets.load_dataset on the same files: cell by cell."""
    write(tmp_path, PAIRS)
    kinds = {
        "a.jsonl": "json",
        "a.json": "json",
        "a.csv": "csv",
        "a.parquet": "parquet",
        "a.feather": "arrow",
    }
    for name, kind in kinds.items():
        theirs = datasets.load_dataset(
            kind, data_files=str(tmp_path / name), split="train", cache_dir=str(tmp_path / "cache")
        )
        ours = [
            (row.messages[0]["content"], row.messages[1]["content"]) for row in read_rows(tmp_path / name)
        ]
        assert ours == list(zip(theirs["prompt"], theirs["completion"], strict=True)), name


def test_a_struct_of_other_keys_has_no_nulls_of_them(tmp_path):
    """Arrow gives every struct every key; the control arm keeps them."""
    rows = [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "tool_calls": [
            {"function": {"name": "f", "arguments": arguments}}]}]}
        for arguments in ({"x": 1}, {"y": "z"})
    ]  # fmt: skip
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    said = [row.messages[1]["tool_calls"][0]["function"]["arguments"] for row in read_rows(path)]
    assert said == [{"x": 1}, {"y": "z"}]
    raw = pyarrow.parquet.read_table(path).to_pylist()[0]
    assert raw["messages"][1]["tool_calls"][0]["function"]["arguments"] == {"x": 1, "y": None}


def test_only_columns_of_rows_are_read(tmp_path):
    table = pyarrow.table({"text": ["a", "b"], "scan": [b"x" * 1000] * 2, "when": [1, 2]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    (tmp_path / "mixed.csv").write_text("text,prompt,completion\na,,\n,b,c\n")
    assert [raw for _, raw in reader(tmp_path / "a.parquet").rows()] == [{"text": "a"}, {"text": "b"}]
    assert [row.shape for row in read_rows(tmp_path / "mixed.csv")] == ["text", "prompt/completion"]


def test_a_table_with_pictures_is_refused_by_their_column(tmp_path):
    rows = {"prompt": ["a"], "completion": ["b"], "image": [{"bytes": b"x", "path": None}]}
    pyarrow.parquet.write_table(pyarrow.table(rows), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="row 1: field 'image' cannot be used by a language model"):
        list(read_rows(tmp_path / "a.parquet"))


@pytest.mark.parametrize(
    "text, says, next",
    [
        (b"", "data.csv is empty", "prompt,completion"),
        (b"\nprompt,completion\n", "row 1: the header line is blank", "prompt,completion"),
        (b"What is 6?,Six.\n", "row 1: the first line of a csv file names its columns: no known field", "--columns"),
        (b"prompt,prompt,completion\n", "row 1: column 'prompt' occurs twice", "rename"),
        (b"prompt,completion\na,b,c\n", "row 2: 3 cells, the header has 2", "quote a cell"),
        (b'prompt,completion\n"a\nb",c\nd\n', "row 4: 1 cells, the header has 2", "quote a cell"),
        (b'prompt,completion\na,"b\n', "row 2: a quote opened here is never closed", "twice"),
        (b"prompt,completion\na,caf\xe9\n", r"row 2: byte 6 \(0xe9\) is not UTF-8", "iconv"),
        ("prompt,completion\na,b\n".encode("utf-16"), "data.csv is UTF-16", "iconv"),
        (b"prompt,completion\na,\n", "row 2: field 'completion' is null", "correct"),
        (b"messages\n\"[{'role': 'user'}]\"\n", "row 2: field messages is text that is not JSON", "json.dumps"),
    ],
)  # fmt: skip
def test_a_csv_file_that_cannot_be_read_is_named(text, says, next, tmp_path):
    (tmp_path / "data.csv").write_bytes(text)
    with pytest.raises(DataError, match=says) as error:
        list(read_rows(tmp_path / "data.csv"))
    assert "data.csv" in error.value.message and next in error.value.next


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ('prompt, completion\n"a", "b, c"\n', [("a", "b, c")]),
        ('"prompt"; "completion"\n"a"; b\n', [("a", "b")]),
        ("prompt,completion\na, b\n", [("a", " b")]),  # control arm: no space in the header
        ('prompt;completion;"a,b,c,d"\nx;y;z\n', [("x", "y")]),
    ],
)
def test_the_header_says_what_stands_between_cells(text, rows, tmp_path):
    path = tmp_path / "a.csv"
    path.write_text(text)
    assert [tuple(turn["content"] for turn in row.messages) for row in read_rows(path)] == rows
    again = Again(path)
    assert [
        tuple(turn["content"] for turn in again(place).messages) for place, _ in read_places(path)
    ] == rows


@pytest.mark.parametrize("kind", ["list_view", "large_list_view", "list_", "large_list"])
def test_every_kind_of_list_is_a_list(kind, tmp_path):
    turn = pyarrow.struct([("role", pyarrow.string()), ("content", pyarrow.string_view())])
    table = pyarrow.table(
        {"messages": pyarrow.array([TALKS[0]["messages"]], type=getattr(pyarrow, kind)(turn))}
    )
    parquet.write_table(table, tmp_path / "a.parquet")
    with pyarrow.ipc.new_file(tmp_path / "a.arrow", table.schema) as file:
        file.write_table(table)
    for name in ("a.parquet", "a.arrow"):
        (row,) = read_rows(tmp_path / name)
        assert row.messages == TALKS[0]["messages"]


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl", "a.txt"])
def test_a_file_that_is_another_by_its_first_bytes_is_named_with_the_command(name, tmp_path):
    rows = pyarrow.Table.from_pylist(PAIRS)
    path = tmp_path / name
    parquet.write_table(rows, path)
    with pytest.raises(DataError, match=f"{name} is .parquet, not") as error:
        list(read_rows(path))
    assert error.value.next == f"mv {path} {tmp_path / 'a.parquet'}"
    for begin, said in (
        (b"\x1f\x8b\x08", "is .gz, not"),
        (b"PK\x03\x04", "xlsx or zip file"),
        (b"ARROW1\0\0", "is .arrow"),
    ):
        path.write_bytes(begin + b"\0" * 9)
        with pytest.raises(DataError, match=said):
            list(read_rows(path))
    plain = tmp_path / "b.txt"
    plain.write_text("PAR1 and ARROW1 are words.")  # control arm
    assert len(list(read_rows(plain))) == 1


def test_bad_records_of_a_csv_file_are_skipped_and_counted(tmp_path):
    (tmp_path / "data.csv").write_bytes(b'prompt,completion\na,b\na,b,c\n\n"x"y,z\na,caf\xe9\n"m\nn",o\n')
    bad: list[BadRow] = []
    found = list(read_places(tmp_path / "data.csv", bad.append))
    assert [place.row for place, _ in found] == [2, 7] and [item.row for item in bad] == [3, 5, 6]
    again = Again(tmp_path / "data.csv")
    assert all(again(place) == row for place, row in reversed(found))


def test_a_quote_that_never_closes_does_not_fill_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(tables.lines, "MAX_ROW_BYTES", 500)
    (tmp_path / "data.csv").write_text('prompt,completion\na,"b\n' + "c,d\n" * 1000)
    with pytest.raises(DataError, match="row 2: a quote opened here"):
        list(read_rows(tmp_path / "data.csv"))


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.feather"])
def test_damaged_tables_and_other_columns_are_named(name, tmp_path):
    write(tmp_path, PAIRS)
    whole = (tmp_path / name).read_bytes()
    for damaged in (b"", b"hello", whole[: len(whole) // 2], b"\0" * len(whole)):
        (tmp_path / name).write_bytes(damaged)
        with pytest.raises(DataError, match=f"{name} cannot be read as") as error:
            list(read_rows(tmp_path / name))
        assert "again" in error.value.next
    pyarrow.parquet.write_table(pyarrow.table({"question": ["a"], "respnse": ["b"]}), tmp_path / "b.parquet")
    with pytest.raises(DataError, match=r"b\.parquet, the columns: field 'answer' is missing") as error:
        list(read_rows(tmp_path / "b.parquet"))
    assert "question, respnse" in error.value.message and "--columns answer=NAME" in error.value.next


def test_without_pyarrow_the_extra_is_named(tmp_path, monkeypatch):
    write(tmp_path, PAIRS)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"a\.parquet: \.parquet files need pyarrow") as error:
        list(read_rows(tmp_path / "a.parquet"))
    assert error.value.next == "pip install pyarrow"
    assert len(list(read_rows(tmp_path / "a.csv"))) == len(PAIRS)


def test_a_table_is_never_held_whole(tmp_path, monkeypatch):
    """At most ROWS rows are Python objects at a time; the control arm holds all."""
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a"] * 1000}), tmp_path / "a.parquet")
    made: list[int] = []
    real = tables._fields

    def counted(batch, *rest):
        made.append(batch.num_rows)
        return real(batch, *rest)

    monkeypatch.setattr(tables, "_fields", counted)
    assert len(list(read_rows(tmp_path / "a.parquet"))) == 1000 and max(made) == tables.ROWS
    made.clear()
    monkeypatch.setattr(tables, "ROWS", 1000)
    list(read_rows(tmp_path / "a.parquet"))
    assert max(made) == 1000


@pytest.mark.parametrize(
    "text",
    [
        b'prompt,completion\n"caf\xe9\nWhat is 2+2?",4\nok,fine\n',
        b'prompt,completion\n"a\nb"c\nWhat?",4\nok,fine\n',
    ],
)
def test_where_a_bad_record_ends_cannot_be_told_no_row_is_made_of_its_rest(text, tmp_path):
    (tmp_path / "data.csv").write_bytes(text)
    bad: list[BadRow] = []
    with pytest.raises(DataError, match="row 2"):
        list(read_places(tmp_path / "data.csv", bad.append))


def test_a_column_that_stands_twice_is_refused(tmp_path):
    pa = pytest.importorskip("pyarrow")
    table = pa.table([["a"], ["b"], ["c"]], names=["prompt", "completion", "completion"])
    pytest.importorskip("pyarrow.parquet").write_table(table, tmp_path / "data.parquet")
    with pytest.raises(DataError, match="column 'completion' occurs twice"):
        list(read_rows(tmp_path / "data.parquet"))


def test_a_quote_meant_as_text_does_not_swallow_rows(tmp_path):
    """In a tab-separated file a cell that opens with a quote runs over tabs and lines to the next quote."""
    path = tmp_path / "data.tsv"
    path.write_text('prompt\tcompletion\n"Hello\tone\ntwo\ttwo\nthe end"\tfour\n')
    with pytest.raises(DataError, match=r"data\.tsv, row 2: a cell that starts with a quote") as error:
        list(read_rows(path))
    assert '"""Hello"" she said"' in error.value.next
    path.write_text('prompt\tcompletion\n"""Hello"" she said"\t"one\nline"\n')  # control arm: what it says
    assert next(iter(read_rows(path))).messages[0]["content"] == '"Hello" she said'


@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_a_cell_that_is_not_utf8_is_a_bad_row_and_not_a_bad_file(form, tmp_path):
    texts = [b"a", b"caf\xe9", b"c"]
    column = pyarrow.array(texts, type=pyarrow.binary()).view(pyarrow.string())
    table = pyarrow.table({"prompt": ["1", "2", "3"], "completion": column})
    path = tmp_path / f"rows.{form}"
    if form == "parquet":
        parquet.write_table(table, path)
    else:
        with pyarrow.ipc.new_file(path, table.schema) as file:
            file.write_table(table)
    bad = []
    rows = list(read_rows(path, bad.append))
    assert [row.messages[1]["content"] for row in rows] == ["a", "c"] and [row.row for row in rows] == [1, 3]
    assert [found.row for found in bad] == [2] and "row 2: not UTF-8" in bad[0].reason
    with pytest.raises(DataError, match=rf"rows\.{form}, row 2: not UTF-8"):
        list(read_rows(path))
