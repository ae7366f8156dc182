"""An adapter's folder to the Hugging Face Hub, after a yes."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection
from pathlib import Path

from unfreeze.checkpoint.hub import needs_hub
from unfreeze.core.command import Common
from unfreeze.core.errors import ConfigError
from unfreeze.core.units import format_bytes
from unfreeze.job.end.card import HUB_ID

DENIED = (401, 403, 404)
"""The Hub's answers to a token that may not write there."""


def check_push(repository: str, *, yes: bool, common: Common) -> None:
    """Raise ConfigError for a name that the Hub doesn't have, and where nobody can be asked.

    Raises CheckpointError without the Hub's library.
    """
    if not HUB_ID.fullmatch(repository):
        raise ConfigError(f"push = {repository!r} is no repository of the Hub", next="--push org/name")
    if not yes and (common.quiet or common.json or not sys.stdin.isatty()):
        raise ConfigError(
            f"nothing is uploaded to {repository} without a yes, and nobody can be asked here", next="--yes"
        )
    needs_hub(f"{repository} is written to")


def push(folder: Path, repository: str, names: Collection[str], *, yes: bool) -> str:
    """Upload those files of a folder. -> the address, "" where the question was answered with no.

    A repository that isn't there is made, private. HF_ENDPOINT, HF_TOKEN and `hf auth login` as everywhere.
    Raises ConfigError with the Hub's own words where it refuses.
    """
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.name in names)
    size = format_bytes(sum(path.stat().st_size for path in files))
    if not yes:
        listed = ", ".join(path.name for path in files)
        print(
            f"upload to {repository} (private where it is new): {listed}; {size}. Go on? [y/N] ",
            end="",
            file=sys.stderr,
        )
        sys.stderr.flush()
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            return ""

    # 0.4 s, and for --push alone
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HTTPError  # pyright: ignore[reportPrivateImportUsage]

    hub = HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None)
    try:
        hub.create_repo(repository, private=True, exist_ok=True)
        hub.upload_folder(
            repo_id=repository,
            folder_path=folder,
            allow_patterns=[path.name for path in files],
            commit_message="Upload a LoRA adapter",
        )
    except (HTTPError, OSError, ValueError) as error:
        words = str(error).strip().splitlines() or [type(error).__name__]
        response = getattr(error, "response", None)
        status = getattr(response, "status_code", None)
        online = response is not None or isinstance(error, ValueError)
        remedy = "hf auth login, with a token that may write there" if status in DENIED else "try again"
        raise ConfigError(
            f"upload to {repository} failed: {words[0] if online else 'the Hub cannot be reached'}",
            next=f"{remedy if online else 'go online, and try again'}; the files are kept in {folder}",
        ) from error
    return f"{hub.endpoint}/{repository}"
