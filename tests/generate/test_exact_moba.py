"""Steps of a mixture of blocks: they choose blocks as the packed pass over the same tokens does."""

from __future__ import annotations

import pytest
import torch
from exact import (
    EXACT,
    SEEN,
    STEPS,
    Walk,
    apart,
    assert_exact,
    each_cpu_maker,
    each_maker,
    greedy_tokens,
    rows_of,
    some,
    uncached,
    walked,
)
from moba_case import FAMILIES, GATES, built, moba
from test_exact_hybrids import forked, joined

from unfreeze.generate.engine import Engine, batch_of
from unfreeze.generate.sampling import Sampling
from unfreeze.generate.steps import launched
from unfreeze.kernels import moba as kernel
from unfreeze.models.blocks.attention import Attention
from unfreeze.models.blocks.cache import Cache
from unfreeze.models.blocks.shared_cache import SharedCache
from unfreeze.models.blocks.step_pass import StepPass

# one row goes its own greedy way for 64 steps; beside it random tokens, to 253 positions in one row
ROWS = rows_of((7, 64), (189, 64), (30, 40), greedy=1)
SPARE = 3  # 256 positions: whole blocks
each_gate = pytest.mark.parametrize("gate", GATES)


def model_of(gate="mean", family="llama", **options):
    at = "layers.0.self_attn" if family == "qwen3_next" else "layers.*.self_attn"
    part = moba(at, **GATES[gate], **options)
    return built(family, part).eval().requires_grad_(False)


@each_maker
@pytest.mark.parametrize(
    "gate, family",
    [(gate, "llama") for gate in GATES] + [("mean", name) for name in FAMILIES if name != "llama"],
)
def test_steps_to_253_tokens_are_the_packed_pass_over_them(gate, family, steps):
    model = model_of(gate, family)
    walks = walked(model, steps, ROWS, SPARE)
    wanted = uncached(model, walks)
    assert_exact(walks, wanted)
    assert greedy_tokens(walks[0], wanted[0])


@each_gate
def test_a_block_beyond_the_text_takes_no_more_room_than_the_text(gate, monkeypatch):
    """A block of 2³¹ tokens is full attention, and no tensor has its size."""
    model, full = model_of(gate, block=2**31 - 1), model_of(gate, block=64)
    full.load_state_dict(model.state_dict())
    kind, sizes = type(model.layers[0].self_attn.blocks.indexer), list[int]()
    inner = kind.summary
    monkeypatch.setattr(kind, "summary", lambda gate, k: (sizes.append(k.shape[1]), inner(gate, k))[1])
    ids = some(20, 0)
    wanted_TD = full.hidden(batch_of([ids]))
    sizes.clear()
    cache = model.new_cache(1, 24)
    got = [*model.prefill(batch_of([ids[:5]]), cache)]
    got += [model.step(torch.tensor([token]), cache)[0] for token in ids[5:]]
    assert max(sizes) <= 20
    assert (torch.stack(got) - wanted_TD).abs().max() <= 1e-5


@each_maker
@each_gate
@pytest.mark.parametrize("way", [joined, forked])
def test_rows_that_join_leave_and_share_a_prompt_are_the_packed_pass(way, gate, steps):
    model = model_of(gate, block=3, chosen=2)
    walks = way(model, steps)
    assert_exact(walks, uncached(model, walks))


@each_gate
@pytest.mark.parametrize("kept", [3, 8, 9, 16, 20])
def test_a_fork_of_any_length_continues_as_the_packed_pass(gate, kept):
    """In the middle of a block too: its summary is made anew from the cached keys."""
    model, tokens, after = model_of(gate, block=4, chosen=2), some(21, 1), some(20, 2)
    cache = model.new_cache(2, 48)
    with torch.no_grad():
        model.prefill(batch_of([tokens, some(30, 3)]), cache)
        cache.fork(0, [1], kept)
        step, logits = launched(model, cache), []
        for token in after:
            logits.append(step([1, token])[1].clone())
        walk = Walk(kept + 1, tokens[:kept] + after, logits)
        assert_exact([walk], uncached(model, [walk]))


@each_cpu_maker
@each_gate
@pytest.mark.parametrize("prompt", [13, 16, 23])
def test_answers_that_share_a_prompt_choose_over_its_blocks(prompt, gate, steps):
    """A prompt that ends inside of a block, or with it: the block that both are in is the row's own."""
    model, tokens = model_of(gate, block=4, chosen=2), some(prompt, 1)
    cache = model.shared_cache((2, 24), (4, 24), routes=False)
    with torch.no_grad():
        model.prefill(batch_of([tokens, some(9, 9)]), cache, [0, 3])
        cache.fork(0, [0, 1, 2], prompt)
        step, walks = steps(model, cache), [Walk(prompt + 1, [*tokens], []) for _ in range(3)]
        for turn in range(24):
            fed = some(4, 100 + turn)
            for walk, token, logits in zip(walks, fed, step(fed)[:3], strict=False):
                walk.tokens.append(token)
                walk.logits.append(logits.clone())
    assert_exact(walks, uncached(model, walks))


