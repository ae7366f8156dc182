"""Tables of a run's config: [data] [rope] [training] [optimizer] [muon] [memory] [save] [watch].

[place] is core/layout.py. Each field declares its aliases and earlier names (core/field.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, PrivateAttr, model_validator

from unfreeze.config.columns import Columns
from unfreeze.config.device import Device
from unfreeze.config.parse import Files, Folder, Frozen
from unfreeze.core.field import about
from unfreeze.core.longer import MAX_FACTOR, Longer

HUB = "hf:"
"""Prefix of a Hub data set where a file is expected."""


class Data(Frozen):
    """Training data: files of rows, their mixture, and the conversion of rows to tokens."""

    files: Files = Field(
        min_length=1,
        description=(
            "files of rows (.jsonl .json .csv .parquet .arrow; messages, prompt/completion, question/answer,"
            " instruction/output, conversations or text) or .txt; folders, patterns such as 'd/*.jsonl', or"
            " hf:org/name[:config][:split]"
        ),
        json_schema_extra=about("Model and data", alias="data", first=True),
    )
    columns: Columns = Field(
        default=(),
        description="column names in the files, FIELD=COLUMN: prompt=instruction,completion=output",
        json_schema_extra=about("Model and data", alias="columns", since="0.2"),
    )
    weights: tuple[float, ...] = Field(
        default=(),
        description=(
            "passes over each data file per epoch, in the order of `data`: 2 shows a file twice, 0.25 a new"
            " quarter each epoch"
        ),
        json_schema_extra=about("Model and data", was="data_weights"),
    )
    validation: Folder = Field(
        default="",
        description="file of held-out rows for validation, in the same formats as `data`",
        json_schema_extra=about("Model and data", alias="validation"),
    )
    validation_fraction: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="share of the rows held out for validation, chosen by a hash of their content; 0: none",
        json_schema_extra=about("Model and data", alias="validation_fraction", first=True),
    )
    sequence_length: int = Field(
        default=2048,
        ge=2,
        description="longest document in tokens; limited by tokens per micro-batch and the model's positions",
        json_schema_extra=about("How long", alias="sequence_length", first=True),
    )
    truncation: Literal["tail", "head", "error", "drop", "split"] = Field(
        default="tail",
        description=(
            "documents longer than sequence_length: cut the tail or head, stop with an error, drop the"
            " row, or split (texts). The run reports the counts"
        ),
        json_schema_extra=about("How long", was="truncation"),
    )
    template_variables: tuple[str, ...] = Field(
        default=(),
        description=(
            "NAME=VALUE for the chat template, such as enable_thinking=false; the value is JSON or text"
        ),
        json_schema_extra=about("Model and data", was="template_variables", since="0.2"),
    )
    template_date: str = Field(
        default="",
        description=(
            "date or time for a chat template that uses today's, such as 2026-11-22 or 2026-11-22T18:30;"
            " default: the run's first start, kept when it resumes"
        ),
        json_schema_extra=about("Model and data", was="template_date", since="0.2"),
    )
    on_bad_row: Literal["error", "skip"] = Field(
        default="error",
        description="unreadable rows: stop and name the row, or skip and count them",
        json_schema_extra=about("When things go wrong", was="on_bad_row"),
    )

    _written: Data | None = PrivateAttr(default=None)
    _files_of: dict[str, tuple[str, ...]] = PrivateAttr(default_factory=dict)

    def with_files(self, files: Mapping[str, Sequence[str]]) -> Self:
        """Return a copy with folders, patterns and Hub names resolved. files: name -> files.

        Each file gets the weight of its name.
        """
        each = [tuple(files[name]) for name in self.files]
        weights = [weight for weight, inside in zip(self.weights, each, strict=False) for _ in inside]
        resolved = self.model_copy(
            update={"files": tuple(file for inside in each for file in inside), "weights": tuple(weights)}
        )
        resolved._written, resolved._files_of = self, {name: tuple(inside) for name, inside in files.items()}
        return resolved

    @property
    def written(self) -> Data:
        """The data as the user wrote it, before `with_files`."""
        return self._written or self

    @property
    def names(self) -> list[str]:
        """For each file, a short form of the user's name for it: chat.jsonl, data, *.jsonl, hf:org/name."""
        named = self.written.files
        return [
            name if name.startswith(HUB) else Path(name).name
            for name in named
            for _ in self._files_of.get(name, (name,))
        ]

    @property
    def held_out(self) -> tuple[str, ...]:
        """Files of `validation`."""
        return self._files_of.get(self.validation, (self.validation,)) if self.validation else ()

    @property
    def sources(self) -> list[tuple[str, str]]:
        """(field, file) for every file with rows; field is "data" or "validation"."""
        return [*(("data", file) for file in self.files), *(("validation", file) for file in self.held_out)]

    def became(self) -> dict[str, str]:
        """Return file -> the folder, pattern or Hub name that it came from.

        For Hub files the cache folder is left out, because it differs between machines.
        """
        return {
            "/".join(Path(file).parts[-2:]) if name.startswith(HUB) else str(Path(file).resolve()): name
            for name, inside in self._files_of.items()
            if inside != (name,)
            for file in inside
        }


