"""unfreeze plan MODEL --hardware 8xH200: what a run will take and cost, on any machine.

MODEL is a checkpoint's folder, an id of the Hub, a config.json, or a run's TOML file.

The machine need not be here, and no weights, GPU or network are needed: --model may be a config.json alone.
The plan chooses where experts, adapters and activations lie, how experts are split, what is recomputed and
how many tokens a step has, unless they are given; or it refuses with the arithmetic and with what would fit.
Times are predicted: from facts of the devices (--machines FILE for a table of your own), and for this machine
from its records (`unfreeze kernels measure --to user`). Nothing is measured here.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from unfreeze.commands.opened import Opened, open_for_plan
from unfreeze.commands.recipe import recipe_of
from unfreeze.config.lora import LoraConfig
from unfreeze.config.parse import Folder, Frozen, ModelName, from_keywords, is_model, parse
from unfreeze.core.command import Common
from unfreeze.core.errors import ConfigError
from unfreeze.core.field import about
from unfreeze.core.layout import Layout
from unfreeze.tracking.console import PipeConsole

if TYPE_CHECKING:
    from unfreeze.commands.planned import Planned
    from unfreeze.kernels.precision import Precision
    from unfreeze.models.recompute import Recompute
    from unfreeze.parallel.plan.choose import PlanChoice, PlanRequest
    from unfreeze.parallel.plan.counts import Counts
    from unfreeze.parallel.plan.fleet import Fleet
    from unfreeze.parallel.plan.sizes import Sizes
    from unfreeze.teach.second import Second

HERE = "this machine"
DOES_NOT_FIT = 2


class Config(Frozen):
    """What is planned, and for which machines."""

    model: ModelName = Field(
        default="",
        description="checkpoint folder, Hugging Face id, or a config.json",
        json_schema_extra=about("What", first=True),
    )
    hardware: tuple[str, ...] = Field(
        default=(),
        description="8xH200, 1xH200+768GB (host memory), cpu:24GB …, one or several; default: this machine",
        json_schema_extra=about("Where", first=True),
    )
    machines: Folder = Field(
        default="", description="TOML table of devices of your own", json_schema_extra=about("Where")
    )
    usd_per_hour: float | None = Field(
        default=None,
        gt=0,
        le=1e6,
        description="price of all the hardware per hour; unset: no price",
        json_schema_extra=about("Where", first=True),
    )
    waiting: float = Field(
        default=0.25,
        ge=0,
        le=1,
        description="largest share of a step that may wait for transfers",
        json_schema_extra=about("Where"),
    )
    tokens_per_step: int | None = Field(
        default=None,
        ge=2,
        le=10**12,
        description="tokens of a step on all devices; unset: chosen",
        json_schema_extra=about(
            "How long", name="training.tokens_per_step", alias="tokens_per_step", first=True
        ),
    )
    micro_batches: int = Field(
        default=1,
        ge=1,
        le=10**6,
        description=("parts of a step, divided among the devices (at least one each)"),
        json_schema_extra=about("Memory and machine", name="memory.micro_batches", alias="micro_batches"),
    )
    sequence_length: int = Field(
        default=2048,
        ge=2,
        le=10**9,
        description="tokens of a document, at most what the model takes",
        json_schema_extra=about("How long", name="data.sequence_length", alias="sequence_length", first=True),
    )
    train: Literal["adapters", "all"] = Field(
        default="adapters", description="what trains", json_schema_extra=about("What")
    )
    lora: LoraConfig = Field(default_factory=lambda: LoraConfig(), description="the adapters")
    dtype: Literal["auto", "bfloat16", "float32"] = Field(
        default="auto",
        description="of the computation; auto: bfloat16 where the machine multiplies it",
        json_schema_extra=about("Memory and machine", name="memory.dtype", alias="dtype"),
    )
    optimizer_moments: Literal["float32", "int8"] = Field(
        default="float32",
        description="AdamW's moments: 8 bytes per trained parameter, or 2.03",
        json_schema_extra=about("Memory and machine", name="optimizer.moments", was="optimizer_moments"),
    )
    place: Layout = Field(default_factory=lambda: Layout(), description="where parts must lie; auto: chosen")


def main(arguments: list[str], common: Common) -> dict[str, Any]:
    """-> the plan of the first machine (Planned.fields). With several `plans` has all.

    exit_code 2 where it fits none of them with what is built: what a run would end with.
    """
    config, second = configured(arguments)
    if not config.model:
        raise ConfigError(
            "plan needs a model", next="unfreeze plan --model FOLDER_OR_CONFIG.JSON --hardware 8xH200"
        )
    opened = open_for_plan(config)
    opened.second = second
    plans = [plan_on(config, _fleet(words, config.machines), opened) for words in config.hardware or (HERE,)]
    console = PipeConsole(stderr=common.json, highlight=False, markup=False, emoji=False, soft_wrap=True)
    if not common.quiet:
        console.print("\n".join(line for planned in plans for line in planned.lines()))
    found = plans[0].fields() | ({"plans": [p.fields() for p in plans]} if len(plans) > 1 else {})
    return found | ({} if any(planned.runs for planned in plans) else {"exit_code": DOES_NOT_FIT})


def configured(arguments: list[str]) -> tuple[Config, Second | None]:
    """The Config: a run's TOML file gives model, adapters, step and places, and flags win over it.

    With the second model of a run that has one: a teacher, a reference.

    In its place may stand the model itself.
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
    given = parse(Config, arguments[1:], command="plan", description=__doc__ or "")
    of_run = {
        "model": run.model,
        "train": run.train,
        "lora": _merged(run.lora, given.lora) if run.lora else given.lora,
        "place": run.place.model_copy(update=given.place.model_dump(exclude_unset=True)),
        "tokens_per_step": run.training.tokens_per_step,
        "sequence_length": run.data.sequence_length,
        "dtype": run.memory.dtype,
        "optimizer_moments": run.optimizer.moments,
        "micro_batches": run.memory.micro_batches,
    }
    kept = given.model_fields_set - {"lora", "place"}  # its flags are in it already
    config = given.model_copy(update={k: v for k, v in of_run.items() if k not in kept})
    _refuse_without_effect(config, given.model_fields_set)
    return config, recipe.parts(run).second


