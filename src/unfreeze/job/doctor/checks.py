"""The checks of `unfreeze doctor`: faults of a run that can be found before it starts.

Each check applies one of the run's own guards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from unfreeze.config.names import of_today
from unfreeze.config.training import TrainingConfig
from unfreeze.core.command import Common
from unfreeze.core.errors import ConfigError, DataError, UserError
from unfreeze.core.run_folder import refuse_other_files
from unfreeze.core.torchrun import sharers
from unfreeze.core.units import format_bytes, plural
from unfreeze.core.writer import writer
from unfreeze.job.data import few_steps, steps_of
from unfreeze.job.doctor.finding import Finding, Level
from unfreeze.job.doctor.machine import check_machine
from unfreeze.job.doctor.numerics import check_numerics
from unfreeze.job.end.folder import with_files
from unfreeze.job.opening.precision import alone, in_dtype
from unfreeze.job.parts import Parts
from unfreeze.job.planning.plan import ROOM, Planning, disk_of
from unfreeze.kernels.precision import Precision
from unfreeze.tracking.live import EncodeProgress

if TYPE_CHECKING:
    import torch

    from unfreeze.checkpoint import Manifest
    from unfreeze.data import Dataset, Tokenizer
    from unfreeze.models import Shape
    from unfreeze.parallel.plan import Plan

ALL_TAUGHT = 0.98  # if more of the conversations' tokens carry loss, the mask is most likely lost


@dataclass
class Subject:
    """The run to check. Each part is loaded once, when a check first needs it."""

    config: TrainingConfig
    parts: Parts
    has_data: bool
    quiet: bool = True
    dtype: Precision | None = None  # the config's dtype, and the reason for it
    broken: set[str] = field(default_factory=set[str])

    @cached_property
    def manifest(self) -> Manifest:
        from unfreeze.checkpoint import open_checkpoint
        from unfreeze.models.longer import lengthened

        parts, model = self.parts, self.config.model  # distill's own start also checks the teacher
        start = parts.start(model, Common(quiet=True)) if parts.new else open_checkpoint(model)
        if (to := getattr(self.config, "quantize", None)) is not None:
            from unfreeze.compress.quantize.onload import packed_on_load

            start = packed_on_load(start, to, getattr(self.config, "quantize_modules", ()))
        return lengthened(start, self.config.rope.longer)

    @cached_property
    def shape(self) -> Shape:
        from unfreeze import models

        return models.shape(self.manifest.config)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        from unfreeze.config.template import template_time, template_values
        from unfreeze.data import load_tokenizer

        now, variables = (
            template_time(self.config.data.template_date),
            template_values(self.config.data.template_variables),
        )
        return load_tokenizer(self.manifest.path, now=now, template_variables=variables)

    @cached_property
    def length(self) -> int:
        """Number of tokens to which the run would cut a row."""
        from unfreeze.job.data import sequence_length

        return sequence_length(self.config.data, self.config.tokens_per_micro_batch, self.shape.max_positions)

    @cached_property
    def dataset(self) -> Dataset:
        """The data as the run would encode it, except that bad rows are counted, not refused."""
        from unfreeze.data import encoded_files

        config = with_files(self.config)
        data = config.data
        options: dict[str, Any] = {
            "tokenizer": self.tokenizer,
            "sequence_length": self.length,
            "truncation": data.truncation,
            "on_bad_row": "skip",
            "columns": data.columns,
            **self.parts.encoding,
        }
        with EncodeProgress(quiet=self.quiet) as progress:
            return encoded_files(data.files, progress=progress, **options)

    @cached_property
    def device(self) -> torch.device:
        from unfreeze.job.opening.device import pick_device

        return pick_device(self.config.memory.device)

    @cached_property
    def plan(self) -> Plan:
        self.parts.trained.check(self.manifest)
        subject = self.config, self.parts.trained, self.manifest, self.shape, self.device
        return Planning(*subject, second=self.parts.second, answers=self.parts.answers).first()[1]


Check = Callable[[Subject], Iterator[Finding]]


def examine(config: TrainingConfig, parts: Parts, *, has_data: bool, quiet: bool = True) -> Iterator[Finding]:
    """Run every check in order. A check that needs a broken part is skipped, naming the part."""
    subject = Subject(config, parts, has_data, quiet)
    with suppress(UserError):  # for a missing device, which the first check reports
        subject.dtype = alone(config, subject.device, new=parts.new)
        subject.config = in_dtype(config, subject.dtype.name)
    for name, check, needs in CHECKS:
        lacking = [part for part in needs if part in subject.broken]
        if lacking:
            yield Finding(name, "skip", f"not checked: {lacking[0]} has a fault")
            subject.broken.add(name)
            continue
        try:
            for finding in check(subject):
                yield finding
                if finding.level == "fault":
                    subject.broken.add(name)
        except UserError as error:
            yield Finding(name, "fault", error.message, error.next)
            subject.broken.add(name)


def check_checkpoint(subject: Subject) -> Iterator[Finding]:
    """Check that the files cover every tensor of the model exactly once (docs/why/trust.md L7 and L8).

    Reads no tensor.
    """
    from unfreeze import models
    from unfreeze.checkpoint.resolve import resolve
    from unfreeze.generate.open import dtype_of
    from unfreeze.models.from_shape import count_parameters
    from unfreeze.parallel.placement.place import check_coverage

    manifest, shape = subject.manifest, subject.shape
    model = models.meta_model(shape, manifest, dtype_of(subject.config.memory.dtype))
    if subject.parts.new:
        words = count_parameters(model).words()
        yield Finding("checkpoint", "ok", f"{shape.kind}: a new model of {words}; no weights yet")
        return
    buffers = model.state_dict(keep_vars=True).keys()
    wanted = [
        *model.named_parameters(),
        *((name, buffer) for name, buffer in model.named_buffers() if name in buffers),
    ]
    params = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in wanted}
    check_coverage(
        resolve(manifest, models.rules(shape), params, ignore=models.ignored(shape), tied=models.tied(shape)),
        params,
    )
    code = sorted(path.name for path in manifest.path.glob("*.py"))
    beside = f"; the folder has {plural(len(code), 'Python file')} ({code[0]}), never run" if code else ""
    cover = "covers" if len(manifest.files) == 1 else "cover"
    yield Finding(
        "checkpoint",
        "ok",
        f"{shape.kind}: {plural(len(manifest.tensors), 'tensor')}, {format_bytes(manifest.nbytes)} in"
        f" {plural(len(manifest.files), 'file')} {cover} each of {len(params):,} parameters exactly once"
        f"{beside}",
    )
    carried = models.beside(manifest.config)
    if carried:
        yield Finding("checkpoint", "ok", carried)
    remedy = "ask the publisher what they change; a program that uses them may compute other numbers"
    for note in models.notes(manifest.config):
        if note != carried:
            yield Finding("checkpoint", "warn", note, remedy)


def check_tokenizer(subject: Subject) -> Iterator[Finding]:
    """Check that each id has a row in the embedding, and that texts can end (docs/why/trust.md N5, N6)."""
    from unfreeze.job.data import check_vocabulary as refuse_mismatch

    tokenizer, rows = subject.tokenizer, subject.shape.vocab_size
    refuse_mismatch(tokenizer, subject.shape, subject.manifest)
    ends = ", ".join(
        repr(tokenizer.token_text(id)) for id in sorted(tokenizer.eos_ids) if id < tokenizer.vocab_size
    )
    beyond = [id for id in tokenizer.eos_ids if id >= tokenizer.named_size]
    padded = rows - tokenizer.named_size
    line = (
        f"{tokenizer.named_size:,} ids, {rows:,} rows of the embedding ({padded:,} padded, never sampled);"
        f" end tokens: {ends or 'none'}"
    )
    if not tokenizer.eos_ids:
        yield Finding(
            "tokenizer",
            "warn",
            f"{line}: nothing stops a text, and no end is learned",
            "add eos_token to tokenizer_config.json",
        )
    elif beyond:
        yield Finding(
            "tokenizer",
            "warn",
            f"{line}; end token id {beyond[0]} has no token",
            "fix eos_token_id in generation_config.json or config.json",
        )
    else:
        yield Finding("tokenizer", "ok", line)


def check_second(subject: Subject) -> Iterator[Finding]:
    """Check the second model (a teacher or a reference) as a run does. Yields nothing if there is none."""
    second = subject.parts.second
    if second is None:
        return
    second.check(subject.manifest, subject.tokenizer)
    if subject.has_data:
        second.known(subject.dataset.examples)
    yield Finding("second", "ok", second.said(subject.manifest))


def check_template(subject: Subject) -> Iterator[Finding]:
    """Check the template's loss mask on a test chat (docs/why/trust.md N4 and N6)."""
    from unfreeze.data import Conversation
    from unfreeze.data.tokens.masks import renderer

    tokenizer = subject.tokenizer
    if tokenizer.template is None:
        yield Finding(
            "template",
            "warn",
            "the checkpoint has no chat template; a plain one is used",
            "add the publisher's chat_template.jinja",
        )
        return
    messages = [
        {"role": role, "content": text}
        for role, text in (("user", "Aq1"), ("assistant", "Zq1"), ("user", "Aq2"), ("assistant", "Zq2"))
    ]
    render = renderer(
        tokenizer,
        turns=subject.parts.encoding.get("turns", "auto"),
        reasoning=subject.parts.encoding.get("reasoning", "auto"),
    )
    rendered = render(Conversation(messages))
    taught = [segment.text for sample in rendered.samples for segment in sample if segment.supervised]
    release = f" (that of {tokenizer.template.release.name})" if tokenizer.template.release.name else ""
    answers = [
        text.removesuffix(next((end for end in render.ends if text.endswith(end)), "")) for text in taught
    ]
    summary = f"in a two-turn test chat{release} both answers are trained on, each with its end token"
    if [text.strip() for text in answers] != ["Zq1", "Zq2"]:
        summary = f"in a two-turn test chat{release} this is trained on: {' and '.join(map(repr, taught))}"
    if not all(any(text.endswith(end) for end in render.ends) for text in taught):
        yield Finding(
            "template",
            "warn",
            f"the supervised text does not stop with an end token: {taught[0]!r}",
            "fix eos_token or the template",
        )
    elif len(rendered.samples) > 1:
        yield Finding(
            "template",
            "ok",
            f"{summary}, each as its own example, because the template rewrites earlier turns",
        )
    else:
        yield Finding("template", "ok", summary)
    thinking = [
        {"role": "user", "content": "Aq1"},
        {"role": "assistant", "content": "Zq1", "reasoning_content": "Tq1"},
    ]
    try:
        thought = next(
            segment.text for segment in render(Conversation(thinking)).samples[0] if segment.supervised
        )
        yield Finding("template", "ok", f"reasoning_content is trained on as {thought!r}")
    except DataError as error:
        yield Finding(
            "template",
            "ok",
            "rows with reasoning_content are refused: this template has no form for it",
            error.next,
        )


