"""Models that `unfreeze eval` scores: those named, and of each run or adapter the model before it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unfreeze.config.adapter import ROUNDED, adapter_folder
from unfreeze.config.recipes import read_resolved
from unfreeze.core.errors import CheckpointError, UserError
from unfreeze.core.events import RESOLVED
from unfreeze.generate.source import ModelSource, open_source, run_of
from unfreeze.job.merge_aware import compute_as_trained
from unfreeze.job.opening.load import load_as_trained
from unfreeze.job.opening.source import open_as_trained

if TYPE_CHECKING:
    import torch

    from unfreeze.checkpoint import Manifest
    from unfreeze.evaluate.tasks import Task
    from unfreeze.generate.model import Model

BASE = "base"


@dataclass(frozen=True)
class Scored:
    """One model. run: folder whose report shows its scores; None for a plain checkpoint.

    digest: hash of its weights and of the dtype that it computes in
    """

    name: str
    source: ModelSource
    manifest: Manifest
    digest: str
    run: Path | None = None

    @property
    def shown(self) -> str:
        """The name in progress lines; of a model that nobody typed what it is, too."""
        if self.name.split(" of ")[0] != BASE:
            return self.name
        adapter = f" with {self.source.adapter}" if self.source.adapter else ""
        return f"{Path(self.source.base).name}{adapter}, the model before"

    def loaded(self, before: Model | None, dtype: torch.dtype, device: torch.device, **shown: Any) -> Model:
        """Load it. `before`, a model without adapters, gets the adapter if it is this one's base."""
        from unfreeze.adapters.read import load_adapter
        from unfreeze.generate.model import Model

        if before is not None and self.source.adapter is not None and _same(before.manifest, self.manifest):
            load_adapter(before.decoder, self.source.adapter)
            compute_as_trained(before.decoder, self.manifest, self.source.adapter)
            before.decoder.eval().requires_grad_(False)
            return Model(
                before.decoder, before.tokenizer, stop_ids=before.engine.stop_ids, manifest=before.manifest
            )
        return load_as_trained(self.source, self.manifest, dtype, device, **shown)


@dataclass(frozen=True)
class Subjects:
    """All models, in the order in which they are scored, and (before, after) of those that are compared.

    notes: why a run has no model before it
    """

    models: list[Scored]
    pairs: list[tuple[str, str]]
    notes: list[str]


def subjects_of(names: Sequence[str], base: str, dtype: str, say: Callable[[str], None]) -> Subjects:
    """Find the models. Raises UserError for one that is not there, or was typed twice."""
    models: list[Scored] = []
    typed: list[Scored] = []
    pairs: list[tuple[str, str]] = []
    notes: list[str] = []
    for name in names:
        source, manifest = open_as_trained(name, say, base if _has_adapter(name) else "")
        own = Path(name).expanduser()
        run = run_of(own) if (run_of(own) / RESOLVED).is_file() else None
        model = Scored(name, source, manifest, digest_of(source, manifest, dtype), run)
        if any(model.digest == other.digest for other in typed):
            raise CheckpointError(f"{name} is given twice", next="give each model once")
        typed.append(model)
        try:
            before = _before(model, say)
        except UserError as error:
            before = None
            notes.append(f"{name} has nothing to compare with: {error.message}")
        digest = digest_of(*before, dtype) if before else ""
        if digest == model.digest:
            before = None
            notes.append(f"{name} has the weights that it began with")
        if before is not None:
            several = len(names) > 1
            known = next((each for each in models if each.digest == digest), None)
            first = known or Scored(f"{BASE} of {name}" if several else BASE, *before, digest)
            models += [] if known else [first]
            pairs.append((first.name, name))
        if known := next((each for each in models if each.digest == model.digest), None):
            # the base of an earlier run is typed itself: it keeps the typed name
            models[models.index(known)] = model
            pairs = [(name if one == known.name else one, other) for one, other in pairs]
        else:
            models.append(model)
    both = [(one.name, other.name) for i, one in enumerate(typed) for other in typed[i + 1 :]]
    pairs += [pair for pair in both if pair not in pairs and pair[::-1] not in pairs]
    return Subjects(models, pairs, notes)


