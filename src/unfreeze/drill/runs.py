"""R1 to R9 (R6 is in bills.py): faults of runs, their saves, their exports and their data."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from unfreeze.adapters import LoraConfig, attach, save_adapter, verify_adapter
from unfreeze.core.schema import StartEvent, TrainEvent
from unfreeze.data import Batches, encode_file
from unfreeze.drill.fault import Fault, Outcome, measured, must_refuse, said
from unfreeze.drill.processes import kill_in_training, train_together, waiting_process
from unfreeze.drill.sandbox import ROWS, Sandbox
from unfreeze.job.end.folder import contents
from unfreeze.job.opening.processes import agree
from unfreeze.parallel.processes.roll import Roll, store_at
from unfreeze.report.events import of_kind, read_events, series
from unfreeze.train.optim import AdamW
from unfreeze.train.run import Run
from unfreeze.train.state import start_or_resume

KILL_STEPS = 60


def killed(sandbox: Sandbox) -> Outcome:
    """Start `unfreeze sft` in a process, kill it with SIGKILL, then repeat the command.

    It saves every step, and is killed while it trains.
    """
    rows, whole, broken = sandbox.rows(), sandbox.fresh("whole"), sandbox.fresh("killed")
    fields: dict[str, Any] = {"data": rows, "steps": KILL_STEPS, "save_every": 1}
    sandbox.sft(**fields, out=whole)
    config = sandbox.sft_config(**fields, out=broken)
    after = kill_in_training(config, broken)
    sandbox.sft(**fields, out=broken)
    one, two = (run_losses(run) for run in (whole, broken))
    relation = "bit for bit" if one == two else "NOT"
    line = (
        f"killed (-9) after step {after} of {KILL_STEPS}, repeated: {len(two)} losses are {relation} those of"
        " the uninterrupted run"
    )
    return measured(
        start_or_resume, line, holds=one == two and len(one) == KILL_STEPS and 0 < after < KILL_STEPS
    )


def half_a_save(sandbox: Sandbox) -> Outcome:
    """Leave a folder step-000009.tmp with half a file, as a kill during a save does.

    It must be neither read nor kept.
    """
    run = sandbox.fresh("run")
    sandbox.sft(steps=3, save_every=1, out=run)
    half = run / "state" / "step-000009.tmp"
    half.mkdir()
    (half / "tensors.safetensors").write_bytes(b"half")
    with Run(run, json.loads((run / "state" / "step-000003" / "state.json").read_text())["config"]) as opened:
        fate = "kept" if half.exists() else "removed"
        line = (
            f"there is an unfinished save of step 9: the run resumes from step {opened.step}, and the"
            f" partial save is {fate}"
        )
        return measured(Run, line, holds=opened.step == 3 and not half.exists())


def damaged_save(sandbox: Sandbox) -> Outcome:
    """Resume from a save without the optimizer's second moments.

    If it were accepted, training would silently continue with a fresh optimizer.
    """
    run, model, batch = sandbox.fresh("run"), sandbox.model("llama"), sandbox.batch([30, 20])
    sandbox.loop(model, [[batch]], steps=4, out=run, on_step=[stop_after(2)])
    tensors = run / "state" / "step-000002" / "tensors.safetensors"
    save_file(
        {name: tensor for name, tensor in load_file(tensors).items() if "exp_avg_sq" not in name}, tensors
    )
    return must_refuse(
        lambda: sandbox.loop(sandbox.model("llama"), [[batch]], steps=4, out=run), says="exp_avg_sq"
    )


def stop_after(step: int) -> Callable[[Any, Any], None]:
    """Return an on_step hook that makes the run save and stop, as Ctrl-C does."""

    def look(state: Any, result: Any) -> None:
        if state.step == step:
            os.kill(os.getpid(), signal.SIGINT)

    return look


def changed_config(sandbox: Sandbox) -> Outcome:
    """Resume in the same folder with another learning rate and seed."""
    rows, run = sandbox.rows(), sandbox.fresh("run")
    sandbox.sft(data=rows, out=run)
    return must_refuse(
        lambda: sandbox.sft(data=rows, out=run, learning_rate=1e-3, seed=7),
        says="learning_rate: 0.005 -> 0.001; seed: 0 -> 7",
    )


def changed_data(sandbox: Sandbox) -> Outcome:
    """Resume from a cursor of other data: its position would mean another row."""
    examples = sandbox.examples([20, 30, 10, 40])
    batches = Batches(examples, 64, seed=0)
    next(batches)
    return must_refuse(
        lambda: Batches(examples[:3], 64, seed=0, start=batches.cursor()), says="the data changed"
    )


def other_devices(sandbox: Sandbox) -> Outcome:
    """Resume a run of one process, stopped after step 2 of 4, with two processes."""
    whole, broken, rows = sandbox.fresh("one"), sandbox.fresh("two"), sandbox.rows()
    fields: dict[str, Any] = {
        "data": rows,
        "micro_batches": 2,
        "tokens_per_step": 256,
        "save_every": 1,
        "keep_saves": 4,
    }
    sandbox.sft(**fields, out=whole)
    shutil.copytree(whole, broken)
    for done in ("state/step-000003", "state/step-000004", "adapter"):
        shutil.rmtree(broken / done)
    train_together(sandbox.sft_config(**fields, out=broken), broken)
    one, two = (run_losses(run) for run in (whole, broken))
    resumed = of_kind(read_events(broken / "events.jsonl"), StartEvent)[-1]["step"]
    worst = max(abs(a / b - 1) for a, b in zip(one, two, strict=False))
    line = (
        f"saved by 1 process at step {resumed}, resumed with 2 to step {len(two)}: losses differ by at most"
        f" {worst:.1g} (limit 1e-5)"
    )
    return measured(start_or_resume, line, holds=resumed == 2 and len(one) == len(two) == 4 and worst <= 1e-5)


def run_losses(run: Path) -> list[float]:
    return series(read_events(run / "events.jsonl"), "train", "loss")[1]


def rate_off_schedule(sandbox: Sandbox) -> Outcome:
    """Lower the learning rate to a tenth between schedule and update: the event must have the used rate."""
    model = sandbox.model("llama")
    optimizer = AdamW(model)
    update = optimizer.update

    def a_tenth(learning_rate: float, *arguments: Any, **options: Any) -> Any:
        return update(0.1 * learning_rate, *arguments, **options)

    optimizer.update = a_tenth
    events = sandbox.loop(model, [[sandbox.batch([30, 20])]], steps=2, optimizer=optimizer)
    used = of_kind(events, TrainEvent)[0].get("learning_rate", 0.0)
    line = f"the schedule says 0.001, the update used a tenth of it, the train event says {used:g}"
    return measured(AdamW.learning_rate.fget, line, holds=abs(used - 1e-4) < 1e-12)


def broken_export(sandbox: Sandbox) -> Outcome:
    """Lose one expert's B in a written adapter."""
    model, folder = adapted(sandbox), sandbox.fresh("adapter")
    save_adapter(model, folder, "per-expert", base_name="base")
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if ".experts.3." in name and name.endswith("lora_B.weight"))
    save_file({**tensors, name: torch.zeros_like(tensors[name])}, file)
    return must_refuse(lambda: verify_adapter(model, folder), says="of expert 3")