@each_gate
def test_the_engines_answers_do_not_depend_on_the_cache(gate):
    """Greedy tokens with a cache per row and with one that shares prompts: each is the likeliest of a pass without
    a cache over those before it."""
    model = model_of(gate, block=4, chosen=2)
    prompts, sampling = [some(13, 1), some(2, 2), some(30, 3)], Sampling(max_new_tokens=24, temperature=0.0)
    answers = Engine(model).generate(prompts, sampling)
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.no_grad():
            logits_TV = model.logits(model.hidden(batch_of([[*prompt, *answer.tokens]])))
        assert len(answer.tokens) == 24
        assert answer.tokens == logits_TV.argmax(-1)[len(prompt) - 1 : -1].tolist()


def ignores_the_choice(patch):
    """Every step sees all that is cached, as in the reference's decoding."""
    patch.setattr(
        StepPass, "attend_blocks", lambda self, q, k, v, scale, size, chosen: self.attend(q, k, v, scale)
    )


def misses_its_own_block(patch):
    attend_one_ = kernel.attend_one

    def attend_one(q, k, v, positions, scale, block, chosen):
        earlier = (positions // block * block - 1).clamp(min=0)
        return attend_one_(q, k, v, earlier, scale, block, chosen)

    patch.setattr("unfreeze.models.blocks.step_pass.moba.attend_one", attend_one)


def sees_the_present_block_as_complete(patch):
    """Its summary is among those that compete, though it is always seen."""
    select = kernel.select_one
    patch.setattr(
        "unfreeze.models.blocks.step_pass.moba.select_one",
        lambda gated, own, chosen: select(gated, own + 1, chosen),
    )


def never_writes_a_summary(patch):
    write = Cache.write_summaries

    def prefill_only(self, layer, rows, blocks, size, summary):
        if len(rows) != len(self.lengths) or layer not in self.summaries:
            write(self, layer, rows, blocks, size, summary)

    patch.setattr(Cache, "write_summaries", prefill_only)


FAULTS = ignores_the_choice, misses_its_own_block, sees_the_present_block_as_complete, never_writes_a_summary


@pytest.mark.parametrize("fault", FAULTS)
def test_control_a_fault_of_a_step_is_seen(fault, monkeypatch):
    model = model_of()
    with monkeypatch.context() as patch:
        fault(patch)
        walks = walked(model, launched, rows_of((5, 64), (30, 48)), 2)
    assert apart(walks, uncached(model, walks)) > SEEN


def forgets_summaries(patch):
    patch.setattr(Cache, "_copy_summaries", lambda self, source, rows: None)


@pytest.mark.parametrize("way", [joined, forked])
def test_control_a_row_that_leaves_its_summaries_behind_is_seen(way, monkeypatch):
    model = model_of(block=3, chosen=2)
    with monkeypatch.context() as patch:
        forgets_summaries(patch)
        walks = way(model, launched)
    assert apart(walks, uncached(model, walks)) > SEEN


def test_the_cache_grows_by_one_vector_per_block():
    """Of K's bytes 1 / block; less with a gate of rank r < d."""
    sizes = {}
    for name, part in {"full": {}, "mean": moba(), "low_rank": moba(**GATES["low_rank"])}.items():
        model = built("llama", part or {"at": "layers.*.self_attn", "part": "full"})
        cache = model.new_cache(2, 64)
        with torch.no_grad():
            model.prefill(batch_of([some(20, 1), some(5, 2)]), cache)
        sizes[name] = cache.nbytes
        assert cache.nbytes == 2 * 64 * model.cache_bytes()
    keys = sizes["full"] // 2
    assert sizes["mean"] - sizes["full"] == keys // 8 and sizes["low_rank"] - sizes["full"] == keys // 16


def test_a_row_too_short_for_a_choice_is_recorded(monkeypatch):
    """Of at most chosen · block positions nothing is chosen: the recorded operations of full attention."""
    model, called = model_of(), []
    forward = Attention.forward
    monkeypatch.setattr(Attention, "forward", lambda *of: called.append(1) or forward(*of))
    walks = walked(model, STEPS["recorded"], rows_of((5, 19), (1, 12)))
    assert_exact(walks, uncached(model, walks))
    steps = len(called)
    assert steps == 2 * model.shape.num_layers  # prefill and the packed pass
    walked(model, STEPS["recorded"], rows_of((5, 20), (1, 12)), 7)
    assert len(called) > steps + model.shape.num_layers


def test_bfloat16_steps_choose_as_the_packed_pass():
    """Logits within bf16's rounding at nearly all places; a near tie may choose another block."""
    model = built("llama", moba(), dtype=torch.bfloat16).eval().requires_grad_(False)
    walks = walked(model, launched, rows_of((5, 64), (30, 48)), 2)
    wanted = uncached(model, walks)
    gaps = torch.cat(
        [
            (torch.stack(walk.logits) - logits).abs().amax(1) / logits.abs().max()
            for walk, logits in zip(walks, wanted, strict=True)
        ]
    )
    assert gaps.median() <= 0.02 and gaps.max() > EXACT


def test_shared_and_plain_caches_hold_the_same_summaries():
    model, tokens = model_of(block=4, chosen=2), some(13, 1)
    plain, shared = model.new_cache(1, 24), model.shared_cache((1, 13), (1, 11), routes=False)
    assert isinstance(shared, SharedCache)
    with torch.no_grad():
        for cache in (plain, shared):
            model.prefill(batch_of([tokens]), cache)
            step = launched(model, cache)
            for token in some(10, 2):
                step([token])
    for layer in range(model.shape.num_layers):
        one, two = (cache.read_summaries(layer, 1, 5, 4) for cache in (plain, shared))
        assert one.any() and torch.allclose(one, two, atol=1e-6)