def check_data(subject: Subject) -> Iterator[Finding]:
    """Report a lost mask and rows that are bad, lossless, cut or repeated (docs/why/trust.md R7, N2, N4)."""
    if not subject.has_data:
        yield Finding("data", "skip", "no data file given (--data F)")
        return
    from unfreeze.data.store.remarks import too_long

    stats = subject.dataset.stats
    longer = too_long(stats, subject.length, subject.shape.max_positions)
    yield Finding("data", "ok", stats.summary())
    if stats.bad:
        first = "; ".join(bad.reason for bad in stats.listed[:3])
        yield Finding(
            "data",
            "warn" if subject.config.data.on_bad_row == "skip" else "fault",
            f"{stats.bad} of {stats.rows} rows cannot be read: {first}",
            "fix the rows, or --data.on-bad-row skip",
        )
    if stats.dropped:
        first = next((bad.reason for bad in stats.listed if "supervised" in bad.reason), "")
        yield Finding(
            "data",
            "warn",
            f"{stats.dropped} of {stats.rows} rows carry no loss and are dropped: {first}",
            longer,
        )
    if stats.truncated:
        yield Finding(
            "data",
            "warn",
            f"{stats.truncated} of {stats.rows} rows are cut at {subject.length:,} tokens",
            longer,
        )
    texts = stats.shapes.get("text", 0)
    if not texts and not stats.room and stats.supervised_fraction > ALL_TAUGHT:
        yield Finding(
            "data",
            "warn",
            f"{100 * stats.supervised_fraction:.1f} % of the conversations' tokens carry loss: is the mask"
            " lost?",
            "unfreeze data show marks the supervised tokens",
        )
    if stats.duplicates:
        first = stats.repeats[0].reason if stats.repeats else ""
        yield Finding(
            "data",
            "warn",
            f"{stats.duplicates} of {stats.rows} rows are duplicates: {first}",
            "remove the duplicates",
        )


