"""examples/rl_loop.py learns what its reward asks for; where rewards tell nothing, it does not."""

import os
import random
import runpy
from contextlib import nullcontext
from pathlib import Path
from statistics import mean

import pytest

from unfreeze.generate.answer import Completion

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "rl_loop.py"
STEPS = 10


def rewards(out, **settings):
    """The mean reward of each step, of a short run from the same seed."""
    loop = runpy.run_path(str(SCRIPT))
    given = {"prompts": 4, "answers": 6, "max_new_tokens": 12, "steps": STEPS, "learning_rate": 5e-3}
    return loop["main"](loop["Config"](out=str(out), **given | settings))


@pytest.mark.parametrize("shuffled", [False, True])
def test_the_reward_rises_and_with_shuffled_rewards_it_does_not(tmp_path, shuffled, monkeypatch):
    monkeypatch.setitem(os.environ, "UNFREEZE_KERNELS", "records")
    found = rewards(tmp_path, shuffle=shuffled)
    risen = mean(found[-3:]) - mean(found[:3])
    assert len(found) == STEPS and all(0 <= reward <= 1 for reward in found)
    assert (risen > 0.25) is not shuffled, found


class Fixed:
    """An engine whose answers follow from the seed alone."""

    class model:
        looking = staticmethod(nullcontext)

    def generate(self, prompts, sampling):
        draw = random.Random(sampling.seed)
        return [
            Completion([draw.randrange(9) for _ in range(5)], draw.choice("ab"), "end")
            for _ in range(len(prompts) * sampling.n)
        ]


def test_rollouts_go_on_from_their_cursor_and_have_one_advantage_per_answer():
    loop = runpy.run_path(str(SCRIPT))

    def rollouts(start):
        asked = [[10 + i] * (1 + i) for i in range(9)]
        return loop["Rollouts"](Fixed(), asked, lambda text: text == "a", loop["Config"](), start)

    unbroken = rollouts(None)
    steps = [next(unbroken) for _ in range(4)]
    (again,), cursor = next(rollouts(steps[2][1]))
    (batch,), expected = steps[3]
    assert cursor == expected == {"step": 4} and again.tokens_T.equal(batch.tokens_T)
    assert again.extras["advantage"].equal(batch.extras["advantage"])
    assert not steps[2][0][0].tokens_T.equal(batch.tokens_T)  # control arm: another step, other rollouts
    assert batch.weights_T.sum() == 6 * 8 * 5 and len(batch.lengths()) == 6 * 8
    # of a group the advantages cancel, and each answer's tokens share one
    each = batch.extras["advantage"][batch.supervised()].view(6, 8, 5)
    assert each.sum(1).abs().max() < 1e-4 and (each == each[:, :, :1]).all() and each.abs().max() > 0.5


def test_it_stays_flat():
    assert len(SCRIPT.read_text(encoding="utf-8").splitlines()) <= 200
