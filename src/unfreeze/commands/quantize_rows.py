"""Rows for `unfreeze quantize`: to correct the rounding on, and to measure the result on.

With --calibrate and without --measure a tenth of the calibration rows is held out of it, chosen by a hash of
their content, and measured on.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unfreeze.core.errors import ConfigError, DataError, DoesNotFit
from unfreeze.core.units import format_bytes, plural
from unfreeze.tracking.live import LoadProgress

if TYPE_CHECKING:
    from torch import Tensor

    from unfreeze.checkpoint import Manifest
    from unfreeze.compress.calibrate.calibration import Calibration
    from unfreeze.compress.quantize.write import Record
    from unfreeze.compress.work import MergeWork
    from unfreeze.core.batch import Batch
    from unfreeze.data import Examples
    from unfreeze.evaluate.divergence import Divergence, Head
    from unfreeze.models import Decoder

TOKENS = 2048  # of a batch, and of the longest row
HELD_OUT = 0.1  # of the calibration rows
CARRY = "not rounded; they carry the inverse of AWQ's scales"
WAYS = {
    "gptq": ("Corrected", "The rounding was corrected (GPTQ, arXiv:2210.17323)"),
    "awq": ("Scaled", "Input channels were scaled before rounding to nearest (AWQ, arXiv:2306.00978)"),
    "awq-gptq": (
        "Scaled and corrected",
        "Input channels were scaled (AWQ, arXiv:2306.00978) and the rounding corrected (GPTQ,"
        " arXiv:2210.17323)",
    ),
}
"""Of a method: the word before "on … tokens", and the card's sentence before it."""


@dataclass(frozen=True)
class Rows:
    """Packed rows. corrected_on: empty without --calibrate; measured_on: never empty. source: in words."""

    corrected_on: list[Batch]
    measured_on: list[Batch]
    source: str

    @property
    def tokens(self) -> int:
        """Tokens that the rounding is corrected on."""
        return sum(batch.num_tokens for batch in self.corrected_on)


def rows_of(
    calibrate: str, measure: str, columns: tuple[str, ...], manifest: Manifest, say: Callable[[str], None]
) -> Rows | None:
    """Read the rows of the two files; None without any. Raises DataError for a bad row, or too few."""
    from unfreeze.data import split_by_content, validation_batches

    if not calibrate and not measure:
        return None
    own = examples_of(calibrate, columns, manifest, say, "calibrate") if calibrate else None
    if measure:
        held, source = examples_of(measure, columns, manifest, say, "measure"), Path(measure).name
    else:
        assert own is not None
        try:
            own, held = split_by_content(own, HELD_OUT)
        except ConfigError:
            raise DataError(
                f"{calibrate} has {plural(len(own), 'row')}; a tenth is to be held out, which leaves one side"
                " empty",
                next="give more rows, or other ones with --measure FILE",
            ) from None
        source = f"{plural(len(held), 'row')} held out of {Path(calibrate).name}"
    return Rows(
        list(validation_batches(own, TOKENS)) if own is not None else [],
        list(validation_batches(held, TOKENS)),
        source,
    )


def examples_of(
    file: str, columns: tuple[str, ...], manifest: Manifest, say: Callable[[str], None], flag: str
) -> Examples:
    """Encode a file's rows as they would be trained on."""
    from unfreeze import models
    from unfreeze.data import encoded_files, load_tokenizer
    from unfreeze.data.rows.sources import files_of

    length = min(TOKENS, models.shape(manifest.config).max_positions)
    paths = files_of(file, flag, say)
    return encoded_files(paths, load_tokenizer(manifest.path), length, columns=columns).examples


def digest(rows: Rows | None) -> str:
    """Hash of the rows that the rounding is corrected on; "none" without any."""
    from unfreeze.compress.calibrate.calibration import digest_of

    return digest_of(rows.corrected_on) if rows is not None and rows.corrected_on else "none"


