"""Whole runs: every column survives, any format in, the same bytes from any rerun, refusals."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import signal
import time

import pytest

from tests.data.clean.conftest import OFF, written
from tests.data.clean.planted import planted
from unfreeze.config.clean import Recipe
from unfreeze.core.errors import ConfigError, DataError
from unfreeze.data.clean import run as running
from unfreeze.data.clean.journal import Journal
from unfreeze.data.clean.run import clean


def digests(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def corpus(path, documents=120):
    texts, _ = planted(chinese=False, documents=documents, near=documents // 5, unlike=documents // 5)
    rows = [
        {"id": i, "text": text, "licence": "CC-BY", "origin": {"url": f"u{i}"}}
        for i, text in enumerate(texts)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


def recipe(**tables):
    return Recipe.model_validate({**OFF, **tables})


def test_lines_that_stay_are_written_as_they_were(cleaned, tmp_path):
    lines = [
        '{"text": "one",   "n": 1.50, "licence": null, "big": 12345678901234567890}',
        '{"z": [1], "text":"é \\u00e9"}',
    ]
    cleaned(lines)
    assert (tmp_path / "out" / "rows-00000.jsonl").read_text(encoding="utf-8") == "".join(
        f"{x}\n" for x in lines
    )


def table_of(rows):
    return pytest.importorskip("pyarrow").Table.from_pylist(rows)


@pytest.mark.parametrize(
    "form", ["parquet", "arrow", "feather", "csv", "json", "txt", "jsonl.gz", "jsonl.zst"]
)
def test_every_format_keeps_every_column(tmp_path, form):
    rows = [{"text": f"document {i}", "licence": "MIT", "origin": f"u{i}"} for i in range(5)]
    path = tmp_path / f"in.{form}"
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    if form in ("parquet", "arrow", "feather"):
        rows = [{**row, "score": 0.5 if i else None, "tags": ["a"]} for i, row in enumerate(rows)]
        from pyarrow import feather, parquet

        write = parquet.write_table if form == "parquet" else feather.write_feather
        write(table_of(rows), str(path))
    elif form == "csv":
        path.write_text("text,licence,origin\n" + "".join(f"{','.join(row.values())}\n" for row in rows))
    elif form == "json":
        path.write_text(json.dumps(rows, indent=1))
    elif form == "txt":
        path.write_text("\n\n".join(row["text"] for row in rows) + "\n")
        rows = [{"text": row["text"]} for row in rows]
    elif form == "jsonl.gz":
        path.write_bytes(gzip.compress(lines))
    else:
        path.write_bytes(pytest.importorskip("zstandard").compress(lines))
    ledger = clean([str(path)], tmp_path / "out", recipe(duplicates={"near": False}))
    assert written(tmp_path / "out") == rows
    ending = form.removeprefix("jsonl") if form.startswith("jsonl.") else ""
    assert [entry["file"] for entry in ledger["files"]] == [f"rows-00000.jsonl{ending}"]


def test_not_a_number_in_a_table_becomes_null(tmp_path):
    table = table_of([{"text": "a", "score": float("nan")}])
    from pyarrow import parquet

    parquet.write_table(table, str(tmp_path / "in.parquet"))
    clean([str(tmp_path / "in.parquet")], tmp_path / "out", recipe())
    assert written(tmp_path / "out") == [{"text": "a", "score": None}]


def test_a_data_set_of_the_hub_is_read(tmp_path):
    """From a folder in the Hub's layout: no network."""
    pytest.importorskip("datasets")
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "train.jsonl").write_text(
        '{"text": "one", "licence": "CC0"}\n{"text": "one", "licence": "MIT"}\n'
    )
    ledger = clean([f"hf:{folder}"], tmp_path / "out", recipe())
    assert written(tmp_path / "out") == [{"text": "one", "licence": "CC0"}]
    assert ledger["inputs"][0]["file"].startswith(f"hf:{folder}/")


def test_conversations_are_compared_by_their_turns(cleaned):
    def chat(text, **more):
        return {
            "messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": text}],
            **more,
        }

    rows = [chat("I am here"), chat("I am here", source="b"), chat("You are there now")]
    assert cleaned(rows)[1] == [rows[0], rows[2]]
    pairs = [{"prompt": "a b c", "completion": "d"}, {"prompt": "a b c", "completion": "e"}]
    assert cleaned(pairs, out="b", duplicates={"near": False})[1] == pairs


