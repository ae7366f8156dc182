"""unfreeze plan MODEL --hardware 8xH200: memory, time and cost of a run on any machine.

MODEL is a checkpoint folder, a Hub id, a config.json, or a run's TOML file.

It needs no weights, GPU or network, and not the machine itself: MODEL can be a config.json alone. It chooses
every setting that you leave open: where experts, adapters and activations are held, how experts are split,
what is recomputed, and tokens per step. If nothing fits, it shows the arithmetic and what would fit.
Times are predicted: from data sheets (--machines FILE for a table of your own), and for this
machine from its records (`unfreeze dev kernels measure --to user`).
"""

from __future__ import annotations

from collections.abc import Set
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from unfreeze.commands.opened import Opened, open_for_plan
from unfreeze.commands.recipe import recipe_of
from unfreeze.config.lora import LoraConfig
from unfreeze.config.parse import Folder, Frozen, ModelName, from_keywords, is_model, parse
from unfreeze.config.sft import PACKS, QUANTIZE, PackedFormat, PackedModules
from unfreeze.config.tables import Rope
from unfreeze.core.command import Common
from unfreeze.core.errors import ConfigError, UserError
from unfreeze.core.field import about
from unfreeze.core.layout import Layout
from unfreeze.tracking.console import PipeConsole

if TYPE_CHECKING:
    from unfreeze.commands.planned import Planned
    from unfreeze.job.parts import Parts
    from unfreeze.kernels.precision import Precision
    from unfreeze.models.recompute import Recompute
    from unfreeze.parallel.plan.choose import PlanChoice, PlanRequest
    from unfreeze.parallel.plan.counts import Counts
    from unfreeze.parallel.plan.fleet import Fleet
    from unfreeze.parallel.plan.sizes import Sizes

HERE = "this machine"
DOES_NOT_FIT = 2

PACKED_RATIO = 16 / 4
"""Bits of bf16 by bits of INT4: a base of this many times the memory does not fit packed either."""


class Config(Frozen):
    """Options of plan."""

    model: ModelName = Field(
        default="",
        description="checkpoint folder, Hugging Face id, or a config.json",
        json_schema_extra=about("Model and data", first=True),
    )
    hardware: tuple[str, ...] = Field(
        default=(),
        description="8xH200, 1xH200+768GB (host memory), cpu:24GB …, one or several; default: this machine",
        json_schema_extra=about("Hardware", first=True),
    )
    machines: Folder = Field(
        default="", description="TOML table of devices of your own", json_schema_extra=about("Hardware")
    )
    usd_per_hour: float | None = Field(
        default=None,
        gt=0,
        le=1e6,
        description="price per hour of all the hardware; unset: no costs",
        json_schema_extra=about("Hardware", first=True),
    )
    waiting: float = Field(
        default=0.25,
        ge=0,
        le=1,
        description="largest share of a step spent waiting for transfers",
        json_schema_extra=about("Hardware"),
    )
    tokens_per_step: int | None = Field(
        default=None,
        ge=2,
        le=10**12,
        description="tokens per step over all devices; unset: the plan chooses",
        json_schema_extra=about(
            "How long", name="training.tokens_per_step", alias="tokens_per_step", first=True
        ),
    )
    micro_batches: int = Field(
        default=1,
        ge=1,
        le=10**6,
        description="micro-batches per step over all devices (at least one each)",
        json_schema_extra=about("Memory and machine", name="memory.micro_batches", alias="micro_batches"),
    )
    sequence_length: int = Field(
        default=2048,
        ge=2,
        le=10**9,
        description="longest document in tokens; limited by the model's positions",
        json_schema_extra=about("How long", name="data.sequence_length", alias="sequence_length", first=True),
    )
    rope: Rope = Field(default_factory=lambda: Rope(), description="more positions than the model's own")
    train: Literal["adapters", "all"] = Field(
        default="adapters",
        description="adapters (LoRA) or all weights",
        json_schema_extra=about("Model and data"),
    )
    quantize: PackedFormat | None = Field(
        default=None, description=QUANTIZE, json_schema_extra=about("Model and data", first=True)
    )
    quantize_modules: tuple[PackedModules, ...] = Field(
        default=(), description=PACKS, json_schema_extra=about("Model and data")
    )
    lora: LoraConfig = Field(default_factory=lambda: LoraConfig(), description="the adapters")
    dtype: Literal["auto", "bfloat16", "float32"] = Field(
        default="auto",
        description="compute dtype; auto: bfloat16 where the machine has bf16 matmul units",
        json_schema_extra=about("Memory and machine", name="memory.dtype", alias="dtype"),
    )
    optimizer_moments: Literal["float32", "int8"] = Field(
        default="float32",
        description="AdamW's moments: 8 bytes per trained parameter, or 2.03",
        json_schema_extra=about("Memory and machine", name="optimizer.moments", was="optimizer_moments"),
    )
    optimizer_kind: Literal["adamw", "muon"] = Field(
        default="adamw",
        description="with --train all: muon has one moment, 4 bytes, for matrices of hidden layers",
        json_schema_extra=about("Memory and machine", name="optimizer.kind"),
    )
    place: Layout = Field(default_factory=lambda: Layout(), description="placement; auto: the plan chooses")


