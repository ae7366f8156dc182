"""The source of a run with rewards: what is sampled, graded, left out, packed, and continued after a stop."""

from dataclasses import replace

import pytest
import torch

import unfreeze
from unfreeze.core.errors import ConfigError
from unfreeze.data.packing.order import Shuffled
from unfreeze.data.rows.row import Conversation
from unfreeze.data.store.examples import Example, Examples
from unfreeze.kernels.linear_cross_entropy import Words
from unfreeze.objectives.policy import Settings as Loss
from unfreeze.objectives.policy import policy
from unfreeze.parallel.processes.collectives import ALONE
from unfreeze.rollout.answering import InOneTurn
from unfreeze.rollout.groups import Advantage
from unfreeze.rollout.reward import Graded
from unfreeze.rollout.rollouts import SILENT_STEPS, Rollouts, Settings, counted, micro_batches

P, G, NEW, HOT = 3, 4, 8, 1.5
QUESTIONS = ("Name a river.", "What is two and two?", "Who are you?", "Where is Rome?", "Is it late?")


@pytest.fixture(scope="module")
def speaker():
    model = unfreeze.load(unfreeze.TINY_K2, dtype="float32")
    model.decoder.requires_grad_(False)
    return model


@pytest.fixture(scope="module")
def examples(speaker):
    prompts = [speaker.encode_chat(question) for question in QUESTIONS]
    return Examples.of(
        [
            Example([*ids, *[ids[-1]] * NEW], [0.0] * len(ids) + [1.0] * NEW, row)
            for row, ids in enumerate(prompts)
        ]
    )


def by_letters(answers):
    """More letters e, more reward."""
    return [Graded(float(text.count("e"))) for _, text in answers]


def source(
    speaker, examples, grade=by_letters, start=None, group=ALONE, tell=lambda rolled: None, **settings
):
    chosen = Settings(
        **{
            "prompts": P,
            "answers": G,
            "new_tokens": NEW,
            "score_cut": True,
            "resample": 0,
            "temperature": HOT,
            "seed": 5,
        }
        | settings
    )
    return Rollouts(
        InOneTurn(speaker.engine, grade, chosen),
        examples,
        lambda example: Conversation([{"role": "user", "content": QUESTIONS[example.row]}], row=example.row),
        chosen,
        order=Shuffled(len(examples), 0),
        group=group,
        tell=tell,
        start=start,
    )


def test_the_trainer_gives_the_samplers_log_probabilities(speaker, examples):
    """So prompts, answers, log-probabilities and advantages stand at their places in the batch."""
    rolled = []
    batches, _ = next(source(speaker, examples, tell=rolled.append, micro_batch=32))
    assert len(batches) > 1
    words = Words(speaker.engine.num_ids, HOT)
    for batch in batches:
        loss = policy(speaker.decoder.hidden(batch), speaker.decoder.lm_head, batch, Loss(), words=words)
        assert 0 < float(loss.largest["gap_max"]) <= 1e-5
        wrong = policy(speaker.decoder.hidden(batch), speaker.decoder.lm_head, batch, Loss(), words=Words())
        assert float(wrong.largest["gap_max"]) > 0.01  # control: another temperature
    (step,) = rolled
    trained = {
        (tuple(answer.tokens), round(advantage, 6))
        for group, row in zip(step.answers, step.groups.advantage_PG.tolist(), strict=True)
        for answer, advantage in zip(group.sampled, row, strict=True)
        if advantage
    }
    packed = set()
    for batch in batches:
        ends = [*batch.starts_S.tolist()[1:], batch.num_tokens]
        for start, end in zip(batch.starts_S.tolist(), ends, strict=True):
            at = [t for t in range(start, end) if batch.weights_T[t]]
            values = {round(float(batch.extras["advantage"][t]), 6) for t in at}
            assert len(values) == 1
            packed.add((tuple(batch.targets_T[at].tolist()), values.pop()))
    assert packed == trained
    tokens = sum(len(answer.tokens) for group in step.answers for answer in group.sampled)
    assert sum(batch.count for batch in batches) == tokens  # also those whose advantage is 0