class Rope(Frozen):
    """More positions than the model was trained on: its rotary frequencies are scaled."""

    scaling: Literal["none", "yarn", "linear", "ntk"] = Field(
        default="none",
        description=(
            "scale rotary frequencies for more positions. yarn: low ones; linear: all; ntk: a larger"
            " rope_theta. config.json is written with it"
        ),
        json_schema_extra=about("How long", alias="rope_scaling", since="0.2"),
    )
    factor: float = Field(
        default=1.0,
        ge=1,
        le=MAX_FACTOR,
        description="with rope.scaling: new positions over the model's own, such as 4",
        json_schema_extra=about("How long", alias="rope_factor", since="0.2"),
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.scaling != "none") != (self.factor > 1):
            raise ValueError(
                f"rope.scaling = {self.scaling}, rope.factor = {self.factor:g}: give both, such as yarn and 4"
            )
        return self

    @property
    def longer(self) -> Longer | None:
        """The scaling, None if there is none."""
        return None if self.scaling == "none" else Longer(self.scaling, self.factor)


class Training(Frozen):
    """Length of training, and tokens per step."""

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
        description=(
            "tokens per optimizer step, over all micro-batches and processes; whole documents are packed."
            " Left out: the default for each process"
        ),
        json_schema_extra=about("How long", alias="tokens_per_step", first=True),
    )
    packing: Literal["none", "first_fit", "best_fit"] = Field(
        default="first_fit",
        description="documents per micro-batch: one, or as many as fit (first or best fit)",
        json_schema_extra=about("How long", was="packing data.packing"),
    )
    indexer: Literal["frozen", "trained"] = Field(
        default="frozen",
        description=(
            "indexer of sparse attention (DeepSeek-V3.2, GLM-5) when all weights train: frozen, or trained to"
            " follow attention. With adapters: name indexer in lora.targets"
        ),
        json_schema_extra=about("Learning", was="indexer", since="0.2"),
    )
    only: str = Field(
        default="",
        description=(
            'train some experts of a mixture and freeze all else, as "experts 8-15"; pretrain, or sft with'
            " train = all"
        ),
        json_schema_extra=about("Learning", since="0.2"),
    )


class Optimizer(Frozen):
    """AdamW or Muon, and the learning rate over the run."""

    kind: Literal["adamw", "muon"] = Field(
        default="adamw",
        description=(
            "adamw, or muon where all weights train: orthogonal updates of hidden layers' matrices, AdamW for"
            " the others"
        ),
        json_schema_extra=about("Learning", since="0.2"),
    )
    learning_rate: float = Field(
        default=2e-4,
        gt=0,
        description="peak learning rate",
        json_schema_extra=about("Learning", alias="learning_rate", first=True),
    )
    schedule: Literal["cosine", "linear", "constant", "wsd", "one_cycle"] = Field(
        default="cosine",
        description=(
            "decay of the learning rate after warm-up. one_cycle: up and down on cosines, as torch's"
            " OneCycleLR; 0.3 is its usual warmup"
        ),
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
        description="with schedule wsd: share of the steps, at the end, in which the learning rate falls",
        json_schema_extra=about("Learning", was="decay"),
    )
    start: float = Field(
        default=0.04,
        gt=0,
        le=1,
        description="with schedule one_cycle: the first learning rate, as a share of the peak",
        json_schema_extra=about("Learning", since="0.2"),
    )
    final: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="the learning rate at the end, as a share of the peak; default 0, with one_cycle 4e-6",
        json_schema_extra=about("Learning", since="0.2"),
    )
    weight_decay: float = Field(
        default=0.0,
        ge=0,
        description="decoupled weight decay on matrices",
        json_schema_extra=about("Learning", was="weight_decay"),
    )
    moments: Literal["float32", "int8"] = Field(
        default="float32",
        description="AdamW's moments: 8 bytes per parameter that it updates, or 2.03 with int8",
        json_schema_extra=about("Memory and machine", was="optimizer_moments"),
    )
    clip: float = Field(
        default=1.0,
        ge=0,
        description="limit of the global gradient norm; 0: none",
        json_schema_extra=about("Learning", was="clip"),
    )


