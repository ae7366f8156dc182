"""suspects.jsonl: the documents of a step, worst first, with what is known of them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from unfreeze.objectives.cross_entropy import cross_entropy
from unfreeze.train.suspects import LISTED, SUSPECTS, entries, rank_documents, write_suspects


def test_documents_are_ranked_by_their_own_mean_loss(tiny: SimpleNamespace):
    model = tiny.Model()
    batches = [tiny.make_batch([9, 14], [3, 0], 0), tiny.make_batch([5], [5], 1)]
    found = rank_documents(model, batches, cross_entropy, tiny.plain)
    expected = {}
    for number, batch in enumerate(batches, start=1):
        with torch.no_grad():
            logits = model.lm_head(model.hidden(batch, tiny.plain)).double().log_softmax(-1)
        nll = -logits.gather(1, batch.targets_T[:, None])[:, 0] * batch.weights_T
        for document, span in enumerate(nll.split(batch.lengths()), start=1):
            expected[number, document] = float(span.sum())
    assert [(e["micro_batch"], e["document"]) for e in found][-1] == (1, 2) and found[-1]["loss"] is None
    assert found[0]["loss"] >= found[1]["loss"]
    for entry in found[:2]:
        assert entry["loss"] * entry["supervised"] == pytest.approx(
            expected[entry["micro_batch"], entry["document"]], rel=1e-5
        )
    with torch.no_grad():
        model.embed.weight[int(batches[1].tokens_T[0])] = math.nan
    # NaN is worse than any number
    assert (rank_documents(model, batches, cross_entropy, tiny.plain)[0]["micro_batch"]) == 2


def test_lines_are_bounded_described_and_plain_json(tiny: SimpleNamespace, tmp_path: Path):
    documents = [
        {**entry, "loss": math.nan}
        for entry in entries(tiny.make_batch([2] * (LISTED + 3), [1] * (LISTED + 3), 0), 4)
    ]
    write_suspects(tmp_path, 7, "why", documents, lambda tokens: {"row": 5, "text": "ü"})
    write_suspects(tmp_path, 8, "again", documents[:1])
    lines = [json.loads(line) for line in (tmp_path / SUSPECTS).read_text(encoding="utf-8").splitlines()]
    assert len(lines) == LISTED + 1 and [line["document"] for line in lines[:3]] == [1, 2, 3]
    assert (
        lines[0]["step"],
        lines[0]["reason"],
        lines[0]["of"],
        lines[0]["micro_batch"],
        lines[0]["loss"],
    ) == (7, "why", LISTED + 3, 5, None)
    assert (lines[0]["row"], lines[0]["text"]) == (5, "ü") and "row" not in lines[-1]
