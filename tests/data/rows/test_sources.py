"""Files, patterns, folders: which files --data stands for."""

import pytest

from unfreeze.core.errors import ConfigError, UserError
from unfreeze.data.rows.sources import files_of

ROW = '{"text": "a"}\n'


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name in (
        "d/b.jsonl",
        "d/a.csv",
        "d/LICENSE.txt",
        "d/README.md",
        "d/.hidden.jsonl",
        "d/in/c.jsonl",
        "e/x/y",
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(ROW)
    (tmp_path / "odd[1].jsonl").write_text(ROW)
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "written, files, said",
    [
        ("d/b.jsonl", ["d/b.jsonl"], []),
        ("odd[1].jsonl", ["odd[1].jsonl"], []),
        ("d/*.jsonl", ["d/b.jsonl"], ["data: d/*.jsonl matches d/b.jsonl"]),
        ("d/**/*.jsonl", ["d/b.jsonl", "d/in/c.jsonl"], ["data: d/**/*.jsonl matches 2 files: d/b.jsonl, d/in/c.jsonl"]),
        ("d", ["d/a.csv", "d/b.jsonl"],
         ["data: d holds 2 files: a.csv, b.jsonl; left out: 3 files: LICENSE.txt, README.md, in/"]),
        ("d/in/", ["d/in/c.jsonl"], ["data: d/in holds c.jsonl"]),
    ],
)  # fmt: skip
def test_files_in_order_and_what_is_said_of_them(written, files, said, folder):
    lines: list[str] = []
    assert list(map(str, files_of(written, say=lines.append))) == files and lines == said


@pytest.mark.parametrize(
    "written, says, next",
    [
        ("d/c.jsonl", "data = 'd/c.jsonl' is not a file or folder in .*", "--data a .jsonl"),
        ("d/bb.jsonl", "nearest: 'b.jsonl'", ".parquet"),
        ("d/*.parquet", r"'d/\*.parquet' matches no file in", "hf:org/name"),
        ("d/*", "README.md: extension '.md' is not supported", ".jsonl .json"),
        ("d/README.md", "README.md: extension '.md' is not supported", ".jsonl .json"),
        ("empty", "'empty': the folder holds no data file: it is empty", "--data"),
        ("e", r"'e': the folder holds no data file \(x\)", "--data"),
        (
            "tatsu-lab/alpaca",
            "'tatsu-lab/alpaca' is not a file or folder",
            "--data hf:tatsu-lab/alpaca reads",
        ),
    ],
)
def test_what_is_no_data_is_named_with_a_next_step(written, says, next, folder):
    with pytest.raises(UserError, match=says) as error:
        files_of(written)
    assert next in error.value.next


def test_a_folder_of_texts_is_read_where_it_holds_nothing_else(folder):
    (folder / "empty" / "a.txt").write_text("a")
    assert [path.name for path in files_of("empty")] == ["a.txt"]


def test_a_folder_whose_files_lie_deeper_names_that_one(folder):
    (folder / "top" / "data").mkdir(parents=True)
    (folder / "top" / "data" / "a.jsonl").write_text(ROW)
    with pytest.raises(ConfigError) as error:
        files_of("top", "validation")
    assert error.value.next == "--validation top/data"
    (folder / "top" / "README.md").write_text("")  # the Hub's layout: all its splits lie in data/
    with pytest.raises(ConfigError) as error:
        files_of("top")
    assert error.value.next == "--data hf:top"


def test_a_saved_data_set_of_several_splits_names_them(folder):
    for split in ("test", "train"):
        (folder / "saved" / split).mkdir(parents=True)
        for name in ("data-00000-of-00001.arrow", "state.json", "dataset_info.json"):
            (folder / "saved" / split / name).write_text("{}")
    (folder / "saved" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(ConfigError, match="holds the splits of a saved data set: test, train") as error:
        files_of("saved")
    assert error.value.next == "--data saved/train"
    assert [path.name for path in files_of("saved/train")] == ["data-00000-of-00001.arrow"]  # control arm


def test_a_link_to_nowhere_is_named(folder):
    (folder / "dead.jsonl").symlink_to("gone.jsonl")
    with pytest.raises(ConfigError, match=r"is a link to gone\.jsonl, which does not exist"):
        files_of("dead.jsonl")


def test_what_datasets_left_in_a_saved_folder_is_no_data(folder):
    for name in ("data-00000-of-00001.arrow", "cache-1a2b.arrow", "state.json", "dataset_info.json"):
        (folder / "empty" / name).write_text("{}")
    assert [path.name for path in files_of("empty")] == ["data-00000-of-00001.arrow"]


def test_a_file_that_two_paths_lead_to_is_read_once(folder):
    (folder / "d" / "again").symlink_to(folder / "d" / "in")
    found = [path.name for path in files_of("d/**/*.jsonl")]
    assert sorted(found) == ["b.jsonl", "c.jsonl"]


def test_a_folder_of_runs_is_no_folder_of_data(tmp_path):
    """The files of a run end as data does, and are no rows."""
    (tmp_path / "runs" / "a").mkdir(parents=True)
    (tmp_path / "runs" / "a" / "events.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match="holds no data file") as error:
        files_of(str(tmp_path / "runs"))
    assert "runs/a" not in error.value.next
