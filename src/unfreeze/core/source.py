"""Which code this is: its checkout, and its commit.

Without imports of this package: setup.py runs this file before anything is installed.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

HERE = Path(__file__).resolve()
RECORDED = "commit.txt"
"""Beside this file. setup.py writes the commit there for a wheel and an sdist, `git archive` for a tarball
(.gitattributes)."""


def checkout() -> Path | None:
    """The folder of the source checkout this package is run from; None where it is installed."""
    root = HERE.parents[3]
    return root if (root / "benchmarks").is_dir() and (root / "pyproject.toml").is_file() else None


def commit() -> str | None:
    """The checkout's commit, else the recorded one; None where neither is known.

    With -dirty where tracked files other than rows and docs differ from it.
    """
    root = checkout()
    if root is None or not (root / ".git").exists():  # without its own .git, git would name a parent's commit
        return recorded(HERE.with_name(RECORDED))
    changed = ("status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results", ":!docs")
    try:
        head, state = (
            subprocess.run(
                ["git", "-C", str(root), *words], capture_output=True, text=True, check=False, timeout=20
            ).stdout.strip()
            for words in (("rev-parse", "--short=12", "HEAD"), changed)
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return (head + "-dirty" * bool(state)) or None


def recorded(file: Path) -> str | None:
    """The commit that a build or `git archive` wrote there; None in a checkout, where it is a placeholder."""
    try:
        text = file.read_text(encoding="utf-8").strip()
    except OSError:
        return None
    match = re.fullmatch(r"([0-9a-f]{12})[0-9a-f]*(-dirty)?", text)
    return match[1] + (match[2] or "") if match else None
