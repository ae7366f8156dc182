"""Before any test: Triton's interpreter where there is no GPU (it has to be asked for before anything imports
Triton), no timed tests, and an event that does not conform is raised where it is emitted. A failed one is
named at once (tests/failures.py); after the last one: the slowest (tests/durations.py)."""

import gc
import importlib.util
import os
from pathlib import Path

import unfreeze  # noqa: F401 - before torch, which reads what UNFREEZE_CPU_CLASS sets

# isort: split
import pytest
import torch
from hypothesis import HealthCheck, settings

from unfreeze.core.events import EventLog

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A busy machine is slow at times; that is no fault of what is tested. Speed belongs in benchmarks.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

# Which kernels run must not hang on how fast this machine is today: records decide, nothing is timed.
os.environ.setdefault("UNFREEZE_KERNELS", "records")

EventLog.strict = True  # a run warns instead (core/events.py); tests/core/test_core.py tries both


def beside(name):
    """tests/NAME.py: `tests` is not a package that pytest could import from here."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / "tests" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


durations = beside("durations")
pytest_terminal_summary = durations.pytest_terminal_summary
pytest_collection_modifyitems = durations.pytest_collection_modifyitems
pytest_sessionfinish = durations.pytest_sessionfinish
pytest_configure = beside("failures").pytest_configure


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_auto_num_workers():
    """Return the processes of `-n auto`: one more than cores, for a fourth of its time a process waits."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores + 1


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Thousands of tests and the libraries they import stay to the end. A search for garbage, which measuring
    and merging begin with, took half a second over them; frozen, none."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_addoption(parser):
    durations.pytest_addoption(parser)
    parser.addoption(
        "--update-said", action="store_true", help="make tests/said/*.txt anew: what the program says"
    )
    parser.addoption(
        "--update-plans", action="store_true", help="make tests/plans.json anew: what is planned where"
    )
    parser.addoption(
        "--update-templates",
        action="store_true",
        help="make tests/templates.json anew: what conversations become under chat templates",
    )
