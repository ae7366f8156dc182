"""docs/measured/studies.md, made from the last results of the studies of examples/lab.

    python benchmarks/studies_page.py [--write docs/measured/studies.md]

`make studies` writes the results, benchmarks/results/studies/NAME.json; tests/benchmarks/test_studies_page.py
holds the page to them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "studies"
HEAD = """# Studies

Each study is one command, and its answer a sentence that was made from its figures. `make studies` runs
all of them, and `python benchmarks/studies_page.py` makes this page from their last results. Intervals are
95 %, over seeds, paired with the first arm. "No difference" means that the interval contains 0: the study
could not tell the arms apart. How to write one: [the laboratory](../howto/lab.md).
"""


def page(studies: Sequence[Mapping[str, Any]]) -> str:
    """The whole page."""
    rows = [
        f"| [{plain(s['question'])}](#{s['study'].replace('_', '-')}) | {plain(s['sentence'])} |"
        for s in studies
    ]
    parts = [HEAD, "\n".join(["| question | answer |", "|---|---|", *rows, ""])]
    return "\n".join([*parts, *map(section, studies)])


def section(study: Mapping[str, Any]) -> str:
    """One study: question, answer, table, and how it was made."""
    # measures are rows: a grid of needles has 38 of them, and a page room for some arms only
    head, *measures = [list(cells) for cells in zip(study["head"], *study["rows"], strict=True)]
    answer = f"**{plain(study['question'])}** {plain(study['sentence'])}."
    lines = [f"## {study['study'].replace('_', ' ')}", "", answer]
    lines += ["", f"| {' | '.join(map(plain, head))} |", f"|{'---|' * len(head)}"]
    lines += [f"| {' | '.join(map(plain, row))} |" for row in measures]
    if expected := dict(study.get("settings", ())).get("expected"):
        lines[3:3] = ["", f"Expected: {plain(expected)}"]
    lines += ["", plain(" ".join(study["cautions"]))]
    lines += [
        "",
        f"`{study['command']}`, {study['date']}, {study['machine']}: {study['runs']} runs,"
        f" {study['seconds'] / 60:.1f} min.",
        "",
    ]
    return "\n".join(lines)


def plain(text: str) -> str:
    """Text in one line without HTML, that ends no cell of a table."""
    return " ".join(text.split()).replace("<", "&lt;").replace("|", "\\|")


def read(folder: Path = RESULTS) -> list[dict[str, Any]]:
    """Results by name."""
    return [json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("*.json"))]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", type=Path, help="file to write; default: print")
    options = parser.parse_args()
    text = page(read())
    if options.write:
        options.write.write_text(text, encoding="utf-8")
    else:
        print(text)