def calibrate(
    rows: Rows | None, work: MergeWork, out: Path, inputs: dict[str, Any], quiet: bool
) -> Calibration | None:
    """Correct the rounding, in a folder beside OUT; None without rows to do it on.

    If OUT is finished nothing is done, and `round` does it where a file of OUT turns out to be damaged.
    Raises DoesNotFit, before any work, if memory or disk is too small for it or for the result.
    """
    from unfreeze.compress import shards
    from unfreeze.compress.calibrate.calibration import Calibration
    from unfreeze.compress.calibrate.layers import memory_of
    from unfreeze.compress.merge import out_files
    from unfreeze.compress.quantize import write as by_shards
    from unfreeze.parallel.machine import hardware

    if rows is None or not rows.corrected_on:
        return None
    folder, finished = folder_of(out), by_shards.begun(out, inputs).finished
    calibration = Calibration(work, rows.corrected_on, folder, inputs, inputs["method"])
    if finished:
        return calibration
    needed, free = memory_of(work.manifest, rows.tokens), hardware("cpu").available
    if needed > free:
        raise DoesNotFit(
            f"memory: one layer and the states of {rows.tokens:,} calibration tokens take"
            f" {format_bytes(needed)}; {format_bytes(free)} are free",
            next="give fewer rows with --calibrate, or leave it out to round to the nearest",
        )
    both = [(folder, file) for file in calibration.files] + [(out, file) for file in out_files(work)]
    left = [file for place, file in both if not (place / file.name).is_file()]
    shards.check_disk(out, left, len(both))
    with LoadProgress("calibrate", quiet=quiet) as progress:
        calibration.run(progress)
    return calibration


def folder_of(out: Path) -> Path:
    """The folder of corrected layers, beside OUT until its files are written."""
    return out.with_name(f"{out.name}.calibration")


def remove(out: Path) -> None:
    """Remove the corrected layers: OUT has them."""
    shutil.rmtree(folder_of(out), ignore_errors=True)


def measured(rows: Rows, work: MergeWork, out: Path) -> dict[str, Any]:
    """Perplexity, and KL to the original, of what was written, and with --calibrate of the nearest rounding.

    -> source, tokens, rows, original (perplexity, loss), written and nearest (as `figures`)
    """
    from unfreeze.checkpoint import open_checkpoint
    from unfreeze.compress.calibrate.calibration import matrices_of, rounded_states
    from unfreeze.compress.calibrate.layers import Layers, hidden_states
    from unfreeze.compress.quantize.fused import OneNumber
    from unfreeze.evaluate.divergence import divergence

    batches, base = rows.measured_on, Layers(work.manifest)
    original = hidden_states(base, batches)

    def against(states: Sequence[Tensor], model: Decoder) -> Divergence:
        heads: list[Head] = [base.model.logits, model.logits]
        return divergence(batches, original, states, *heads)

    written = Layers(open_checkpoint(out))
    result = against(hidden_states(written, batches), written.model)
    nearest = None
    if rows.corrected_on:
        round = OneNumber(work).round
        nearest = against(*rounded_states(work.manifest, list(matrices_of(work)), batches, round))
    return {
        "source": rows.source,
        "tokens": result.tokens,
        "rows": result.rows,
        "original": {"perplexity": result.original_perplexity, "loss": result.original},
        "written": figures(result),
        "nearest": None if nearest is None else figures(nearest),
    }


def figures(result: Divergence) -> dict[str, Any]:
    """One model's figures, as quantize.json has them. An error that one row cannot give is null."""
    named = {"perplexity": result.perplexity, **asdict(result)}
    for name in ("original", "tokens", "rows"):
        del named[name]
    return {name: value if math.isfinite(value) else None for name, value in named.items()}


def results(
    rows: Rows | None, calibration: Calibration | None, work: MergeWork, record: Record, out: Path
) -> dict[str, Any]:
    """`calibrated` and `measured`, as quantize.json has them; None without rows.

    Of an OUT that was finished before, how its matrices were rounded is what its record says.
    """
    own = record.more.get("calibrated")
    if rows is not None and calibration is not None and calibration.tallies:
        groups = {group: vars(tally) for group, tally in calibration.tallies.items()}
        own = {"method": calibration.method, "tokens": rows.tokens, "groups": groups}
        own |= {"left": calibration.left, "carry": calibration.changed_groups}
    return {"calibrated": own, "measured": None if rows is None else measured(rows, work, out)}


