"""Sampling against transformers' logits warpers (the filtered distribution) and against the distribution
itself (the draw)."""

import pytest
import torch
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from unfreeze.core.draws import uniform
from unfreeze.core.errors import ConfigError, UserError
from unfreeze.generate.sampling import Sampling, choose, draw, keep_likely


def random_logits(rows=64, vocab=97, seed=0, spread=3.0):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize("top_k", [None, 1, 5, 97, 500])
@pytest.mark.parametrize("top_p", [None, 0.05, 0.9, 0.99])
def test_filtered_logits_equal_transformers_warpers(temperature, top_k, top_p):
    logits = random_logits()
    expected = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k:
        expected = TopKLogitsWarper(top_k)(None, expected)
    if top_p:
        expected = TopPLogitsWarper(top_p)(None, expected)
    assert torch.equal(keep_likely(logits / temperature, top_k, top_p), expected)


def test_swapped_order_of_top_p_and_top_k_would_be_seen():
    """Control arm: top-p before top-k is another distribution, and the comparison above tells them apart."""
    logits = random_logits()
    right = TopPLogitsWarper(0.8)(None, TopKLogitsWarper(8)(None, logits))
    wrong = TopKLogitsWarper(8)(None, TopPLogitsWarper(0.8)(None, logits))
    assert not torch.equal(right, wrong)
    assert torch.equal(keep_likely(logits, 8, 0.8), right)


def test_ties_with_the_kth_token_stay_as_in_transformers():
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]])
    assert torch.equal(keep_likely(logits, 2, None), TopKLogitsWarper(2)(None, logits))


def test_draw_inverts_the_cumulative_distribution():
    """On a grid of n equally spaced u the share of each token is its probability to within 1/n: no statistics
    involved."""
    n = 200_000
    logits = keep_likely(random_logits(1, 23, seed=4), 9, None)
    ids = draw(logits.expand(n, -1), (torch.arange(n, dtype=torch.float64) + 0.5) / n)
    share = torch.bincount(ids, minlength=23).double() / n
    assert (share - logits.double().softmax(-1)[0]).abs().max() <= 1.01 / n


def test_draw_returns_no_impossible_token_at_the_ends_of_the_interval():
    logits = torch.full((2, 6), float("-inf"))
    logits[:, 2:4] = torch.tensor([0.3, 1.1])
    assert draw(logits, torch.tensor([0.0, 1.0 - 2**-53], dtype=torch.float64)).tolist() == [2, 3]
    assert draw(logits, torch.ones(2, dtype=torch.float64)).tolist() == [3, 3]  # a rounded-up u


def test_samples_pass_a_chi_square_test_and_a_wrong_temperature_does_not():
    """5,000 draws over 12 tokens: chi² with 11 degrees of freedom lies below 31.3 with probability 0.999."""
    logits, draws = random_logits(1, 12, seed=7, spread=1.0), 5000
    sampling = Sampling(temperature=0.7, seed=3)
    uniforms = [uniform(key, 0) for key in sampling.keys(draws)]
    ids = torch.tensor(choose(logits.expand(draws, -1), sampling, uniforms)[0])
    counts = torch.bincount(ids, minlength=12).double()

    def chi_square(temperature):
        expected = draws * (logits / temperature).double().softmax(-1)[0]
        return float(((counts - expected) ** 2 / expected).sum())

    assert chi_square(0.7) < 31.3
    assert chi_square(0.9) > 31.3  # control arm


def test_random_numbers_are_a_function_of_seed_prompt_answer_and_place():
    def numbers(seed, prompts=3, n=4):
        keys = Sampling(temperature=1.0, seed=seed, n=n).keys(prompts)
        return torch.tensor([[uniform(key, place) for place in range(50)] for key in keys])

    whole = numbers(5)
    assert torch.equal(numbers(5, prompts=2), whole[:8])  # a prompt more changes nothing
    assert torch.equal(numbers(5, n=2), whole.view(3, 4, 50)[:, :2].reshape(6, 50))  # nor an answer more
    assert len({*whole.flatten().tolist()}) == 600 and not torch.isin(numbers(6), whole).any()
    # all 600 are uniform: the largest gap to the diagonal is below Kolmogorov's 0.999 quantile
    distance = (whole.flatten().sort().values - (torch.arange(600) + 0.5) / 600).abs().max()
    assert distance < 1.95 / 600**0.5


def test_a_list_of_seeds_is_a_seed_for_each_answer():
    keys = Sampling(seeds=(7, 8, 7, 2**64 - 1), n=2).keys(2)
    assert keys[0] == keys[2] != keys[1] and keys[1] == Sampling(seed=8).keys(1)[0]
    with pytest.raises(ConfigError, match=r"3 seeds for 4 answers \(2 prompts, n = 2\)"):
        Sampling(seeds=(1, 2, 3), n=2).keys(2)


def test_without_a_seed_each_call_has_its_own():
    assert Sampling().keys(1) != Sampling().keys(1)


def test_greedy_takes_the_largest():
    logits = random_logits(5, 30)
    assert choose(logits, Sampling(), [])[0] == logits.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_numbers_are_refused(temperature):
    logits = random_logits(2, 10)
    logits[1, 4] = float("nan")
    with pytest.raises(UserError, match="not finite"):
        choose(logits, Sampling(temperature=temperature), [0.5, 0.5])


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1.0},
        {"temperature": float("inf")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"max_new_tokens": 0},
        {"stop": ("",)},
        {"stop": "END"},
        {"temperature": float("nan")},
        {"seed": 2**64},
        {"seed": -(2**63) - 1},
        {"seeds": (1, 2**64)},
        {"n": 0},
    ],
)
def test_values_out_of_range_are_refused_by_name(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Sampling(**wrong)