def _refuse_without_effect(config: Config, given: Set[str]) -> None:
    """What flags (`given`) ask for and would change nothing. Raises ConfigError that names it."""
    names = [words.strip().lower() for words in config.hardware]
    twice = next((words for words in config.hardware if names.count(words.strip().lower()) > 1), "")
    keeps = "selective", "elementwise"
    for wrong, said, instead in (
        (
            "hardware" in given and not names,
            "hardware names no machine",
            "--hardware 8xH200, or leave it out",
        ),
        (bool(twice), f"hardware names {twice!r} twice", "give each machine once"),
        (
            bool(config.machines and names) and all(words.startswith("cpu:") for words in names),
            "machines has no effect: it holds GPUs, and hardware names none",
            "leave --machines out",
        ),
        (
            "keep_layers" in config.place.model_fields_set
            and config.place.keep_layers is not None
            and config.place.recompute not in ("auto", *keeps),
            f"place.keep_layers has no effect where place.recompute = {config.place.recompute!r}",
            f"--place.recompute {' or '.join(keeps)}",
        ),
    ):
        if wrong:
            raise ConfigError(said, next=instead)


def _merged(file: LoraConfig, flags: LoraConfig) -> LoraConfig:
    """The file's adapters with the fields that flags name."""
    return LoraConfig(**file.model_dump(exclude_unset=True) | flags.model_dump(exclude_unset=True))


def _fleet(words: str, table: str) -> Fleet:
    import torch

    from unfreeze.parallel.machine import hardware
    from unfreeze.parallel.plan import fleet

    if words != HERE:
        return fleet.fleet(words, table)
    cuda = torch.cuda.is_available()
    here, host = hardware("cuda" if cuda else "cpu"), hardware("cpu")
    known = fleet.devices(table) if cuda else {}
    facts = next((device for name, device in known.items() if name.lower() in here.name.lower()), None)
    count = torch.cuda.device_count() if cuda else 1
    memory = host.available if cuda else 0
    kind = "cuda" if cuda else "cpu"
    return fleet.Fleet(here.name, count, here.available, memory, facts, kind=kind, here=True)


def plan_on(config: Config, machine: Fleet, opened: Opened | None = None) -> Planned:
    """One model on one machine. opened: the model, where it is planned for several."""
    from unfreeze.commands.planned import Planned
    from unfreeze.parallel.plan.choose import choose_plan, rates_of

    opened = opened or open_for_plan(config)
    sizes, counts, asked = _measured(config, machine, opened)
    choice, fits = choose_plan(sizes, counts, machine, asked)
    others, reason = ([], "") if fits else _instead(config, machine, opened, sizes, counts, asked)
    notes = _cut(config, machine, asked, choice) if fits or config.tokens_per_step else []
    rank, rates = asked.work.rank, rates_of(machine, asked)
    return Planned(
        model=config.model,
        fleet=machine,
        counts=counts,
        choice=choice,
        fits=fits,
        adapter_parameters=sizes.adapter_parameters(rank, config.lora.experts_rank),
        rank=rank or 0,
        length=asked.length,
        tokens_chosen=config.tokens_per_step is None,
        micro_batches=config.micro_batches,
        proposals=others,
        reason=reason,
        notes=notes,
        usd_per_hour=config.usd_per_hour,
        rates=rates.source if rates else "",
        dtype=_dtype(config, machine),
    )


