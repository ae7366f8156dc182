"""`unfreeze grpo` from end to end on packed experts: rewards in processes, held-out prompts, resuming."""

import json
import os
import re
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parent))
from of_letters import longer, shorter, sometimes
from runs import Stopped, adapter, of_kind, stopping_at

import unfreeze
from unfreeze import cli
from unfreeze.config.grpo import Config
from unfreeze.config.parse import from_keywords
from unfreeze.core.errors import ConfigError, UserError
from unfreeze.job.rewarded import Rewarding
from unfreeze.objectives.policy import Settings as Loss
from unfreeze.objectives.ratios import Bounds, Correction

REWARD = '''
def reward(prompt, completion, letter="e"):
    """More of a letter."""
    return {"letters": completion.count(letter), "length": -0.01 * len(completion)}
'''
WORDS = {
    "steps": 4,
    "prompts_per_step": 3,
    "answers": 4,
    "max_new_tokens": 8,
    "rollout.cut": "score",
    "rank": 2,
    "samples": 0,
    "dtype": "float32",
    "learning_rate": 5e-3,
    "grading.processes": 1,
    "quiet": True,
}


def rows(count: int, first: int = 0) -> list[dict]:
    return [{"prompt": f"What is {n}?", "letter": "aeiou"[n % 5]} for n in range(first, first + count)]


@pytest.fixture
def my(tmp_path) -> Path:
    path = tmp_path / "my.py"
    path.write_text(REWARD)
    return path


@pytest.fixture
def grpo(my, tmp_path, two_layers):
    def run(out="run", **fields):
        words = {"model": two_layers, "data": rows(9), "reward": str(my), "out": tmp_path / out}
        return unfreeze.grpo(**{**words, **WORDS, **fields})

    return run


def test_a_run_writes_its_rollouts_and_resumes_to_the_bit(grpo):
    fields = {"steps": 3, "save.every": 1}
    whole = grpo("whole", **fields)
    events = of_kind(whole, "rollout")
    assert [event["step"] for event in events] == [1, 2, 3]
    assert all(event["answers"] >= 12 and event["parts"].keys() == {"letters", "length"} for event in events)
    assert all(event["outcomes"] == {"ok": event["answers"]} for event in events)
    assert all(event["gap_max"] <= 1e-5 for event in of_kind(whole, "train"))
    assert any(tensor.any() for name, tensor in adapter(whole).items() if "lora_B" in name)

    with pytest.raises(Stopped):
        grpo("parts", **fields, on_step=[stopping_at(2)])  # before the second save
    parts = grpo("parts", **fields)
    assert all(torch.equal(ours, adapter(parts)[name]) for name, ours in adapter(whole).items())
    numbers = ("reward", "parts", "tokens", "signal", "cut")
    again = {event["step"]: event for event in of_kind(parts, "rollout")}
    assert all(again[event["step"]][name] == event[name] for event in events for name in numbers)
    other = grpo("other", steps=3, seed=1)  # control
    assert any(not torch.equal(ours, adapter(other)[name]) for name, ours in adapter(whole).items())


UPDATES = {
    "default": {"updates": 3},
    "trainer": {"updates": 2, "like": "skyrl"},
    "kl": {
        "updates": 2,
        "loss": "reinforce",
        "correct": "tis",
        "beta": 0.1,
        "baseline": "ema",
        "rollout.resample": 2,
        "curriculum": "adaptive",
    },
}


@pytest.mark.parametrize("name", UPDATES)
def test_a_run_that_stops_between_two_updates_goes_on_to_the_bit(grpo, name):
    """It is stopped after each update of the first rollout but the last."""
    updates = UPDATES[name]["updates"]
    fields = {"steps": updates + 1, "save.every": 1, "save.keep": 9, **UPDATES[name]}
    whole = grpo("whole", **fields)
    for step in range(2, updates + 1):  # a step is saved after its hooks
        with pytest.raises(Stopped):
            grpo("parts", **fields, on_step=[stopping_at(step)])
    parts = grpo("parts", **fields)
    assert all(torch.equal(ours, adapter(parts)[name]) for name, ours in adapter(whole).items())
    for kind in ("train", "rollout"):
        assert untimed(of_kind(whole, kind)) == untimed(of_kind(parts, kind))

    # a rollout is one event and one file; trainer and sampler are compared before the policy moves
    begins = [1, updates + 1]
    assert [event["step"] for event in of_kind(whole, "rollout")] == begins
    files = [path.name for path in sorted((whole.path / "rollouts").glob("*.gz"))]
    assert files == [f"step-{step:06d}.jsonl.gz" for step in begins]
    train = of_kind(whole, "train")
    assert [event["step"] for event in train if "gap_max" in event] == begins
    for event in train:
        if event["step"] in begins:
            assert event["gap_max"] <= 1e-5 and event["ratio_max"] == pytest.approx(1, abs=1e-5)
        else:
            assert abs(event["ratio_max"] - 1) > 1e-3
    # what is kept goes with the rollout
    saved = {path.name: load_file(path / "tensors.safetensors") for path in (whole.path / "state").iterdir()}
    left = {
        name: len({key.split(".")[1] for key in tensors if key.startswith("kept.")})
        for name, tensors in saved.items()
    }
    assert left == {f"step-{step:06d}": (-step) % updates for step in range(1, updates + 2)}


