"""docs/why/trust.md holds what it says: a line per row of the drill, guards that can be imported, tests and
control arms that are there."""

import ast
import re
from functools import reduce
from importlib import import_module
from pathlib import Path

from unfreeze.drill import faults
from unfreeze.drill.fault import ROWS

TESTS = Path(__file__).resolve().parents[1]
PAGE = (TESTS.parent / "docs" / "why" / "trust.md").read_text(encoding="utf-8")
LINE = re.compile(r"^\| ([LNMRG]\d) \| (.+?) \| `([\w.]+):([\w.]+)` \| `(.+?)` \| `(.+?)` \|$", re.MULTILINE)


def absent(page: str) -> list[str]:
    """Test ids (file::function, below tests/) that the page names and that are not there."""
    missing = []
    for file, name in re.findall(r"`([\w/]+\.py)::(\w+)`", page):
        path = TESTS / file
        tree = ast.parse(path.read_text(encoding="utf-8")) if path.is_file() else ast.Module([], [])
        if name not in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}:
            missing.append(f"{file}::{name}")
    return missing


def unplaced(page: str) -> list[str]:
    """Guards (module:name below unfreeze) that cannot be imported."""
    missing = []
    for _, _, module, name, _, _ in LINE.findall(page):
        try:
            reduce(getattr, name.split("."), import_module(f"unfreeze.{module}"))
        except (ImportError, AttributeError):
            missing.append(f"{module}:{name}")
    return missing


def test_every_row_has_a_line_with_guard_test_and_control_arm():
    assert tuple(line[0] for line in LINE.findall(PAGE)) == ROWS
    assert {fault.row for fault in faults()} == set(ROWS)


def test_every_test_and_guard_it_names_is_there():
    assert absent(PAGE) == [] and unplaced(PAGE) == []
    assert len(re.findall(r"\.py::", PAGE)) == 2 * len(ROWS)


def test_control_arm_a_name_that_is_gone_is_seen():
    assert absent(PAGE.replace("test_peak_host_memory", "test_gone")) == ["parallel/test_place.py::test_gone"]
    assert absent("`nowhere/test_x.py::test_y`") == ["nowhere/test_x.py::test_y"]
    assert unplaced(PAGE.replace("check_coverage`", "check_gone`")) == ["parallel.placement.place:check_gone"]