def _instead(
    config: Config, machine: Fleet, opened: Opened, sizes: Sizes, counts: Counts, asked: PlanRequest
) -> tuple[list[str], str]:
    """(what fits instead, why nothing does where that is so)."""
    from unfreeze.parallel.plan.choose import if_it_fits, proposals, too_large

    found = proposals(sizes, counts, machine, asked)
    if config.train == "all" and not counts.packed:
        # adapters instead of every weight, at their default rank
        others = config.model_copy(update={"train": "adapters"})
        with_adapters, theirs, smaller = _measured(others, machine, opened)
        given = with_adapters, theirs, machine, smaller
        words = f"--train adapters --lora.rank {config.lora.rank}"
        fewer = [f"--train adapters {line}" for line in proposals(*given)[:1]]
        found = (if_it_fits(words, *given) or fewer) + found
    return found, "" if found else too_large(sizes, counts, machine, asked)


def _cut(config: Config, machine: Fleet, asked: PlanRequest, choice: PlanChoice) -> list[str]:
    """That documents are shorter than asked for, where they are."""
    if not choice.whole:
        parts = machine.count * asked.work.micro_batches
        return [
            f"documents are cut to {choice.tokens // parts:,} tokens, a device's at once; whole ones of"
            f" {asked.length:,}: --tokens-per-step {asked.length * parts}"
        ]
    if config.sequence_length > asked.length:
        return [f"documents have at most {asked.length:,} tokens: the model takes no longer ones"]
    return []


def _dtype(config: Config, machine: Fleet) -> Precision:
    """The dtype of the computation: as asked, or what that machine multiplies; other GPUs have bf16 units."""
    from unfreeze.kernels.precision import AUTO, as_asked, precision, precision_on

    if machine.here:
        return precision(config.dtype, machine.kind)
    best = precision_on(machine.kind)
    return best if config.dtype == AUTO else as_asked(config.dtype, best, machine.kind)


def _measured(config: Config, machine: Fleet, opened: Opened) -> tuple[Sizes, Counts, PlanRequest]:
    """(bytes of the parts, counts, what is asked)."""
    import torch

    from unfreeze.adapters.snapshot import COPY_BYTES
    from unfreeze.parallel.plan import PlannedModel, rates_here, rates_of_second, work_of
    from unfreeze.parallel.plan.choose import PlanRequest, facts_of
    from unfreeze.parallel.plan.fastest import FASTEST_FIRST
    from unfreeze.parallel.plan.layouts import layouts

    if config.train == "all" and config.lora.model_fields_set:
        raise ConfigError(
            'train = "all" trains every weight and has no adapters',
            next="leave --lora flags or --train all out",
        )
    # what trains, in which numbers, and what a step does with it
    lora = config.lora if config.train == "adapters" else None
    dtype = getattr(torch, _dtype(config, machine).name)
    model, counted = opened.model(dtype, lora, machine.kind)
    if lora is None and counted.packed:
        raise ConfigError(
            f"model = {config.model!r} is packed: its codes cannot be moved by gradients",
            next="plan adapters: --train adapters",
        )
    length = min(config.sequence_length, model.shape.max_positions)
    sizes = opened.sizes(dtype, lora, machine.kind)
    known = PlannedModel(model.shape, lora, dtype, torch.device(machine.kind), counted, sizes, model)
    work = work_of(
        known,
        tokens=1,
        optimizer_moments=config.optimizer_moments,
        micro_batches=-(-config.micro_batches // machine.count),
        longest=length,
        receipt_bytes=COPY_BYTES,
    )
    recomputes: tuple[Recompute, ...] = FASTEST_FIRST
    if config.place.keep_layers is not None:
        recomputes = ("elementwise", "selective")  # the others keep all layers, or none
    layouts(config.place, facts_of(machine, counted, every_weight=lora is None))  # what cannot be is refused
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
    asked = PlanRequest(work, config.tokens_per_step, length, config.place, recomputes, rates, config.waiting)
    if aside := opened.aside(dtype, machine.kind, length, every_weight=lora is None):
        own = rates_of_second(aside(length), dtype, torch.device(machine.kind), length) if rates else None
        asked = replace(asked, aside=aside, second_rates=own)
    return sizes, counted, asked
