"""Read events.jsonl, and select values for tables, pictures and the summary.

The format is that of core/events.py: one JSON object per line, each with `kind` and `step`. A killed run can
leave a partial last line, which is ignored. A broken line elsewhere, or a value of another type than in
core/schema.py, is an error that names the line. Fields can be missing, because older versions wrote fewer.
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
from unfreeze.core.units import format_count, plural

COLUMNS = 80  # terminal width

LEAKED = "validation documents are also in the training data"  # end of the warning "3 of 20 …" in job/data.py
AT_LEAST = "at least, of the rows read so far: "  # start of that warning if rows are read in windows
FEW_STEPS = "few steps: "  # start of the warning in job/data.py, which ends with ": " and the remedy
TEACH_LITTLE = "too few to learn much"  # part of that warning in runs of earlier versions
ENOUGH_STEPS = 40
"""A run with fewer steps by epochs gets a warning, and does not count as "learnt" by its training loss alone.
`unfreeze init` proposes enough epochs for this many. On 30 rows with sft's defaults, tiny-k2's loss falls
from 5.25 to 3.70, 2.47 and 0.59 in 20, 40 and 80 steps."""

Value = TypeVar("Value")
E = TypeVar("E", bound=Event)


def read_events(path: Path | str) -> list[Event]:
    """Read all events of a run, in file order.

    Raises DataError for a missing file, or a damaged line other than a partial last one.
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
            raise DataError(f"there is no run {folder}{looked_in(str(folder))}{there}", next=here).meant(
                str(folder), str(folder.parent / near[0]) if near else ""
            )
        raise DataError(f"{folder} is not a run: {path.name} is missing", next=here)
    lines = path.read_bytes().split(b"\n")
    # each event is written with its newline at once, so only text after the last newline can be partial
    *whole, rest = lines
    events = [_parse(line, path, number) for number, line in enumerate(whole, start=1) if line.strip()]
    if rest.strip():
        # the partial line of a killed run; core.events.truncate_after drops it on resume
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
    """Raise DataError that names the first field whose value has not the schema's type."""
    if faults := damage(event):
        raise DataError(f"{where}: {faults[0].words}", next="restore the file, or correct that field")


def of_kind(events: Sequence[Event], kind: type[E]) -> list[E]:
    """The events of one kind, such as TrainEvent, in order."""
    name = event_kind(kind)
    return [cast(E, event) for event in events if event["kind"] == name]


def last(events: Sequence[Event], kind: type[E]) -> E | None:
    """The latest event of one kind, or None."""
    name = event_kind(kind)
    return next((cast(E, event) for event in reversed(events) if event["kind"] == name), None)


def number(value: object) -> float | None:
    """`value` as a float that can be drawn; None if it is not a number, not finite, or beyond LARGEST.

    For untyped values: config values and further fields of an event.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if abs(value) <= LARGEST else None  # false for NaN
    except OverflowError:  # a whole number of more than 308 digits
        return None


def numbers(event: Event) -> dict[str, float]:
    """Every number in an event, except step and time."""
    return {
        name: size
        for name, value in event.items()
        if name not in ("step", "time") and (size := number(value)) is not None
    }


def unreached(evals: Sequence[Event]) -> set[str]:
    """Return the shares of held-out answers with a reward of 1 or more, if no evaluation has such an answer.

    A reward that cannot reach 1 says nothing by them.
    """
    solved = [number(event.get("solved")) for event in evals]
    if not any(each is not None for each in solved) or any(solved):
        return set()
    return {"solved", *(f"pass_{k}{end}" for k in (1, 2, 4) for end in ("", "_low", "_high"))}


def series(events: Sequence[Event], kind: str, field: str) -> tuple[list[int], list[float]]:
    """(steps, values) of one field, without events in which it is missing or not finite."""
    steps, values = [], []
    for event in events:
        value = number(event.get(field)) if event["kind"] == kind else None
        if value is not None:
            steps.append(event["step"])
            values.append(value)
    return steps, values


def expert_load(events: Sequence[Event]) -> dict[str, list[int]]:
    """Tokens per expert summed over all train events: layer -> counts, layers in numeric order.

    Empty for a dense model. Raises DataError if a layer's number of experts changes.
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
    """(layer, value) pairs in numeric order: layer 10 after layer 2, pass 2.1 after layer 2."""

    def order(item: tuple[str, Value]) -> tuple[bool, list[int], str]:
        numbers = item[0].split(".")
        numeric = all(number.isdecimal() for number in numbers)
        return (not numeric, [int(number) for number in numbers] if numeric else [], item[0])

    return sorted(values.items(), key=order)


