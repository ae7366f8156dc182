"""The choice of blocks, attention to them and the gate's loss against float64 loops (moba_naive.py), forward and
gradients. Full attention where all blocks are chosen, nothing from the future, nothing from other documents."""

import functools

import moba_naive as naive
import pytest
import torch

from unfreeze.kernels import moba
from unfreeze.kernels.attention import DocumentLayout
from unfreeze.kernels.compressed import Entries
from unfreeze.kernels.moba import attention, choice, divergence
from unfreeze.kernels.packed_attention import packed_attention

LENGTHS = (3, 40, 1, 21, 77, 7)  # three are longer than CHOSEN blocks
HEADS, GROUPS, WIDTH, VALUE = 4, 2, 8, 6
BLOCK, CHOSEN = 5, 3
SCALE = WIDTH**-0.5


@pytest.fixture(autouse=True, params=["one unit", "many units"])
def units(request, monkeypatch):
    """All at once; or units of one document and key head, products of few blocks and slabs of few queries."""
    if request.param == "many units":
        for module in (attention, choice, divergence):
            monkeypatch.setattr(module, "SCORE_BYTES", 1 << 11)


def layout_of(lengths=LENGTHS):
    return DocumentLayout.build(torch.tensor([0, *lengths[:-1]]).cumsum(0), sum(lengths))


def entries_of(lengths=LENGTHS, block=BLOCK):
    layout = layout_of(lengths)
    return Entries.build(layout.starts, layout.num_tokens, block, "cpu")


def inputs(dtype=torch.float64, lengths=LENGTHS, seed=0):
    """q, k, v: leaves that require gradients."""
    generator, T = torch.Generator().manual_seed(seed), sum(lengths)
    sizes = (T, HEADS, WIDTH), (T, GROUPS, WIDTH), (T, GROUPS, VALUE)
    return [torch.randn(size, generator=generator).to(dtype).requires_grad_() for size in sizes]


def means(k, lengths=LENGTHS, block=BLOCK):
    first_E = entries_of(lengths, block).first_E
    return k[first_E[:, None] + torch.arange(block)].float().mean(1).to(k.dtype)


def chosen_by_means(q, k, lengths=LENGTHS, block=BLOCK, chosen=CHOSEN):
    with torch.no_grad():
        gated = moba.Gated(q, means(k.double() if k.dtype == torch.float64 else k, lengths, block))
        return moba.select(gated, entries_of(lengths, block), chosen)


def longer(lengths=LENGTHS, limit=BLOCK * CHOSEN):
    """(first token, token) of the documents in which something is chosen."""
    for start, length in naive.documents(lengths):
        if length > limit:
            yield from ((start, start + t) for t in range(length))


def oracle_seen(q, k, lengths=LENGTHS, **planted):
    return naive.seen_blocks(q.detach(), k.detach(), lengths, BLOCK, CHOSEN, **planted)


@functools.cache
def looped(misses_own=False):
    """The loops' output of `inputs()`, and its gradients for `probe`. misses_own: the planted bug in the choice, best
    blocks only, where there are enough."""
    parts = inputs()
    seen = oracle_seen(*parts[:2])
    if misses_own:
        seen = {place: blocks[:-1] or blocks for place, blocks in seen.items()}
    o = naive.attention(*parts, LENGTHS, BLOCK, SCALE, seen)
    return o.detach(), *torch.autograd.grad(o, parts, probe(o))


def probe(o):
    return torch.randn(o.shape, generator=torch.Generator().manual_seed(1), dtype=o.dtype)


