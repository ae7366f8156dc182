"""The pieces that pages are made of: escaped text, sections, tables, figures, and the document around them.

A page stands by itself: no script, no request to anywhere, no font to load. A Content-Security-Policy in it forbids everything but its own
styles and its own embedded bitmaps, and every text from a run (prompts, answers, paths, config) goes through `text()`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

from unfreeze.report.pictures import HUES
from unfreeze.report.style import CSS

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"


def document(title: str, body: str, footer: str) -> str:
    """The whole page as one string. body is HTML; title and footer are plain text."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{text(title)}</title>\n<style>{CSS}</style>\n</head>\n<body>\n<main>\n"
        f"{body}\n<footer>{text(footer)}</footer>\n</main>\n</body>\n</html>\n"
    )


def write_page(path: Path, page: str) -> Path:
    """Write a page in one move and return its path."""
    temporary = path.with_suffix(".html.tmp")
    temporary.write_bytes(page.encode("utf-8", "replace"))  # "replace": generated text may hold half of a surrogate pair
    temporary.replace(path)
    return path


def text(value: object) -> str:
    """Any value as HTML text, safe inside elements and quoted attributes; control characters, which HTML forbids, shown as U+FFFD."""
    return escape(re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]", "\ufffd", str(value)), quote=True)


def section(title: str, body: str, note: str = "") -> str:
    """A titled part of the page. body is HTML; note is plain text under the title."""
    words = f'<p class="note">{text(note)}</p>' if note else ""
    return f"<section><h2>{text(title)}</h2>{words}{body}</section>"


def folded(summary: str, body: str) -> str:
    """HTML that opens on a click."""
    return f"<details><summary>{text(summary)}</summary><div>{body}</div></details>"


def table(
    head: Sequence[str], rows: Sequence[Sequence[str]], *, caption: str, bad: Sequence[str] = (), look: Sequence[str] = (), kind: str = ""
) -> str:
    """An HTML table; the first cell of each row is its heading. bad, look: first cells of rows to mark as a fault, or to be looked at.

    kind "words": cells hold sentences, not numbers; "stack": on a phone each row becomes a list of its cells.
    """
    heads = "".join(f'<th scope="col">{text(cell)}</th>' for cell in head)
    body = []
    for first, *cells in rows:
        mark = ' class="bad"' if first in bad else ' class="look"' if first in look else ""
        names = [f' data-head="{text(name)}"' if "stack" in kind.split() else "" for name in head[1:]]
        data = "".join(f"<td{name}>{text(cell)}</td>" for name, cell in zip(names, cells, strict=True))
        body.append(f'<tr{mark}><th scope="row">{text(first)}</th>{data}</tr>')
    start = f'<div class="scroll" tabindex="0"><table class="{kind}" aria-label="{text(caption)}">'
    return f"{start}<thead><tr>{heads}</tr></thead>\n<tbody>" + "\n".join(body) + "</tbody></table></div>"


def figure(title: str, words: str, *pictures: str, key: str = "") -> str:
    """A figure with its caption above; two pictures are the wide and the narrow form of one. key is HTML that explains the colours."""
    if len(pictures) == 2:
        pictures = (f'<div class="wide">{pictures[0]}</div>', f'<div class="narrow">{pictures[1]}</div>')
    caption = f"<figcaption><strong>{text(title)}</strong><span>{text(words)}</span></figcaption>"
    return f"<figure>{caption}{key}{''.join(pictures)}</figure>"


def key(names: Sequence[str]) -> str:
    """What the lines of pictures.lines stand for: the i-th name beside the i-th line's colour and dash."""
    items = [f'<span><i class="hue-{i % len(HUES)}{" dashed" if i >= len(HUES) else ""}"></i>{text(name)}</span>' for i, name in enumerate(names)]
    return f'<p class="key">{"".join(items)}</p>'
