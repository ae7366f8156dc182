"""Resolve a model to be used, with its base as its adapter was trained on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from unfreeze.config.adapter import packed_as

if TYPE_CHECKING:
    from unfreeze.checkpoint import Manifest
    from unfreeze.generate.source import ModelSource


def open_as_trained(
    source: str, say: Callable[[str], None] | None, base: str = ""
) -> tuple[ModelSource, Manifest]:
    """`open_source`, with a base that the adapter's run packed (`--quantize`) packed again.

    Without torch unless the base is packed. Raises UserError as `open_source` and `packed_on_load`.
    """
    from unfreeze.generate.source import open_source

    opened, manifest = open_source(source, say, base)
    if opened.adapter is None or packed_as(opened.adapter) is None:
        return opened, manifest

    from unfreeze.compress.quantize.onload import as_trained

    return opened, as_trained(manifest, opened.adapter, say or (lambda line: None))
