"""Each family quantized: its readers load what is written, and transformers reads the same, or is known not to."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
from family_cases import DOCUMENTS, oracle
from test_family_merges import FIRST, logits

from tests.compress.quantize.conftest import expanded, run_quantize
from unfreeze.checkpoint import open_checkpoint
from unfreeze.compress.quantize.declared import NOT_IN_TRANSFORMERS
from unfreeze.core.errors import ConfigError
from unfreeze.generate.open import open_model

STACKED = ("gpt-oss", "granite4", "granitemoe")
"""Families whose experts are one tensor on disk, and no quantizer writes them otherwise."""
SOME = ("qwen3-next", "nemotron-h", "llama4-text")


@pytest.mark.parametrize(
    "name",
    [
        name if name in SOME else pytest.param(name, marks=pytest.mark.nightly)
        for name in sorted(FIRST.values())
    ],
)
def test_a_quantized_family_computes_what_its_expanded_weights_compute(name, tmp_path):
    """INT8, whose rows need no groups. nemotron-h: transformers holds parts of Mamba-2 in bf16."""
    reference = oracle(name).bfloat16()
    reference.save_pretrained(tmp_path / "base")
    if name in STACKED:
        with pytest.raises(ConfigError, match="INT8 needs a matrix per expert"):
            run_quantize(tmp_path / "base", tmp_path / "out", "int8")
        return
    run_quantize(tmp_path / "base", tmp_path / "out", "int8")
    model = open_model(open_checkpoint(tmp_path / "out"))
    found = logits(model)
    exact = logits(open_model(open_checkpoint(expanded(tmp_path / "out", tmp_path / "dense"))))
    torch.testing.assert_close(found, exact, rtol=0, atol=1e-5)
    plain = logits(open_model(open_checkpoint(tmp_path / "base")))
    assert (found - plain).abs().max() > 1e-3  # control arm
    kind = model.shape.model_type
    try:
        read = theirs(type(reference), tmp_path / "out")
        close = bool((read - found).abs().max() < (1e-3 if name == "nemotron-h" else 1e-4))
    except (RuntimeError, AttributeError):
        close = False
    assert close == (kind not in NOT_IN_TRANSFORMERS), json.dumps([name, kind])


@torch.no_grad()
def theirs(kind, folder) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = kind.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="eager").eval()
    model(torch.tensor([DOCUMENTS[0]]))  # linear layers are expanded when they are first used
    for parameter in model.parameters():
        parameter.data = parameter.data.float()
    return torch.cat([model(torch.tensor([document])).logits[0] for document in DOCUMENTS])
