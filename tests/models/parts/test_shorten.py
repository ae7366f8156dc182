"""Shortened layers: against the formula in loops over documents, cached decoding at all remainders, the future."""

import json
import shlex
import tomllib
from pathlib import Path

import assembled as cases
import pytest
import torch

from unfreeze import models
from unfreeze.core.batch import Batch
from unfreeze.core.errors import CheckpointError, ConfigError
from unfreeze.generate.recorded import Recorded
from unfreeze.kernels import token_pool
from unfreeze.models import decoder
from unfreeze.models.blocks.cache import Cache
from unfreeze.models.queries import scalable
from unfreeze.parallel.plan.counts import counts

INSIDE = {
    "full": [],
    "sliding": [{"at": "layers.*.self_attn", "part": "sliding_window", "window": 3}],
    "gated delta": [{"at": "layers.*.self_attn", "part": "gated_delta"}],
    "moba": [{"at": "layers.*.self_attn", "part": "moba", "block": 4, "chosen": 1}],
    "sandwich": [{"at": "layers.*", "part": "sandwich_norm"}],
}
each_inside = pytest.mark.parametrize("inside", INSIDE.values(), ids=INSIDE)
each_by = pytest.mark.parametrize("by", [2, 3, 5])
PROMPTS = (1, 2, 3, 4, 5, 6, 17)
EXPERTS = {
    "base_model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
}


def made(by, inside=(), at="layers.1-2", **fields):
    parts = [*inside, {"at": at, "part": "shorten", "by": by}]
    return cases.made(parts, **{"num_hidden_layers": 4, **fields})


def in_loops(model, plain, x_TD, lengths, by):
    """The formula for layer 1, a document at a time; the layer itself is that of an unshortened model."""
    y_TD, begin = x_TD.clone(), 0
    for length in lengths:
        whole = length // by
        if whole:
            means = [x_TD[begin + j * by : begin + (j + 1) * by].mean(0) for j in range(whole)]
            p_ED = torch.stack(means)
            places = torch.tensor([(j + 1) * by - 1 for j in range(whole)])
            tokens = torch.zeros(whole, dtype=torch.int64)
            batch = Batch(tokens, tokens, torch.ones(whole), places, torch.tensor([0]))
            change = plain.layers[1](p_ED, plain.packed_pass(batch)) - p_ED
            for t in range(by - 1, length):
                y_TD[begin + t] += change[(t + 1) // by - 1]
        begin += length
    return y_TD


@each_inside
@pytest.mark.parametrize("by", [1, 2, 3, 7])
def test_it_is_the_formula_document_by_document(by, inside):
    model, plain = (
        made(by, inside, dtype=torch.float64).to(torch.float64),
        cases.made(inside, num_hidden_layers=4, dtype=torch.float64).to(torch.float64),
    )
    assert model.state_dict().keys() == plain.state_dict().keys()  # the layer's own names
    plain.load_state_dict(model.state_dict())
    batch = cases.packed(cases.documents())
    x_TD = torch.randn(batch.num_tokens, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        got = model.layers[1](x_TD, model.packed_pass(batch))
        assert (got - in_loops(model, plain, x_TD, cases.LENGTHS, by)).abs().max() <= 1e-9


@each_inside
def test_one_token_a_group_is_the_layer_itself(inside):
    model, plain = made(1, inside), cases.made(inside, num_hidden_layers=4)
    plain.load_state_dict(model.state_dict())
    batch = cases.packed(cases.documents())
    with torch.no_grad():
        assert (model.hidden(batch) - plain.hidden(batch)).abs().max() <= 1e-5
        assert (made(2, inside).hidden(batch) - plain.hidden(batch)).abs().max() > 1e-2


@each_inside
@each_by
def test_cached_decoding_is_the_packed_pass_at_every_remainder(by, inside):
    """Rows of seven lengths: most steps complete a group in some of them only."""
    assert cases.cached_difference(made(by, inside), PROMPTS, 30) <= 1e-4


@pytest.mark.parametrize("prompt", [1, 2, 4])
def test_a_prompt_shorter_than_a_group_leaves_nothing(prompt):
    """Its row held another document before, with a state."""
    for inside in INSIDE.values():
        model = made(5, inside)
        rows = cases.documents([30, 30])
        cache = model.new_cache(2, 30)
        with torch.no_grad():
            whole = model.hidden(cases.packed(rows)).view(2, 30, -1)
            model.prefill(cases.packed([rows[1], rows[1][:12]]), cache)
            model.prefill(cases.packed([rows[0][:prompt]]), cache, rows=[0])
            for place in range(prompt, 18):
                new = torch.tensor([rows[0][place], rows[1][12 + place - prompt]])
                got = model.step(new, cache)
                assert (got[0] - whole[0, place]).abs().max() <= 1e-4
                assert (got[1] - whole[1, 12 + place - prompt]).abs().max() <= 1e-4


@each_inside
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "copied"])
@pytest.mark.parametrize("prompt", [1, 4, 6, 7, 13])
def test_answers_that_share_a_prompt_go_on_in_its_open_group(prompt, shared, inside):
    """13 tokens are more than the groups of 20: a layer's store of groups is copied whole."""
    model = made(3, inside)
    rows = cases.documents([20, 20, 20])
    rows = [rows[0][:prompt] + row[prompt:] for row in rows]
    cache = model.shared_cache((1, 13), (3, 20), routes=False) if shared else model.new_cache(3, 20)
    cache.keep([0])
    with torch.no_grad():
        whole = model.hidden(cases.packed(rows)).view(3, 20, -1)
        model.prefill(cases.packed([rows[0][:prompt]]), cache)
        cache.more(2)
        cache.fork(0, [0, 1, 2], prompt)
        for place in range(prompt, 20):
            got = model.step(torch.tensor([row[place] for row in rows]), cache)
            assert (got - whole[:, place]).abs().max() <= 1e-4


