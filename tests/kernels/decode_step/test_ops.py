"""Operations of a step outside the experts, recorded and run, against torch in float64.

Inputs of products are numbers that bf16 holds exactly, so both arithmetics have the same oracle.
"""

import pytest
import torch

from unfreeze.kernels.attention import Mask
from unfreeze.kernels.decode_step import mixture
from unfreeze.kernels.decode_step.mixture import Latent
from unfreeze.kernels.decode_step.program import Heads, Store
from unfreeze.kernels.decode_step.rows import ACTIVATIONS
from unfreeze.kernels.rotary import rotary
from unfreeze.models.blocks.recording import PAIRINGS
from unfreeze.quant.codec import Packed
from unfreeze.quant.int4 import Int4

CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def draw(*shape, seed=0, scale=1.0):
    """Random numbers that bf16 holds."""
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(shape, generator=generator)).bfloat16().float()


def normed(x, gain, eps):
    return gain.double() * x.double() / (x.double().square().mean(-1, keepdim=True) + eps).sqrt()


def projected(program, x):
    """A product with the identity: shows the packed form of x, rounded to bf16 in the arithmetic of pairs."""
    return program.linear(x, torch.eye(x.width))


def assert_reads(got, want, dtype):
    """`projected`: exactly what is packed."""
    torch.testing.assert_close(got, want.to(dtype).float(), rtol=0, atol=0)


