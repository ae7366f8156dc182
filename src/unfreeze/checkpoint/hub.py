"""Checkpoints from the Hugging Face Hub: a snapshot in the usual cache.

A download is resumable, with huggingface_hub's own progress bars. Only weights in safetensors, JSON,
tokenizer and template files of the top folder are fetched: never .bin, .pt or .py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from unfreeze.core.errors import CheckpointError

TEXT_FILES = ["*.json", "tiktoken.model", "*.tiktoken", "*.jinja"]
"""Small files: configuration, tokenizer, chat template."""
ALLOW = ["*.safetensors", *TEXT_FILES]
# sub-folders hold other formats; "consolidated" is a second copy of the same weights
IGNORE = ["*/*", "consolidated*", "*.onnx*"]


def is_id(source: str) -> bool:
    """True if `source` is written like a Hub id: exactly "org/name"."""
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", source) is not None


def download(
    repo_id: str, progress: Callable[[str], None] | None = None, allow: Sequence[str] = tuple(ALLOW)
) -> Path:
    """The local snapshot of `repo_id`, limited to files that match `allow`.

    A second call finds it in the cache, also offline. Raises CheckpointError in one line: no such repository,
    access refused, or no connection and not in the cache.
    """
    # imports the HTTP stack: 0.3 s that a local folder should not pay
    needs_hub(f"{repo_id} is fetched")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    # From the hub's module, because the HTTP library under it has different names in different releases
    # (httpx, httpx2).
    from huggingface_hub.errors import HTTPError  # pyright: ignore[reportPrivateImportUsage]  # isort: skip

    if progress is not None:
        progress(f"{repo_id}: looking up on the Hugging Face Hub")
    try:
        return Path(snapshot_download(repo_id, allow_patterns=list(allow), ignore_patterns=IGNORE))
    except GatedRepoError as error:
        raise CheckpointError(
            f"{repo_id} is gated: its publisher asks for consent first",
            next=f"accept the terms at https://huggingface.co/{repo_id}, then: hf auth login",
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise CheckpointError(
            f"{repo_id} is neither a folder here nor a repository you can read on the Hugging Face Hub",
            next="check the spelling; for a private repository: hf auth login",
        ) from error
    except (LocalEntryNotFoundError, ConnectionError) as error:
        raise CheckpointError(
            f"{repo_id} is not a folder here, not in the Hugging Face cache, and the Hub cannot be reached"
            " (offline?)",
            next="go online and repeat the command (a download resumes), or give the path of a local folder",
        ) from error
    except (HTTPError, OSError) as error:
        raise CheckpointError(
            f"{repo_id}: download failed: {str(error).strip().partition(chr(10))[0][:200]}",
            next="repeat the command: a download resumes where it stopped",
        ) from error


def needs_hub(what: str) -> None:
    """Raise CheckpointError with the install command if huggingface_hub is missing."""
    try:
        import huggingface_hub  # noqa: F401  # its parts are imported when they are used
    except ImportError:
        raise CheckpointError(
            f"{what} with the library huggingface_hub, which is not installed",
            next="pip install huggingface_hub",
        ) from None
