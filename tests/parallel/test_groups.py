"""Claims about experts that come in groups: the numbers of the resident model to the bit in float32, one process's
of parallel/placement/dispatch.py in bf16, buffers within the bytes given, and each group read once each way."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from adapted import adapted, same, step

from unfreeze import models
from unfreeze.checkpoint import open_checkpoint, save_checkpoint
from unfreeze.commands.demo import TINY_K2
from unfreeze.core.batch import Batch
from unfreeze.core.errors import ConfigError
from unfreeze.core.layout import GIB, RESIDENT
from unfreeze.core.rows import Rows
from unfreeze.generate.open import open_model
from unfreeze.kernels.expert_mlp.decode_cpu import ROWS_PER_EXPERT
from unfreeze.models.publish import published
from unfreeze.models.recompute import RECOMPUTE
from unfreeze.parallel.machine import Hardware
from unfreeze.parallel.placement.dispatch import RowsDispatch
from unfreeze.parallel.placement.groups import FEW, InGroups
from unfreeze.parallel.placement.residency import Streamed, Streaming, come_whole, reads_of, streamed_bytes
from unfreeze.parallel.plan import Work, measure_sizes, plan, with_groups
from unfreeze.parallel.plan.grouped import units
from unfreeze.parallel.processes.collectives import ALONE

BIASED = {
    "model_type": "gpt_oss",
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "max_position_embeddings": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts_per_tok": 2,
    "num_local_experts": 5,
    "sliding_window": 8,
    "rope_theta": 1e4,
    "rms_norm_eps": 1e-5,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}


def batch(vocab: int, tokens: int = 80) -> Batch:
    """One document: experts in groups take all rows at once, the resident model document by document."""
    ids = torch.randint(0, vocab, (tokens,), generator=torch.Generator().manual_seed(1))
    return Batch(ids, ids.roll(-1), torch.ones(tokens), torch.arange(tokens), torch.tensor([0]))


def opened(folder: Path, dtype: torch.dtype, experts: str, share: float | None = None) -> models.Decoder:
    """The model with adapters that are not zero. share: of its largest layer, what a buffer may have."""
    manifest = open_checkpoint(folder)
    buffer = 0
    if share is not None:
        meta = models.meta_model(models.shape(manifest.config), manifest, dtype)
        buffer = int(share * max(streamed_bytes(meta.layers)))
    model = open_model(manifest, dtype, "cpu", layout=RESIDENT.but(experts=experts, buffer=buffer / GIB))
    adapted(model)
    if share is not None:
        assert isinstance(model.residency, Streamed)
        assert all(len(slot.bytes) <= buffer for slot in model.residency._slots)
        model.residency.poison = True
    return model


@pytest.fixture(scope="module", params=["tiny-k2", "biases"])
def family(request, tmp_path_factory) -> tuple[Path, int]:
    """(folder, vocabulary): packed experts, one tensor each; dense ones with biases, in one tensor."""
    if request.param == "tiny-k2":
        return TINY_K2, 256
    folder = tmp_path_factory.mktemp("biased") / "model"
    model = models.build(models.shape(BIASED), dtype=torch.float32, device="cpu")
    models.initialize(model, 0)
    save_checkpoint(folder, BIASED, published(model, BIASED))
    return folder, 97


@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_the_resident_models_numbers_to_the_bit(family: tuple[Path, int], recompute: str) -> None:
    """Two steps, idle buffers full of NaN, buffers of at most 0.45 of a layer."""
    folder, vocab = family
    given = batch(vocab)
    wanted = step(opened(folder, torch.float32, "device"), recompute, given)
    for experts in ("disk", "host"):
        model = opened(folder, torch.float32, experts, 0.45)
        assert all(same(step(model, recompute, given), wanted) for _ in range(2)), experts


@pytest.mark.parametrize("recompute", ["layers", "elementwise"])
def test_bf16_is_the_dispatchs_to_the_bit(recompute: str) -> None:
    """Of parallel/placement/dispatch.py with one process, whose distance from no dispatch is a claim of its own."""
    whole = opened(TINY_K2, torch.bfloat16, "device")
    for moe in whole.moe_layers().values():
        count = moe.experts.num_experts
        moe.experts.dispatch = RowsDispatch(ALONE, [Rows(0, count, count)])
    wanted = step(whole, recompute, batch(256))
    assert same(step(opened(TINY_K2, torch.bfloat16, "disk", 0.45), recompute, batch(256)), wanted)


@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_each_group_comes_once_forward_and_once_back(recompute: str) -> None:
    model = opened(TINY_K2, torch.float32, "host", 0.45)
    assert isinstance(model.residency, Streamed)
    layers = len(model.moe_layers())
    groups = len(model.residency._sizes)
    assert groups == 3 * layers
    for first in (True, False):
        before = model.residency.reads
        step(model, recompute, batch(256))
        assert model.residency.reads - before == reads_of(groups, first=first)


def test_results_are_read_on_a_second_visit_without_gradients() -> None:
    """A receipt visits layers again with the experts that were chosen before."""
    from unfreeze.adapters.output_change import _SameExperts

    policy, model = _SameExperts(), opened(TINY_K2, torch.float32, "host", 0.45)
    with torch.no_grad():
        one, again = (model.hidden(batch(256), policy) for _ in range(2))
    assert torch.equal(one, again)


def test_a_group_without_rows() -> None:
    """Tokens that are all the same choose the same experts."""
    given = batch(256)
    given.tokens_T.zero_()
    whole, parts = opened(TINY_K2, torch.float32, "device"), opened(TINY_K2, torch.float32, "disk", 0.2)
    wanted = step(whole, "layers", given)
    moe = parts.moe_layers()[1].experts
    assert same(step(parts, "layers", given), wanted)
    assert isinstance(moe.dispatch, InGroups)
    rows = [parts.moe_layers()[1].counts_E[rows.slice].sum() for rows, _ in moe.dispatch.parts]
    assert min(rows) == 0 < max(rows)


def test_few_rows_are_multiplied_with_the_codes_in_all_groups_or_in_none() -> None:
    """Without gradients the op expands no expert where all have 8 rows or fewer on average. A group's average is
    another one: 23 tokens have 92 rows, at 15 or 16 experts."""
    assert FEW <= ROWS_PER_EXPERT == 8
    whole, parts = opened(TINY_K2, torch.float32, "device"), opened(TINY_K2, torch.float32, "host", 0.45)
    for tokens in (12, 23, 40):
        given = batch(256, tokens)
        with torch.no_grad():
            assert torch.equal(whole.hidden(given), parts.hidden(given)), tokens
        for recompute in ("layers", "nothing"):
            assert same(step(parts, recompute, given), step(whole, recompute, given)), (tokens, recompute)


def test_control_arm_groups_shifted_by_one() -> None:
    wanted = step(opened(TINY_K2, torch.float32, "device"), "layers", batch(256))
    model = opened(TINY_K2, torch.float32, "host", 0.45)
    assert isinstance(model.residency, Streamed)
    begin, last = model.residency.source.begin, len(model.residency._sizes) - 1
    model.residency.source.begin = lambda unit, into: begin(min(last, unit + 1), into)  # type: ignore[method-assign]
    assert not same(step(model, "layers", batch(256)), wanted)


def test_groups_of_split_experts_are_refused() -> None:
    manifest = open_checkpoint(TINY_K2)
    model = models.meta_model(models.shape(manifest.config), manifest, torch.float32)
    for moe in model.moe_layers().values():
        count = moe.experts.num_experts
        moe.experts.dispatch = RowsDispatch(ALONE, [Rows(0, count, count)])
    named = [*model.named_parameters(), *model.named_buffers()]
    params = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in named}
    buffer = max(streamed_bytes(model.layers)) // 2
    with pytest.raises(ConfigError, match=r"cannot be loaded in groups: place\.split"):
        Streaming("disk", buffer).take(model, [], params, "cpu")


GEMMA_4 = {
    "model_type": "gemma4_text",
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 8,
    "hidden_size_per_layer_input": 0,
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 2,
    "moe_intermediate_size": 24,
}


def test_gemma_4s_experts_come_whole_because_a_norm_reads_what_they_made() -> None:
    """Refused by the plan before anything is loaded, and by the load; a buffer of a whole layer is none."""
    model = models.build(models.shape(GEMMA_4), dtype=torch.float32, device="meta")
    sizes = measure_sizes(model, None)
    assert come_whole(model.layers) and sizes.come_whole
    layer = max(streamed_bytes(model.layers))
    assert units(sizes, layer) == units(sizes, None) == list(sizes.streamed)
    with pytest.raises(ConfigError, match=r"cannot be loaded in groups, because a norm reads their output"):
        units(sizes, layer - 1)
    params = {name: (p.dtype, tuple(p.shape)) for name, p in model.named_parameters()}
    with pytest.raises(ConfigError, match=r"cannot be loaded in groups: a norm reads its experts' output"):
        Streaming("disk", layer - 1).take(model, [], params, "cpu")
    here = Hardware("cpu", "small", 2, 2**20, 2**20)
    made = plan(sizes, RESIDENT.but(experts="disk"), Work(tokens=64, longest=64), here)
    assert not made.fits and with_groups(made).layout.buffer_bytes is None

    # control arm: another family's experts come in groups of such a buffer
    other = models.build(models.shape(BIASED), dtype=torch.float32, device="meta")
    assert not come_whole(other.layers) and len(units(measure_sizes(other, None), layer // 2)) > 3


def test_an_expert_larger_than_a_buffer_is_refused() -> None:
    with pytest.raises(ConfigError, match="one expert of a layer takes"):
        opened(TINY_K2, torch.float32, "disk", 0.01)
