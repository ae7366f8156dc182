"""Large files in windows: the same batches whether rows were encoded before or not, from any place on."""

import json
import math
import shutil
from itertools import islice

import psutil
import pytest

from unfreeze.commands.demo import TINY_K2
from unfreeze.core.errors import ConfigError, DataError
from unfreeze.data import Batches, encode_files, load_tokenizer
from unfreeze.data.rows.files import raw_rows
from unfreeze.data.rows.scan import RowTable, are_lines
from unfreeze.data.store import encoded, streamed, workers
from unfreeze.data.store.encoding import batches
from unfreeze.data.store.streamed import streamed_files
from unfreeze.data.tokens import turns

TURNS = [{"role": "user", "content": "Hi {n}"}, {"role": "assistant", "content": "Hello, I say, {n}."}]
KINDS = [
    {"question": "What is {n}?", "answer": "{n}, it is."},
    {"messages": [{"role": "system", "content": "Be {n}."}, *TURNS, *TURNS]},
    {"prompt": "P {n}", "completion": "C {n} " * 9},
    {"text": "A text of {n}. Long, it is, and longer still it gets. " * 4},
    {"question": "What is the same?", "answer": "This row is."},
    {"question": "Q" * 400, "answer": "Cut off before it begins."},
    {"messages": [{"role": "user", "content": "no answer {n}"}]},
]
ROWS, STEP = 600, 256


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(TINY_K2)