def untimed(events: list[dict]) -> list[dict]:
    timed = ("time", "seconds", "grading_seconds", "peak_bytes", "allocated_bytes")
    return [{name: value for name, value in event.items() if name not in timed} for event in events]


def test_a_save_without_the_rest_of_its_rollout_is_refused(grpo, tmp_path):
    fields = {"steps": 2, "save.every": 1, "updates": 2}
    with pytest.raises(Stopped):
        grpo(**fields, on_step=[stopping_at(2)])
    path = tmp_path / "run" / "state" / "step-000001" / "tensors.safetensors"
    save_file({name: values for name, values in load_file(path).items() if "kept" not in name}, path)
    with pytest.raises(UserError, match="the save lacks a part of a rollout: it has 0 of 1 updates"):
        grpo(**fields)


def test_held_out_prompts_are_measured_with_the_same_draws(grpo, tmp_path):
    held = tmp_path / "held.jsonl"
    held.write_text("".join(json.dumps(row) + "\n" for row in rows(5, 100)))
    run = grpo(validation=str(held), **{"watch.validate_every": 2, "learning_rate": 1e-12})
    evals = of_kind(run, "eval")
    assert [event["step"] for event in evals] == [0, 2, 4]
    assert len({event["reward"] for event in evals}) == 1  # nothing was learnt, and the draws are the same
    assert all(event["reward_low"] <= event["reward"] <= event["reward_high"] for event in evals)
    assert all(event["loss"] == -event["reward"] for event in evals)
    assert all(event["pass_1"] <= event["pass_2"] <= event["pass_4"] == event["solved"] for event in evals)
    assert 0 < evals[0]["pass_1_low"] <= evals[0]["pass_1"] <= evals[0]["pass_1_high"] <= 1
    assert evals[-1]["changes"][0]["change"] == 0
    assert "was trained on rewards of answers to 9 prompts of" in repr(run)
    assert f"held-out reward {evals[0]['reward']:.2f} →" in repr(run)


def test_a_function_in_python_and_an_objective_with_a_reference(grpo):
    run = grpo(reward=longer, **{"policy.beta": 0.1, "baseline": "leave-one-out", "scale": "group"})
    train = of_kind(run, "train")
    assert train[0]["kl"] == pytest.approx(0, abs=1e-6) and train[-1]["kl"] > 0


def test_learnt_is_what_held_out_rewards_prove(grpo, tmp_path):
    """A reward of the opposite sign on held-out rows, on the same run, proves the opposite."""
    held = tmp_path / "held.jsonl"
    held.write_text("".join(json.dumps(row) + "\n" for row in rows(8, 100)))
    fields = {"reward": shorter, "validation": str(held), "steps": 12, "learning_rate": 2e-2}
    run = grpo(**fields, answers=8)
    assert "learnt from rewards of answers to 9 prompts of" in repr(run)
    first, last = of_kind(run, "eval")[0], of_kind(run, "eval")[-1]
    assert last["reward_low"] > first["reward_high"]


def test_a_changed_reward_is_refused(grpo, my):
    with pytest.raises(Stopped):
        grpo(**{"save.every": 1}, on_step=[stopping_at(2)])
    my.write_text(REWARD.replace("0.01", "0.02"))
    with pytest.raises(ConfigError, match=r"cannot resume: .*my\.py has changed since this run began"):
        grpo(**{"save.every": 1})


def graders() -> list[int]:
    """Processes of this one that hold a reward."""
    found = []
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            parent = re.search(r"PPid:\s+(\d+)", status.read_text())
            command = (status.parent / "cmdline").read_text()
        except OSError:
            continue
        if parent and int(parent[1]) == os.getpid() and "unfreeze.rollout" in command:
            found.append(int(status.parent.name))
    return found


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="no /proc")
def test_graders_end_with_the_run(grpo):
    """In a notebook the process goes on."""
    seen = []
    grpo(on_step=[lambda state, result: seen.append(graders())], steps=1)
    assert seen[0] and not graders()
    with pytest.raises(Stopped):
        grpo("other", on_step=[stopping_at(1)])
    assert not graders()


