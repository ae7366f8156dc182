"""Rendering of HTML pages: jinja2 templates with autoescape, and the document around them.

A page is self-contained: it makes no requests and loads no fonts. Its Content-Security-Policy allows only its
own styles, embedded bitmaps and one script, named by its hash; the page is complete without the script. All
text from a run (prompts, answers, paths, config) is a value in a template, never part of one, and autoescape
escapes it.
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


class Look(NamedTuple):
    """Style and script of a page, and the policy that names the script by its hash."""

    css: str
    script: str
    policy: str


def look(styles: Sequence[str] = (), scripts: Sequence[str] = ()) -> Look:
    """Look of the report, with further styles and scripts of templates/.

    A page with further scripts may load the data beside it: 'strict-dynamic' allows what a script that is
    named by its hash adds, and nothing that stands in the page.
    """
    files = [f"{name}.css" for name in ("style", *styles)], [f"{name}.js" for name in ("page", *scripts)]
    css, script = (
        "".join((TEMPLATES / name).read_text(encoding="utf-8") for name in names) for names in files
    )
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    sources = f"'sha256-{digest}'" + (" 'strict-dynamic'" if scripts else "")
    return Look(
        css,
        script,
        f"default-src 'none'; script-src {sources}; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'",
    )


REPORT = look()


def _clean(value: object) -> object:
    """Replace control characters, which HTML forbids, by U+FFFD in printed values."""
    return (
        value
        if hasattr(value, "__html__")
        else re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]", "\ufffd", str(value))
    )


def environment(*, autoescape: bool = True) -> jinja2.Environment:
    """Environment for the templates beside this file. An undefined name in a template is an error."""
    env = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=autoescape,
        finalize=_clean,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    env.globals["hue"] = _hue
    return env


def _hue(position: int) -> str:
    """CSS class of the line at this position in pictures.lines: its colour, dashed after the last colour."""
    return f"hue-{position % len(HUES)}{' dashed' if position >= len(HUES) else ''}"


ENVIRONMENT = environment()


class Figure(NamedTuple):
    """A picture with a caption above it.

    pictures  SVGs; two are the wide and the narrow form of one picture
    log       the same with a logarithmic axis, shown by a switch, or first if log_first (one per page)
    series    pictures.points_json(), for values shown on hover
    x         quantity along the x axis
    scale     (low, high, meaning of red) of a heat map's colours
    names     names of the lines of pictures.lines
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
    """Render a template of templates/ with these values, as HTML."""
    return Markup(ENVIRONMENT.get_template(template).render(values))


def document(
    title: str, parts: Sequence[Markup], footer: str, *, reload: int = 0, look: Look = REPORT
) -> str:
    """Return the whole page as one string. title and footer are plain text.

    reload: seconds after which the page reloads itself; 0: never.
    """
    frame = {"policy": look.policy, "css": Markup(look.css), "script": Markup(look.script)}
    return str(render("page.html", title=title, parts=parts, footer=footer, reload=reload, **frame))


def write_page(path: Path, page: str) -> Path:
    """Write a page atomically and return its path. A run and `report --watch` can write at the same time."""
    temporary = path.with_suffix(f".html.{os.getpid()}.tmp")
    # "replace": generated text can contain lone surrogates
    temporary.write_bytes(page.encode("utf-8", "replace"))
    temporary.replace(path)
    return path
