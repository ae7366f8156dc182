"""After a run of tests: the slowest, with their change since tests/durations.json.

A plugin of pytest, which conftest.py loads. --update-durations writes the file anew, of a whole run.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

import pytest

NOTED = 0.5  # seconds; what is faster is neither kept nor shown
SHOWN = 10


def pytest_addoption(parser):
    parser.addoption(
        "--update-durations", action="store_true", help="write tests/durations.json anew, of a whole run"
    )


def seconds_by_test(reports: Iterable[pytest.TestReport]) -> dict[str, float]:
    """A test's set-up, call and end together, of those that took NOTED seconds; slowest first."""
    sums: dict[str, float] = {}
    for report in reports:
        sums[report.nodeid] = sums.get(report.nodeid, 0.0) + getattr(report, "duration", 0.0)
    slow = {name: round(seconds, 1) for name, seconds in sums.items() if seconds >= NOTED}
    return dict(sorted(slow.items(), key=lambda item: (-item[1], item[0])))


def slowest(today: Mapping[str, float], before: Mapping[str, float]) -> list[str]:
    """'  12.3 s    +1.1  tests/…' for each of the SHOWN slowest; `new` where no earlier time is known."""
    rows = list(today.items())[:SHOWN]
    return [
        f"{seconds:6.1f} s  {f'{seconds - before[name]:+.1f}' if name in before else 'new':>6}  {name}"
        for name, seconds in rows
    ]


def pytest_terminal_summary(terminalreporter, config):
    """In the process that prints; with xdist the others report to it."""
    if hasattr(config, "workerinput"):
        return
    file = config.rootpath / "tests" / "durations.json"
    kinds = terminalreporter.stats.values()
    today = seconds_by_test(report for kind in kinds for report in kind if hasattr(report, "when"))
    before = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    if today:
        terminalreporter.section(f"slowest tests, and their change since {file.name}")
        terminalreporter.write_line("\n".join(slowest(today, before)))
    if config.getoption("--update-durations"):
        file.write_text(json.dumps(today, indent=1) + "\n", encoding="utf-8")