def main(arguments: list[str], common: Common) -> dict[str, Any]:
    """-> the plan for the first machine (Planned.fields); for several machines `plans` has all.

    exit_code 2, as of a run, if it fits none of them, or only with a layout that is not built.
    """
    config, parts = configured(arguments)
    if not config.model:
        raise ConfigError(
            "plan needs a model", next="unfreeze plan --model FOLDER_OR_CONFIG.JSON --hardware 8xH200"
        )
    new = parts.start(config.model, common) if parts is not None and parts.new else None
    opened = open_for_plan(config, new) if new is not None else open_for_plan(config)
    opened.new = new is not None
    if parts is not None:
        opened.second, opened.answers = parts.second, parts.answers
    plans = [
        plan_on(config, fleet_of(words, config.machines), opened) for words in config.hardware or (HERE,)
    ]
    console = PipeConsole(stderr=common.json, highlight=False, markup=False, emoji=False, soft_wrap=True)
    if not common.quiet:
        console.print("\n".join(line for planned in plans for line in planned.lines()))
    result = plans[0].fields() | ({"plans": [p.fields() for p in plans]} if len(plans) > 1 else {})
    return result | ({} if any(planned.runs for planned in plans) else {"exit_code": DOES_NOT_FIT})


def configured(arguments: list[str]) -> tuple[Config, Parts | None]:
    """Return (config, the parts of the run, if a file describes one).

    The first argument can be the model or a run's TOML file. The file gives model, adapters, step and
    placement; flags override it.
    """
    if arguments and (is_model(arguments[0]) or arguments[0].endswith(".json")):
        if "--model" in {word.partition("=")[0] for word in arguments}:
            raise ConfigError(f"{arguments[0]} is a model, and --model names one too", next="leave one out")
        arguments = ["--model", *arguments]
    if not arguments or arguments[0].startswith("-"):
        config = parse(Config, arguments, command="plan", description=__doc__ or "")
        _refuse_without_effect(config, config.model_fields_set)
        return config, None
    _, recipe = recipe_of(arguments[0])
    run = from_keywords(recipe.Config, {}, function="plan", file=arguments[0])
    flags = parse(Config, arguments[1:], command="plan", description=__doc__ or "")
    lora: LoraConfig | None = getattr(run, "lora", None)
    of_run = {
        "model": run.model,
        "rope": run.rope,
        "train": getattr(run, "train", "all"),
        "quantize": getattr(run, "quantize", None),
        "quantize_modules": getattr(run, "quantize_modules", flags.quantize_modules),
        "lora": _merged(lora, flags.lora) if lora else flags.lora,
        "place": run.place.model_copy(update=flags.place.model_dump(exclude_unset=True)),
        "tokens_per_step": run.training.tokens_per_step,
        "sequence_length": run.data.sequence_length,
        "dtype": run.memory.dtype,
        "optimizer_moments": run.optimizer.moments,
        "optimizer_kind": run.optimizer.kind,
        "micro_batches": run.memory.micro_batches,
    }
    set_by_flags = flags.model_fields_set - {
        "lora",
        "place",
    }  # lora and place are merged with their flags already
    config = flags.model_copy(update={k: v for k, v in of_run.items() if k not in set_by_flags})
    if "tokens_per_step" not in set_by_flags | run.training.model_fields_set:
        config.model_fields_set.discard("tokens_per_step")  # the default of one process: see plan_on
    _refuse_without_effect(config, flags.model_fields_set)
    return config, recipe.parts(run)


