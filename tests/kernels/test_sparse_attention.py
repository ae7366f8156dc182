"""The choice of keys, attention to them and the indexer's loss against explicit float64 loops over tokens, heads and
documents, forward and gradients."""

import pytest
import torch

from unfreeze.kernels import sparse_attention
from unfreeze.kernels.attention import DocumentLayout, by_blocks
from unfreeze.kernels.sparse_attention import Index, attend_selected, index_divergence, select, selected_bytes

LENGTHS = (3, 40, 1, 20, 150, 7)
KEYS = 20  # two documents are longer, one is as long
HEADS, WIDTH, VALUE, INDEXERS, INDEX_WIDTH = 3, 12, 8, 16, 6
SCALE = WIDTH**-0.5


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of a few queries and of one head: their borders lie inside of documents."""
    for module in (sparse_attention, by_blocks):
        monkeypatch.setattr(module, "SCORE_BYTES", 1 << 16)


def layout_of(lengths=LENGTHS):
    starts = torch.tensor([0, *lengths[:-1]]).cumsum(0)
    return DocumentLayout.build(starts, sum(lengths))


def inputs(dtype=torch.float32, lengths=LENGTHS):
    """(index, [q, k, v]), leaves that require gradients."""
    g = torch.Generator().manual_seed(0)
    T = sum(lengths)

    def random(*size):
        return torch.randn(size, generator=g).to(dtype).requires_grad_()

    index = Index(random(T, INDEXERS, INDEX_WIDTH), random(T, INDEXERS), random(T, INDEX_WIDTH), 0.5)
    return index, [random(T, HEADS, WIDTH), random(T, HEADS, WIDTH), random(T, HEADS, VALUE)]


def documents(lengths=LENGTHS):
    """(first token, token) of every token."""
    start = 0
    for length in lengths:
        yield from ((start, start + place) for place in range(length))
        start += length


def oracle_scores(index, start, t):
    """I of a token and all before it in its document, in float64: one query at a time."""
    q_Ji, w_J, k_si = index.q_TJi[t].double(), index.w_TJ[t].double(), index.k_Ti[start : t + 1].double()
    products_Js = torch.einsum("ji,si->js", q_Ji, k_si) * index.scale
    return torch.einsum("j,js->s", w_J, products_Js.clamp(min=0))


def oracle_choice(index, lengths=LENGTHS, keys=KEYS):
    """For each token, the sorted places of its keys, by sorting all scores."""
    return [
        sorted(oracle_scores(index, start, t).argsort(descending=True)[:keys].tolist())
        for start, t in documents(lengths)
    ]


def choice(index, lengths=LENGTHS, keys=KEYS):
    """The same by `select`."""
    layout = layout_of(lengths)
    chosen = select(index, layout, keys)
    pairs = zip(chosen.tolist(), documents(lengths), strict=True)
    longer = {t for rows in layout.beyond(keys).longer for t in range(rows.start, rows.stop)}
    return [sorted(set(row)) if t in longer else list(range(t - start + 1)) for row, (start, t) in pairs]


def test_the_best_keys_are_chosen_in_each_document():
    index, _ = inputs()
    with torch.no_grad():
        assert choice(index) == oracle_choice(index)


def test_control_a_choice_that_sees_the_next_token_is_not_the_oracles(monkeypatch):
    """The planted bug: the mask lets a query see one token more."""
    index, _ = inputs()
    behind = sparse_attention._behind
    monkeypatch.setattr(
        sparse_attention, "_behind", lambda begin, end, device: behind(begin + 1, end + 1, device)[:, :end]
    )
    with torch.no_grad():
        assert choice(index) != oracle_choice(index)


def oracle_attention(q, k, v, places):
    """(o [T, H, v], mean over heads of the shares of each token's keys)."""
    outputs, shares = [], []
    for (start, t), mine in zip(documents(), places, strict=True):
        keys = [start + place for place in mine]
        p_HK = torch.einsum("hd,khd->hk", q[t], k[keys]).mul(SCALE).softmax(-1)
        outputs.append(torch.einsum("hk,khv->hv", p_HK, v[keys]))
        shares.append(p_HK.mean(0))
    return torch.stack(outputs), shares


@pytest.mark.parametrize("reused", [False, True])
def test_attention_to_the_chosen_keys_equals_a_float64_softmax(reused):
    index, parts = inputs()
    chosen, kept = select(index, layout_of(), KEYS), []

    def reuse(compute):
        kept.append(compute())
        return kept[-1]

    o = attend_selected(*parts, layout_of(), SCALE, chosen, reuse if reused else None)
    exact = [x.detach().double().requires_grad_() for x in parts]
    wanted, _ = oracle_attention(*exact, choice(index))
    grad = torch.randn(o.shape, generator=torch.Generator().manual_seed(1))
    found = [o, *torch.autograd.grad(o, parts, grad)]
    expected = [wanted, *torch.autograd.grad(wanted, exact, grad.double())]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, atol=5e-6, rtol=1e-5)
    assert bool(kept) == reused


