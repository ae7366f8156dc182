"""docs/reference/{commands,fields,errors}.md, made from the program itself.

    python benchmarks/reference_pages.py [--check]

commands: the help of every command. fields: every field of the four kinds of run, from its declaration.
errors: every message that a user can meet, from the source, with the remedy below it. --check writes nothing
and ends with 1 if a page is not what the program says (tests/docs/test_pages.py does the same).
"""

from __future__ import annotations

import argparse
import ast
import io
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import get_args, get_origin

import annotated_types

from unfreeze import cli
from unfreeze.config.help import default_of, kind_of
from unfreeze.config.names import Known, fields
from unfreeze.config.recipes import CONFIGS

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "unfreeze"
FOLDER = ROOT / "docs" / "reference"
BY = "<!-- made by benchmarks/reference_pages.py -->"
TABLES = {  # heading of the page -> what is said below it
    "": "Above the tables of a TOML file.",
    "data": "The rows, and how they become tokens.",
    "training": "How long, and how much at once.",
    "optimizer": "AdamW and its schedule.",
    "memory": "Device, number format, micro-batches.",
    "place": "Where weights, activations and moments are kept, and what is recomputed.",
    "save": "Saves and resuming.",
    "watch": "Validation, samples, trackers, guards.",
    "lora": "The adapters.",
    "preference": "In `prefer`.",
    "distillation": "In `distill`.",
    "rollout": "In `grpo`: the answers of a step.",
    "grading": "In `grpo`: processes that run the reward.",
    "policy": "In `grpo`: the loss.",
    "endpoint": "A server as teacher, in `distill --prepare` and `generate --data`.",
}
ERRORS = {  # class -> heading
    "ConfigError": "Commands and settings",
    "DataError": "Data",
    "CheckpointError": "Models, checkpoints, runs",
    "AdapterError": "Adapters",
    "DoesNotFit": "Memory and disk",
    "EndpointError": "Servers",
    "ProcessGone": "Processes",
}


def commands() -> str:
    """Each command's `--help`."""
    lines = [
        "# Commands",
        "",
        BY,
        "",
        "Every command takes `--json` (its result as one JSON object on the last line of stdout), `--quiet`"
        " (warnings and errors only) and `--traceback`.",
        "",
        "| exit code | meaning |",
        "|---|---|",
        '| 0 | done. Also a run that Ctrl-C or SIGTERM ended after a save; it has `"finished": false` |',
        "| 1 | a fault of the program or the machine |",
        "| 2 | something that you can mend; also `unfreeze plan` of what does not fit |",
        "| 130 | Ctrl-C anywhere else |",
    ]
    for name in cli.COMMANDS:
        words = [*(["dev"] if name in cli.DEV else []), name]
        out = io.StringIO()
        with redirect_stdout(out), suppress(SystemExit):
            cli.main([*words, "--help"])
        lines += ["", f"## unfreeze {' '.join(words)}", "", "```text", out.getvalue().strip(), "```"]
    return "\n".join(lines) + "\n"


def _limits(known: Known) -> str:
    """The bounds of a number: "1 to 4096"."""
    low: object = None
    high: object = None
    above = ""
    for bound in known.info.metadata:
        if isinstance(bound, annotated_types.Ge):
            low = bound.ge
        if isinstance(bound, annotated_types.Gt):
            low, above = bound.gt, "above "
        if isinstance(bound, annotated_types.Le):
            high = bound.le
        if isinstance(bound, annotated_types.Lt):
            high = f"below {bound.lt}"
    if low is not None and high is not None:
        return f"{above}{low} to {high}"
    return (
        f"{above or 'at least '}{low}" if low is not None else f"at most {high}" if high is not None else ""
    )


def _values(known: Known) -> str:
    """The values of a field: its choices, or its type and limits."""
    kind = kind_of(known.info.annotation)
    names = {"N": "whole number", "X": "number", "TEXT": "text", "": "true, false"}
    names |= {f"{short} …": f"{word}s" for short, word in names.items() if short}
    inner = get_args(known.info.annotation)
    several = get_origin(known.info.annotation) is tuple and inner and inner[0] is not str
    words = names.get(kind, kind if several else ", ".join(f"`{word}`" for word in kind.split("|")))
    words = words.replace("`N`", "whole number").replace("`X`", "number").replace("`TEXT`", "text")
    return ", ".join(word for word in (words, _limits(known)) if word)


