"""What runs is decided once for a run: timed at a machine's first start, in the run's folder, for all."""

import json
import re
import shutil
from types import SimpleNamespace

import pytest
import torch

from unfreeze import cli
from unfreeze.commands.demo import TINY_K2
from unfreeze.core.cpu import cpu_class
from unfreeze.job.opening.kernels import kernels_line, settle_kernels
from unfreeze.kernels import cards
from unfreeze.kernels.choice import choose, ops, record, table, times
from unfreeze.kernels.choice.choose import by_record

pytestmark = pytest.mark.usefixtures("fewer_layers")


def trained(folder, rows, steps=1, dtype="float32", **more):
    words = ["--model", TINY_K2, "--data", rows, "--out", folder, "--tokens-per-step", 128, "--steps", steps]
    words += [
        "--watch.samples",
        0,
        "--lora.rank",
        1,
        "--lora.targets",
        "attention",
        "--optimizer.warmup",
        0,
        "--quiet",
    ]
    words += ["--dtype", dtype, *(part for name, value in more.items() for part in (f"--{name}", value))]
    code = cli.main(["sft", *map(str, words)])
    return code, {
        (row["op"], row["dtype"], row["bucket"]): row for row in table.read(folder / "kernels.json")
    }


@pytest.fixture
def clock(monkeypatch, tmp_path):
    """Timing as on a user's machine, where swiglu's loop is slow and that of rotary quick: which cells were
    asked for, without computing them."""
    monkeypatch.delenv("UNFREEZE_KERNELS")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    times._read.cache_clear()
    asked = []

    def planted(cells, **_):
        asked.extend(cell.key for cell in cells)
        us = {"swiglu": 300.0}
        return [
            dict(zip(("op", "dtype", "bucket"), cell.key, strict=True))
            | {"runs": "reference" if cell.op.name in us else next(iter(cell.op.candidates))}
            | {"us": dict.fromkeys(cell.op.candidates, us.get(cell.op.name, 50.0)) | {"reference": 100.0}}
            | {"wrong": {}, "date": "2026-01-31"}
            for cell in cells
        ]

    monkeypatch.setattr(table, "time_all", planted)
    yield asked
    times._read.cache_clear()


def test_a_first_start_times_what_the_run_needs_and_the_second_nothing(tmp_path, chat_rows, clock):
    code, rows = trained(tmp_path / "first", chat_rows)
    assert code == 0 and clock
    # documents of tiny-k2 are short, and its experts INT4: neither long attention nor FP8 is timed
    assert {name for name, _, _ in clock} >= {"expand", "swiglu", "rotary", "rms_norm"}
    assert not any("1024" in bucket or "fp8" in bucket for _, _, bucket in clock)
    assert {dtype for _, dtype, _ in clock} == {"float32"}
    # what this machine has timed beats the committed records, which say "numba" of swiglu
    assert {row["runs"] for key, row in rows.items() if key[0] == "swiglu" and key in clock} == {"reference"}
    assert all(rows[key]["origin"] == "timed here" for key in clock)
    events = [json.loads(line) for line in (tmp_path / "first" / "events.jsonl").read_text().splitlines()]
    used = [choice for event in events for choice in event.get("choices", [])]
    assert {choice["runs"] for choice in used if choice["op"] == "swiglu"} == {"reference"}
    assert used and all(
        (choice["runs"], choice["origin"])
        == tuple(rows[choice["op"], choice["dtype"], choice["bucket"]][f] for f in ("runs", "origin"))
        for choice in used
        if (choice["op"], choice["dtype"], choice["bucket"]) in rows
    )
    (timing,) = [event for event in events if event["kind"] == "timing"]
    assert timing["cells"] == len(clock) and timing["seconds"] > 0
    clock.clear()
    assert trained(tmp_path / "second", chat_rows)[1] == rows and not clock
    assert '"kind": "timing"' not in (tmp_path / "second" / "events.jsonl").read_text()


def test_a_run_that_goes_on_takes_what_it_began_with(tmp_path, chat_rows, clock, monkeypatch):
    """On another machine, where swiglu's loop would be timed as the faster one."""
    folder = tmp_path / "run"
    _, rows = trained(folder, chat_rows, steps=2, **{"save-every": 1})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
    clock.clear()
    edited = [row | {"runs": "reference", "why": "then"} for row in rows.values() if row["op"] == "rms_norm"]
    kept = [row for row in rows.values() if row["op"] != "rms_norm"]
    (folder / "kernels.json").write_text(json.dumps(kept + edited))
    # not finished: its last step's save and what was written are gone
    shutil.rmtree(folder / "adapter")
    assert trained(folder, chat_rows, steps=2, **{"save-every": 1})[0] == 0 and not clock
    assert json.loads((folder / "kernels.json").read_text()) == kept + edited
    norms = by_record(ops.import_op("rms_norm"), torch.device("cpu"), torch.float32, "many")
    assert norms[:2] == ("reference", "then")


