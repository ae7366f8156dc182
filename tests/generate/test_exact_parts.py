"""Steps of models of other parts: the logits of the packed pass over the same tokens, in and out of batches."""

from __future__ import annotations

import pytest
import torch
from exact import SEEN, STEPS, apart, assert_exact, each_maker, greedy_tokens, rows_of, uncached, walked
from part_case import EXPERTS, LAYERS, built, entry

from unfreeze.generate.engine import Engine
from unfreeze.generate.sampling import Sampling
from unfreeze.kernels.decode_step.program import Program
from unfreeze.models.layer import Layer

# one row goes its own greedy way for 128 steps; beside it random tokens, to 256 positions in one row
ROWS = rows_of((5, 128), (1, 64), (160, 96), greedy=1)
WINDOW = entry("sliding_window", window=100)
MODELS = {
    **{name: ([entry(name)], {}) for name in LAYERS},
    "sliding_window": ([WINDOW], {}),
    "qk_norm": ([entry("qk_norm")], {}),
    "experts, sandwich, window in a layer": (
        [entry("sandwich_norm"), {**WINDOW, "at": "layers.1.self_attn"}],
        EXPERTS,
    ),
    "experts, deep_norm": ([entry("deep_norm"), entry("qk_norm")], {**EXPERTS, "tie_word_embeddings": True}),
}


def model_of(name):
    entries, fields = MODELS[name]
    return built(*entries, **fields).eval().requires_grad_(False)


@each_maker
@pytest.mark.parametrize("name", MODELS)
def test_steps_to_256_tokens_are_the_packed_pass_over_them(name, steps, monkeypatch):
    model, called = model_of(name), []
    monkeypatch.setattr(Program, "call", lambda self, function: called.append(function))
    if steps is not STEPS["recorded"]:
        monkeypatch.undo()
    walks = walked(model, steps, ROWS)
    assert not called  # all is recorded: no block is called in a step
    wanted = uncached(model, walks)
    assert_exact(walks, wanted)
    assert greedy_tokens(walks[0], wanted[0])


@pytest.mark.parametrize("name", ["sandwich_norm", "branch_norm", "post_norm", "deep_norm"])
def test_control_steps_of_the_pre_norm_block_are_seen(name):
    """The same weights in another order: norms before the parts, as far as it has them."""
    model = model_of(name)
    walks = walked(model, STEPS["recorded"], rows_of((5, 16)))
    plain = built(entry("pre_norm")).eval()
    plain.load_state_dict(model.state_dict(), strict=False)
    assert apart(walks, uncached(plain, walks)) > SEEN
    assert all(type(layer) is Layer for layer in plain.layers)


def test_control_a_window_of_one_token_less_is_seen():
    model, other = model_of("sliding_window"), built(entry("sliding_window", window=99)).eval()
    walks = walked(model, STEPS["recorded"], ROWS)
    assert apart(walks, uncached(other, walks)) > SEEN


PROMPTS = [[(7 * place + 13 * prompt) % 89 for place in range(1 + 5 * prompt % 23)] for prompt in range(6)]
N, NEW = 3, 12
SEEDS = tuple(range(100, 100 + N * len(PROMPTS)))
STOP_IDS = frozenset(range(0, 89, 7))  # answers end at different steps


@pytest.mark.parametrize("name", ["sliding_window", "deep_norm", "experts, sandwich, window in a layer"])
def test_answers_that_share_prompts_join_and_leave_are_those_alone(name):
    entries, fields = MODELS[name]
    narrow = [{**each, "window": 7} if "window" in each else each for each in entries]
    model = built(*narrow, **fields).eval().requires_grad_(False)
    engine = Engine(model, stop_ids=STOP_IDS)
    alone = [
        engine.generate([PROMPTS[index // N]], Sampling(max_new_tokens=NEW, temperature=1.0, seeds=(seed,)))[
            0
        ]
        for index, seed in enumerate(SEEDS)
    ]
    assert len({len(done.tokens) for done in alone}) > 3
    sampling = Sampling(max_new_tokens=NEW, temperature=1.0, n=N, seeds=SEEDS)
    for width in (2, 5, 18):
        together = engine.generate(PROMPTS, sampling, max_rows=width)
        assert [done.tokens for done in together] == [done.tokens for done in alone]
        for ours, theirs in zip(together, alone, strict=True):
            torch.testing.assert_close(
                torch.tensor(ours.logprobs), torch.tensor(theirs.logprobs), atol=1e-5, rtol=0
            )
