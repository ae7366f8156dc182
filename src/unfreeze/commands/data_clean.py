"""unfreeze data clean IN… OUT_DIR: clean raw text before training on it.

Reads jsonl, json, text, csv, parquet, arrow, .gz, .zst and hf:org/name. Drops documents by language, length,
repetition, quality, exact and near duplicates, and n-grams of evaluation files (--against). Writes JSON lines
with every other column (licence, origin, …) as it was, and ledger.json: documents and bytes per reason.
Killed and run again, it continues and writes the same bytes.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field
from rich.table import Table
from rich.text import Text
from tyro.conf import Positional, arg

from unfreeze.config.parse import Files, Folder, Frozen, from_file, parse, writing
from unfreeze.core.command import Common
from unfreeze.core.errors import ConfigError
from unfreeze.core.field import about
from unfreeze.core.units import format_bytes, plural
from unfreeze.tracking.console import PipeConsole
from unfreeze.tracking.live import EncodeProgress


class Config(Frozen):
    """Options of data clean; a recipe has all the numbers."""

    paths: Annotated[Files, Positional, arg(metavar="IN… OUT_DIR")] = Field(
        min_length=1, description="files, folders, patterns or hf:org/name to read; last, a new folder"
    )
    recipe: Folder = Field(default="", description="TOML file with other numbers than the defaults")
    against: Files = Field(
        default=(),
        description="files of evaluation rows: documents that share an n-gram with them are dropped",
    )
    text: str = Field(
        default="",
        description="column with the text; default: text or content, or the turns of a conversation",
        json_schema_extra=about("Options", name="data.text", alias="text"),
    )
    on_bad_row: Literal["", "error", "skip"] = Field(
        default="",
        description="bad rows: stop at the first, or drop and count them; default: the recipe's",
        json_schema_extra=about("Options", name="data.on_bad_row", was="on_bad_row"),
    )


def main(arguments: list[str], common: Common) -> dict[str, Any]:
    """Clean data files. -> the ledger, with `out`: the folder."""
    from unfreeze.data.clean.run import clean

    config = parse(Config, arguments, command="data clean", description=__doc__ or "", positional=True)
    if len(config.paths) < 2:
        raise ConfigError(
            "unfreeze data clean needs IN and OUT_DIR",
            next="unfreeze data clean IN… OUT_DIR, such as unfreeze data clean in/ out/",
        )
    *written, out = config.paths
    recipe = recipe_of(config)
    say = partial(print, file=sys.stderr) if not common.quiet else lambda line: None
    with (
        EncodeProgress(quiet=common.quiet, label="clean") as progress,
        writing(out, "OUT_DIR", positional=True),
    ):
        ledger = clean(written, Path(out), recipe, say, progress)
    if not common.quiet:
        show(ledger, out, PipeConsole(stderr=common.json, highlight=False))
    return {"out": out, **ledger}


def recipe_of(config: Config) -> Any:
    """Return the recipe of the file, or the default one, with what the flags say instead."""
    from unfreeze.config.clean import Recipe

    example = "a recipe has tables such as [length] min_words = 20"
    recipe = from_file(Recipe, Path(config.recipe), example) if config.recipe else Recipe()
    flags = {"text": config.text, "on_bad_row": config.on_bad_row}
    data = recipe.data.model_copy(update={name: value for name, value in flags.items() if value})
    contamination = recipe.contamination
    if config.against:
        contamination = contamination.model_copy(update={"against": config.against, "enabled": True})
    return recipe.model_copy(update={"data": data, "contamination": contamination})


def show(ledger: Mapping[str, Any], out: str, console: PipeConsole) -> None:
    """Print the ledger as a table."""
    table = Table(box=None, pad_edge=False)
    for column in ("", "documents", "bytes", "for example"):
        wide = column == "for example"  # the one that gives way
        table.add_column(column, justify="left" if wide or not column else "right", no_wrap=not wide)
    table.add_row("in", *_numbers(ledger["in"]), "")
    for reason, entry in ledger["dropped"].items():
        table.add_row(f"- {reason}", *_numbers(entry), cut(entry["examples"][0]["why"]))
    if ledger["between_rows"]:
        table.add_row("- between rows", "", f"{ledger['between_rows']:,}", cut("blank lines, separators"))
    languages = _first(ledger["languages"])
    table.add_row("kept", *_numbers(ledger["kept"]), cut(", ".join(f"{n:,} {l}" for l, n in languages)))
    console.print(table)
    written = ledger["written"]
    files = plural(len(ledger["files"]), "file")
    console.print(
        f"{out}: {files}, {format_bytes(written['bytes'])} of JSON lines, and ledger.json", markup=False
    )
    if not ledger["kept"]["documents"]:
        console.print("warning: no document is left; the ledger says why", markup=False)
    else:
        console.print(
            f"next: unfreeze tokenizer train {out}    unfreeze data show {out} --model MODEL", markup=False
        )


def cut(words: str) -> Text:
    """A cell that ends with "…" where the terminal does, instead of a second line."""
    return Text(words[:60], no_wrap=True, overflow="ellipsis")


def _numbers(entry: Mapping[str, Any]) -> tuple[str, str]:
    return f"{entry['documents']:,}", f"{entry['bytes']:,}"


def _first(languages: Mapping[str, int]) -> list[tuple[str, int]]:
    return list(languages.items())[:4]
