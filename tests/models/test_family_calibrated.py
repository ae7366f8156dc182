"""Each family calibrated: its layers one at a time are the whole model, and every matrix has inputs."""

from __future__ import annotations

import pytest
import torch
from family_cases import oracle
from test_family_merges import FIRST
from test_family_quantized import STACKED

from tests.compress.calibrate.conftest import rows
from unfreeze import models
from unfreeze.checkpoint import open_checkpoint
from unfreeze.compress.calibrate import calibration, matrices
from unfreeze.compress.calibrate.layers import Layers, hidden_states
from unfreeze.compress.quantize.work import quantize_work
from unfreeze.generate.open import open_model

SOME = ("gpt-oss", "nemotron-h", "gemma3-window")


@pytest.mark.parametrize(
    "name",
    [
        name if name in SOME else pytest.param(name, marks=pytest.mark.nightly)
        for name in sorted(FIRST.values())
        if name == "gpt-oss" or name not in STACKED
    ],
)
def test_a_family_is_calibrated_layer_by_layer(name, tmp_path, monkeypatch):
    monkeypatch.setattr(matrices, "FEWEST", 1)
    oracle(name).bfloat16().save_pretrained(tmp_path / "base")
    manifest = open_checkpoint(tmp_path / "base")
    batches = rows(0, 20, 30, min(90, models.shape(manifest.config).vocab_size))
    states = torch.cat(hidden_states(Layers(manifest), batches))
    whole = open_model(manifest, as_stored=True)
    with torch.no_grad():
        assert torch.equal(states, torch.cat([whole.hidden(batch) for batch in batches]))
    work = quantize_work(manifest, "mxfp4" if name == "gpt-oss" else "int8", ("all-linear",))
    own = calibration.Calibration(work, batches, tmp_path / "own", {})
    own.run()
    assert sum(tally.matrices for tally in own.tallies.values()) == len(own.matrices)
    for group, tally in own.tallies.items():
        assert tally.corrected and tally.other == 0 and tally.error < 0.9 * tally.nearest, (group, tally)
        assert group == "experts" or tally.few == 0
