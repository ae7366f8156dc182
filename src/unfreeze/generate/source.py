"""Resolve a name to a checkpoint, a run or an adapter, and check that it can be read.

No torch, so that a refusal is immediate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from unfreeze import models
from unfreeze.checkpoint.manifest import Manifest, open_checkpoint, read_json
from unfreeze.config.adapter import longer_of, new_token_ids
from unfreeze.config.recipes import resolved
from unfreeze.core.built_in import TINY_K2
from unfreeze.core.errors import AdapterError, CheckpointError, closest
from unfreeze.core.events import RESOLVED
from unfreeze.core.writer import writer
from unfreeze.models.longer import lengthened

ADAPTER_CONFIG = "adapter_config.json"


@dataclass(frozen=True)
class ModelSource:
    """A resolved name: a base checkpoint, and the folder of an adapter for it if there is one.

    base                 folder or Hugging Face id
    template_variables   NAME=VALUE of the run, so that prompts are rendered as in training
    """

    base: str
    adapter: Path | None = None
    template_variables: tuple[str, ...] = ()


def locate_model(source: str | Path, base: str = "") -> ModelSource:
    """Resolve a name. `base`: the base of an adapter, whatever base it names itself.

    A checkpoint folder or id resolves to itself; a run folder to its adapter on its base, or to the model/ it
    trained; an adapter folder to itself on its base_model_name_or_path, with its run's template variables.
    Raises CheckpointError for a run that has neither adapter nor model yet, and for an adapter that doesn't
    name its base.
    """
    folder = Path(source).expanduser()
    if base:
        return _on_base(folder, base)
    if (folder / RESOLVED).is_file():
        return _locate_run(folder)
    if (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").is_file():
        run = run_of(folder) / RESOLVED
        variables = resolved(read_json(run)).get("data.template_variables") if run.is_file() else None
        named = read_json(folder / ADAPTER_CONFIG).get("base_model_name_or_path")
        if not isinstance(named, str) or not named:
            raise CheckpointError(
                f"{folder / ADAPTER_CONFIG} has no base_model_name_or_path, so the model it belongs to is"
                " unknown",
                next="give the base checkpoint's folder or id: --base DIR",
            )
        return ModelSource(named, folder, tuple(map(str, variables or ())))
    # next to other runs: a mistyped name, not a Hugging Face id; the built-in model's name is none
    if not folder.exists() and str(source) != TINY_K2.name and any(folder.parent.glob(f"*/{RESOLVED}")):
        runs = sorted(path.parent.name for path in folder.parent.glob(f"*/{RESOLVED}"))
        near = closest(folder.name, runs)
        paths = ", ".join(str(folder.parent / name) for name in near or runs[:3])
        there = "the nearest" if near else f"{folder.parent} holds"
        right = str(folder.parent / near[0]) if near else ""
        raise CheckpointError(f"{folder} does not exist", next=f"{there}: {paths}").meant(str(source), right)
    return ModelSource(str(folder) if folder.exists() else str(source))


def run_of(folder: Path) -> Path:
    """Return the run of an adapter: the folder above runs/NAME/adapter-best; any other is its own run."""
    above = folder.absolute().parent
    inside = (folder / ADAPTER_CONFIG).is_file() and not (folder / RESOLVED).is_file()
    return above if inside and (above / RESOLVED).is_file() else folder


def _on_base(folder: Path, base: str) -> ModelSource:
    """Resolve an adapter's folder, or a run's adapter, on a base given by the user."""
    if (folder / RESOLVED).is_file() and (folder / "adapter" / ADAPTER_CONFIG).is_file():
        variables = tuple(
            map(str, resolved(read_json(folder / RESOLVED)).get("data.template_variables") or ())
        )
        return ModelSource(base, folder / "adapter", variables)
    if (folder / ADAPTER_CONFIG).is_file():
        return ModelSource(base, folder)
    raise CheckpointError(f"base = {base!r} is for an adapter, but {folder} is not one", next="remove --base")


def _locate_run(folder: Path) -> ModelSource:
    fields = resolved(read_json(folder / RESOLVED))
    variables = tuple(map(str, fields.get("data.template_variables") or ()))
    if (folder / "model" / "config.json").is_file():
        return ModelSource(str(folder / "model"), template_variables=variables)
    if not (folder / "adapter" / ADAPTER_CONFIG).is_file():
        process = writer(folder)
        if saves := sorted(path.name for path in (folder / "state").glob("step-*") if path.suffix != ".tmp"):
            state = f"is training now (process {process})" if process else "is unfinished"
            raise CheckpointError(
                f"run {folder} {state}: its last save is {saves[-1]}, but its model/ or adapter/ is not"
                " written yet",
                next="wait for it to end, or stop it with Ctrl-C"
                if process
                else "start the same training command again: it continues from that save",
            )
        if process:
            raise CheckpointError(
                f"run {folder} is training now (process {process}) and has not saved anything yet",
                next=f"wait for its first save; meanwhile: unfreeze report {folder}",
            )
        raise CheckpointError(
            f"run {folder} has neither adapter/{ADAPTER_CONFIG} nor model/config.json: it has not saved"
            " anything yet",
            next="start the same training command again: it resumes the run",
        )
    base = fields.get("model")
    if not isinstance(base, str) or not base:
        raise CheckpointError(
            f"{folder / RESOLVED} has no key 'model', so the base checkpoint of this run is unknown"
        )
    return ModelSource(base, folder / "adapter", variables)


def open_source(
    source: str | Path, progress: Callable[[str], None] | None = None, base: str = ""
) -> tuple[ModelSource, Manifest]:
    """Resolve a name and read the manifest of its base (for an adapter: of `base`, if given).

    Its config has the scaling of positions that the adapter was trained with.

    Raises UserError if nothing is found, or if its family isn't supported or its quantization cannot be read.
    """
    opened = locate_model(source, base)
    try:
        manifest = open_checkpoint(opened.base, progress=progress)
    except CheckpointError as error:
        if opened.adapter is None:
            raise
        here = "" if base else "if the base is elsewhere: --base DIR; else: "
        raise CheckpointError(
            f"{opened.adapter} is an adapter of {opened.base}: {error.message}", next=f"{here}{error.next}"
        ) from error
    refuse_unread_model(manifest)
    if opened.adapter is not None:
        manifest = lengthened(manifest, longer_of(opened.adapter))
        manifest = with_tokens_of(manifest, opened.adapter)
    return opened, manifest


def with_tokens_of(manifest: Manifest, adapter: Path) -> Manifest:
    """The manifest with the tokenizer of an adapter that added tokens; unchanged for any other adapter.

    Raises AdapterError if such an adapter has no tokenizer beside it.
    """
    ids = new_token_ids(adapter)
    text = manifest.config.get("text_config") or manifest.config
    if not ids or (max(ids) < int(text.get("vocab_size", 0)) and not (adapter / "tokenizer.json").is_file()):
        return manifest
    if not (adapter / "tokenizer.json").is_file():
        raise AdapterError(
            f"{adapter} trained rows of {len(ids)} tokens, up to id {max(ids)}, and has no tokenizer.json",
            next="put the tokenizer's files with these tokens into the adapter's folder",
        )
    return replace(manifest, tokenizer=adapter)


def refuse_unread_model(manifest: Manifest) -> None:
    """Raise CheckpointError if the family is unsupported, ConfigError if the quantization is."""
    models.shape(manifest.config)
    manifest.scheme()