def as_seen(chosen_THC):
    """The choice in the oracle's words; documents in which all is seen are left out."""
    return {
        (t, h): sorted({(t - start) // BLOCK, *(j for j in chosen_THC[t, h].tolist() if j >= 0)})
        for start, t in longer()
        for h in range(HEADS)
    }


def test_every_query_head_chooses_its_own_block_and_the_best_means():
    q, k, _ = inputs()
    found, wanted = as_seen(chosen_by_means(q, k)), oracle_seen(q, k)
    assert found and all(wanted[place] == blocks for place, blocks in found.items())
    heads = [[found[t, h] for h in range(HEADS)] for _, t in longer()]
    assert any(each[0] != each[1] for each in heads)  # heads that share keys choose apart


@pytest.mark.parametrize("reused", [False, True])
def test_attention_and_gradients_equal_the_loops_in_float64(reused):
    parts = inputs()
    chosen, kept = chosen_by_means(*parts[:2]), []

    def reuse(compute):
        kept.append(compute())
        return kept[-1]

    o = moba.attend(*parts, layout_of(), SCALE, BLOCK, chosen, reuse if reused else None)
    ours = o, *torch.autograd.grad(o, parts, probe(o))
    for mine, oracle in zip(ours, looped(), strict=True):
        assert (mine - oracle).abs().max() <= 1e-12
    assert bool(kept) == reused


@pytest.mark.parametrize("planted", ["another block", "the own block alone"])
def test_control_another_choice_is_seen(planted):
    parts = inputs()
    chosen = chosen_by_means(*parts[:2])
    chosen = chosen.clamp(max=0) if planted == "another block" else torch.full_like(chosen, -1)
    o = moba.attend(*parts, layout_of(), SCALE, BLOCK, chosen)
    assert (o - looped()[0]).abs().max() > 1e-2


def test_control_a_missing_own_block_is_seen():
    parts = inputs()
    o = moba.attend(*parts, layout_of(), SCALE, BLOCK, chosen_by_means(*parts[:2]))
    assert (o - looped(misses_own=True)[0]).abs().max() > 1e-2


@pytest.mark.parametrize("block, chosen", [(5, 16), (5, 100), (77, 1)])
def test_all_blocks_chosen_is_full_attention(block, chosen):
    parts = inputs(torch.float32)
    every = chosen_by_means(*parts[:2], LENGTHS, block, chosen)
    o = moba.attend(*parts, layout_of(), SCALE, block, every)
    whole = packed_attention(*parts, layout_of(), SCALE)
    probe = torch.randn(o.shape, generator=torch.Generator().manual_seed(1))
    pairs = zip(torch.autograd.grad(o, parts, probe), torch.autograd.grad(whole, parts, probe), strict=True)
    assert (o - whole).abs().max() <= 1e-5
    assert all((mine - theirs).abs().max() <= 1e-5 for mine, theirs in pairs)


def test_as_many_blocks_as_a_query_can_see_is_full_attention_by_products():
    """Not by the way for short documents: every token is given all blocks before its own."""
    parts, B = inputs(torch.float32), BLOCK
    count = -(-max(LENGTHS) // B)
    every = torch.arange(count - 2).expand(sum(LENGTHS), HEADS, -1)
    own_T = torch.cat([torch.arange(length) // B for length in LENGTHS])
    every = every.where(every < own_T[:, None, None], -1).to(torch.int32)
    o = moba.attend(*parts, layout_of(), SCALE, B, every)
    whole = packed_attention(*parts, layout_of(), SCALE)
    # the last block of the longest document has one block more before it than there are places
    start = sum(LENGTHS[:4])
    full = torch.ones(len(o), dtype=torch.bool)
    full[start + (count - 1) * B : start + max(LENGTHS)] = False
    assert (o - whole)[full].abs().max() <= 1e-5 < (o - whole)[~full].abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_dtypes_round_only(dtype):
    """The same choice, of the rounded inputs, in float64."""
    parts = inputs(dtype)
    chosen = chosen_by_means(*parts[:2])
    o = moba.attend(*parts, layout_of(), SCALE, BLOCK, chosen)
    assert o.dtype == dtype
    exact = [part.detach().double().requires_grad_() for part in parts]
    wanted = moba.attend(*exact, layout_of(), SCALE, BLOCK, chosen)
    probe = torch.randn(o.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    ours = o, *torch.autograd.grad(o, parts, probe)
    theirs = wanted, *torch.autograd.grad(wanted, exact, probe.double())
    most = 2e-6 if dtype == torch.float32 else 2**-7  # a last rounding to 8 bits, of values up to 4
    for mine, oracle in zip(ours, theirs, strict=True):
        assert (mine.double() - oracle).abs().max() <= most * oracle.abs().max()


def test_nothing_comes_from_the_future_or_from_another_document():
    parts = inputs()
    o = moba.attend(*parts, layout_of(), SCALE, BLOCK, chosen_by_means(*parts[:2]))
    start = sum(LENGTHS[:4])
    for token in (start + 14, start + 40, start + 76):
        for gradient in torch.autograd.grad(o[token].sum(), parts[1:], retain_graph=True):
            touched = gradient.flatten(1).abs().sum(1).nonzero().flatten().tolist()
            assert start <= min(touched) and max(touched) == token
            assert len(touched) <= BLOCK * CHOSEN * GROUPS * 2


def test_the_choice_does_not_depend_on_later_tokens():
    q, k, _ = inputs()
    chosen, start = chosen_by_means(q, k), sum(LENGTHS[:4])
    border = start + 50
    changed = k.detach().clone()
    changed[border:] = 100 * torch.randn(changed[border:].shape, dtype=k.dtype)
    again = chosen_by_means(q, changed)
    assert torch.equal(chosen[:border], again[:border]) and not torch.equal(chosen[border:], again[border:])


def test_a_step_chooses_and_attends_as_the_whole_document():
    q, k, v = (part.detach() for part in inputs())
    start, length = sum(LENGTHS[:4]), LENGTHS[4]
    chosen = chosen_by_means(q, k)
    wanted = moba.attend(q, k, v, layout_of(), SCALE, BLOCK, chosen)
    document = slice(start, start + length)
    for t in range(BLOCK * CHOSEN, length):
        now = slice(start + t, start + t + 1)
        e = means(k)[entries_of().documents[4][1]][: (t + 1) // BLOCK]
        own = torch.tensor([t // BLOCK])
        mine = moba.select_one(moba.Gated(q[now], e[None]), own, CHOSEN)
        assert torch.equal(mine.sort().values, chosen[now].sort().values)
        held = k[document][None, : t + 1], v[document][None, : t + 1]
        o = moba.attend_one(q[now], *held, torch.tensor([t]), SCALE, BLOCK, mine)
        assert (o - wanted[now]).abs().max() <= 1e-12


# ---- the loss of a learned gate


def gate_inputs(dtype=torch.float64, rank=3):
    generator, count = torch.Generator().manual_seed(2), len(entries_of().first_E)
    sizes = (sum(LENGTHS), HEADS, rank), (count, GROUPS, rank)
    return [torch.randn(size, generator=generator).to(dtype).requires_grad_() for size in sizes]


def oracle_divergence(q, k, gate_q, gate_e, gate_scale):
    terms = [torch.zeros((), dtype=q.dtype) for _ in range(len(q))]
    for (start, length), (_, theirs) in zip(naive.documents(LENGTHS), entries_of().documents, strict=True):
        for t in range(2 * BLOCK, length):
            own, each = t // BLOCK, []
            for h in range(HEADS):
                g = h * GROUPS // HEADS
                share = (k[start : start + t + 1, g] @ q[start + t, h] * SCALE).softmax(0)
                mass = share[: own * BLOCK].view(own, BLOCK).sum(1)
                p = mass / mass.sum()
                log_q = (gate_e[theirs][:own, g] @ gate_q[start + t, h] * gate_scale).log_softmax(0)
                each.append((p * (p.log() - log_q)).sum())
            terms[start + t] = torch.stack(each).mean()
    return torch.stack(terms)


def test_the_gates_loss_is_the_divergence_from_the_mass_of_attention():
    q, k, _ = (part.detach() for part in inputs())
    gate = gate_inputs()
    found = moba.block_divergence(moba.Gated(*gate), q, k, SCALE, entries_of(), 0.7)
    wanted = oracle_divergence(q, k, *gate, 0.7)
    probe = torch.randn(len(q), generator=torch.Generator().manual_seed(3), dtype=q.dtype)
    assert (found - wanted).abs().max() <= 1e-12 < wanted.max()
    pairs = torch.autograd.grad(found, gate, probe), torch.autograd.grad(wanted, gate, probe)
    assert all((mine - theirs).abs().max() <= 1e-12 for mine, theirs in zip(*pairs, strict=True))


def test_the_gates_loss_reaches_the_gate_alone():
    q, k, _ = inputs()
    gate = gate_inputs()
    loss = moba.block_divergence(moba.Gated(*gate), q, k, SCALE, entries_of(), 0.7).sum()
    assert torch.autograd.grad(loss, (q, k), allow_unused=True, retain_graph=True) == (None, None)
    assert all(gradient.any() for gradient in torch.autograd.grad(loss, gate))


def test_the_mass_of_blocks_sums_to_one_and_is_attentions():
    q, k, _ = (part.detach() for part in inputs())
    tokens = 0
    for queries, blocks, p_nHe in moba.block_mass(q, k, SCALE, entries_of()):
        assert torch.allclose(p_nHe.sum(-1), torch.ones((), dtype=p_nHe.dtype))
        assert p_nHe.shape[-1] == blocks.stop - blocks.start
        tokens += queries.stop - queries.start
    assert tokens == sum(max(0, length - 2 * BLOCK) for length in LENGTHS)
