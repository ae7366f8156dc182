"""Find the source checkout and the commit of this code.

Imports nothing of this package: setup.py runs this file before installation.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

HERE = Path(__file__).resolve()
RECORDED = "commit.txt"
"""File beside this one with the commit. setup.py writes it for wheels and sdists, `git archive` for tarballs
(.gitattributes)."""


def checkout() -> Path | None:
    """Folder of the source checkout that this package runs from; None if it is installed."""
    root = HERE.parents[3]
    return root if (root / "benchmarks").is_dir() and (root / "pyproject.toml").is_file() else None


def commit() -> str | None:
    """Commit of the checkout, else the recorded one; None if neither is known.

    "-dirty" is appended if tracked files other than benchmark results and docs differ from it.
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
    """Commit written by a build or `git archive`; None in a checkout, where the file is a placeholder."""
    try:
        text = file.read_text(encoding="utf-8").strip()
    except OSError:
        return None
    match = re.fullmatch(r"([0-9a-f]{12})[0-9a-f]*(-dirty)?", text)
    return match[1] + (match[2] or "") if match else None
