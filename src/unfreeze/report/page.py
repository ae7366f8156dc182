"""The frame that pages are made in: jinja2 templates with autoescape, two shared pieces, the document.

A page stands by itself: no request to anywhere, no font to load. A Content-Security-Policy in it forbids
everything but its own styles, its own embedded bitmaps and one script, named by its hash; without script the
page is whole. Every text from a run (prompts, answers, paths, config) is a value in a template, never a part
of one: autoescape makes it text.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from markupsafe import Markup

from unfreeze.report.pictures import HUES

TEMPLATES = Path(__file__).parent / "templates"
CSS = (TEMPLATES / "style.css").read_text(encoding="utf-8")
SCRIPT = (TEMPLATES / "page.js").read_text(encoding="utf-8")
HASH = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
POLICY = (
    f"default-src 'none'; script-src 'sha256-{HASH}'; style-src 'unsafe-inline'; img-src data:; "
    "base-uri 'none'; form-action 'none'"
)


def _clean(value: object) -> object:
    """What a template prints: control characters, which HTML forbids, become U+FFFD."""
    return (
        value
        if hasattr(value, "__html__")
        else re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]", "\ufffd", str(value))
    )


def environment(*, autoescape: bool = True) -> jinja2.Environment:
    """The templates beside this file. A name that a template uses and isn't given is an error, not a gap."""
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=autoescape,
        finalize=_clean,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.globals["hue"] = _hue
    return made


def _hue(position: int) -> str:
    """The class of the line at this position in pictures.lines: its colour, and dashed after the last one."""
    return f"hue-{position % len(HUES)}{' dashed' if position >= len(HUES) else ''}"


ENVIRONMENT = environment()


class Figure(NamedTuple):
    """A picture with its caption above. pictures: SVGs; two are the wide and the narrow form of one.

    log: the same with a logarithmic axis, shown by a switch, and first where log_first (one such figure a
    page).
    series: pictures.points_json(), what the script tells under the pointer; x: what runs along the axis.
    scale: (low, high, what is red) of a heat map's colours. names: what the lines of pictures.lines stand
    for.
    """

    title: str
    words: str
    pictures: Sequence[str]
    log: Sequence[str] = ()
    series: str = ""
    scale: tuple[str, str, str] | None = None
    names: Sequence[str] = ()
    log_first: bool = False
    x: str = "step"


def render(template: str, **values: Any) -> Markup:
    """A template of templates/ with its values filled in, as HTML."""
    return Markup(ENVIRONMENT.get_template(template).render(values))


def document(title: str, parts: Sequence[Markup], footer: str, *, reload: int = 0) -> str:
    """The whole page as one string. title and footer are plain text.

    reload: seconds after which the page loads itself anew; 0: never.
    """
    frame = {"policy": POLICY, "css": Markup(CSS), "script": Markup(SCRIPT)}
    return str(render("page.html", title=title, parts=parts, footer=footer, reload=reload, **frame))


def write_page(path: Path, page: str) -> Path:
    """Write a page in one move and return its path; a run and who watches it may write at the same time."""
    temporary = path.with_suffix(f".html.{os.getpid()}.tmp")
    # "replace": generated text may hold half of a surrogate pair
    temporary.write_bytes(page.encode("utf-8", "replace"))
    temporary.replace(path)
    return path