def test_control_another_choice_is_seen():
    index, parts = inputs()
    chosen = select(index, layout_of(), KEYS)
    chosen[:, 0] = 0  # the planted bug: the first token of a document is always among them
    o = attend_selected(*parts, layout_of(), SCALE, chosen)
    wanted, _ = oracle_attention(*(x.double() for x in parts), choice(index))
    assert (o - wanted).abs().max() > 1e-2


@pytest.mark.parametrize("lengths", [LENGTHS, (150,), (40, 150), (7, 3)])
def test_as_many_keys_as_tokens_is_full_attention(lengths):
    """Bit-equal to packed attention where no document is longer; else within float32's rounding."""
    from unfreeze.kernels.packed_attention import packed_attention

    index, parts = inputs(lengths=lengths)
    layout = layout_of(lengths)
    whole = packed_attention(*parts, layout, SCALE)
    every = select(index, layout, max(lengths))
    assert torch.equal(attend_selected(*parts, layout, SCALE, every), whole)
    if max(lengths) > 40:
        few = select(index, layout, max(lengths) - 1)
        o = attend_selected(*parts, layout, SCALE, few)
        alike = torch.isclose(o, whole, atol=1e-6, rtol=1e-5).flatten(1).all(1)
        assert alike.sum() == sum(lengths) - 1  # all but the last token of the longest lack no key


def oracle_divergence(index, shares, places):
    """KL of each token, in float64, with autograd through all of it."""
    terms = []
    for (start, t), p, mine in zip(documents(), shares, places, strict=True):
        log_q = oracle_scores(index, start, t)[mine].log_softmax(-1)
        terms.append((p * (p.log() - log_q)).sum())
    return torch.stack(terms)


@pytest.mark.parametrize("keys", [KEYS, 200], ids=["some documents are longer", "none is"])
def test_the_indexers_loss_is_the_reports(keys):
    index, (q, k, _) = inputs()
    layout = layout_of()
    chosen = select(index, layout, keys) if keys < 150 else None
    found = index_divergence(index, q, k, SCALE, layout, chosen, keys)
    exact = Index(*(x.detach().double().requires_grad_() for x in index[:3]), index.scale)
    places = choice(index, keys=keys)
    with torch.no_grad():
        _, shares = oracle_attention(q.double(), k.double(), k.double(), places)
    wanted = oracle_divergence(exact, shares, places)
    torch.testing.assert_close(found.double(), wanted, atol=2e-6, rtol=1e-5)

    # another weight for every token: a gradient that only fits equal ones is seen
    weight = torch.rand(found.shape, generator=torch.Generator().manual_seed(2))
    ours = torch.autograd.grad(found, index[:3], weight, retain_graph=True)
    theirs = torch.autograd.grad(wanted, exact[:3], weight.double())
    for mine, its in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.double(), its, atol=5e-6, rtol=1e-5)
    assert torch.autograd.grad(found.sum(), (q, k), allow_unused=True) == (None, None)


def test_no_block_of_scores_is_larger_than_the_limit(monkeypatch):
    """The indexer's and attention's, at a length where all pairs would take 40 times as much."""
    seen = []
    scores = sparse_attention.index_scores
    monkeypatch.setattr(
        sparse_attention,
        "index_scores",
        lambda q, w, k, scale: seen.append(len(q) * q.shape[1] * len(k) * 4) or scores(q, w, k, scale),
    )
    index, _ = inputs()
    select(index, layout_of(), KEYS)
    assert seen and max(seen) <= 1 << 16 < 150 * 150 * INDEXERS * 4 / 20
    assert sparse_attention.heads_at_once(150) == 1
    assert selected_bytes(HEADS, WIDTH, VALUE, 150) == selected_bytes(2 * HEADS, WIDTH, VALUE, 150)