def _refuse_without_effect(config: Config, given_fields: Set[str]) -> None:
    """Raise ConfigError for a flag (in `given_fields`) that would have no effect."""
    names = [words.strip().lower() for words in config.hardware]
    twice = next((words for words in config.hardware if names.count(words.strip().lower()) > 1), "")
    keeps = "selective", "elementwise"
    for wrong, message, instead in (
        (
            "hardware" in given_fields and not names,
            "hardware names no machine",
            "--hardware 8xH200, or leave it out",
        ),
        (
            config.optimizer_kind == "muon" and config.train == "adapters",
            "optimizer.kind muon has no effect: it moves whole matrices, and adapters train",
            "--train all, or leave --optimizer.kind out",
        ),
        (
            bool(config.quantize) and config.train == "all",
            f"quantize is {config.quantize}, but every weight trains, and packed weights are frozen",
            "--train adapters, or leave --quantize out",
        ),
        (bool(twice), f"hardware names {twice!r} twice", "give each machine once"),
        (
            bool(config.machines and names) and all(words.startswith("cpu:") for words in names),
            "machines has no effect: it lists GPUs, and hardware names none",
            "leave --machines out",
        ),
        (
            "keep_layers" in config.place.model_fields_set
            and config.place.keep_layers is not None
            and config.place.recompute not in ("auto", *keeps),
            f"place.keep_layers has no effect if place.recompute = {config.place.recompute!r}",
            f"--place.recompute {' or '.join(keeps)}",
        ),
    ):
        if wrong:
            raise ConfigError(message, next=instead)


def _merged(file: LoraConfig, flags: LoraConfig) -> LoraConfig:
    """The file's [lora] fields, overridden by flags."""
    return LoraConfig(**file.model_dump(exclude_unset=True) | flags.model_dump(exclude_unset=True))


def fleet_of(words: str, table: str) -> Fleet:
    import torch

    from unfreeze.generate.open import device_of
    from unfreeze.parallel.machine import hardware
    from unfreeze.parallel.plan import fleet

    if words != HERE:
        return fleet.fleet(words, table)
    cuda = device_of("auto").type == "cuda"  # not if the card is one that runs refuse
    here, host = hardware("cuda" if cuda else "cpu"), hardware("cpu")
    known = fleet.devices(table) if cuda else {}
    facts = next((device for name, device in known.items() if name.lower() in here.name.lower()), None)
    count = torch.cuda.device_count() if cuda else 1
    memory = host.available if cuda else 0
    kind = "cuda" if cuda else "cpu"
    return fleet.Fleet(here.name, count, here.available, memory, facts, kind=kind, here=True)


def plan_on(config: Config, machine: Fleet, opened: Opened | None = None) -> Planned:
    """Plan one model on one machine. opened: the model, to share it between several machines.

    A run's default of tokens per step is that of one process, and grows with the devices as the run's does.
    """
    from unfreeze.commands.planned import Planned
    from unfreeze.compress.quantize.onload import packs_line
    from unfreeze.parallel.plan.choose import choose_plan, rates_of

    opened = opened or open_for_plan(config)
    if config.tokens_per_step and "tokens_per_step" not in config.model_fields_set:
        config = config.model_copy(update={"tokens_per_step": config.tokens_per_step * machine.count})
    sizes, counts, request = _measured(config, machine, opened)
    choice, fits = choose_plan(sizes, counts, machine, request)
    others, reason = ([], "") if fits else _instead(config, machine, opened, sizes, counts, request)
    notes = _cut(config, machine, request, choice) if fits or config.tokens_per_step else []
    notes += [f"positions are scaled: {opened.start.longer}"] if opened.start.longer else []
    notes += [packs_line(opened.start)] if opened.start.on_load else []
    rank, rates = request.work.rank, rates_of(machine, request)
    return Planned(
        model=config.model,
        fleet=machine,
        counts=counts,
        choice=choice,
        fits=fits,
        adapter_parameters=sizes.adapter_parameters(rank, config.lora.experts_rank),
        rank=rank or 0,
        length=request.length,
        tokens_chosen=config.tokens_per_step is None,
        micro_batches=config.micro_batches,
        proposals=others,
        reason=reason,
        notes=notes,
        usd_per_hour=config.usd_per_hour,
        rates=rates.source if rates else "",
        dtype=_dtype(config, machine, opened),
        answers=request.work.answers,
        parameters=opened.parameters if config.train == "all" and not opened.start.tensors else None,
    )


def _instead(
    config: Config, machine: Fleet, opened: Opened, sizes: Sizes, counts: Counts, request: PlanRequest
) -> tuple[list[str], str]:
    """Return (settings that would fit, the reason if there are none)."""
    from unfreeze.parallel.plan.choose import if_it_fits, proposals, too_large

    fitting = proposals(sizes, counts, machine, request)
    if config.train == "all" and not counts.packed:
        # also try adapters of the default rank instead of all weights
        others = config.model_copy(update={"train": "adapters"})
        with_adapters, theirs, smaller = _measured(others, machine, opened)
        with_adapters_only = with_adapters, theirs, machine, smaller
        words = f"--train adapters --lora.rank {config.lora.rank}"
        fewer = [f"--train adapters {line}" for line in proposals(*with_adapters_only)[:1]]
        fitting = (if_it_fits(words, *with_adapters_only) or fewer) + fitting
    elif config.train == "adapters" and not counts.packed and sizes.base < PACKED_RATIO * _room(machine):
        with suppress(UserError):  # a model that cannot be packed so
            in_int4, theirs, smaller = _measured(config, machine, opened.packed("int4", ()))
            fitting = if_it_fits("--quantize int4", in_int4, theirs, machine, smaller) + fitting
    return fitting, "" if fitting else too_large(sizes, counts, machine, request)


