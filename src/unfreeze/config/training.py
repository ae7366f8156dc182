"""The fields that every kind of training shares, in tables; and the flat name of each.

A flat name is a TOML key, a flag, and a keyword in Python.
"""

from __future__ import annotations

from collections.abc import Mapping
from glob import has_magic
from pathlib import Path
from typing import Any, ClassVar, Self, cast

from pydantic import Field, model_validator

from unfreeze.config.names import by_place, flat, given, nested
from unfreeze.config.parse import Folder, Frozen, ModelName
from unfreeze.config.tables import HUB, Data, Memory, Optimizer, Save, Training, Watch
from unfreeze.config.template import template_time, template_values
from unfreeze.core.layout import Layout

FLAT = {
    "model": "model",
    "data": "data.files",
    "data_weights": "data.weights",
    "columns": "data.columns",
    "validation": "data.validation",
    "validation_fraction": "data.validation_fraction",
    "out": "out",
    "steps": "training.steps",
    "epochs": "training.epochs",
    "tokens_per_step": "training.tokens_per_step",
    "micro_batches": "memory.micro_batches",
    "sequence_length": "data.sequence_length",
    "packing": "training.packing",
    "truncation": "data.truncation",
    "template_variables": "data.template_variables",
    "template_date": "data.template_date",
    "on_bad_row": "data.on_bad_row",
    "learning_rate": "optimizer.learning_rate",
    "schedule": "optimizer.schedule",
    "warmup": "optimizer.warmup",
    "decay": "optimizer.decay",
    "weight_decay": "optimizer.weight_decay",
    "optimizer_moments": "optimizer.moments",
    "clip": "optimizer.clip",
    "dtype": "memory.dtype",
    "device": "memory.device",
    "threads": "memory.threads",
    "recompute": "place.recompute",
    "keep_layers": "place.keep_layers",
    "on_spike": "watch.on_spike",
    "seed": "seed",
    "save_every": "save.every",
    "save_minutes": "save.minutes",
    "keep_saves": "save.keep",
    "on_full_disk": "save.on_full_disk",
    "allow_changed": "save.allow_changed",
    "validate_every": "watch.validate_every",
    "early_stop": "watch.early_stop",
    "prompts": "watch.prompts",
    "track": "watch.track",
    "samples": "watch.samples",
    "train": "train",
    "adapter": "adapter",
    "turns": "data.turns",
    "reasoning": "data.reasoning",
    "balance_rate": "optimizer.balance_rate",
}
"""Flat name -> place (table.field), in the order of help and records.

Flags, help, errors and records use the flat name; a config may use either spelling (names.py)."""

MOVED = {
    "data.packing": "training.packing",
    "memory.recompute": "place.recompute",
    "memory.keep_layers": "place.keep_layers",
}
"""Where an earlier version's file has a field -> where it stands now. Both are read."""

CHANGES_NOTHING = {
    "out",
    "save_every",
    "save_minutes",
    "keep_saves",
    "on_full_disk",
    "allow_changed",
    "validate_every",
    "prompts",
    "samples",
    "threads",
    "on_spike",
    "track",
    "place.experts",
    "place.buffer",
    "place.split",
    "place.weights",
    "place.rest",
    "place.boundary",
    "place.optimizer",
    "place.adapters",
}
"""Fields that do not change what is computed: a run may be resumed with other values of them."""

ADDED = {"adapter", "columns", "turns", "reasoning", "template_variables", "template_date", "early_stop"}
"""Fields that the saves of earlier versions don't have, by flat name (for one of the table [lora]:
"lora.scaling"). A run's record leaves out such a field at its default, so that those runs can be resumed."""

HELP = {
    "What": (
        "model",
        "data",
        "data_weights",
        "columns",
        "validation",
        "validation_fraction",
        "train",
        "adapter",
        "turns",
        "reasoning",
        "template_variables",
        "template_date",
    ),
    "How long": (
        "epochs",
        "steps",
        "early_stop",
        "tokens_per_step",
        "sequence_length",
        "packing",
        "truncation",
    ),
    "Learning": (
        "learning_rate",
        "schedule",
        "warmup",
        "decay",
        "weight_decay",
        "clip",
        "balance_rate",
        "seed",
    ),
    "Adapters": ("lora.rank", "lora.alpha", "lora.targets", "lora.experts_rank", "lora.scaling"),
    "Memory and machine": (
        "micro_batches",
        "dtype",
        "recompute",
        "keep_layers",
        "optimizer_moments",
        "device",
        "threads",
        "place.experts",
        "place.buffer",
        "place.split",
        "place.weights",
        "place.rest",
        "place.boundary",
        "place.optimizer",
        "place.adapters",
    ),
    "Output": (
        "out",
        "save_every",
        "save_minutes",
        "keep_saves",
        "validate_every",
        "samples",
        "prompts",
        "track",
    ),
    "When things go wrong": ("on_bad_row", "on_spike", "on_full_disk", "allow_changed"),
}
"""Every field under a heading of --help-all."""
FIRST = (
    "model",
    "data",
    "validation_fraction",
    "train",
    "adapter",
    "epochs",
    "steps",
    "tokens_per_step",
    "sequence_length",
    "learning_rate",
    "lora.rank",
    "micro_batches",
    "dtype",
    "out",
)
"""What --help shows."""


