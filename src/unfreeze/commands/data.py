"""unfreeze data show | clean: look at training data, or clean raw text.

unfreeze data show F --model M       the data as the model will see it
unfreeze data clean IN… OUT_DIR      filters, duplicates, evaluation texts, and a ledger
"""

from __future__ import annotations

from typing import Any

from unfreeze.commands import data_clean, data_show
from unfreeze.core.command import Common
from unfreeze.core.errors import ConfigError, nearest

PARTS = {"show": data_show, "clean": data_clean}
"""Subcommand -> its module."""


def main(arguments: list[str], common: Common) -> dict[str, Any]:
    """Run `data show` or `data clean` and return its result."""
    name, *rest = arguments or [""]
    if name in ("-h", "--help", "--help-all"):
        print(__doc__ or "", end="")
        raise SystemExit(0)
    if name not in PARTS:
        got = f"{name!r}{nearest(name, PARTS)}" if name else "nothing"
        raise ConfigError(
            f"data takes the subcommand show or clean, got {got}",
            next="unfreeze data show FILE.jsonl --model MODEL, or unfreeze data clean IN OUT_DIR",
        )
    return PARTS[name].main(rest, common)