@pytest.fixture(autouse=True)
def small(monkeypatch, tmp_path):
    """Windows of some 90 rows and batches of 16, and stores of files of any size."""
    for name, value in {"HEAD": 40, "WINDOW": 2500, "FULL": 1, "BATCH_ROWS": 16}.items():
        monkeypatch.setattr(streamed, name, value)
    monkeypatch.setattr(encoded, "LEAST_BYTES", 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def files(tmp_path):
    """Rows of all kinds with bad ones in two files; a blank line, and a byte order mark."""
    rows = [json.dumps(KINDS[n % len(KINDS)]).replace("{n}", str(n)) for n in range(ROWS)]
    (tmp_path / "a.jsonl").write_text("\ufeff" + "\n\n".join(rows[:400]) + "\n")
    (tmp_path / "b.jsonl").write_text("\n".join([*rows[400:], "{broken"]) + "\n")
    return [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]


def opened(files, tokenizer, start=None, *, seed=3, fraction=0.0, count=0, length=64, **options):
    stream = streamed_files(
        files,
        tokenizer,
        length,
        least=100,
        tokens_per_step=STEP,
        seed=seed,
        validation_fraction=fraction,
        start=start,
        workers=count,
        **{"on_bad_row": "skip", **options},
    )
    return stream, Batches(stream, STEP, stream.seed, start)


def taken(files, tokenizer, steps, start=None, **options):
    """(tokens, weights, cursor) of the first batches, and whether all rows were encoded behind the first."""
    stream, made = opened(files, tokenizer, start, **options)
    try:
        found = [(b.tokens_T.tolist(), b.weights_T.tolist(), cursor) for (b,), cursor in islice(made, 1)]
        early = stream.whole is not None
        return [
            *found,
            *(
                (b.tokens_T.tolist(), b.weights_T.tolist(), cursor)
                for (b,), cursor in islice(made, steps - 1)
            ),
        ], early
    finally:
        stream.close()


@pytest.mark.parametrize("fraction", [0.0, 0.05])
def test_cold_warm_and_from_any_place_the_batches_are_the_same(
    fraction, files, tokenizer, tmp_path, monkeypatch, workers_left
):
    options = {"fraction": fraction, "turns": "each", "supervise": "all", "truncation": "split"}
    cold, early = taken(files, tokenizer, 200, **options)
    assert not early and cold[-1][2]["epoch"] == 2
    warm, early = taken(files, tokenizer, 200, **options)
    assert early and warm == cold
    # a kill: no store was written; another number of processes; within the first epoch and the second
    for place, count in ((0, 2), (7, 0), (60, 2), (199, 0)):
        shutil.rmtree(tmp_path / "cache")
        went_on, _ = taken(files, tokenizer, 60, cold[place][2], count=count, **options)
        assert went_on[: 199 - place] == cold[place + 1 : place + 61]
    # no store, in memory and read again
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    for held_bytes in (streamed.HELD_BYTES, 0):
        monkeypatch.setattr(streamed, "HELD_BYTES", held_bytes)
        assert taken(files, tokenizer, 200, **options)[0] == cold
    assert taken(files, tokenizer, 3, **options | {"seed": 4})[0] != cold[:3]
    assert not workers_left()


def test_its_store_is_that_of_encoded_files(files, tokenizer):
    """Read in windows first, its documents lie in another order; they are found in that of the files."""
    alone = encode_files(files, tokenizer, 64, on_bad_row="skip", workers=0)
    taken(files, tokenizer, 200)
    (store,) = encoded.root().iterdir()
    found = encoded.encoded_files(files, tokenizer, 64, on_bad_row="skip")
    assert [*encoded.root().iterdir()] == [store]
    assert found.examples.fingerprint() == alone.examples.fingerprint()
    assert [list(e.tokens) for e in found.examples] == [list(e.tokens) for e in alone.examples]
    assert (store / "tokens").read_bytes() != b"".join(bytes(e.tokens) for e in found.examples)
    assert found.stats.repeats == alone.stats.repeats != []
    shutil.rmtree(store)
    encoded.encoded_files(files, tokenizer, 64, on_bad_row="skip")
    stream, _ = opened(files, tokenizer)
    assert stream.whole is not None and stream._parts is None
    stream.close()
    # control arm: a store is of one sequence length
    stream, _ = opened(files, tokenizer, length=65)
    assert stream.whole is None
    stream.close()


def documents(batch):
    """What each document of a batch says: its tokens and its targets' weights."""
    ends = [*batch.starts_S.tolist()[1:], len(batch.tokens_T)]
    for start, end in zip(batch.starts_S.tolist(), ends, strict=True):
        yield batch.tokens_T[start:end].tolist(), batch.weights_T[start:end].tolist()


def test_an_epoch_is_every_document_of_encode_files_once(files, tokenizer):
    alone = encode_files(files, tokenizer, 64, on_bad_row="skip", workers=0)
    stream, made = opened(files, tokenizer)
    seen = []
    for (batch,), _ in made:
        if made.epoch:
            break
        assert len(batch.tokens_T) <= STEP
        seen += documents(batch)
    expected = [(list(e.tokens), [*list(e.weights)[1:], 0.0]) for e in alone.examples]
    assert sorted(seen) == sorted(expected) and seen != expected
    # the account is that of encode_files; of the lists the first in the order of encoding
    ours, theirs = stream.stats().as_dict(), alone.stats.as_dict()
    assert ours.pop("reading") == "disk" and theirs.pop("reading") == "memory"
    for name in ("listed", "cuts", "repeats"):
        assert len(ours.pop(name)) == len(theirs.pop(name))
    assert ours == theirs and ours["bad"] and ours["dropped"] and ours["duplicates"]
    stream.close()


def test_training_begins_before_the_last_row_is_encoded(files, tokenizer, monkeypatch):
    stream, _ = opened(files, tokenizer)
    first = {*stream._head_rows.tolist(), *stream._rows_of(0, 0).tolist()}  # once each
    assert stream.whole is None and stream.size < 120 and stream.stats().rows == len(first) < stream.size + 40
    stream.close()
    # control arm: one window of everything
    monkeypatch.setattr(streamed, "WINDOW", 10**6)
    stream, _ = opened(files, tokenizer)
    assert stream.whole is not None and stream.stats().rows == ROWS + 1
    stream.close()


def test_workers_go_ahead_while_nobody_waits(files, tokenizer):
    stream, made = opened(files, tokenizer, count=2)
    seen = 0
    while stream.whole is None and seen < 2000:  # no window but the first is asked for
        psutil.Process().cpu_percent(0.01)
        stream.take()
        seen += 1
    assert stream.whole is not None and made.cursor()["window"] == 0
    assert [stream.stats().rows, len(stream.so_far())] == [ROWS + 1, len(stream.whole)]
    stream.close()


def contents(examples):
    return {tuple(example.tokens) for example in examples}


def test_what_is_held_out_is_trained_on_in_no_other_words(tmp_path, tokenizer):
    """Rows on one side are there in another order of fields too."""
    rows = [{"question": f"What is {n}?", "answer": f"{n}."} for n in range(300)]
    swapped = [dict(reversed(row.items())) for row in rows]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, *swapped]))
    stream, _ = opened([path], tokenizer, fraction=0.1)
    held_out = contents(stream.validation)
    trained = contents(stream.head).union(*(contents(stream.examples(0, n)) for n in range(stream.count)))
    assert 25 < len(stream.validation) < 95 and not held_out & trained
    left_out = [count for note, count in stream.stats().notes.items() if "held-out row" in note]
    assert left_out and left_out[0] == 600 - len(stream.validation) - sum(
        len(stream.examples(0, n)) for n in range(stream.count)
    )
    assert held_out | trained == contents(encode_files([path], tokenizer, 64).examples)
    stream.close()
    # a row keeps its side where others are added, and in another order
    path.write_text("".join(json.dumps(row) + "\n" for row in [*reversed(rows), *swapped, *KINDS]))
    stream, _ = opened([path], tokenizer, fraction=0.1)
    assert held_out <= contents(stream.validation)
    stream.close()


