"""Answers of several turns in a run's step: what is fed is what is trained on, with the sampler's log p.

A scripted engine speaks for the model where turns must be known; the built-in model shows that trainer and
sampler agree over turns.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import unfreeze
from unfreeze.core.errors import ConfigError, StepLeft
from unfreeze.data.rows.asked import asked_from_dict
from unfreeze.data.store.examples import Example
from unfreeze.generate.answer import Completion
from unfreeze.kernels.linear_cross_entropy import Words
from unfreeze.objectives.policy import Settings as Loss
from unfreeze.objectives.policy import policy
from unfreeze.parallel.processes.collectives import ALONE
from unfreeze.rollout.answering import Asked, rewards
from unfreeze.rollout.environment import Environments
from unfreeze.rollout.groups import advantages, rewards_of
from unfreeze.rollout.limits import Limits
from unfreeze.rollout.reward import Graded
from unfreeze.rollout.rollouts import Answers, Rolled, Settings, counted, lines, micro_batches
from unfreeze.rollout.sampled import Sample, Sampled, as_text, of_text
from unfreeze.rollout.talks import Talks, sharing

FILE = Path(__file__).with_name("worlds.py")
HOT, NEW, WINDOW = 1.5, 24, 1024


@pytest.fixture(scope="module")
def speaker():
    model = unfreeze.load(unfreeze.TINY_K2, dtype="float32")
    model.decoder.requires_grad_(False)
    return model


@pytest.fixture(scope="module")
def worlds():
    with Environments(f"{FILE}:Adder", Limits(seconds=30.0), count=2) as environments:
        yield environments


def row(goal=5):
    return asked_from_dict({"prompt": "Calculate.", "goal": goal}, 1)


def asked(*goals):
    return [
        Asked(Example([1, 2], [0.0, 1.0], place + 1), row(goal), (7, place))
        for place, goal in enumerate(goals)
    ]


def call(name="add", number=0, **arguments):
    given = json.dumps(arguments or {"number": number})
    head = "<|tool_calls_section_begin|><|tool_call_begin|>"
    return f"{head}functions.{name}:0<|tool_call_argument_begin|>{given}<|tool_call_end|><|tool_calls_section_end|>"


class Scripted:
    """An engine that says its lines, a list for each call; what it was fed is kept."""

    def __init__(self, speaker, script, stop="end"):
        self.tokenizer, self.script, self.stop = speaker.tokenizer, list(script), stop
        self.fed, self.limits, self.seeds, self.said = [], [], [], []
        (self.end,) = [id for id in self.tokenizer.eos_ids if self.tokenizer.token_text(id) == "<|im_end|>"]

    def generate(self, prompts, sampling, *, max_rows=None, limits=None, experts=False):
        texts = self.script.pop(0)
        self.fed.append([list(prompt) for prompt in prompts for _ in range(sampling.n)])
        self.limits.append([limit for limit in limits for _ in range(sampling.n)])
        self.seeds.append(sampling.seeds)
        done = []
        for place, (text, limit, prompt) in enumerate(zip(texts, self.limits[-1], self.fed[-1], strict=True)):
            tokens = [*self.tokenizer.encode(text, specials=True, continues=True), self.end]
            stop = "length" if len(tokens) > limit else "end"
            tokens = tokens[:limit]
            log_p = [-float(100 * len(self.fed) + 10 * place + i) for i in range(len(tokens))]
            routes = torch.full((len(prompt) + len(tokens) - 1, 1, 1), len(self.fed), dtype=torch.int16)
            self.said.append((tokens, log_p))
            done.append(Completion(tokens, text, stop, log_p, log_p, routes if experts else None))
        return done


def talks(engine, speaker, environments, grade=None, window=WINDOW, **settings):
    chosen = Settings(**{"prompts": 2, "answers": 2, "new_tokens": 400, "temperature": HOT, **settings})
    return Talks(engine, speaker.tokenizer, environments, chosen, window=window, group=ALONE, grade=grade)


def rolled(asked_, every, how, step=1):
    groups = [Answers(each.example, each.row, answers) for each, answers in zip(asked_, every, strict=True)]
    for group in groups:
        group.graded = rewards(how, [(group.row, answer) for answer in group.sampled], ALONE)
    return Rolled(step, groups, advantages(rewards_of([each.rewards() for each in groups])), 1.0, 1.0)


def test_a_signal_leaves_between_two_turns(speaker, worlds):
    engine, signals = Scripted(speaker, [[call(number=2), call(number=3)], ["It is 2.", "It is 3."]]), []
    how = talks(engine, speaker, worlds)
    how._stop = lambda: bool(signals) or bool(signals.append("after the next turn"))
    with pytest.raises(StepLeft):
        how.sample(asked(5), 2)
    assert len(engine.fed) == 1


def test_turns_are_fed_trained_on_and_rewarded(speaker, worlds):
    """Four answers; one ends a turn before the others. Ids fed + ids sampled = ids trained, in order."""
    script = [
        [call(number=2), call(number=5), "No.", call(number=9)],
        [call(number=3), "It is 5.", "Done."],
        ["It is 5."],
    ]
    engine = Scripted(speaker, script)
    how, prompts = talks(engine, speaker, worlds, replay=True), asked(5, 9)
    every = how.sample(prompts, 2)
    assert [[each.stop for each in group] for group in every] == [["end", "end"], ["end", "end"]]
    step = rolled(prompts, every, how)
    assert [group.rewards() for group in step.answers] == [[1.0, 1.0], [0.0, 1.0]]
    first = every[0][0]
    (sample,) = first.fed
    assert [role for role, _ in first.turns] == [
        "user",
        "assistant",
        "tool",
        "assistant",
        "tool",
        "assistant",
    ]
    assert (
        first.turns[0][1] == "Calculate. Reach 5." and first.turns[2][1] == "2" and first.text == "It is 5."
    )
    # the last turn's prompt and what it sampled are the sample; before it stand the other turns, verbatim
    assert sample.ids == [*engine.fed[2][0], *engine.said[7][0]]
    own = [id for id, mine in zip(sample.ids, sample.sampled, strict=True) if mine]
    assert own == first.tokens == [*engine.said[0][0], *engine.said[4][0], *engine.said[7][0]]
    assert sample.log_p == first.log_p == [*engine.said[0][1], *engine.said[4][1], *engine.said[7][1]]
    # routes are those with which an id was read first
    read = [len(engine.fed[turn][place]) + len(engine.said[at][0]) - 1 for turn, place, at in [(0, 0, 0), (1, 0, 4), (2, 0, 7)]]  # fmt: skip
    wanted = [1] * read[0] + [2] * (read[1] - read[0]) + [3] * (read[2] - read[1])
    assert sample.experts.flatten().tolist() == wanted
    # seeds differ by answer and by turn, and depend on nothing else
    assert len({seed for seeds in engine.seeds for seed in seeds}) == 8
    again = Scripted(speaker, script)
    talks(again, speaker, worlds).sample(prompts, 2)
    assert again.seeds == engine.seeds and again.fed == engine.fed
    # the last turns' calls have less room
    assert engine.limits[1][0] == 400 - len(engine.said[0][0])
    # the batch: weight 1 on sampled ids with their log p, one advantage, and nothing on what was told
    (batch,) = micro_batches(step, Settings(2, 2, 400, micro_batch=10_000, every_answer=True))
    starts = [*batch.starts_S.tolist(), batch.num_tokens]
    for place, answer in enumerate(each for group in every for each in group):
        at = [t for t in range(starts[place], starts[place + 1]) if batch.weights_T[t]]
        assert batch.targets_T[at].tolist() == answer.tokens
        assert batch.extras["sampler_log_p"][at].tolist() == answer.log_p
        assert set(batch.extras["advantage"][at].tolist()) == {[0.0, 0.0, -0.5, 0.5][place]}
    (event, written) = counted(step), lines(step, speaker.tokenizer)
    assert event["turns"] == 2.0 and event["faults"] == {}
    assert written[0]["turns"] == first.turns and len(written[0]["pieces"]) == len(first.tokens)


def test_trainer_and_sampler_agree_over_turns(speaker, worlds):
    """The built-in model, hot, made to go on by an environment that answers every turn."""
    prompts = asked(5, 9, 4)

    def read(text, before):
        from unfreeze.data.tokens.tool_calls import Spoken, kimi

        return kimi(call(number=before), before) if before < 2 else Spoken(text)

    how = talks(speaker.engine, speaker, worlds, new_tokens=NEW)
    how._read = read
    step = rolled(prompts, how.sample(prompts, 2), how)
    assert max(len([1 for role, _ in each.turns if role == "tool"]) for g in step.answers for each in g.sampled) == 2  # fmt: skip
    words = Words(speaker.engine.num_ids, HOT)
    for batch in micro_batches(step, Settings(3, 2, NEW, micro_batch=4096, every_answer=True)):
        loss = policy(speaker.decoder.hidden(batch), speaker.decoder.lm_head, batch, Loss(), words=words)
        assert 0 < float(loss.largest["gap_max"]) <= 1e-5


@pytest.mark.parametrize(
    ("text", "fault", "words"),
    [
        (
            call("ad", number=1),
            "unknown tool",
            "error: there is no tool 'ad'; nearest: 'add'; there are: add",
        ),
        (call("add", wrong=1), "wrong arguments", "error: add: missing a required argument"),
        (
            "<|tool_calls_section_begin|>add",
            "unreadable call",
            "error: the section of tool calls has no call",
        ),
    ],
)
def test_a_fault_is_told_to_the_model_and_counted(speaker, worlds, text, fault, words):
    engine = Scripted(speaker, [[text], [call(number=5)], ["Five."]])
    how, prompts = talks(engine, speaker, worlds, answers=1), asked(5)
    step = rolled(prompts, how.sample(prompts, 1), how)
    assert counted(step)["faults"] == {fault: 1} and step.answers[0].rewards() == [1.0]
    assert words in speaker.tokenizer.decode(engine.fed[1][0], skip_specials=False)


def test_turns_tokens_and_the_window_end_an_answer(speaker, worlds):
    several = [[call(number=1)]] * 9
    with Environments(f"{FILE}:Adder", Limits(seconds=30.0), most_turns=3, count=1) as few:
        (answer,) = talks(Scripted(speaker, several), speaker, few).sample(asked(3), 1)[0]
        assert answer.stop == "turns" and answer.graded == Graded(1.0)
        assert [role for role, _ in answer.turns][-2:] == ["assistant", "tool"]
    engine = Scripted(speaker, several)
    (answer,) = talks(engine, speaker, worlds, new_tokens=50).sample(asked(3), 1)[0]
    assert answer.stop == "length" and len(answer.tokens) == 50 and answer.turns[-1][0] == "assistant"
    engine = Scripted(speaker, several)
    talks(engine, speaker, worlds).sample(asked(3), 1)
    prompt = len(engine.fed[0][0])
    engine = Scripted(speaker, several)
    (answer,) = talks(engine, speaker, worlds, window=prompt + 60).sample(asked(3), 1)[0]
    assert answer.stop == "window" and len(answer.fed[0].ids) == prompt + 60
    (none,) = talks(Scripted(speaker, []), speaker, worlds, window=prompt).sample(asked(3), 1)[0]
    assert none.stop == "window" and none.tokens == [] and none.examples([1]) == []


def test_a_reset_that_raises_is_a_named_outcome(speaker):
    with Environments(f"{FILE}:Broken", Limits(seconds=30.0), count=1) as broken:
        how = talks(Scripted(speaker, []), speaker, broken)
        (answer,) = how.sample(asked(3), 1)[0]
        assert answer.stop == "failed" and answer.graded.outcome == "error"
        assert "reset: ValueError: no such level" in answer.graded.message


def test_functions_grade_the_last_turn_beside_or_instead(speaker, worlds):
    def grade(answered):
        return [Graded(0.25 * len(text)) for _, text in answered]

    engine = Scripted(speaker, [[call(number=5)], ["Five"]])
    how, prompts = talks(engine, speaker, worlds, grade), asked(5)
    (worth,) = rewards(how, [(prompts[0].row, how.sample(prompts, 1)[0][0])], ALONE)
    assert worth == Graded(2.0, {"environment": 1.0, "reward": 1.0})
    with Environments(f"{FILE}:Silent", Limits(seconds=30.0), count=1) as silent:
        how = talks(Scripted(speaker, [["Five"]]), speaker, silent, grade)
        assert rewards(how, [(row(), how.sample(prompts, 1)[0][0])], ALONE) == [Graded(1.0)]
        silent.check_reward("my.py")
        with pytest.raises(ConfigError, match="environment Silent has no get_reward, and no reward is given"):
            silent.check_reward("")


def test_a_template_without_tools_is_refused(speaker):
    from unfreeze.data.tokens.tool_calls import reads_calls

    with pytest.raises(ConfigError, match="the chat template has no place for tools"):
        reads_calls("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    with pytest.raises(ConfigError, match="in a form that is not read"):
        reads_calls("{{ tools }}<function=")


def forked(tokens, advantage_rows):
    """A step of one answer in two samples beside one of a single turn."""
    fed = [
        Sample([1, 2, 3, 4, 5], [False, False, True, True, False], [-1.0, -2.0]),
        Sample([1, 6, 7], [False, True, True], [-3.0, -4.0]),
    ]
    answers = [
        Sampled([3, 4, 6, 7], "b", "end", [-1.0, -2.0, -3.0, -4.0], None, fed, [["assistant", "b"]]),
        Sampled(tokens, "a", "end", [-0.5] * len(tokens)),
    ]
    group = Answers(Example([1, 1, 1], [0.0, 0.0, 1.0], 1), row(), answers, [Graded(1.0), Graded(0.0)])
    return Rolled(1, [group], advantages(rewards_of([group.rewards()])), 1.0, 1.0)


@pytest.mark.parametrize("per", ["tokens", "answers"])
def test_all_samples_of_an_answer_share_its_advantage_and_its_tokens(per):
    """Against the sum by hand in float64, over each sampled token of each answer."""
    step = forked([8, 9], None)
    batches = micro_batches(step, Settings(1, 2, 9, per=per, micro_batch=6))
    assert len(batches) > 1
    torch.manual_seed(0)
    head = torch.nn.Linear(4, 12, bias=False, dtype=torch.float64)
    hidden = {id: torch.randn(4, dtype=torch.float64) for id in range(12)}
    total = count = 0.0
    for batch in batches:
        hidden_TD = torch.stack([hidden[int(id)] for id in batch.tokens_T])
        loss = policy(hidden_TD, head, batch, Loss(per=per))
        total, count = total + float(loss.sum.detach()), count + float(loss.count)

    def log_p(before, id):
        return float(torch.log_softmax(head(hidden[before]).detach(), 0)[id])

    pairs = [[(2, 3), (3, 4), (1, 6), (6, 7)], [(1, 8), (8, 9)]]
    wanted = 0.0
    for advantage, answer in zip((0.5, -0.5), pairs, strict=True):
        share = 1 / len(answer) if per == "answers" else 1.0
        wanted -= sum(share * advantage * log_p(*pair) for pair in answer)
    assert total == pytest.approx(wanted, abs=1e-6) and count == (2 if per == "answers" else 6)


def test_answers_come_back_from_json_as_they_were():
    (group,) = forked([8, 9], None).answers
    routes = torch.arange(6, dtype=torch.int16).view(3, 2, 1)
    group.sampled[0].fed[0].experts = routes
    first, second = of_text(json.loads(json.dumps(as_text(group.sampled))))
    assert torch.equal(first.fed[0].experts, routes) and second == group.sampled[1]
    first.fed[0].experts = group.sampled[0].fed[0].experts = None
    assert first == group.sampled[0]


def test_answers_share_a_prefill_only_where_they_are_fed_the_same():
    same, other = ([1, 2], 9, 5), ([1, 3], 9, 6)
    assert sharing([same, same, other, other], 2) == 2 and sharing([same, other, other, same], 2) == 1
    assert sharing([same, same, same], 2) == 1 and sharing([same, ([1, 2], 8, 5)], 2) == 1


class InLockstep:
    """The groups of two processes that share their weights: what process 0 sends, process 1 gets."""

    size, lockstep = 2, True

    def __init__(self, rank, wire):
        self.rank, self.wire = rank, wire

    def on_rank0(self, action):
        return action() if self.rank == 0 else None

    def of_first(self, data):
        if self.rank == 0:
            self.wire.append(data)
            return data
        return self.wire.pop(0)


def test_in_lockstep_the_others_are_fed_what_process_0_is(speaker, worlds):
    script, wire = [[call(number=2), "No."], ["Two."]], []
    engines = [Scripted(speaker, script), Scripted(speaker, script)]
    answers = []
    for rank, environments in enumerate([worlds, None]):
        how = talks(engines[rank], speaker, environments)
        how.group = InLockstep(rank, wire)
        answers.append(how.sample(asked(5, 2), 1))
    assert answers[0] == answers[1] and engines[0].fed == engines[1].fed and not wire
    assert engines[0].seeds == engines[1].seeds and len(answers[1][0][0].turns) == 4
