"""Read a run folder once: events, resolved config, plan, receipt, and facts for page and terminal.

runs/<name>/events.jsonl             always there
runs/<name>/plan.json, receipt.json  if missing, the latest plan or receipt event is used
runs/<name>/resolved_config.json     can be missing
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, cast

from unfreeze.config.recipes import resolved
from unfreeze.core.errors import DataError
from unfreeze.core.events import RESOLVED
from unfreeze.core.process import planned_words
from unfreeze.core.schema import (
    EarlyStopEvent,
    EndEvent,
    Event,
    GroupReceipt,
    LeftOut,
    LoadEvent,
    PlanEvent,
    ReceiptEvent,
    StartEvent,
    StreamEvent,
    TrainEvent,
    event_kind,
)
from unfreeze.core.units import format_bytes, format_count, format_seconds
from unfreeze.report.balance import Balance, balance_of
from unfreeze.report.baselines import baseline_words
from unfreeze.report.events import E, evals_of, expert_load, last, of_kind, read_events, refuse_damage, series
from unfreeze.report.forecast import forecast_and_actual
from unfreeze.report.metrics import metrics_of
from unfreeze.report.tables import count_trained
from unfreeze.report.times import speed_words, time_words, tokens_per_second
from unfreeze.untrusted.json_object import read_object


@dataclass(frozen=True)
class RunFolder:
    """Contents of a run folder. All numbers are read from it; nothing is measured here."""

    path: Path
    events: list[Event]
    config: dict[str, Any]
    plan: PlanEvent | None
    groups: dict[str, GroupReceipt]
    exceptions: list[LeftOut] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @cached_property
    def train(self) -> list[TrainEvent]:
        return of_kind(self.events, TrainEvent)

    @property
    def steps_done(self) -> int:
        return self.train[-1]["step"] if self.train else 0

    @property
    def steps_planned(self) -> int:
        """Planned number of steps; 0 without a start event."""
        start = last(self.events, StartEvent)
        return start.get("steps", 0) if start else 0

    @property
    def state(self) -> str:
        """ "done" or "interrupted", from the end event, else "unfinished": still running, or killed."""
        end = last(self.events, EndEvent)
        return end.get("reason", "done") if end else "unfinished"

    @property
    def seconds(self) -> float:
        """Seconds in training steps, over all sessions."""
        return sum(series(self.events, "train", "seconds")[1])

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second over all steps and sessions, without compile time."""
        return tokens_per_second(self.events)

    @cached_property
    def balance(self) -> Balance | None:
        """Load balance of the experts; None for a dense model."""
        return balance_of(self.events)

    def source(self, key: Literal["model", "data"]) -> str:
        """Model or data from the start event, else from the config, else ""."""
        start = last(self.events, StartEvent)
        value = (start and start.get(key)) or self.config.get("data.files" if key == "data" else key) or ""
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    @property
    def loaded(self) -> str:
        """The load event in words (see load_words), or ""."""
        load = last(self.events, LoadEvent)
        return load_words(load) if load else ""


def read_run(run_dir: Path | str) -> RunFolder:
    """Read a run folder.

    Raises DataError if events.jsonl is missing or damaged, or if a JSON file is not a JSON object.
    """
    path = Path(run_dir)
    events = read_events(path / "events.jsonl")
    receipt = _saved(path / "receipt.json", ReceiptEvent) or last(events, ReceiptEvent)
    return RunFolder(
        path=path,
        events=events,
        config=resolved(_read_object(path / RESOLVED)),
        plan=_saved(path / "plan.json", PlanEvent) or last(events, PlanEvent),
        groups=receipt.get("groups", {}) if receipt else {},
        exceptions=receipt.get("exceptions", []) if receipt else [],
    )


def _saved(path: Path, kind: type[E]) -> E | None:
    """Read a file with the fields of an event, checked as such; None if it is missing or empty."""
    fields = _read_object(path)
    refuse_damage({**fields, "kind": event_kind(kind)}, str(path))
    return cast(E, fields) if fields else None


def _read_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    return read_object(path, DataError, next=f"remove {path.name}, or restore it")


