"""`unfreeze grpo --agent my.py`: agents speak with the model that trains, by HTTP, and it learns from what they say."""

import gzip
import json
import os
import re
import signal
import sys
import threading
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from runs import Stopped, adapter, of_kind, stopping_at

import unfreeze
from unfreeze.core.errors import ConfigError, UserError

AGENT = '''
import asyncio, json, time, urllib.request

def post(base_url, messages, **fields):
    body = json.dumps({"messages": messages, **fields}).encode()
    request = urllib.request.Request(f"{base_url}/chat/completions", body, method="POST")
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]

async def run(base_url, row):
    """Two turns, sent as an application does; more of a letter."""
    first = {"role": "user", "content": row["prompt"]}
    answer = await asyncio.to_thread(post, base_url, [first])
    messages = [first, answer, {"role": "user", "content": "And then?"}]
    again = await asyncio.to_thread(post, base_url, messages, max_tokens=4)
    text = answer["content"] + again["content"]
    return {"letters": text.count(row["letter"]), "length": -0.01 * len(text)}

def mute(base_url, row):
    return 1.0

def hangs(base_url, row):
    time.sleep(99)

def half(base_url, row):
    """Every second row never ends, after the model was asked."""
    answer = post(base_url, [{"role": "user", "content": row["prompt"]}])
    if "3" in row["prompt"]:
        time.sleep(99)
    return float(len(answer["content"]))

def shorter(base_url, row):
    return -len(post(base_url, [{"role": "user", "content": row["prompt"]}])["content"]) / 10

def hotter(base_url, row):
    return post(base_url, [{"role": "user", "content": row["prompt"]}], temperature=0.2)
'''
WORDS = {
    "steps": 2,
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


def rows(count, first=0):
    return [{"prompt": f"What is {n}?", "letter": "aeiou"[n % 5]} for n in range(first, first + count)]


@pytest.fixture
def my(tmp_path):
    path = tmp_path / "my.py"
    path.write_text(AGENT)
    return path


@pytest.fixture
def grpo(my, tmp_path, two_layers):
    def run(out="run", name="run", **fields):
        words = {"model": two_layers, "data": rows(9), "agent": f"{my}:{name}", "out": tmp_path / out}
        return unfreeze.grpo(**{**words, **WORDS, **fields})

    return run


def test_trainer_and_sampler_agree_and_a_run_resumes_to_the_bit(grpo):
    whole = grpo("whole", **{"save.every": 1})
    events = of_kind(whole, "rollout")
    assert [event["step"] for event in events] == [1, 2]
    assert all(event["outcomes"] == {"ok": event["answers"]} for event in events)
    assert all(event["parts"].keys() == {"letters", "length"} for event in events)
    train = of_kind(whole, "train")
    assert all(0 < event["gap_max"] <= 1e-5 for event in train)  # so ids and log p stand at their places
    assert any(tensor.any() for name, tensor in adapter(whole).items() if "lora_B" in name)
    with pytest.raises(Stopped):
        grpo("parts", **{"save.every": 1}, on_step=[stopping_at(2)])
    parts = grpo("parts", **{"save.every": 1})
    assert all(torch.equal(ours, adapter(parts)[name]) for name, ours in adapter(whole).items())
    numbers = ("reward", "parts", "tokens", "signal", "cut")
    again = {event["step"]: event for event in of_kind(parts, "rollout")}
    assert all(again[event["step"]][name] == event[name] for event in events for name in numbers)
    assert len({event["reward"] for event in events}) == 2  # control: another step, other draws


def test_all_turns_are_trained_on_and_can_be_read(grpo, tmp_path):
    run = grpo(steps=1, **{"rollout.resample": 0, "policy.beta": 0.1})
    (rollout,), (train,) = of_kind(run, "rollout"), of_kind(run, "train")
    assert train["supervised_tokens"] == rollout["tokens"]
    (file,) = (run.path / "rollouts").glob("*.gz")
    lines = [json.loads(line) for line in gzip.decompress(file.read_bytes()).splitlines()]
    assert all([role for role, _ in line["turns"]] == ["user", "assistant"] * 2 for line in lines)


def test_held_out_prompts_are_answered_by_agents_with_the_same_draws(grpo, tmp_path):
    held = tmp_path / "held.jsonl"
    held.write_text("".join(json.dumps(row) + "\n" for row in rows(3, 100)))
    run = grpo(name="shorter", validation=str(held), steps=1, learning_rate=1e-12)
    evals = of_kind(run, "eval")
    assert [event["step"] for event in evals] == [0, 1]
    assert len({event["reward"] for event in evals}) == 1 and evals[0]["reward"] < 0


@pytest.mark.nightly
def test_the_reward_is_learnt(grpo, tmp_path):
    held = tmp_path / "held.jsonl"
    held.write_text("".join(json.dumps(row) + "\n" for row in rows(8, 100)))
    run = grpo(name="shorter", validation=str(held), steps=12, learning_rate=2e-2, answers=8)
    first, last = of_kind(run, "eval")[0], of_kind(run, "eval")[-1]
    assert last["reward_low"] > first["reward_high"]


def test_agents_that_ask_nothing_or_hang_stop_the_run_and_say_why(grpo):
    with pytest.raises(
        ConfigError, match=r"12 of 12 answers have no reward \(12 no tokens\).*no request"
    ) as refused:
        grpo("mute", "mute", **{"rollout.resample": 0})
    assert re.match(r"unfreeze report \S*mute shows it; mend the reward", refused.value.next)
    with pytest.raises(ConfigError, match=r"12 of 12 answers have no reward \(12 timeout\)"):
        grpo("hangs", "hangs", **{"rollout.resample": 0, "grading.seconds": 1})
    with pytest.raises(ConfigError, match=r"HTTP Error 400"):
        grpo("hotter", "hotter", **{"rollout.resample": 0})


def test_who_hangs_after_an_answer_is_left_out_and_the_others_train(grpo):
    fields = {"grading.seconds": 3, "grading.failing": 0.9, "steps": 1, "prompts_per_step": 8}
    run = grpo("half", "half", **fields, data=rows(8), answers=2, **{"rollout.resample": 0})
    (rollout,) = of_kind(run, "rollout")
    assert rollout["outcomes"] == {"ok": 14, "timeout": 2}


def test_a_changed_agent_is_refused(grpo, my):
    with pytest.raises(Stopped):
        grpo(**{"save.every": 1}, on_step=[stopping_at(2)])
    my.write_text(AGENT.replace("0.01", "0.02"))
    with pytest.raises(ConfigError, match=r"cannot resume: .*my\.py:run has changed since this run began"):
        grpo(**{"save.every": 1})


def test_bad_input_is_one_line(grpo, my):
    with pytest.raises(UserError, match="agent returns the reward itself; leave out reward"):
        grpo(reward=str(my))
    with pytest.raises(UserError, match=r"my.py has no function 'walk'"):
        grpo(name="walk")


def test_the_agent_of_the_page_runs_with_openais_client_and_past_a_proxy(grpo, my, monkeypatch):
    page = Path(__file__).resolve().parents[2] / "docs" / "howto" / "reward.md"
    (source,) = re.findall(r'```python title="my_agent.py"\n(.*?)```', page.read_text(), re.DOTALL)
    my.write_text(source)
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    data = [{"prompt": f"What is {n}?", "answer": "aeiou"[n]} for n in range(3)]
    run = grpo(data=data, steps=1, **{"rollout.resample": 0})
    (rollout,), (train,) = of_kind(run, "rollout"), of_kind(run, "train")
    assert rollout["outcomes"] == {"ok": 12} and train["gap_max"] <= 1e-5


def test_ctrl_c_while_agents_run_saves_the_steps_before(grpo, my, tmp_path):
    """The second step's agents never end; the run does, and goes on to the bit."""
    slow = tmp_path / "slow"
    wait = f"    while os.path.exists({str(slow)!r}):\n        time.sleep(.05)\n"
    text = AGENT.replace("def shorter(base_url, row):\n", "def shorter(base_url, row):\n" + wait)
    my.write_text("import os\n" + text)

    def at_first(state, result):
        if state.step == 1:
            slow.write_text("")
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()

    run = grpo("left", "shorter", on_step=[at_first], **{"grading.seconds": 20})
    assert not run.finished and run.events[-1]["reason"] == "interrupted"
    slow.unlink()
    patient = {"grading.seconds": 20}
    whole, again = grpo("whole", "shorter", **patient), grpo("left", "shorter", **patient)
    assert all(torch.equal(tensor, adapter(again)[name]) for name, tensor in adapter(whole).items())
