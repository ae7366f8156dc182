"""unfreeze doctor MODEL [--data F] [--config run.toml]: look for known faults in your own files and machine. Trains nothing, writes nothing.

One line per check: ok, warn (it works, look at it), fault (with the remedy) or skip (with the reason). Exit code 1 if there is a fault.
The checks are the guards of a run, asked beforehand; what they catch is shown by `unfreeze drill`.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field
from tyro.conf import Positional, arg

from unfreeze.core.command import Common
from unfreeze.core.errors import DataError, UserError
from unfreeze.core.units import format_bytes
from unfreeze.recipes.config import Folder, Frozen, ModelName, parse

if TYPE_CHECKING:
    import torch

    from unfreeze.checkpoint import Manifest
    from unfreeze.data import Dataset, Tokenizer
    from unfreeze.models import Shape
    from unfreeze.parallel.plan import Plan
    from unfreeze.recipes.sft import Config as RunConfig

SMOKE_TOKENS = 32
SMOKE_BYTES = 4 * 2**30  # a larger model isn't loaded for the numerics check: reading 4 GiB takes some seconds, 594 GB an hour
ALL_TAUGHT = 0.98  # conversations of which more carries loss than this have most likely lost their mask

Level = Literal["ok", "warn", "fault", "skip"]


class Config(Frozen):
    """What to look at."""

    model: Annotated[ModelName, Positional, arg(metavar="MODEL")] = Field(description="checkpoint folder, or Hugging Face id org/name")
    data: Folder = Field(default="", description="data file to look through, as `unfreeze sft --data` takes it; default: that of --config, or none")
    config: Folder = Field(default="", description="TOML file of `unfreeze sft`; default: sft's own defaults")


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's."""

    check: str
    level: Level
    line: str
    remedy: str = ""


@dataclass
class Patient:
    """What the checks look at; each part is read once, when a check first asks for it."""

    config: RunConfig
    has_data: bool
    broken: set[str] = field(default_factory=set)

    @cached_property
    def manifest(self) -> Manifest:
        from unfreeze.checkpoint import open_checkpoint

        return open_checkpoint(self.config.model)

    @cached_property
    def shape(self) -> Shape:
        from unfreeze import models

        return models.shape(self.manifest.config)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        from unfreeze.data import load_tokenizer
        from unfreeze.data.templates import template_time, template_values

        now, variables = template_time(self.config.template_date), template_values(self.config.template_variables)
        return load_tokenizer(self.manifest.path, now=now, template_variables=variables)

    @cached_property
    def dataset(self) -> Dataset:
        """The data as sft would encode it, bad rows counted instead of refused."""
        from unfreeze.data import encode_files
        from unfreeze.recipes.training import sequence_length

        length = sequence_length(self.config, self.shape.max_positions)
        return encode_files(
            self.config.data, self.tokenizer, length, truncation=self.config.truncation, on_bad_row="skip",
            turns=self.config.turns, reasoning=self.config.reasoning,
        )  # fmt: skip

    @cached_property
    def device(self) -> torch.device:
        from unfreeze.recipes.device import pick_device

        return pick_device(self.config.device)

    @cached_property
    def plan(self) -> Plan:
        from unfreeze.parallel.plan import plan_training
        from unfreeze.recipes.sft import trained_of
        from unfreeze.recipes.training import sequence_length

        trained_of(self.config).check(self.manifest)
        return plan_training(
            self.shape, self.manifest, self.config.lora, tokens=self.config.tokens_per_micro_batch, dtype=self.config.dtype, device=self.device,
            recompute=self.config.recompute, keep_layers=self.config.keep_layers, micro_batches=self.config.micro_batches,
            optimizer_moments=self.config.optimizer_moments,
            longest=sequence_length(self.config, self.shape.max_positions),
        )  # fmt: skip


Check = Callable[[Patient], Iterator[Finding]]


def main(arguments: list[str], common: Common) -> dict[str, Any]:
    """-> findings (check, level, line, remedy), faults, warnings, exit_code."""
    config = parse(Config, arguments, command="doctor", description=__doc__ or "", positional=True)
    findings = []
    for finding in examine(config):
        findings.append(finding)
        if not common.quiet:
            print(as_text(finding), file=sys.stderr if common.json else sys.stdout, flush=True)
    count = {level: sum(finding.level == level for finding in findings) for level in ("fault", "warn")}
    if not common.quiet:
        said = f"{counted(count['fault'], 'fault')}, {counted(count['warn'], 'warning')} in {counted(len(findings), 'check')}"
        print(said, file=sys.stderr if common.json else sys.stdout)
    return {
        "findings": [asdict(finding) for finding in findings], "faults": count["fault"], "warnings": count["warn"],
        "exit_code": 1 if count["fault"] else 0,
    }  # fmt: skip


def counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def as_text(finding: Finding) -> str:
    """`ok     checkpoint  …`, the remedy on a line of its own."""
    line = f"{finding.level:<5}  {finding.check:<10}  {' '.join(finding.line.split())}"
    return line + (f"\n{'':<19}remedy: {finding.remedy}" if finding.remedy and finding.level in ("warn", "fault") else "")


def examine(config: Config) -> Iterator[Finding]:
    """Every check in order. What needs a part that is broken is skipped, naming the part."""
    try:
        patient = Patient(run_config(config), has_data=bool(config.data or config.config))
    except UserError as error:
        yield Finding("config", "fault", error.message, error.next)
        return
    for name, check, needs in CHECKS:
        lacking = [part for part in needs if part in patient.broken]
        if lacking:
            yield Finding(name, "skip", f"needs the {lacking[0]}, which has a fault")
            patient.broken.add(name)
            continue
        try:
            for finding in check(patient):
                yield finding
                if finding.level == "fault":
                    patient.broken.add(name)
        except UserError as error:
            yield Finding(name, "fault", error.message, error.next)
            patient.broken.add(name)


def run_config(config: Config) -> RunConfig:
    """The sft run that is examined: of --config, with MODEL and --data on top."""
    from unfreeze.recipes.sft import Config as RunConfig

    on_top = ["--model", config.model, *(["--data", config.data] if config.data else [])]
    needed = [] if config.data or config.config else ["--data", "none"]
    return parse(RunConfig, [*([config.config] if config.config else []), *on_top, *needed], command="sft", description="")


def check_machine(patient: Patient) -> Iterator[Finding]:
    """Versions, cores, memory, CUDA."""
    import platform

    import torch

    import unfreeze
    from unfreeze.parallel.machine import hardware

    threads = patient.config.threads or torch.get_num_threads()
    device = hardware(patient.device)
    cuda = f"CUDA {torch.version.cuda}" if torch.cuda.is_available() else "no CUDA device"
    facts = (
        f"unfreeze {unfreeze.__version__}, Python {platform.python_version()}, torch {torch.__version__}, {cuda}; {device.name}, "
        f"{device.cores} cores, {threads} threads, {format_bytes(device.available)} of {format_bytes(device.total)} free"
    )
    if threads > device.cores:
        remedy = f"--threads {device.cores}, or unset OMP_NUM_THREADS"
        yield Finding("machine", "warn", f"{facts}: more threads than cores wait for each other", remedy)
    else:
        yield Finding("machine", "ok", facts)


def check_checkpoint(patient: Patient) -> Iterator[Finding]:
    """FAILURES L7 and L8: every tensor of the model is covered exactly once by the files; no tensor is read for it."""
    from unfreeze import models
    from unfreeze.checkpoint import resolve
    from unfreeze.generate.open import dtype_of, notes
    from unfreeze.parallel.place import check_coverage
    from unfreeze.parallel.plan import meta_model

    manifest, shape = patient.manifest, patient.shape
    model = meta_model(shape, manifest, dtype_of(patient.config.dtype))
    buffers = model.state_dict(keep_vars=True).keys()
    wanted = [*model.named_parameters(), *((name, buffer) for name, buffer in model.named_buffers() if name in buffers)]
    params = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in wanted}
    check_coverage(resolve(manifest, models.rules(shape), params, ignore=models.ignored(shape), tied=models.tied(shape)), params)
    code = sorted(path.name for path in manifest.path.glob("*.py"))
    beside = f"; {len(code)} Python files lie beside it ({code[0]}) and are never run" if code else ""
    yield Finding(
        "checkpoint", "ok", f"{shape.model_type}: {len(manifest.tensors):,} tensors, {format_bytes(manifest.nbytes)} in {len(manifest.files)} files "
        f"cover each of {len(params):,} parameters exactly once{beside}"
    )  # fmt: skip
    for note in notes(manifest.config):
        yield Finding("checkpoint", "warn", note, "ask the publisher what they change; a program that knows them may compute other numbers")


def check_vocabulary(patient: Patient) -> Iterator[Finding]:
    """FAILURES N5 and N6."""
    from unfreeze.recipes.training import check_vocabulary as refuse_mismatch

    tokenizer, rows = patient.tokenizer, patient.shape.vocab_size
    refuse_mismatch(tokenizer, patient.shape, patient.manifest)
    ends = ", ".join(repr(tokenizer.token_text(id)) for id in sorted(tokenizer.eos_ids) if id < tokenizer.vocab_size)
    beyond = [id for id in tokenizer.eos_ids if id >= tokenizer.named_size]
    padded = rows - tokenizer.named_size
    line = f"{tokenizer.named_size:,} ids, {rows:,} rows of the embedding ({padded:,} padded, never sampled); ends: {ends or 'none'}"
    if not tokenizer.eos_ids:
        yield Finding("vocabulary", "warn", f"{line}: no end is learned or stops a text", "give tokenizer_config.json an eos_token")
    elif beyond:
        yield Finding("vocabulary", "warn", f"{line}; end id {beyond[0]} has no name", "mend eos_token_id in generation_config.json or config.json")
    else:
        yield Finding("vocabulary", "ok", line)