def memorised(subjects: Subjects, tasks: Sequence[Task]) -> list[str]:
    """Return a warning for each run whose training rows hold rows of the tasks, or are not there any more."""
    from unfreeze.config.tables import Data
    from unfreeze.job.watch.evaluation import leak_words, leaks

    words: list[str] = []
    for model in subjects.models:
        for fields in trained_on(model.run):
            files = fields["data.files"]
            named = [files] if isinstance(files, str) else list(files)
            data = Data.model_construct(files=tuple(named), columns=tuple(fields.get("data.columns") or ()))
            try:
                words += [f"{model.name}: {line}" for line in leak_words(leaks(data, tasks))]
            except UserError as error:
                words.append(
                    f"{model.name}: its training rows cannot be compared with the tasks: {error.message}"
                )
    return words


def trained_on(run: Path | None) -> list[dict[str, Any]]:
    """Return the fields of a run, and of each one before whose adapter it went on with, if they name data."""
    runs: dict[Path, dict[str, Any]] = {}
    while run is not None and run not in runs:
        fields = runs[run] = read_resolved(run, CheckpointError)
        adapter = fields.get("adapter")  # a run, or the adapter in it
        folders = (Path(adapter), Path(adapter).parent) if adapter else ()
        run = next((each for each in folders if (each / RESOLVED).is_file()), None)
    return [fields for fields in runs.values() if fields.get("data.files")]


def digest_of(source: ModelSource, manifest: Manifest, dtype: str) -> str:
    """Hash a model: config.json, a sample of its weights, sizes and times of its files, its whole adapter."""
    from unfreeze.checkpoint.same import weights_digest

    hashed = hashlib.blake2b(f"{dtype} {weights_digest(manifest)}".encode(), digest_size=16)
    hashed.update(repr(sorted(manifest.config.items(), key=str)).encode())
    hashed.update(repr(source.template_variables).encode())
    for file in sorted(set(map(Path, manifest.files))):
        path = file if file.is_absolute() else manifest.path / file
        if path.is_file():
            status = path.stat()
            hashed.update(f"{path.name} {status.st_size} {status.st_mtime_ns}".encode())
    beside = () if source.adapter is None else [*source.adapter.glob("adapter_*"), source.adapter / ROUNDED]
    for file in sorted(file for file in beside if file.is_file()):
        hashed.update(file.name.encode())
        hashed.update(file.read_bytes())
    return hashed.hexdigest()


def _has_adapter(name: str) -> bool:
    folder = Path(name).expanduser()
    return (folder / RESOLVED).is_file() or (folder / "adapter_config.json").is_file()


def _before(model: Scored, say: Callable[[str], None]) -> tuple[ModelSource, Manifest] | None:
    """Return the model that a run began with; None for a plain checkpoint."""
    fields = read_resolved(model.run, CheckpointError) if model.run else {}
    variables = model.source.template_variables
    if model.source.adapter is not None:
        start = str(fields.get("adapter") or "")
        opened = ModelSource(model.source.base, adapter_folder(start) if start else None, variables)
        if not start and model.manifest.tokenizer is not None:  # new tokens are the adapter's
            return opened, replace(model.manifest, tokenizer=None)
        return opened, model.manifest
    if not model.run:
        return None
    named = str(fields.get("model") or "")
    if not named or (fields.get("recipe") == "pretrain" and not _has_weights(named)):
        raise CheckpointError("it trained a new model")
    source, manifest = open_source(named, say)
    return ModelSource(source.base, source.adapter, variables), manifest


def _has_weights(name: str) -> bool:
    folder = Path(name).expanduser()
    return not folder.exists() or any(folder.glob("*.safetensors")) or (folder / RESOLVED).is_file()


def _same(one: Manifest | None, other: Manifest) -> bool:
    if one is None or one.tokenizer != other.tokenizer:
        return False
    return one.path == other.path and one.config == other.config