def test_a_step_depends_on_its_cursor_alone(speaker, examples):
    steps = source(speaker, examples)
    told = [next(steps) for _ in range(3)]
    again = source(speaker, examples, start=told[0][1])
    for batches, cursor in told[1:]:
        others, theirs = next(again)
        assert theirs == cursor and len(others) == len(batches)
        for ours, other in zip(batches, others, strict=True):
            assert torch.equal(ours.tokens_T, other.tokens_T)
            assert all(torch.equal(ours.extras[name], other.extras[name]) for name in ours.extras)
    fresh, _ = next(source(speaker, examples))
    assert not torch.equal(fresh[0].tokens_T, told[1][0][0].tokens_T)  # control: another step


def test_every_prompt_comes_once_a_pass(speaker, examples):
    rolled = []
    steps = source(speaker, examples, tell=rolled.append)
    for _ in range(5):  # 15 prompts: three passes over five
        next(steps)
    rows = [group.example.row for step in rolled for group in step.answers]
    assert [sorted(rows[first : first + 5]) for first in (0, 5, 10)] == [list(range(5))] * 3
    assert steps.len_steps(3) == 5
    assert source(speaker, examples, updates=2).len_steps(3) == 10


@pytest.mark.parametrize("updates", [1, 2])
def test_every_rollout_draws_anew(speaker, examples, updates):
    """The same two prompts at the same places and weights: no group of answers comes twice in seven."""
    rolled, two = [], Examples.of([examples[0], examples[1]])
    steps = source(speaker, two, tell=rolled.append, prompts=2, updates=updates)
    for _ in range(7 * updates):
        next(steps)
    groups = [
        tuple(tuple(answer.tokens) for answer in each.sampled) for step in rolled for each in step.answers
    ]
    assert len(rolled) == 7 and len(set(groups)) == len(groups) == 14


def test_answers_of_a_group_differ_and_have_their_own_reward(speaker, examples):
    rolled = []
    next(source(speaker, examples, tell=rolled.append))
    for group in rolled[0].answers:
        assert len({answer.text for answer in group.sampled}) > 1
        assert group.rewards() == [float(answer.text.count("e")) for answer in group.sampled]


def test_groups_without_a_signal_make_room_for_others(speaker, examples):
    """Rows 0 and 1 always get the same reward."""

    def grade(answers):
        return [
            Graded(0.0 if row.row < 2 else float(text.count("e") + len(text) % 3)) for row, text in answers
        ]

    rolled = []
    next(source(speaker, examples, grade, tell=rolled.append, prompts=4, resample=9))
    (step,) = rolled
    assert len(step.answers) > 4 and int(step.groups.signal_P.sum()) >= 4
    assert counted(step)["groups"] == len(step.answers)
    rolled.clear()
    next(source(speaker, examples, grade, tell=rolled.append, prompts=4))
    assert len(rolled[0].answers) == 4  # without resampling


def test_a_run_without_any_signal_stops_and_names_the_next_step(speaker, examples):
    steps = source(speaker, examples, lambda answers: [Graded(0.0) for _ in answers])
    for _ in range(SILENT_STEPS - 1):
        batches, _ = next(steps)
        assert all(not batch.extras["advantage"].any() for batch in batches)
    with pytest.raises(
        ConfigError, match=r"no group of the first 3 steps .*\(all 0 in the last 3 groups\)"
    ) as raised:
        next(steps)
    assert "unfreeze sft" in raised.value.next
    steps = source(speaker, examples, lambda answers: [Graded(1.0) for _ in answers])
    with pytest.raises(ConfigError, match="all 1 in") as raised:
        [next(steps) for _ in range(SILENT_STEPS)]
    assert "harder prompts" in raised.value.next
    # most answers here are cut
    steps = source(speaker, examples, lambda answers: [Graded(0.0) for _ in answers], score_cut=False)
    with pytest.raises(ConfigError, match=r"\d+ answers cut") as raised:
        [next(steps) for _ in range(SILENT_STEPS)]
    assert "--max-new-tokens" in raised.value.next
    # once there was a signal, steps without one are no reason to stop
    constant = []
    steps = source(
        speaker,
        examples,
        lambda answers: by_letters(answers) if not constant else [Graded(1.0) for _ in answers],
    )
    next(steps)
    constant.append(True)
    for _ in range(SILENT_STEPS + 1):
        next(steps)


