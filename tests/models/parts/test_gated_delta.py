"""The gated delta rule in the place of attention: against the hybrids' block, transformers' recurrence and loops."""

import assembled as cases
import pytest
import torch
import torch.nn.functional as F
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

from unfreeze import models
from unfreeze.core.errors import CheckpointError
from unfreeze.models.blocks.gated_delta import GatedDeltaNet
from unfreeze.models.blocks.recurrent import GatedNorm, ShortConv
from unfreeze.models.factory import Factory
from unfreeze.parallel.plan.counts import counts

PART = {"at": "layers.*.self_attn", "part": "gated_delta"}
FORMS = {"default": {}, "plain": {"conv": 0, "gate": False}, "no convolution": {"conv": 0}}
each_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


def made(form=None, **fields):
    return cases.made([{**PART, **(form or {})}], **fields)


def heads_of(block, x_TD):
    """q̂, k̂, v [T, H, d], a and β [T, H] of one document by torch's own functions, written from the docstring."""
    own = dict(block.named_parameters())
    H, d = block.heads, block.head_dim

    def prepared(name):
        y = x_TD @ own[f"{name}_proj.weight"].T
        taps = own.get(f"{name}_conv1d.weight")
        if taps is not None:
            padded = F.pad(y.T[None], (taps.shape[-1] - 1, 0))
            y = F.silu(F.conv1d(padded, taps, groups=len(taps)))[0].T
        y = y.unflatten(-1, (-1, d))
        if f"{name}_norm.weight" in own:
            y = F.rms_norm(y, (d,), own[f"{name}_norm.weight"], block.q_norm.eps)
        return y.repeat_interleave(H // y.shape[1], 1)

    a = -own["decay.A_log"].exp() * F.softplus(x_TD @ own["a_proj.weight"].T + own["decay.dt_bias"])
    return *map(prepared, "qkv"), a, torch.sigmoid(x_TD @ own["b_proj.weight"].T)


def output_of(block, x_TD, o_THd):
    o_THd = F.rms_norm(o_THd, (block.head_dim,), block.o_norm.weight, block.o_norm.eps)
    if block.g_proj is not None:
        o_THd = o_THd * F.silu(x_TD @ block.g_proj.weight.T).view_as(o_THd)
    return o_THd.flatten(1) @ block.o_proj.weight.T


def in_loops(block, x_TD):
    """A token and a head at a time."""
    q, k, v, g, beta = heads_of(block, x_TD)
    o = torch.zeros_like(q)
    for h in range(block.heads):
        S = x_TD.new_zeros(block.head_dim, block.head_dim)
        for t in range(len(x_TD)):
            key, query = (y[t, h] / (y[t, h].square().sum() + 1e-6).sqrt() for y in (k, q))
            S = g[t, h].exp() * S
            S = S + beta[t, h] * torch.outer(key, v[t, h] - S.T @ key)
            o[t, h] = S.T @ query * block.head_dim**-0.5
    return output_of(block, x_TD, o)


def of_block(model, x_TD):
    """The first layer's attention of one document."""
    run = model.packed_pass(cases.packed([[0] * len(x_TD)]))
    return model.layers[0].self_attn(x_TD, run)


@each_form
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-9)])
def test_chunks_are_the_recurrence_step_by_step(form, dtype, tolerance):
    """150 tokens: three chunks. Decays in float32 are widened, so that float64 is exact."""
    model = made(form, dtype=dtype, base_model_type="qwen3").to(dtype)
    x_TD = torch.randn(150, 32, generator=torch.Generator().manual_seed(0), dtype=dtype)
    with torch.no_grad():
        difference = (of_block(model, x_TD) - in_loops(model.layers[0].self_attn, x_TD)).abs().max()
    assert difference <= tolerance