class TrainingConfig(Frozen):
    """The fields of every training recipe, in tables."""

    FLAT: ClassVar[dict[str, str]] = FLAT
    MOVED: ClassVar[dict[str, str]] = MOVED
    HELP: ClassVar[dict[str, tuple[str, ...]]] = HELP
    FIRST: ClassVar[tuple[str, ...]] = FIRST

    model: ModelName = Field(description="checkpoint folder, or Hugging Face id org/name")
    data: Data
    out: Folder = Field(default="", description="run folder; default runs/<model>-<data>")
    seed: int = Field(default=0, ge=0, description="seed of adapters, weights and data order")
    training: Training = Training()
    optimizer: Optimizer = Optimizer()
    memory: Memory = Memory()
    place: Layout = Layout()
    save: Save = Save()
    watch: Watch = Watch()

    @model_validator(mode="before")
    @classmethod
    def _in_any_spelling(cls, fields: Any) -> Any:
        if not isinstance(fields, Mapping):
            return fields
        return nested(cls.completed(by_place(cls, cast(Mapping[str, Any], fields), cls.__name__)))

    @classmethod
    def completed(cls, fields: dict[str, Any]) -> dict[str, Any]:
        """`fields` (place -> value) together with the values that a recipe derives from them.

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
                f"data_weights has {len(data.weights)} numbers for {len(data.files)} data files: one for"
                " each file, folder or pattern, in the same order"
            )
        template_values(data.template_variables)
        template_time(data.template_date)
        if self.watch.early_stop and not (data.validation or data.validation_fraction):
            raise ValueError(
                "early_stop looks at the held-out loss, and nothing is held out: give validation or"
                " validation_fraction"
            )
        if self.watch.validate_every and not (data.validation or data.validation_fraction):
            raise ValueError(
                "validate_every measures the held-out loss, and nothing is held out: give validation or"
                " validation_fraction"
            )
        if self.watch.early_stop and not self.watch.validate_every:
            raise ValueError("early_stop counts validations: say by validate_every how often there is one")
        if data.validation and data.validation_fraction:
            raise ValueError("validation and validation_fraction both say what is held out: give one of them")
        return self

    @property
    def as_written(self) -> Self:
        """With the data as the user wrote it: a folder or a pattern, not what it became."""
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
        """Every field that changes what is computed: a resumed run must have the same ones as its save."""
        left_out = CHANGES_NOTHING | (ADDED - set(given(self)))
        fields = {name: value for name, value in flat(self.as_written).items() if name not in left_out}
        for table in [name for name, value in fields.items() if isinstance(value, dict)]:
            inner = cast(dict[str, Any], fields[table])
            fields[table] = {name: of for name, of in inner.items() if f"{table}.{name}" not in left_out}
            if not fields[table]:
                del fields[table]
        files = [_placed(file) for file in self.data.written.files]
        if fields.get("adapter"):
            fields["adapter"] = portable(str(fields["adapter"]))
        return {
            **fields,
            "model": portable(self.model),
            "data": files[0] if len(files) == 1 else files,
            "validation": _placed(self.data.validation) if self.data.validation else "",
            **({"data_files": became} if (became := self.data.became()) else {}),
        }


def _placed(written: str) -> str:
    """A file, folder or pattern from the root on; a name of the Hub as it is."""
    return written if written.startswith(HUB) else str(Path(written).resolve())


def _stem(written: str) -> str:
    """A short name of the data: chat of chat.jsonl.gz, d of d/*.jsonl, name of hf:org/name:config."""
    path = Path(written.removeprefix(HUB).split(":")[0]) if written.startswith(HUB) else Path(written)
    plain = next((part for part in (path, *path.parents) if not has_magic(part.name)), path)
    return Path(plain.stem).stem if plain.suffix == ".gz" else plain.stem or "data"


def portable(model: str) -> str:
    """A local model folder as an absolute path, to be found from any directory; an id stays as it is."""
    path = Path(model)
    return str(path.resolve()) if path.is_dir() else model