def field_table() -> str:
    """Every field of sft, prefer, distill and pretrain, table by table."""
    there: dict[str, tuple[Known, list[str]]] = {}
    for recipe, config in CONFIGS.items():
        for name, known in fields(config).items():
            there.setdefault(name, (known, []))[1].append(recipe)
    lines = [
        "# Fields of a run",
        "",
        BY,
        "",
        "A field has one dotted name: `optimizer.clip` is `clip` below `[optimizer]` in TOML,"
        ' `--optimizer.clip` as a flag and `optimizer={"clip": 1.0}` in Python.'
        " An alias is a short name for the same field."
        " A flag overrides the file.",
    ]
    for table, about in TABLES.items():
        lines += ["", f"## {f'[{table}]' if table else 'Above the tables'}", "", about, ""]
        lines += ["| field | values | default | |", "|---|---|---|---|"]
        for name, (known, recipes) in there.items():
            prefix, _, key = name.rpartition(".")
            if prefix != table:
                continue
            alias = f", alias `{known.about.alias}`" if known.about.alias not in ("", name) else ""
            only = "" if len(recipes) == len(CONFIGS) or table in recipes else f" (in {', '.join(recipes)})"
            default = default_of(known.info).strip(" ()").removeprefix("default ")
            text = " ".join((known.info.description or "").split())
            for mark in "|<>":
                text = text.replace(mark, f"\\{mark}")
            lines += [f"| `{key}`{alias}{only} | {_values(known)} | {default} | {text} |"]
    return "\n".join(lines) + "\n"


def _text(node: ast.expr) -> str:
    """A message with … for its values; "" where it is no text."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) if isinstance(part, ast.Constant) else "…" for part in node.values)
    if isinstance(node, ast.BinOp):
        return _text(node.left) + _text(node.right)
    if isinstance(node, ast.IfExp):
        return " / ".join(filter(None, (_text(node.body), _text(node.orelse))))
    return "…" if isinstance(node, ast.Name | ast.Call | ast.Attribute | ast.Subscript) else ""


def messages() -> Iterator[tuple[str, str, str]]:
    """(class, message, remedy) of each error that the package raises."""
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.relative_to(PACKAGE).parts[0] == "drill":
            continue
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(call, ast.Call) and call.args):
                continue
            name = getattr(call.func, "id", getattr(call.func, "attr", ""))
            if name not in ERRORS:
                continue
            remedy = next((_text(word.value) for word in call.keywords if word.arg == "next"), "")
            yield name, " ".join(_text(call.args[0]).split()), " ".join(remedy.split())


def errors() -> str:
    """Every message and its remedy, in alphabetical order."""
    lines = [
        "# Errors",
        "",
        BY,
        "",
        "An error is one line that says what is wrong and a second one, `next:`, that says what to do."
        " … stands for a value. Search this page for a few words of your message.",
    ]
    entries = sorted(set(messages()), key=lambda row: (row[1].lstrip("… ").lower(), *row))
    for kind, heading in ERRORS.items():
        rows = [(text, remedy) for name, text, remedy in entries if name == kind and text.strip("… :,;")]
        lines += ["", f"## {heading}", "", f"`{kind}`", "", "| message | next |", "|---|---|"]
        lines += [f"| {_cell(text)} | {_cell(remedy)} |" for text, remedy in rows]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    """Text as a cell of a table: nothing in it is markup."""
    for mark in "\\|<>*_`[]":
        text = text.replace(mark, f"\\{mark}")
    return text.strip()


PAGES = {"commands.md": commands, "fields.md": field_table, "errors.md": errors}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; end with 1 if a page is stale")
    stale = []
    check = parser.parse_args().check
    for name, make in PAGES.items():
        path, text = FOLDER / name, make()
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(name)
            if not check:
                path.write_text(text, encoding="utf-8")
    print(f"{'stale' if check else 'written'}: {', '.join(stale) or 'none'}")
    raise SystemExit(bool(stale) and check)


if __name__ == "__main__":
    main()
