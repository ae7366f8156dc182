"""Upload an adapter's folder to the Hugging Face Hub, after confirmation."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection
from pathlib import Path

from unfreeze.checkpoint.hub import needs_hub
from unfreeze.config.adapter import kind_of
from unfreeze.core.command import Common
from unfreeze.core.errors import ConfigError
from unfreeze.core.units import format_bytes
from unfreeze.job.end.card import HUB_ID

DENIED = (401, 403, 404)
"""HTTP status codes of the Hub for a token without write access."""


def check_push(repository: str, *, yes: bool, common: Common) -> None:
    """Raise ConfigError for an invalid Hub name, and if the user cannot be asked for confirmation.

    Raises CheckpointError without the Hub's library.
    """
    if not HUB_ID.fullmatch(repository):
        raise ConfigError(f"push = {repository!r} is not a Hub id", next="--push org/name")
    if not yes and (common.quiet or common.json or not sys.stdin.isatty()):
        raise ConfigError(
            f"an upload to {repository} needs confirmation, and there is no terminal to ask on", next="--yes"
        )
    needs_hub(f"{repository} is written to")


def push(folder: Path, repository: str, names: Collection[str], *, yes: bool) -> str:
    """Upload the named files of a folder. -> the address, "" if the user said no.

    A missing repository is created as private. HF_ENDPOINT, HF_TOKEN and `hf auth login` work as usual.
    Raises ConfigError with the Hub's message if it refuses.
    """
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.name in names)
    size = format_bytes(sum(path.stat().st_size for path in files))
    if not yes:
        listed = ", ".join(path.name for path in files)
        print(
            f"upload to {repository} (private if new): {listed}; {size}. Continue? [y/N] ",
            end="",
            file=sys.stderr,
        )
        sys.stderr.flush()
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            return ""

    # imported here: takes 0.4 s and only --push needs it
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HTTPError  # pyright: ignore[reportPrivateImportUsage]

    hub = HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None)
    try:
        hub.create_repo(repository, private=True, exist_ok=True)
        hub.upload_folder(
            repo_id=repository,
            folder_path=folder,
            allow_patterns=[path.name for path in files],
            commit_message=f"Upload a {kind_of(folder)} adapter",
        )
    except (HTTPError, OSError, ValueError) as error:
        words = str(error).strip().splitlines() or [type(error).__name__]
        response = getattr(error, "response", None)
        status = getattr(response, "status_code", None)
        online = response is not None or isinstance(error, ValueError)
        remedy = "hf auth login, with a token that can write there" if status in DENIED else "try again"
        raise ConfigError(
            f"upload to {repository} failed: {words[0] if online else 'the Hub cannot be reached'}",
            next=f"{remedy if online else 'go online, and try again'}; the files are kept in {folder}",
        ) from error
    return f"{hub.endpoint}/{repository}"
