"""unfreeze plan MODEL --hardware 8xH200: what a run will take and cost, on any machine.

MODEL is a checkpoint's folder, an id of the Hub, a config.json, or a run's TOML file.

The machine need not be here, and no weights, GPU or network are needed: --model may be a config.json alone.
The plan chooses where experts, adapters and activations lie, how experts are split, what is recomputed and
how many tokens a step has, unless they are given; or it refuses with the arithmetic and with what would fit.
Times are predicted: from facts of the devices (--machines FILE for a table of your own), and for this machine
from its records (`unfreeze kernels measure --to user`). Nothing is measured here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from unfreeze.commands.opened import Opened, open_model
from unfreeze.commands.recipe import recipe_of
from unfreeze.config.lora import LoraConfig
from unfreeze.config.parse import Folder, Frozen, ModelName, from_keywords, is_model, parse, writing
from unfreeze.config.tables import Place
from unfreeze.core.command import Common
from unfreeze.core.errors import ConfigError
from unfreeze.tracking.console import PipeConsole

if TYPE_CHECKING:
    from unfreeze.commands.planned import Planned
    from unfreeze.job.second import Second
    from unfreeze.kernels.precision import Precision
    from unfreeze.models.recompute import Recompute
    from unfreeze.parallel.fleet import Fleet
    from unfreeze.parallel.plan.choose import Asked, Choice
    from unfreeze.parallel.plan.counts import Counts
    from unfreeze.parallel.plan.sizes import Sizes

SWEEP_RANKS, SWEEP_LENGTHS = (4, 8, 16, 32), (2048, 8192)
HERE = "this machine"
PLACES = (
    "place.experts",
    "place.buffer",
    "place.split",
    "place.weights",
    "place.rest",
    "place.boundary",
    "place.optimizer",
)
DOES_NOT_FIT = 2


class Config(Frozen):
    """What is planned, and for which machines."""

    HELP: ClassVar[dict[str, tuple[str, ...]]] = {
        "What": ("model", "train", "lora.rank", "lora.experts_rank", "lora.targets", "dtype"),
        "How much": (
            "tokens_per_step",
            "micro_batches",
            "sequence_length",
            "recompute",
            "keep_layers",
            "optimizer_moments",
        ),
        "Where": ("hardware", "machines", "usd_per_hour", "waiting", *PLACES),
        "More": ("sweep", "out", "simulate", "trace"),
    }
    FIRST: ClassVar[tuple[str, ...]] = (
        "model",
        "hardware",
        "lora.rank",
        "tokens_per_step",
        "sequence_length",
        "usd_per_hour",
        "sweep",
    )

    model: ModelName = Field(default="", description="checkpoint folder, Hugging Face id, or a config.json")
    hardware: tuple[str, ...] = Field(
        default=(),
        description="8xH200, 1xH200+768GB (host memory), cpu:24GB …, one or several; default: this machine",
    )
    machines: Folder = Field(default="", description="TOML table of devices of your own")
    usd_per_hour: float | None = Field(
        default=None, gt=0, le=1e6, description="price of all the hardware per hour; unset: no price"
    )
    waiting: float = Field(
        default=0.25, ge=0, le=1, description="largest share of a step that may wait for transfers"
    )
    tokens_per_step: int | None = Field(
        default=None, ge=2, le=10**12, description="tokens of a step on all devices; unset: chosen"
    )
    micro_batches: int = Field(
        default=1,
        ge=1,
        le=10**6,
        description=("parts of a step, divided among the devices (at least one each)"),
    )
    sequence_length: int = Field(
        default=2048, ge=2, le=10**9, description="tokens of a document, at most what the model takes"
    )
    train: Literal["adapters", "all"] = Field(default="adapters", description="what trains")
    lora: LoraConfig = Field(default_factory=lambda: LoraConfig(), description="the adapters")
    dtype: Literal["auto", "bfloat16", "float32"] = Field(
        default="auto", description="of the computation; auto: bfloat16 where the machine multiplies it"
    )
    optimizer_moments: Literal["float32", "int8"] = Field(
        default="float32", description="AdamW's moments: 8 bytes per trained parameter, or 2.03"
    )
    recompute: Literal["auto", "layers", "selective", "elementwise", "nothing"] = Field(
        default="auto", description="what is recomputed in backward; auto: chosen"
    )
    keep_layers: int | None = Field(
        default=None,
        ge=0,
        description=(
            "with recompute selective or elementwise: keep activations of the last N layers only; unset: of"
            " all"
        ),
    )
    place: Place = Field(default_factory=lambda: Place(), description="where parts must lie; auto: chosen")
    sweep: bool = Field(
        default=False, description="a table of ranks and lengths on every machine named, and a picture"
    )
    out: Folder = Field(default="plan.svg", description="with --sweep: file of the picture")
    simulate: bool = Field(default=False, description="replay a step event by event beside the formula")
    trace: Folder = Field(
        default="", description="with --simulate: run folder whose routing is replayed; default: even routing"
    )


def main(arguments: list[str], common: Common) -> dict[str, Any]:
    """-> the plan of the first machine (Planned.fields). With several, or --sweep, `plans` has all.

    exit_code 2 where it fits none of them with what is built: what a run would end with.
    """
    config, second = configured(arguments)
    if not config.model:
        raise ConfigError(
            "plan needs a model", next="unfreeze plan --model FOLDER_OR_CONFIG.JSON --hardware 8xH200"
        )
    from unfreeze.commands.plan_picture import write_picture
    from unfreeze.commands.planned import sweep_table

    opened = open_model(config)
    opened.second = second
    plans = [plan(*asked, opened) for asked in _asked_for(config)]
    console = PipeConsole(stderr=common.json, highlight=False, markup=False, emoji=False, soft_wrap=True)
    if config.sweep:
        with writing(config.out, "out"):
            write_picture(plans, Path(config.out))
        lines = [sweep_table(plans), f"picture: {config.out}"]
    else:
        lines = [line for planned in plans for line in planned.lines()]
    if not common.quiet:
        console.print("\n".join(lines))
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
        "recompute": run.memory.recompute,
        "keep_layers": run.memory.keep_layers,
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
            "out" in given and not config.sweep,
            "out is the picture of a sweep",
            "add --sweep, or leave --out out",
        ),
        (config.trace and not config.simulate, "trace is what --simulate replays", "add --simulate"),
        (
            config.simulate and config.sweep,
            "simulate replays one plan, and a sweep shows many",
            "leave --simulate or --sweep out",
        ),
        (
            "keep_layers" in given
            and config.keep_layers is not None
            and config.recompute not in ("auto", *keeps),
            f"keep_layers has no effect where recompute = {config.recompute!r}",
            f"--recompute {' or '.join(keeps)}",
        ),
    ):
        if wrong:
            raise ConfigError(said, next=instead)


def _merged(file: LoraConfig, flags: LoraConfig) -> LoraConfig:
    """The file's adapters with the fields that flags name."""
    return LoraConfig(**file.model_dump(exclude_unset=True) | flags.model_dump(exclude_unset=True))


