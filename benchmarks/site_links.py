"""A hook of mkdocs: a link from a page to a file beside docs/ (an example, CONTRIBUTING.md) becomes its path.

On a forge such a link opens the file. The site holds docs/ alone, so there it is the path in `code`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

LINK = re.compile(r"\[([^\]]*)\]\(((?:\.\./)+[^)#\s]+)(?:#[^)]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """The page's text with such links replaced. Called by mkdocs for each page."""
    docs = Path(config["docs_dir"]).resolve()
    here = docs.joinpath(page.file.src_uri).parent

    def replaced(link: re.Match[str]) -> str:
        target = here.joinpath(link[2]).resolve()
        if target.is_relative_to(docs):
            return link[0]
        return f"{link[1]} (`{target.relative_to(docs.parent)}`)"

    return LINK.sub(replaced, markdown)
