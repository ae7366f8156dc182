"""Write the documents of a step that spiked or was not finite to the run folder.

For whoever has to inspect the data.
"""

# torch's tolist, vector_norm, backward and hooks are untyped:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from unfreeze.core.batch import Batch, Loss
from unfreeze.models import Decoder
from unfreeze.models.recompute import RecomputePolicy
from unfreeze.train.step import Objective, forward

Describe = Callable[[list[int]], dict[str, object]]
"""Token ids of one document -> further facts about it, as JSON: {"row": its number in the data file, "text":
…}."""

SUSPECTS = "suspects.jsonl"
"""File in the run folder: one line per document, the highest loss first; see write_suspects."""
LISTED = 8  # maximum number of documents to write per step


@torch.no_grad()
def rank_documents(
    model: Decoder, micro_batches: Sequence[Batch], objective: Objective, recompute: RecomputePolicy
) -> list[dict[str, Any]]:
    """Score every document of a step, the highest loss first.

    {"micro_batch", "document" (both from 1), "loss" (its mean), "supervised", "tokens"}. One forward pass;
    the objective sees one document's weights at a time. A document without supervised tokens has the loss
    None.
    """
    documents: list[dict[str, Any]] = []
    for number, host_batch in enumerate(micro_batches):
        batch = host_batch.to(model.device)
        hidden_TD, *tapped = forward(model, batch, objective, recompute)
        if host_batch.examples is not None:
            documents += _of_examples(objective(hidden_TD, model.lm_head, batch, *tapped), host_batch, number)
            continue
        for entry in entries(host_batch, number):
            weights_T = torch.zeros_like(batch.weights_T)
            span = slice(entry.pop("start"), entry.pop("stop"))
            weights_T[span] = batch.weights_T[span]
            loss = objective(hidden_TD, model.lm_head, replace(batch, weights_T=weights_T), *tapped)
            documents.append({**entry, "loss": float(loss.sum) / float(loss.count) if loss.count else None})
    return sorted(documents, key=_rank, reverse=True)


def _of_examples(loss: Loss, batch: Batch, number: int) -> list[dict[str, Any]]:
    """Return the documents of examples, each with its example's loss: a pair's answers share one."""
    each: list[float] = [] if loss.each is None else loss.each.tolist()
    numbers: list[int] = batch.documents["example"].tolist()
    of_examples = [
        {**entry, "loss": each[example] if 0 <= example < len(each) else None}
        for entry, example in zip(entries(batch, number), numbers, strict=True)
        if example >= 0
    ]
    for entry in of_examples:
        del entry["start"], entry["stop"]
    return of_examples


def _rank(entry: dict[str, Any]) -> float:
    loss = entry["loss"]
    return -math.inf if loss is None else math.inf if math.isnan(loss) else loss


def entries(batch: Batch, number: int) -> list[dict[str, Any]]:
    """Return the documents of micro-batch `number` (counted from 0) in their output form.

    With the start and stop of each in T.
    """
    starts: list[int] = batch.starts_S.tolist()
    return [
        {
            "micro_batch": number + 1,
            "document": document,
            "supervised": int(batch.weights_T[start : start + length].gt(0).sum()),
            "tokens": batch.tokens_T[start : start + length].tolist(),
            "start": start,
            "stop": start + length,
        }
        for document, (start, length) in enumerate(zip(starts, batch.lengths(), strict=True), start=1)
    ]


def write_suspects(
    folder: Path,
    step: int,
    reason: str,
    documents: Sequence[dict[str, Any]],
    describe: Describe | None = None,
) -> None:
    """Append up to LISTED documents to <folder>/suspects.jsonl, one JSON object per line.

    Each has step, reason, of (total number), and the known facts. A loss that is not finite is null.
    """
    lines: list[str] = []
    for entry in documents[:LISTED]:
        loss = entry.get("loss")
        finite = {"loss": loss if loss is not None and math.isfinite(loss) else None}
        known = describe(entry["tokens"]) if describe is not None else {}
        lines.append(
            json.dumps(
                {"step": step, "reason": reason, "of": len(documents), **entry, **finite, **known},
                ensure_ascii=False,
                allow_nan=False,
            )
        )
    with (folder / SUSPECTS).open("a", encoding="utf-8") as file:
        file.write("".join(line + "\n" for line in lines))
