"""What sft and pretrain share: their common fields, the run folder around them, and the lines from data file to batches to schedule."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from unfreeze.core.command import Common
from unfreeze.core.errors import ConfigError
from unfreeze.core.events import RESOLVED, Event
from unfreeze.core.json_object import read_object
from unfreeze.data.templates import template_time, template_values
from unfreeze.recipes.config import Files, Folder, Frozen, ModelName, writing
from unfreeze.recipes.device import allocator_line
from unfreeze.recipes.resume import FIXED, allowed
from unfreeze.report.events import of_kind, read_events, tokens_per_second
from unfreeze.report.experts import ExpertWatch
from unfreeze.report.html import summary_lines, write_report
from unfreeze.report.live import LiveProgress
from unfreeze.report.sinks import tracking

if TYPE_CHECKING:
    from unfreeze.checkpoint import Manifest
    from unfreeze.checkpoint.stream import LoadStats
    from unfreeze.data import Batches, Dataset, Example, Tokenizer
    from unfreeze.models.shape import Shape
    from unfreeze.parallel.collectives import Group
    from unfreeze.parallel.plan import Plan
    from unfreeze.train.guards import SpikeGuard
    from unfreeze.train.run import Run
    from unfreeze.train.schedule import Schedule
    from unfreeze.train.state import State
    from unfreeze.train.step import Objective
    from unfreeze.train.suspects import Describe


CHANGES_NOTHING = {
    "out", "save_every", "keep_saves", "on_full_disk", "allow_changed", "validate_every", "prompts", "samples", "threads", "on_spike", "track",
}  # fmt: skip
"""Fields that change nothing of what is trained; a run may go on with other values."""
ADDED = {"turns", "reasoning", "template_variables", "template_date"}
"""Fields that saves of earlier versions don't have. At its default such a field is left out of a run's record, so that those saves go on."""


class TrainingConfig(Frozen):
    """Fields of every training recipe; each is a flag and a TOML key."""

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


def typed(recipe: str, arguments: Sequence[str]) -> str:
    """The command as the user gave it, to be repeated; under torchrun with torchrun before it."""
    processes, nodes = (int(os.environ.get(name, "1")) for name in ("WORLD_SIZE", "GROUP_WORLD_SIZE"))
    start = ["unfreeze"] if processes == 1 else ["torchrun", "--nproc-per-node", str(processes // nodes), "-m", "unfreeze"]
    return shlex.join([*start, recipe, *arguments]) + (f" (on each of {nodes} nodes, as before)" if nodes > 1 else "")


def open_tokenizer(run: Run, config: TrainingConfig, folder: Path) -> Tokenizer:
    """The checkpoint's tokenizer, its chat template at the run's own date."""
    from unfreeze.data import load_tokenizer

    date = read_object(run.path / RESOLVED, ConfigError).get("template_date", "")
    return load_tokenizer(folder, now=template_time(date), template_variables=template_values(config.template_variables))


def encode(run: Run, config: TrainingConfig, tokenizer: Tokenizer, max_positions: int, **options: Any) -> Dataset:
    """The data files as examples no longer than the model's positions and a micro-batch allow; their account as a "data" event.
    `options` (supervise, turns, reasoning) are encode_files'.

    A bound below config.sequence_length is a warning where it cut, dropped or split a row, or where the length was asked for.
    """
    from unfreeze.data import encode_files, split_by_content

    length = sequence_length(config, max_positions)
    read = partial(encode_files, tokenizer=tokenizer, sequence_length=length, truncation=config.truncation,
                   on_bad_row=config.on_bad_row, **options)  # fmt: skip
    dataset = read(config.data)
    stats = dataset.stats
    warnings: list[str] = []
    if config.validation:
        held_out = read([config.validation])
        dataset = replace(dataset, validation=held_out.examples)
        if held_out.stats.truncated + held_out.stats.dropped + held_out.stats.bad:
            warnings.append(f"validation file: {held_out.stats.summary()}")
    elif config.validation_fraction:
        training, validation = split_by_content(dataset.examples, config.validation_fraction, config.seed)
        dataset = replace(dataset, examples=training, validation=validation)
    stats.held_out = len(dataset.validation or ())
    stats.packing, stats.efficiency = config.packing, batches_of(config, dataset.examples).efficiency()
    run.events.emit("data", run.step, **stats.as_dict(), summary=stats.summary())
    if leaked := dataset.leaked():
        warnings.append(f"{leaked} of {stats.held_out} validation documents are also in the training data")
    for message in warnings if run.step == 0 else ():
        run.events.emit("warning", 0, message=message)
    asked = config.sequence_length != TrainingConfig.model_fields["sequence_length"].default
    affected = stats.truncated or stats.dropped or stats.examples_dropped or (config.truncation == "split" and stats.split_rows)
    if run.step == 0 and length < config.sequence_length and (asked or affected):
        by = "the model's positions" if length == max_positions else "tokens_per_step / micro_batches (a document is never cut in two)"
        run.events.emit("warning", 0, message=f"sequence_length {config.sequence_length} is bounded to {length} by {by}")
    return dataset


def check_vocabulary(tokenizer: Tokenizer, shape: Shape, manifest: Manifest) -> None:
    """Refuse, before any weight is read, a vocabulary on which tokenizer, config.json and tensors disagree (FAILURES N5)."""
    from unfreeze.data import check_vocab

    names = ("model.embed_tokens.weight", "lm_head.weight")
    rows = {name: info.shape[0] for name, info in manifest.by_model_name().items() if name in names and info.shape}
    check_vocab(tokenizer, shape.vocab_size, rows)


def batches_of(config: TrainingConfig, examples: Sequence[Example], start: dict[str, Any] | None = None) -> Batches:
    """Micro-batches as the config packs, mixes and shuffles them, from the cursor `start` on."""
    from unfreeze.data import Batches, Examples, Mixed

    examples = Examples.of(examples)
    order = Mixed(examples.sources_N, config.data_weights, config.seed) if config.data_weights else None
    return Batches(examples, config.tokens_per_micro_batch, config.seed, start, packing=config.packing, order=order)


def sequence_length(config: TrainingConfig, max_positions: int) -> int:
    """Tokens of the longest document that this model and these settings take."""
    return min(config.sequence_length, max_positions, config.tokens_per_micro_batch)


def num_steps(config: TrainingConfig, batches: Batches) -> int:
    """Optimizer steps: as given, or as many as `epochs` need."""
    return config.steps or max(1, -(-batches.len_steps(config.epochs) // config.micro_batches))


def schedule_of(config: TrainingConfig, steps: int) -> Schedule:
    """Shares of the run turned into steps."""
    from unfreeze.train.schedule import Schedule

    warmup = round(config.warmup * steps)
    decay = min(round(config.decay * steps), steps - warmup) if config.schedule == "wsd" else 0
    return Schedule(peak=config.learning_rate, steps=steps, kind=config.schedule, warmup_steps=warmup, decay_steps=decay)


def describer(dataset: Dataset, tokenizer: Tokenizer) -> Describe:
    """What suspects.jsonl says of a document: the rows of the data file it was made of (more than one: exact duplicates), and its text."""

    def describe(tokens: list[int]) -> dict[str, Any]:
        rows = sorted({example.row for example in dataset.examples if list(example.tokens) == tokens})
        return {"rows": rows, "text": tokenizer.decode(tokens, skip_specials=False)}

    return describe


def spike_guard(config: TrainingConfig, state: State, objective: Objective, describe: Describe) -> SpikeGuard:
    """The judge of a run: its window is filled from the events of the steps before, so a resumed run judges as an unbroken one."""
    from unfreeze import models
    from unfreeze.train.guards import SpikeGuard

    before = of_kind(read_events(config.run_dir / "events.jsonl"), "train") if state.step else []
    return SpikeGuard(
        state.model, objective, state.run.path, through=models.through(config.recompute, state.model.layers, config.keep_layers),
        on_spike=config.on_spike, max_norm=config.clip, step=state.step, describe=describe,
        history=[(e["loss"], e["grad_norm"]) for e in before if e["step"] <= state.step],
    )  # fmt: skip


def say_plan(run: Run, plan: Plan, group: Group) -> None:
    """Write and show the plan, then refuse what does not fit. On CUDA it says how the allocator was set (FAILURES L2)."""
    fields = plan.as_dict()
    if group.size > 1:
        fields["lines"] = [*fields["lines"], f"  {group.size} processes, each with this plan; process 0 speaks, and what it measures is its own"]
    if plan.hardware.kind == "cuda":
        line, grows = allocator_line()
        fields["lines"] = [*fields["lines"], f"  {line}"]
        fields |= {} if grows else {"warning": line}
    write_json(run.path / "plan.json", fields)
    run.events.emit("plan", run.step, **fields)
    plan.refuse_if_too_large()


def say_loaded(run: Run, stats: LoadStats) -> None:
    """The load event: bytes read, seconds, and the size the packed weights would have had expanded."""
    run.events.emit("load", run.step, **asdict(stats))


def say_warning(run: Run, message: str) -> None:
    """A warning of a run's start; a resumed run doesn't repeat it."""
    if run.step == 0:
        run.events.emit("warning", 0, message=message)


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file in one move."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    temporary.replace(path)


def first_start(config: TrainingConfig) -> str:
    """The date a run's chat template tells: as given, as its first start wrote it into the run folder, or now."""
    path = config.run_dir / RESOLVED
    before = read_object(path, ConfigError).get("template_date") if path.is_file() else None
    return config.template_date or before or datetime.now().isoformat(timespec="seconds")