def test_a_fraction_that_leaves_none_is_refused(files, tokenizer):
    with pytest.raises(ConfigError, match="leaves none for validation"):
        opened(files, tokenizer, fraction=1e-9)


FIRST = (
    "{% for m in messages %}{% if m.content is string and 'X' in m.content %}{{ raise_exception('no X') }}"
    "{% endif %}<|im_start|>{{ m.role }} {{ m.content if m.content is string else 'P ' ~ m.content[0].text }}"
    "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)
"""A row's words decide in which form it is rendered."""


@pytest.mark.parametrize("planted", [False, True], ids=["", "planted"])
def test_what_a_row_becomes_depends_on_no_row_that_was_encoded_before(
    planted, tmp_path, json_folder, monkeypatch
):
    path = tmp_path / "rows.jsonl"
    rows = [
        {"question": "X" if n % 4 == 1 else f"Y{n}", "answer": f"Good {n}."}
        if n % 2
        else {
            "prompt": [
                {"role": "user", "content": "X" if n % 4 == 0 else f"Z{n}"},
                *TURNS[1:],
                {"role": "user", "content": "Y"},
            ],
            "completion": [{"role": "assistant", "content": f"C {n}"}],
        }
        for n in range(401)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    other = load_tokenizer(json_folder(FIRST))
    monkeypatch.setattr(streamed, "WINDOW", 1500)
    monkeypatch.setattr(streamed, "HEAD", 3)  # of one shape
    if planted:  # the first row of a shape tells what holds for all
        monkeypatch.setattr(turns, "stand_in", lambda row: row)
    options = {"length": 200}
    cold, _ = taken([path], other, 60, **options)
    same = []
    for window in (1, 2, 3):
        place = next(n for n, found in enumerate(cold) if found[2]["window"] == window)
        shutil.rmtree(encoded.root())
        try:
            went_on, _ = taken([path], other, 5, cold[place][2], **options)
            same.append(went_on == cold[place + 1 : place + 6])
        except ConfigError:  # the window's tokens are others
            same.append(False)
    assert all(same) != planted


@pytest.mark.parametrize("count", [0, 2])
def test_a_bad_row_stops_when_its_window_is_needed(count, files, tokenizer, workers_left):
    good = [
        line
        for line in files[0].read_bytes().decode("utf-8-sig").splitlines()
        if "no answer" not in line and line
    ]
    good = good[:300]
    files[0].write_text("\n".join([*good[:211], "{broken", *good[211:]]))
    stream, made = opened(files[:1], tokenizer, count=count, on_bad_row="error")
    number = next(n for n in range(stream.count) if 211 in stream._rows_of(0, n))
    assert number > 0, "another seed: the bad row stands in the first window"
    steps = 0
    with pytest.raises(DataError, match=r"a.jsonl, row 212: broken JSON"):
        for _ in made:
            steps += 1
            assert made.window < number
    assert made.window == number - 1 and made.position == len(made._plan) and steps
    stream.close()
    # in the first window: before the first step
    files[0].write_text("\n".join(["{broken", *good]))
    with pytest.raises(DataError, match="row 1: broken JSON"):
        opened(files[:1], tokenizer, on_bad_row="error")
    assert not workers_left()


def test_a_file_that_changes_meanwhile_is_noticed(files, tokenizer):
    stream, made = opened(files, tokenizer)
    files[1].write_text(files[1].read_text().replace("say", "SAY"))
    with pytest.raises(DataError, match=r"b.jsonl: the file changed during training"):
        list(islice(made, 200))
    stream.close()


def half_of_the_disk(name, paths):
    """A store that may take some of the rows."""
    return encoded.Writing(name, most=70_000)


def full_disk(name, paths):
    """A store whose weights cannot be written: neither when they are added, nor when the file is closed."""
    store = encoded.Writing(name)
    store._files[1].close()
    store._files[1] = open("/dev/full", "wb")  # noqa: SIM115 - the store closes it
    return store


@pytest.mark.parametrize("begun", [half_of_the_disk, full_disk])
def test_without_room_training_goes_on_without_the_store(begun, files, tokenizer, monkeypatch, caplog):
    expected, _ = taken(files, tokenizer, 400)
    shutil.rmtree(encoded.root())
    monkeypatch.setattr(streamed, "begun", begun)
    encoded.made(encoded.root())
    found, early = taken(files, tokenizer, 400)
    assert found == expected and not early
    assert [r.getMessage()[:26] for r in caplog.records] == ["encoded rows are not kept,"]
    assert not list(encoded.root().iterdir())


def test_nothing_left_is_said_at_once(tmp_path, tokenizer):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(KINDS[5]) + "\n" for _ in range(200)))
    with pytest.raises(DataError, match="no row left to train on, of 40 looked at: row 1: 0 of 64 tokens"):
        opened([path], tokenizer)


