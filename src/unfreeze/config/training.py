"""The fields every kind of training shares. Each is a TOML key, a flag and a keyword in Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from unfreeze.config.parse import Files, Folder, Frozen, ModelName
from unfreeze.config.template import template_time, template_values

CHANGES_NOTHING = {
    "out", "save_every", "keep_saves", "on_full_disk", "allow_changed", "validate_every", "prompts", "samples", "threads", "on_spike", "track",
}  # fmt: skip
"""Fields that change nothing of what is trained; a run may go on with other values."""
ADDED = {"turns", "reasoning", "template_variables", "template_date"}
"""Fields that saves of earlier versions don't have. At its default such a field is left out of a run's record, so that those saves go on."""


HELP = {
    "What": (
        "model", "data", "data_weights", "validation", "validation_fraction", "train", "turns", "reasoning", "template_variables", "template_date",
    ),
    "How long": ("epochs", "steps", "tokens_per_step", "sequence_length", "packing", "truncation"),
    "Learning": ("learning_rate", "schedule", "warmup", "decay", "weight_decay", "clip", "balance_rate", "seed"),
    "Adapters": ("lora.rank", "lora.alpha", "lora.targets", "lora.experts_rank", "lora.scaling"),
    "Memory and machine": ("micro_batches", "dtype", "recompute", "keep_layers", "optimizer_moments", "device", "threads"),
    "Output": ("out", "save_every", "keep_saves", "validate_every", "samples", "prompts", "track"),
    "When things go wrong": ("on_bad_row", "on_spike", "on_full_disk", "allow_changed"),
}  # fmt: skip
"""Every field under a heading of --help-all."""
FIRST = (
    "model", "data", "train", "epochs", "steps", "tokens_per_step", "sequence_length", "learning_rate", "lora.rank", "micro_batches", "dtype", "out",
    "save_every",
)  # fmt: skip
"""What --help shows."""


class TrainingConfig(Frozen):
    """Fields of every training recipe; each is a flag and a TOML key."""

    HELP: ClassVar[dict[str, tuple[str, ...]]] = HELP
    FIRST: ClassVar[tuple[str, ...]] = FIRST

    model: ModelName = Field(description="checkpoint folder, or Hugging Face id org/name")
    data: Files = Field(
        min_length=1,
        description="files of JSON Lines (messages, prompt/completion, question/answer, instruction/output, conversations or text) or .txt",
    )
    data_weights: tuple[float, ...] = Field(
        default=(), description="passes over each data file per epoch, in the order of `data`: 2 shows a file twice, 0.25 a new quarter each epoch"
    )
    validation: Folder = Field(default="", description="file whose rows are held out for validation")
    validation_fraction: float = Field(
        default=0.0, ge=0, lt=1, description="share of the rows held out for validation, chosen by a hash of their content; 0: none"
    )
    out: Folder = Field(default="", description="run folder; default runs/<model>-<data>")
    steps: int | None = Field(default=None, ge=1, description="optimizer steps; default: as many as `epochs` need")
    epochs: float = Field(
        default=3.0, gt=0, description="passes over the data, if `steps` is not given. 3: usual for instruction data of some thousand rows"
    )
    tokens_per_step: int = Field(
        default=4096, ge=2, description="tokens of one optimizer step, all micro-batches together; whole documents are packed"
    )
    micro_batches: int = Field(default=1, ge=1, description="parts a step's tokens are cut into, to save memory; the gradient is the same")
    sequence_length: int = Field(
        default=2048, ge=2, description="longest document in tokens; bounded by tokens per micro-batch and the model's positions"
    )
    packing: Literal["none", "first_fit", "best_fit"] = Field(
        default="first_fit", description="documents of a micro-batch: one alone, or as many as fit, first or best. The fill is in the data line"
    )
    truncation: Literal["tail", "head", "error", "drop", "split"] = Field(
        default="tail", description="documents over sequence_length: cut the tail or head, stop, drop the row, or split (texts). Counted and said"
    )
    template_variables: tuple[str, ...] = Field(
        default=(), description="NAME=VALUE for the chat template, such as enable_thinking=false; the value is JSON, or text where it is none"
    )
    template_date: str = Field(
        default="", description="date and time the chat template writes where it asks for today's, as 2026-11-22 or 2026-11-22T18:30; default: the "
        "run's first start, so that a run that goes on another day has the same data"
    )  # fmt: skip
    on_bad_row: Literal["error", "skip"] = Field(default="error", description="a row that cannot be read: stop, naming it, or skip and count it")
    learning_rate: float = Field(default=2e-4, gt=0, description="peak learning rate")
    schedule: Literal["cosine", "linear", "constant", "wsd"] = Field(default="cosine", description="how the learning rate falls after warm-up")
    warmup: float = Field(default=0.03, ge=0, le=1, description="share of the steps in which the learning rate rises linearly")
    decay: float = Field(default=0.2, ge=0, le=1, description="share of the steps in the final fall of schedule wsd")
    weight_decay: float = Field(default=0.0, ge=0, description="decoupled weight decay on matrices")
    optimizer_moments: Literal["float32", "int8"] = Field(
        default="float32", description="AdamW's moments: 8 bytes per trained parameter, or 2.03 in blocks of 256 (loss: docs/decisions.md 33)"
    )
    clip: float = Field(default=1.0, ge=0, description="limit of the global gradient norm; 0: none")
    dtype: Literal["bfloat16", "float32"] = Field(
        default="bfloat16", description="dtype of the weights and the computation; adapters are float32; bfloat16 weights train with float32 masters"
    )
    device: str = Field(default="auto", description="auto (CUDA if there is one), cpu, cuda, cuda:1")
    threads: int = Field(default=0, ge=0, description="CPU threads; 0: all cores. 1 is as fast for models of a few million parameters")
    recompute: Literal["layers", "selective", "elementwise", "nothing"] = Field(
        default="selective",
        description="layers: keep only each layer's input; selective: and what attention and experts made; "
        "elementwise: and what linear layers made, so that no GEMM is done twice (the choice for dense models); nothing: keep all"
    )
    keep_layers: int | None = Field(default=None, ge=0, description="selective, elementwise: only the last so many layers keep; unset: all")
    on_spike: Literal["warn", "skip", "stop"] = Field(
        default="warn",
        description="a loss or gradient norm beyond 8 robust deviations of the last 64 steps: say so, skip the update, or stop before it; "
        "its rows go to suspects.jsonl",
    )
    seed: int = Field(default=0, ge=0, description="seed of adapters, weights and data order")
    save_every: int = Field(default=0, ge=0, description="steps between saves; 0: at the end and on Ctrl-C")
    keep_saves: int = Field(default=2, ge=1, description="how many saves of the training state are kept")
    on_full_disk: Literal["stop", "continue"] = Field(
        default="stop", description="a save without room on the disk: stop, or warn and train on to the next save. Earlier saves stay either way"
    )
    allow_changed: tuple[str, ...] = Field(
        default=(), description="fields in which an unfinished run may go on with another value than it was saved with, such as learning_rate"
    )
    validate_every: int = Field(
        default=0, ge=0, description="steps between validations, with `validation` or `validation_fraction`; 0: before the first and after the last"
    )
    prompts: tuple[str, ...] = Field(default=(), description="own prompts, answered where those of `samples` are, and at each validation")
    track: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = Field(
        default=(), description="trackers that also get the events; wandb stays offline unless WANDB_MODE=online is set"
    )
    samples: int = Field(default=4, ge=0, description="prompts from the data answered before and after training, for the report")

    @model_validator(mode="after")
    def _tokens_fit(self) -> TrainingConfig:
        if self.tokens_per_step < 2 * self.micro_batches:
            raise ValueError(f"tokens_per_step {self.tokens_per_step} is less than 2 tokens for each of {self.micro_batches} micro_batches")
        if self.data_weights and len(self.data_weights) != len(self.data):
            raise ValueError(f"data_weights has {len(self.data_weights)} numbers for {len(self.data)} data files: one for each, in the same order")
        template_values(self.template_variables)
        template_time(self.template_date)
        if self.validation and self.validation_fraction:
            raise ValueError("validation and validation_fraction both say what is held out: give one of them")
        return self

    @property
    def run_dir(self) -> Path:
        return Path(self.out) if self.out else Path("runs") / f"{Path(self.model).name}-{'+'.join(Path(file).stem for file in self.data)}"

    @property
    def files(self) -> list[tuple[str, str]]:
        """Every file the run reads rows from, with the field that names it."""
        return [*(("data", file) for file in self.data), *([("validation", self.validation)] if self.validation else [])]

    @property
    def tokens_per_micro_batch(self) -> int:
        return self.tokens_per_step // self.micro_batches

    def record(self) -> dict[str, Any]:
        """What a run is identified by when it resumes: every field that changes what is computed."""
        fields = self.model_dump(mode="json", exclude=CHANGES_NOTHING)
        fields = {name: value for name, value in fields.items() if name not in ADDED or getattr(self, name) != type(self).model_fields[name].default}
        files = [str(Path(file).resolve()) for file in self.data]
        held_out = str(Path(self.validation).resolve()) if self.validation else ""
        return {**fields, "model": portable(self.model), "data": files[0] if len(files) == 1 else files, "validation": held_out}


def portable(model: str) -> str:
    """A local model folder as an absolute path, so that a run is found from any directory; an id stays as it is."""
    path = Path(model)
    return str(path.resolve()) if path.is_dir() else model
