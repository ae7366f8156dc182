"""Presets: the settings that compute what another trainer computes by default under the word "grpo".

Versions: TRL 1.16.0, verl 0.9.1; NeMo-RL, slime, SkyRL, OpenRLHF, prime-rl and nanochat as of August 2026.
Each equals numbers made by that trainer's own functions (tests/objectives/test_like.py), tinker's by its
published formula. What a preset does not set: learning rate, group size, sampling.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

from unfreeze.objectives.policy import Settings
from unfreeze.objectives.ratios import Bounds
from unfreeze.rollout.groups import Advantage

ReferenceName = Literal["none", "begun", "sampler"]


class Preset(NamedTuple):
    """Advantage and loss of another trainer.

    reference  of Settings.beta: the model as it began, the policy as it sampled, or none
    differs    where that trainer computes something else
    """

    advantage: Advantage
    policy: Settings
    reference: ReferenceName
    differs: str


UNBOUNDED = Bounds(low=math.inf, high=math.inf)
BY_SPREAD = Advantage("mean", "group", eps=1e-6)
CENTRED = Advantage("mean", "none")

LIKE: Mapping[str, Preset] = {
    "trl": Preset(
        Advantage("mean", "group", eps=1e-4),
        Settings("ppo", against="trainer"),
        "none",
        "with vLLM it also drops answers that the trainer finds over 3 times as likely as the sampler did",
    ),
    "verl": Preset(
        BY_SPREAD,
        Settings("ppo", Bounds(dual=3.0), "trainer"),
        "none",
        "it limits the logarithm of a ratio to ±20",
    ),
    "nemo": Preset(
        Advantage("leave-one-out", "group", eps=1e-6),
        Settings("ppo", against="trainer", kl="k3+", beta=0.01),
        "begun",
        "it limits the KL of a token to 10",
    ),
    "slime": Preset(
        BY_SPREAD,
        Settings("ppo", against="trainer", per="answers"),
        "none",
        "with --calculate-per-token-loss it divides by tokens",
    ),
    "skyrl": Preset(
        BY_SPREAD,
        Settings("ppo", against="trainer", kl="k3", beta=0.001),
        "begun",
        "its KL is a mean over answers, its loss one over tokens; here both are over tokens",
    ),
    "openrlhf": Preset(
        Advantage("mean", "group", eps=1e-9),
        Settings("ppo", against="trainer", kl="k3", beta=0.001),
        "begun",
        "as its flags group_norm, kl.use_loss with k3 and 0.001 set it; else the KL is part of the reward",
    ),
    "prime-rl": Preset(
        CENTRED,
        Settings("dppo", kl="k2", beta=0.002),
        "sampler",
        "it trains on rollouts that are a step old; 0.001 · log² r there is 0.002 · k2 here",
    ),
    "tinker": Preset(
        CENTRED,
        Settings("ppo", UNBOUNDED, per="sum"),
        "none",
        "a sum that is not divided, so clipping of the gradient norm acts on another scale",
    ),
    "nanochat": Preset(
        CENTRED,
        Settings("reinforce"),
        "none",
        "it divides each pass by its own tokens, and the step by its passes",
    ),
}
"""Name of --like -> preset."""