def check_steps(subject: Subject) -> Iterator[Finding]:
    """Report the number of steps; warn if there are too few."""
    if not subject.has_data:
        yield Finding("steps", "skip", "no data file given (--data F)")
        return
    if subject.dataset.stats.room:
        yield Finding("steps", *_steps_of_prompts(subject))
        return
    training, (steps, in_one) = subject.config.training, steps_of(subject.config, subject.dataset.examples)
    few, remedy = few_steps(subject.config, steps, in_one)
    parts = subject.config.memory.micro_batches
    counts = ", ".join(map(str, sharers(parts)))
    shared = f" in {parts} micro-batches; possible numbers of processes: {counts}" if parts > 1 else ""
    line = f"{plural(steps, 'step')} of {training.tokens_per_step:,} tokens{shared}"
    yield Finding("steps", "warn" if few else "ok", few or line, remedy)


def _steps_of_prompts(subject: Subject) -> tuple[Level, str]:
    """Return level and line for rows that are prompts: their run has steps of answers."""
    count = len(subject.dataset.examples)
    step = subject.parts.answers(1, 1, 1, count).step if subject.parts.answers else None
    if step is None:
        return "skip", "the rows are prompts, and no run's file says how many a step has"
    of = f"{plural(step.answers, 'answer')} to {step.prompts:,} of {plural(count, 'prompt')}"
    return "ok", f"{plural(step.steps or 0, 'step')} of {of}"


