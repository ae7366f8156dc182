"""hf:…, through the library datasets: a folder in the Hub's layout, without a network."""

import json
import sys

import huggingface_hub
import pytest

from unfreeze.core.errors import DataError
from unfreeze.data import read_rows
from unfreeze.data.rows.sources import files_of

datasets = pytest.importorskip("datasets")

CARD = """---
configs:
- config_name: main
  data_files:
  - split: train
    path: data/train-*.jsonl
  - split: test
    path: data/test.jsonl
- config_name: extra
  data_files: other/*.jsonl
---
"""


def rows(name, count):
    arguments = [{"city": name}, {"deep": [1, 2]}]
    return [
        {
            "messages": [
                {"role": "user", "content": f"{name} {i}?"},
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"function": {"name": "f", "arguments": arguments[i % 2]}}],
                },
            ]
        }
        for i in range(count)
    ]


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A folder in the Hub's layout, two configurations, three splits."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name, count in (("data/train-0", 3), ("data/train-1", 2), ("data/test", 2), ("other/x", 1)):
        path = tmp_path / "repo" / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows(name, count)))
    (tmp_path / "repo" / "README.md").write_text(CARD)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "repo"


def test_configurations_and_splits_give_the_rows_of_their_files(hub):
    for written, files in (
        ("hf:repo:main", ["data/train-0", "data/train-1"]),
        ("hf:repo:main:test", ["data/test"]),
        ("hf:repo:extra", ["other/x"]),
    ):
        said: list[str] = []
        found = files_of(written, say=said.append)
        want = [row.messages for name in files for row in read_rows(hub / f"{name}.jsonl")]
        assert [row.messages for path in found for row in read_rows(path)] == want, written
        assert said[0].startswith(f"data: {written} is 1 Arrow file in ")


def test_a_folder_without_a_card_has_one_configuration(hub):
    (hub / "README.md").unlink()
    (found,) = files_of("hf:repo/data:test")
    assert [row.messages for row in read_rows(found)] == [
        row.messages for row in read_rows(hub / "data/test.jsonl")
    ]


def test_other_content_is_another_file(hub):
    """Control arm: datasets itself gives the rows of before."""
    source = str(hub)
    first = datasets.load_dataset(source, "extra", split="train")[0]
    (before,) = files_of("hf:repo:extra")
    (hub / "other" / "x.jsonl").write_text(json.dumps(rows("new", 1)[0]) + "\n")
    (after,) = files_of("hf:repo:extra")
    assert before != after and next(iter(read_rows(after))).messages[0]["content"] == "new 0?"
    assert datasets.load_dataset(source, "extra", split="train")[0] == first


@pytest.mark.parametrize(
    "written, says, next",
    [
        ("hf:repo", "hf:repo has 2 configurations: main, extra", "--data hf:repo:main"),
        ("hf:repo:mian", "no configuration 'mian'; nearest: 'main'", "--data hf:repo:main"),
        ("hf:repo:main:tset", "no split 'tset'; nearest: 'test'", "--data hf:repo:main:train"),
        ("hf:repo:main:train[:5]", "is not of the form hf:", "--steps"),
        (
            "hf:nobody/nothing",
            "'hf:nobody/nothing': the Hub cannot be reached, and the cache has no copy",
            "go online",
        ),
        ("hf:./gone", "there is no folder ./gone", "--data hf:FOLDER"),
        ("hf:", "is not of the form hf:", ""),
    ],
)
def test_what_is_not_there_is_named(written, says, next, hub):
    with pytest.raises(DataError, match=says) as error:
        files_of(written)
    assert next in error.value.next


def test_a_reader_that_is_not_of_text_rows_is_not_run(hub):
    (hub / "README.md").unlink()
    for path in (hub / "data").iterdir():
        path.unlink()
    (hub / "data" / "a.xml").write_text("<a/>")
    with pytest.raises(DataError, match="needs the 'xml' reader of datasets"):
        files_of("hf:repo/data")


def test_without_datasets_the_extra_is_named(hub, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match="needs the library datasets, which is not installed") as error:
        files_of("hf:repo:main")
    assert error.value.next == "pip install datasets"


def test_without_a_network_the_cache_is_asked_at_once(tmp_path, monkeypatch, caplog):
    """datasets alone asks six times, with pauses of 23 s."""
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail(f"waits {seconds} s"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # where nobody answers
    with pytest.raises(DataError, match="the Hub cannot be reached, and the cache has no copy") as error:
        files_of("hf:nobody/nothing")
    assert error.value.next == "go online, or give --data its files" and "Retrying" not in caplog.text
    assert datasets.config.HF_HUB_OFFLINE is False and not huggingface_hub.constants.HF_HUB_OFFLINE
