"""`unfreeze grpo --env`: turns with tools in a run, its files, its held-out measure, resuming, refusals."""

import gzip
import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from runs import Stopped, adapter, of_kind, stopping_at

import unfreeze
from unfreeze.config.grpo import Config
from unfreeze.config.parse import from_keywords
from unfreeze.core.errors import ConfigError, UserError
from unfreeze.data.tokens.tool_calls import Spoken
from unfreeze.rollout import talks

ENVIRONMENT = '''
class Adder:
    def reset(self, goal, **row):
        self.goal, self.value = goal, 0
        return f" Reach {goal}."

    def add(self, number: int) -> int:
        """Add.

        Args:
            number: it
        """
        self.value += number
        return self.value

    def get_reward(self):
        return {"sum": float(self.value == self.goal)}


class Mute(Adder):
    get_reward = None


class Broken(Adder):
    def reset(self, **row):
        raise ValueError("no such level")


WORLDS = {"adder": Adder, "mute": Mute}
NONE = {}


def reward(prompt, completion, goal):
    """More of a letter."""
    return completion.count("e") / 10
'''
WORDS = {
    "steps": 2,
    "prompts_per_step": 2,
    "answers": 2,
    "max_new_tokens": 12,
    "rollout.cut": "score",
    "rollout.resample": 0,
    "rank": 2,
    "samples": 0,
    "dtype": "float32",
    "learning_rate": 5e-3,
    "grading.processes": 1,
    "quiet": True,
}


def rows(count, first=0, **more):
    return [{"prompt": f"Sum {n}.", "goal": n % 3, **more} for n in range(first, first + count)]


@pytest.fixture
def my(tmp_path) -> Path:
    path = tmp_path / "my.py"
    path.write_text(ENVIRONMENT)
    return path


@pytest.fixture
def grpo(my, tmp_path, two_layers):
    def run(out="run", env="Adder", **fields):
        words = {
            "model": two_layers,
            "data": rows(6),
            "out": tmp_path / out,
            "env": env if ":" in env or not env else f"{my}:{env}",
        }
        return unfreeze.grpo(**{**words, "reward": str(my), **WORDS, **fields})

    return run


@pytest.fixture
def calling(monkeypatch):
    """The model's first turn is taken for add(1), whatever it says: the built-in model never calls a tool."""

    def read(text, before):
        function = {"name": "add", "arguments": {"number": 1}}
        call = {"id": f"functions.add:{before}", "type": "function", "function": function}
        return Spoken(text) if before else Spoken("", [call])

    monkeypatch.setattr(talks, "reads_calls", lambda source: read)


def test_a_run_plays_and_resumes_to_the_bit(grpo, calling, tmp_path):
    held = tmp_path / "held.jsonl"
    held.write_text("".join(json.dumps(row) + "\n" for row in rows(2, 100)))
    fields = {
        "save.every": 1,
        "validation": str(held),
        "watch.validate_every": 2,
        "rollout.held_out_answers": 1,
        "model": unfreeze.TINY_K2,  # it ends its turns
    }
    whole = grpo("whole", **fields)
    events = of_kind(whole, "rollout")
    assert all(event["turns"] > 1 and event["faults"] == {} for event in events)
    assert all(event["parts"].keys() == {"environment", "environment.sum", "reward"} for event in events)
    assert all(event["gap_max"] <= 1e-5 for event in of_kind(whole, "train"))
    assert any(tensor.any() for name, tensor in adapter(whole).items() if "lora_B" in name)
    assert [event["step"] for event in of_kind(whole, "eval")] == [0, 2]
    with gzip.open(whole.path / "rollouts" / "step-000001.jsonl.gz", "rt") as file:
        first = json.loads(file.readline())
    assert [role for role, _ in first["turns"]][:3] == ["user", "assistant", "tool"]
    assert " Reach " in first["turns"][0][1] and first["turns"][2][1] == "1"

    with pytest.raises(Stopped):
        grpo("parts", **fields, on_step=[stopping_at(2)])
    parts = grpo("parts", **fields)
    assert all(torch.equal(ours, adapter(parts)[name]) for name, ours in adapter(whole).items())


