"""The files beside a release's weights that belong to the model: tokenizer, image processor, licence."""

from __future__ import annotations

from collections.abc import Collection
from fnmatch import fnmatchcase
from pathlib import Path

from unfreeze.checkpoint.manifest import INDEX, MERGE, QUANTIZE, SWAP, UPCYCLE, inside

CARD, BASE_CARD = "README.md", "README.base.md"
CARRIED = (
    *("*.json", "*.jinja", "*.model", "*.tiktoken", "vocab.txt", "merges.txt", "*.py"),
    *("LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*", "*.md"),
)
OWN = ("config.json", INDEX, MERGE, UPCYCLE, SWAP, QUANTIZE)  # written anew with the weights


def files_beside(folder: Path, without: Collection[str] = ()) -> dict[str, Path]:
    """Name in a derived checkpoint -> file, for every file of `folder` that matches CARRIED, sorted.

    The base's README.md becomes README.base.md. Code in a release (*.py) is carried like any file and never
    run here. Sub-folders are not carried. Raises CheckpointError for a link that leads out of the folder.
    """
    files: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        left = path.name in OWN or path.name in without or path.name.endswith(".index.json")
        if not left and path.is_file() and any(fnmatchcase(path.name, kind) for kind in CARRIED):
            files[BASE_CARD if path.name == CARD else path.name] = inside(path)
    return files
