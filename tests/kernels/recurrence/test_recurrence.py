"""Linear recurrences in chunks against the recurrence token by token, transformers' own, and a sum in float64.

T tokens, S documents, G key heads, H value heads, k and v their widths.
"""

import importlib.util
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers.models.kimi_linear.modeling_kimi_linear import recurrent_kimi_delta_attention
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

from unfreeze.kernels.recurrence import (
    Inputs,
    Rule,
    Segments,
    final_states,
    packed_recurrence,
    recurrence_step,
    segments,
    workspace_bytes,
)
from unfreeze.kernels.recurrence import chunked as chunks

SPEC = importlib.util.spec_from_file_location("live", Path(__file__).parents[2] / "parallel" / "live.py")
live = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(live)
KINDS = ("delta rule", "kda", "ssd")
LENGTHS = (65, 1, 130, 16, 64, 3, 40)
FEW = (65, 1, 66)  # two segments still, where the loop over tokens is what takes long
RULES = {"delta rule": Rule(0.25, normalized=True), "kda": Rule(0.25, normalized=True), "ssd": Rule()}
HELD = {"delta rule": "delta", "kda": "channel", "ssd": "additive"}
each_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(autouse=True)
def small_segments(monkeypatch):
    """Several segments in a small batch: their states and gradients flow from one to the next."""
    monkeypatch.setitem(segments.CHUNKS, "cpu", 4)


def inputs_of(kind, dtype=torch.float64, lengths=LENGTHS, G=2, H=4, k=16, v=8) -> list[Tensor | None]:
    """q, k, v, g, beta of random documents; beta is None for SSD."""
    random, T = torch.Generator().manual_seed(0), sum(lengths)

    def some(*size):
        return torch.randn(*size, generator=random, dtype=torch.float64)

    widths = (T, H, k) if kind == "kda" else (T, H)
    g = -torch.nn.functional.softplus(some(*widths) - 2)
    q, keys, values, beta = some(T, G, k), some(T, G, k), some(T, H, v), some(T, H).sigmoid()
    made = [q, keys if kind != "ssd" else keys / k**0.5, values, g, beta if kind != "ssd" else None]
    return [None if x is None else x.to(dtype).requires_grad_() for x in made]


def starts_of(lengths) -> list[int]:
    return torch.tensor([0, *lengths]).cumsum(0)[:-1].tolist()


def chunked(inputs, kind, lengths=LENGTHS, starts=None):
    """(o of packed_recurrence, the states after each document)."""
    starts = starts_of(lengths) if starts is None else starts
    every = Segments.build(starts, sum(lengths), "cpu")
    o = packed_recurrence(Inputs(*inputs), every, RULES[kind])
    again, states = final_states(Inputs(*inputs), every, RULES[kind])
    assert torch.allclose(o, again, rtol=0, atol=0, equal_nan=True)
    return o, states


def by_tokens(inputs, kind, lengths=LENGTHS):
    """The same, one document and one token after the other."""
    outputs, states = [], []
    for start, length in zip(starts_of(lengths), lengths, strict=True):
        q, _, v = inputs[:3]
        state = q.new_zeros(1, v.shape[1], q.shape[2], v.shape[2])
        for t in range(start, start + length):
            token = [None if x is None else x[t : t + 1] for x in inputs]
            o, state = recurrence_step(Inputs(*token), state, RULES[kind])
            outputs.append(o)
        states.append(state)
    return torch.cat(outputs), torch.cat(states)


def gradients(o, inputs):
    """Of a random projection of o with respect to every input."""
    probe = torch.randn(o.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return torch.autograd.grad((o * probe.to(o.dtype)).sum(), [x for x in inputs if x is not None])


def apart(ours, theirs) -> float:
    """Largest difference, over the largest value if that is above 1; a NaN stays one."""
    pairs = [(a.detach(), b.detach()) for a, b in zip(ours, theirs, strict=True)]
    return max(
        float((a - b).abs().max() / b.abs().max().clamp(min=1)) if torch.isfinite(a).all() else torch.inf
        for a, b in pairs
    )


@each_kind
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-9)], ids=str)
def test_chunks_are_the_recurrence_token_by_token(kind, dtype, tolerance):
    inputs = inputs_of(kind, dtype)
    (o, states), (wanted, ended) = chunked(inputs, kind), by_tokens(inputs, kind)
    assert len(Segments.build(starts_of(LENGTHS), sum(LENGTHS), "cpu").each) > 1
    assert apart((o, states), (wanted, ended)) <= tolerance
    assert apart(gradients(o, inputs), gradients(wanted, inputs)) <= tolerance


