"""The tables of a run's config: [data] [training] [optimizer] [memory] [save] [watch].

[place] is core/layout.py.
Each field's flat name stands in FLAT (training.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, PrivateAttr

from unfreeze.config.columns import Columns
from unfreeze.config.device import Device
from unfreeze.config.parse import Files, Folder, Frozen
from unfreeze.core.field import about

HUB = "hf:"
"""What a data set of the Hub begins with, where a file is expected."""


class Data(Frozen):
    """What is taught: files of rows, how they mix, and how a row becomes tokens."""

    files: Files = Field(
        min_length=1,
        description=(
            "files of rows (.jsonl .json .csv .parquet .arrow; messages, prompt/completion, question/answer,"
            " instruction/output, conversations or text) or .txt; folders, patterns such as 'd/*.jsonl', or"
            " hf:org/name[:config][:split]"
        ),
        json_schema_extra=about("What", alias="data", first=True),
    )
    columns: Columns = Field(
        default=(),
        description="column names in the files, FIELD=COLUMN: prompt=instruction,completion=output",
        json_schema_extra=about("What", alias="columns", since="0.2"),
    )
    weights: tuple[float, ...] = Field(
        default=(),
        description=(
            "passes over each data file per epoch, in the order of `data`: 2 shows a file twice, 0.25 a new"
            " quarter each epoch"
        ),
        json_schema_extra=about("What", was="data_weights"),
    )
    validation: Folder = Field(
        default="",
        description="file of held-out rows for validation; the same forms as `data`",
        json_schema_extra=about("What", alias="validation"),
    )
    validation_fraction: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="share of the rows held out for validation, chosen by a hash of their content; 0: none",
        json_schema_extra=about("What", alias="validation_fraction", first=True),
    )
    sequence_length: int = Field(
        default=2048,
        ge=2,
        description="longest document in tokens; bounded by tokens per micro-batch and the model's positions",
        json_schema_extra=about("How long", alias="sequence_length", first=True),
    )
    truncation: Literal["tail", "head", "error", "drop", "split"] = Field(
        default="tail",
        description=(
            "documents longer than sequence_length: cut the tail or head, stop, drop the row, or split"
            " (texts). All are counted"
        ),
        json_schema_extra=about("How long", was="truncation"),
    )
    template_variables: tuple[str, ...] = Field(
        default=(),
        description=(
            "NAME=VALUE for the chat template, such as enable_thinking=false; the value is JSON or text"
        ),
        json_schema_extra=about("What", was="template_variables", since="0.2"),
    )
    template_date: str = Field(
        default="",
        description=(
            "date and time for a chat template that writes today's, as 2026-11-22 or 2026-11-22T18:30;"
            " default: the run's first start, kept when it resumes"
        ),
        json_schema_extra=about("What", was="template_date", since="0.2"),
    )
    on_bad_row: Literal["error", "skip"] = Field(
        default="error",
        description="a row that cannot be read: stop and name it, or skip and count it",
        json_schema_extra=about("When things go wrong", was="on_bad_row"),
    )

    _written: Data | None = PrivateAttr(default=None)
    _found: dict[str, tuple[str, ...]] = PrivateAttr(default_factory=dict)

    def found(self, files: Mapping[str, Sequence[str]]) -> Self:
        """The same with the files that its folders, patterns and names of the Hub stand for, name -> files.

        A weight becomes that of each of its files.
        """
        each = [tuple(files[name]) for name in self.files]
        weights = [weight for weight, inside in zip(self.weights, each, strict=False) for _ in inside]
        made = self.model_copy(
            update={"files": tuple(file for inside in each for file in inside), "weights": tuple(weights)}
        )
        made._written, made._found = self, {name: tuple(inside) for name, inside in files.items()}
        return made

    @property
    def written(self) -> Data:
        """As the user wrote it, before `found`."""
        return self._written or self

    @property
    def names(self) -> list[str]:
        """Of each file what the user wrote for it, in short: chat.jsonl, data, *.jsonl, hf:org/name."""
        named = self.written.files
        return [
            name if name.startswith(HUB) else Path(name).name
            for name in named
            for _ in self._found.get(name, (name,))
        ]

    @property
    def held_out(self) -> tuple[str, ...]:
        """The files of `validation`."""
        return self._found.get(self.validation, (self.validation,)) if self.validation else ()

    @property
    def sources(self) -> list[tuple[str, str]]:
        """Every file that rows are read from, with the flat name of the field that says so."""
        return [*(("data", file) for file in self.files), *(("validation", file) for file in self.held_out)]

    def became(self) -> dict[str, str]:
        """Each file that a folder, a pattern or a name of the Hub stands for -> what stood for it.

        Of the Hub's the folder of the cache is left out: another machine has it elsewhere.
        """
        return {
            "/".join(Path(file).parts[-2:]) if name.startswith(HUB) else str(Path(file).resolve()): name
            for name, inside in self._found.items()
            if inside != (name,)
            for file in inside
        }


class Training(Frozen):
    """How long, and how many tokens at once."""

    epochs: float = Field(
        default=3.0,
        gt=0,
        description="passes over the data, if `steps` is not given; 3 is usual for some thousand rows",
        json_schema_extra=about("How long", alias="epochs", first=True),
    )
    steps: int | None = Field(
        default=None,
        ge=1,
        description="optimizer steps; default: computed from `epochs`",
        json_schema_extra=about("How long", alias="steps", first=True),
    )
    tokens_per_step: int = Field(
        default=4096,
        ge=2,
        description="tokens of one optimizer step, all micro-batches together; whole documents are packed",
        json_schema_extra=about("How long", alias="tokens_per_step", first=True),
    )
    packing: Literal["none", "first_fit", "best_fit"] = Field(
        default="first_fit",
        description="documents per micro-batch: one, or as many as fit (first or best fit)",
        json_schema_extra=about("How long", was="packing data.packing"),
    )


class Optimizer(Frozen):
    """AdamW and its learning rate over the run."""

    learning_rate: float = Field(
        default=2e-4,
        gt=0,
        description="peak learning rate",
        json_schema_extra=about("Learning", alias="learning_rate", first=True),
    )
    schedule: Literal["cosine", "linear", "constant", "wsd"] = Field(
        default="cosine",
        description="how the learning rate falls after warm-up",
        json_schema_extra=about("Learning", was="schedule"),
    )
    warmup: float = Field(
        default=0.03,
        ge=0,
        le=1,
        description="share of the steps in which the learning rate rises linearly",
        json_schema_extra=about("Learning", was="warmup"),
    )
    decay: float = Field(
        default=0.2,
        ge=0,
        le=1,
        description=("with schedule wsd: share of the steps in which the learning rate falls at the end"),
        json_schema_extra=about("Learning", was="decay"),
    )
    weight_decay: float = Field(
        default=0.0,
        ge=0,
        description="decoupled weight decay on matrices",
        json_schema_extra=about("Learning", was="weight_decay"),
    )
    moments: Literal["float32", "int8"] = Field(
        default="float32",
        description="AdamW's moments: 8 bytes per trained parameter, or 2.03 with int8",
        json_schema_extra=about("Memory and machine", was="optimizer_moments"),
    )
    clip: float = Field(
        default=1.0,
        ge=0,
        description="limit of the global gradient norm; 0: none",
        json_schema_extra=about("Learning", was="clip"),
    )


class Memory(Frozen):
    """Where a step is computed, and what it may keep."""

    micro_batches: int = Field(
        default=1,
        ge=1,
        description=(
            "parts of a step, computed one after the other to save memory; the gradient is the same as in"
            " one part"
        ),
        json_schema_extra=about("Memory and machine", alias="micro_batches", first=True),
    )
    dtype: Literal["auto", "bfloat16", "float32"] = Field(
        default="auto",
        description=(
            "number format of the computation. auto: bfloat16 where the hardware multiplies it, else float32."
            " On a CPU frozen weights stay as stored; adapters are float32"
        ),
        json_schema_extra=about("Memory and machine", alias="dtype", first=True),
    )
    device: Device = Field(
        default="auto",
        description="auto (CUDA if there is one), cpu, cuda, cuda:1",
        json_schema_extra=about("Memory and machine", alias="device"),
    )
    threads: int = Field(
        default=0,
        ge=0,
        description="CPU threads; 0: all cores. 1 is as fast for models of a few million parameters",
        json_schema_extra=about("Memory and machine", alias="threads", computes=False),
    )


class Save(Frozen):
    """What is saved, so that a run can be resumed."""

    every: int = Field(
        default=0,
        ge=0,
        description=("steps between saves; 0: only every `save_minutes`, at the end and on Ctrl-C"),
        json_schema_extra=about("Output", alias="save_every", computes=False),
    )
    minutes: float = Field(
        default=10.0,
        ge=0,
        description="minutes between saves, besides `save_every`; 0: never by the clock",
        json_schema_extra=about("Output", was="save_minutes", computes=False),
    )
    keep: int = Field(
        default=2,
        ge=1,
        description="saves of the training state to keep",
        json_schema_extra=about("Output", was="keep_saves", computes=False),
    )
    on_full_disk: Literal["stop", "continue"] = Field(
        default="stop",
        description=(
            "no room on the disk for a save: stop, or warn and train on until the next save. Earlier saves"
            " stay"
        ),
        json_schema_extra=about("When things go wrong", was="on_full_disk", computes=False),
    )
    allow_changed: tuple[str, ...] = Field(
        default=(),
        description="fields that a resumed run may change, such as learning_rate",
        json_schema_extra=about("When things go wrong", was="allow_changed", computes=False),
    )


class Watch(Frozen):
    """What is watched while a run trains: validation, sampled answers, trackers, spikes of the loss."""

    validate_every: int = Field(
        default=0,
        ge=0,
        description="steps between validations; 0: only before the first step and after the last",
        json_schema_extra=about("Output", was="validate_every", computes=False),
    )
    early_stop: int = Field(
        default=0,
        ge=0,
        description=(
            "stop after N validations without a lower held-out loss; 0: never. The best step is kept beside"
            " the last"
        ),
        json_schema_extra=about("How long", was="early_stop", since="0.2"),
    )
    samples: int = Field(
        default=4,
        ge=0,
        description="held-out rows (training rows where none are) answered before and after training",
        json_schema_extra=about("Output", was="samples", computes=False),
    )
    prompts: tuple[str, ...] = Field(
        default=(),
        description="own prompts, answered before and after training and at each validation",
        json_schema_extra=about("Output", was="prompts", computes=False),
    )
    track: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = Field(
        default=(),
        description="trackers that also get the events; wandb stays offline unless WANDB_MODE=online is set",
        json_schema_extra=about("Output", was="track", computes=False),
    )
    on_spike: Literal["warn", "skip", "stop"] = Field(
        default="warn",
        description=(
            "a loss or gradient norm beyond 8 robust deviations of the last 64 steps: warn, skip the update,"
            " or stop. Its rows go to suspects.jsonl"
        ),
        json_schema_extra=about("When things go wrong", was="on_spike", computes=False),
    )
