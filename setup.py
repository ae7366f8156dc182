"""Writes the commit into what is built: an installed package has no .git to ask. All else: pyproject.toml."""

import runpy
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist


def record(packages: Path) -> None:
    """Put the commit, where it is known, into a copy of the source."""
    commit = runpy.run_path("src/unfreeze/core/source.py")["commit"]()
    file = packages / "unfreeze" / "core" / "commit.txt"
    if commit:
        file.unlink(missing_ok=True)  # it may be a link to the checkout's
        file.write_text(f"{commit}\n", encoding="utf-8")


class Build(build_py):
    """A wheel's files."""

    def run(self) -> None:
        if self.editable_mode:
            return super().run()
        # setuptools never removes what an earlier build left, and the wheel would hold modules that are gone
        shutil.rmtree(Path(self.build_lib) / "unfreeze", ignore_errors=True)
        super().run()
        record(Path(self.build_lib))


class Source(sdist):
    """An sdist's files."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        record(Path(base_dir, "src"))


setup(cmdclass={"build_py": Build, "sdist": Source})