def evals_of(events: Sequence[Event]) -> list[EvalEvent]:
    """Eval events on the same rows as the last one; losses on other rows are not comparable.

    Events of earlier versions have no fingerprint; different counts then mean different rows. With one,
    tokens may differ: those of sampled answers.
    """
    evals, known = of_kind(events, EvalEvent), dict[str, object]()
    for place in reversed(range(len(evals))):
        event = evals[place]
        names = ("fingerprint", "rows") if "fingerprint" in event else ("rows", "tokens")
        about = {name: event.get(name) for name in names if name in event}
        if any(known.get(name, value) != value for name, value in about.items()):
            return evals[place + 1 :]
        known |= about
    return evals


def sample_pairs(events: Sequence[Event]) -> list[tuple[str, str | None, str | None]]:
    """(prompt, text before, text after) per prompt, in order; None for a missing side.

    A later sample replaces an earlier one. Samples are matched by `index`, or by the prompt's text if they
    have none; two rows can have the same prompt.
    """
    pairs: dict[int | str, dict[str, str]] = {}
    for event in of_kind(events, SampleEvent):
        prompt = event.get("prompt", "")
        pair = pairs.setdefault(event.get("index", prompt), {"prompt": prompt})
        pair[event.get("when", "")] = event.get("text", "")
    return [(pair["prompt"], pair.get("before"), pair.get("after")) for pair in pairs.values()]


def data_lines(events: Sequence[Event], listed: int = 3) -> list[str]:
    """Lines on the data: the summary, then the first `listed` dropped or bad rows with the reason.

    Empty without a data event.
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
    """Rows in the files divided by rows in the statistics; 1 if every row is encoded."""
    return account.get("rows_in_files", 0) / max(account.get("rows", 0), 1) or 1.0


def data_line(account: DataEvent) -> str:
    """One terminal line on the data.

    It has the amount, the supervised share, and counts of rows lost that are not zero.
    """
    if "tokens" not in account:
        return account.get("summary", "")
    lost = {name: account.get(name, 0) for name in ("truncated", "dropped", "bad", "duplicates")}
    tokens, room = account["tokens"], account.get("room", 0)
    taught = f"{100 * account.get('supervised_fraction', 0):.0f} % supervised"
    if room:
        tokens, taught = tokens - room * account.get("examples", 0), f"room for {room:,} more in each"
    rows = plural(account.get("rows", 0), "row")
    if "rows_in_files" in account:
        rows += f" of {account['rows_in_files']:,}, more when needed"
    parts = f"{rows}, {format_count(tokens)} tokens, {taught}"
    losses = ", ".join(f"{count:,} {name}" for name, count in lost.items() if count)
    return f"{parts}; {losses}" if losses else parts


def folded(text: str, first: str = "", rest: str = "  ") -> list[str]:
    """Wrap text to COLUMNS; longer words stay whole.

    first, rest: indents of the first line and of the others.
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

    Includes events of kind "warning" (field message) and other events with a `warning` field.
    """
    messages = []
    for event in events:
        text = event.get("message") if event["kind"] == "warning" else event.get("warning")
        if text:
            messages.append((event["step"], text))
    return messages