def check_memory(subject: Subject) -> Iterator[Finding]:
    """Check that the run's plan fits into memory."""
    from unfreeze.parallel.plan import KERNELS, refuse_if_too_large

    plan = subject.plan
    refuse_if_too_large(plan)
    process = (
        f" beside the process's own {format_bytes(plan.hardware.process)} and {KERNELS}"
        if plan.hardware.process
        else ""
    )
    line = (
        f"a run needs {format_bytes(plan.total)}{process}, of {format_bytes(plan.usable)} usable;"
        f" {plan.adapter_parameters:,} adapter parameters"
    )
    yield Finding("memory", "ok", line)
    if subject.device.type == "cuda":
        from unfreeze.job.opening.device import allocator_line

        allocator, expandable = allocator_line()
        yield Finding("memory", "ok" if expandable else "warn", allocator, "set it before the program starts")


def disk_finding(subject: Subject) -> Iterator[Finding]:
    """Check that the disk has room for the saves and for the adapter or model."""
    what = subject.parts.trained.name
    disk = disk_of(subject.config, subject.parts.trained, subject.manifest, subject.plan)
    line = disk.words(what)
    if disk.free < disk.needed:
        yield Finding("disk", "fault", line, ROOM)
    else:
        yield Finding("disk", "ok", line)


def check_run(subject: Subject) -> Iterator[Finding]:
    """Check the contents of the run folder (docs/why/trust.md R2 and R8)."""
    from unfreeze.train.run import changed_fields, latest, plain_json, read_record

    folder = subject.config.run_dir
    if not folder.is_dir():
        yield Finding("run", "ok", f"{folder} is new")
        return
    try:
        refuse_other_files(folder)
    except ConfigError as error:
        yield Finding("run", "fault", error.message, error.next)
        return
    if pid := writer(folder):
        yield Finding(
            "run", "fault", f"{folder} is in use by process {pid}", "wait for it, or give another --out"
        )
        return
    save = latest(folder)
    if save is None:
        yield Finding("run", "ok", f"{folder} exists but holds no save: a run there starts at step 0")
        return
    record = read_record(save)
    now = plain_json(subject.config.record())
    changed = [field for field, _, _ in changed_fields(of_today(type(subject.config), record["config"]), now)]
    if changed and subject.has_data:
        line = (
            f"{folder} was trained to step {record['step']} with another configuration: {', '.join(changed)}"
            " differ"
        )
        yield Finding("run", "fault", line, "restore these fields, or give another --out")
    else:
        done = record.get("ended") or record["step"] >= record["schedule"]["steps"]
        ends = "is finished at" if done else "resumes from"
        yield Finding("run", "ok", f"{folder} {ends} step {record['step']}")


CHECKS: tuple[tuple[str, Check, tuple[str, ...]], ...] = (
    ("machine", check_machine, ()),
    ("checkpoint", check_checkpoint, ()),
    ("tokenizer", check_tokenizer, ("checkpoint",)),
    ("template", check_template, ("tokenizer",)),
    ("data", check_data, ("tokenizer",)),
    ("steps", check_steps, ("data",)),
    ("second", check_second, ("checkpoint", "tokenizer", "data")),
    ("memory", check_memory, ("checkpoint",)),
    ("disk", disk_finding, ("checkpoint",)),
    ("run", check_run, ()),
    ("numerics", check_numerics, ("checkpoint", "memory")),
)
"""(name, check, parts that it needs)."""
