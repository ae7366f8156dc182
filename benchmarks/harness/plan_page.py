"""docs/plan_checked.md: the runs of `unfreeze dev bench plan` as a table, planned beside measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness.report import markdown
from benchmarks.harness.rows import Stamp
from unfreeze.core.units import format_bytes

MEMORY, SECONDS = 0.10, 0.25
"""How far planned and measured may be apart."""
HEAD = [
    "run",
    "planned",
    "alive at once",
    "planned / measured",
    "peak of the process",
    "of it beside the plan",
    "planned s",
    "measured s",
    "planned / measured",
]


def cells(row: Mapping[str, Any]) -> list[str]:
    """A row of the table; what is beyond the limits is marked."""
    memory, seconds = ratios(row)
    return [
        row["name"],
        format_bytes(row["planned_bytes"]),
        format_bytes(row["measured_bytes"]),
        marked(memory, MEMORY),
        format_bytes(row["peak_bytes"]),
        format_bytes(row["beside_bytes"]),
        "–" if row["planned_seconds"] is None else f"{row['planned_seconds']:.2f}",
        f"{row['measured_seconds']:.2f}",
        "–" if seconds is None else marked(seconds, SECONDS),
    ]


def ratios(row: Mapping[str, Any]) -> tuple[float, float | None]:
    """Planned over measured, of bytes and of seconds."""
    memory = row["planned_bytes"] / row["measured_bytes"]
    stated = row["planned_seconds"]
    return memory, None if stated is None else stated / row["measured_seconds"]


def beyond(ratio: float, limit: float) -> bool:
    """Whether planned and measured are further apart than `limit` of the measured."""
    return abs(ratio - 1) > limit


def marked(ratio: float, limit: float) -> str:
    return f"**{ratio:.2f}**" if beyond(ratio, limit) else f"{ratio:.2f}"


def page(stamp: Stamp, rows: Sequence[Mapping[str, Any]]) -> str:
    """docs/plan_checked.md."""
    found = [ratios(row) for row in rows]
    outside = sum(beyond(memory, MEMORY) for memory, _ in found)
    timed = [seconds for _, seconds in found if seconds is not None]
    slow = sum(beyond(seconds, SECONDS) for seconds in timed)
    machine, rates = stamp.machine, next((row["rates"] for row in rows if row["rates"]), "none")
    lines = [
        "# The plan, checked",
        f"`{stamp.command}` on {machine.name}, {machine.threads} of {machine.cores} cores, {stamp.run[:10]}.",
        NOTES.strip(),
        f"Memory: {len(rows) - outside} of {len(rows)} within {MEMORY:.0%}. Seconds:"
        f" {len(timed) - slow} of {len(timed)} within {SECONDS:.0%}; rates {rates}.",
        markdown(HEAD, [cells(row) for row in rows]),
        REASONS.strip(),
    ]
    return "\n\n".join(lines) + "\n"


NOTES = """
A run is its model, what trains, dtype, documents x length and what is recomputed; bold is beyond the limits
(10 % of memory, 25 % of seconds). Models have random weights.

- Alive at once: peak of the process while the C library gives every freed block back, less what the process
  had before the model was built and what it keeps when the model is gone. The plan's terms add up to it.
- Peak of the process: as a run is. Beside the plan and the process as it began there is code that numba and
  oneDNN compile, and heap that the C library keeps to use again: `unfreeze doctor` calls it 0.3 to 0.8 GiB.
- Seconds: CPU time of the median step on one core, which other processes of the machine disturb least.
  Planned by the closed formula.
- Of several processes, each with its own documents, the bytes and seconds are the first one's.
"""
REASONS = """
Where seconds are missing, no rate was measured: int8 moments have no record, and tiny-k2 is narrower than
half of the narrowest measured model (its matrices of 64 to 384 numbers reach a fraction of the rate). What is
just outside moves between runs: other processes share the machine's caches and memory.
"""