def write_resolved(run: Run, config: TrainingConfig, recipe: str, date: str = "", **effective: Any) -> None:
    """resolved_config.json: every field of the Config, and under "effective" what defaults, data and machine made of it.

    `date`: of the chat template; left out, it stays as it was written before.
    """
    date = date or read_object(run.path / RESOLVED, ConfigError).get("template_date", "")
    fields = {**config.model_dump(mode="json"), **config.record(), "out": str(config.run_dir), "template_date": date}
    write_json(run.path / RESOLVED, {"recipe": recipe, **fields, **({"effective": effective} if effective else {})})


@contextmanager
def live(config: TrainingConfig, common: Common, recipe: str, command: str, group: Group) -> Iterator[Run]:
    """The opened, locked run folder with live progress on stderr, and its resolved config written; on processes beyond 0 a silent Follower.

    A Ctrl-C that fit doesn't handle (before it, after it, or a second one) says what is saved and how to go on; a full disk does too.
    """
    from unfreeze.train.follower import Follower, open_run
    from unfreeze.train.run import Run, latest
    from unfreeze.train.state import FULL, DiskFull

    record = config.record()
    changeable = allowed(config.allow_changed, record)
    date = group.texts(first_start(config))[0]
    with LiveProgress(0, quiet=common.quiet) as progress, tracking(config.track, config.run_dir, config.model_dump(mode="json")) as sinks:
        with writing(config.run_dir, "out"):
            run = open_run(
                group,
                lead=lambda: Run(
                    config.run_dir, record, listeners=(progress, ExpertWatch(), *sinks), allow_changed=changeable, fixed=FIXED
                ),
                follow=lambda: Follower(config.run_dir, record, allow_changed=changeable, fixed=FIXED),
            )
        with run:
            try:
                with writing(config.run_dir, "out"):
                    if not (run.finished and (run.path / RESOLVED).is_file()):
                        write_resolved(run, config, recipe, date)
                yield run
            except KeyboardInterrupt:
                save = latest(run.path)
                state = f"the run is saved as of {save.name}" if save else "nothing was trained yet"
                raise KeyboardInterrupt(f"{state}; {again(command)}") from None
            except OSError as error:
                if error.errno not in FULL:
                    raise
                save = latest(run.path)
                state = f"the run is saved as of {save.name}" if save else "nothing was saved yet"
                at = f", at {error.filename}" if error.filename else ""
                raise DiskFull(f"the disk of {run.path} is full{at}; {state}", next=f"free space, then {again(command)}") from error


