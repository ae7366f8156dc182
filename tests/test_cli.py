"""The command line as scripts see it: exit codes, one line per error, no torch for --help."""

import ast
import importlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from unfreeze import cli
from unfreeze.core.errors import UserError


def test_help_imports_no_torch():
    code = (
        "import sys\nfrom unfreeze import cli\nassert cli.main(['--help']) == 0\nassert 'torch' not in"
        " sys.modules, 'torch was imported'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in cli.COMMANDS)


ROOT = Path(__file__).resolve().parents[1]


def forgotten(files: dict[str, str], tests: set[str]) -> list[str]:
    """What the command files (name -> source) lack in cli.py and tests/commands.

    Each with how to mend it. A file without `main` is a part of another command; one in a command's PARTS is a
    subcommand of it.
    """
    modules = [command.module for command in cli.COMMANDS.values()]
    of_parts = [list(getattr(importlib.import_module(name), "PARTS", {}).values()) for name in modules]
    named = {name.rpartition(".")[2] for name in (*modules, *(part.__name__ for p in of_parts for part in p))}
    mains = [
        name
        for name, source in files.items()
        if any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in ast.parse(source).body)
    ]
    bad = [
        f"commands/{name}.py has a main and no line in TRAIN, LOOK, SHIP or DEV of cli.py"
        for name in mains
        if name not in named
    ]
    bad += [
        f"tests/commands/test_{name}.py is missing (or test_{name}_command.py)"
        for name in mains
        if not {f"test_{name}.py", f"test_{name}_command.py"} & tests
    ]
    return bad


FILES = {
    path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "src/unfreeze/commands").glob("*.py")
}
TESTS = {path.name for path in (ROOT / "tests/commands").glob("test_*.py")}


def test_every_command_has_its_line_and_its_test():
    bad = forgotten(FILES, TESTS)
    assert not bad, "\n".join(bad)


def test_control_arm_what_a_new_command_forgets_is_seen():
    new = {"made_up": "def main(arguments, common):\n    return {}\n", "part": "def help_(): ..."}
    assert [line.split()[0] for line in forgotten(new, set())] == [
        "commands/made_up.py",
        "tests/commands/test_made_up.py",
    ]


def test_an_unknown_command_names_the_nearest_and_ends_with_2(capsys):
    assert cli.main(["inspekt"]) == 2
    error = capsys.readouterr().err
    assert "nearest: 'inspect'" in error and "Traceback" not in error


@pytest.mark.parametrize(
    ("word", "near"),
    [("sfft", "sft"), ("stf", "sft"), ("chta", "chat"), ("repot", "report"), ("pretrian", "pretrain")]
    + [(far, "") for far in ("start", "show", "reset", "hello", "x", "weights", "fit")],
)
def test_a_command_is_suggested_only_where_it_is_near(word, near, capsys):
    assert cli.main([word]) == 2
    assert (f"{word!r}; nearest: {near!r}\n" if near else f"{word!r}\n") in capsys.readouterr().err


def test_no_command_prints_the_usage_and_ends_with_2(capsys):
    assert cli.main([]) == 2
    assert "unfreeze COMMAND --help" in capsys.readouterr().out


@pytest.fixture
def planted(monkeypatch):
    """A command whose main raises or returns what the test wants."""

    def plant(outcome):
        def main(arguments, common):
            if isinstance(outcome, BaseException):
                raise outcome
            return outcome

        monkeypatch.setitem(cli.COMMANDS, "planted", cli.Command("tests.planted", "planted", ""))
        monkeypatch.setattr(
            cli.importlib, "import_module", lambda name: type("Module", (), {"main": staticmethod(main)})
        )

    return plant


def test_a_user_error_is_one_message_with_the_next_command_and_exit_code_2(planted, capsys):
    planted(UserError("rank 0 is below 1", next="--lora.rank 8"))
    assert cli.main(["planted"]) == 2
    assert capsys.readouterr().err == "UserError: rank 0 is below 1\n  next: --lora.rank 8\n"


def test_a_fault_is_exit_code_1_and_says_where(planted, capsys):
    planted(ZeroDivisionError("division by zero"))
    assert cli.main(["planted"]) == 1
    error = capsys.readouterr().err
    assert "fault: ZeroDivisionError" in error and "Traceback" not in error


def test_traceback_shows_it(planted, capsys):
    planted(ZeroDivisionError("division by zero"))
    assert cli.main(["planted", "--traceback"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_json_is_the_last_line_of_stdout(planted, capsys):
    planted({"run": "runs/x", "steps": 3})
    assert cli.main(["planted", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"run": "runs/x", "steps": 3}


@pytest.mark.parametrize("encoding", ["cp1252", "ascii"])
def test_a_terminal_that_knows_no_arrow_is_no_fault(encoding, planted, monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding))

    class Says(dict):
        def get(self, *_):
            print("loss 5 → 1")
            return 0

    planted(Says())
    assert cli.main(["planted"]) == 0
    sys.stdout.flush()
    assert written.getvalue() == b"loss 5 ? 1\n"


def test_ctrl_c_while_it_is_still_imported_is_no_traceback():
    """At the import of cli, which the installed command and `python -m unfreeze` make first."""
    code = (
        "import sys, signal, importlib.abc\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background job ignores it
        "class Slow(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'unfreeze.cli': signal.raise_signal(signal.SIGINT)\n"
        "sys.meta_path.insert(0, Slow())\n"
        "from unfreeze.__main__ import main\n"
        "sys.exit(main())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "interrupted: give the same command again\n")
    assert 'unfreeze = "unfreeze.__main__:main"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_ctrl_c_inside_a_text_that_is_run_ends_with_130_too(tmp_path: Path):
    """As in the making of a dataclass, at an import: Python would end a -m process by the signal itself."""
    lines = [
        "import signal, sys",
        "from unfreeze import cli",
        "from unfreeze.__main__ import main",
        "signal.signal(signal.SIGINT, signal.default_int_handler)",
        "def interrupted():",
        "    try: exec('signal.raise_signal(signal.SIGINT)')",
        "    except KeyboardInterrupt: return 130",
        "cli.main = interrupted",
        "sys.exit(main())",
    ]
    (tmp_path / "stopped.py").write_text("\n".join(lines))
    path = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    done = subprocess.run([sys.executable, "-m", "stopped"], env=path, cwd=tmp_path, check=False)
    assert done.returncode == 130


@pytest.mark.parametrize("command", list(cli.COMMANDS))
def test_every_command_has_help(command, capsys):
    try:
        code = cli.main([command, "--help"])
    except SystemExit as ended:
        code = ended.code
    page = capsys.readouterr().out
    assert code == 0
    assert f"unfreeze {command}" in page or f"unfreeze dev {command}" in page
    assert ("--plan" in page) == (command in cli.TRAIN)  # it is a run that shows its plan


@pytest.mark.parametrize("ignored, code", [(True, 0), (False, -2)])
def test_ctrl_c_after_all_is_done_leaves_the_exit_code(ignored: bool, code: int):
    """Raised while the interpreter ends. Control arm: with the usual handler the code is another."""
    lines = [
        "import atexit, os, signal, sys",
        "from unfreeze import cli",
        "from unfreeze.__main__ import main",
        "atexit.register(lambda: signal.raise_signal(signal.SIGINT))",
        "cli.main = lambda: 0",
        "code = main()",
        *([] if ignored else ["signal.signal(signal.SIGINT, signal.SIG_DFL)"]),
        "sys.exit(code)",
    ]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=False
    )
    assert done.returncode == code and "Traceback" not in done.stderr
