"""Public names that two files of src/unfreeze define: one word for two things.

    python benchmarks/names.py            (the doubles, then their share)
    python benchmarks/names.py --room kernels

Counted are public classes and functions at a module's top level; methods are not. A name counts once, however
many files define it. Names that a protocol of this package calls in every file are left out:

    commands, recipes  main and Config: the command line imports main by name, and main parses a Config
    recipes            parts and train: cli and api ask each recipe's module for them
    models/<family>    shape, layer …: models.FAMILIES asks each family's module
    kernels/<op>       what an op's reference and its candidates both define: one signature
    tracking/<kind>    Sink: tracking.SINKS names each tracker's module

These are PROTOCOLS below, by folder; nothing else is left out.
"""

from __future__ import annotations

import argparse
import ast
from collections import defaultdict
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src" / "unfreeze"
PROTOCOLS: dict[str, frozenset[str]] = {
    # models.FAMILIES' modules: models/__init__.py calls these of each
    "models": frozenset("shape layer ignored renamed ends rules".split()),
    # an op's folder: `choose` gets its bucket; a candidate has its reference's functions and signature
    "kernels": frozenset(
        "bucket forward backward backward_weighted rotate step softmax_gradient gather combine"
        " combine_backward sort replay weight_gradient int4_grouped_mm".split()
    ),
    "commands": frozenset({"main", "Config"}),
    "recipes": frozenset({"main", "parts", "train"}),
    "config": frozenset({"Config"}),
    "tracking": frozenset({"Sink"}),
}


def definitions(folder: Path = SOURCE) -> dict[str, list[str]]:
    """name -> the files, relative to `folder`, that define it."""
    defined: dict[str, list[str]] = defaultdict(list)
    for file in sorted(folder.rglob("*.py")):
        where = file.relative_to(folder)
        left_out = PROTOCOLS.get(where.parts[0], frozenset())
        names = {
            node.name
            for node in ast.parse(file.read_text(encoding="utf-8")).body
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        }
        for name in sorted(names - left_out):
            if not name.startswith("_"):
                defined[name].append(str(where))
    return defined


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--room", default="", help="only doubles with a definition in this folder")
    room = parser.parse_args().room
    defined = definitions()
    doubles = {name: files for name, files in defined.items() if len(files) > 1}
    for name, files in sorted(doubles.items(), key=lambda item: (-len(item[1]), item[0])):
        if any(file.startswith(room) for file in files):
            print(f"{len(files):3}  {name:28} {', '.join(files)}")
    print(
        f"{len(doubles)} of {len(defined)} public names are defined twice: {len(doubles) / len(defined):.1%}"
    )


if __name__ == "__main__":
    main()
