"""unfreeze dev bench NAME …: run a benchmark from a clone. They are in benchmarks/, outside the package."""

from __future__ import annotations

import sys
from typing import Any

from unfreeze.core.command import Common
from unfreeze.core.errors import ConfigError
from unfreeze.core.source import checkout


def main(arguments: list[str], common: Common) -> dict[str, Any]:
    """Run the benchmark and return its result. Raises ConfigError if only the package is installed."""
    root = checkout()
    if root is not None and (root / "benchmarks" / "__init__.py").is_file():
        if str(root) not in sys.path:
            sys.path.insert(0, str(root))
    elif "benchmarks" not in sys.modules:  # `python -m benchmarks` has found it
        raise ConfigError(
            "an installed package has no benchmarks; they are in the repository",
            next="git clone the repository, then in it run: make .venv/installed && .venv/bin/unfreeze"
            " dev bench",
        )
    import benchmarks

    return benchmarks.main(arguments, common)
