"""Reading events.jsonl back, and the few selectors that tables, pictures and the summary are made of.

The format is core/events.py's: one JSON object a line, each with `kind` and `step`. A killed run may leave
half a line at the end (a write cut before its newline); that one is left out. A broken line anywhere else, or
a value of another type than core/schema.py says, is damage and is named with its line number. A field may be
missing: an older version wrote fewer.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar, cast

from unfreeze.core.conform import damage
from unfreeze.core.errors import DataError, closest, looked_in
from unfreeze.core.schema import LARGEST, DataEvent, EvalEvent, Event, SampleEvent, TrainEvent, event_kind
from unfreeze.core.units import format_count

COLUMNS = 80  # of a terminal

LEAKED = "validation documents are also in the training data"  # "3 of 20 …": job/data.py warns so
AT_LEAST = "at least, of the rows read so far: "  # before it, where the data come in windows
TEACH_LITTLE = "too few to learn much"  # the warning of a run with too few steps, job/data.py
ENOUGH_STEPS = 40
"""A run of fewer is warned about where epochs gave them, and has not "learnt" where only its training loss
says so; `unfreeze init` proposes epochs until there are as many. Of 30 rows tiny-k2 learns at the defaults of
sft from a loss of 5.25 to 3.70, 2.47 and 0.59 in 20, 40 and 80 steps."""

Value = TypeVar("Value")
E = TypeVar("E", bound=Event)


def read_events(path: Path | str) -> list[Event]:
    """All events of a run, in the order of the file.

    Raises DataError for a missing file or a damaged line that is not the cut last one.
    """
    path = Path(path)
    if not path.is_file():
        folder = path.parent
        runs = sorted(run.parent for run in folder.parent.glob("*/events.jsonl"))
        near = closest(folder.name, [run.name for run in runs])
        here = f"the nearest: {', '.join(str(folder.parent / name) for name in near)}"
        here = here if near else "give the folder that --out named"
        if not folder.is_dir():
            there = f"; {len(runs):,} in {folder.parent}" if runs else ""
            raise DataError(f"there is no run {folder}{looked_in(str(folder))}{there}", next=here)
        raise DataError(f"{folder} is not a run: {path.name} is missing", next=here)
    lines = path.read_bytes().split(b"\n")
    # Every event is written with its newline in one flush, so only what follows the last newline can be a cut
    # write.
    *whole, rest = lines
    events = [_parse(line, path, number) for number, line in enumerate(whole, start=1) if line.strip()]
    if rest.strip():
        # the half line of a killed run; core.events.truncate_after drops it when the run goes on
        with suppress(DataError):
            events.append(_parse(rest, path, len(lines)))
    return events


def _parse(line: bytes, path: Path, number: int) -> Event:
    try:
        event = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # JSON and Unicode errors are both ValueErrors
        raise DataError(
            f"{path} line {number} is not JSON: {error}", next=f"remove line {number}, or restore the file"
        ) from error
    if (
        not isinstance(event, dict)
        or not isinstance(event.get("kind"), str)
        or not isinstance(event.get("step"), int)
    ):
        raise DataError(
            f"{path} line {number} is not an event: it needs a text field 'kind' and a whole number 'step'"
        )
    refuse_damage(event, f"{path} line {number}")
    return cast(Event, event)


def refuse_damage(event: dict[str, Any], where: str) -> None:
    """Raises DataError that names the first field whose value is not of the schema's type."""
    if found := damage(event):
        raise DataError(f"{where}: {found[0].words}", next="restore the file, or remove what is wrong in it")


def of_kind(events: Sequence[Event], kind: type[E]) -> list[E]:
    """The events of one kind, such as TrainEvent, in order."""
    name = event_kind(kind)
    return [cast(E, event) for event in events if event["kind"] == name]


def last(events: Sequence[Event], kind: type[E]) -> E | None:
    """The latest event of one kind, or None."""
    name = event_kind(kind)
    return next((cast(E, event) for event in reversed(events) if event["kind"] == name), None)