def check_template(patient: Patient) -> Iterator[Finding]:
    """FAILURES N4 and N6: what the template's mask teaches of a conversation of known words."""
    from unfreeze.data import Conversation
    from unfreeze.data.masks import renderer

    tokenizer = patient.tokenizer
    if tokenizer.template is None:
        yield Finding("template", "warn", "the checkpoint has no chat template: the plain one is used", "add the publisher's chat_template.jinja")
        return
    messages = [{"role": role, "content": text} for role, text in (("user", "Aq1"), ("assistant", "Zq1"), ("user", "Aq2"), ("assistant", "Zq2"))]
    render = renderer(tokenizer, turns=patient.config.turns, reasoning=patient.config.reasoning)
    rendered = render(Conversation(messages))
    taught = [segment.text for sample in rendered.samples for segment in sample if segment.supervised]
    release = f" (that of {tokenizer.template.release.name})" if tokenizer.template.release.name else ""
    known = f"of two turns it{release} teaches {' and '.join(map(repr, taught))}"
    if not all(any(text.endswith(end) for end in render.ends) for text in taught):
        yield Finding("template", "warn", f"what is taught does not close with an end token: {taught[0]!r}", "mend eos_token, or the template")
    elif len(rendered.samples) > 1:
        yield Finding("template", "ok", f"{known}, each as an example of its own: it rewrites earlier turns")
    else:
        yield Finding("template", "ok", known)
    said = [{"role": "user", "content": "Aq1"}, {"role": "assistant", "content": "Zq1", "reasoning_content": "Tq1"}]
    try:
        thought = next(segment.text for segment in render(Conversation(said)).samples[0] if segment.supervised)
        yield Finding("template", "ok", f"reasoning_content is taught as {thought!r}")
    except DataError as error:
        yield Finding("template", "ok", "rows with reasoning_content are refused: this template has no form for it", error.next)


def check_data(patient: Patient) -> Iterator[Finding]:
    """FAILURES R7, N2, N4, and duplicates."""
    if not patient.has_data:
        yield Finding("data", "skip", "no data file given (--data F)")
        return
    stats = patient.dataset.stats
    yield Finding("data", "ok", stats.summary())
    if stats.bad:
        first = "; ".join(bad.reason for bad in stats.listed[:3])
        yield Finding("data", "fault", f"{stats.bad} of {stats.rows} rows cannot be read: {first}", "mend the rows, or --on-bad-row skip")
    if stats.dropped:
        first = next((bad.reason for bad in stats.listed if "supervised" in bad.reason), "")
        yield Finding("data", "warn", f"{stats.dropped} of {stats.rows} rows carry no loss and are dropped: {first}", "--sequence-length higher")
    if stats.truncated:
        longest = patient.config.sequence_length
        yield Finding("data", "warn", f"{stats.truncated} of {stats.rows} rows are cut at {longest} tokens or less", "--sequence-length higher")
    texts = stats.shapes.get("text", 0)
    if not texts and stats.supervised_fraction > ALL_TAUGHT:
        yield Finding("data", "warn", f"{100 * stats.supervised_fraction:.1f} % of the conversations' tokens carry loss: is the mask lost?",
                      "unfreeze data show colours what is taught")  # fmt: skip
    if stats.duplicates:
        first = stats.repeats[0].reason if stats.repeats else ""
        yield Finding("data", "warn", f"{stats.duplicates} of {stats.rows} rows stood before: {first}", "remove the duplicates")


def check_memory(patient: Patient) -> Iterator[Finding]:
    """The plan of the run: does it fit."""
    from unfreeze.parallel.plan import KERNELS

    plan = patient.plan
    plan.refuse_if_too_large()
    process = f" beside the process's own {format_bytes(plan.hardware.process)} and {KERNELS}" if plan.hardware.process else ""
    line = f"a run needs {format_bytes(plan.total)}{process}, of {format_bytes(plan.usable)} usable; {plan.adapter_parameters:,} adapter parameters"
    yield Finding("memory", "ok", line)
    if patient.device.type == "cuda":
        from unfreeze.recipes.device import allocator_line

        said, expandable = allocator_line()
        yield Finding("memory", "ok" if expandable else "warn", said, "set it before the program starts")