def test_all_answers_train_where_there_is_a_kl(grpo):
    """The sampled tokens of a step without any advantage, except cut ones: none here."""
    fields = {"reward": sometimes, "steps": 1, "prompts_per_step": 9, "rollout.resample": 0}
    run = grpo(**fields, **{"policy.beta": 0.1})
    (rollout,), (train,) = of_kind(run, "rollout"), of_kind(run, "train")
    assert train["supervised_tokens"] == rollout["tokens"]
    less = grpo("less", **fields)
    assert of_kind(less, "train")[0]["supervised_tokens"] < rollout["tokens"]


def test_a_sampler_that_computes_something_else_is_a_warning(grpo, monkeypatch):
    """Planted: log-probabilities that are .001 off."""
    from unfreeze.rollout.sampled import Sampled

    def warned(run):
        return [event["message"] for event in of_kind(run, "warning") if "sampler" in event["message"]]

    assert not warned(grpo("right", steps=2))
    of = Sampled.of

    def off(done):
        done.sampled_logprobs[0] += 1e-3
        return of(done)

    monkeypatch.setattr(Sampled, "of", staticmethod(off))
    (message,) = warned(grpo("wrong", steps=2))
    assert message.startswith("trainer and sampler differ by 0.001 nats")


def test_a_full_disk_costs_the_page_an_answer_and_the_run_nothing(grpo, monkeypatch):
    from unfreeze.report.rollouts import writer

    def full(path, lines):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writer, "write_lines", full)
    run = grpo(steps=2)
    messages = [event["message"] for event in of_kind(run, "warning")]
    assert "the answers of step 1 were not kept: No space left on device" in messages
    assert run.finished and not list((run.path / "rollouts").iterdir())


def test_an_alarm_of_a_canary_is_one_warning_of_the_run(grpo, monkeypatch):
    """When it sounds, tests/report/rollouts/test_rollout_numbers.py says."""
    from unfreeze.report.rollouts import watched

    sounds = "The reward follows length (r = +0.9{n} within groups, last 8 steps) and rises"
    monkeypatch.setattr(watched, "alarms", lambda steps, rewards: [sounds.format(n=len(steps))][: len(steps)])
    run = grpo(steps=3)
    alarms = [event for event in of_kind(run, "warning") if "follows length" in event["message"]]
    assert [(event["step"], event["message"]) for event in alarms] == [(1, sounds.format(n=1))]


def test_rows_with_one_prompt_are_no_duplicates(grpo):
    """They differ in what the reward reads; and the line on the data speaks of prompts."""
    same = [{"prompt": "What is 1?", "letter": letter} for letter in "aeiou"]
    (data,) = of_kind(grpo(data=same, steps=1), "data")
    assert data["duplicates"] == 0 and data["room"] == 8 and "room for 8 more in each" in data["summary"]


BOTH = {"loss": "ppo", "against": "trainer"}
TERMS = {
    "by default": ({}, Loss()),
    "updates": ({"updates": 2}, Loss("ppo")),
    "gspo": ({"loss": "gspo"}, Loss("gspo", Bounds(3e-4, 4e-4), per="answers")),
    "gspo per token": ({"loss": "gspo", "per": "tokens"}, Loss("gspo", Bounds(3e-4, 4e-4))),
    "cispo": ({"loss": "cispo"}, Loss("cispo", Bounds(1.0, 4.0))),
    "own bounds": ({"loss": "ppo", "clip_high": 0.28, "dual": 3.0}, Loss("ppo", Bounds(0.2, 0.28, 3.0))),
    "tis": ({"correct": "tis"}, Loss(correction=Correction("token", 2.0))),
    "tis of answers": (
        {**BOTH, "correct": "tis-sequence", "policy.correct_high": 3.0},
        Loss("ppo", against="trainer", correction=Correction("answer", 3.0)),
    ),
    "icepop": (
        {**BOTH, "correct": "icepop"},
        Loss("ppo", against="trainer", correction=Correction("token", 5.0, "token", (0.5, 5.0))),
    ),
    # a ratio against the sampler is that weight already
    "icepop, sampler": (
        {"loss": "ppo", "correct": "icepop"},
        Loss("ppo", correction=Correction("none", 5.0, "token", (0.5, 5.0))),
    ),
    "geometric": (
        {"correct": "geometric", "policy.correct_low": 0.9},
        Loss(correction=Correction("none", 1.01, "answer", (0.9, 1.01))),
    ),
}


@pytest.mark.parametrize("name", TERMS)
def test_fields_become_the_terms_of_the_loss(name, my):
    words, wanted = TERMS[name]
    given = {"model": "m", "data": "d", "reward": str(my), **words}
    ours = Rewarding(from_keywords(Config, given, function="grpo")).preset.policy
    assert replace(ours, constant=1.0) == _as_used(wanted, ours)


