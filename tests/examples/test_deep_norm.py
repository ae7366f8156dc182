"""A small twin of examples/lab/deep_norm.py: 24 layers for some seconds; 100 layers nightly."""

import importlib.util
from pathlib import Path

import pytest

FILE = Path(__file__).resolve().parents[2] / "examples" / "lab" / "deep_norm.py"


@pytest.fixture(scope="module")
def study():
    spec = importlib.util.spec_from_file_location("deep_norm", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_24_layers_train_with_deep_norm_and_not_behind_norms(study):
    deep, post = (
        study.trained(part, 0, layers=24, steps=30, length=16) for part in ("deep_norm", "post_norm")
    )
    unigram = deep["more"]["unigram"]
    assert deep["value"] < unigram - 0.5 and post["value"] > unigram
    assert post["more"]["first_gradient"] > 10 * deep["more"]["first_gradient"]


@pytest.mark.nightly  # a minute each
@pytest.mark.parametrize("seed", range(3))
def test_100_layers_train_with_deep_norm_and_not_behind_norms(study, seed):
    deep, post = (study.trained(part, seed, steps=60) for part in ("deep_norm", "post_norm"))
    unigram = deep["more"]["unigram"]
    assert deep["value"] < unigram - 1 and post["value"] > unigram - 0.1
    assert post["more"]["first_gradient"] > 1e5 * deep["more"]["first_gradient"]


def test_the_chains_entropies(study):
    """Of three next tokens, of which two may be one; and a stationary share that the chain keeps."""
    entropy, unigram = study.entropies(study.chain_VV())
    assert 0.9 < entropy < 1.0987 and entropy < unigram < 3.4658