def test_a_rerun_is_byte_identical_in_any_compression(tmp_path):
    corpus(tmp_path / "in.jsonl", documents=60)
    for compression in ("none", "gz", "zst"):
        output = {"compression": compression, "shard_bytes": 10_000}
        for name in ("a", "b"):
            clean([str(tmp_path / "in.jsonl")], tmp_path / f"{compression}{name}", recipe(output=output))
        first = digests(tmp_path / f"{compression}a")
        assert first == digests(tmp_path / f"{compression}b") and len(first) > 5


def test_a_stopped_run_goes_on_and_writes_the_same_bytes(tmp_path, monkeypatch):
    """Stopped at several places, each time with decisions and half a file on the disk."""
    corpus(tmp_path / "in.jsonl", documents=60)
    source, whole = str(tmp_path / "in.jsonl"), tmp_path / "whole"
    clean([source], whole, recipe())
    monkeypatch.setattr("unfreeze.data.clean.journal.EVERY", 8)
    decided = []

    def count(self, document, counts, decide=running.Cleaner._decided):
        decided.append(1)
        return decide(self, document, counts)

    monkeypatch.setattr(running.Cleaner, "_decided", count)
    out = tmp_path / "out"
    for stop in (1, 10, 27, 50):

        def progress(documents, done, total, stop=stop):
            if documents == stop:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            clean([source], out, recipe(), progress=progress)
        assert not out.exists()
    said = []
    clean([source], out, recipe(), said.append)
    assert digests(out) == digests(whole)
    assert "50 documents are decided already; going on" in said
    assert len(decided) == 60  # none twice
    assert not (tmp_path / "out.partial").exists()


def test_control_arm_decisions_of_another_recipe_are_not_taken_over(tmp_path):
    corpus(tmp_path / "in.jsonl")

    def stop(documents, done, total):
        if documents == 80:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        clean([str(tmp_path / "in.jsonl")], tmp_path / "out", recipe(), progress=stop)
    other = recipe(duplicates={"near": False})
    ledger = clean([str(tmp_path / "in.jsonl")], tmp_path / "out", other)
    assert ledger["kept"]["documents"] == 120


def test_a_decision_that_was_cut_does_not_count(tmp_path):
    key = {"recipe": Recipe.model_validate({"duplicates": {"near": False}}).model_dump(mode="json")}
    journal = Journal(tmp_path / "journal", key)
    journal.add(running.Decision("length.short", "1 word"))
    journal.add(running.Decision("", "", 7))
    journal.close()
    with (tmp_path / "journal" / "decisions.jsonl").open("a") as file:
        file.write('["", 4')
    again = Journal(tmp_path / "journal", key)
    assert again.sizes == [7] and len(again.earlier) == 2
    again.close()


@pytest.mark.parametrize("name", ["shingles.u64", "signatures.u32"])
def test_decisions_whose_shingles_were_lost_do_not_count(tmp_path, name):
    """After a power failure the files may hold less than was decided."""
    corpus(tmp_path / "in.jsonl", documents=60)

    def stop(documents, done, total):
        if documents == 40:
            raise KeyboardInterrupt

    source = [str(tmp_path / "in.jsonl")]
    with pytest.raises(KeyboardInterrupt):
        clean(source, tmp_path / "out", recipe(), progress=stop)
    lost = tmp_path / "out.partial" / "journal" / name
    os.truncate(lost, lost.stat().st_size - 8)
    said = []
    clean(source, tmp_path / "out", recipe(), said.append)
    clean(source, tmp_path / "whole", recipe())
    assert digests(tmp_path / "out") == digests(tmp_path / "whole") and said == []