def _room(machine: Fleet) -> int:
    """Bytes of memory in all."""
    return machine.count * machine.memory + machine.host


def _cut(config: Config, machine: Fleet, request: PlanRequest, choice: PlanChoice) -> list[str]:
    """Note that documents are shorter than requested, if they are."""
    if not choice.whole:
        parts = machine.count * request.work.micro_batches
        return [
            f"documents are cut to {choice.tokens // parts:,} tokens, the micro-batch of a device; to keep"
            f" {request.length:,}: --tokens-per-step {request.length * parts}"
        ]
    if config.sequence_length > request.length:
        return [f"documents have at most {request.length:,} tokens: the model takes no longer documents"]
    return []


def _dtype(config: Config, machine: Fleet, opened: Opened) -> Precision:
    """Dtype of the computation: as configured, else float32 for new weights, else the machine's own.

    GPUs that are not here have bf16 units.
    """
    from unfreeze.kernels.precision import AUTO, NEW, as_asked, precision, precision_on

    if opened.new and config.dtype == AUTO:
        return NEW
    if machine.here:
        return precision(config.dtype, machine.kind)
    best = precision_on(machine.kind)
    if machine.kind == "cpu":  # its instructions are not known
        best = best._replace(why=f"taken to be as here: {best.why}")
    return best if config.dtype == AUTO else as_asked(config.dtype, best, machine.kind)


def _measured(config: Config, machine: Fleet, opened: Opened) -> tuple[Sizes, Counts, PlanRequest]:
    """Return (bytes of the parts, counts, the request)."""
    import torch

    from unfreeze.adapters.snapshot import COPY_BYTES
    from unfreeze.parallel.plan import PlannedModel, rates_here, rates_of_second, work_of
    from unfreeze.parallel.plan.choose import PlanRequest, facts_of
    from unfreeze.parallel.plan.fastest import FASTEST_FIRST
    from unfreeze.parallel.plan.layouts import layouts

    if config.train == "all" and config.lora.model_fields_set:
        raise ConfigError(
            'train = "all" trains every weight and has no adapters',
            next="leave out the --lora flags, or --train all",
        )
    # trained parts, their dtype, and the work of a step
    lora = config.lora if config.train == "adapters" else None
    dtype = getattr(torch, _dtype(config, machine, opened).name)
    model, counted = opened.model(dtype, lora, machine.kind)
    if lora is None and counted.packed:
        raise ConfigError(
            f"model = {config.model!r} is packed: gradients cannot change its codes",
            next="train adapters: --train adapters",
        )
    length = min(config.sequence_length, model.shape.max_positions)
    sizes = opened.sizes(dtype, lora, machine.kind)
    known = PlannedModel(model.shape, lora, dtype, torch.device(machine.kind), counted, sizes, model)
    work = work_of(
        known,
        tokens=1,
        optimizer_moments=config.optimizer_moments,
        optimizer=config.optimizer_kind,
        micro_batches=-(-config.micro_batches // machine.count),
        longest=length,
        receipt_bytes=COPY_BYTES,
        answers=opened.answers(length, length, length, 0) if opened.answers else None,
    )
    recomputes: tuple[Recompute, ...] = FASTEST_FIRST
    if config.place.keep_layers is not None:
        recomputes = ("elementwise", "selective")  # the other policies keep all layers or none
    packs = opened.start.on_load.command if opened.start.on_load else ""
    facts = facts_of(machine, counted, every_weight=lora is None, packs=packs)
    layouts(config.place, facts)  # refuses an impossible placement
    rates = None
    if machine.here:
        rates = rates_here(
            model.shape,
            dtype=dtype,
            device=torch.device(machine.kind),
            length=length,
            every_weight=lora is None,
            packed=counted.packed,
            optimizer_moments=config.optimizer_moments,
        )
    request = PlanRequest(
        work, config.tokens_per_step, length, config.place, recomputes, rates, config.waiting, packs=packs
    )
    if aside := opened.aside(dtype, machine.kind, length, every_weight=lora is None):
        own = rates_of_second(aside(length), dtype, torch.device(machine.kind), length) if rates else None
        request = replace(request, aside=aside, second_rates=own)
    return sizes, counted, request