def again(command: str) -> str:
    """How to go on."""
    return "give the same command again" + (f": {command}" if command else "")


def finish(config: TrainingConfig, common: Common, command: str, *, export: bool = False, **extra: Any) -> dict[str, Any]:
    """Write the report, say where everything is, and give the result computed from the run's own events."""
    run_dir = config.run_dir
    write_report(run_dir)
    result = {**result_of(read_events(run_dir / "events.jsonl")), **extra, "run": str(run_dir)}
    if not common.quiet:
        before = ["this run was finished before; nothing was trained now"] if extra.get("already_finished") else []
        after = [f"report: {run_dir / 'report.html'}", next_command(run_dir, result, command, export)]
        print("\n".join([*before, *summary_lines(run_dir), *after]), file=sys.stderr)
    return result


def result_of(events: Sequence[Event]) -> dict[str, Any]:
    """steps, losses, speed, memory and receipt of a run, from its events alone (a resumed run counts all its parts)."""
    train = [event for event in of_kind(events, "train") if event.get("loss") is not None]
    receipts, ends = of_kind(events, "receipt"), of_kind(events, "end")
    return {
        "steps": train[-1]["step"] if train else 0,
        "loss_first": train[0]["loss"] if train else None,
        "loss_last": train[-1]["loss"] if train else None,
        "tokens_per_second": tokens_per_second(events),
        "peak_bytes": max((event["peak_bytes"] for event in train), default=0),
        "receipt": receipts[-1]["groups"] if receipts else {},
        "finished": bool(ends) and ends[-1]["reason"] == "done",
    }


def next_command(run_dir: Path, result: dict[str, Any], command: str, export: bool) -> str:
    """What to do now: go on, or use what was trained."""
    if not result["finished"]:
        return f"interrupted after step {result['steps']}, all is saved; {again(command)}"
    name = shlex.quote(str(run_dir))
    use = f"unfreeze export {name} --layout peft" if export else f'unfreeze generate {name} --prompt "…"'
    return f"next: unfreeze chat {name}    {use}"


def refuse_absent(files: Iterable[tuple[str, str]]) -> None:
    """A data file (field, path) that isn't there is refused before the model is loaded."""
    for field, path in files:
        if not Path(path).is_file():
            raise ConfigError(f"{field} = {path!r} is not a file", next=f"give --{field} an existing .jsonl or .txt file")
