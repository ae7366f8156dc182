"""The published step law, at the points its authors and the issue name, and what it says outside its fit."""

import pytest

from unfreeze.core.errors import ConfigError
from unfreeze.train.step_law import advise


def test_the_two_published_points():
    advice = advise(26e6, 1e9)
    assert advice.learning_rate == pytest.approx(5.4e-3, rel=0.01)
    assert advice.tokens_per_step == pytest.approx(80e3, rel=0.01)
    assert advice.chinchilla == 520e6 and advice.steps == 12_519


def test_inside_the_fit_nothing_is_said_and_outside_each_size_is():
    assert advise(1e9, 10e9).outside == ()
    assert len(advise(26e6, 10e9).outside) == 1 and len(advise(1e9, 1e9).outside) == 1
    both = advise(70e9, 1e12).outside
    assert both[0] == "70 B parameters are outside the fit (60 M to 1.1 B)"
    assert both[1] == "1 T tokens are outside the fit (2 B to 100 B)"


def test_more_parameters_want_a_lower_rate_and_more_tokens_a_higher_one():
    assert advise(2e8, 1e10).learning_rate > advise(4e8, 1e10).learning_rate
    assert advise(2e8, 2e10).learning_rate > advise(2e8, 1e10).learning_rate
    assert advise(4e8, 1e10).tokens_per_step == advise(2e8, 1e10).tokens_per_step


@pytest.mark.parametrize("sizes", [(0, 1e9), (1e9, 0), (1e19, 1e9)])
def test_no_size_of_a_model_is_refused(sizes):
    with pytest.raises(ConfigError, match="expected 1 to"):
        advise(*sizes)