@each_form
def test_it_is_transformers_recurrence(form):
    model = made(form)
    block = model.layers[0].self_attn
    x_TD = torch.randn(70, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        q, k, v, g, beta = (y[None] for y in heads_of(block, x_TD))
        theirs, _ = torch_recurrent_gated_delta_rule(
            q, k, v, g, beta, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=True
        )
        wanted = output_of(block, x_TD, theirs[0])
        assert (of_block(model, x_TD) - wanted).abs().max() <= 1e-5
        # control: keys that are not of length 1 are another rule
        theirs, _ = torch_recurrent_gated_delta_rule(
            q, k, v, g, beta, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False
        )
        assert (output_of(block, x_TD, theirs[0]) - wanted).abs().max() > 1e-2


def hybrid(block):
    """Qwen3.5's block with the same weights; keys and values repeated for the query heads of a group."""
    make, (H, d) = Factory(torch.float32, "cpu"), (block.heads, block.head_dim)
    theirs = GatedDeltaNet(
        0,
        (H, H),
        (d, d),
        conv1d=ShortConv(3 * H * d, block.taps, silu=True, dtype=torch.float32, device="cpu"),
        decay=make.decay(H),
        norm=make.norm(d, block.o_norm.eps, GatedNorm),
        out_proj=make.linear("out_proj", H * d, 32),
        in_proj_qkv=make.linear("in_proj_qkv", 32, 3 * H * d),
        in_proj_z=make.linear("in_proj_z", 32, H * d),
        in_proj_b=make.linear("in_proj_b", 32, H),
        in_proj_a=make.linear("in_proj_a", 32, H),
    )
    own = block.state_dict()

    def together(part):
        rows = [own[f"{name}_{part}.weight"].unflatten(0, (-1, d)) for name in "qkv"]
        return torch.cat([y.repeat_interleave(H // len(y), 0).flatten(0, 1) for y in rows])

    theirs.load_state_dict(
        {
            "conv1d.weight": together("conv1d"),
            "in_proj_qkv.weight": together("proj"),
            "in_proj_z.weight": own["g_proj.weight"],
            "in_proj_b.weight": own["b_proj.weight"],
            "in_proj_a.weight": own["a_proj.weight"],
            "decay.A_log": own["decay.A_log"],
            "decay.dt_bias": own["decay.dt_bias"],
            "norm.weight": own["o_norm.weight"],
            "out_proj.weight": own["o_proj.weight"],
        }
    )
    return theirs


def test_it_is_the_hybrids_block_with_the_same_weights():
    model = made()
    block = model.layers[0].self_attn
    batch = cases.packed(cases.documents())
    run = model.packed_pass(batch)
    x_TD = torch.randn(batch.num_tokens, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert (block(x_TD, run) - hybrid(block)(x_TD, run)).abs().max() <= 1e-5


@each_form
@pytest.mark.parametrize("base", ["llama", "qwen3"])
def test_cached_decoding_is_the_packed_pass(form, base):
    model = made(form, base_model_type=base)
    assert cases.cached_difference(model, (1, 2, 5, 70), 80) <= 1e-4


def test_control_a_state_that_is_not_carried_on_differs():
    model = made()

    def forgetful(cache, new):
        for state in cache.states.values():
            state.zero_()
        return model.step(new, cache)

    assert cases.cached_difference(model, (5, 70), 80, forgetful) > 1e-2


def test_the_state_does_not_grow_and_is_as_large_as_counted():
    model, sizes = made(), set()
    for length in (1, 9, 200):
        cache = model.new_cache(1, 256)
        with torch.no_grad():
            model.prefill(cases.packed(cases.documents([length])), cache)
            model.step(torch.tensor([3]), cache)
        assert not cache.layers and model.cache_bytes() == 0
        sizes.add(cache.nbytes)
    # per layer 4 heads of 8 × 8 in float32, and 3 tokens before the next of 32 + 16 + 16 channels
    assert sizes == {model.state_bytes()} == {2 * 4 * (4 * 8 * 8 + 3 * 64)}


@each_form
def test_no_gradient_comes_from_the_future_or_another_document(form):
    model, batch = made(form), cases.packed(cases.documents())
    of_tokens = cases.seen(model, batch, slice(41, 100))  # the first 59 tokens of document 2
    assert of_tokens[41:100].all()
    assert not of_tokens[:41].any() and not of_tokens[100:].any()
    assert cases.seen(model, cases.joined(batch), slice(41, 100))[:41].any()  # control: one document


def test_control_a_convolution_that_looks_ahead_is_seen(monkeypatch):
    monkeypatch.setattr(
        ShortConv, "forward", lambda self, x, run, name: x.roll(-1, 0) * self.weight[:, 0, -1]
    )
    assert cases.seen(made(), cases.packed(cases.documents()), slice(41, 100))[100] > 0


@each_form
def test_recomputation_changes_no_bit(form):
    model, batch = made(form), cases.packed(cases.documents())
    wanted = cases.gradients(model, batch, models.RECOMPUTE["nothing"])
    assert {name for name, _ in model.named_parameters()} - wanted.keys() == {"lm_head.weight"}
    for policy in ("layers", "selective", "elementwise"):
        own = cases.gradients(model, batch, models.RECOMPUTE[policy])
        assert [name for name in wanted if not torch.equal(own[name], wanted[name])] == [], policy


@each_form
@pytest.mark.parametrize("base", ["llama", "qwen3"])
def test_what_it_holds_for_backward_is_what_it_counts(form, base):
    model = made(form, base_model_type=base, hidden_size=128, head_dim=32)
    block = model.layers[0].self_attn
    product = 4 * 128  # of o_proj: the layer's sum takes its place
    counted = block.bytes(torch.float32, "cpu").held
    assert cases.held(model, block) - product == pytest.approx(counted, rel=0.03)


def test_the_plan_counts_the_products_with_a_state():
    """Three of 8 × 8 numbers for each of 4 heads and 2 layers; attention has none left."""
    model, bare = counts(made({"conv": 0})), counts(cases.made([]))
    added = 2 * (2 * 4 * 32 + 32 * 32 + 3 * 4 * 8 * 8)  # b_proj, a_proj; g_proj; states
    assert model.dense == bare.dense + added and model.pairs(100) == 0


def test_what_fits_keeps_its_name_and_shape():
    """So `swap` copies it. The convolutions begin as SiLU of the token itself."""
    shapes = [
        {name: p.shape for name, p in cases.made(parts, base_model_type="qwen3").named_parameters()}
        for parts in ([], [PART])
    ]
    assert shapes[0].items() <= shapes[1].items()
    added = {name.partition("self_attn.")[2] for name in shapes[1].keys() - shapes[0].keys()}
    convolutions = {f"{name}_conv1d.weight" for name in "qkv"}
    own = {"a_proj.weight", "b_proj.weight", "g_proj.weight", "o_norm.weight", "decay.A_log", "decay.dt_bias"}
    assert added == own | convolutions
    config = {**cases.SIZES, "parts": [PART]}
    model = models.build(models.shape(config), dtype=torch.float32, device="cpu")
    models.initialize(model, 0)
    block = model.layers[0].self_attn
    x_TC = torch.randn(5, 32)
    run = model.packed_pass(cases.packed([[0] * 5]))
    torch.testing.assert_close(block.q_conv1d(x_TC, run, ""), F.silu(x_TC))


def test_another_attention_is_refused_in_one_line():
    with pytest.raises(
        CheckpointError, match=r"takes the place of grouped-query attention; .* is DeltaAtt"
    ) as caught:
        cases.made([PART, PART])
    assert "\n" not in caught.value.message and len(caught.value.message) <= 140 and caught.value.next