def _asked_for(config: Config) -> Iterator[tuple[Config, Fleet]]:
    """Each machine, and with --sweep each rank and length on it."""
    fleets = [_fleet(words, config.machines) for words in config.hardware or (HERE,)]
    for machine in fleets:
        if not config.sweep:
            yield config, machine
            continue
        for rank in SWEEP_RANKS:
            for length in SWEEP_LENGTHS:
                lora = config.lora.model_copy(update={"rank": rank})
                yield config.model_copy(update={"lora": lora, "sequence_length": length}), machine


def _fleet(words: str, table: str) -> Fleet:
    import torch

    from unfreeze.parallel import fleet
    from unfreeze.parallel.machine import hardware

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


def plan(config: Config, machine: Fleet, opened: Opened | None = None) -> Planned:
    """One model on one machine. opened: the model, where it is planned for several."""
    from unfreeze.commands.planned import Planned
    from unfreeze.parallel.plan.choose import choose, rates_of

    opened = opened or open_model(config)
    sizes, counts, asked = _measured(config, machine, opened)
    choice, fits = choose(sizes, counts, machine, asked)
    others, reason = ([], "") if fits else _instead(config, machine, opened, sizes, counts, asked)
    simulated, notes = None, []
    if config.simulate and choice.time:
        simulated = _replayed(config.trace, sizes, counts, machine, asked, choice)
        if config.trace and choice.layout.split == 1:
            notes.append("the trace changes nothing: every device has all experts")
    elif config.simulate:
        notes.append("not replayed: a replay needs the seconds of the formula")
    if fits or config.tokens_per_step:
        notes += _cut(config, machine, asked, choice)
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
        simulated=simulated,
        notes=notes,
        usd_per_hour=config.usd_per_hour,
        rates=rates.source if rates else "",
        dtype=_dtype(config, machine),
    )


