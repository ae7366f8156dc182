"""unfreeze merge RUN --to same|bf16|int4 --out DIR: base and adapter as one checkpoint.

same: every weight in the format that the base has it in; what no adapter touches is copied byte for byte.
bf16: a dense release. int4: Kimi-K2's INT4, of what the base quantizes; of a dense base linear layers and
experts.

It says per module what rounding left of the adapter, and how much of the training's gain is kept on held-out
rows. It works shard by shard: the same command goes on where it was stopped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field
from tyro.conf import Positional, arg

from unfreeze.commands.merge_rows import encoded, gain_of, rows_of
from unfreeze.config.columns import Columns
from unfreeze.config.parse import Folder, Frozen, ModelName, parse, writing
from unfreeze.core.command import Common
from unfreeze.core.errors import ConfigError
from unfreeze.job.card import hub_id, license_of
from unfreeze.job.device import say
from unfreeze.tracking.live import LoadProgress

if TYPE_CHECKING:
    from unfreeze.checkpoint import Manifest
    from unfreeze.compress.merge import Record
    from unfreeze.compress.rounding import Row
    from unfreeze.evaluate.gain import Gain

SHOWN = 3  # of the modules, the worst; merge.json has all


class Config(Frozen):
    run: Annotated[ModelName, Positional, arg(metavar="RUN")] = Field(
        description="run folder or adapter folder"
    )
    to: Literal["same", "bf16", "int4"] = Field(
        default="same", description="the format to write: the base's own, bfloat16, or Kimi-K2's INT4"
    )
    out: Folder = Field(default="", description="folder to write; default RUN/merged-<to>")
    scales: Literal["refit", "keep"] = Field(
        default="refit",
        description=(
            "scales of a quantized weight: made anew for W + ΔW, or the published ones wherever their codes"
            " can hold it"
        ),
    )
    base: ModelName = Field(
        default="", description="base checkpoint of an adapter, where the one it names is not here"
    )
    data: Folder = Field(
        default="", description="held-out rows to measure on; default: those that the run held out"
    )
    columns: Columns = Field(
        default=(), description="fields of a row of --data and the columns they are read from: FIELD=COLUMN"
    )
    no_check: bool = Field(default=False, description="merge without measuring the loss on held-out rows")


def main(arguments: list[str], common: Common) -> dict[str, Any]:
    """As `merge`."""
    config = parse(Config, arguments, command="merge", description=__doc__ or "", positional=True)
    return merge(config, common)


def merge(config: Config, common: Common) -> dict[str, Any]:
    """Merge, say what rounding left, measure on held-out rows.

    -> path, to, scales, modules, rounding (per group), gain (None where it was not measured), carried.
    """
    from unfreeze.generate.source import open_source

    run = Path(config.run)
    if not run.is_dir():
        raise ConfigError(f"{run} is not a folder", next="give a run's folder (runs/<name>), or an adapter's")
    source, manifest = open_source(config.run, say(common), config.base)
    if source.adapter is None:
        raise ConfigError(
            f"{run} has no adapter to merge; it is a whole model", next=f"use {source.base} as it is"
        )
    out = Path(config.out) if config.out else run / f"merged-{config.to}"
    if out.resolve() in (run.resolve(), source.adapter.resolve(), manifest.path.resolve()):
        raise ConfigError(f"out = {out} is what is merged", next="give another folder")
    if config.columns and not config.data:
        raise ConfigError("columns are those of --data, which is not given", next="give --data FILE")
    if config.to == "bf16" and config.scales == "keep":
        raise ConfigError("scales = keep: bf16 has no scales", next="leave --scales out, or --to same")
    rows = "--no-check" if config.no_check else rows_of(run, config.data, config.columns)

    import torch

    from unfreeze import models
    from unfreeze.compress import merge as by_shards
    from unfreeze.compress.deltas import Deltas
    from unfreeze.compress.work import Work

    # everything that can be refused is, before a byte is written
    model = models.meta_model(models.shape(manifest.config), manifest, torch.float32)
    unmeasured = rows if isinstance(rows, str) else ""
    examples = (
        None if isinstance(rows, str) else encoded(rows, manifest, model.shape.max_positions, say(common))
    )
    deltas = Deltas(model, source.adapter)
    work = Work(manifest, model, deltas, config.to)
    inputs = by_shards.inputs_of(manifest, source.adapter, config.to, config.scales)
    try:
        with writing(out, "out"), LoadProgress("merge", quiet=common.quiet) as progress:
            record = by_shards.merge(work, deltas, out, inputs, config.scales, progress)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"whole shards stay in {out}; give the same command again") from None

    gain = None
    if examples is not None:
        gain = gain_of(manifest, source.adapter, out, examples, say(common))
    groups = dict(summary(record.rows))
    settings = {"base": _name(source.base), "adapter": _name(str(run)), "ranks": _ranks(deltas.ranks)}
    record.more |= {
        "settings": settings,
        "rounding": groups,
        "gain": gain and {**asdict(gain), "share": gain.share},
    }
    with writing(out, "out"):
        record.write(out)
        write_card(out, manifest, source.base, config, record, gain)
    for line in said(record, groups, gain, config, unmeasured):
        say(common)(line)
    if gain is not None and not isinstance(rows, str) and rows.trained_on:
        say(common)(f"warning: {rows.trained_on}")
    say(common)(f"{out}: a checkpoint; unfreeze chat {out}")
    return {
        "path": str(out),
        "to": config.to,
        "scales": config.scales,
        "modules": len(record.rows),
        "rounding": groups,
        "gain": record.more["gain"],
        "carried": record.more["carried"],
    }


def summary(rows: Sequence[Row]) -> Iterator[tuple[str, dict[str, Any]]]:
    """group -> modules, ‖ΔW‖/‖W‖, and per way size, cosine, kept, noise: means over its modules."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)
    for group, own in groups.items():
        ways: dict[str, dict[str, float]] = {}
        for way in own[0].ways:
            found = [row.ways[way] for row in own if way in row.ways]
            ways[way] = {
                name: sum(getattr(rounded, name) for rounded in found) / len(found)
                for name in ("size", "cosine", "kept", "noise")
            }
            ways[way]["anew"] = sum(rounded.anew for rounded in found)
        change = sum(row.delta / row.weight if row.weight else 0.0 for row in own) / len(own)
        written = sorted({row.written for row in own})
        yield group, {"modules": len(own), "change": change, "written": written, "ways": ways}


