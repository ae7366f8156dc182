"""Each family folded: scales moved into what comes before leave its logits as they are, in float64."""

from __future__ import annotations

import pytest
import torch
from family_cases import CASES, DOCUMENTS, batch_of, oracle, ours
from test_family_merges import FIRST

from unfreeze.compress.calibrate.folds import changed, folds_of, parameters_of
from unfreeze.compress.calibrate.layers import State
from unfreeze.models.blocks.experts import Experts


def states_of(model):
    """(index, the state before it) of each layer."""
    batch = batch_of(DOCUMENTS)
    run = model.packed_pass(batch)
    x_TD = model.model.embed_tokens(batch.tokens_T)
    for index, layer in enumerate(model.layers):
        yield index, layer, State(batch, run, x_TD)
        x_TD = layer(x_TD, run)


def scales_of(model, fold, seed: int) -> torch.Tensor:
    reader = model.get_submodule(fold.readers[0])
    width = reader.weight.shape[-1] if not isinstance(reader, Experts) else reader.hidden_size
    if fold.inner:
        width = (reader.num_experts, reader.intermediate_size)
    size = width if isinstance(width, tuple) else (width,)
    return torch.rand(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 3.5 + 0.25


@torch.no_grad()
def folded(name: str, leave: str = ""):
    """(largest change of the logits by all folds, all folds). leave: one kind of change that is left out."""
    model = ours(oracle(name), CASES[name]).double().eval()
    batch = batch_of(DOCUMENTS)
    before = model.logits(model.hidden(batch))
    folds = [
        fold
        for index, layer, state in states_of(model)
        for fold in folds_of(layer, f"model.layers.{index}", state)
    ]
    parameters = dict(model.named_parameters())
    for seed, fold in enumerate(folds):
        for parameter, kind, s in parameters_of(model, fold, scales_of(model, fold, seed)):
            if kind != leave:
                parameters[parameter].copy_(changed(parameters[parameter], kind, s))
    return float((model.logits(model.hidden(batch)) - before).abs().max() / before.abs().max()), folds


if __name__ == "__main__":
    import collections
    for name in sorted(FIRST.values()):
        try:
            off, folds = folded(name)
        except Exception as error:
            print(name, "ERROR", repr(error)[:300]); continue
        kinds = collections.Counter((f.producer.split(".",3)[-1] + " -> " + ",".join(r.split(".",3)[-1] for r in f.readers)) for f in folds)
        print(name, f"{off:.1e}", dict(kinds), flush=True)