def _as_used(wanted: Loss, ours: Loss) -> Loss:
    """A band that no mask reads may be any."""
    band = ours.correction.band if wanted.correction.mask == "none" else wanted.correction.band
    return replace(wanted, correction=replace(wanted.correction, band=band))


BAD = {
    "training.packing has no meaning here": {"training.packing": "none"},
    "data.weights has no meaning here": {"data.weights": [2.0]},
    "reward is missing": {"reward": ""},
    "answers = 1: a group of one": {"answers": 1},
    "policy.like sets policy.scale": {"like": "trl", "scale": "group"},
    "policy.like sets policy.loss": {"like": "trl", "loss": "ppo"},
    "updates = 4, but a step has 3 prompts": {"updates": 4},
    'loss = reinforce with updates = 2: .* add correct="tis"': {"updates": 2, "loss": "reinforce"},
    'after the first the policy is not the one that sampled; add correct="tis"': {
        "updates": 2,
        "loss": "reinforce",
        "correct": "geometric",
    },
    "correct_low = 6 is not below correct_high = 5: every token": {
        "correct": "icepop",
        "policy.correct_low": 6.0,
    },
    "nanochat updates once per rollout": {"updates": 2, "like": "nanochat"},
    "correct = tis with ratios against the sampler would weigh tokens twice": {
        "loss": "ppo",
        "correct": "tis",
    },
    "policy.dual has no meaning with loss = reinforce": {"dual": 3.0},
    "policy.clip_low has no meaning with loss = sapo": {"loss": "sapo", "clip_low": 0.1},
    "policy.correct_low has no meaning with correct = none": {"policy.correct_low": 0.1},
    "row 1: a prompt of 12 tokens and 8 new ones are more than 12": {"sequence_length": 12},
}


@pytest.mark.parametrize("words", BAD)
def test_bad_input_is_one_line(grpo, words):
    with pytest.raises(UserError, match=words):
        grpo(**BAD[words])


def test_a_column_that_the_function_needs_is_named_before_the_model_is_loaded(grpo, my, tmp_path):
    my.write_text("def reward(prompt, completion, answer): return 1.0")
    with pytest.raises(UserError, match="answer"):
        grpo()
    assert not (tmp_path / "run" / "events.jsonl").exists() or "load" not in {
        json.loads(line)["kind"] for line in (tmp_path / "run" / "events.jsonl").open()
    }


def test_the_command_line(capsys, my, tmp_path):
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows(6)))
    words = [
        "--steps",
        1,
        "--prompts-per-step",
        2,
        "--answers",
        2,
        "--max-new-tokens",
        4,
        "--rollout.cut",
        "score",
    ]
    given = [
        "grpo",
        "--json",
        "--model",
        unfreeze.TINY_K2,
        "--data",
        data,
        "--reward",
        my,
        "--out",
        tmp_path / "r",
    ]
    assert cli.main(list(map(str, [*given, *words, "--samples", 0, "--dtype", "float32"]))) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 1


def test_ctrl_c_while_answers_are_graded_saves_the_steps_before(grpo, my, tmp_path):
    """The third step's answers are graded for ever; the run ends at once, and goes on to the bit."""
    slow = tmp_path / "slow"
    my.write_text(
        f"import os, time\ndef wait():\n    while os.path.exists({str(slow)!r}): time.sleep(.05)\n" + REWARD
    )
    my.write_text(my.read_text().replace("    return {", "    wait()\n    return {"))

    def at_second(state, result):
        if state.step == 2:
            slow.write_text("")
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()

    run = grpo(on_step=[at_second], **{"grading.seconds": 60.0})
    assert not run.finished and of_kind(run, "end")[0]["reason"] == "interrupted"
    assert [path.name for path in (run.path / "state").iterdir()] == ["step-000002"]
    slow.unlink()
    whole = grpo("whole", **{"grading.seconds": 60.0})
    again = grpo(**{"grading.seconds": 60.0})
    assert again.finished
    assert all(torch.equal(ours, adapter(again)[name]) for name, ours in adapter(whole).items())


def test_a_step_that_is_refused_loses_nothing_before_it(grpo, my, tmp_path):
    """The third batch of answers fails; two steps were trained and none was saved yet."""
    calls = tmp_path / "calls"
    calls.write_text("")
    my.write_text(
        "def reward(prompt, completion, **row):\n"
        f"    with open({str(calls)!r}, 'a') as file: file.write('x')\n"
        f"    if len(open({str(calls)!r}).read()) > 24: raise ValueError('it fails now')\n"
        "    return float(completion.count('e')) + len(completion) / 100\n"
    )
    with pytest.raises(UserError, match=r"12 of 12 answers have no reward \(12 error\)"):
        grpo(**{"rollout.resample": 0, "grading.processes": 1})
    assert [path.name for path in (tmp_path / "run" / "state").iterdir()] == ["step-000002"]
