"""A page as a browser would read it: what it fetches and runs, its texts, tables and facts. html.parser decides."""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser

VOID = {"meta", "img", "br", "link", "input", "path"}


class Page(HTMLParser):
    """Collects what a browser would fetch or run, the texts, the cells of each table by its name, and what
    each <dt> is said to be.

    A script whose hash the page's own policy names is `allowed`; every other is counted in `scripts`, as a
    browser would refuse it.
    """

    def __init__(self, source: str):
        super().__init__(convert_charrefs=True)
        self.external: list[str] = []
        self.scripts = 0
        self.texts: list[str] = []
        self.tables: dict[str, list[list[str]]] = {}
        self.open: list[str] = []
        self.name = ""
        self.term, self.facts = "", dict[str, str]()
        self.code, self.policy, self.allowed = list[str](), "", list[str]()
        self.feed(source)
        self.close()
        for code in self.code:
            digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
            known = f"'sha256-{digest}'" in self.policy
            self.allowed += [code] if known else []
            self.scripts += not known

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        self.scripts += tag in ("iframe", "object", "embed")
        if tag == "script":
            self.code.append("")
        if tag == "meta" and dict(attrs).get("http-equiv") == "Content-Security-Policy":
            self.policy = dict(attrs)["content"] or ""
        for name, value in attrs:
            self.scripts += name.startswith("on")
            fetched = name in (
                "src",
                "href",
                "xlink:href",
                "srcset",
                "data",
                "action",
                "poster",
                "background",
            )
            if fetched and value and not value.startswith(("#", "data:")):
                self.external.append(value)
            if value:
                self._style(value)
        if tag == "table":
            self.name = dict(attrs)["aria-label"] or ""
            self.tables[self.name] = []
        elif tag == "tr":
            self.tables[self.name].append([])
        elif tag in ("td", "th"):
            self.tables[self.name][-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in VOID:
            return
        assert self.open and self.open[-1] == tag, f"</{tag}> closes <{self.open[-1:]}>"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "style":
            self._style(data)
            return
        if self.open and self.open[-1] == "script":
            self.code[-1] += data
            return
        self.texts.append(data)
        if self.open and self.open[-1] == "dt":
            self.term = data
        elif self.open and self.open[-1] == "dd":
            self.facts[self.term] = self.facts.get(self.term, "") + data
        if self.open and self.open[-1] in ("td", "th"):
            self.tables[self.name][-1][-1] += data

    def _style(self, value: str) -> None:
        self.external += [
            found
            for found in re.findall(r"url\(\s*['\"]?([^)'\"]+)", value)
            if not found.startswith(("#", "data:"))
        ]
        self.external += re.findall(r"@import[^;]*", value)