def flat_fields(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten {"lora": {"rank": 16}} to {"lora.rank": 16}, as flags are spelled."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        inner = isinstance(value, Mapping) and value
        flat |= flat_fields(value, f"{prefix}{key}.") if inner else {f"{prefix}{key}": value}
    return flat


def flatten(config: Mapping[str, Any]) -> dict[str, str]:
    """flat_fields() with every value as text."""
    pairs = flat_fields(config).items()
    return {
        key: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for key, value in pairs
    }


def facts(run: RunFolder) -> list[tuple[str, str]]:
    """(name, value) of the run's main numbers, without unknown ones.

    Text after a semicolon explains the number; the page prints it small.
    """
    losses = series(run.events, "train", "loss")[1]
    peaks = series(run.events, "train", "peak_bytes")[1]
    tokens = sum(series(run.events, "train", "tokens")[1])
    supervised = sum(series(run.events, "train", "supervised_tokens")[1])
    rows = []
    for metric in metrics_of(run.events):
        values = losses if metric["field"] == "loss" else series(run.events, "train", metric["field"])[1]
        if not values:
            continue
        ends = " → ".join(f"{value:.3f}" for value in [*values[:1], *values[1:][-1:]])
        ends += "; first and last step" if values[1:] else ""
        average = sum(values) / len(values)
        mean = f"{average:.2g} on average" if 0 < abs(average) < 0.05 else f"{average:.1f} on average"
        rows.append((metric["label"], mean if metric.get("mean") else ends))
    if rewards := series(evals_of(run.events), "eval", "reward")[1]:  # its loss is minus the reward
        ends = f"{rewards[0]:.3f} → {rewards[-1]:.3f}; highest {max(rewards):.3f}"
        rows.append(("Held-out reward", ends if len(rewards) > 1 else f"{rewards[0]:.3f}"))
    elif held_out := series(evals_of(run.events), "eval", "loss")[1]:
        ends = f"{held_out[0]:.3f} → {held_out[-1]:.3f}; lowest {min(held_out):.3f}"
        rows.append(("Held-out loss", ends if len(held_out) > 1 else f"{held_out[0]:.3f}"))
    if scale := baseline_words(run.events):
        rows.append(("Bits per byte", scale))
    if best := best_words(run):
        rows.append(("Best", best))
    if early := last(run.events, EarlyStopEvent):
        rows.append(("Stopped early", early_words(early, _best_folder(run))))
    of = f" of {run.steps_planned:,}" if run.steps_planned else ""
    rows.append(("Steps", f"{run.steps_done:,}{of}"))
    if processes := _processes_words(run):
        rows.append(("Processes", processes))
    if run.train:
        rows.append(("Time", time_words(run.events)))
    if words := forecast_and_actual(run.events):
        rows.append(("Forecast", words))
    if speed := speed_words(run.events):
        rows.append(("Tokens per second", speed))
    if peaks:
        rows.append(("Peak memory", _peak_words(run, max(peaks))))
    streamed = of_kind(run.events, StreamEvent)
    for source in dict.fromkeys(event.get("source", "elsewhere") for event in streamed):
        what = "Layers" if source == "peers" else "Experts"
        came = [event for event in streamed if event.get("source", "elsewhere") == source]
        rows.append((f"{what} from {source}", _stream_words(came)))
    if saves := series(run.events, "save", "seconds")[1]:
        sizes = series(run.events, "save", "bytes")[1]
        each = f"{format_bytes(max(sizes))} each, " if sizes else ""
        rows.append(("Saves", f"{len(saves):,}; {each}at most {format_seconds(max(saves))}"))
    if tokens:
        rows.append(("Tokens", format_count(tokens)))
    if tokens and supervised:
        rows.append(("Supervised tokens", f"{format_count(supervised)}; {supervised / tokens:.0%} of all"))
    if run.groups:
        rows.append(("Trained parameters", format_count(count_trained(run.groups))))
    return rows


def _stream_words(events: Sequence[StreamEvent]) -> str:
    """Words: '96 % of transfers hidden; 14 layers per step, 3.1 GB at 2.4 GB/s, 0.1 s waited'."""
    reads, size, seconds, waited = (
        [event[name] for event in events] for name in ("reads", "bytes", "seconds", "waited")
    )
    took, shown = sum(seconds), sum(waited)
    if not took:
        return "no transfers"
    steps = len(reads)
    return (
        f"{max(0.0, 1 - shown / took):.0%} of transfers hidden;"
        f" {sum(reads) / steps:,.0f} layers per step, {decimal_bytes(sum(size) / steps)} at"
        f" {sum(size) / took / 1e9:.2f} GB/s, {format_seconds(shown)} waited"
    )


def _peak_words(run: RunFolder, peak: float) -> str:
    """Words: '557.8 MiB; whole process (planned: 546.5 MiB to 1.3 GiB)'; the larger has compiled code."""
    plan = run.plan or {}
    if "total" not in plan or "hardware" not in plan:
        return format_bytes(peak)
    kind = plan["hardware"].get("kind", "")
    planned = planned_words(plan["total"] + plan["hardware"].get("process", 0), kind)
    return f"{format_bytes(peak)}; {memory_of(kind)} (planned: {planned})"


def _processes_words(run: RunFolder) -> str:
    """'2', or '2, then 4' if it resumed with another number; "" for one process."""
    counts = [event.get("processes", 1) for event in of_kind(run.events, StartEvent)]
    each = [str(count) for count, before in zip(counts, [0, *counts], strict=False) if count != before]
    return ", then ".join(each) if max(counts, default=1) > 1 else ""


def memory_of(kind: str) -> str:
    """Scope of a run's memory number on a device of that kind."""
    return "GPU" if kind == "cuda" else "whole process"


def _best_folder(run: RunFolder) -> str:
    """Folder of the best save; "" if it is not written."""
    return next((f"{name}/" for name in ("adapter-best", "model-best") if (run.path / name).is_dir()), "")


def best_words(run: RunFolder) -> str:
    """'step 60 (0.570), in adapter-best/' if a step before the last was the best; else ""."""
    from unfreeze.report.curves import chosen_by, measure_name  # draws pictures, which this file does not

    folder, (steps, losses) = _best_folder(run), series(run.events, "eval", "loss")
    if folder and (score := chosen_by(run.events)) is not None:
        return f"step {score['step']:,} ({measure_name(score)} {score['value']:.4g}), in {folder}"
    validated = [(loss, step) for step, loss in zip(steps, losses, strict=True) if step > 0]
    if not folder or not validated:
        return ""
    loss, step = min(validated)
    return f"step {step:,} ({-loss if rewarded(run) else loss:.3f}), in {folder}"


def rewarded(run: RunFolder) -> bool:
    """True if held-out prompts have rewards: the loss of a validation is minus their mean."""
    return bool(series(run.events, "eval", "reward")[0])


def early_words(early: EarlyStopEvent, best: str = "") -> str:
    """'Stopped at step 25: 3 validations without a lower held-out loss. The best one (step 15, …) is in …'.

    best: folder of the best save.
    """
    stopped = (
        f"Stopped at step {early['step']:,}: {early.get('validations', 0):,} validations without a lower"
        " held-out loss."
    )
    if "best_step" not in early:
        return stopped
    loss = f", loss {early['best_loss']:.3f}" if "best_loss" in early else ""
    if by := early.get("best_by"):
        stopped = stopped.replace("validations without a lower held-out loss", f"scores of {by}, none better")
        loss = ""
    where = f"is in {best}" if best else "is kept"
    return f"{stopped} The best one (step {early['best_step']:,}{loss}) {where}."


def load_words(load: LoadEvent) -> str:
    """Words on bytes read, speed, size if unpacked, and tensors that lost precision.

    '0.92 GB at 2.10 GB/s (3.25 GB unpacked)'
    """
    size, seconds = load.get("bytes", 0), load.get("seconds", 0.0)
    words = decimal_bytes(size)
    if seconds:
        words += f" at {decimal_bytes(size / seconds)}/s"
    if (expanded := load.get("expanded_bytes", 0)) > size:
        words += f" ({decimal_bytes(expanded)} unpacked)"
    if rounded := load.get("rounded", 0):
        tensors = "tensor" if rounded == 1 else "tensors"
        words += f"; {rounded:,} {tensors} rounded to the dtype of the computation"
    return words


def decimal_bytes(num_bytes: float) -> str:
    """Format bytes of files and transfers in decimal units, as disks and links are sold.

    '4.1 MB', '0.92 GB', and '12.5 kB' for what would be 0.0 MB. For memory use core.units.format_bytes.
    """
    if 0 < num_bytes < 5e4:
        return f"{num_bytes / 1e3:.1f} kB"
    return f"{num_bytes / 1e9:,.2f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.1f} MB"


def result_words(run: RunFolder) -> str:
    """Phrase on the state of the run."""
    of = f" of {run.steps_planned:,}" if run.steps_planned else ""
    if run.state == "done":
        early = last(run.events, EarlyStopEvent)
        return f"finished, stopped early after step {run.steps_done:,}{of}" if early else "finished"
    if run.state == "interrupted":
        return f"interrupted after step {run.steps_done:,}{of}"
    return f"unfinished: {run.steps_done:,}{of} steps so far"


def first_event_time(run: RunFolder) -> str:
    """Time of the first event, in UTC, or ""."""
    time = run.events[0].get("time", -1.0) if run.events else -1.0
    if not 0 <= time < 2**35:  # up to the year 3058; a damaged time has no date
        return ""
    return datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%d %H:%M UTC")


def expert_balance(run: RunFolder) -> list[tuple[str, int, float, int]]:
    """Load balance of each mixture-of-experts layer; empty for a dense model.

    (layer, tokens routed, busiest expert over the mean, experts without a token)
    """
    rows = []
    for layer, counts in expert_load(run.events).items():
        total = sum(counts)
        rows.append(
            (
                layer,
                total,
                max(counts) * len(counts) / total if total else 0.0,
                sum(1 for count in counts if count == 0),
            )
        )
    return rows
