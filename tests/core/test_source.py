"""A checkout's commit is git's; code without .git has the one that was recorded, and never a parent's."""

import shutil
import subprocess
from pathlib import Path

import pytest

from unfreeze.core import source

ROOT = Path(__file__).resolve().parents[2]
GIT = ("git", "-c", "user.name=a", "-c", "user.email=a@localhost", "-c", "commit.gpgsign=false")


def git(folder: Path, *words: str) -> str:
    return subprocess.run(
        [*GIT, "-C", str(folder), *words], capture_output=True, text=True, check=True
    ).stdout


@pytest.fixture
def tree(tmp_path, monkeypatch) -> Path:
    """A copy of what the commit is read from, without .git; source.py says it is that tree's."""
    root = tmp_path / "tree"
    core = root / "src" / "unfreeze" / "core"
    core.mkdir(parents=True)
    (root / "benchmarks").mkdir()
    for name in ("pyproject.toml", ".gitattributes"):
        shutil.copy(ROOT / name, root)
    for name in ("source.py", "commit.txt"):
        shutil.copy(ROOT / "src" / "unfreeze" / "core" / name, core)
    monkeypatch.setattr(source, "HERE", core / "source.py")
    return root


def test_a_checkout_names_its_commit_and_says_when_files_differ(tree):
    git(tree, "init", "--quiet")
    git(tree, "add", ".")
    git(tree, "commit", "--quiet", "-m", "x")
    head = git(tree, "rev-parse", "--short=12", "HEAD").strip()
    assert (source.checkout(), source.commit()) == (tree, head)
    (tree / "pyproject.toml").write_text("changed")
    assert source.commit() == f"{head}-dirty"


def test_a_tree_inside_another_repository_does_not_take_that_ones_commit(tree):
    git(tree.parent, "init", "--quiet")
    git(tree.parent, "add", ".")
    git(tree.parent, "commit", "--quiet", "-m", "of another")
    assert source.checkout() == tree and source.commit() is None


def test_a_tarball_of_git_archive_has_its_commit(tree, tmp_path, monkeypatch):
    git(tree, "init", "--quiet")
    git(tree, "add", ".")
    git(tree, "commit", "--quiet", "-m", "x")
    git(tree, "archive", "--output", str(tmp_path / "a.tar"), "HEAD")
    shutil.unpack_archive(tmp_path / "a.tar", tmp_path / "unpacked")
    monkeypatch.setattr(source, "HERE", tmp_path / "unpacked" / "src" / "unfreeze" / "core" / "source.py")
    assert source.commit() == git(tree, "rev-parse", "HEAD").strip()[:12]


@pytest.mark.parametrize(
    ("text", "commit"),
    [
        ("3f0b0517d0ca\n", "3f0b0517d0ca"),
        ("3f0b0517d0ca-dirty\n", "3f0b0517d0ca-dirty"),
        ("$Format:%H$\n", None),  # of a checkout
        ("", None),
    ],
)
def test_what_a_build_recorded_is_read_back(tree, text, commit):
    (source.HERE.parent / "commit.txt").write_text(text)
    assert source.commit() == commit
    (source.HERE.parent / "commit.txt").unlink()
    assert source.commit() is None
