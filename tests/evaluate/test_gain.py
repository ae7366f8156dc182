"""The share of a gain that a merge keeps, and when there is none."""

import math

import pytest
import torch

from unfreeze.evaluate.gain import Gain, error_of


def test_a_share_and_its_words():
    gain = Gain(base=5.0, adapter=1.0, merged=2.42, tokens=100, rows=192)
    assert gain.share == pytest.approx(0.645) and gain.survives == "64.5 % of what was learned survives"
    assert gain.words() == "held-out loss on 192 rows: base 5.000, with adapter 1.000, merged 2.420"
    assert gain.words("f.jsonl").startswith("loss on f.jsonl, 192 rows: base")
    above = Gain(base=5.0, adapter=1.0, merged=0.5, tokens=100, rows=10).survives
    assert above.startswith("112.5 % of what was learned survives (more than the adapter gained")
    assert Gain(5.0, 1.0, 0.99, 100, 10).survives == "100.2 % of what was learned survives"
    assert Gain(5.0, 1.0, 1.0001, 100, 10).survives == "99.9 % of what was learned survives"  # not 100
    assert Gain(5.0, 1.0, 5.5, 100, 10).survives == "nothing of what was learned survives"


@pytest.mark.parametrize(
    ("gain", "why"),
    [
        (Gain(1.0, 1.2, 1.1, 100, 10), "no better than the base"),
        (Gain(1.0, 1.0, 1.0, 100, 10), "no better than the base"),
        (Gain(1.0, 0.9, 1.0, 100, 1), "1 row is too few"),
        (Gain(1.0, 0.9, 1.0, 100, 10, error=0.044), "may be chance"),
        (Gain(1.0, 0.9, math.nan, 100, 10), "not a finite number"),
    ],
)
def test_without_a_gain_there_is_no_share(gain, why):
    assert gain.share is None and why in gain.undefined and why in gain.survives


def test_control_arm_a_gain_beyond_its_error_has_a_share():
    """Of 10 rows 2.32 standard errors are as improbable as two of a normal distribution."""
    assert Gain(1.0, 0.9, 1.0, 100, 10, error=0.042).share == pytest.approx(0.0)


def test_the_error_is_that_of_a_mean_and_of_a_ratio():
    d_N = torch.randn(20, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mean = float(d_N.std(correction=1)) / 20**0.5
    assert error_of(d_N.tolist(), [1.0] * 20) == pytest.approx(mean, rel=1e-12)
    # of rows of many lengths: about the spread of the ratio over resampled rows
    generator = torch.Generator().manual_seed(1)
    w_N = torch.randint(1, 30, (400,), generator=generator).double()
    d_N = 0.3 * w_N + w_N.sqrt() * torch.randn(400, dtype=torch.float64, generator=generator)
    picks = torch.randint(0, 400, (2000, 400), generator=generator)
    spread = float((d_N[picks].sum(1) / w_N[picks].sum(1)).std())
    assert error_of(d_N.tolist(), w_N.tolist()) == pytest.approx(spread, rel=0.06)
    assert math.isinf(error_of([1.0], [1.0]))


def test_of_few_rows_a_gain_must_be_larger_to_be_no_chance():
    """2.5 standard errors: beyond two of many rows, within Student's t of three."""
    losses = {"base": 2.0, "adapter": 1.97, "merged": 1.99, "tokens": 100, "error": 0.012}
    assert Gain(**losses, rows=200).share is not None
    assert Gain(**losses, rows=3).share is None
