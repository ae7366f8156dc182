"""Prefill from a position above 0: the same as reading the whole document, in every family that can."""

from dataclasses import replace

import exact
import pytest
import torch
from exact import HERE, family

from unfreeze.generate.engine import batch_of
from unfreeze.models.blocks import extend_pass
from unfreeze.models.blocks.extend_pass import CannotExtend, ExtendPass

LENGTHS, CUTS = (40, 7, 23), (13, 1, 22)
CANNOT = """phi3-longrope-tied deepseek-v32 glm-moe-dsa-shared deepseek-v4 kimi-linear
    lfm2-biases-untied lfm2-moe qwen3-next qwen3.5 qwen3.5-moe granite4
    granite4-dense-rotated-limits-tied nemotron-h nemotron-h-latent-groups-limits""".split()
"""Families with states, compressed or chosen keys, or keys that turn."""


def documents(vocab, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, vocab, (length,), generator=generator).tolist() for length in LENGTHS]


@torch.no_grad()
def apart(model):
    """The largest difference of hidden states, and of the cache, of documents that are read in two parts."""
    rows = [2, 0, 1]
    whole, cut = model.new_cache(3, 48, routes=True), model.new_cache(3, 48, routes=True)
    every = documents(model.shape.vocab_size)
    expected = model.fill(batch_of(every), whole, rows).split(LENGTHS)
    model.fill(batch_of([each[:at] for each, at in zip(every, CUTS, strict=True)]), cut, rows)
    rest = [each[at:] for each, at in zip(every, CUTS, strict=True)]
    behind = model.fill(batch_of(rest), cut, rows, CUTS).split([len(each) for each in rest])
    hidden = max(
        float((ours - theirs[at:]).abs().max() / theirs.abs().max())
        for ours, theirs, at in zip(behind, expected, CUTS, strict=True)
    )
    kept = [
        float((ours - theirs).abs().max() / theirs.abs().max())
        for layer in whole.layers
        for ours, theirs in zip(cut.layers[layer], whole.layers[layer], strict=True)
    ]
    assert all(torch.equal(cut.routes[layer], whole.routes[layer]) for layer in whole.routes)
    return max(hidden, *kept)


@pytest.mark.parametrize("name", HERE)
def test_a_document_can_be_read_in_parts(name):
    _, model = family(name)
    if name in CANNOT:
        with pytest.raises(CannotExtend):
            apart(model)
    else:
        assert apart(model) <= exact.EXACT


def reads_another_row(patch):
    """The cached part of another document is read."""
    remember = ExtendPass.remember
    patch.setattr(
        ExtendPass, "remember", lambda self, *new: remember(replace(self, rows=self.rows[::-1]), *new)
    )


def stands_too_early(patch):
    """A query does not see its own key."""
    attend = extend_pass._attend
    patch.setattr(
        extend_pass, "_attend", lambda q, k, v, scale, first, *how: attend(q, k, v, scale, first - 1, *how)
    )


@pytest.mark.parametrize("fault", [reads_another_row, stands_too_early])
def test_control_arm(monkeypatch, fault):
    _, model = family("qwen3")
    fault(monkeypatch)
    assert apart(model) > 0.01
