"""A run's file says by its keys which recipe it is for, and plan and doctor know its second model."""

import json
import shutil

import pytest

from unfreeze import cli
from unfreeze.commands.demo import TINY_K2
from unfreeze.commands.recipe import recipe_of


@pytest.mark.parametrize(
    "text, recipe",
    [
        ('model = "m"\nlearning_rate = 1e-4\n', "sft"),
        ('teacher = "t"\n[data]\nfiles = "f"\n', "distill"),
        ('[distillation]\ntemperature = 2.0\n[data]\nfiles = "f"\n', "distill"),
        ('loss = "dpo"\nbeta = 0.2\n', "prefer"),
        ("[preference]\nlabel-smoothing = 0.1\n", "prefer"),
        ('data = "f"\nteacher = "t"\nbeta = 0.2\ndivergence = "jsd"\n', "distill"),
        ('reward = "my.py"\nbeta = 0.1\n', "grpo"),
        ('model = "m"\nprompts_per_step = 4\n', "grpo"),
        ("learning_rat = 1.0\n", "sft"),
    ],
)
def test_the_keys_say_it(text, recipe, tmp_path):
    (tmp_path / "run.toml").write_text(text)
    assert recipe_of(tmp_path / "run.toml")[0] == recipe


@pytest.fixture
def write(tmp_path, chat_rows):
    def written(*lines, name="run.toml", data=chat_rows):
        model = f'model = "{TINY_K2}"\ndata = "{data}"\nout = "{tmp_path / "out"}"\ndtype = "float32"'
        (tmp_path / name).write_text("\n".join([model, "tokens_per_step = 256", "epochs = 40", *lines]))
        return tmp_path / name

    return written


def test_the_plan_of_a_file_has_its_teacher(write, run_dir, unfreeze_json, tmp_path):
    """Its weights, and what its forward takes; the base as a teacher has no weights of its own."""
    alone, taught, base = (
        unfreeze_json("plan", write(*lines), "--hardware", "cpu:4GB")["bytes"]["device_terms"]
        for lines in ([], [f'teacher = "{run_dir}"'], ['teacher = "base"', "alpha = 0.5"])
    )
    adapter = sum(path.stat().st_size for path in (run_dir / "adapter").glob("*.safetensors"))
    assert taught["second model"] == adapter  # its base is the one that is there
    copied = write(f'teacher = "{shutil.copytree(TINY_K2, tmp_path / "copy")}"')
    copied = unfreeze_json("plan", copied, "--hardware", "cpu:4GB")["bytes"]["device_terms"]
    assert copied["second model"] == alone["experts"] + alone["the frozen rest"]
    assert "second model" not in base and "second model" not in alone
    assert taught["experts"] == alone["experts"]


def test_the_seconds_of_a_file_have_its_teachers_forward(write, run_dir, unfreeze_json):
    """On a machine that has facts: the step is longer by the term, whoever is asked."""
    alone, taught, base = (
        unfreeze_json("plan", write(*lines), "--hardware", "1xH200", "--place.recompute", "layers")["seconds"]
        for lines in ([], [f'teacher = "{run_dir}"'], ['teacher = "base"', "alpha = 0.5"])
    )
    assert "second model" not in alone and taught["second model"] == base["second model"] > 0
    assert taught["step"] == pytest.approx(alone["step"] + taught["second model"])


def test_the_plan_of_a_file_of_preference_has_its_reference(write, unfreeze_json, tmp_path):
    rows = tmp_path / "pairs.jsonl"
    rows.write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n' * 4)
    file = write('loss = "dpo"', data=rows)
    asked = {"hardware": "cpu:4GB", "tokens-per-step": 2048}
    flags = [word for name, value in asked.items() for word in (f"--{name}", value)]
    dpo = unfreeze_json("plan", file, *flags)["bytes"]["device_terms"]
    simpo = unfreeze_json("plan", write('loss = "simpo"', data=rows), *flags)["bytes"]["device_terms"]
    beside = {"second model's forward", "what the second model said"}
    assert beside & dpo.keys() and not beside & simpo.keys()


def test_the_plan_of_a_file_of_rewards_has_the_answers(write, unfreeze_json, tmp_path):
    """Their cache, the seconds of sampling them on a machine that has facts, and the minutes of the run."""
    rows, my = tmp_path / "prompts.jsonl", tmp_path / "my.py"
    rows.write_text('{"prompt": "a"}\n' * 4)
    my.write_text("def reward(prompt, completion): return 1.0")
    write(f'reward = "{my}"', "steps = 30", "max_new_tokens = 100", "sequence_length = 200", data=rows)
    file = tmp_path / "run.toml"
    file.write_text(file.read_text().replace("epochs = 40\n", ""))
    here = unfreeze_json("plan", file, "--hardware", "cpu:4GB")
    assert here["bytes"]["device_terms"]["KV cache of answers"] > 0 and here["rollout"] is None
    rollout = unfreeze_json("plan", file, "--hardware", "1xH200")["rollout"]
    assert 0 < rollout["share"] == rollout["sampling"] / rollout["step"] < 1
    assert rollout["run"] == 30 * rollout["step"]


def test_doctor_looks_at_the_teacher(write, run_dir, capsys):
    def found(*lines, code):
        assert cli.main(["doctor", str(write(*lines)), "--json", "--quiet"]) == code
        return {f["check"]: f for f in json.loads(capsys.readouterr().out.splitlines()[-1])["findings"]}

    good = found(f'teacher = "{run_dir}"', code=0)
    assert good["second"]["level"] == "ok" and good["second"]["line"].startswith(f"learns from: {run_dir} (")
    assert good["second"]["line"].endswith("frozen); forward KL, temperature 1")
    bad = found(f'teacher = "{TINY_K2}"', code=2)
    assert bad["second"]["level"] == "fault" and "is the model itself" in bad["second"]["line"]
    assert bad["template"]["level"] == "ok" and "second" not in found(code=0)
    nowhere = found('teacher = "/nowhere"', code=2)
    assert nowhere["second"]["level"] == "fault" and nowhere["second"]["remedy"]


@pytest.mark.parametrize(("more", "words"), [("", "new weights train in float32"), ("dtype", "as asked")])
def test_the_plan_of_a_new_model_freezes_nothing_and_asks_for_nothing(tmp_path, capsys, more, words):
    toml = tmp_path / "new.toml"
    asked = '[memory]\ndtype = "bfloat16"\n' if more else ""
    shape = "[shape]\nfamily = 'qwen3'\nhidden_size = 32\nnum_hidden_layers = 2\nnum_attention_heads = 2\n"
    toml.write_text(f'tokenizer = "{TINY_K2}"\ndata = "rows.jsonl"\n{asked}{shape}')
    assert cli.main(["plan", str(toml), "--hardware", "8xH200"]) in (0, 2)
    printed = capsys.readouterr().out
    assert words in printed and (more != "") == ("as asked" in printed)
    assert "frozen" not in printed and "weights" in printed