def test_groups_beyond_the_longest_document_take_no_more_room():
    """A group of 2³¹ tokens: nothing of the layer reaches the outputs, and no tensor has its size."""
    groups = token_pool.Groups.build((0, 40), 47, 2**31 - 1, "cpu")
    sizes = [groups.members.rows_Eb.shape[1], groups.readers.rows_Eb.shape[1], groups.open_Sb.shape[1]]
    assert sizes == [40, 40, 40]
    model, fewer = made(2**31 - 1), made(30)
    fewer.load_state_dict(model.state_dict())
    assert cases.cached_difference(model, (1, 5), 20) <= 1e-4
    with torch.no_grad():
        batch = cases.packed(cases.documents([20]))
        assert torch.equal(model.hidden(batch), fewer.hidden(batch))


def test_rows_that_leave_take_their_groups_with_them():
    model = made(3, INSIDE["gated delta"])
    rows = cases.documents([20, 20, 20])
    cache = model.new_cache(3, 20)
    with torch.no_grad():
        whole = model.hidden(cases.packed(rows)).view(3, 20, -1)
        model.prefill(cases.packed([rows[0][:4], rows[1][:5], rows[2][:6]]), cache)
        order = cache.keep([1, 2])
        for _ in range(9):
            places = list(cache.lengths)
            new = torch.tensor([rows[row][place] for row, place in zip(order, places, strict=True)])
            wanted = torch.stack([whole[row, place] for row, place in zip(order, places, strict=True)])
            assert (model.step(new, cache) - wanted).abs().max() <= 1e-4


def test_control_cached_decoding_that_forgets_the_open_group_differs():
    model = made(3)

    def forgetful(cache, new):
        for state in cache.states.values():
            state.zero_()
        return model.step(new, cache)

    assert cases.cached_difference(model, PROMPTS, 30, forgetful) > 1e-2


def test_control_rows_that_read_the_keys_of_the_first_ones_differ(monkeypatch):
    """A step of some rows reads those rows of the cache, not as many first ones."""
    real = Cache.shortened
    monkeypatch.setattr(Cache, "shortened", lambda self, by, stepping=None: real(self, by))
    assert cases.cached_difference(made(3), PROMPTS, 30) > 1e-2


@each_inside
def test_a_step_of_fixed_width_is_the_packed_pass(inside):
    model = made(3, inside)

    def within(cache, new):
        got = model.step_within(new, torch.tensor(cache.lengths), cache, 30)
        cache.lengths = [length + 1 for length in cache.lengths]
        return got

    assert cases.cached_difference(model, PROMPTS, 30, within) <= 1e-4