@pytest.mark.parametrize("kind", ["delta rule", "kda"])
def test_chunks_are_transformers_recurrence(kind):
    inputs = inputs_of(kind, torch.float32, H=2)  # their kernel has as many key heads
    theirs = recurrent_kimi_delta_attention if kind == "kda" else torch_recurrent_gated_delta_rule

    def document(rows):
        q, k, v, g, beta = (x[None, rows] for x in inputs)
        return theirs(q, k, v, g, beta, None, False, use_qk_l2norm_in_kernel=True)[0][0]

    wanted = torch.cat(
        [document(slice(at, at + n)) for at, n in zip(starts_of(LENGTHS), LENGTHS, strict=True)]
    )
    o, _ = chunked(inputs, kind)
    assert apart((o,), (wanted,)) <= 1e-4
    assert apart(gradients(o, inputs), gradients(wanted, inputs)) <= 1e-4


def test_ssd_is_attention_with_decayed_scores():
    """o_t = Σ_{j<=t} (q_t · k_j) exp(g_{j+1} + … + g_t) v_j, arXiv:2405.21060, equation 6, in float64."""
    inputs = inputs_of("ssd", torch.float64)
    q, k, v, g, _ = inputs
    q, k = (x.repeat_interleave(2, 1) for x in (q, k))
    wanted = []
    for at, n in zip(starts_of(LENGTHS), LENGTHS, strict=True):
        rows = slice(at, at + n)
        total = g[rows].cumsum(0)
        decay = (total[:, None] - total[None]).exp() * torch.ones(n, n).tril()[..., None]
        wanted.append(torch.einsum("thk,jhk,tjh,jhv->thv", q[rows], k[rows], decay, v[rows]))
    o, _ = chunked(inputs, "ssd")
    assert apart((o,), (torch.cat(wanted),)) <= 1e-9
    assert apart(gradients(o, inputs), gradients(torch.cat(wanted), inputs)) <= 1e-9


@each_kind
@pytest.mark.parametrize("lengths", [(1024,), (64,) * 16, (300, 40, 40, 20), (16,) * 64, (1,) * 100], ids=len)
def test_the_workspace_is_bounded_whatever_the_documents(kind, lengths, monkeypatch):
    """Backward's live bytes beyond the inputs' gradients; the plan has the most, of documents of one chunk."""
    monkeypatch.setitem(segments.CHUNKS, "cpu", 8)
    inputs = inputs_of(kind, torch.float32, lengths, G=4, H=8 if kind != "kda" else 4, k=32, v=32)
    every = Segments.build(tuple(starts_of(lengths)), sum(lengths), "cpu")
    o = packed_recurrence(Inputs(*inputs), every, RULES[kind])
    there, probe = [x for x in inputs if x is not None], torch.ones_like(o)
    with live.Live([*there, o, probe]) as watch:
        torch.autograd.grad(o, there, probe)
    peak = watch.peak - sum(x.nbytes for x in there)
    planned = workspace_bytes(4, inputs[2].shape[1], 32, 32, "cpu", HELD[kind])
    assert peak <= 1.05 * planned
    if lengths == (64,) * 16:
        assert peak >= 0.8 * planned