def number(value: object) -> float | None:
    """`value` as a float that can be drawn: None where it is no number, not finite, or beyond LARGEST.

    For values without a type: of a config, and further fields of an event.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if abs(value) <= LARGEST else None  # false for NaN
    except OverflowError:  # a whole number of more than 308 digits
        return None


def numbers(event: Event) -> dict[str, float]:
    """Every number that an event measured: not its step and time."""
    return {
        name: size
        for name, value in event.items()
        if name not in ("step", "time") and (size := number(value)) is not None
    }


def series(events: Sequence[Event], kind: str, field: str) -> tuple[list[int], list[float]]:
    """(steps, values) of one field, leaving out events where it is absent or not finite."""
    steps, values = [], []
    for event in events:
        value = number(event.get(field)) if event["kind"] == kind else None
        if value is not None:
            steps.append(event["step"])
            values.append(value)
    return steps, values


def expert_load(events: Sequence[Event]) -> dict[str, list[int]]:
    """Tokens per expert summed over all train events: layer -> counts, layers in numeric order.

    Empty for a dense model. Raises DataError where a layer has now more experts, now fewer.
    """
    total: dict[str, list[int]] = {}
    for event in of_kind(events, TrainEvent):
        for layer, counts in event.get("expert_load", {}).items():
            so_far = total.setdefault(layer, [0] * len(counts))
            if len(so_far) != len(counts):
                raise DataError(
                    f"expert_load of layer {layer} has {len(counts)} experts at step {event['step']},"
                    f" {len(so_far)} before"
                )
            total[layer] = [a + b for a, b in zip(so_far, counts, strict=True)]
    return dict(by_layer(total))


def by_layer(values: Mapping[str, Value]) -> list[tuple[str, Value]]:
    """(layer, value) in numeric order: layer 10 after layer 2."""
    return sorted(
        values.items(), key=lambda item: (0, int(item[0]), "") if item[0].isdecimal() else (1, 0, item[0])
    )


def evals_of(events: Sequence[Event]) -> list[EvalEvent]:
    """The eval events of the rows that the last one measured: a loss on others is not compared with it.

    An earlier version's have no fingerprint: there other counts tell other rows.
    """
    evals, known = of_kind(events, EvalEvent), dict[str, object]()
    for place in reversed(range(len(evals))):
        event = evals[place]
        about = {name: event.get(name) for name in ("fingerprint", "rows", "tokens") if name in event}
        if any(known.get(name, value) != value for name, value in about.items()):
            return evals[place + 1 :]
        known |= about
    return evals


def sample_pairs(events: Sequence[Event]) -> list[tuple[str, str | None, str | None]]:
    """(prompt, text before, text after) per prompt, in order; None where a side is missing.

    A later sample replaces an earlier.

    Samples belong together by their `index`, or by the prompt's text where they carry none: two rows may ask
    in the same words.
    """
    pairs: dict[int | str, dict[str, str]] = {}
    for event in of_kind(events, SampleEvent):
        prompt = event.get("prompt", "")
        pair = pairs.setdefault(event.get("index", prompt), {"prompt": prompt})
        pair[event.get("when", "")] = event.get("text", "")
    return [(pair["prompt"], pair.get("before"), pair.get("after")) for pair in pairs.values()]


def data_lines(events: Sequence[Event], listed: int = 3) -> list[str]:
    """Put the account of the data into lines; empty without an account.

    Its summary, then the first `listed` rows that were dropped or bad, with the reason.
    """
    account = last(events, DataEvent)
    if account is None:
        return []
    rows = account.get("listed", [])
    lines = [account.get("summary", ""), *(f"left out: {row['reason']}" for row in rows[:listed])]
    more = account.get("dropped", 0) + account.get("bad", 0) - min(listed, len(rows))
    if rows and more > 0:
        lines.append(f"left out: {more:,} more rows; events.jsonl names the first {len(rows)}")
    return lines


def times_larger(account: DataEvent) -> float:
    """How many times as many rows the files have as the account: 1 where every row is encoded."""
    return account.get("rows_in_files", 0) / max(account.get("rows", 0), 1) or 1.0


def data_line(account: DataEvent) -> str:
    """Put the account of the data into one line of a terminal.

    How much, how much of it is taught, and only those losses that are not zero.
    """
    if "tokens" not in account:
        return account.get("summary", "")
    lost = {name: account.get(name, 0) for name in ("truncated", "dropped", "bad", "duplicates")}
    taught = f"{100 * account.get('supervised_fraction', 0):.0f} % taught"
    rows = f"{account.get('rows', 0):,} rows"
    if "rows_in_files" in account:
        rows += f" of {account['rows_in_files']:,}, the others as they are needed"
    parts = f"{rows}, {format_count(account['tokens'])} tokens, {taught}"
    losses = ", ".join(f"{count:,} {name}" for name, count in lost.items() if count)
    return f"{parts}; {losses}" if losses else parts


def folded(text: str, first: str = "", rest: str = "  ") -> list[str]:
    """Text over lines of at most COLUMNS; a longer word stays whole.

    first, rest: what the first line and the others begin with.
    """
    return textwrap.wrap(
        text,
        COLUMNS,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )


def warnings(events: Sequence[Event]) -> list[tuple[int, str]]:
    """List (step, text) of every warning.

    Events of kind "warning" (field message), and every event that carries a `warning` field.
    """
    found = []
    for event in events:
        text = event.get("message") if event["kind"] == "warning" else event.get("warning")
        if text:
            found.append((event["step"], text))
    return found