def mark_scaled(result: dict[str, Any]) -> None:
    """Say of the groups that are not rounded but carry scales that they do."""
    carry = (result["calibrated"] or {}).get("carry", {})
    for row in result["kept"]:
        if row["group"] in carry:
            row["why"] = CARRY


def sentences(result: dict[str, Any]) -> Iterator[str]:
    """Matrices by their rounding; perplexity and KL before and after."""
    if (own := result["calibrated"]) is not None:
        groups = (f"{name(group)} {words(tally)}" for group, tally in own["groups"].items())
        verb, _ = WAYS[own.get("method", "gptq")]
        yield f"{verb} on {own['tokens']:,} tokens: {'; '.join(groups)}"
        if own.get("left"):
            yield unscaled(own["left"])
    if (own := result["measured"]) is not None:
        before, after, nearest = own["original"], own["written"], own["nearest"]
        plain = f" (to nearest {nearest['perplexity']:.4g})" if nearest else ""
        yield (
            f"Perplexity on {own['source']}, {own['tokens']:,} tokens: {before['perplexity']:.4g} before,"
            f" {after['perplexity']:.4g} in {result['to']}{plain}"
        )
        plain = f" (to nearest {kl(nearest)})" if nearest else ""
        yield (
            f"KL to the original: {kl(after)} nats per token{plain}; the most likely token is the same at"
            f" {100 * after['agree']:.1f} %"
        )


def name(group: str) -> str:
    """A group of weights in words."""
    return "head" if group == "lm_head" else group.replace("_", " ")


def unscaled(left: dict[str, int]) -> str:
    """The matrices without scales, in words."""
    names = ", ".join(f"{leaf} ({count:,})" for leaf, count in left.items())
    return f"Not scaled, as nothing in front takes the scales exactly: {names}"


def words(tally: dict[str, Any]) -> str:
    """One group's tally: matrices with a smaller error and what is left of it, and the others."""
    total = sum(tally[way] for way in ("corrected", "better", "few", "other"))
    left = f", {100 * tally['error'] / tally['nearest']:.0f} % of the error left" if tally["nearest"] else ""
    why = {
        "better": "better to nearest",
        "few": "to nearest: too few tokens",
        "other": "to nearest: cannot be corrected",
    }
    rest = "".join(f", {tally[way]:,} {text}" for way, text in why.items() if tally[way])
    return f"{tally['corrected']:,} of {total:,} matrices{left}{rest}"


def kl(own: dict[str, Any]) -> str:
    """KL with its standard error."""
    error = "" if own["kl_error"] is None else f" ± {own['kl_error']:.1g}"
    return f"{own['kl']:.3g}{error}"


def card(result: dict[str, Any]) -> list[str]:
    """The lines of README.md."""
    lines: list[str] = []
    if (own := result["calibrated"]) is not None:
        lines += [f"{WAYS[own.get('method', 'gptq')][1]} on {own['tokens']:,} tokens."]
        for group, tally in own["groups"].items():
            lines += [f"- {name(group)}: {words(tally)}"]
        if own.get("left"):
            lines += ["", f"{unscaled(own['left'])}."]
        lines += [""]
    if (own := result["measured"]) is not None:
        lines += [
            f"Measured on {own['source']}, {own['tokens']:,} tokens:",
            "",
            "| model | perplexity | KL to the original, nats per token | same most likely token |",
            "|---|---|---|---|",
            f"| original | {own['original']['perplexity']:.4g} | 0 | 100 % |",
        ]
        names = {"nearest": "rounded to the nearest", "written": "this one"}
        lines += [
            f"| {title} | {own[way]['perplexity']:.4g} | {kl(own[way])} | {100 * own[way]['agree']:.1f} % |"
            for way, title in names.items()
            if own[way] is not None
        ]
        lines += [""]
    return lines
