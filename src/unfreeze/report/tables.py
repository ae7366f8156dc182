"""The receipt and the plan as tables: cells, then a rich table, plain text, or (html.py) HTML.

The receipt has the training of each module group:
groups = {group: {parameters, trained, sites, sites_reached, sites_moved, grad_norm, moved, output_change}}.
exceptions = [{group, sites, count, why}]: matrices that should have learned but did not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from unfreeze.core.schema import GroupReceipt, LeftOut, PlanEvent
from unfreeze.core.units import format_bytes, format_count

if TYPE_CHECKING:
    from rich.table import Table

Groups = Mapping[str, GroupReceipt]

RECEIPT_HEAD = (
    "group",
    "parameters",
    "trained",
    "matrices moved",
    "gradient norm",
    "moved by",
    "output change",
)
ABSENT = "–"


def receipt_rows(groups: Groups) -> list[tuple[str, ...]]:
    """One row of cells per group, in RECEIPT_HEAD's order; a dash for a missing value."""
    return [
        (
            group,
            _count(values.get("parameters")),
            _trained(values.get("trained")),
            _matrices(values),
            _small(values.get("grad_norm")),
            _small(values.get("moved")),
            _small(values.get("output_change")) + _within(values),
        )
        for group, values in groups.items()
    ]


def _matrices(values: GroupReceipt) -> str:
    """Moved of reached matrices. A matrix without an expected gradient (idle expert) does not count."""
    moved, reached = values.get("sites_moved"), values.get("sites_reached")
    known = moved is not None and reached is not None and values.get("trained")
    return f"{moved:,} of {reached:,}" if known else ABSENT


def _within(values: GroupReceipt) -> str:
    """Mark an output change that rounding alone could make."""
    change, rounding = values.get("output_change") or 0.0, values.get("rounding") or 0.0
    return " (rounding)" if 0 < change <= rounding else ""


def standing_still(groups: Groups) -> list[str]:
    """Trained groups that did not move although they should have had a gradient."""
    due = {
        group: values
        for group, values in groups.items()
        if values.get("trained") and values.get("sites_reached") != 0
    }
    return [group for group, values in due.items() if not values.get("moved")]


FAULTS = ("no gradient", "not moved")
LEFT_OUT_SHOWN = 8


def left_out(exceptions: Sequence[LeftOut]) -> list[str]:
    """One line for each of the first LEFT_OUT_SHOWN exceptions that are faults.

    "no gradient: 32 matrices, model.layers.1.mlp.experts.0-31.down_proj"
    """
    faults = [entry for entry in exceptions if entry.get("why") in FAULTS]
    lines = []
    for entry in faults:
        count = entry.get("count", 1)
        many = f" ({count:,} matrices)" if count != 1 else ""
        lines.append(f"{entry['why']}: {entry['sites']}{many}")
    more = len(lines) - LEFT_OUT_SHOWN
    return lines[:LEFT_OUT_SHOWN] + ([f"and {more:,} more entries: receipt.json"] if more > 0 else [])


def count_trained(groups: Groups) -> int:
    """Number of trained parameters over all groups.

    A group's `trained` is a boolean, or the number of its trained parameters.
    """
    return sum(
        values.get("parameters", 0) if values.get("trained") is True else values.get("trained", 0)
        for values in groups.values()
    )


def receipt_verdict(groups: Groups, exceptions: Sequence[LeftOut]) -> str:
    """One sentence: which requested parts learned and which did not."""
    still, out = standing_still(groups), left_out(exceptions)
    if still or out:
        return "; ".join([*([f"did not move: {', '.join(still)}"] if still else []), *out])
    count = sum(values.get("sites_moved", 0) for values in groups.values())
    frozen = [group for group, values in groups.items() if not values.get("trained")]
    moved = f"all {count:,} matrices that got a gradient moved" if count else "every trained group moved"
    return moved + (f"; frozen: {', '.join(frozen)}" if frozen else "")


def receipt_table(groups: Groups) -> Table:
    """The receipt for a terminal. Requested groups that did not move are red."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="dim")
    for position, head in enumerate(RECEIPT_HEAD):
        # put two-word headings on two lines, so that group names fit into 80 columns
        table.add_column(head.replace(" ", "\n"), justify="left" if position == 0 else "right", no_wrap=True)
    still = standing_still(groups)
    for row in receipt_rows(groups):
        table.add_row(*(Text(cell) for cell in row), style="red" if row[0] in still else None)
    return table


def receipt_text(groups: Groups) -> str:
    """The receipt as aligned plain lines."""
    return align([RECEIPT_HEAD, *receipt_rows(groups)])


def plan_table(plan: PlanEvent | None) -> list[str]:
    """Return the plan as lines.

    These are its own `lines` if present, else one per entry of `terms` (name -> bytes), and their sum.
    """
    if not plan:
        return []
    if lines := plan.get("lines"):
        return lines
    terms = plan.get("terms", {})
    if not terms:
        return []
    rows = [(name, format_bytes(value)) for name, value in terms.items()]
    return align([*rows, ("total", format_bytes(sum(terms.values())))]).splitlines()


def align(rows: Sequence[Sequence[str]]) -> str:
    """Format rows of cells as text: first column left-aligned, others right-aligned, two spaces between."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *cells[1:]]).rstrip())
    return "\n".join(lines)


def _count(value: int | None) -> str:
    return ABSENT if value is None else f"{value:,}"


def _trained(value: int | bool | None) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ABSENT if value is None else format_count(value)


def _small(value: float | None) -> str:
    """Format with three significant digits: gradient norms and movements span many orders of magnitude."""
    return ABSENT if value is None else f"{value:.3g}"
