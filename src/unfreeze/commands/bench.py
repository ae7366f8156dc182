"""unfreeze dev bench NAME …: the benchmarks of a clone. They lie in benchmarks/, outside of the package."""

from __future__ import annotations

import sys
from typing import Any

from unfreeze.core.command import Common
from unfreeze.core.errors import ConfigError
from unfreeze.core.source import checkout


def main(arguments: list[str], common: Common) -> dict[str, Any]:
    """What the benchmark returns. Raises ConfigError where only the package is installed."""
    root = checkout()
    if root is not None and (root / "benchmarks" / "__init__.py").is_file():
        if str(root) not in sys.path:
            sys.path.insert(0, str(root))
    elif "benchmarks" not in sys.modules:  # `python -m benchmarks` has found it
        raise ConfigError(
            "the benchmarks and their peers are no part of an installed package; they lie in the repository",
            next="git clone the repository, then in it: make .venv/installed && .venv/bin/unfreeze dev bench",
        )
    import benchmarks

    return benchmarks.main(arguments, common)