@pytest.mark.parametrize("groups", [1, 3])
def test_norm(dtype, recorded, groups):
    x, gain = draw(5, 3 * 40, scale=3), draw(120 // groups, seed=1)
    got = recorded(lambda program, x: program.norm(x, gain, 1e-3, groups), x, dtype=dtype)
    want = normed(x.unflatten(1, (groups, -1)), gain, 1e-3).flatten(1)
    torch.testing.assert_close(got.double(), want, **CLOSE)
    assert not torch.allclose(
        got.double(), normed(x.unflatten(1, (4 - groups, -1)), gain[:1], 1e-3).flatten(1)
    )
    packed = recorded(
        lambda program, x: projected(program, program.norm(x, gain, 1e-3, groups)), x, dtype=dtype
    )
    assert_reads(packed, got, dtype)


WEIGHTS = {
    "float32": lambda w: (w, w.double()),
    "bf16": lambda w: (w.bfloat16(), w.bfloat16().double()),
    "int4": lambda w: ((packed := Packed(Int4(32), Int4(32).quantize(w))), packed.dequantize().double()),
}


@pytest.mark.parametrize(
    "kind, width, height",
    [
        (kind, *size)
        for kind in WEIGHTS
        for size in ((64, 33), (96, 70), (37, 5))
        if kind != "int4" or size[0] % 32 == 0
    ],
)
def test_linear(dtype, recorded, kind, width, height):
    """Jobs of 32 rows, the last of fewer; 1 to 6 sequences, four at a time; every part and all together."""
    weight, wide = WEIGHTS[kind](draw(height, width, seed=1))
    x, added, bias = draw(6, width), draw(6, height, seed=2), draw(height, seed=3)
    A, B = draw(3, width, seed=4, scale=0.3), draw(height, 3, seed=5)

    def want(x, added, bias, adapter, factor):
        y = x.double() @ wide.t()
        y = y if bias is None else y + bias.double()
        y = y if adapter is None else y + adapter[2] * (x.double() @ A.double().t() @ B.double().t())
        return factor * y if added is None else added[: len(x)].double() + factor * y

    plain, full = (None, None, None, 1.0), (added, bias, (A, B.bfloat16(), 0.7), 0.5)
    cases = [plain, full, *(plain[:i] + full[i : i + 1] + plain[i + 1 :] for i in range(4))]
    for case in cases:
        for rows in (1, 3, 6):

            def record(program, x, *rest, case=case):
                options = {"adapter": case[2], "factor": case[3], "add": rest[0] if rest else None}
                return program.linear(x, weight, case[1], **options)

            inputs = [x[:rows], *([added[:rows]] if case[0] is not None else [])]
            got = recorded(record, *inputs, dtype=dtype)
            torch.testing.assert_close(got.double(), want(x[:rows], *case), rtol=1e-5, atol=3e-5)
            # control: each part that is there matters
            for i, part in enumerate(case):
                if part is not plain[i]:
                    other = want(x[:rows], *case[:i], plain[i], *case[i + 1 :])
                    assert not torch.allclose(got.double(), other, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("gated", [True, False])
def test_activate(dtype, recorded, gated):
    """Jobs of 512 numbers, the last of fewer."""
    both = draw(3, 2 * 600, scale=2)

    def record(program, x):
        kind = ACTIVATIONS["silu" if gated else "relu2"]
        return program.activate(x.part(0, 600), x.part(600, 600) if gated else None, kind)

    got = recorded(record, both, dtype=dtype)
    gate, up = both.double().chunk(2, 1)
    want = torch.nn.functional.silu(gate) * up if gated else gate.relu() ** 2
    torch.testing.assert_close(got.double(), want, **CLOSE)
    assert not torch.allclose(got.double()[:, 512:], want[:, :88], rtol=1e-2)
    packed = recorded(lambda program, x: projected(program, record(program, x)), both, dtype=dtype)
    assert_reads(packed, got, dtype)


def test_combine(dtype, recorded):
    x, y, share = draw(4, 40), draw(4, 40, seed=1), draw(4, 1, seed=2)
    wide = x.double(), y.double()
    for share_now in (None, share):
        inputs = (x, y) if share_now is None else (x, y, share)
        got = recorded(
            lambda program, x, y, *share: program.combine(x, y, 0.5, -2.0, *share), *inputs, dtype=dtype
        )
        factor = 1 if share_now is None else share.double().sigmoid()
        torch.testing.assert_close(got.double(), 0.5 * wide[0] - 2 * factor * wide[1], **CLOSE)
    got = recorded(lambda program, x: program.combine(x, a=3.0), x, dtype=dtype)
    torch.testing.assert_close(got, 3 * x, **CLOSE)


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("pairs", [12, 8, 0])
def test_rotate(dtype, recorded, pairing, pairs):
    """All of a head, a part of it, nothing; scaled; written to the cache, in float32 and bf16, and packed."""
    heads, width, positions = 2, 24, torch.tensor([0, 4, 2])
    x, cos, sin, factor = (
        draw(3, heads * width),
        draw(3, pairs, seed=1),
        draw(3, pairs, seed=2),
        draw(3, 1, seed=3),
    )
    tables = None if pairs == 0 else (cos.data_ptr(), sin.data_ptr(), pairs)
    heads_x = x.double().view(3, heads, width)
    turned = rotary(heads_x, cos.double(), sin.double(), pairing, "reference") if pairs else heads_x
    want = (turned * factor.double()[:, None]).flatten(1)
    for kind in (torch.float32, torch.bfloat16):
        cache = torch.full((3, 6, heads, width), float("nan"), dtype=kind)

        def record(program, x, cache=cache):
            return program.rotate(x, heads, tables, PAIRINGS[pairing], factor=factor, cache=Store(cache))

        got = recorded(record, x, dtype=dtype, positions=positions)
        torch.testing.assert_close(got.double(), want, **CLOSE)
        written = cache[torch.arange(3), positions]
        assert torch.equal(written, got.view(3, heads, width).to(kind))
        assert cache.isnan().sum() == cache.numel() - written.numel()
    if pairs == 8:  # control: another pairing is another result
        others = [
            rotary(heads_x, cos.double(), sin.double(), p, "reference") for p in PAIRINGS if p != pairing
        ]
        assert all(not torch.allclose(other, turned) for other in others)


def attention(q, keys, values, positions, scale, mask, softcap, sinks):
    """[S, H, v] in float64; rows of keys and values [S, N, G, …] that the mask hides are left out."""
    out = []
    for s, position in enumerate(positions.tolist()):
        seen = mask.allowed(torch.tensor(position), torch.arange(keys.shape[1]))
        shared = q.shape[1] // keys.shape[2]
        k, v = (t[s, seen].double().repeat_interleave(shared, 1) for t in (keys, values))
        scores = scale * torch.einsum("hd,nhd->hn", q[s].double(), k)
        scores = scores if softcap is None else softcap * (scores / softcap).tanh()
        if sinks is not None:
            scores = torch.cat((scores, sinks.double()[:, None]), 1)
        out.append(torch.einsum("hn,nhv->hv", scores.softmax(-1)[:, : len(k)], v))
    return torch.stack(out)


OPTIONS = {
    "causal": {},
    "window": {"mask": Mask(window=5)},
    "chunk": {"mask": Mask(chunk=7)},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": draw(12, seed=9)},
    "window and sinks": {"mask": Mask(window=33), "sinks": draw(12, seed=9)},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=str)
def test_attend(dtype, recorded, name, kind):
    """Positions at both sides of a block of 32; 6 query heads a key head, four at a time. What a row must not
    see is NaN."""
    options = {"mask": Mask(), "softcap": None, "sinks": None, **OPTIONS[name]}
    heads, groups, width, value_width = 12, 2, 48, 24
    positions = torch.tensor([0, 30, 31, 32, 69])
    q, keys, values = (
        draw(5, heads * width),
        draw(5, 70, groups, width, seed=1),
        draw(5, 70, groups, 24, seed=2),
    )
    hidden = ~options["mask"].allowed(positions[:, None], torch.arange(70))
    keys, values = (torch.where(hidden[..., None, None], float("nan"), t).to(kind) for t in (keys, values))

    def record(program, q):
        q = program.rotate(q, heads, None, 0, packed=True)
        sizes = Heads(heads, groups, width, value_width)
        return program.attend(q, Store(keys), Store(values), 0.3, sizes, **options)

    got = recorded(record, q, dtype=dtype, positions=positions)
    q_SHd = q.view(5, heads, width)
    want = attention(q_SHd, keys, values, positions, 0.3, **options).flatten(1)
    torch.testing.assert_close(got.double(), want, **CLOSE)
    packed = recorded(
        lambda program, q: projected(program, record(program, q)), q, dtype=dtype, positions=positions
    )
    assert_reads(packed, got, dtype)
    if name != "causal":  # control: without the option, over finite numbers
        finite = keys.nan_to_num(0.1), values.nan_to_num(0.1)
        assert not torch.allclose(
            got.double(), attention(q_SHd, *finite, positions, 0.3, Mask(), None, None).flatten(1)
        )


SHARED = torch.tensor([[2, 31], [0, 1], [2, 31], [1, 33], [0, 0]])
"""Slot and length of each row's prompt; the last row has none."""


@pytest.mark.parametrize("name", OPTIONS)
def test_attend_to_prompts_that_rows_share(dtype, recorded, name):
    """What lies beyond a prompt, and beyond a row, is NaN. Windows begin in the prompt, at its end and behind."""
    options = {"mask": Mask(), "softcap": None, "sinks": None, **OPTIONS[name]}
    heads, groups, width = 12, 2, 32
    positions = torch.tensor([31, 1, 69, 34, 20])
    q, plain = draw(5, heads * width), draw(2, 5, 70, groups, width, seed=1)
    nan = float("nan")
    prompts, rows = torch.full((2, 3, 33, groups, width), nan), torch.full((2, 5, 40, groups, width), nan)
    for row, (slot, length) in enumerate(SHARED.tolist()):
        of_slot = int((SHARED[:, 0] == slot).nonzero()[0])  # rows of a slot have the same prompt
        plain[:, row, :length] = plain[:, of_slot, :length]
        prompts[:, slot, :length] = plain[:, row, :length]
        own = int(positions[row]) + 1 - length
        rows[:, row, :own] = plain[:, row, length : length + own]

    def record(program, q):
        program.place(SHARED, 5)
        q = program.rotate(q, heads, None, 0, packed=True)
        keys, values = map(Store, rows, prompts)
        return program.attend(q, keys, values, 0.3, Heads(heads, groups, width, width), **options)

    got = recorded(record, q, dtype=dtype, positions=positions)
    want = attention(q.view(5, heads, width), *plain, positions, 0.3, **options).flatten(1)
    torch.testing.assert_close(got.double(), want, **CLOSE)


def test_a_key_is_written_behind_the_shared_prompt(recorded):
    """The place in a row of the cache is the position less the prompt's length."""
    x, store, positions = draw(5, 64), torch.zeros(5, 40, 64), torch.tensor([31, 1, 69, 34, 20])

    def record(program, x):
        program.place(SHARED, 5)
        program.rotate(x, 2, None, 0, cache=Store(store))

    recorded(record, x, positions=positions)
    places = positions - SHARED[:, 1]
    assert torch.equal(store[torch.arange(5), places], x) and store.count_nonzero() == x.numel()


@pytest.mark.parametrize("place", ["q", "keys", "values"])
def test_nan_reaches_the_output_of_attention(recorded, place):
    """Generation stops at logits that are not finite; a NaN that attention hides would not reach them."""
    tensors = {"q": draw(2, 64), "keys": draw(2, 40, 2, 32), "values": draw(2, 40, 2, 32)}
    tensors[place].view(2, -1)[1, 3] = float("nan")
    q, keys, values = tensors.values()

    def record(program, q):
        q = program.rotate(q, 2, None, 0, packed=True)
        return program.attend(q, Store(keys), Store(values), 1.0, Heads(2, 2, 32, 32))

    got = recorded(record, q, positions=torch.tensor([35, 35]))
    assert got[1].isnan().any() and got[0].isfinite().all()


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("adapted", [False, True])
def test_latent_attention(dtype, recorded, kind, adapted):
    """Oracle: keys and values expanded from the latents, by the formula of blocks/mla.py. Three key groups of
    four heads that read the same latents."""
    sizes = Latent(heads=12, nope=10, rope=6, value=32, latent=40)
    W = draw(12 * 42, 40, seed=1, scale=0.2).to(kind)
    adapter = (draw(3, 40, seed=2, scale=0.3), draw(12 * 42, 3, seed=3).to(kind), 0.5) if adapted else None
    q, latents, positions = draw(5, 12 * 16), draw(5, 33, 46, seed=4), torch.tensor([0, 5, 30, 31, 32])

    def record(program, q):
        q = mixture.latent_query(program, q, sizes, W, adapter)
        o = program.attend(
            q, Store(latents), Store(latents), 0.3, Heads(12, 3, sizes.latent + sizes.rope, sizes.latent)
        )
        return mixture.latent_value(program, o, sizes, W, adapter)

    def want(W):
        both = torch.einsum("hoc,snc->snho", W.view(12, 42, 40), latents[..., :40].double())
        keys = torch.cat((both[..., :10], latents.double()[..., None, 40:].expand(-1, -1, 12, -1)), -1)
        return attention(q.view(5, 12, 16), keys, both[..., 10:], positions, 0.3, Mask(), None, None).flatten(
            1
        )

    wide = W.double()
    full = wide if adapter is None else wide + 0.5 * adapter[1].double() @ adapter[0].double()
    got = recorded(record, q, dtype=dtype, positions=positions)
    # pairs: the query is rounded to bf16 once, 2^-9 of a score
    tolerance = CLOSE if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(got.double(), want(full), **tolerance)
    packed = recorded(
        lambda program, q: projected(program, record(program, q)), q, dtype=dtype, positions=positions
    )
    assert_reads(packed, got, dtype)
    if adapted:  # control
        assert not torch.allclose(got.double(), want(wide), rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_cache_latent(dtype, recorded, pairing):
    sizes, positions = Latent(heads=2, nope=8, rope=12, value=8, latent=36), torch.tensor([3, 0])
    x, gain, cos, sin = draw(2, 48), draw(36, seed=1), draw(2, 6, seed=2), draw(2, 6, seed=3)
    for kind in (torch.float32, torch.bfloat16):
        store = torch.full((2, 4, 48), float("nan"), dtype=kind)

        def record(program, x, store=store):
            tables = cos.data_ptr(), sin.data_ptr(), 6
            mixture.cache_latent(program, x, gain, 1e-3, sizes, tables, PAIRINGS[pairing], Store(store))

        recorded(record, x, dtype=dtype, positions=positions)
        key = rotary(x.double()[:, None, 36:], cos.double(), sin.double(), pairing, "reference")[:, 0]
        want = torch.cat((normed(x[:, :36], gain, 1e-3), key), 1)
        got = store[torch.arange(2), positions].double()
        torch.testing.assert_close(
            got, want, **(CLOSE if kind == torch.float32 else {"rtol": 2**-8, "atol": 1e-6})
        )
        assert store.isnan().sum() == store.numel() - got.numel()


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rank", [1, 3, 8, 16, 32, 40])
def test_an_adapter_reads_nothing_behind_its_matrix(dtype, recorded, kind, rank):
    """A chunk of 32 numbers reaches into the next rows of a narrow matrix; behind it there is NaN. Seven rows of x:
    a group of four, and three."""
    x, W, A = draw(7, 64), draw(45, 64, seed=1), draw(rank, 64, seed=2, scale=0.1)
    stored = torch.full((60, rank), float("nan"), dtype=kind)
    stored[:45] = draw(45, rank, seed=3)
    B = stored[:45]

    def record(program, x):
        return program.linear(x, W, adapter=(A, B, 0.5))

    got = recorded(record, x, dtype=dtype)
    t = x.double() @ A.double().T
    torch.testing.assert_close(
        got.double(), x.double() @ W.double().T + 0.5 * t @ B.double().T, rtol=1e-5, atol=3e-5
    )
