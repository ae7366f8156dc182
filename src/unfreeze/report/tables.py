"""The receipt and the plan as tables: cells first, then as a rich table, as plain text, and (in html.py) as an HTML table.

The receipt (DESIGN 1.2) says for each module group what was trained:
groups = {group: {parameters, trained, sites, sites_reached, sites_moved, grad_norm, moved, output_change}}.
exceptions = [{group, sites, count, why}]: matrices that should have learned and did not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from unfreeze.core.units import format_bytes, format_count
from unfreeze.report.events import number

if TYPE_CHECKING:
    from rich.table import Table

Groups = Mapping[str, Mapping[str, Any]]

RECEIPT_HEAD = ("group", "parameters", "trained", "matrices moved", "gradient norm", "moved by", "output change")
ABSENT = "–"


def receipt_rows(groups: Groups) -> list[tuple[str, ...]]:
    """One row of cells per group, in RECEIPT_HEAD's order; a dash where the receipt has no value."""
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


def _matrices(values: Mapping[str, Any]) -> str:
    """Moved of reached: a matrix that no gradient was due to (an expert without tokens) is not counted."""
    moved, reached = number(values.get("sites_moved")), number(values.get("sites_reached"))
    return ABSENT if moved is None or reached is None or not values.get("trained") else f"{moved:,.0f} of {reached:,.0f}"


def _within(values: Mapping[str, Any]) -> str:
    """Marks a change of the output that rounding could make as well."""
    change, rounding = number(values.get("output_change")), number(values.get("rounding"))
    return " (rounding)" if change is not None and rounding is not None and 0 < change <= rounding else ""


def standing_still(groups: Groups) -> list[str]:
    """Groups that were to be trained and did not move, although a gradient was due."""
    due = {group: values for group, values in groups.items() if values.get("trained") and values.get("sites_reached") != 0}
    return [group for group, values in due.items() if not number(values.get("moved"))]


FAULTS = ("no gradient", "not moved")
LISTED = 8


def left_out(exceptions: Sequence[Mapping[str, Any]]) -> list[str]:
    """The exceptions that are faults, a line each: "no gradient: 32 matrices, model.layers.1.mlp.experts.0-31.down_proj"; the first LISTED."""
    faults = [entry for entry in exceptions if entry.get("why") in FAULTS]
    lines = [f"{entry['why']}: {entry.get('sites')}" + (f" ({entry['count']:,} matrices)" if entry.get("count", 1) != 1 else "") for entry in faults]
    return [*lines[:LISTED], *([f"and {len(lines) - LISTED:,} more entries: receipt.json"] if len(lines) > LISTED else [])]


def trained_parameters(groups: Groups) -> int:
    """Parameters of all trained groups. `trained` may be a boolean or itself the number of trained parameters."""
    total = 0
    for values in groups.values():
        trained = values.get("trained")
        total += int(number(values.get("parameters") if trained is True else trained) or 0)
    return total


def receipt_verdict(groups: Groups, exceptions: Sequence[Mapping[str, Any]]) -> str:
    """One sentence: did everything that was to learn, learn."""
    still, out = standing_still(groups), left_out(exceptions)
    if still or out:
        return "; ".join([*([f"did not move: {', '.join(still)}"] if still else []), *out])
    count = sum(int(number(values.get("sites_moved")) or 0) for values in groups.values())
    frozen = [group for group, values in groups.items() if not values.get("trained")]
    moved = f"all {count:,} matrices that a gradient came to moved" if count else "every trained group moved"
    return moved + (f"; frozen: {', '.join(frozen)}" if frozen else "")


def receipt_table(groups: Groups) -> Table:
    """The receipt for a terminal. Groups that were asked for and did not move stand in red."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="dim")
    for position, head in enumerate(RECEIPT_HEAD):
        # heads of two words take two lines, so that the whole names of the groups fit 80 columns
        table.add_column(head.replace(" ", "\n"), justify="left" if position == 0 else "right", no_wrap=True)
    still = standing_still(groups)
    for row in receipt_rows(groups):
        table.add_row(*(Text(cell) for cell in row), style="red" if row[0] in still else None)
    return table


def receipt_text(groups: Groups) -> str:
    """The receipt as aligned plain lines."""
    return align([RECEIPT_HEAD, *receipt_rows(groups)])


def plan_lines(plan: Mapping[str, Any] | None) -> list[str]:
    """The plan as lines: its own `lines` where it has them, else one line per entry of `terms` (name -> bytes) and their sum."""
    if not plan:
        return []
    if isinstance(lines := plan.get("lines"), list) and lines:
        return [str(line) for line in lines]
    terms = {str(name): value for name, value in (plan.get("terms") or {}).items() if number(value) is not None}
    if not terms:
        return []
    rows = [(name, format_bytes(value)) for name, value in terms.items()]
    return align([*rows, ("total", format_bytes(sum(terms.values())))]).splitlines()


def align(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells as text: first column to the left, the others to the right, two spaces between."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *cells[1:]]).rstrip())
    return "\n".join(lines)


def _count(value: object) -> str:
    count = number(value)
    return ABSENT if count is None else f"{count:,.0f}"


def _trained(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    count = number(value)
    return ABSENT if count is None else format_count(count)


def _small(value: object) -> str:
    """Three significant figures: gradient norms and movements span many orders of magnitude."""
    size = number(value)
    return ABSENT if size is None else f"{size:.3g}"
