"""The held-out rows of `unfreeze merge`, and the losses on them of base, adapter and merged checkpoint."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from filecmp import cmp
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unfreeze.config.template import template_time, template_values
from unfreeze.core.errors import ConfigError
from unfreeze.core.events import RESOLVED
from unfreeze.core.units import format_bytes
from unfreeze.untrusted.json_object import read_object

if TYPE_CHECKING:
    from unfreeze.checkpoint import Manifest
    from unfreeze.data import Examples
    from unfreeze.evaluate.gain import Gain
    from unfreeze.models import Decoder

TOKENS = 2048  # of a batch
GIVE = "--data FILE of held-out conversations measures it"


@dataclass(frozen=True)
class Rows:
    """Held-out documents: whose, and how they are encoded (fields of resolved_config.json).

    fraction    of `files` that was held out; 0: all of them
    columns     of `files`, where they are the user's own
    trained_on  what is wrong with them: the run learned from a file among them; "" where none is known
    """

    files: tuple[str, ...]
    fraction: float
    resolved: dict[str, Any]
    columns: tuple[str, ...] = ()
    trained_on: str = ""


def rows_of(run: Path, data: str, columns: tuple[str, ...] = ()) -> Rows | str:
    """The rows of `data`, or those that the run held out; else why there are none. No row is read."""
    resolved = read_object(run / RESOLVED, ConfigError) if (run / RESOLVED).is_file() else {}
    if data:
        return Rows((data,), 0.0, resolved, columns, _trained_on(data, resolved))
    if not resolved:
        return f"{run} is an adapter without its run; {GIVE}"
    if resolved.get("validation"):
        return Rows(_names(resolved["validation"]), 0.0, resolved)
    fraction = resolved.get("validation_fraction")
    if not isinstance(fraction, float) or not 0 < fraction < 1:
        return f"{run} held out no rows (validation_fraction 0); {GIVE}"
    return Rows(_names(resolved.get("data")), fraction, resolved)


def _trained_on(data: str, resolved: dict[str, Any]) -> str:
    """What to warn of where a run's record names `data`, or a file of the same bytes, as what it learned."""
    own = Path(data)
    for name in _names(resolved.get("data") or []):
        other = Path(name)
        if name == data or (own.is_file() and other.is_file() and cmp(own, other, shallow=False)):
            return f"the run trained on {name}: the loss on it shows what was learned by heart"
    return ""


def _names(value: object) -> tuple[str, ...]:
    """One name or several, as resolved_config.json has them."""
    return tuple(map(str, value)) if isinstance(value, list) else (str(value),)


def encoded(rows: Rows, manifest: Manifest, max_positions: int, say: Callable[[str], None]) -> Examples:
    """The rows as the run encoded them. Raises ConfigError where a file is gone, DataError for a bad row."""
    from unfreeze.data import encoded_files, load_tokenizer, split_by_content
    from unfreeze.data.rows.sources import files_of

    of = rows.resolved
    names = ("truncation", "on_bad_row", "turns", "reasoning")
    options: dict[str, Any] = {name: of[name] for name in names if name in of}
    columns = rows.columns or (tuple(of.get("columns") or ()) if rows.fraction else ())
    if columns:
        options["columns"] = columns
    try:
        files = [path for name in rows.files for path in files_of(name, "data", say)]
    except ConfigError as error:
        raise ConfigError(error.message, next=GIVE) from None
    tokenizer = load_tokenizer(
        manifest.path,
        now=template_time(str(of.get("template_date") or "")),
        template_variables=template_values(of.get("template_variables") or ()),
    )
    effective: dict[str, Any] = of.get("effective") or {}
    length = min(int(effective.get("sequence_length") or TOKENS), max_positions)
    dataset = encoded_files(files, tokenizer, length, **options)
    if not rows.fraction:
        return dataset.examples
    return split_by_content(dataset.examples, rows.fraction, int(of.get("seed") or 0))[1]


def gain_of(
    base: Manifest, adapter: Path, merged: Path, examples: Examples, say: Callable[[str], None]
) -> Gain | None:
    """The three losses in float32, one model in memory at a time. None, and said, where none has room."""
    from unfreeze.adapters import detach, load_adapter
    from unfreeze.checkpoint import open_checkpoint
    from unfreeze.data import validation_batches
    from unfreeze.evaluate.gain import Gain
    from unfreeze.evaluate.perplexity import heldout
    from unfreeze.generate.open import open_model

    written = open_checkpoint(merged)
    if lacking := _no_room(base) or _no_room(written):
        say(f"the share of the gain was not measured: {lacking}")
        return None

    def loss(model: Decoder) -> float:
        return heldout(model, validation_batches(examples, TOKENS)).loss

    model = open_model(base)
    load_adapter(model, adapter)
    with_adapter = heldout(model, validation_batches(examples, TOKENS))
    detach(model)
    without = loss(model)
    del model
    gc.collect()
    after = loss(open_model(written))
    return Gain(without, with_adapter.loss, after, with_adapter.tokens, len(examples))


def _no_room(manifest: Manifest) -> str:
    """What a model takes and what is free, where that is less; else ""."""
    import torch

    from unfreeze import models
    from unfreeze.parallel.machine import hardware

    model = models.meta_model(models.shape(manifest.config), manifest, torch.float32)
    needed = sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])
    free = hardware("cpu").available
    return f"{manifest.path} takes {format_bytes(needed)}, {format_bytes(free)} free" if needed > free else ""