def check_disk(patient: Patient) -> Iterator[Finding]:
    """Room for the saves of the state, and for the adapter or the model."""
    from unfreeze.recipes.sft import trained_of

    folder = patient.config.run_dir.absolute()
    existing = next(path for path in (folder, *folder.parents) if path.is_dir())
    terms = patient.plan.terms
    trained = trained_of(patient.config)
    each = (terms["adapter"] or terms["base"]) + terms["optimizer"]
    written = trained.written_bytes(patient.manifest, terms["adapter"])
    needed = (patient.config.keep_saves + 1) * each + written  # a new save is whole before an old one goes; the result at the end
    free = shutil.disk_usage(existing).free
    saves = patient.config.keep_saves + 1
    line = f"{format_bytes(free)} free under {existing}; the run writes at most {format_bytes(needed)} ({saves} saves, {trained.name})"
    if free < needed:
        yield Finding("disk", "fault", line, "free space, give --out on another disk, or lower --keep-saves")
    else:
        yield Finding("disk", "ok", line)


def check_run(patient: Patient) -> Iterator[Finding]:
    """FAILURES R2 and R8: what already lies in the run folder."""
    import fcntl

    from unfreeze.train.run import changed_fields, latest, plain_json, read_record

    folder = patient.config.run_dir
    if not folder.is_dir():
        yield Finding("run", "ok", f"{folder} is new")
        return
    lock = folder / "lock"
    if lock.is_file():
        with lock.open(encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                pid = file.read().strip() or "unknown"
                yield Finding("run", "fault", f"{folder} is in use by process {pid}", "wait for it, or give another --out")
                return
    save = latest(folder)
    if save is None:
        yield Finding("run", "ok", f"{folder} exists and holds no save: a run there begins at step 0")
        return
    record = read_record(save)
    changed = [field for field, _, _ in changed_fields(record["config"], plain_json(patient.config.record()))]
    if changed and patient.has_data:
        line = f"{folder} was trained to step {record['step']} with another configuration: {', '.join(changed)} differ"
        yield Finding("run", "fault", line, "restore these fields, or give another --out")
    else:
        yield Finding("run", "ok", f"{folder} goes on from step {record['step']}")


def check_numerics(patient: Patient) -> Iterator[Finding]:
    """One forward pass of 32 tokens: every number finite."""
    if patient.manifest.nbytes > SMOKE_BYTES:
        size = format_bytes(patient.manifest.nbytes)
        yield Finding("numerics", "skip", f"the model has {size}; up to {format_bytes(SMOKE_BYTES)} are loaded for this")
        return
    import torch

    from unfreeze.data import Example, pack
    from unfreeze.generate.open import dtype_of, open_model
    from unfreeze.objectives.cross_entropy import cross_entropy

    model = open_model(patient.manifest, dtype_of(patient.config.dtype), patient.device, warn=lambda note: None)  # check_checkpoint has said it
    worst = [name for name, tensor in model.named_parameters() if not bool(tensor.isfinite().all())]
    if worst:
        yield Finding("numerics", "fault", f"{len(worst)} weights hold NaN or infinity; first: {worst[0]}", "download the checkpoint again")
        return
    tokens = [(7 * i) % patient.shape.vocab_size for i in range(SMOKE_TOKENS)]
    batch = pack([Example(tokens, [0.0] + [1.0] * (SMOKE_TOKENS - 1))]).to(patient.device)
    with torch.no_grad():
        hidden_TD = model.hidden(batch)
        loss = cross_entropy(hidden_TD, model.lm_head, batch)
    largest, mean = float(hidden_TD.abs().max()), float(loss.sum) / float(loss.count)
    line = f"{SMOKE_TOKENS} tokens in {patient.config.dtype}: largest hidden value {largest:.3g}, loss {mean:.2f}"
    finite = bool(hidden_TD.isfinite().all()) and mean == mean
    yield Finding("numerics", "ok" if finite else "fault", line, "" if finite else "--dtype float32, or: unfreeze bisect MODEL --against hf")


CHECKS: tuple[tuple[str, Check, tuple[str, ...]], ...] = (
    ("machine", check_machine, ()),
    ("checkpoint", check_checkpoint, ()),
    ("vocabulary", check_vocabulary, ("checkpoint",)),
    ("template", check_template, ("vocabulary",)),
    ("data", check_data, ("vocabulary",)),
    ("memory", check_memory, ("checkpoint",)),
    ("disk", check_disk, ("checkpoint",)),
    ("run", check_run, ()),
    ("numerics", check_numerics, ("checkpoint", "memory")),
)
"""name, check, the parts it needs."""
