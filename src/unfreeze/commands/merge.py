"""unfreeze merge RUN --to same|bf16|int4 --out DIR: write base and adapter as one checkpoint.

same: each weight keeps the base's format; weights without an adapter are copied byte for byte. Of a run with
--quantize the base is the packed one, so same writes that format. bf16: a dense
checkpoint. int4: Kimi-K2's INT4 for the weights that the base quantizes, or for linear layers and experts of
a dense base.

It measures on held-out rows how much of the improvement survives. --verbose also shows how much of the
adapter survives rounding in each group of modules. It works shard by shard: to continue an interrupted merge,
run the same command again.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field
from tyro.conf import Positional, arg

from unfreeze.commands.merge_losses import gain_of
from unfreeze.commands.merge_rewards import reward_gain
from unfreeze.commands.merge_rows import HeldoutRows, encode_as_run, heldout_rows
from unfreeze.config.adapter import kind_of, rounded_as
from unfreeze.config.columns import Columns
from unfreeze.config.parse import Folder, Frozen, ModelName, parse, writing
from unfreeze.config.synonyms import Hint
from unfreeze.core.command import Common
from unfreeze.core.errors import ConfigError
from unfreeze.core.field import about
from unfreeze.core.torchrun import started
from unfreeze.generate.source import run_of
from unfreeze.job.end.card import hub_id, license_of, usage
from unfreeze.job.merge_aware import other_merge
from unfreeze.job.opening.device import say
from unfreeze.job.opening.source import open_as_trained
from unfreeze.quant.requantize import Scales
from unfreeze.tracking.live import LoadProgress

if TYPE_CHECKING:
    from unfreeze.checkpoint import Manifest
    from unfreeze.compress.merge import Record
    from unfreeze.compress.rounding import Row
    from unfreeze.evaluate.gain import Gain

SHOWN = 3  # worst modules to show; merge.json has all
ALL = 0.99  # share of a change that is kept; above it the rounding error is only noise
SMALL, LARGE = 0.1, 0.5  # errors √((1 − kept)² + noise²): below SMALL unmentioned, above LARGE a warning


class Config(Frozen):
    run: Annotated[ModelName, Positional, arg(metavar="RUN")] = Field(
        description="run folder or adapter folder"
    )
    to: Literal["same", "bf16", "int4"] = Field(
        default="same", description="the format to write: the base's own, bfloat16, or Kimi-K2's INT4"
    )
    out: Folder = Field(default="", description="folder to write; default RUN/merged-<to>")
    scales: Scales = Field(
        default="refit",
        description=(
            "scales of a quantized weight. refit: recomputed for W + ΔW; keep: the published ones where"
            " W + ΔW fits them; keep-change: these, with enough codes moved for ΔW to keep its length"
        ),
    )
    base: ModelName = Field(
        default="", description="base checkpoint of an adapter, if the one it names is not on this machine"
    )
    data: Folder = Field(
        default="", description="held-out rows to measure on; default: those that the run held out"
    )
    columns: Columns = Field(
        default=(),
        description="column names in --data, FIELD=COLUMN",
        json_schema_extra=about("Options", name="data.columns", alias="columns"),
    )
    no_check: bool = Field(default=False, description="merge without measuring on held-out rows")
    verbose: bool = Field(
        default=False, description="show how much of the adapter survives in each group of modules"
    )


def main(arguments: list[str], common: Common) -> dict[str, Any]:
    """Parse the arguments and call `run_merge`."""
    config = parse(Config, arguments, command="merge", description=__doc__ or "", positional=True)
    return run_merge(config, common)


def run_merge(config: Config, common: Common) -> dict[str, Any]:
    """Merge, report how much of the adapter survived rounding, and measure on held-out rows.

    -> path, to, scales, modules, rounding (per group), gain (None: not_measured says why), carried.
    """
    run, processes = Path(config.run), started().size
    if processes > 1:
        raise ConfigError(
            f"merge runs in one process, but torchrun started {processes}",
            next=f"without torchrun (also for a run that was split): unfreeze merge {run}",
        )
    if not run.is_dir():
        raise ConfigError(f"{run} is not a folder", next="give a run's folder (runs/<name>), or an adapter's")
    source, manifest = open_as_trained(config.run, say(common), config.base)
    if better := of_an_earlier_step(run):
        say(common)(better)
    if source.adapter is None:
        as_it_is = Hint("it is a whole model", f"unfreeze chat {source.base}")
        quantize = f"unfreeze quantize {run} --to int4 --out DIR"
        dense = config.to == "int4" and manifest.scheme() is None
        hint = Hint("quantize takes a whole model", quantize) if dense else as_it_is
        raise ConfigError(f"{run} has no adapter to merge; {hint.text}", next=hint.next)
    out = Path(config.out) if config.out else run / f"merged-{config.to}"
    if out.resolve() in (run.resolve(), source.adapter.resolve(), manifest.path.resolve()):
        raise ConfigError(f"out = {out} is the folder being merged", next="give another folder")
    if config.columns and not config.data:
        raise ConfigError("columns needs --data", next="give --data FILE")
    if config.to == "bf16" and config.scales != "refit":
        raise ConfigError(
            f"scales = {config.scales}, but bf16 has no scales", next="leave --scales out, or use --to same"
        )
    packed = manifest.scheme() is not None
    if other := other_merge(rounded_as(source.adapter), config.to, config.scales, packed=packed):
        say(common)(f"warning: {other}")
    rows = "--no-check" if config.no_check else heldout_rows(run, config.data, config.columns)

    import torch

    from unfreeze import models
    from unfreeze.compress import merge as by_shards
    from unfreeze.compress.deltas import Deltas
    from unfreeze.compress.quantize.fused import parted
    from unfreeze.compress.work import MergeWork

    # refuse everything that can be refused before writing a byte
    model = models.meta_model(models.shape(manifest.config), manifest, torch.float32)
    if isinstance(rows, HeldoutRows):
        examples = encode_as_run(rows, manifest, model.shape.max_positions, say(common))
    else:
        examples = rows
    deltas = Deltas(model, source.adapter)
    work = MergeWork(manifest, model, deltas, config.to)
    inputs = by_shards.inputs_of(manifest, source.adapter, config.to, config.scales)
    try:
        with writing(out, "out"), LoadProgress("merge", quiet=common.quiet) as progress:
            record = by_shards.merge(work, deltas, out, inputs, config.scales, progress)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"finished shards stay in {out}; to continue, run the same command again"
        ) from None

    measured: Gain | str = "no row was read"
    if isinstance(examples, str):
        measured = examples
    elif isinstance(rows, HeldoutRows):
        measure = reward_gain if rows.rewarded else gain_of
        measured = measure(manifest, source.adapter, out, examples, rows)
    unmeasured, gain = (measured, None) if isinstance(measured, str) else ("", measured)
    groups = dict(summary(record.rows))
    settings = {"base": _name(source.base), "adapter": _name(str(run)), "ranks": _ranks(deltas.ranks)}
    settings["kind"] = kind_of(source.adapter, run_of(source.adapter))
    record.more |= {
        "settings": settings,
        "rounding": groups,
        "gain": gain and {**asdict(gain), "share": gain.share},
        "not_measured": unmeasured,
    }
    with writing(out, "out"):
        record.write(out)
        write_card(out, manifest, source.base, config, record, gain)
    for line in sentences(record, groups, gain, config, unmeasured):
        say(common)(line)
    if apart := parted(work, record.rows, out):
        say(common)(f"warning: {two_numbers(*apart, config, out)}")
    if gain is not None and isinstance(rows, HeldoutRows) and rows.trained_on:
        say(common)(f"warning: {rows.trained_on}")
    say(common)(f"wrote the checkpoint {out}. To talk with it: unfreeze chat {out}")
    return {
        "path": str(out),
        "to": config.to,
        "scales": config.scales,
        "modules": len(record.rows),
        "rounding": groups,
        "gain": record.more["gain"],
        "not_measured": unmeasured,
        "carried": record.more["carried"],
    }


def of_an_earlier_step(run: Path) -> str:
    """Return a hint if an earlier step than the last (the one being merged) was better on held-out rows."""
    from unfreeze.report.run import best_words, read_run, rewarded

    record = read_run(run) if (run / "events.jsonl").is_file() else None
    best = "" if record is None else best_words(record)
    if record is None or not best:
        return ""
    at, _, folder = best.partition(", in ")
    was = "reward was highest" if rewarded(record) else "loss was lowest"
    return (
        f"This merges the last step; the held-out {was} at {at}. To merge that: unfreeze merge {run / folder}"
    )


def summary(rows: Sequence[Row]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (group, its modules, ‖ΔW‖/‖W‖, and per way the means of size, cosine, kept and noise)."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)
    for group, own in groups.items():
        ways: dict[str, dict[str, float]] = {}
        for way in dict.fromkeys(way for row in own for way in row.ways):
            roundings = [row.ways[way] for row in own if way in row.ways]
            ways[way] = {
                name: sum(getattr(rounded, name) for rounded in roundings) / len(roundings)
                for name in ("size", "cosine", "kept", "noise")
            }
            ways[way]["anew"] = sum(rounded.anew for rounded in roundings)
        change = sum(row.delta / row.weight if row.weight else 0.0 for row in own) / len(own)
        written = sorted({row.written for row in own})
        yield group, {"modules": len(own), "change": change, "written": written, "ways": ways}


def sentences(
    record: Record, groups: dict[str, dict[str, Any]], gain: Gain | None, config: Config, unmeasured: str
) -> Iterator[str]:
    """Say how much survives, the losses or rewards, the table if requested, and a remedy if much is lost."""
    from unfreeze.evaluate.gain import ENOUGH

    share = None if gain is None else gain.share
    lost = share is None or share < ENOUGH
    rounding = "; ".join(filter(None, (loses_most(groups), in_bf16(groups, config)))) if lost else ""
    if gain is not None and share is not None:
        yield f"{gain.survives} in this format{rounding and f'; {rounding}'}"
    else:
        why = f"known how much survives: {gain.undefined}" if gain is not None else ""
        yield f"Not {why or f'measured how much survives: {unmeasured}'}."
        if rounding:
            yield rounding
    if gain is not None:
        yield gain.words(config.data)
    if config.verbose:
        yield from table(record, groups, config)
    if share is not None and lost:
        part = "all" if share <= 0 else f"{100 * (1 - share):.1f} %"
        yield f"warning: {part} of what was learned is lost in this format: {rounding_remedy(groups, config)}"
    elif share is None and any(_error(entry, entry["written"][0]) > LARGE for entry in groups.values()):
        yield f"warning: rounding takes a large part of the adapter: {rounding_remedy(groups, config)}"


def rounding_remedy(groups: dict[str, dict[str, Any]], config: Config) -> str:
    """Suggest flags that lose less: bf16 if it keeps nearly all; codes that hold ΔW if the nearest do not."""
    from unfreeze.evaluate.gain import ENOUGH

    wide = [entry["ways"]["BF16"]["kept"] for entry in groups.values() if "BF16" in entry["ways"]]
    bf16 = config.to != "bf16" and all(share >= ENOUGH for share in wide)
    near = [entry["ways"] for entry in groups.values() if entry["written"] == [config.scales]]
    moves = any("keep" in of and of[config.scales]["kept"] < ENOUGH for of in near)
    ways = ["--to bf16"] * bf16 + ["--scales keep-change"] * moves
    return ", or ".join([*ways, "serve the adapter beside the base (unfreeze export)"])


def two_numbers(one: str, other: str, config: Config, out: Path) -> str:
    """Words about NVFP4 matrices that shared a number and do not any more, with the merge that keeps it."""
    words = ["unfreeze", "merge", config.run, "--scales", "keep", "--out", f"{out}-keep"]
    words += ["--base", config.base] if config.base else []
    return (
        f"{one} and {other.rpartition('.')[2]} no longer share one NVFP4 number:"
        f" vLLM misreads such a folder, SGLang refuses it\n  next: {shlex.join(words)}"
    )


def loses_most(groups: dict[str, dict[str, Any]]) -> str:
    """Name the group that loses most of the adapter to rounding; "" if every group keeps nearly all."""
    errors = {group: _error(entry, entry["written"][0]) for group, entry in groups.items()}
    group = max(errors, key=lambda group: errors[group], default="")
    if not group or errors[group] < SMALL:
        return ""
    of = groups[group]["ways"][groups[group]["written"][0]]
    if of["kept"] >= ALL:
        return f"largest rounding error: {group.replace('_', ' ')} layers ({100 * of['noise']:.0f} % noise)"
    left = f"{_percent(of['kept'])} of their change is kept{_noise(of)}"
    layers = "" if group.endswith("s") else " layers"  # the experts, the mlp layers
    return f"the {group.replace('_', ' ')}{layers} lose most ({left})"


def in_bf16(groups: dict[str, dict[str, Any]], config: Config) -> str:
    """Share of the adapter that bf16 would keep in its worst group; "" if bf16 is written."""
    from unfreeze.compress.rounding import PLAIN

    ways = [entry["ways"][PLAIN] for entry in groups.values() if PLAIN in entry["ways"]]
    if not ways or config.to == "bf16" or all(entry["written"] == [PLAIN] for entry in groups.values()):
        return ""
    least = max(ways, key=lambda of: math.hypot(1 - of["kept"], of["noise"]))
    return f"bf16 keeps {_percent(least['kept'])}{_noise(least)}"


def _error(entry: dict[str, Any], way: str) -> float:
    return math.hypot(1 - entry["ways"][way]["kept"], entry["ways"][way]["noise"])


def _noise(of: Mapping[str, float]) -> str:
    """Noise orthogonal to ΔW, if it is the larger part of the error."""
    if of["noise"] < max(SMALL, abs(1 - of["kept"])):
        return ""
    return f", under noise of {100 * of['noise']:.0f} %"


def _percent(share: float) -> str:
    """Format a share as per cent, rounded down: 99.96 % is not 100 %."""
    return f"{max(0, math.floor(1000 * min(1.0, share) + 1e-6)) / 10:g} %"


def table(record: Record, groups: dict[str, dict[str, Any]], config: Config) -> Iterator[str]:
    """Yield lines on how much of the adapter survives, per group and in the worst modules."""
    yield "how much of the adapter survives in the new format (kept 1.00, noise 0.00: all), per group:"
    for group, entry in groups.items():
        ways = "; ".join(
            f"{way} {_shares(of)}" + (f", {of['anew']:,.0f} scales recomputed" if of["anew"] else "")
            for way, of in entry["ways"].items()
        )
        wrote = f" (written: {', '.join(entry['written'])})" if len(entry["ways"]) > 1 else ""
        yield f"  {group}: {entry['modules']} modules, ‖ΔW‖/‖W‖ {entry['change']:.3f}; {ways}{wrote}"
    for row in record.rows[:SHOWN]:
        rounding = row.ways[row.written]
        shares = {name: getattr(rounding, name) for name in ("size", "cosine", "kept", "noise")}
        yield f"  worst: {row.module} {_shares(shares)} ({row.written})"
    yield "  kept = size × cosine, size = ‖Q(W+ΔW)−W‖/‖ΔW‖, cosine: with ΔW; noise: the part orthogonal to ΔW"


def _shares(of: Mapping[str, float]) -> str:
    """ "kept 0.94 (1.05 × 0.90), noise 0.46"."""
    return f"kept {of['kept']:.2f} ({of['size']:.2f} × {of['cosine']:.2f}), noise {of['noise']:.2f}"


def write_card(
    out: Path, manifest: Manifest, base: str, config: Config, record: Record, gain: Gain | None
) -> None:
    """Write README.md: the merged models, the figures, the base's licence. It names no local paths."""
    from unfreeze.checkpoint.beside import BASE_CARD, CARD
    from unfreeze.checkpoint.save import write_file
    from unfreeze.compress.released import RECORD

    formats = {
        "same": "the base's own formats",
        "bf16": "bfloat16",
        "int4": "INT4 (pack-quantized, groups of 32)",
    }
    if manifest.on_load is not None:
        formats["same"] = f"{manifest.on_load.words}, in which its base was packed while it trained"
    identity = hub_id(base)
    words = f"{gain.survives}. {gain.words(Path(config.data).name)}" if gain else ""
    lines = ["---", *([f"base_model: {identity}"] if identity else []), "pipeline_tag: text-generation"]
    lines += [*license_of(manifest.path), "tags:", "- merge", "- unfreeze", "---", ""]
    lines += [f"# {_name(base)}, merged with {_name(config.run)}", ""]
    kind = record.more["settings"]["kind"]
    lines += [f"A {kind} adapter merged into its base, in {formats[config.to]}, made with unfreeze.", ""]
    lines += [
        "| weights | modules | ‖ΔW‖/‖W‖ | written as | ‖Q(W+ΔW)−W‖/‖ΔW‖ | cosine | kept | noise |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for group, entry in record.more["rounding"].items():
        for way in entry["written"]:
            of = entry["ways"][way]
            cells = [
                group,
                entry["modules"],
                f"{entry['change']:.3f}",
                way,
                *(f"{of[name]:.2f}" for name in ("size", "cosine", "kept", "noise")),
            ]
            lines.append(f"| {' | '.join(map(str, cells))} |")
    lines += ["", f"{words[0].upper()}{words[1:]}." if words else "Not measured on held-out rows.", ""]
    lines += usage("FOLDER_OR_ID_OF_THIS_MODEL", str(manifest.config.get("model_type")))
    lines += [f"`{RECORD}` has each module's rounding and the files' SHA-256.", ""]
    if BASE_CARD in record.more["carried"]:
        lines += [f"The base's own card is [{BASE_CARD}]({BASE_CARD}).", ""]
    write_file(out / CARD, "\n".join(lines))


def _ranks(ranks: dict[str, int]) -> dict[str, int]:
    """Return rank -> number of modules."""
    return {str(rank): list(ranks.values()).count(rank) for rank in sorted(set(ranks.values()))}


def _name(source: str) -> str:
    """Name of a base or run without its parent folders; a Hub id is unchanged."""
    return hub_id(source) or Path(source).resolve().name
