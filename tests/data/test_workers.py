"""Rows encoded by several processes: the same as by one, whatever the rows are and however it ends."""

import json
import math
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from unfreeze.commands.demo import TINY_K2
from unfreeze.core.errors import DataError
from unfreeze.data import encode_files, load_tokenizer
from unfreeze.data.store import encoding, workers
from unfreeze.data.tokens import turns

CALL = {"id": "1", "function": {"name": "add", "arguments": {"a": 1}}}
TALK = [{"role": "user", "content": "Hi <|im_end|>"}, {"role": "assistant", "content": "Hello, I say."}]
KINDS = [
    {"question": "What is {n}?", "answer": "{n}, it is."},
    {"messages": [{"role": "system", "content": "Be {n}."}, *TALK, *TALK]},
    {"messages": [*TALK, {"role": "user", "content": "{n}"}, {"role": "assistant", "tool_calls": [CALL]}]},
    {"messages": [TALK[0], {"role": "assistant", "content": "So {n}.", "reasoning_content": "Hmm."}]},
    {"conversations": [{"from": "human", "value": "{n}?"}, {"from": "gpt", "value": "{n}!"}]},
    {"prompt": "P {n}", "completion": "C {n}"},
    {"instruction": "I", "input": "{n}", "output": "O"},
    {"text": "A text of {n}. Long, it is, and longer still it gets."},
    {"question": "What is the same?", "answer": "This row is."},
    {"question": "Q" * 400, "answer": "Cut off before it begins."},
    {"question": "Q", "answer": "Cut off at its end, this is. " * 20},
    {"neither": "of these"},
    {"messages": [{"role": "user", "content": "no answer"}]},
    "not an object",
]


def filled(value, n):
    return json.loads(json.dumps(value).replace("{n}", str(n)))


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A file of every kind of row, good and bad, and a text file; few rows to a batch."""
    monkeypatch.setattr(encoding, "BATCH_ROWS", 5)
    rows = [filled(kind, n) for n in range(6) for kind in KINDS[n % 3 :]]
    (tmp_path / "all.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + "{broken\n")
    (tmp_path / "some.txt").write_text("A text.\n\nAnother text.\n\nA text.\n" * 5)
    return [tmp_path / "all.jsonl", tmp_path / "some.txt"]


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(TINY_K2)


def same(first, second):
    assert list(first.examples) == list(second.examples)
    assert first.examples.fingerprint() == second.examples.fingerprint()
    assert first.examples.columns() == second.examples.columns()
    one, other = first.stats.as_dict(), second.stats.as_dict()
    assert one == other and [list(one[name]) for name in ("shapes", "notes", "files")] == [
        list(other[name]) for name in ("shapes", "notes", "files")
    ]


@pytest.mark.parametrize(
    "options", [{}, {"truncation": "head", "turns": "each", "supervise": "all", "held_bytes": 0}]
)
def test_as_one_process_encodes_them(options, files, tokenizer):
    options = {"on_bad_row": "skip", **options}
    alone = encode_files(files, tokenizer, 64, workers=0, **options)
    seen = []
    together = encode_files(
        files, tokenizer, 64, workers=2, progress=lambda *given: seen.append(given), **options
    )
    same(alone, together)
    stats = alone.stats
    assert stats.bad and stats.truncated and stats.duplicates and stats.notes
    assert bool(stats.dropped) == (not options.get("supervise"))
    assert seen == sorted(seen) and seen[-1][0] == stats.rows


def test_the_first_bad_row_is_named(files, tokenizer, workers_left):
    said = []
    for count in (0, 2):
        with pytest.raises(DataError) as error:
            encode_files(files, tokenizer, 64, workers=count)
        said.append((error.value.message, error.value.next))
    assert said[0] == said[1] and "all.jsonl, row 12" in said[0][0]
    assert not workers_left()


FIRST = (
    "{% for m in messages %}{% if m.content is string and 'X' in m.content %}{{ raise_exception('no X') }}"
    "{% endif %}<|im_start|>{{ m.role }} {{ m.content if m.content is string else 'P ' ~ m.content[0].text }}"
    "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)
"""A row's words decide in which form it is rendered."""


@pytest.mark.parametrize("planted", [False, True], ids=["", "planted"])
def test_what_becomes_of_a_row_hangs_on_no_other_row(planted, tmp_path, json_folder, monkeypatch, tokenizer):
    monkeypatch.setattr(encoding, "BATCH_ROWS", 4)
    path, one = tmp_path / "rows.jsonl", tmp_path / "one.jsonl"
    rows = [{"question": "X" if n == 0 else f"Y{n}", "answer": f"Good {n}."} for n in range(24)]
    lines = [json.dumps(row) + "\n" for row in rows]
    path.write_text("".join(lines))
    other = load_tokenizer(json_folder(FIRST))
    if planted:  # in this process the first row of a shape tells what holds for all
        monkeypatch.setattr(turns, "stand_in", lambda row: row)
    alone = encode_files([path], other, 64, workers=0)
    together = encode_files([path], other, 64, workers=2)
    if planted:
        assert alone.examples.fingerprint() != together.examples.fingerprint()
        return
    same(alone, together)
    for line, example in zip(lines, alone.examples, strict=True):
        one.write_text(line)
        (single,) = encode_files([one], load_tokenizer(json_folder(FIRST)), 64, workers=0).examples
        assert single.tokens == example.tokens and single.weights == example.weights