@each_kind
@pytest.mark.parametrize("decay", [-20.0, -1e4, "one token in seven"])
def test_strong_decays_do_not_overflow(kind, decay):
    """exp(20 · 64) is infinite in float32: a product split into exp(G_t) and exp(-G_j) would be NaN."""
    inputs = inputs_of(kind, torch.float32, FEW)
    with torch.no_grad():
        if isinstance(decay, float):
            inputs[3].fill_(decay)
        else:
            inputs[3][::7] = -200.0
    (o, states), (wanted, ended) = chunked(inputs, kind, FEW), by_tokens(inputs, kind, FEW)
    assert apart((o, states), (wanted, ended)) <= 1e-4
    assert apart(gradients(o, inputs), gradients(wanted, inputs)) <= 1e-4


def across(kind, starts) -> Tensor:
    """Gradients of the outputs of document 2 with respect to all tokens, one number per token."""
    inputs = inputs_of(kind)
    o, _ = chunked(inputs, kind, starts=starts)
    begin, end = starts_of(LENGTHS)[2:4]
    found = torch.autograd.grad(o[begin:end].square().sum(), [x for x in inputs if x is not None])
    return sum(x.flatten(1).abs().amax(1) for x in found)


@each_kind
@pytest.mark.parametrize("forgets", [-300.0, -1e6])
def test_small_decays_behind_a_token_that_forgets_all_keep_their_digits(kind, forgets):
    """Before g had a least value, float32 sums of a chunk were 4e-5 and 0.1 off here."""
    inputs = inputs_of(kind, torch.float32, FEW)
    with torch.no_grad():
        inputs[3][::16] = forgets
    exact = [None if x is None else x.detach().double().requires_grad_() for x in inputs]
    (o, states), (wanted, ended) = chunked(inputs, kind, FEW), by_tokens(exact, kind, FEW)
    assert apart((o, states), (wanted, ended)) <= 1e-5
    assert apart(gradients(o, inputs), gradients(wanted, exact)) <= 1e-5


@each_kind
def test_the_gradient_across_documents_is_exactly_zero(kind):
    begin, end = starts_of(LENGTHS)[2:4]
    of_tokens = across(kind, starts_of(LENGTHS))
    assert of_tokens[begin:end].all()
    assert not of_tokens[:begin].any() and not of_tokens[end:].any()


@each_kind
def test_control_a_state_that_leaks_into_the_next_document_is_seen(kind):
    """Documents 1 and 2 as if they were one: another output, and a gradient before the document."""
    starts = starts_of(LENGTHS)
    leaking = [*starts[:2], *starts[3:]]
    assert across(kind, leaking)[starts[1] : starts[2]].any()
    inputs = inputs_of(kind)
    assert apart((chunked(inputs, kind, starts=leaking)[0],), (by_tokens(inputs, kind)[0],)) > 1e-3


def test_the_state_is_in_float32_under_bf16_inputs():
    inputs = [x.detach().to(torch.bfloat16) for x in inputs_of("delta rule", lengths=FEW)]
    inputs[3] = inputs_of("delta rule", lengths=FEW)[3].detach().float()
    o, states = chunked(inputs, "delta rule", FEW)
    wide = [x.float() for x in inputs]
    wanted, ended = by_tokens(wide, "delta rule", FEW)
    assert o.dtype == torch.bfloat16 and states.dtype == torch.float32
    assert apart((states,), (ended,)) <= 1e-5  # with a state in bf16 it would be 1e-2
    assert apart((o.float(),), (wanted,)) <= 2**-8


def test_control_a_split_exponent_is_seen(monkeypatch):
    """exp(G_t) · exp(-G_j) in the place of exp(G_t - G_j): the same for weak decays, infinite for strong ones."""

    def split(lefts, right, total):
        grown = right * (-total).exp()
        return [((left * total.exp()) @ grown.mT).tril() for left in lefts]

    monkeypatch.setattr(chunks, "decayed_products", split)
    inputs = inputs_of("kda", torch.float32, FEW)
    assert apart((chunked(inputs, "kda", FEW)[0],), (by_tokens(inputs, "kda", FEW)[0],)) <= 1e-3
    with torch.no_grad():
        inputs[3].fill_(-20.0)
    assert apart((chunked(inputs, "kda", FEW)[0],), (by_tokens(inputs, "kda", FEW)[0],)) == torch.inf
