"""unfreeze merge of runs with rewards: the run's own validations are the oracle of what it measures."""

import json
import shutil

import pytest

import unfreeze
from unfreeze import cli
from unfreeze.core.draws import number
from unfreeze.evaluate.rewarded import HELD_OUT

CODE = '''
def reward(prompt, completion, **row):
    """Shorter is better."""
    return -len(completion) / 10

class Adder:
    def reset(self, **row):
        self.value = 0

    def add(self, number: int) -> int:
        """Add.

        Args:
            number: it
        """
        self.value += number
        return self.value
'''
WORDS = {
    "prompts_per_step": 3,
    "answers": 8,
    "max_new_tokens": 8,
    "rollout.cut": "score",
    "rank": 2,
    "samples": 0,
    "dtype": "float32",
    "learning_rate": 1e-2,
    "grading.processes": 1,
    "quiet": True,
}


def written(path, count, first=0):
    path.write_text("".join(json.dumps({"prompt": f"What is {n}?"}) + "\n" for n in range(first, count)))
    return str(path)


def trained(model, folder, **fields):
    (folder / "my.py").write_text(CODE)
    data = written(folder / "rows.jsonl", 17)
    run = unfreeze.grpo(model=model, data=data, out=folder / "run", **{**WORDS, **fields})
    return run.path, [event["reward"] for event in run.events if event["kind"] == "eval"]


@pytest.fixture(scope="module")
def shorter(tmp_path_factory):
    """A run that learns to be short, its rewards before and after, and its function's file."""
    folder = tmp_path_factory.mktemp("grpo")
    run, rewards = trained(
        unfreeze.TINY_K2, folder, reward=str(folder / "my.py"), steps=4, validation_fraction=0.5
    )
    return run, rewards, folder / "my.py"


def test_the_rewards_are_those_of_the_run_and_the_rounding_is_told_by_them(
    shorter, unfreeze_json, tmp_path, capsys
):
    run, rewards, _ = shorter
    result = unfreeze_json("merge", run, "--to", "bf16", "--out", tmp_path / "out")
    gain = result["gain"]
    assert [gain["base"], gain["adapter"]] == pytest.approx([rewards[0], rewards[-1]], abs=1e-9)
    kept = (gain["merged"] - gain["base"]) / (gain["adapter"] - gain["base"])
    assert gain["share"] == pytest.approx(kept) and abs(kept - 1) < 0.2
    assert json.loads((tmp_path / "out/merge.json").read_text())["gain"] == gain
    card = (tmp_path / "out/README.md").read_text()
    line = f"held-out reward on {gain['rows']} prompts: base {rewards[0]:.3f}, with adapter {rewards[-1]:.3f}"
    assert line in card and "of what was learned survives" in card


def test_an_environment_is_played_as_in_the_run(unfreeze_json, tmp_path, two_layers):
    code, held = f"{tmp_path}/my.py", written(tmp_path / "held.jsonl", 104, 100)
    fields = {"reward": code, "steps": 1, "validation": held, "answers": 2}
    run, rewards = trained(two_layers, tmp_path, env=f"{code}:Adder", **fields)
    gain = unfreeze_json("merge", run, "--to", "bf16", "--out", tmp_path / "out")["gain"]
    assert [gain["base"], gain["adapter"]] == pytest.approx([rewards[0], rewards[-1]], abs=1e-9)


def test_without_its_reward_a_run_is_merged_all_the_same(shorter, tmp_path, capsys):
    run, _, code = shorter

    def merged(name):
        assert cli.main(["merge", str(run), "--to", "bf16", "--out", str(tmp_path / name)]) == 0
        (line,) = [each for each in capsys.readouterr().err.splitlines() if "survives" in each]
        assert (tmp_path / name / "config.json").is_file()
        return line

    try:
        code.write_text(CODE + "# a word")
        assert merged("changed") == (f"Not measured how much survives: {code} has changed since the run.")
        code.unlink()
        gone = merged("gone")
        assert gone.startswith(f"Not measured how much survives: reward = '{code}': there is no file {code}")
    finally:
        code.write_text(CODE)


def test_prompts_of_ones_own_are_answered_by_the_merged_checkpoint(shorter, unfreeze_json, tmp_path, capsys):
    """Its mean reward equals that of the answers that `unfreeze.load` gives with the same seeds."""
    run, _, _ = shorter
    held, out = written(tmp_path / "own.jsonl", 204, 200), tmp_path / "out"
    gain = unfreeze_json("merge", run, "--data", held, "--out", out)["gain"]
    model = unfreeze.load(out, dtype="float32")
    prompts = [model.encode_chat(f"What is {n}?") for n in range(200, 204)]
    seeds = [number(0, HELD_OUT, place, answer) for place in range(4) for answer in range(4)]
    answers = model.complete(prompts, n=4, seeds=seeds, max_new_tokens=8, temperature=1.0)
    assert gain["merged"] == pytest.approx(-sum(len(each.text) for each in answers) / 160, abs=1e-9)
    assert gain["merged"] != gain["adapter"]  # INT4 rounds


def test_copies_of_a_prompt_count_as_one_prompt(shorter, unfreeze_json, tmp_path, capsys):
    """Their answers differ in noise only, so their spread says nothing of other prompts."""
    run, _, _ = shorter
    held, out = written(tmp_path / "own.jsonl", 201, 200), tmp_path / "out"
    (tmp_path / "own.jsonl").write_text((tmp_path / "own.jsonl").read_text() * 6)
    gain = unfreeze_json("merge", run, "--to", "bf16", "--data", held, "--out", out)["gain"]
    assert gain["rows"] == 1 and gain["share"] is None and gain["adapter"] > gain["base"]


def test_the_best_step_is_that_of_the_highest_reward(shorter, tmp_path, capsys):
    run, _, _ = shorter
    shutil.copytree(run, tmp_path / "run")
    shutil.copytree(run / "adapter", tmp_path / "run/adapter-best")
    with (tmp_path / "run/events.jsonl").open("a") as events:
        events.write('{"kind": "eval", "step": 7, "time": 1.0, "loss": -0.57, "reward": 0.57}\n')
    assert cli.main(["merge", str(tmp_path / "run"), "--no-check", "--out", str(tmp_path / "out")]) == 0
    assert "the held-out reward was highest at step 7 (0.570)" in capsys.readouterr().err
