"""Sinks, each read back with its own library: what TensorBoard, wandb (offline) and trackio hold is what
events.jsonl says.

A sink that fails is said once and stops nothing; one whose library is absent is refused before any work.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from unfreeze import cli
from unfreeze.commands.demo import TINY_K2
from unfreeze.core.errors import ConfigError
from unfreeze.core.events import EventLog
from unfreeze.core.schema import TrainEvent
from unfreeze.report.events import of_kind, read_events, warnings
from unfreeze.tracking import SINKS, Tracked, scalars, texts, tracking

DATA = dict.fromkeys(
    ("rows", "examples", "tokens", "supervised", "longest", "truncated", "dropped", "bad"), 7
)
DATA |= {"supervised_fraction": 1.0, "shapes": {}, "notes": {}, "listed": []}
COUNTS = {"max_violation": 0.5, "entropy": 0.9, "dead": 1}


def emit_run(log: EventLog, first: int = 1, last: int = 3) -> None:
    log.emit("data", first - 1, summary="7 rows", **DATA)
    for step in range(first, last + 1):
        log.emit(
            "train",
            step,
            loss=1.0 / step,
            grad_norm=1.0,
            tokens=100,
            seconds=0.5,
            expert_balance={"3": COUNTS},
        )
    log.emit("eval", last, loss=0.75)
    log.emit("sample", last, when="after", index=0, prompt="Who?", text="Me.")
    log.emit("warning", last, message="mind the gap")
    log.emit("end", last, reason="done", steps=last, tokens_per_second=200.0)


def tensorboard_of(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder / "tensorboard"))
    accumulator.Reload()
    return accumulator


def wandb_records(file: Path) -> list[Any]:
    """The records of a .wandb file: LevelDB's log format (7 bytes of header; blocks of 32 KiB; crc 4, length
    2, type 1), then wandb's own proto."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, parts, found = file.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        room = 32768 - at % 32768
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        if room < 7 or kind == 0:
            at += room
            continue
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            found.append(Record.FromString(parts))
            parts = b""
    return found


def items(records: list[Any], field: str) -> list[dict[str, Any]]:
    """history or summary records as plain dicts; wandb writes nested keys as a list of parts or as one
    key."""
    rows = []
    for record in records:
        if record.WhichOneof("record_type") == field:
            changed = getattr(record, field)
            pairs = changed.item if field == "history" else changed.update
            rows.append(
                {(pair.key or "/".join(pair.nested_key)): json.loads(pair.value_json) for pair in pairs}
            )
    return rows