def test_cut_answers_are_left_out_or_graded(speaker, examples):
    rolled = []
    next(source(speaker, examples, tell=rolled.append, score_cut=False, temperature=1.0))
    (step,) = rolled
    cut = [answer.stop == "length" for group in step.answers for answer in group.sampled]
    left = [each.outcome == "cut" for group in step.answers for each in group.graded]
    assert cut == left and any(cut) and not all(cut)
    assert torch.equal(step.groups.trained_PG.flatten(), ~torch.tensor(cut))
    assert counted(step)["outcomes"] == {"ok": cut.count(False), "cut": cut.count(True)}
    rolled.clear()
    next(source(speaker, examples, tell=rolled.append))
    assert all(each.outcome == "ok" for group in rolled[0].answers for each in group.graded)


def test_rewards_that_fail_are_left_out_and_too_many_stop_the_run(speaker, examples):
    def failing(share):
        def grade(answers):
            return [
                Graded(None, outcome="error", message="ZeroDivisionError")
                if i < share * len(answers)
                else each
                for i, each in enumerate(by_letters(answers))
            ]

        return grade

    rolled = []
    next(source(speaker, examples, failing(0.1), tell=rolled.append))
    assert not rolled[0].groups.trained_PG.flatten()[:2].any()
    with pytest.raises(
        ConfigError, match=r"6 of 12 answers have no reward \(6 error\), more than 20%.*ZeroDiv"
    ):
        next(source(speaker, examples, failing(0.5)))


def test_a_step_whose_grading_was_given_up_is_refused_without_other_prompts(speaker, examples):
    calls = []

    def grade(answers):
        calls.append(len(answers))
        slow = Graded(None, outcome="timeout", message="no answer within 10 s")
        return [slow, slow, slow, *[Graded(None, outcome="skipped", message="not waited for")] * (P * G - 3)]

    with pytest.raises(ConfigError, match=r"12 of 12 .*\(3 timeout, 9 skipped\).*no answer within 10 s"):
        next(source(speaker, examples, grade, resample=5))
    assert calls == [P * G]


def test_the_greedy_baseline_is_the_greedy_answers_reward(speaker, examples):
    rolled = []
    next(source(speaker, examples, tell=rolled.append, advantage=Advantage("greedy")))
    (step,) = rolled
    for group, row in zip(step.answers, step.groups.advantage_PG.tolist(), strict=True):
        (alone,) = speaker.engine.generate(
            [list(group.example.tokens[: group.example.num_tokens - NEW])], sampling_of(0)
        )
        wanted = float(alone.text.count("e"))
        assert len(group.sampled) == G and group.greedy.reward == wanted
        assert row == [reward - wanted for reward in group.rewards()]


def sampling_of(temperature):
    from unfreeze.generate.sampling import Sampling

    return Sampling(NEW, temperature=temperature)


def test_chosen_experts_travel_with_their_tokens(speaker, examples):
    rolled = []
    batches, _ = next(source(speaker, examples, tell=rolled.append, replay=True))
    layers = len(speaker.decoder.moe_layers())
    for batch in batches:
        routes = batch.extras["routes"]
        assert routes.shape[:2] == (batch.num_tokens, layers)
        last = torch.tensor([*batch.starts_S.tolist()[1:], batch.num_tokens]) - 1
        unknown = (routes < 0).all(-1).all(-1)
        assert torch.equal(unknown.nonzero()[:, 0], last)  # the engine never read an answer's last token