def _instead(
    config: Config, machine: Fleet, opened: Opened, sizes: Sizes, counts: Counts, asked: Asked
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


def _cut(config: Config, machine: Fleet, asked: Asked, choice: Choice) -> list[str]:
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


def _measured(config: Config, machine: Fleet, opened: Opened) -> tuple[Sizes, Counts, Asked]:
    """(bytes of the parts, counts, what is asked)."""
    import torch

    from unfreeze.adapters.snapshot import COPY_BYTES
    from unfreeze.commands.planned_places import given_places
    from unfreeze.parallel.plan import rates_here, rates_of_second, work_of
    from unfreeze.parallel.plan.choose import Asked
    from unfreeze.parallel.plan.fastest import FASTEST_FIRST

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
    work = work_of(
        model.shape,
        lora,
        tokens=1,
        dtype=dtype,
        device=torch.device(machine.kind),
        optimizer_moments=config.optimizer_moments,
        micro_batches=-(-config.micro_batches // machine.count),
        keep_layers=config.keep_layers,
        longest=length,
        receipt_bytes=COPY_BYTES,
    )
    recomputes: tuple[Recompute, ...] = FASTEST_FIRST if config.recompute == "auto" else (config.recompute,)
    if config.keep_layers is not None and config.recompute == "auto":
        recomputes = ("elementwise", "selective")  # the others keep all layers, or none
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
    given = given_places(config.place, config.train, machine, model.shape.num_experts)
    asked = Asked(work, config.tokens_per_step, length, recomputes, rates, config.waiting, given)
    if aside := opened.aside(dtype, machine.kind, length, every_weight=lora is None):
        own = rates_of_second(aside(length), dtype, torch.device(machine.kind), length) if rates else None
        asked = replace(asked, aside=aside, second_rates=own)
    return opened.sizes(dtype, lora, machine.kind), counted, asked


def _refuse_other_routing(trace: str, load: Mapping[str, Sequence[int]], counts: Counts) -> None:
    """Raises ConfigError where the run's model has other layers or experts than the planned one."""
    for what, theirs, ours in (
        ("layers with experts", {len(load)}, counts.moe_layers),
        ("experts a layer", {len(tokens) for tokens in load.values()}, counts.num_experts),
    ):
        if theirs != {ours}:
            found = " and ".join(f"{number:,}" for number in sorted(theirs))
            raise ConfigError(
                f"trace = {trace!r} is of another model: it has {found} {what}, the planned one has {ours:,}",
                next="give a run of the same model, or leave --trace out for even routing",
            )


def _replayed(
    trace: str, sizes: Sizes, counts: Counts, machine: Fleet, asked: Asked, choice: Choice
) -> dict[str, float]:
    """The step replayed with a run's routing, or with even routing (parallel/simulate.py)."""
    from unfreeze.core.schema import TrainEvent
    from unfreeze.parallel.plan.choose import rates_of, seconds_of
    from unfreeze.parallel.plan.layout import share
    from unfreeze.parallel.simulate import loads_of, replay
    from unfreeze.report.events import of_kind, read_events

    # the formula's terms with even routing: the replay adds the imbalance itself
    rates = rates_of(machine, asked)
    assert rates is not None
    layout = choice.layout
    even = seconds_of(sizes, counts, machine, rates, layout, asked, choice.tokens, imbalance=1.0)

    # each device's rows over the mean: by the experts it has, or as the last step of the run routed them
    loads: Sequence[Sequence[float]] = [[1.0]]
    if layout.split > 1:
        loads = loads_of({"": [1] * counts.num_experts}, layout.split)
    if trace:
        events = of_kind(read_events(Path(trace) / "events.jsonl"), TrainEvent)
        traces = [load for event in events if (load := event.get("expert_load"))]
        if not traces:
            raise ConfigError(f"{trace} has no routing in its events", next="give a run of a MoE model")
        _refuse_other_routing(trace, traces[-1], counts)
        loads = loads_of(traces[-1], layout.split)
    # the formula's terms are the fullest device's
    fullest = share(counts, layout.split) * layout.split
    found = replay(even, counts.num_layers, [[rows / fullest for rows in load] for load in loads])
    return {
        "step": found.step,
        "waits for weights": found.for_weights,
        "waits for devices": found.for_devices,
    }
