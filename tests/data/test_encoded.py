"""Encoded rows on disk: what is read back is what was encoded, whatever else lies there."""

import errno
import gzip
import json
import os
import shutil
import time
from datetime import datetime
from pathlib import Path

import pytest

from unfreeze.commands.demo import TINY_K2
from unfreeze.core.errors import DataError
from unfreeze.data import encode_files, load_tokenizer
from unfreeze.data.store import encoded
from unfreeze.data.store.encoded import encoded_files
from unfreeze.data.tokens import templates
from unfreeze.data.tokens.tiktoken_bpe import TiktokenBackend
from unfreeze.data.tokens.tokenizer_json import TokenizerJson

LENGTH = 64


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(encoded, "LEAST_BYTES", 0)
    return tmp_path / "cache" / "unfreeze" / "encoded"


@pytest.fixture
def rows(tmp_path):
    """-> write(rows): a data file."""

    def write(rows, name="chat.jsonl"):
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path

    return write


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(TINY_K2)


CHAT = [{"question": f"What is {n} and {n}?", "answer": f"{2 * n}, it is. Hmm."} for n in range(20)]
CHAT += [CHAT[3], {"text": "A long text. " * 40}]


def same(first, second):
    assert list(first.examples) == list(second.examples)
    assert first.examples.fingerprint() == second.examples.fingerprint()
    assert first.stats.as_dict() | {"reading": ""} == second.stats.as_dict() | {"reading": ""}


def counted(monkeypatch):
    """-> a list that gets an entry each time files are encoded."""
    calls, real = [], encoded.encode_files
    monkeypatch.setattr(
        encoded, "encode_files", lambda *given, **more: calls.append(1) or real(*given, **more)
    )
    return calls


@pytest.mark.parametrize("options", [{}, {"truncation": "split"}, {"supervise": "all", "turns": "each"}])
def test_what_is_read_back_is_what_was_encoded(options, store, rows, tokenizer, monkeypatch):
    if options.get("truncation") == "split":
        path = rows([row for row in CHAT if "text" in row])
    else:
        path = rows(CHAT)
    calls = counted(monkeypatch)
    plain = encode_files([path], tokenizer, LENGTH, **options)
    first = encoded_files([path], tokenizer, LENGTH, **options)
    again = encoded_files([path], tokenizer, LENGTH, **options)
    same(plain, first)
    same(plain, again)
    assert len(calls) == 1 and again.stats.reading == "disk" and len(list(store.iterdir())) == 1


@pytest.mark.parametrize("change", ["row", "length", "option", "tokenizer", "code", "variables"])
def test_whatever_changes_makes_another_store(change, store, rows, tokenizer, tmp_path, monkeypatch):
    path, length, options = rows(CHAT), LENGTH, {}
    encoded_files([path], tokenizer, length)
    if change == "row":
        rows([*CHAT[:-1], {"question": "And now?", "answer": "Other, it is."}])
    if change == "length":
        length -= 1
    if change == "option":
        options = {"supervise": "all"}
    if change == "tokenizer":
        folder = tmp_path / "model"
        folder.mkdir()
        for file in TINY_K2.glob("*token*"):
            (folder / file.name).write_bytes(file.read_bytes())
        tokenizer = load_tokenizer(folder)
    if change == "variables":
        tokenizer = load_tokenizer(TINY_K2, template_variables={"thinking": True})
    if change == "code":
        monkeypatch.setattr(encoded, "_code", lambda: "other")
    changed = encoded_files([path], tokenizer, length, **options)
    assert len(list(store.iterdir())) == 2
    same(changed, encode_files([path], tokenizer, length, **options))


@pytest.mark.parametrize(
    "file", ["tokens", "weights", "numbers", "digests", "checksums", "starts", "account.json"]
)
@pytest.mark.parametrize("how", ["cut", "gone", "other"])
def test_a_damaged_store_is_made_anew(file, how, store, rows, tokenizer, monkeypatch):
    path, calls = rows(CHAT), counted(monkeypatch)
    plain = encoded_files([path], tokenizer, LENGTH)
    (folder,) = store.iterdir()
    content = (folder / file).read_bytes()
    if how == "gone":
        (folder / file).unlink()
    else:
        (folder / file).write_bytes(content[:-4] if how == "cut" else bytes([content[0] ^ 1]) + content[1:])
    found = encoded_files([path], tokenizer, LENGTH)
    if how == "other" and file in ("tokens", "weights"):  # not looked at before the document is used
        with pytest.raises(DataError, match="row 1 is damaged on disk; the folder was removed"):
            list(found.examples)
        found = encoded_files([path], tokenizer, LENGTH)
    same(plain_of(path, tokenizer), found)
    assert len(calls) == 2 and plain.stats.rows == found.stats.rows


