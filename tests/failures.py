"""A test that fails is named when it fails, with the last line of why: of a run that is stopped, by a limit of time or
by hand, pytest prints no summary, and an F among dots names nothing.

A plugin of pytest, which conftest.py loads.
"""

from __future__ import annotations

import pytest


class NamedAtOnce:
    def __init__(self, reporter):
        self.reporter = reporter

    @pytest.hookimpl(trylast=True)  # after the F
    def pytest_runtest_logreport(self, report):
        if report.failed:
            why = report.longreprtext.strip().rpartition("\n")[2]
            self.reporter.write(f"\nFAILED {report.nodeid} ({report.when}): {why}\n", flush=True)


@pytest.hookimpl(trylast=True)  # when what prints is there
def pytest_configure(config):
    """In the process that prints; with xdist the others report to it."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(NamedAtOnce(reporter), "named at once")