def test_a_choice_that_cannot_run_here_is_said_and_looked_up(tmp_path, chat_rows, read_events, monkeypatch):
    rows = table.made(torch.float32)
    for row in rows:
        if row["op"] == "swiglu":
            row["runs"] = "triton"
    file = tmp_path / "of another machine.json"
    file.write_text(json.dumps(rows))
    monkeypatch.setenv("UNFREEZE_KERNELS", str(file))
    assert trained(tmp_path / "run", chat_rows)[0] == 0
    warned = [event["message"] for event in read_events(tmp_path / "run", "warning")]
    said = (
        r"cannot run \d+ of the \d+ choices that the run started with: swiglu as triton;"  # not one a bucket
    )
    assert any(re.search(said, text) for text in warned)
    used = [c for event in read_events(tmp_path / "run", "kernels") for c in event["choices"]]
    assert {c["runs"] for c in used if c["op"] == "swiglu"} <= {"numba", "reference"}


@pytest.mark.parametrize("text", ["", "{}", "[1]", '[{"op": "swiglu"}]'])
def test_a_damaged_file_is_named(tmp_path, chat_rows, monkeypatch, capsys, text):
    (tmp_path / "fixed.json").write_text(text)
    monkeypatch.setenv("UNFREEZE_KERNELS", str(tmp_path / "fixed.json"))
    with pytest.raises(Exception, match=r"kernels\.json"):
        trained(tmp_path / "run", chat_rows)
    assert "fixed.json does not say which kernels run" in capsys.readouterr().err


class Second:
    """Process 1 of two, as far as the choice is concerned."""

    def __init__(self, rows):
        self.rows = rows

    def on_rank0(self, action):
        return None

    def texts(self, text):
        assert text == "null"
        return [json.dumps(self.rows), text]


def test_every_process_takes_the_table_of_the_first(tmp_path, clock):
    """Process 1 times nothing and writes nothing, whatever it would have chosen itself."""
    rows = [row | {"runs": "reference", "why": "process 0"} for row in table.made(torch.float32)]
    cpu, folder = torch.device("cpu"), SimpleNamespace(path=tmp_path)
    settle_kernels(cpu, "float32", [300], None, None, folder, Second(rows))
    swiglu = ops.import_op("swiglu")
    assert by_record(swiglu, cpu, torch.float32, swiglu.cases[0].bucket)[:2] == ("reference", "process 0")
    assert not clock and not list(tmp_path.glob("*.json"))


def test_the_doctor_says_class_choice_and_origin(monkeypatch):
    line = kernels_line("float32")
    assert line.startswith(f"kernels on {cpu_class()}: ") and "by design" in line and "numba" in line


def test_a_named_file_of_kernels_that_is_not_there_is_not_to_be_deleted(
    tmp_path, chat_rows, monkeypatch, capsys
):
    monkeypatch.setenv("UNFREEZE_KERNELS", str(tmp_path / "none.json"))
    words = ["sft", "--model", TINY_K2, "--data", chat_rows, "--out", tmp_path / "run", "--steps", 1]
    assert cli.main([str(word) for word in words]) == 2
    assert "next: unset UNFREEZE_KERNELS, or name a run's kernels.json" in capsys.readouterr().err


class Node:
    """A process of a node: `first` has the turn to check, the others wait for it at the store."""

    def __init__(self, first, told=None):
        self.first, self.told, self.calls = first, told or [], []
        self.node_first = 0

    def in_turn(self, action):
        self.calls.append("store")
        return action(self.first)

    def on_rank0(self, action):
        self.calls.append("store")
        return action() if self.first else None

    def texts(self, text):
        self.calls.append("collective")
        return [text if self.first else json.dumps(self.told), text]


