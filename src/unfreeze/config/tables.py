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
    )
    columns: Columns = Field(
        default=(),
        description="column names in the files, FIELD=COLUMN: prompt=instruction,completion=output",
    )
    weights: tuple[float, ...] = Field(
        default=(),
        description=(
            "passes over each data file per epoch, in the order of `data`: 2 shows a file twice, 0.25 a new"
            " quarter each epoch"
        ),
    )
    validation: Folder = Field(
        default="", description="file of held-out rows for validation; the same forms as `data`"
    )
    validation_fraction: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="share of the rows held out for validation, chosen by a hash of their content; 0: none",
    )
    sequence_length: int = Field(
        default=2048,
        ge=2,
        description="longest document in tokens; bounded by tokens per micro-batch and the model's positions",
    )
    truncation: Literal["tail", "head", "error", "drop", "split"] = Field(
        default="tail",
        description=(
            "documents longer than sequence_length: cut the tail or head, stop, drop the row, or split"
            " (texts). All are counted"
        ),
    )
    template_variables: tuple[str, ...] = Field(
        default=(),
        description=(
            "NAME=VALUE for the chat template, such as enable_thinking=false; the value is JSON or text"
        ),
    )
    template_date: str = Field(
        default="",
        description=(
            "date and time for a chat template that writes today's, as 2026-11-22 or 2026-11-22T18:30;"
            " default: the run's first start, kept when it resumes"
        ),
    )
    on_bad_row: Literal["error", "skip"] = Field(
        default="error", description="a row that cannot be read: stop and name it, or skip and count it"
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
    )
    steps: int | None = Field(
        default=None, ge=1, description="optimizer steps; default: computed from `epochs`"
    )
    tokens_per_step: int = Field(
        default=4096,
        ge=2,
        description="tokens of one optimizer step, all micro-batches together; whole documents are packed",
    )
    packing: Literal["none", "first_fit", "best_fit"] = Field(
        default="first_fit",
        description="documents per micro-batch: one, or as many as fit (first or best fit)",
    )


class Optimizer(Frozen):
    """AdamW and its learning rate over the run."""

    learning_rate: float = Field(default=2e-4, gt=0, description="peak learning rate")
    schedule: Literal["cosine", "linear", "constant", "wsd"] = Field(
        default="cosine", description="how the learning rate falls after warm-up"
    )
    warmup: float = Field(
        default=0.03, ge=0, le=1, description="share of the steps in which the learning rate rises linearly"
    )
    decay: float = Field(
        default=0.2,
        ge=0,
        le=1,
        description=("with schedule wsd: share of the steps in which the learning rate falls at the end"),
    )
    weight_decay: float = Field(default=0.0, ge=0, description="decoupled weight decay on matrices")
    moments: Literal["float32", "int8"] = Field(
        default="float32", description="AdamW's moments: 8 bytes per trained parameter, or 2.03 with int8"
    )
    clip: float = Field(default=1.0, ge=0, description="limit of the global gradient norm; 0: none")


class Memory(Frozen):
    """Where a step is computed, and what it may keep."""

    micro_batches: int = Field(
        default=1,
        ge=1,
        description=(
            "parts of a step, computed one after the other to save memory; the gradient is the same as in"
            " one part"
        ),
    )
    dtype: Literal["auto", "bfloat16", "float32"] = Field(
        default="auto",
        description=(
            "number format of the computation. auto: bfloat16 where the hardware multiplies it, else float32."
            " On a CPU frozen weights stay as stored; adapters are float32"
        ),
    )
    device: Device = Field(default="auto", description="auto (CUDA if there is one), cpu, cuda, cuda:1")
    threads: int = Field(
        default=0,
        ge=0,
        description="CPU threads; 0: all cores. 1 is as fast for models of a few million parameters",
    )


class Save(Frozen):
    """What is saved, so that a run can be resumed."""

    every: int = Field(
        default=0,
        ge=0,
        description=("steps between saves; 0: only every `save_minutes`, at the end and on Ctrl-C"),
    )
    minutes: float = Field(
        default=10.0, ge=0, description="minutes between saves, besides `save_every`; 0: never by the clock"
    )
    keep: int = Field(default=2, ge=1, description="saves of the training state to keep")
    on_full_disk: Literal["stop", "continue"] = Field(
        default="stop",
        description=(
            "no room on the disk for a save: stop, or warn and train on until the next save. Earlier saves"
            " stay"
        ),
    )
    allow_changed: tuple[str, ...] = Field(
        default=(), description="fields that a resumed run may change, such as learning_rate"
    )


class Watch(Frozen):
    """What is watched while a run trains: validation, sampled answers, trackers, spikes of the loss."""

    validate_every: int = Field(
        default=0,
        ge=0,
        description="steps between validations; 0: only before the first step and after the last",
    )
    early_stop: int = Field(
        default=0,
        ge=0,
        description=(
            "stop after N validations without a lower held-out loss; 0: never. The best step is kept beside"
            " the last"
        ),
    )
    samples: int = Field(
        default=4,
        ge=0,
        description="held-out rows (training rows where none are) answered before and after training",
    )
    prompts: tuple[str, ...] = Field(
        default=(), description="own prompts, answered before and after training and at each validation"
    )
    track: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = Field(
        default=(),
        description="trackers that also get the events; wandb stays offline unless WANDB_MODE=online is set",
    )
    on_spike: Literal["warn", "skip", "stop"] = Field(
        default="warn",
        description=(
            "a loss or gradient norm beyond 8 robust deviations of the last 64 steps: warn, skip the update,"
            " or stop. Its rows go to suspects.jsonl"
        ),
    )
