"""Two models that sample as one: equal, token for token, to the product of their probabilities over the whole
text, computed anew at each step."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from unfreeze.adapters import attach, without_adapters
from unfreeze.config.lora import LoraConfig
from unfreeze.core.draws import uniform
from unfreeze.generate.engine import Engine, batch_of
from unfreeze.generate.joint import Joint, joint_engine
from unfreeze.generate.sampling import Sampling, choose

PROMPTS = [[3, 17, 42, 8, 60, 11, 5], [70, 2], list(range(20, 51))]
WORDS = 83  # of 89 rows


def uncached(student, teacher, gamma, prompts, sampling):
    """The definition, with nothing kept from step to step."""
    sequences, keys = [list(prompt) for prompt in prompts], sampling.keys(len(prompts))
    for place in range(sampling.max_new_tokens):
        rows = []
        for sequence in sequences:
            own, said = (m.logits(m.hidden(batch_of([sequence])))[-1, :WORDS] for m in (student, teacher))
            rows.append((said.softmax(-1) * own.softmax(-1) ** gamma).log())
        ids, _ = choose(torch.stack(rows), sampling, [uniform(key, place) for key in keys])
        for sequence, token in zip(sequences, ids, strict=True):
            sequence.append(token)
    return [sequence[len(prompt) :] for sequence, prompt in zip(sequences, prompts, strict=True)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_cached_equals_the_product_computed_anew(build, temperature):
    """A teacher of another width and kind; rows that end leave both caches (stop_ids)."""
    student, teacher = build("gqa"), build("mla-yarn", hidden_size=64)
    sampling = Sampling(max_new_tokens=16, temperature=temperature, seed=0)
    expected = uncached(student, teacher, 0.7, PROMPTS, sampling)
    joint = Joint(student, teacher, words=WORDS, gamma=0.7)
    answers = [answer.tokens for answer in joint_engine(joint).generate(PROMPTS, sampling)]
    assert answers == expected
    stop = expected[1][3]  # one row ends early; the others go on as before
    ended = joint_engine(joint, stop_ids=frozenset({stop})).generate(PROMPTS, sampling)
    for answer, whole in zip(ended, expected, strict=True):
        cut = whole.index(stop) + 1 if stop in whole else len(whole)
        assert answer.tokens == whole[:cut]


def test_gamma_0_is_the_teacher_and_1_is_not(build):
    student, teacher = build("gqa"), build("gqa-qk-norm")
    sampling = Sampling(max_new_tokens=24)
    alone = [answer.tokens for answer in Engine(teacher).generate(PROMPTS, sampling)]
    said = [
        [
            a.tokens
            for a in joint_engine(Joint(student, teacher, words=89, gamma=g)).generate(PROMPTS, sampling)
        ]
        for g in (0.0, 1.0)
    ]
    assert said[0] == alone != said[1]


def test_the_teacher_may_be_the_students_own_base(build):
    student, base = build("gqa-qk-norm"), build("gqa-qk-norm")
    for site in attach(student, LoraConfig(rank=4), seed=0):
        for parameter in site.adapter.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
    sampling = Sampling(max_new_tokens=12, temperature=1.0, seed=1)
    two = joint_engine(Joint(student, base, words=WORDS))
    one = joint_engine(Joint(student, student, words=WORDS, around=partial(without_adapters, student)))
    assert two.generate(PROMPTS, sampling) == one.generate(PROMPTS, sampling)
    control = joint_engine(Joint(student, student, words=WORDS))  # adapters left on
    assert two.generate(PROMPTS, sampling) != control.generate(PROMPTS, sampling)
