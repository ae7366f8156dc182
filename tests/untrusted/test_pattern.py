"""Patterns from files: re's own, those that could take forever left out."""

import re
import time

import pytest

from unfreeze.core.errors import ConfigError
from unfreeze.untrusted.pattern import pattern

NAME = "model.layers.11.mlp.experts.127.gate_proj" + "a" * 40


@pytest.mark.parametrize(
    "text",
    [
        "lm_head",
        ".*self_attn.*",
        r"model\.layers\.[0-9]+\.mlp\..*",
        "(q_proj|k_proj)",
        r".*\.experts\.\d+\.(up|gate)_proj",
        "x{2,3}",
    ],
)
def test_what_models_and_adapters_use_is_taken(text):
    assert pattern(text, "x", ConfigError) == re.compile(text)


@pytest.mark.parametrize(
    "text",
    [
        "(a+)+$",
        "(a|aa)*$",
        "(a?a?)*$",
        "((a*)?)*$",
        "a?" * 40 + "a" * 40,
        ".*a" * 10 + "$",
        "(?:x+y)+z",
        "(?=(a+)+$)",
        "(a{1,9}){1,9}{1,9}$",
    ],
)
def test_what_could_take_forever_is_not(text):
    with pytest.raises(ConfigError, match=r"x: .*(could take forever|not a regular expression)"):
        pattern(text, "x", ConfigError)


def test_control_such_a_pattern_does_take_long():
    started = time.perf_counter()
    re.match("(a+)+$", "a" * 18 + "!")
    short = time.perf_counter() - started
    re.match("(a+)+$", "a" * 23 + "!")
    assert time.perf_counter() - started - short > 3 * short  # five letters more, 32 times as long


def test_the_most_that_is_allowed_ends_soon():
    started = time.perf_counter()
    pattern(".*a.*a.*a.*b$", "x", ConfigError).match(NAME)
    assert time.perf_counter() - started < 5


@pytest.mark.parametrize("text", ["[", "(", "*", 3, None, "a" * 1001, "(" * 500, r"\9", "a{99999999999999}"])
def test_what_is_no_pattern(text):
    with pytest.raises(ConfigError, match="x: "):
        pattern(text, "x", ConfigError)