def test_rows_are_those_of_raw_rows(files, tmp_path):
    text = tmp_path / "t.txt"
    text.write_text("A text\nof two lines.\n\nAnother.\n\n\nLast.")
    paths = [*files, text]
    rows = RowTable(paths)
    assert [rows.read(n) for n in range(len(rows))] == [found for path in paths for found in raw_rows(path)]
    assert are_lines(paths)
    assert [sum(len(b.rows) for b in batches(paths)), rows.held_R.any()] == [len(rows), False]
    held = RowTable(paths, held=lambda raw: b"Another" in raw)
    assert held.held_R.sum() == 1 and held.digest != rows.digest
    text.write_text("A text\nof two lines.\n\nAnother.\n\n\nLost.")
    assert RowTable(paths).digest != rows.digest


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.json", "a.csv"])
def test_other_files_are_read_whole(name, tmp_path, tokenizer):
    (tmp_path / name).write_text('[{"text": "A"}]' if name == "a.json" else "text\nA\n")
    assert not are_lines([tmp_path / name]) if name != "a.jsonl.gz" else True
    if name == "a.jsonl.gz":
        import gzip

        (tmp_path / name).write_bytes(gzip.compress(b'{"text": "A"}\n' * 200))
    assert streamed_files([tmp_path / name], tokenizer, 64, least=0, tokens_per_step=64, seed=0) is None


def test_few_rows_are_read_whole(files, tokenizer):
    assert streamed_files(files, tokenizer, 64, least=ROWS + 1, tokens_per_step=64, seed=0) is None


def test_workers_beside_training_are_nice(files, tokenizer, monkeypatch):
    nice = []
    real = workers.Workers.ready
    monkeypatch.setattr(
        workers.Worker,
        "encode",
        lambda self, batch, real=workers.Worker.encode: (
            nice.append(psutil.Process(self._process.pid).nice()),
            real(self, batch),
        )[1],
    )
    assert real
    stream, _ = opened(files, tokenizer, count=1)
    stream.close()
    assert nice and set(nice) == {workers.NICE}
    nice.clear()
    encode_files(files, tokenizer, 64, on_bad_row="skip", workers=1)  # control arm
    assert nice and set(nice) == {psutil.Process().nice()}


def test_windows_grow_with_the_step(files, tokenizer, monkeypatch):
    """A window fills FULL batches: at 64 the last, half empty, is less than 1 %."""
    monkeypatch.setattr(streamed, "FULL", 20)
    stream, _ = opened(files, tokenizer)
    lengths = stream.head.lengths_N
    assert stream.size == math.ceil(20 * STEP * 40 / lengths.sum()) > 120
    stream.close()