def test_a_killed_process_is_resumed(tmp_path, forkserver):
    corpus(tmp_path / "in.jsonl", documents=160)
    whole, out = tmp_path / "whole", tmp_path / "out"
    (tmp_path / "off.toml").write_text("".join(f"[{name}]\nenabled = false\n" for name in OFF))

    often = "from unfreeze.data.clean import journal; journal.EVERY = 16"  # decisions between two flushes
    command = ["-c", f"import sys; from unfreeze import cli; {often}; sys.exit(cli.main(sys.argv[1:]))"]
    command += ["data", "clean", tmp_path / "in.jsonl", out, "--recipe", tmp_path / "off.toml", "--quiet"]
    clean([str(tmp_path / "in.jsonl")], whole, recipe())
    process = forkserver.start(command)
    journal = tmp_path / "out.partial" / "journal" / "decisions.jsonl"
    while process.poll() is None and not (journal.is_file() and journal.stat().st_size > 100):
        time.sleep(0.01)
    process.kill()
    assert process.wait() == -signal.SIGKILL and not out.exists()
    assert forkserver.run(command).returncode == 0
    assert digests(out) == digests(whole)


def test_two_processes_do_not_write_one_folder(tmp_path):
    corpus(tmp_path / "in.jsonl", documents=20)

    def second(documents, done, total):
        with pytest.raises(ConfigError, match="another process writes"):
            clean([str(tmp_path / "in.jsonl")], tmp_path / "out", recipe())

    clean([str(tmp_path / "in.jsonl")], tmp_path / "out", recipe(), progress=second)


def test_memory_does_not_grow_with_the_files(tmp_path):
    """Ten times the bytes in documents that are dropped: the same peak, within 1 MiB."""
    import tracemalloc

    peaks = []
    for count in (200, 2000):
        path = tmp_path / f"{count}.jsonl"
        path.write_text("".join(json.dumps({"text": f"{i} " + "words " * 100}) + "\n" for i in range(count)))
        tracemalloc.start()
        clean([str(path)], tmp_path / f"out{count}", recipe(length={"enabled": True, "min_words": 10**4}))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] - peaks[0] < 2**20


REFUSED = {
    "no rows": (["", ""], {}, r"in\.jsonl holds no row"),
    "not UTF-8": (
        [b'{"text": "ok"}', b'{"text": "caf\xe9"}'],
        {},
        r"in\.jsonl, row 2: byte 14 \(0xe9\) is not UTF-8",
    ),
    "broken": (['{"text": "ok"}', "{"], {}, r"in\.jsonl, row 2: broken JSON"),
    "half a pair": (['{"text": "\\ud800"}'], {}, "half a surrogate pair"),
    "no text": (['{"txet": "a"}'], {}, r"row 1: no text; nearest: 'txet'; columns: txet"),
    "column": (['{"body": "a"}'], {"data": {"text": "bdoy"}}, r"no column 'bdoy'; nearest: 'body'"),
    "number": (['{"text": 3}'], {"data": {"text": "text"}}, "field text is a number"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_named_and_nothing_is_written(tmp_path, name):
    lines, tables, message = REFUSED[name]
    raw = b"".join((line if isinstance(line, bytes) else line.encode()) + b"\n" for line in lines)
    (tmp_path / "in.jsonl").write_bytes(raw)
    with pytest.raises(DataError, match=message) as error:
        clean([str(tmp_path / "in.jsonl")], tmp_path / "out", recipe(**tables))
    assert len(error.value.message) <= 250 and not (tmp_path / "out").exists()
    if name == "no rows":
        assert not (tmp_path / "out.partial").exists()
        return
    skipping = recipe(data={**tables.get("data", {}), "on_bad_row": "skip"})
    ledger = clean([str(tmp_path / "in.jsonl")], tmp_path / "out", skipping)
    assert ledger["dropped"]["bad_row"]["documents"] == 1
    assert ledger["in"]["bytes"] == len(raw)


def test_a_folder_with_files_is_refused(cleaned, tmp_path):
    (tmp_path / "out").mkdir()
    cleaned([{"text": "a"}])  # an empty folder is fine
    with pytest.raises(ConfigError, match="exists and is not empty"):
        cleaned([{"text": "a"}])


def test_a_text_of_a_table_that_is_not_utf8_is_a_bad_row(tmp_path):
    table = table_of([{"text": b"\x00\xff", "image": b"\x00\xff"}])
    from pyarrow import parquet

    parquet.write_table(table, str(tmp_path / "in.parquet"))
    with pytest.raises(DataError, match=r"row 1: text is bytes that are not UTF-8"):
        clean([str(tmp_path / "in.parquet")], tmp_path / "out", recipe())