def said(
    record: Record, groups: dict[str, dict[str, Any]], gain: Gain | None, config: Config, unmeasured: str
) -> Iterator[str]:
    """A few lines: the worst modules, a line per group, the gain, and what to do where little is kept."""
    from unfreeze.evaluate.gain import ENOUGH

    yield (
        "rounding, as shares of ‖ΔW‖: how much of ΔW is kept (‖Q(W+ΔW)−W‖/‖ΔW‖ × its cosine with ΔW), and the"
        " noise across it"
    )
    for row in record.rows[:SHOWN]:
        found = row.ways[row.written]
        shares = {name: getattr(found, name) for name in ("size", "cosine", "kept", "noise")}
        yield f"  worst: {row.module} {_shares(shares)} ({row.written})"
    for group, entry in groups.items():
        ways = "; ".join(
            f"{way} {_shares(of)}" + (f", {of['anew']:,.0f} scales made anew" if of["anew"] else "")
            for way, of in entry["ways"].items()
        )
        wrote = f" (written: {config.scales})" if len(entry["ways"]) > 1 else ""
        yield f"  {group}: {entry['modules']} modules, ‖ΔW‖/‖W‖ {entry['change']:.3f}; {ways}{wrote}"
    if gain is None:
        yield f"the share of the gain that is kept was not measured{f': {unmeasured}' if unmeasured else ''}"
        return
    yield gain.words(config.data)
    if gain.share is not None and gain.share < ENOUGH:
        other = "keep" if config.scales == "refit" else "refit"
        remedy = f"--to bf16, or --scales {other}, or serve" if config.to != "bf16" else "serve"
        yield (
            f"warning: rounding took most of what training gained: {remedy} the adapter beside the base"
            " (unfreeze export)"
        )


def _shares(of: Mapping[str, float]) -> str:
    """ "kept 0.94 (1.05 × 0.90), noise 0.46"."""
    return f"kept {of['kept']:.2f} ({of['size']:.2f} × {of['cosine']:.2f}), noise {of['noise']:.2f}"


def write_card(
    out: Path, manifest: Manifest, base: str, config: Config, record: Record, gain: Gain | None
) -> None:
    """README.md: what was merged, its figures, the base's licence. No path of this machine stands on it."""
    from unfreeze.checkpoint.save import write_file
    from unfreeze.compress.released import BASE_CARD, CARD, RECORD

    formats = {
        "same": "the base's own formats",
        "bf16": "bfloat16",
        "int4": "INT4 (pack-quantized, groups of 32)",
    }
    identity = hub_id(base)
    words = gain.words(Path(config.data).name) if gain else ""
    lines = ["---", *([f"base_model: {identity}"] if identity else []), "pipeline_tag: text-generation"]
    lines += [*license_of(manifest.path), "tags:", "- merge", "- unfreeze", "---", ""]
    lines += [f"# {_name(base)}, merged with {_name(config.run)}", ""]
    lines += [f"A LoRA adapter merged into its base, in {formats[config.to]}, made with unfreeze.", ""]
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
    lines += [f"`{RECORD}` has each module's rounding and the files' SHA-256.", ""]
    if BASE_CARD in record.more["carried"]:
        lines += [f"The base's own card is [{BASE_CARD}]({BASE_CARD}).", ""]
    write_file(out / CARD, "\n".join(lines))


def _ranks(ranks: dict[str, int]) -> dict[str, int]:
    """rank -> how many modules have it."""
    return {str(rank): list(ranks.values()).count(rank) for rank in sorted(set(ranks.values()))}


def _name(source: str) -> str:
    """A base or a run without the folders it lies in; a Hub id as it is."""
    return hub_id(source) or Path(source).resolve().name
