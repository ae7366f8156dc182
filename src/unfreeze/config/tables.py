"""The tables of a run's config: [data] [training] [optimizer] [memory] [place] [save] [watch].

Each field's flat name stands in FLAT (training.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, PrivateAttr

from unfreeze.config.columns import Columns
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
        description=(
            "the files' own names of a row's fields, FIELD=COLUMN: prompt=instruction,completion=output"
        ),
    )
    weights: tuple[float, ...] = Field(
        default=(),
        description=(
            "passes over each data file per epoch, in the order of `data`: 2 shows a file twice, 0.25 a new"
            " quarter each epoch"
        ),
    )
    validation: Folder = Field(
        default="", description="file whose rows are held out for validation; as `data`"
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
            "documents over sequence_length: cut the tail or head, stop, drop the row, or split (texts)."
            " Counted and said"
        ),
    )
    template_variables: tuple[str, ...] = Field(
        default=(),
        description=(
            "NAME=VALUE for the chat template, such as enable_thinking=false; the value is JSON, or text"
            " where it is none"
        ),
    )
    template_date: str = Field(
        default="",
        description=(
            "date and time the chat template writes where it asks for today's, as 2026-11-22 or"
            " 2026-11-22T18:30; default: the run's first start, so that a run that goes on another day has"
            " the same data"
        ),
    )
    on_bad_row: Literal["error", "skip"] = Field(
        default="error", description="a row that cannot be read: stop, naming it, or skip and count it"
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
        description=(
            "passes over the data, if `steps` is not given. 3: usual for instruction data of some thousand"
            " rows"
        ),
    )
    steps: int | None = Field(
        default=None, ge=1, description="optimizer steps; default: as many as `epochs` need"
    )
    tokens_per_step: int = Field(
        default=4096,
        ge=2,
        description="tokens of one optimizer step, all micro-batches together; whole documents are packed",
    )
    packing: Literal["none", "first_fit", "best_fit"] = Field(
        default="first_fit",
        description=(
            "documents of a micro-batch: one alone, or as many as fit, first or best. The fill is in the data"
            " line"
        ),
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
        default=0.2, ge=0, le=1, description="share of the steps in the final fall of schedule wsd"
    )
    weight_decay: float = Field(default=0.0, ge=0, description="decoupled weight decay on matrices")
    moments: Literal["float32", "int8"] = Field(
        default="float32",
        description=(
            "AdamW's moments: 8 bytes per trained parameter, or 2.03 in blocks of 256 (loss:"
            " docs/decisions.md 33)"
        ),
    )
    clip: float = Field(default=1.0, ge=0, description="limit of the global gradient norm; 0: none")


class Memory(Frozen):
    """Where a step is computed, and what it may keep."""

    micro_batches: int = Field(
        default=1,
        ge=1,
        description=(
            "parts a step's tokens are cut into, to save memory; each holds whole documents, and the gradient"
            " is that of all its documents together"
        ),
    )
    dtype: Literal["bfloat16", "float32"] = Field(
        default="bfloat16",
        description=(
            "dtype of the weights and the computation; adapters are float32; bfloat16 weights train with"
            " float32 masters"
        ),
    )
    recompute: Literal["auto", "layers", "selective", "elementwise", "nothing"] = Field(
        default="auto",
        description=(
            "auto: the fastest that fits in the free memory, kept when the run goes on; layers: keep only"
            " each layer's input; selective: and what attention and experts made; elementwise: and what"
            " linear layers made, so that no GEMM is done twice; nothing: keep all"
        ),
    )
    keep_layers: int | None = Field(
        default=None,
        ge=0,
        description="selective, elementwise: only the last so many layers keep; unset: all",
    )
    device: str = Field(default="auto", description="auto (CUDA if there is one), cpu, cuda, cuda:1")
    threads: int = Field(
        default=0,
        ge=0,
        description="CPU threads; 0: all cores. 1 is as fast for models of a few million parameters",
    )


class Place(Frozen):
    """Where the parts of a model lie that need not lie on the device."""

    experts: Literal["auto", "device", "host", "disk"] = Field(
        default="auto",
        description=(
            "where the frozen weights of routed experts lie: device: all of them; host, disk: there, and they"
            " come layer by layer into two buffers; auto: the first of device, host (with CUDA) and disk that"
            " fits. The numbers are the same, to the bit"
        ),
    )
    buffer: Literal["auto"] | Annotated[float, Field(gt=0)] = Field(
        default="auto",
        description=(
            "GiB of each of the two buffers through which experts come from host or disk. A layer that is"
            " larger comes in groups of its experts; auto: a layer's, or where only that fits, less"
        ),
    )
    split: Literal["auto"] | Annotated[int, Field(ge=1)] = Field(
        default="auto",
        description=(
            "processes that share one set of experts: rows of tokens go to the process that holds their"
            " expert. 1: every process holds all; auto: 1 where that fits, else the fewest that fit, within a"
            " host"
        ),
    )
    weights: Literal["auto", "device", "sharded"] = Field(
        default="auto",
        description=(
            "where every weight trains, in several processes: device: each holds all of them; sharded: each"
            " holds a part of each, with its gradient and moments, and layers are gathered as they are"
            " visited; auto: device where that fits"
        ),
    )
    rest: Literal["auto", "device", "peers"] = Field(
        default="auto",
        description=(
            "where adapters train, in several processes: what layers have besides routed experts; device:"
            " each holds all of it; peers: each holds a part of its bytes, and gathers layers as they are"
            " visited; auto: device where that fits. The numbers are the same, to the bit"
        ),
    )
    boundary: Literal["auto", "device", "host"] = Field(
        default="auto",
        description=(
            "with CUDA, where adapters train: the inputs of layers, which are kept until backward; host: in"
            " host memory, two of them on the device at once; auto: device where that fits. The numbers are"
            " the same, to the bit"
        ),
    )
    optimizer: Literal["auto", "device", "host"] = Field(
        default="auto",
        description=(
            "with CUDA, where adapters train: AdamW's moments between updates; host: in host memory, from"
            " where some at a time come to the device for an update; auto: device where that fits. The"
            " numbers are the same, to the bit"
        ),
    )


class Save(Frozen):
    """What is saved, so that a run can be resumed."""

    every: int = Field(
        default=0, ge=0, description="steps between saves; 0: by minutes, at the end and on Ctrl-C"
    )
    minutes: float = Field(
        default=10.0,
        ge=0,
        description="minutes after which a run saves again, beside `save_every`; 0: never by the clock",
    )
    keep: int = Field(default=2, ge=1, description="how many saves of the training state are kept")
    on_full_disk: Literal["stop", "continue"] = Field(
        default="stop",
        description=(
            "a save without room on the disk: stop, or warn and train on to the next save. Earlier saves stay"
            " either way"
        ),
    )
    allow_changed: tuple[str, ...] = Field(
        default=(),
        description=(
            "fields in which an unfinished run may go on with another value than it was saved with, such as"
            " learning_rate"
        ),
    )


class Watch(Frozen):
    """What is watched while a run trains: validation, sampled answers, trackers, spikes of the loss."""

    validate_every: int = Field(
        default=0,
        ge=0,
        description=(
            "steps between validations, with `validation` or `validation_fraction`; 0: before the first and"
            " after the last"
        ),
    )
    early_stop: int = Field(
        default=0,
        ge=0,
        description=(
            "validations in a row without a lower held-out loss after which the run ends; 0: never. The"
            " result is the last state, the best step's is kept beside it"
        ),
    )
    samples: int = Field(
        default=4,
        ge=0,
        description="prompts from the data answered before and after training, for the report",
    )
    prompts: tuple[str, ...] = Field(
        default=(), description="own prompts, answered where those of `samples` are, and at each validation"
    )
    track: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = Field(
        default=(),
        description="trackers that also get the events; wandb stays offline unless WANDB_MODE=online is set",
    )
    on_spike: Literal["warn", "skip", "stop"] = Field(
        default="warn",
        description=(
            "a loss or gradient norm beyond 8 robust deviations of the last 64 steps: say so, skip the"
            " update, or stop before it; its rows go to suspects.jsonl"
        ),
    )