def test_prompts_may_be_equal_where_a_column_makes_the_task(grpo):
    """A world of one prompt can hold rows out; without a world such rows are one."""
    data = [{"prompt": "Sum.", "goal": n} for n in range(12)]
    run = grpo(data=data, steps=1, **{"validation_fraction": 0.3, "rollout.held_out_answers": 1})
    assert all(0 < event["rows"] < 12 for event in of_kind(run, "eval"))
    with pytest.raises(ConfigError, match=r"validation_fraction 0\.3 of 12 documents leaves none for"):
        grpo("alone", env="", data=data, steps=1, **{"validation_fraction": 0.3})


def test_the_window_holds_for_the_tools_too(grpo, calling):
    """Documents of a training pass are no longer than sequence_length, so that the plan holds."""
    run = grpo(sequence_length=300, tokens_per_step=300, steps=1)
    (event,) = of_kind(run, "rollout")
    assert event["tokens"] > 0
    with pytest.raises(
        UserError, match="no answer of step 1 has a token: each prompt, with its tools, fills"
    ):
        grpo("short", sequence_length=40, tokens_per_step=40)


def test_each_row_names_its_environment(grpo):
    data = [*rows(3, environment="adder"), *rows(3, 3, environment="mute")]
    assert grpo(env="WORLDS", data=data, steps=1).finished
    with pytest.raises(ConfigError, match="row 1: environment is 'added'; nearest: 'adder'"):
        grpo("other", env="WORLDS", data=rows(6, environment="added"))


def test_a_changed_environment_is_refused(grpo, tmp_path):
    other = tmp_path / "other.py"  # the reward is in my.py
    other.write_text(ENVIRONMENT)
    fields = {"env": f"{other}:Adder", "save.every": 1}
    with pytest.raises(Stopped):
        grpo(**fields, on_step=[stopping_at(2)])
    other.write_text(ENVIRONMENT.replace("number\n        return", "number + 0\n        return"))
    with pytest.raises(ConfigError, match=r"cannot resume: .*other\.py.* has changed since this run began"):
        grpo(**fields)


BAD = {
    r"reward is missing: give reward my\.py, .* or env my\.py:Class": {"env": None, "reward": None},
    "environment Mute has no get_reward, and no reward is given": {"env": "Mute", "reward": None},
    "Adder is an environment, not a function": {"env": None, "reward": "Adder"},
    "reward cannot be made: TypeError": {"env": "reward"},
    "4 of 4 answers have no reward .4 error.*reset: ValueError: no such level": {"env": "Broken"},
    "env names a dict without an environment": {"env": "NONE", "reward": None},
    "rollout.turns has no meaning without an environment": {"env": None, "turns": 3},
    r"my.py has no function 'Addder'; nearest: 'Adder'": {"env": "Addder"},
}


@pytest.mark.parametrize("words", BAD)
def test_bad_input_is_one_line(my, tmp_path, two_layers, words):
    fields = {"env": "Adder", "reward": "reward", **BAD[words]}
    code = {name: f"{my}:{fields.pop(name)}" for name in ("env", "reward") if fields[name]}
    fields = {name: value for name, value in fields.items() if value is not None}
    with pytest.raises(UserError, match=words):
        unfreeze.grpo(model=two_layers, data=rows(6), out=tmp_path / "run", **code, **{**WORDS, **fields})


def test_cut_answers_of_an_environment_are_scored_unless_asked_otherwise(my):
    def cut(**fields):
        common = {"model": unfreeze.TINY_K2, "data": "rows.jsonl", "out": "run"}
        return from_keywords(Config, {**common, **fields}, function="grpo").rollout.cut

    assert cut(env=f"{my}:Adder") == "score" and cut(reward=str(my)) == "mask"
    assert cut(env=f"{my}:Adder", **{"rollout.cut": "mask"}) == "mask"
