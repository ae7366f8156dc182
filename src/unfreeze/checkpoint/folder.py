"""The local folder of a model's name: a path, a Hugging Face id, or the built-in model."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from unfreeze.checkpoint import hub
from unfreeze.core.built_in import TINY_K2
from unfreeze.core.errors import CheckpointError, looked_in, near_word

USUAL = ("runs", "models", "model", "checkpoints", "adapters", "out", "output", "outputs", "data", "tmp")
"""Names of folders that hold runs or checkpoints; none is a publisher's of models."""
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
    near = near_folder(path)
    if near is None and path.parent == Path() and near_word(text, [TINY_K2.name]):
        near = Path(TINY_K2.name)
    shown = "" if near is None else near.name if near.parent == path.parent else str(near)
    hint = f"; nearest: {shown!r}" if shown else ""
    if asks_hub(source):
        try:
            return hub.download(text, progress)
        except CheckpointError as error:  # "models/tinyk2" may be a mistyped path as well as an id
            raise CheckpointError(error.message + hint, next=error.next).meant(
                text, str(near or "")
            ) from error
    raise CheckpointError(
        f"{text} does not exist{looked_in(text)}{hint}",
        next='give an existing folder, or a Hugging Face id written "org/name"',
    ).meant(text, str(near or ""))


def near_folder(path: Path) -> Path | None:
    """Return the folder here whose path is most like this one; None if none is."""
    if path == path.parent:
        return None
    above = path.parent if path.parent.is_dir() else near_folder(path.parent)
    name = near_word(path.name, [entry.name for entry in above.glob("*/")]) if above else ""
    return above / name if above and name else None


def asks_hub(source: str | Path) -> bool:
    """True for a Hub id: neither a folder here, nor the name of one that is missing here.

    runs/mine is written like an id, too. It is a path if its first part is a usual name of such a folder, or
    a folder here without checkpoints (one with them may be named after a publisher), or almost such a folder.
    """
    path, text = Path(source).expanduser(), str(source)
    if path.exists() or text == TINY_K2.name or not hub.is_id(text):
        return False
    above = path.parent
    if above.name in USUAL or (above.is_dir() and not any(above.glob("*/config.json"))):
        return False
    near = near_folder(path)
    return near is None or near.name != path.name  # run/mine, where runs/mine is


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
