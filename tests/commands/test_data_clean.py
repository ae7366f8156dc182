"""unfreeze data clean: the command, its recipe and its help; data show answers as before."""

import base64
import json
import pydoc_data.topics

import pytest

from unfreeze import cli
from unfreeze.commands.data_clean import Config, recipe_of
from unfreeze.config.clean import Recipe
from unfreeze.core.errors import ConfigError


@pytest.fixture
def unfreeze(capsys):
    """`unfreeze …` -> what it prints on both streams; it must end with `code`."""

    def run(*arguments, code=0):
        try:
            ended = cli.main([*map(str, arguments)])
        except SystemExit as end:
            ended = end.code or 0
        printed = capsys.readouterr()
        assert ended == code, printed.err
        return printed.out + printed.err

    return run


@pytest.fixture
def folder(tmp_path):
    topics = pydoc_data.topics.topics
    rows = [{"text": text, "licence": "PSF-2.0", "topic": name} for name, text in topics.items()]
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "in" / "b.jsonl").write_text(json.dumps(rows[5]) + "\n")
    return tmp_path


def test_default_filters_and_both_kinds_of_duplicates_without_a_recipe(unfreeze_json, folder):
    ledger = unfreeze_json("data", "clean", folder / "in", folder / "out")
    dropped = ledger["dropped"]
    assert {"duplicate.exact", "length.short"} <= dropped.keys()
    assert ledger["languages"] == {"en": ledger["kept"]["documents"]}
    size = sum(path.stat().st_size for path in (folder / "in").iterdir())
    assert ledger["in"]["bytes"] == size
    assert size == ledger["kept"]["bytes"] + sum(entry["bytes"] for entry in dropped.values())
    rows = [json.loads(line) for line in (folder / "out" / "rows-00000.jsonl").read_text().splitlines()]
    assert len(rows) == ledger["kept"]["documents"] and all(row["licence"] == "PSF-2.0" for row in rows)


def test_flags_go_before_the_recipe(folder):
    (folder / "r.toml").write_text(
        '[data]\ntext = "body"\n[length]\nmin_words = 7\n[contamination]\nwords = 9\n'
    )
    recipe = recipe_of(
        Config(paths=("in", "out"), recipe=str(folder / "r.toml"), against=("e.jsonl",), on_bad_row="skip")
    )
    assert (recipe.data.text, recipe.data.on_bad_row, recipe.length.min_words) == ("body", "skip", 7)
    assert (recipe.contamination.against, recipe.contamination.words) == (("e.jsonl",), 9)
    assert recipe_of(Config(paths=("in", "out"))) == Recipe()


WRONG = {
    "[length]\nmin_wrods = 3\n": r"unknown key length\.min_wrods; nearest: 'min_words'",
    "[lenght]\nmin_words = 3\n": r"unknown key lenght; nearest: 'length'",
    "[duplicates]\nthreshold = 2\n": r"threshold = 2: must be at most 1",
    "[length]\nmin_words = 9\nmax_words = 3\n": "min_words = 9 is more than length.max_words = 3",
    "[repetition]\ntop_ngrams = [0.1]\n": "top_ngrams",
}


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_recipe_is_refused_by_field(folder, text):
    (folder / "r.toml").write_text(text)
    with pytest.raises(ConfigError, match=WRONG[text]):
        recipe_of(Config(paths=("in", "out"), recipe=str(folder / "r.toml")))


def test_out_is_needed(unfreeze, folder):
    assert "needs IN and OUT_DIR" in unfreeze("data", "clean", folder / "in", code=2)


def test_the_folder_that_it_writes_is_data_without_its_ledger(tmp_path):
    from unfreeze.data.rows.sources import files_of

    folder = tmp_path / "clean"
    folder.mkdir()
    for name in ("rows-00000.jsonl", "ledger.json"):
        (folder / name).write_text('{"text": "a"}\n')
    assert [path.name for path in files_of(str(folder))] == ["rows-00000.jsonl"]
    (folder / "rows-00000.jsonl").rename(folder / "mine.jsonl")  # a ledger of anyone's is data
    assert sorted(path.name for path in files_of(str(folder))) == ["ledger.json", "mine.jsonl"]


def test_the_table_has_a_line_for_each_reason_at_80_columns(unfreeze, tmp_path):
    rows = sorted(pydoc_data.topics.topics.values(), key=len)[-3:]
    lines = [json.dumps({"text": text}) for text in [*rows, rows[0], "word"]]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    (tmp_path / "eval.jsonl").write_text(json.dumps({"text": rows[2]}) + "\n")
    names = [tmp_path / name for name in ("in.jsonl", "out", "eval.jsonl")]
    printed = unfreeze("data", "clean", *names[:2], "--against", names[2])
    table = printed[printed.index("documents") : printed.index("kept")].splitlines()
    assert len(table) == 1 + 1 + 3 and max(map(len, table)) <= 80  # heading, in, three reasons
    assert "contamination.ngram" in printed and "…" in printed  # cut, not wrapped
    assert "1 word, at least 50" in printed and "1 words" not in printed


@pytest.mark.parametrize(
    ("value", "message"),
    [(None, "row 1: text is null"), (7, "row 1: text is int, not a text"), ("", "nearest: 'text'")],
)
def test_a_row_without_a_text_is_named_as_it_is(unfreeze, tmp_path, value, message):
    row = {"txt": "a"} if value == "" else {"text": value}
    (tmp_path / "in.jsonl").write_text(json.dumps(row) + "\n")
    printed = unfreeze("data", "clean", tmp_path / "in.jsonl", tmp_path / "out", code=2)
    assert (message in printed) == (value != "") and "nearest: 'text'" not in printed


def test_a_path_that_is_not_there_is_no_flag(unfreeze, tmp_path):
    (tmp_path / "rows.jsonl").write_text("")
    printed = unfreeze("data", "clean", tmp_path / "row.jsonl", tmp_path / "out", code=2)
    assert "nearest: 'rows.jsonl'" in printed and "give IN a" in printed and "--data" not in printed


def test_bytes_of_a_table_become_text_or_base64(unfreeze, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    texts = sorted(pydoc_data.topics.topics.values(), key=len)[-3:]
    columns = {
        "text": pyarrow.array([text.encode() for text in texts], pyarrow.binary()),
        "hash": pyarrow.array([b"\xff\x00" + bytes([i]) for i in range(3)], pyarrow.binary()),
        "image": [{"bytes": b"\x89PNG", "path": "x.png"}] * 3,
    }
    parquet.write_table(pyarrow.table(columns), tmp_path / "in.parquet")
    unfreeze("data", "clean", tmp_path / "in.parquet", tmp_path / "out")
    rows = [json.loads(line) for line in (tmp_path / "out" / "rows-00000.jsonl").read_text().splitlines()]
    assert [row["text"] for row in rows] == texts
    assert base64.b64decode(rows[2]["hash"]["base64"]) == b"\xff\x00\x02"
    assert base64.b64decode(rows[0]["image"]["bytes"]["base64"]) == b"\x89PNG"
    # control: a text column that is no text is refused by name
    columns["text"] = columns["hash"]
    parquet.write_table(pyarrow.table(columns), tmp_path / "bad.parquet")
    assert "row 1: text is bytes that are not UTF-8" in unfreeze(
        "data", "clean", tmp_path / "bad.parquet", tmp_path / "no", code=2
    )