@pytest.fixture(scope="module")
def tracked_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`unfreeze sft --watch.track tensorboard wandb trackio` on the built-in model, three steps."""
    folder = tmp_path_factory.mktemp("tracked")
    with pytest.MonkeyPatch.context() as patch:
        # read when trackio is imported, which this module does first
        patch.setenv("TRACKIO_DIR", str(folder / "trackio"))
        patch.delenv("WANDB_MODE", raising=False)
        (folder / "chat.jsonl").write_text(
            json.dumps({"question": "Who are you?", "answer": "tiny-k2, I am. Hmm."}) + "\n"
        )
        flags = [
            "--model",
            str(TINY_K2),
            "--data",
            str(folder / "chat.jsonl"),
            "--out",
            str(folder / "run"),
            "--steps",
            "3",
            "--watch.samples",
            "1",
            "--tokens-per-step",
            "64",
            "--lora.rank",
            "1",
            "--optimizer.warmup",
            "0",
            "--watch.track",
            *SINKS,
        ]
        assert cli.main(["sft", "--quiet", *flags]) == 0
    return folder / "run"


def losses(run: Path) -> list[float]:
    return [event["loss"] for event in of_kind(read_events(run / "events.jsonl"), TrainEvent)]


def test_tensorboard_holds_the_events(tracked_run: Path):
    board = tensorboard_of(tracked_run)
    loss = board.Scalars("train/loss")
    assert [point.step for point in loss] == [1, 2, 3] and [point.value for point in loss] == pytest.approx(
        losses(tracked_run), rel=1e-6
    )
    events = of_kind(read_events(tracked_run / "events.jsonl"), TrainEvent)
    assert loss[0].wall_time == pytest.approx(events[0]["time"])
    violation = [event["expert_balance"]["1"]["max_violation"] for event in events]
    assert [point.value for point in board.Scalars("experts/max_violation/layer 1")] == pytest.approx(
        violation, rel=1e-6
    )
    assert "Who are you?" in board.Tensors("sample/0 before")[0].tensor_proto.string_val[0].decode()
    assert '"training.tokens_per_step": 64' in board.Tensors("config")[0].tensor_proto.string_val[0].decode()


def test_wandb_holds_the_events_offline(tracked_run: Path):
    (file,) = (tracked_run / "wandb").glob("offline-run-*/run-*.wandb")
    records = wandb_records(file)
    history = [row for row in items(records, "history") if "train/loss" in row]
    assert [row["step"] for row in history] == [1, 2, 3] and [row["train/loss"] for row in history] == losses(
        tracked_run
    )
    summary = {key: value for row in items(records, "summary") for key, value in row.items()}
    assert "Who are you?" in summary["sample/0 after"]
    (run,) = [record.run for record in records if record.WhichOneof("record_type") == "run"][:1]
    assert (run.project, run.display_name, run.run_id) == (
        "unfreeze",
        "run",
        (tracked_run / "wandb-id").read_text().strip(),
    )
    assert {item.key: json.loads(item.value_json) for item in run.config.update}[
        "training.tokens_per_step"
    ] == 64
    assert [record.exit.exit_code for record in records if record.WhichOneof("record_type") == "exit"] == [0]


def test_trackio_holds_the_events(tracked_run: Path):
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    (run,) = trackio.Api().runs("unfreeze")
    logs = SQLiteStorage.get_logs("unfreeze", run.name)
    assert run.name == "run" and (run.config or {})["training.tokens_per_step"] == 64
    assert [(log["step"], log["train/loss"]) for log in logs if "train/loss" in log] == list(
        enumerate(losses(tracked_run), start=1)
    )
    assert any("Who are you?" in log.get("sample/0 after", "") for log in logs)


def test_tracking_changes_no_result_and_no_identity(tracked_run: Path, capsys: pytest.CaptureFixture[str]):
    """The same command without --watch.track finds the run finished: a sink is not part of what is computed."""
    flags = [
        "--model",
        str(TINY_K2),
        "--data",
        str(tracked_run.parent / "chat.jsonl"),
        "--out",
        str(tracked_run),
        "--steps",
        "3",
        "--watch.samples",
        "1",
        "--tokens-per-step",
        "64",
        "--lora.rank",
        "1",
        "--optimizer.warmup",
        "0",
    ]
    assert cli.main(["sft", "--quiet", "--json", *flags]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["already_finished"]


def test_a_resumed_run_purges_the_steps_it_does_again(tmp_path: Path):
    for first, last in ((1, 5), (4, 6)):  # killed after step 5, goes on from the save of step 3
        with tracking(["tensorboard"], tmp_path, {}) as sinks:
            log = EventLog(None, sinks)
            for step in range(first, last + 1):
                log.emit("data", first - 1, summary="", **DATA) if step == first else None
                log.emit("train", step, loss=float(10 * first + step), grad_norm=1.0)
    assert [(point.step, point.value) for point in tensorboard_of(tmp_path).Scalars("train/loss")] == [
        (1, 11.0),
        (2, 12.0),
        (3, 13.0),
        (4, 44.0),
        (5, 45.0),
        (6, 46.0),
    ]


def test_a_library_that_is_absent_is_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "chat.jsonl").write_text(json.dumps({"text": "x"}))
    for name in SINKS:
        module = {"tensorboard": "tensorboard.summary.writer.event_file_writer"}.get(name, name)
        # what Python itself does for a module that cannot be found
        monkeypatch.setitem(sys.modules, module, None)
        with (
            pytest.raises(ConfigError, match=f'track = "{name}" needs the package {name}') as refused,
            tracking([name], tmp_path, {}),
        ):
            pass
        assert refused.value.next == f"pip install {name}"
    flags = [
        "--model",
        str(TINY_K2),
        "--data",
        str(tmp_path / "chat.jsonl"),
        "--out",
        str(tmp_path / "run"),
        "--watch.track",
        "wandb",
    ]
    assert cli.main(["sft", "--quiet", *flags]) == 2
    assert "next: pip install wandb" in capsys.readouterr().err and not (tmp_path / "run").exists()


class Failing:
    """A sink whose second event finds the disk full."""

    def __init__(self) -> None:
        self.seen = 0

    def open(self, step: int) -> None: ...

    def log(self, event: dict[str, Any]) -> None:
        self.seen += 1
        if self.seen > 1:
            raise OSError("No space left on device")

    def close(self, done: bool) -> None:
        raise OSError("closing fails too")


def test_a_sink_that_fails_says_so_once_and_stops_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    failing, heard = Tracked("wandb", Failing()), []
    log = EventLog(tmp_path / "events.jsonl", (failing, heard.append))
    emit_run(log)
    failing.close()
    events = read_events(tmp_path / "events.jsonl")
    said = (
        "track wandb failed: OSError: No space left on device; training continues, and events.jsonl has"
        " everything"
    )
    assert warnings(events) == [(1, said), (3, "mind the gap")]
    assert len(of_kind(events, TrainEvent)) == len(of_kind(heard, TrainEvent)) == 3 and failing.sink.seen == 2
    assert capsys.readouterr().err == ""  # it was said already


def test_control_arm_an_unguarded_sink_stops_the_run():
    with pytest.raises(OSError, match="No space left"):
        emit_run(EventLog(None, (Failing().log,)))


def test_a_sink_that_cannot_open_or_close_is_said_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "tensorboard").write_text("a file where the folder should be")
    with tracking(["tensorboard"], tmp_path, {}) as sinks:
        log = EventLog(tmp_path / "events.jsonl", sinks)
        emit_run(log)
        log.close()
    assert [
        words.startswith("track tensorboard failed")
        for _, words in warnings(read_events(tmp_path / "events.jsonl"))
    ] == [True, False]
    broken = Tracked("wandb", Failing())
    broken({"kind": "train", "step": 1})
    broken.close()
    assert (
        capsys.readouterr().err
        == "warning: track wandb failed: OSError: closing fails too; events.jsonl has everything\n"
    )


def test_names_and_values():
    event = {
        "kind": "train",
        "step": 4,
        "time": 9.0,
        "loss": 2.0,
        "correct": None,
        "tokens": 100,
        "seconds": 0.5,
        "expert_balance": {"3": COUNTS},
    }
    assert scalars(event) == {
        "train/loss": 2.0,
        "train/tokens": 100.0,
        "train/seconds": 0.5,
        "train/tokens_per_second": 200.0,
        "experts/max_violation/layer 3": 0.5,
        "experts/entropy/layer 3": 0.9,
        "experts/dead/layer 3": 1.0,
    }
    assert scalars({"kind": "save", "step": 4, "bytes": 7}) == {}
    assert texts({"kind": "sample", "step": 4, "when": "after", "prompt": "Who?", "text": "Me."}) == {
        "sample/Who? after": "Who?\n\nMe."
    }
    assert texts({"kind": "train", "step": 4, "error": "loss is nan", "warning": "w"}) == {
        "error": "loss is nan",
        "warning": "w",
    }
