"""Each family merged: what `unfreeze merge` writes of transformers' own files is base + adapter, and transformers
reads it so."""

import warnings

import pytest
import torch
from family_cases import CASES, DOCUMENTS, batch_of, oracle

from unfreeze import models
from unfreeze.adapters import LoraConfig, attach, save_adapter, sites
from unfreeze.checkpoint import open_checkpoint
from unfreeze.compress.deltas import Deltas
from unfreeze.compress.merge import inputs_of, merge
from unfreeze.compress.work import MergeWork
from unfreeze.generate.open import open_model

FIRST: dict[str, str] = {}
for _name, _case in CASES.items():
    FIRST.setdefault(_case.config_class, _name)


@pytest.mark.parametrize("name", sorted(FIRST.values()))
def test_a_merged_family_has_the_logits_of_base_and_adapter(name, tmp_path):
    """In float32, where rounding changes the weights by 2^-24 of them."""
    reference = oracle(name)
    reference.save_pretrained(tmp_path / "base")
    manifest = open_checkpoint(tmp_path / "base")
    model = open_model(manifest)
    plain = logits(model)
    attach(model, LoraConfig(rank=4, alpha=8.0), seed=0)
    with torch.no_grad():
        for number, site in enumerate(sites(model)):
            generator = torch.Generator().manual_seed(number)
            for factor, parameter in site.adapter.named_parameters():
                if factor.endswith("B"):
                    parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    save_adapter(model, tmp_path / "adapter", base_name="base", prefix=manifest.prefix)
    wanted = logits(model)
    meta = models.meta_model(model.shape, manifest, torch.float32)
    deltas = Deltas(meta, tmp_path / "adapter")
    work = MergeWork(manifest, meta, deltas, "same")
    record = merge(
        work,
        deltas,
        tmp_path / "out",
        inputs_of(manifest, tmp_path / "adapter", "same", "refit"),
        "refit",
        None,
    )
    assert record.rows and all(row.ways["F32"].kept > 0.999 for row in record.rows)
    found = logits(open_model(open_checkpoint(tmp_path / "out")))
    size = float((wanted - plain).abs().max())
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-3 * size)  # control: the base is `size` away
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        theirs = type(reference).from_pretrained(
            tmp_path / "out", dtype=torch.float32, attn_implementation="eager"
        )
        read = torch.cat([theirs.eval()(torch.tensor([document])).logits[0] for document in DOCUMENTS])
    torch.testing.assert_close(read, found, rtol=0, atol=1e-4 * max(1.0, float(found.abs().max())))


@torch.no_grad()
def logits(model):
    return model.logits(model.hidden(batch_of(DOCUMENTS)))