@pytest.mark.parametrize("when", ["encode", "greet"])
def test_where_a_worker_is_killed_this_process_encodes_on(
    when, files, tokenizer, monkeypatch, caplog, workers_left
):
    killed, alone = [], encode_files(files, tokenizer, 64, workers=0, on_bad_row="skip")

    def kill(self, *given):
        if not killed:
            killed.append(self._process.pid)
            os.kill(self._process.pid, signal.SIGKILL)
        return real(self, *given)

    real = getattr(workers.Worker, when)
    monkeypatch.setattr(workers.Worker, when, kill)
    same(alone, encode_files(files, tokenizer, 64, workers=2, on_bad_row="skip"))
    (said,) = [record.getMessage() for record in caplog.records]
    assert killed and "was killed by signal 9, most likely for memory: this process encodes the" in said
    assert not workers_left()


@pytest.mark.parametrize(
    "own, files, quota",
    [
        ("0::/a/b\n", {"a/cpu.max": "150000 100000\n", "a/b/cpu.max": "max 100000\n"}, 1.5),
        ("0::/\n", {"cpu.max": "300000 100000\n"}, 3.0),
        (
            "5:cpu,cpuacct:/d\n",
            {"cpu/d/cpu.cfs_quota_us": "50000\n", "cpu/d/cpu.cfs_period_us": "100000\n"},
            0.5,
        ),
        # control arms: no limit, another controller, no control groups
        ("5:cpu:/d\n", {"cpu/d/cpu.cfs_quota_us": "-1\n", "cpu/d/cpu.cfs_period_us": "100000\n"}, math.inf),
        ("5:cpuset:/d\n", {"cpu/d/cpu.cfs_quota_us": "1\n", "cpu/d/cpu.cfs_period_us": "1\n"}, math.inf),
        ("", {}, math.inf),
    ],
)
def test_a_containers_quota_bounds_the_workers(own, files, quota, tmp_path, monkeypatch):
    (tmp_path / "own").write_text(own)
    for name, text in files.items():
        (tmp_path / "groups" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "groups" / name).write_text(text)
    assert workers.cpu_quota(tmp_path / "groups", tmp_path / "own") == quota
    monkeypatch.setattr(workers, "cpu_quota", lambda: quota)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert workers.num_workers() == min(8, math.ceil(quota) if quota < math.inf else 8)


def test_a_tokenizer_that_changes_meanwhile_is_refused(files, tokenizer, monkeypatch, workers_left):
    monkeypatch.setattr(tokenizer, "identity", "other")
    with pytest.raises(DataError, match=r"ended with 1: the tokenizer's files in .* changed in the meantime"):
        encode_files(files, tokenizer, 64, workers=1, on_bad_row="skip")


RUN = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell started with &
from unfreeze.data import encode_files, load_tokenizer
from unfreeze.data.store import encoding
encoding.BATCH_ROWS = 5
def progress(*done):
    import psutil
    children = [child.pid for child in psutil.Process().children()]
    print(len([m for m in ("torch", "numba") if m in sys.modules]), *children, flush=True)
encode_files(sys.argv[1:2], load_tokenizer(sys.argv[2]), 64, workers=2, progress=progress)
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_no_worker_outlives_the_process(how, tmp_path):
    path = tmp_path / "many.jsonl"
    path.write_text("".join(json.dumps(filled(KINDS[1], n)) + "\n" for n in range(60_000)))
    # the script has no guard against being imported anew, as a user's may not have
    script = tmp_path / "script.py"
    script.write_text(RUN)
    run = subprocess.Popen(
        [sys.executable, str(script), str(path), str(TINY_K2)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    _, *pids = map(int, run.stdout.readline().split())
    assert len(pids) == 2
    os.killpg(run.pid, how)  # as a terminal does with Ctrl-C
    said = run.communicate(timeout=20)[1].decode()
    assert "was killed" not in said  # by itself
    assert run.returncode == -how if how == signal.SIGKILL else said.count("KeyboardInterrupt") == 1, said
    deadline = time.monotonic() + 10
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(alive, pids))


def alive(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_what_a_worker_imports_needs_no_torch():
    code = "import sys; from unfreeze.data.store import workers; print({'torch', 'numba', 'pydantic'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize("seconds, started", [(0.0, True), (1e9, False)])
def test_workers_are_started_where_they_pay(seconds, started, files, tokenizer, monkeypatch):
    monkeypatch.setattr(workers, "TRIED", 0.0)
    monkeypatch.setattr(workers, "PAYS", seconds)
    monkeypatch.setattr(workers, "num_workers", lambda: 2)
    made, real = [], workers.Workers
    monkeypatch.setattr(workers, "Workers", lambda *given: made.append(1) or real(*given))
    same(
        encode_files(files, tokenizer, 64, on_bad_row="skip"),
        encode_files(files, tokenizer, 64, on_bad_row="skip", workers=0),
    )
    assert bool(made) == started


def test_without_room_for_workers_this_process_encodes_alone(files, tokenizer, monkeypatch, caplog):
    def none_left(*_, **__):
        raise BlockingIOError("Resource temporarily unavailable")

    alone = encode_files(files, tokenizer, 64, workers=0, on_bad_row="skip")
    monkeypatch.setattr(workers.subprocess, "Popen", none_left)
    found = encode_files(files, tokenizer, 64, workers=2, on_bad_row="skip")
    assert found.stats.as_dict() == alone.stats.as_dict() and "this process alone" in caplog.text


def test_a_thread_that_cannot_start_ends_the_others(files, tokenizer, monkeypatch, workers_left):
    started = []
    real = workers.ThreadPoolExecutor.submit

    def one(self, *given):
        if started:
            raise RuntimeError("can't start new thread")
        started.append(1)
        return real(self, *given)

    monkeypatch.setattr(workers.ThreadPoolExecutor, "submit", one)
    assert encode_files(files, tokenizer, 64, workers=2, on_bad_row="skip").stats.rows
    assert started and not workers_left()