def test_a_recorded_step_runs_a_shortened_layer_as_in_training():
    model = made(3)
    rows = cases.documents([30, 30])
    cache = model.new_cache(2, 30)
    with torch.no_grad():
        whole = model.logits(model.hidden(cases.packed(rows))).view(2, 30, -1)
        model.prefill(cases.packed([rows[0][:4], rows[1][:11]]), cache)
        step = Recorded(model, cache)
        for place in range(4, 23):
            got = step([rows[0][place], rows[1][place + 7]])
            wanted = torch.stack([whole[0, place], whole[1, place + 7]])
            assert (got - wanted).abs().max() <= 1e-4


@each_inside
@each_by
def test_no_gradient_comes_from_the_future_or_another_document(by, inside):
    model, batch = made(by, inside), cases.packed(cases.documents())
    for end in range(91, 91 + by):  # the last output at every remainder
        of_tokens = cases.seen(model, batch, slice(41, end))
        assert of_tokens[41:end].all()
        assert not of_tokens[:41].any() and not of_tokens[end:].any()
    assert cases.seen(model, cases.joined(batch), slice(41, 91))[:41].any()  # control: one document


@each_by
def test_control_a_group_that_is_read_before_it_is_complete_is_seen(by, monkeypatch):
    """An un-shifted pool: tokens receive the change of their own group."""

    def unshifted(self, x_TD, by, layer):
        groups = self.groups(by)
        p_ED = token_pool.pool(x_TD, groups)
        self.shorter.setdefault(by, self._shortened(groups, by))
        return x_TD + groups.members.spread(layer(p_ED, self.shorter[by]) - p_ED)

    monkeypatch.setattr(
        models.blocks.passes.PackedPass, "shorten", lambda self, name, *parts: unshifted(self, *parts)
    )
    batch = cases.packed(cases.documents())
    assert max(float(cases.seen(made(by), batch, slice(41, end))[end]) for end in range(91, 91 + by)) > 1e-3


@pytest.mark.parametrize("limit", [None, 50])
@each_inside
def test_recomputation_changes_no_bit(inside, limit, monkeypatch):
    """Whole, and in chunks of documents, whose groups are their own."""
    model, batch = made(3, inside), cases.packed(cases.documents())
    whole = cases.gradients(model, batch, models.RECOMPUTE["nothing"])
    assert {name for name, _ in model.named_parameters()} - whole.keys() == {"lm_head.weight"}
    if limit:
        monkeypatch.setattr(decoder, "chunk_tokens", lambda *_: limit)
    wanted = cases.gradients(model, batch, models.RECOMPUTE["layers"])
    for name, gradient in whole.items():
        scale = float(gradient.abs().max())
        torch.testing.assert_close(wanted[name], gradient, rtol=1e-4, atol=1e-5 * scale, msg=name)
    if limit is None:
        assert all(torch.equal(wanted[name], whole[name]) for name in whole)
    for policy in ("selective", "elementwise"):
        own = cases.gradients(model, batch, models.RECOMPUTE[policy])
        assert [name for name in wanted if not torch.equal(own[name], wanted[name])] == [], policy


def test_backward_of_means_and_their_way_back_is_autograds():
    groups = token_pool.Groups.build((0, 7, 8, 14), 20, 3, "cpu")
    x_TD = torch.randn(20, 2, dtype=torch.float64, requires_grad=True)
    y_ED = torch.randn(groups.count, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: token_pool.pool(x, groups), x_TD)
    assert torch.autograd.gradcheck(lambda y: token_pool.carry(y, groups), y_ED)
    assert groups.starts == (0, 2, 3, 5) and groups.last_E.tolist() == [2, 5, 7, 10, 13, 16, 19]
    reads = [-1, -1, 0, 0, 0, 1, 1, -1, -1, -1, 3, 3, 3, 4, -1, -1, 5, 5, 5, 6]
    assert groups.readers.of_T.tolist() == reads


def test_the_cache_has_a_position_per_group_and_is_as_large_as_counted():
    model, plain = made(3), cases.made([], num_hidden_layers=4)
    cache = model.new_cache(2, 31)
    with torch.no_grad():
        model.prefill(cases.packed(cases.documents([10, 4])), cache)
    assert [cache.layers[layer][0].shape[1] for layer in range(4)] == [31, 11, 11, 31]
    # two of four layers have a third of the positions: keys and values of 2 heads of 8, in float32
    assert plain.cache_bytes() == 4 * 4 * 32 and model.cache_bytes() == 2 * 4 * 32 + 2 * 4 * 11
    assert model.state_bytes() == 2 * 2 * 32 * 4
    assert sum(state[0].nbytes for state in cache.states.values()) == model.state_bytes()