def adapted(sandbox: Sandbox) -> Any:
    """Make a model whose adapters all have an effect."""
    model = sandbox.model("deepseek_v3-int4")
    attach(model, LoraConfig(rank=2), seed=0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".adapter." in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def bad_row(row: dict[str, Any] | str | bytes, says: str) -> Callable[[Sandbox], Outcome]:
    """Make a fault with a data file whose third row is bad."""

    def plant(sandbox: Sandbox) -> Outcome:
        return must_refuse(
            lambda: encode_file(sandbox.rows([*ROWS[:2], row, *ROWS[2:]]), sandbox.tokenizer, 512), says=says
        )

    return plant


def skipped_rows(sandbox: Sandbox) -> Outcome:
    """Encode two bad rows with on_bad_row = "skip"."""
    data = sandbox.rows([ROWS[0], "{broken", ROWS[1], {"question": "Q"}])
    stats = encode_file(data, sandbox.tokenizer, 512, on_bad_row="skip").stats
    rows = [bad.row for bad in stats.listed]
    line = f"{stats.summary()}; bad rows {rows}: {stats.listed[0].reason if rows else ''}"
    return said(encode_file, line, says="2 bad, 0 duplicates; bad rows [2, 4]")


def line_of_10_mb(sandbox: Sandbox) -> Outcome:
    """Read a row with an unused field of 10 MB.

    The row must count, with the same tokens as without the field.
    """
    wide, plain = (
        encode_file(sandbox.rows([*ROWS[:2], {**ROWS[3], **extra}]), sandbox.tokenizer, 512)
        for extra in ({"raw": "a" * 10_000_000}, {})
    )
    same = [list(example.tokens) for example in wide.examples] == [
        list(example.tokens) for example in plain.examples
    ]
    line = (
        f"{wide.stats.rows} rows, one of them a line of 10 MB; the same tokens as without its unused field:"
        f" {same}"
    )
    return measured(encode_file, line, holds=same)


def row_too_long(sandbox: Sandbox) -> Outcome:
    """Encode a row longer than the sequence: it must be cut, and its lost tokens counted."""
    stats = encode_file(sandbox.rows([*ROWS[:2], {"text": "frog " * 600}]), sandbox.tokenizer, 512).stats
    return said(encode_file, stats.summary(), says="1 truncated (")


def byte_order_mark(sandbox: Sandbox) -> Outcome:
    """Read a file with a byte order mark: it is not part of the first row, and no row is lost."""
    first = b"\xef\xbb\xbf" + json.dumps(ROWS[0]).encode()
    marked, plain = (
        encode_file(sandbox.rows(rows), sandbox.tokenizer, 512) for rows in ([first, *ROWS[1:]], ROWS)
    )
    same = [list(example.tokens) for example in marked.examples] == [
        list(example.tokens) for example in plain.examples
    ]
    return measured(
        encode_file,
        f"{marked.stats.rows} rows read after a byte order mark, with the same tokens as without it: {same}",
        holds=same,
    )


def two_runs(sandbox: Sandbox) -> Outcome:
    run = sandbox.fresh("run")
    with Run(run, {}):
        return must_refuse(lambda: sandbox.sft(out=run), says="is in use by process")


def dead_process(sandbox: Sandbox) -> Outcome:
    """Kill one of two processes registered in process 0's store, and raise what a collective would raise.

    torch's own error says only that a connection closed.
    """
    store = store_at("127.0.0.1", 0, first=True)
    other = waiting_process(store.port)
    try:
        roll = Roll(store, 0, 2)
    finally:
        other.kill()
        other.wait()

    def exchange() -> None:
        with roll.watching():
            raise RuntimeError("Connection closed by peer")

    return must_refuse(exchange, says="process 1 is gone (connection closed)")


def other_files(sandbox: Sandbox) -> Outcome:
    """Compare the data files of two processes, the second's with a row less. Process 0 is a stand-in."""
    first, here = (
        {"data file 1 (its size and hash)": contents(sandbox.sft_config(data=sandbox.rows(rows)).data)[0]}
        for rows in (ROWS, ROWS[1:])
    )
    two: Any = SimpleNamespace(size=2, rank=1, texts=lambda text: [json.dumps(first), text])
    return must_refuse(lambda: agree(two, here), says="the processes differ in data file 1")


FAULTS = [
    Fault("R1", "kill -9 in the middle of training and saving", killed),
    Fault("R1", "a partial save left behind", half_a_save),
    Fault("R2", "a save that lost its optimizer", damaged_save),
    Fault("R2", "another configuration in the same folder", changed_config),
    Fault("R2", "other data behind the same cursor", changed_data),
    Fault("R3", "a run resumed with another number of processes", other_devices),
    Fault("R4", "a learning rate that is not the schedule's", rate_off_schedule),
    Fault("R5", "an exported adapter that lost one expert", broken_export),
    Fault("R7", "a row of broken JSON", bad_row('{"question": "Q", "answer": ', "row 3")),
    Fault("R7", "a row without its answer", bad_row({"question": "Q"}, "row 3")),
    Fault("R7", "a field of the wrong type", bad_row({"question": 5, "answer": "A"}, "row 3")),
    Fault("R7", "an empty answer", bad_row({"question": "Q", "answer": ""}, "row 3")),
    Fault(
        "R7", "a key that occurs twice", bad_row('{"question": "Q", "answer": "A", "answer": "B"}', "row 3")
    ),
    Fault("R7", "a row with unknown fields", bad_row({"frage": "Q", "antwort": "A"}, "row 3")),
    Fault("R7", "bytes that are not UTF-8", bad_row(b'{"text": "\xff\xfe"}', "row 3")),
    Fault("R7", "a line of 10 MB", line_of_10_mb),
    Fault("R7", "a row longer than the sequence", row_too_long),
    Fault("R7", "a byte order mark", byte_order_mark),
    Fault("R7", "bad rows that are dropped uncounted", skipped_rows),
    Fault("R8", "two runs in one folder", two_runs),
    Fault("R9", "a process that is killed while others compute with it", dead_process),
    Fault("R9", "processes that read other data", other_files),
]