@pytest.fixture
def card(monkeypatch, tmp_path):
    """A run on a card of the test's own: its first start checks; what is wrong is banned."""
    cuda = torch.device("cuda", 0)
    mock = cards.Card("Mock 9000", (9, 0), 80 << 30, "580.65", "CUDA 13.0")
    monkeypatch.delenv("UNFREEZE_KERNELS")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(cards, "card_of", lambda device: mock)
    monkeypatch.setattr(cards, "present", lambda device: True)
    for module in (times, choose, record):
        monkeypatch.setattr(module, "device_key", lambda device: "mock-9000")
    monkeypatch.setattr(times, "_UNWRITTEN", {})
    monkeypatch.setattr(
        table, "running", lambda op, device, dtype, bucket: ["triton"] if "triton" in op.candidates else []
    )
    monkeypatch.setattr(
        choose, "running", lambda op, device, dtype, bucket: ["triton"] if "triton" in op.candidates else []
    )
    asked = []

    def planted(cells, device, seconds):
        assert device == cuda and seconds == 60.0
        for op, case, dtype in cells:
            key = times.key_of(op, dtype, case.bucket)
            asked.append(key)
            wrong = {"triton": "error 1.0e-01, tolerance 4.0e-03"} if op.name == "swiglu" else {}
            us = {"reference": 100.0} | ({} if wrong else {"triton": 50.0})
            yield dict(zip(("op", "dtype", "bucket"), key, strict=True)) | {
                "runs": "reference" if wrong else "triton",
                "us": us,
                "wrong": wrong,
                "untimed": "",
                "date": "",
            }

    monkeypatch.setattr(table, "check_all", planted)
    times._read.cache_clear()
    yield SimpleNamespace(device=cuda, asked=asked)
    times._read.cache_clear()


def settled(card, folder, group, lines=None):
    shape, start = SimpleNamespace(mla=None, moe=None), SimpleNamespace(is_packed=lambda: False)
    lines = [] if lines is None else lines
    settle_kernels(card.device, "bfloat16", [300], shape, start, folder, group, lines.append)
    swiglu, norm = ops.import_op("swiglu"), ops.import_op("rms_norm")
    return [by_record(op, card.device, torch.bfloat16, op.cases[0].bucket) for op in (swiglu, norm)]


class Folder:
    def __init__(self, path):
        path.mkdir()
        self.path, self.step, self.events, self.said = path, 0, self, []

    def emit(self, kind, step, **fields):
        self.said.append((kind, fields))


def test_the_first_start_on_a_card_checks_once_and_bans_what_is_wrong(card, tmp_path):
    folder, lines = Folder(tmp_path / "run"), []
    swiglu, norm = settled(card, folder, Node(first=True), lines)
    assert swiglu.runs == "reference" and "triton is wrong: error 1.0e-01" in swiglu.why
    assert norm.runs == "triton" and norm.why.startswith("triton 2.00 x plain torch")
    assert lines[0].startswith("checking the kernels of this run on Mock 9000") and "3 banned" in lines[1]
    (warning,) = [fields["message"] for kind, fields in folder.said if kind == "warning"]
    assert warning == (
        "a kernel is wrong on Mock 9000 and does not run: swiglu: triton: error 1.0e-01, tolerance 4.0e-03"
    )
    assert {"swiglu", "rms_norm", "rotary", "adamw"} <= {op for op, *_ in card.asked}
    assert not {"expert_mlp", "expand", "token_order"} & {op for op, *_ in card.asked}
    asked = len(card.asked)
    settled(card, Folder(tmp_path / "next"), Node(first=True), lines)
    assert len(card.asked) == asked and len(lines) == 2  # the second start says nothing


def test_the_other_processes_wait_at_the_store_and_take_the_table(card, tmp_path):
    first, second = Folder(tmp_path / "run"), Folder(tmp_path / "other")
    group = Node(first=True)
    settled(card, first, group)
    assert group.calls == ["store", "collective", "store", "collective"]
    rows, asked = table.read(first.path / "kernels-cuda.json"), len(card.asked)
    times._read.cache_clear(), times.path(card.device).unlink()
    swiglu, norm = settled(card, second, Node(first=False, told=rows))
    assert (swiglu.runs, norm.runs) == ("reference", "triton") and len(card.asked) == asked
    assert not list(second.path.iterdir())


def test_a_run_goes_on_with_its_choices_but_not_with_one_that_is_wrong_on_this_card(card, tmp_path):
    folder = Folder(tmp_path / "run")
    settled(card, folder, Node(first=True))
    file = folder.path / "kernels-cuda.json"
    rows = json.loads(file.read_text())
    other = [
        row | {"runs": "triton" if row["op"] == "swiglu" else "reference", "why": "then"} for row in rows
    ]
    file.write_text(json.dumps(other))
    swiglu, norm = settled(card, folder, Node(first=True))
    assert norm[:2] == ("reference", "then") and swiglu.runs == "reference"
    assert (
        "cannot run 3 of the" in folder.said[-1][1]["message"]
        and "swiglu as triton" in folder.said[-1][1]["message"]
    )


def test_a_cache_that_cannot_be_written_costs_only_the_next_check(card, tmp_path, monkeypatch):
    (tmp_path / "cache").write_text("a file, not a folder")
    lines = []
    swiglu, norm = settled(card, Folder(tmp_path / "run"), Node(first=True), lines)
    assert (swiglu.runs, norm.runs) == ("reference", "triton")
    assert lines[1].endswith("cannot be written")