def test_experts_inside_are_chosen_for_groups_and_can_be_given_again():
    model = made(3, **EXPERTS)
    rows, prompts = cases.documents([18, 18]), (2, 7)
    cache = model.new_cache(2, 18, routes=True)
    with torch.no_grad():
        first = model.prefill(cases.packed([rows[0][:2], rows[1][:7]]), cache)
        steps = [
            model.step(torch.tensor([rows[0][2 + place], rows[1][7 + place]]), cache) for place in range(11)
        ]
    assert first.isfinite().all()
    routes = torch.cat([cache.route(0), cache.route(1)])
    given = cases.packed([row[: length + 11] for row, length in zip(rows, prompts, strict=True)])
    with torch.no_grad():
        wanted = model.hidden(given)
        given.extras["routes"] = routes.long()  # type: ignore[index]
        assert (model.hidden(given) - wanted).abs().max() <= 1e-4
        assert (steps[-1] - wanted[[12, 30]]).abs().max() <= 1e-4
        # control: other experts for the groups give another result
        given.extras["routes"] = (routes.long() + 1) % 4  # type: ignore[index]
        assert (model.hidden(given) - wanted).abs().max() > 1e-2


@pytest.mark.parametrize("by", [1, 2, 4])
def test_what_it_holds_for_backward_is_what_it_counts(by, attention_runs):
    attention_runs("reference")
    model = cases.made([{"at": "layers.*", "part": "shorten", "by": by}], hidden_size=128, head_dim=32)
    counted = model.layers[0].bytes(torch.float32, "cpu").held
    assert cases.held(model, model.layers[0]) == pytest.approx(counted, rel=0.03)


def test_the_plan_counts_a_share_of_the_layer():
    model, plain = counts(made(2)), counts(cases.made([], num_hidden_layers=4))
    assert model.dense == plain.dense * 3 // 4  # two of four layers half
    assert model.pairs(100) == plain.pairs(100) * (2 + 2 / 4) / 4
    windowed = counts(made(2, INSIDE["sliding"]))
    assert dict(windowed.windows).keys() == {3, 6}


STUDY = Path(__file__).resolve().parents[3] / "examples" / "lab" / "shorten.toml"


def test_the_arms_of_the_study_cost_as_much_as_four_layers():
    """But for `deep`, which has fewer steps. Within 3 %: attention of shortened layers costs less."""
    costs = {}
    for arm in tomllib.loads(STUDY.read_text(encoding="utf-8"))["arms"]:
        words = shlex.split(arm["flags"])
        flags = dict(zip(words[::2], words[1::2], strict=True))
        sizes = {"hidden_size": 128, "intermediate_size": 384, "head_dim": 32, "vocab_size": 1024}
        parts = [json.loads(flags.get("--shape.parts", "null"))]
        layers = int(flags["--shape.num-hidden-layers"])
        fields = {**cases.SIZES, **sizes, "num_key_value_heads": 4, "num_hidden_layers": layers}
        config = {**fields, "parts": [part for part in parts if part]}
        counted = counts(models.build(models.shape(config), dtype=torch.float32))
        costs[arm["name"]] = 2 * counted.active + counted.pairs(128)
    assert costs["by2"] == pytest.approx(costs["shallow"], rel=0.03)
    assert costs["by3"] == pytest.approx(costs["shallow"], rel=0.03)
    assert costs["deep"] > 1.3 * costs["shallow"]  # control


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([{"at": "layers.0", "part": "shorten"}] * 2, "shorten takes the place of a layer with one residual"),
        (
            [{"at": "layers.0", "part": "shorten", "by": 0}],
            "shorten.by is 0; it must be a whole number from 1",
        ),
        ([{"at": "layers.0.self_attn", "part": "shorten"}], "shorten cannot stand at"),
    ],
)
def test_what_cannot_be_shortened_is_refused_in_one_line(parts, message):
    with pytest.raises(CheckpointError, match=message) as caught:
        cases.made(parts)
    assert "\n" not in caught.value.message and len(caught.value.message) <= 140 and caught.value.next


def test_a_limit_of_its_scores_is_refused():
    with pytest.raises(ConfigError, match="layer 2 is ShortenedLayer"):
        scalable(made(2))