def test_the_divisor_of_each_answer(speaker, examples):
    rolled = []
    next(source(speaker, examples, tell=rolled.append))
    for per, divisor in (("answers", P * G), ("constant", P * G)):
        settings = Settings(P, G, NEW, per=per, micro_batch=48)
        assert sum(batch.count for batch in micro_batches(rolled[0], settings)) == divisor


@pytest.mark.parametrize("passes", [2, 3, 5, P * G + 4])
def test_the_training_passes_are_a_multiple_of_the_processes(speaker, examples, passes):
    """And their sum is the same: what comes again to fill up has no supervised token, so no KL either."""
    rolled = []
    next(source(speaker, examples, tell=rolled.append))
    settings = Settings(P, G, NEW, micro_batch=10_000, every_answer=True)
    alone = micro_batches(rolled[0], settings)
    dealt = micro_batches(rolled[0], replace(settings, passes=passes))
    assert len(alone) == 1 and len(dealt) % passes == 0

    def total(batches):
        return sum(float((batch.extras["advantage"] * batch.weights_T).sum()) for batch in batches)

    def absolute(batches):
        return sum(float((batch.extras["advantage"].abs() * batch.weights_T).sum()) for batch in batches)

    assert total(dealt) == pytest.approx(total(alone)) and absolute(dealt) == pytest.approx(absolute(alone))
    assert sum(batch.count for batch in dealt) == sum(batch.count for batch in alone)
    assert sum(int(batch.weights_T.sum()) for batch in dealt) == int(alone[0].weights_T.sum())


def test_with_a_kl_answers_without_an_advantage_are_trained_on_too(speaker, examples):
    """The distance to the model as it began is a term of every token, whatever its reward."""
    rolled = []
    next(source(speaker, examples, lambda answers: [Graded(1.0) for _ in answers], tell=rolled.append))
    alone, every = (
        micro_batches(rolled[0], Settings(P, G, NEW, every_answer=every)) for every in (False, True)
    )
    tokens = sum(len(answer.tokens) for group in rolled[0].answers for answer in group.sampled)
    assert sum(int(batch.weights_T.sum()) for batch in every) == tokens
    assert sum(int(batch.weights_T.sum()) for batch in alone) < tokens
    assert sum(batch.count for batch in alone) == sum(batch.count for batch in every) == tokens


def test_a_step_of_cut_answers_alone_has_no_gradient(speaker, examples):
    """Nor a KL: it keeps one answer, for a pass, without a supervised token."""
    rolled = []
    steps = source(speaker, examples, tell=rolled.append, score_cut=False, new_tokens=1, every_answer=True)
    batches, _ = next(steps)
    assert not rolled[0].groups.trained_PG.any() and len(batches) == 1
    assert not batches[0].weights_T.any() and batches[0].count == 1


def test_cut_answers_that_are_left_out_are_not_graded(speaker, examples):
    texts, rolled = [], []

    def grade(answers):
        texts.extend(text for _, text in answers)
        return by_letters(answers)

    next(source(speaker, examples, grade, tell=rolled.append, score_cut=False, temperature=1.0))
    whole = [each.text for group in rolled[0].answers for each in group.sampled if each.stop != "length"]
    assert texts == whole and len(whole) < P * G


def test_the_answers_of_a_refused_step_can_be_read(speaker, examples):
    rolled = []
    steps = source(speaker, examples, lambda answers: [Graded(0.0) for _ in answers], tell=rolled.append)
    for _ in range(SILENT_STEPS - 1):
        next(steps)
    with pytest.raises(ConfigError):
        next(steps)
    assert [each.step for each in rolled] == [1, 2, 3]
