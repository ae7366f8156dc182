"""The end of a run: its report, the printed summary, and its result as numbers."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unfreeze.config.adapter import rounded_as
from unfreeze.config.recipes import read_resolved
from unfreeze.core.command import Common
from unfreeze.core.errors import ConfigError
from unfreeze.core.schema import DataEvent, EndEvent, Event, PlanEvent, ReceiptEvent, TrainEvent
from unfreeze.job.end.folder import again
from unfreeze.job.merge_aware import merge_flags
from unfreeze.report.events import folded, last, of_kind, read_events
from unfreeze.report.html import summary_lines, write_report
from unfreeze.report.times import tokens_per_second


def finish(
    run_dir: Path, common: Common, command: str, *, export: bool = False, **extra: Any
) -> dict[str, Any]:
    """Write the report, print the summary, and return the result computed from the run's events."""
    write_report(run_dir)
    result = {**result_of(read_events(run_dir / "events.jsonl")), **extra, "run": str(run_dir)}
    if not common.quiet:
        before = train_more(run_dir) if extra.get("already_finished") else []
        after = [f"report: {run_dir / 'report.html'}", next_command(run_dir, result, command, export)]
        print("\n".join([*before, *summary_lines(run_dir), *after]), file=sys.stderr)
    return result


def of_texts(run_dir: Path) -> bool:
    """True if a run pretrained on texts alone, so its model continues a text and does not chat."""
    if read_resolved(run_dir, ConfigError).get("recipe") != "pretrain":
        return False
    data = last(read_events(run_dir / "events.jsonl"), DataEvent)
    return data is not None and set(data.get("shapes", {})) == {"text"}


def train_more(run_dir: Path) -> list[str]:
    """Lines for a run that was already finished: nothing was done, and three ways to train more."""
    adapter = (run_dir / "adapter").is_dir()
    result = shlex.quote(str(run_dir if adapter else run_dir / "model"))
    trained = f"--{'adapter' if adapter else 'model'} {result}"
    field = "steps" if read_resolved(run_dir, ConfigError).get("training.steps") else "epochs"
    more = (
        f"to train more: start again with another --out; continue its result with {trained} and"
        f" another --out; or extend this run with a higher --{field} and --save.allow-changed {field}"
    )
    return ["this run is already finished; nothing was trained", *folded(more)]


def result_of(events: Sequence[Event]) -> dict[str, Any]:
    """Compute steps, losses, speed, memory and receipt of a run from its events.

    For a resumed run, all its sessions count.
    """
    train = [event for event in of_kind(events, TrainEvent) if event.get("loss") is not None]
    receipt, end = last(events, ReceiptEvent), last(events, EndEvent)
    return {
        "steps": train[-1]["step"] if train else 0,
        "loss_first": train[0]["loss"] if train else None,
        "loss_last": train[-1]["loss"] if train else None,
        "tokens_per_second": tokens_per_second(events),
        "peak_bytes": max((event.get("peak_bytes", 0) for event in train), default=0),
        "receipt": receipt["groups"] if receipt else {},
        "finished": end is not None and end.get("reason") == "done",
    }


def next_command(run_dir: Path, result: dict[str, Any], command: str, export: bool) -> str:
    """Say what to do next: continue the run, or use its result."""
    if not result["finished"]:
        return f"interrupted after step {result['steps']}, everything is saved; {again(command)}"
    name = shlex.quote(str(run_dir))
    plan = last(read_events(run_dir / "events.jsonl"), PlanEvent) if export else None
    reader = plan.get("export_for", "vllm") if plan else "vllm"
    if not export and of_texts(run_dir):  # it has read no conversation: an answer would be a surprise
        return f'next: unfreeze generate {name} --prompt "…"'
    adapter = run_dir / "adapter"
    if export and adapter.is_dir() and (flags := merge_flags(rounded_as(adapter))):
        return f"next: unfreeze merge {name} {flags}    unfreeze chat {name}"
    if not export or not reader:
        return f'next: unfreeze chat {name}    unfreeze generate {name} --prompt "…"'
    return f"next: unfreeze chat {name}    unfreeze export {name} --for {reader}"