def plain_of(path, tokenizer):
    return encode_files([path], tokenizer, LENGTH)


def test_a_template_that_tells_the_clock_and_small_data_are_not_kept(store, rows, tokenizer, monkeypatch):
    path = rows(CHAT)
    monkeypatch.setattr(tokenizer, "told", lambda: None)
    encoded_files([path], tokenizer, LENGTH)
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(store.parents[1]))
    encoded_files([path], tokenizer, LENGTH)  # fewer bytes than LEAST_BYTES
    assert not store.exists()


def test_who_skips_bad_rows_and_who_refuses_them_share_a_store_without_any(
    store, rows, tokenizer, monkeypatch
):
    path, calls = rows(CHAT), counted(monkeypatch)
    encoded_files([path], tokenizer, LENGTH, on_bad_row="skip")
    encoded_files([path], tokenizer, LENGTH, truncation="tail", turns="auto")
    assert len(calls) == 1 and len(list(store.iterdir())) == 1
    path = rows([*CHAT, {"neither": "of these"}])
    skipped = encoded_files([path], tokenizer, LENGTH, on_bad_row="skip")
    assert skipped.stats.bad == 1
    with pytest.raises(DataError):
        encoded_files([path], tokenizer, LENGTH)


def test_a_row_that_is_refused_leaves_no_store(store, rows, tokenizer):
    path = rows([*CHAT, {"neither": "of these"}])
    with pytest.raises(DataError):
        encoded_files([path], tokenizer, LENGTH)
    assert list(store.iterdir()) == []


@pytest.mark.parametrize("step", ["begin", "add", "finish"])
def test_without_room_nothing_is_kept_and_the_rows_are_encoded_all_the_same(
    step, store, rows, tokenizer, monkeypatch
):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(encoded.Writing, {"begin": "__init__"}.get(step, step), full)
    path = rows(CHAT)
    found = encoded_files([path], tokenizer, LENGTH)
    same(plain_of(path, tokenizer), found)
    assert found.stats.reading == "memory" and (not store.exists() or list(store.iterdir()) == [])


def test_more_than_half_of_the_free_disk_is_not_taken(store, rows, tokenizer, monkeypatch):
    path = rows(CHAT)
    needed = encoded.BYTES_A_BYTE * path.stat().st_size
    usage = shutil.disk_usage(path.parent)
    for free, kept in ((2 * needed - 1, 0), (4 * needed, 1)):  # these short rows take twice the estimate
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: usage._replace(free=free))
        same(plain_of(path, tokenizer), encoded_files([path], tokenizer, LENGTH))
        assert len(list(store.iterdir())) == kept


@pytest.mark.parametrize("held, reading", [(None, "memory"), (1000, "on demand")])
def test_packed_rows_that_turn_out_larger_are_not_kept(
    held, reading, store, rows, tokenizer, monkeypatch, caplog
):
    """500 equal rows pack to far less than a fourth; control arm: a disk that takes them."""
    path = rows(CHAT[:1] * 500)
    packed = path.with_name("chat.jsonl.gz")
    packed.write_bytes(gzip.compress(path.read_bytes()))
    usage, asked = shutil.disk_usage(path.parent), {} if held is None else {"held_bytes": held}
    plain = plain_of(packed, tokenizer)
    estimated = encoded.BYTES_A_BYTE * encoded.text_bytes(packed)
    for free, kept in ((4 * estimated, 0), (10**9, 1)):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: usage._replace(free=free))
        found = encoded_files([packed], tokenizer, LENGTH, **asked)
        assert found.examples.fingerprint() == plain.examples.fingerprint()
        assert len(list(store.iterdir())) == kept and found.stats.reading == ("disk" if kept else reading)
        assert ("more than half of the free disk space" in caplog.text) == (not kept)
        caplog.clear()


def test_others_may_not_look_and_what_a_killed_process_left_goes_after_a_day(store, rows, tokenizer):
    for name, age in (("killed", 2 * encoded.ABANDONED), ("at work", 60)):
        (encoded.made(store) / f".{name}").mkdir()
        os.utime(store / f".{name}", (time.time() - age,) * 2)
    encoded_files([rows(CHAT)], tokenizer, LENGTH)
    assert store.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in store.iterdir() if path.name.startswith(".")] == [".at work"]


