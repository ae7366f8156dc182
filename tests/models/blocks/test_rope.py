"""Rotary tables against transformers' own initialisers and against float64, up to 131,072 positions."""

import math

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from unfreeze.core.errors import CheckpointError
from unfreeze.kernels.rotary import rotary
from unfreeze.models.blocks.rope import rope_from_config

POSITIONS = torch.tensor([0, 1, 7, 4095, 4096, 32768, 65537, 131071, 131072])
CASES = {
    "default": ({"rope_type": "default", "rope_theta": 500000.0}, 128),
    "linear": ({"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}, 64),
    "llama3": (
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_theta": 500000.0,
        },
        128,
    ),
    "yarn": (
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "rope_theta": 1e6},
        128,
    ),
    "yarn-kimi": (
        {
            "rope_type": "yarn",
            "factor": 64.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "rope_theta": 50000.0,
        },
        64,
    ),
    "yarn-gpt-oss": (
        {
            "rope_type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
            "rope_theta": 150000.0,
        },
        64,
    ),
    "llama3-no-ramp": (
        {
            "rope_type": "llama3",
            "factor": 16.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_theta": 500000.0,
        },
        128,
    ),
    "longrope": (
        {
            "rope_type": "longrope",
            "short_factor": [1.0 + 0.03 * i for i in range(48)],
            "long_factor": [1.0 + 1.3 * i for i in range(48)],
            "original_max_position_embeddings": 4096,
            "rope_theta": 10000.0,
        },
        96,
    ),
    "proportional": ({"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}, 128),
}


def llama(parameters: dict, width: int) -> transformers.LlamaConfig:
    return transformers.LlamaConfig(
        hidden_size=2 * width,
        num_attention_heads=2,
        head_dim=width,
        max_position_embeddings=131072,
        rope_parameters=dict(parameters),
    )


def both(name: str):
    """(ours, their inverse frequencies, their factor)."""
    parameters, width = CASES[name]
    config = llama(parameters, width)
    ours = rope_from_config(config.to_dict(), width)
    if name == "default":
        return ours, 1.0 / parameters["rope_theta"] ** (torch.arange(0, width, 2).float() / width), 1.0
    return ours, *ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, "cpu")


@pytest.mark.parametrize("name", CASES)
def test_tables_have_the_bits_of_transformers_at_every_position(name):
    """Theirs are computed in float32 (a power, a quotient, a ramp). The same bits, so that equality has no length
    at which it ends: an angle of 131,072 radians would be off by 0.016 where a frequency is off by one bit."""
    rope, theirs, factor = both(name)
    assert rope.attention_factor == pytest.approx(factor, rel=1e-12)
    angle = POSITIONS[:, None].float() * theirs
    short = torch.ones_like(POSITIONS)
    cos, sin = rope.tables(POSITIONS, short)
    assert torch.equal(cos, angle.cos() * rope.attention_factor)
    assert torch.equal(sin, angle.sin() * rope.attention_factor)
    if rope.long is not None:
        parameters, width = CASES[name]
        config = llama(parameters, width)
        longer, _ = ROPE_INIT_FUNCTIONS["longrope"](config, "cpu", seq_len=5000)
        cos, _ = rope.tables(POSITIONS, short * 5000)
        assert torch.equal(cos, (POSITIONS[:, None].float() * longer).cos() * rope.attention_factor)


@pytest.mark.parametrize("name", CASES)
def test_tables_are_what_the_formula_says(name):
    """In double precision: float32 is off by up to 8 roundings, 2^-21 relative, and so is an angle."""
    rope, _, factor = both(name)
    exact = torch.tensor(rope.inverse_frequency, dtype=torch.float64)
    angle = POSITIONS.double()[:, None] * exact
    cos, sin = rope.tables(POSITIONS, torch.ones_like(POSITIONS))
    for ours, true in ((cos, angle.cos()), (sin, angle.sin())):
        assert ((ours / factor - true).abs() <= angle * 2**-20 + 2**-22).all()


def test_backwards_is_the_inverse_rotation():
    for name in ("default", "longrope"):
        rope = both(name)[0]
        cos, sin = rope.tables(POSITIONS)
        other_cos, other_sin = rope.backwards().tables(POSITIONS)
        assert torch.equal(other_cos, cos) and torch.equal(other_sin, -sin)


@pytest.mark.parametrize("wrong", [{"rope_theta": 10001.0}, {"factor": 4.001}])
def test_the_comparison_sees_another_theta_or_factor(wrong):
    parameters, width = CASES["linear"]
    changed = rope_from_config({"rope_parameters": parameters | wrong}, width)
    theirs = both("linear")[1].double()
    assert not torch.allclose(
        torch.tensor(changed.inverse_frequency, dtype=torch.float64), theirs, rtol=2**-21, atol=0
    )


def test_a_rotation_depends_on_the_distance_alone_in_both_pairings():
    """<R_m q, R_n k> is a function of m - n, and keeps lengths: the property rotary embeddings are for (Su et
    al. 2021), in fp32."""
    rope = rope_from_config({"rope_theta": 10000.0}, 16)
    q, k = torch.randn(2, 1, 1, 16, generator=torch.Generator().manual_seed(0)).unbind(0)
    for pairing in ("halves", "adjacent"):

        def score(m: int, n: int, pairing=pairing) -> float:
            at_m, at_n = (rope.tables(torch.tensor([position])) for position in (m, n))
            return float((rotary(q[None, 0], *at_m, pairing) * rotary(k[None, 0], *at_n, pairing)).sum())

        assert (
            score(3, 1) == pytest.approx(score(503, 501), abs=1e-3) and abs(score(3, 1) - score(3, 2)) > 1e-2
        )
        assert score(5, 5) == pytest.approx(float((q * k).sum()), abs=1e-4)


def test_adjacent_pairs_are_the_complex_product_of_deepseek():
    """Oracle: (x0 + i x1) e^{i angle} on neighbouring elements, as DeepSeek's published code does it; laid
    out as halves here."""
    rope = rope_from_config({"rope_theta": 10000.0}, 8)
    x = torch.randn(5, 2, 8, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(5)
    turn = torch.polar(torch.ones(5, 4), positions[:, None] * torch.tensor(rope.inverse_frequency))
    rotated = torch.view_as_complex(x.unflatten(-1, (4, 2))) * turn[:, None]
    torch.testing.assert_close(
        rotary(x, *rope.tables(positions), "adjacent"), torch.cat((rotated.real, rotated.imag), -1)
    )


def test_an_unknown_scaling_is_refused_by_name():
    with pytest.raises(CheckpointError, match="rope type 'dynamic' is not known"):
        rope_from_config({"rope_theta": 1e4, "rope_scaling": {"type": "dynamic", "factor": math.e}}, 8)


def test_a_number_of_rotations_without_a_logarithm_is_refused_by_name():
    """Found by the fuzzer: 5e-324 rotations underflow, and their dimension is infinite."""
    parameters = {"rope_type": "yarn", "factor": 4.0, "beta_slow": 5e-324, "rope_theta": 1e4}
    config = {"max_position_embeddings": 4096, "rope_theta": 1e4, "rope_parameters": parameters}
    with pytest.raises(CheckpointError, match=r"beta_slow 5e-324.*give no rotation"):
        rope_from_config(config, 64)
