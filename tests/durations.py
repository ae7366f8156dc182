"""Before a run of tests in several processes: files in the order of their seconds in tests/durations.json, longest
first, so that none is left with a long one at the end. After it: the slowest, with their change since, and what takes
longer than a test of the suite may.

A plugin of pytest, which conftest.py loads. --update-durations writes the file anew, of a whole run; it fails where a
test takes longer than LIMIT.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

import pytest

NOTED = 0.5  # seconds; what is faster is neither kept nor shown
SHOWN = 10
LIMIT = 20.0  # seconds; what takes longer is marked nightly and has a small twin in the suite


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


def longest_first(files: Sequence[str], before: Mapping[str, float]) -> list[int]:
    """The order of tests, given the file of each: by the seconds of their files, and as they were within one."""
    sums: dict[str, float] = {}
    for file in files:  # a fast test takes 10 ms
        sums[file] = sums.get(file, 0.0) + 0.01
    for name, seconds in before.items():
        if (file := name.partition("::")[0]) in sums:
            sums[file] += seconds
    ranks = {file: rank for rank, file in enumerate(sorted(sums, key=lambda file: -sums[file]))}
    return sorted(range(len(files)), key=lambda i: ranks[files[i]])


def over_the_limit(today: Mapping[str, float]) -> list[str]:
    return [
        f"{seconds:.0f} s is more than the {LIMIT:.0f} s of a test of the suite: {name}; next: mark it nightly, and"
        " leave a small twin here"
        for name, seconds in today.items()
        if seconds > LIMIT
    ]


def kept(config: pytest.Config) -> dict[str, float]:
    file = config.rootpath / "tests" / "durations.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


@pytest.hookimpl(trylast=True)  # of what is left when marks have been looked at
def pytest_collection_modifyitems(config, items):
    if hasattr(config, "workerinput"):
        order = longest_first([item.nodeid.partition("::")[0] for item in items], kept(config))
        items[:] = [items[i] for i in order]


def pytest_sessionfinish(session):
    """Before xdist's processes are gone the times are known: they came as reports."""
    config = session.config
    if config.getoption("--update-durations") and not hasattr(config, "workerinput"):
        reporter = config.pluginmanager.get_plugin("terminalreporter")
        if over_the_limit(seconds_by_test(timed(reporter))):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def timed(terminalreporter) -> Iterable[pytest.TestReport]:
    kinds = terminalreporter.stats.values()
    return [report for kind in kinds for report in kind if hasattr(report, "when")]


def pytest_terminal_summary(terminalreporter, config):
    """In the process that prints; with xdist the others report to it."""
    if hasattr(config, "workerinput"):
        return
    file = config.rootpath / "tests" / "durations.json"
    today, before = seconds_by_test(timed(terminalreporter)), kept(config)
    if today:
        terminalreporter.section(f"slowest tests, and their change since {file.name}")
        terminalreporter.write_line("\n".join([*slowest(today, before), *over_the_limit(today)]))
    if config.getoption("--update-durations"):
        file.write_text(json.dumps(today, indent=1) + "\n", encoding="utf-8")
