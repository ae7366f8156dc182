"""unfreeze data clean: the command, its recipe and its help; data show answers as before."""

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
