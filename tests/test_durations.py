"""A run's slowest tests are shown with their change, and kept by --update-durations; with xdist too."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

HERE = Path(__file__).resolve().parent
TEST = (
    "import time, pytest\n@pytest.mark.parametrize('s', [0, 1])\ndef test_it(s):\n    time.sleep(0.6 * s)\n"
)
NAME = "tests/test_it.py::test_it[1]"
BARE = sys.executable, "-m", "pytest", "-q", "-p", "xdist"  # of the plugins that are installed only this one


@pytest.fixture
def durations(request):
    return request.config.pluginmanager.get_plugin(str(HERE.parent / "conftest.py")).durations


def test_set_up_and_call_are_one_time_and_what_is_fast_is_left_out(durations):
    pairs = [("a", 0.2), ("b", 3.0), ("a", 0.4), ("c", 0.4), ("b", 0.04)]
    reports = [SimpleNamespace(nodeid=name, duration=seconds) for name, seconds in pairs]
    assert list(durations.seconds_by_test(reports).items()) == [("b", 3.0), ("a", 0.6)]


def test_the_ten_slowest_are_shown_with_their_change(durations):
    today = {f"t{n}": 20.0 - n for n in range(12)}
    lines = durations.slowest(today, {"t0": 15.0, "t1": 20.5})
    assert [line.split() for line in lines[:3]] == [
        ["20.0", "s", "+5.0", "t0"],
        ["19.0", "s", "-1.5", "t1"],
        ["18.0", "s", "new", "t2"],
    ]
    assert len(lines) == 10


def test_files_come_longest_first_and_tests_as_they_were(durations):
    files = ["a.py", "a.py", "b.py", "c.py", "b.py"]
    before = {"b.py::x": 3.0, "c.py::x": 9.0, "gone.py::x": 99.0}
    assert durations.longest_first(files, before) == [3, 2, 4, 0, 1]


def test_what_takes_longer_than_the_suite_allows_is_named(durations):
    (line,) = durations.over_the_limit({"a": 20.1, "b": 20.0})
    assert line.startswith("20 s is more than the 20 s of a test of the suite: a; next: mark it nightly")


def pytest_of(folder, *flags):
    return subprocess.run(
        [*BARE, "-p", "no:cacheprovider", "-p", "durations", *flags, "tests"],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(HERE), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(("limit", "code"), [("0.5", 1), ("5", 0)])
def test_times_are_not_written_in_peace_where_one_is_over_the_limit(limit, code, tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "pytest.ini").touch()
    (tmp_path / "conftest.py").write_text(f"import durations\ndurations.LIMIT = {limit}\n")
    (tmp_path / "tests" / "test_it.py").write_text(TEST)
    done = pytest_of(tmp_path, "--update-durations")
    assert done.returncode == code and (NAME in (tmp_path / "tests" / "durations.json").read_text())
    assert ("of a test of the suite" in done.stdout) == bool(code), done.stdout
    assert code == 0 or pytest_of(tmp_path).returncode == 0  # said, on a machine that may be busy


def test_a_run_of_several_processes_shows_and_writes_them(tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "pytest.ini").touch()
    (tmp_path / "tests" / "test_it.py").write_text(TEST)
    (tmp_path / "tests" / "durations.json").write_text(json.dumps({NAME: 0.1}))
    flags = "-n 2 --dist loadfile --no-loadscope-reorder --update-durations"
    done = pytest_of(tmp_path, *flags.split())
    assert done.returncode == 0, done.stdout + done.stderr
    kept = json.loads((tmp_path / "tests" / "durations.json").read_text())
    assert list(kept) == [NAME] and kept[NAME] >= 0.6
    assert f"{kept[NAME] - 0.1:+.1f}  {NAME}" in done.stdout and "test_it[0]" not in done.stdout