def test_the_stores_not_read_for_longest_make_room(store, rows, tokenizer):
    paths = [rows(CHAT, f"{n}.jsonl") for n in range(3)]
    for number, path in enumerate(paths):
        encoded_files([path], tokenizer, LENGTH)
        newest = max(store.iterdir(), key=lambda folder: (folder / "account.json").stat().st_mtime_ns)
        os.utime(newest / "account.json", (number, number))
    folders = sorted(store.iterdir(), key=lambda folder: (folder / "account.json").stat().st_mtime)
    size = sum(path.stat().st_size for path in folders[0].iterdir())
    encoded.make_room(folders[2], kept=2 * size + size // 2)
    assert sorted(store.iterdir()) == sorted(folders[1:])
    encoded.make_room(folders[1], kept=0)
    assert list(store.iterdir()) == [folders[1]]


DATED = "{{ strftime_now('%d %b %Y') }}{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"


@pytest.mark.parametrize("form, kept", [("%d %b %Y", True), ("%d %b %Y %H", False)])
def test_a_template_that_tells_the_day_has_a_store_a_day(form, kept, store, rows, json_folder, monkeypatch):
    other = load_tokenizer(json_folder(DATED.replace("%d %b %Y", form)))
    path, calls = rows(CHAT), counted(monkeypatch)
    for day in (1, 1, 2):
        told = datetime(2026, 5, day, 10 + len(calls), 30)
        monkeypatch.setattr(templates, "datetime", type("Clock", (datetime,), {"now": lambda *_, t=told: t}))
        same(encode_files([path], other, LENGTH), encoded_files([path], other, LENGTH))
    assert len(calls) == (2 if kept else 3)
    assert len(list(store.iterdir()) if store.exists() else []) == (2 if kept else 0)
    # a run tells one time, whatever the clock says: one store for each that differs in what is told
    for hour in (1, 2):
        fixed = load_tokenizer(other.origin[0], now=datetime(2026, 5, 3, hour))
        encoded_files([path], fixed, LENGTH)
    assert len(list(store.iterdir())) == (3 if kept else 2)


def test_midnight_while_rows_are_encoded_keeps_no_store(store, rows, json_folder, monkeypatch):
    other = load_tokenizer(json_folder(DATED))
    told = iter(("first", "second"))
    monkeypatch.setattr(other, "told", lambda: next(told))
    found = encoded_files([rows(CHAT)], other, LENGTH)
    assert list(store.iterdir()) == [] and len(list(found.examples)) == found.stats.examples


@pytest.mark.parametrize("engine", ["tiktoken", "tokenizers"])
def test_another_version_of_the_tokenizers_library_is_another_tokenizer(engine, json_folder, monkeypatch):
    folder = TINY_K2 if engine == "tiktoken" else json_folder()
    before = load_tokenizer(folder).identity
    assert load_tokenizer(folder).identity == before
    for other, backend in (("tiktoken", TiktokenBackend), ("tokenizers", TokenizerJson)):
        with monkeypatch.context() as patch:
            patch.setattr(backend, "library", "0.0")
            assert (load_tokenizer(folder).identity == before) == (other != engine)


def test_other_processes_may_remove_the_same_stores(store, rows, tokenizer, monkeypatch):
    for n in range(2):
        encoded_files([rows(CHAT, f"{n}.jsonl")], tokenizer, LENGTH)
    real = Path.iterdir
    (store / ".gone").mkdir()

    def vanishing(folder):
        found = list(real(folder))
        if folder == store:
            for path in found[:2]:
                shutil.rmtree(path)
        return iter(found)

    monkeypatch.setattr(Path, "iterdir", vanishing)
    encoded.make_room(store / "none", kept=0)


def test_a_store_that_is_still_written_to_is_not_abandoned(store, rows, tokenizer):
    part = encoded.made(store) / ".other"
    part.mkdir()
    (part / "tokens").write_bytes(b"some")
    old = time.time() - 2 * encoded.ABANDONED
    os.utime(part, (old, old))  # a folder's time is that of its first file
    encoded_files([rows(CHAT)], tokenizer, LENGTH)
    assert part.exists()
    os.utime(part / "tokens", (old, old))
    encoded.make_room(store / "none")
    assert not part.exists()


def test_an_error_of_the_machine_leaves_the_store_where_it_is(store, rows, tokenizer, monkeypatch):
    """No memory or file handle is left: that says nothing of what was written."""
    path = rows(CHAT)
    encoded_files([path], tokenizer, 64)
    (folder,) = [entry for entry in store.iterdir() if not entry.name.startswith(".")]

    def no_memory(path):
        raise OSError(errno.ENOMEM, "no memory")

    with monkeypatch.context() as patch:
        patch.setattr(encoded, "_map", no_memory)
        assert encoded.read(folder.name) is None and folder.is_dir()
    assert encoded.read(folder.name) is not None
