"""The local folder of a model's name: a path, a Hugging Face id, or the built-in model."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from unfreeze.checkpoint import hub
from unfreeze.core.built_in import TINY_K2
from unfreeze.core.errors import CheckpointError, looked_in, nearest

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def folder_of(source: str | Path, progress: Callable[[str], None] | None) -> Path:
    """Return the local folder of `source`; a Hub id is downloaded.

    Raises CheckpointError for a pickle, for a file, and for a name that is neither a folder nor an id.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    if path.is_file() and path.suffix in PICKLES:
        raise CheckpointError(
            f"{path} is a pickle; unpickling can run any code, so it is not read",
            next=conversion(path.parent, path.name, "model.safetensors"),
        )
    if path.is_file():
        raise CheckpointError(
            f"{path} is a file; a checkpoint is a folder with config.json and *.safetensors",
            next=f"give {path.parent}" if path.name == "config.json" else "give the folder of a model",
        )
    text = str(source)
    if text == TINY_K2.name:
        return TINY_K2
    siblings = [entry.name for entry in path.parent.glob("*/")]
    hint = nearest(path.name, siblings)
    if hub.is_id(text):
        try:
            return hub.download(text, progress)
        except CheckpointError as error:  # "models/tinyk2" may be a mistyped path as well as an id
            raise CheckpointError(error.message + hint, next=error.next) from error
    raise CheckpointError(
        f"{text} does not exist{looked_in(text)}{hint}",
        next='give an existing folder, or a Hugging Face id written "org/name"',
    )


def conversion(folder: Path, pickle: str, target: str) -> str:
    """The command that converts pickled weights to safetensors.

    It uses torch's own loader, which with weights_only runs no code from the file.
    """
    match = re.match(r"pytorch_model.*\.bin$", pickle)
    if match and len(list(folder.glob("pytorch_model*.bin"))) > 1:
        glob, of, file = "glob, ", f" for f in glob.glob({str(folder / 'pytorch_model*.bin')!r})", "f"
    else:
        glob, of, file = "", "", repr(str(folder / pickle))
    target = str(folder / target)
    return (
        f'python -c "import {glob}torch, safetensors.torch as s; s.save_file({{k: v.clone().contiguous()'
        f"{of} for k, v in torch.load({file}, 'cpu', weights_only=True).items()}}, {target!r})\""
    )
