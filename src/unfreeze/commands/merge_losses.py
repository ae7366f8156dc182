"""Losses on held-out rows for `unfreeze merge`: the base, the base with adapter, and the merged checkpoint.

The loss of each row is kept, so the gain has a standard error, paired by row.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from unfreeze.commands.merge_rows import GIVE, TOKENS, HeldoutRows
from unfreeze.config.adapter import adapter_folder, new_token_ids
from unfreeze.core.errors import AdapterError
from unfreeze.core.units import format_bytes
from unfreeze.job.merge_aware import compute_as_trained
from unfreeze.objectives.preference import WITHOUT_REFERENCE
from unfreeze.teach.compares import compared_loss, minimised

if TYPE_CHECKING:
    from torch import Tensor

    from unfreeze.checkpoint import Manifest
    from unfreeze.config.prefer import Preference
    from unfreeze.core.batch import Batch
    from unfreeze.data import Examples
    from unfreeze.evaluate.gain import Gain
    from unfreeze.models import Decoder


@dataclass(frozen=True)
class Losses:
    """Loss and weight of each distinct row, summed over its copies or pieces.

    The weight is supervised tokens, or 1 for a pair or a label.
    """

    sums: list[float]
    counts: list[float]

    @property
    def mean(self) -> float:
        return sum(self.sums) / sum(self.counts)


def gain_of(base: Manifest, adapter: Path, merged: Path, examples: Examples, rows: HeldoutRows) -> Gain | str:
    """Measure the three losses in float32, one model in memory at a time; return a reason if impossible."""
    from unfreeze.adapters import detach, load_adapter
    from unfreeze.checkpoint import open_checkpoint
    from unfreeze.data import validation_batches
    from unfreeze.data.store.examples import TAUGHT
    from unfreeze.evaluate.gain import Gain, error_of
    from unfreeze.generate.open import open_model

    written = open_checkpoint(merged)
    if no_room := no_room_for(base) or no_room_for(written):
        return no_room
    preference = rows.preference if int(examples.chosen_N[0]) != TAUGHT else None
    start_name = (
        str(rows.resolved.get("adapter") or "")
        if preference and preference.loss not in WITHOUT_REFERENCE
        else ""
    )
    try:
        start = adapter_folder(start_name) if start_name else None
    except AdapterError as error:
        return f"the run compares its pairs with the adapter it started from: {error.message}. {GIVE}"
    batches = list(validation_batches(examples, _tokens(rows) if preference else TOKENS))

    model = open_base(base, adapter)
    reference: list[Tensor] = []
    if preference is not None and preference.loss not in WITHOUT_REFERENCE:
        if start is not None:
            load_adapter(model, start)
        reference = [_log_probabilities(model, batch) for batch in batches]
        if start is not None:
            detach(model)
    without = row_losses(model, batches, preference, reference)
    load_adapter(model, adapter)
    compute_as_trained(model, base, adapter)
    with_adapter = row_losses(model, batches, preference, reference)
    del model
    gc.collect()
    after = row_losses(open_model(written, as_stored=True), batches, preference, reference)
    gains = [old - new for old, new in zip(without.sums, with_adapter.sums, strict=True)]
    return Gain(
        without.mean,
        with_adapter.mean,
        after.mean,
        sum(int(batch.weights_T.gt(0).sum()) for batch in batches),
        len(gains),
        error_of(gains, without.counts) if len(gains) > 1 else 0.0,
        compared_loss(preference) if preference else "",
    )


def open_base(base: Manifest, adapter: Path) -> Decoder:
    """The model that the adapter began with: rows of new tokens are the means of their parts' rows."""
    from unfreeze.adapters import detach
    from unfreeze.adapters.tokens import train_new_tokens
    from unfreeze.data import load_tokenizer
    from unfreeze.generate.open import open_model

    model = open_model(base, as_stored=True)
    if base.tokenizer is None:
        return model
    old, new = load_tokenizer(base.path), load_tokenizer(base.tokenizer, base=base.path)
    if ids := [id for id in new_token_ids(adapter) if old.vocab_size <= id < new.vocab_size]:
        parts = tuple(tuple(old.encode(new.token_text(id), specials=False)) for id in ids)
        train_new_tokens(model, ids, parts, max(ids) + 1)
        detach(model)
    return model


def row_losses(
    model: Decoder, batches: list[Batch], preference: Preference | None, reference: list[Tensor]
) -> Losses:
    """Loss of each distinct row: cross entropy, or the run's preference loss.

    reference: l_ref of the documents of each batch; empty if the loss has no reference.
    """
    import numpy as np
    import torch

    from unfreeze.evaluate.by_row import example_rows

    rows: list[int] = []
    losses: list[float] = []
    weights: list[float] = []
    with torch.no_grad(), model.looking():
        for number, host_batch in enumerate(batches):
            batch = host_batch.to(model.device)
            if preference is None:
                sums = (-_log_probabilities(model, host_batch)).tolist()
                starts = batch.starts_S.tolist()
                counts = [float(part.sum()) for part in host_batch.weights_T.tensor_split(starts[1:])]
            else:
                objective = minimised(preference)
                if reference:
                    objective.keywords["reference"] = _known(reference[number])
                each = objective(model.hidden(batch), model.lm_head, batch).each
                assert each is not None
                sums, counts = each.tolist(), [1.0] * len(each)
            row_E = example_rows(host_batch)
            assert row_E is not None
            rows.extend(row_E.tolist())
            losses.extend(sums)
            weights.extend(counts)
    return Losses(*(np.bincount(rows, values).tolist() for values in (losses, weights)))


def _tokens(rows: HeldoutRows) -> int:
    """Tokens of the run's micro-batch. KTO compares a labelled answer with others of its micro-batch."""
    of = rows.resolved
    return int(of.get("training.tokens_per_step") or TOKENS) // int(of.get("memory.micro_batches") or 1)


def _known(l_S: Tensor) -> Callable[[Batch], Tensor]:
    return lambda batch: l_S


def _log_probabilities(model: Decoder, host_batch: Batch) -> Tensor:
    """Log-probability l of each document, float64 [S]."""
    import torch

    from unfreeze.objectives.log_p import log_probabilities

    batch = host_batch.to(model.device)
    with torch.no_grad(), model.looking():
        return log_probabilities(model.hidden(batch), model.lm_head, batch)


def no_room_for(manifest: Manifest) -> str:
    """Say that a model needs more memory than is free; "" if it fits."""
    import torch

    from unfreeze import models
    from unfreeze.parallel.machine import hardware

    model = models.meta_model(models.shape(manifest.config), manifest, torch.float32, as_stored=True)
    needed = sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])
    free = hardware("cpu").available
    return (
        f"{manifest.path} needs {format_bytes(needed)}; {format_bytes(free)} are free"
        if needed > free
        else ""
    )
