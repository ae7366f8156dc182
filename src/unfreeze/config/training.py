"""Fields common to every kind of training, in tables, and the record that a run keeps of them."""

from __future__ import annotations

from collections.abc import Mapping
from glob import has_magic
from pathlib import Path
from typing import Any, ClassVar, Self, cast

from pydantic import Field, model_validator

from unfreeze.config.names import by_path, fields, flat, given, nested
from unfreeze.config.parse import Folder, Frozen, ModelName
from unfreeze.config.tables import HUB, Data, Memory, Muon, Optimizer, Rope, Save, Training, Watch
from unfreeze.config.template import template_time, template_values
from unfreeze.core.built_in import TINY_K2
from unfreeze.core.field import About, about
from unfreeze.core.layout import Layout

DATA_FILES = "data_files"
"""Key in a run's record: the files that folders, patterns and Hub names in data.files resolved to."""


class TrainingConfig(Frozen):
    """Fields of every training recipe, in tables."""

    OF_TOKENS: ClassVar[str] = "a step"
    """Unit of training.tokens_per_step, for the start line."""

    model: ModelName = Field(
        description="checkpoint folder, or Hugging Face id org/name",
        json_schema_extra=about("Model and data", first=True),
    )
    data: Data
    out: Folder = Field(
        default="",
        description="run folder; default runs/<model>-<data>",
        json_schema_extra=about("Output", first=True, computes=False),
    )
    seed: int = Field(
        default=0,
        ge=0,
        description="seed of adapters, weights and data order",
        json_schema_extra=about("Learning"),
    )
    rope: Rope = Rope()
    training: Training = Training()
    optimizer: Optimizer = Optimizer()
    muon: Muon = Muon()
    memory: Memory = Memory()
    place: Layout = Layout()
    save: Save = Save()
    watch: Watch = Watch()

    @model_validator(mode="before")
    @classmethod
    def _in_any_spelling(cls, fields: Any) -> Any:
        if not isinstance(fields, Mapping):
            return fields
        return nested(cls.completed(by_path(cls, cast(Mapping[str, Any], fields), cls.__name__)))

    @classmethod
    def completed(cls, fields: dict[str, Any]) -> dict[str, Any]:
        """Return `fields` (dotted name -> value) with the values that a recipe derives from them.

        Raises ValueError for fields that exclude each other.
        """
        return fields

    @model_validator(mode="after")
    def _consistent(self) -> TrainingConfig:
        data, tokens, parts = self.data, self.training.tokens_per_step, self.memory.micro_batches
        if tokens < 2 * parts:
            raise ValueError(
                f"tokens_per_step {tokens} is less than 2 tokens for each of {parts} micro_batches"
            )
        if data.weights and len(data.weights) != len(data.files):
            raise ValueError(
                f"data.weights has {len(data.weights)} numbers for {len(data.files)} data files: one for"
                " each file, folder or pattern, in the same order"
            )
        if self.muon.qk_clip and self.optimizer.kind != "muon":
            raise ValueError("muon.qk_clip needs optimizer.kind = muon: with adamw it is not built")
        if self.muon != type(self.muon)() and self.optimizer.kind != "muon":
            raise ValueError(
                "[muon] has settings, but optimizer.kind is adamw: set it to muon, or remove them"
            )
        if self.muon.qk_clip and self.training.only:
            raise ValueError(
                "muon.qk_clip scales attention, which training.only freezes: it has no effect. Leave it out"
            )
        template_values(data.template_variables)
        template_time(data.template_date)
        held_out = bool(data.validation or data.validation_fraction)
        if self.watch.eval_every and not self.watch.eval:
            raise ValueError("watch.eval_every has no tasks: also give watch.eval, such as rows:test.jsonl")
        if self.watch.early_stop and not self.watch.eval and not held_out:
            raise ValueError(
                "watch.early_stop needs a held-out loss, but nothing is held out: give validation or"
                " validation_fraction"
            )
        if self.watch.validate_every and not held_out:
            raise ValueError(
                "watch.validate_every measures the held-out loss, but nothing is held out: give validation or"
                " validation_fraction"
            )
        if self.watch.early_stop and self.watch.eval and not self.watch.eval_every:
            raise ValueError("watch.early_stop counts scores: also give watch.eval_every")
        if self.watch.early_stop and not self.watch.eval and not self.watch.validate_every:
            raise ValueError("watch.early_stop counts validations: also give watch.validate_every")
        if data.validation and data.validation_fraction:
            raise ValueError("validation and validation_fraction exclude each other: give only one")
        return self

    @property
    def as_written(self) -> Self:
        """The config with the data as the user wrote it: a folder or pattern, not the files found."""
        return self.model_copy(update={"data": self.data.written})

    @property
    def run_dir(self) -> Path:
        if self.out:
            return Path(self.out)
        data = "+".join(map(_stem, self.data.written.files))
        return Path("runs") / f"{Path(self.model).name}-{data}"

    @property
    def tokens_per_micro_batch(self) -> int:
        return self.training.tokens_per_step // self.memory.micro_batches

    def record(self) -> dict[str, Any]:
        """Return every field that affects results, by dotted name.

        A resumed run must match its save's record.

        A field added in a later version (`since`) is left out at its default.
        """
        known, changed = fields(type(self)), set(given(self))
        record = {
            name: value
            for name, value in flat(self.as_written).items()
            if name not in known or self._recorded(known[name].about, name in changed)
        }
        files = [_placed(file) for file in self.data.written.files]
        if record.get("adapter"):
            record["adapter"] = portable(str(record["adapter"]))
        return {
            **record,
            "model": portable(self.model),
            "data.files": files[0] if len(files) == 1 else files,
            "data.validation": _placed(self.data.validation) if self.data.validation else "",
            **({DATA_FILES: became} if (became := self.data.became()) else {}),
        }

    @staticmethod
    def _recorded(known: About, changed: bool) -> bool:
        return known.of_run and known.computes and (changed or not known.since)


def _placed(written: str) -> str:
    """Absolute path of a file, folder or pattern; a Hub name is unchanged."""
    return written if written.startswith(HUB) else str(Path(written).resolve())


def _stem(written: str) -> str:
    """Short name of the data: chat for chat.jsonl.gz, d for d/*.jsonl, name for hf:org/name:config."""
    path = Path(written.removeprefix(HUB).split(":")[0]) if written.startswith(HUB) else Path(written)
    plain = next((part for part in (path, *path.parents) if not has_magic(part.name)), path)
    return Path(plain.stem).stem if plain.suffix in (".gz", ".zst") else plain.stem or "data"


def portable(model: str) -> str:
    """Absolute path of a local model folder or of the built-in model; a Hub id is unchanged."""
    path = Path(model)
    if model == TINY_K2.name and not path.exists():
        return str(TINY_K2)
    return str(path.resolve()) if path.is_dir() else model