class Muon(Frozen):
    """Settings of optimizer.kind = "muon"."""

    momentum: float = Field(
        default=0.95,
        ge=0,
        lt=1,
        description="Nesterov momentum of the matrices",
        json_schema_extra=about("Learning", since="0.2"),
    )
    update_scale: Literal["match_rms_adamw", "original"] = Field(
        default="match_rms_adamw",
        description=(
            "size of a matrix's update. match_rms_adamw: AdamW's, so its learning rates"
            " serve; original: sqrt(max(1, out / in)), with rates near 0.02"
        ),
        json_schema_extra=about("Learning", since="0.2"),
    )
    adamw_rate: float = Field(
        default=1.0,
        gt=0,
        description="learning rate of the weights that AdamW updates, over learning_rate",
        json_schema_extra=about("Learning", since="0.2"),
    )
    qk_clip: float = Field(
        default=0.0,
        ge=0,
        description=(
            "limit of attention logits: heads above it are scaled back after each update (Kimi K2: 100);"
            " 0: none. It costs a second product of queries and keys"
        ),
        json_schema_extra=about("Learning", since="0.2"),
    )


class Memory(Frozen):
    """Device, dtype and micro-batches of a step."""

    micro_batches: int = Field(
        default=1,
        ge=1,
        description=(
            "micro-batches per step (gradient accumulation): more of them need less memory; the loss is still"
            " normalised over all tokens of the step"
        ),
        json_schema_extra=about("Memory and machine", alias="micro_batches", first=True),
    )
    dtype: Literal["auto", "bfloat16", "float32"] = Field(
        default="auto",
        description=(
            "compute dtype. auto: bfloat16 where the hardware has bf16 matmul units, else float32."
            " On a CPU, frozen weights stay as stored; adapters are float32"
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
    """Saves of the training state, for resuming a run."""

    every: int = Field(
        default=0,
        ge=0,
        description="steps between saves; 0: only by `save.minutes`, at the end and on Ctrl-C",
        json_schema_extra=about("Output", alias="save_every", computes=False),
    )
    minutes: float = Field(
        default=10.0,
        ge=0,
        description="minutes between saves, besides `save_every`; 0: none by time",
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
            "no disk space for a save: stop, or warn and continue until the next save. Earlier saves are kept"
        ),
        json_schema_extra=about("When things go wrong", was="on_full_disk", computes=False),
    )
    allow_changed: tuple[str, ...] = Field(
        default=(),
        description="fields that a resumed run may change, such as learning_rate",
        json_schema_extra=about("When things go wrong", was="allow_changed", computes=False),
    )


class Watch(Frozen):
    """Monitoring of a run: validation, sample answers, trackers, loss spikes."""

    validate_every: int = Field(
        default=0,
        ge=0,
        description="steps between validations; 0: only before the first step and after the last",
        json_schema_extra=about("Output", was="validate_every", computes=False),
    )
    eval: tuple[str, ...] = Field(
        default=(),
        description=(
            "tasks of `unfreeze eval` to score before, during and after training: rows:FILE:METRIC, ppl:FILE,"
            " needle, FILE.yaml; the first one chooses the best step"
        ),
        json_schema_extra=about("Output", alias="eval", computes=False, since="0.2"),
    )
    eval_every: int = Field(
        default=0,
        ge=0,
        description="steps between scores; 0: only before the first step and after the last",
        json_schema_extra=about("Output", computes=False, since="0.2"),
    )
    eval_limit: int | None = Field(
        default=None,
        ge=1,
        description="most items of a task while training; default: all",
        json_schema_extra=about("Output", computes=False, since="0.2"),
    )
    eval_tokens: int = Field(
        default=256,
        ge=1,
        description="most tokens of an answer of a task while training",
        json_schema_extra=about("Output", computes=False, since="0.2"),
    )
    early_stop: int = Field(
        default=0,
        ge=0,
        description=(
            "stop after N validations without a lower held-out loss, or with watch.eval N scores without a"
            " better one; 0: never. The best step is kept beside the last"
        ),
        json_schema_extra=about("How long", was="early_stop", since="0.2"),
    )
    samples: int = Field(
        default=4,
        ge=0,
        description="held-out rows (training rows if none are held out) to answer before and after training",
        json_schema_extra=about("Output", was="samples", computes=False),
    )
    prompts: tuple[str, ...] = Field(
        default=(),
        description="your own prompts, answered before and after training and at each validation",
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
            "loss or gradient norm more than 8 robust deviations above the last steps: warn, skip the update,"
            " or stop. The rows of the step go to suspects.jsonl"
        ),
        json_schema_extra=about("When things go wrong", was="on_spike", computes=False),
    )
    usd_per_hour: float | None = Field(
        default=None,
        gt=0,
        le=1e6,
        description="price per hour of the machine, for the forecast after 50 steps; unset: no cost",
        json_schema_extra=about("Output", computes=False, since="0.2"),
    )
