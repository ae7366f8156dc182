"""examples/small: models made from nothing, whose files load elsewhere; data that says what it promises; transcripts
whose calls the environments answer as written; and the commands of its README run."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import unfreeze
from unfreeze.data.rows.asked import asked_from_dict
from unfreeze.data.tokens.tool_calls import hermes
from unfreeze.rollout.environment import Environments
from unfreeze.rollout.graders import Graders

ROOT = Path(__file__).resolve().parents[2]
SMALL, WORLDS = ROOT / "examples" / "small", ROOT / "examples" / "environments"
HELD_OUT = ("held_out.jsonl", "prompts.jsonl")
WITH_TOOLS = {"guess": "guess_number.py:GuessNumber", "calculator": "calculator.py:Calculator"}


def write(name, folder):
    subprocess.run([sys.executable, SMALL / f"{name}.py", folder], check=True)
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("small")
    return {name: write(name, root / name) for name in ("addition", *WITH_TOOLS)}


def rows(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def files(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", ["addition", *WITH_TOOLS])
def test_the_same_bytes_come_again_and_no_prompt_is_in_two_files(name, made, tmp_path):
    assert files(made[name]) == files(write(name, tmp_path / "again"))
    held_out, prompts = ({json.dumps(row) for row in rows(made[name] / file)} for file in HELD_OUT)
    assert held_out and not held_out & prompts


@pytest.mark.parametrize("name", ["addition", *WITH_TOOLS])
def test_transformers_loads_the_model_and_its_tokenizer_knows_every_word(name, made):
    tokenizer = AutoTokenizer.from_pretrained(made[name] / "model")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(made[name] / "model"))
    assert 0.4e6 < sum(weights.numel() for weights in model.parameters()) < 0.5e6
    assert len(tokenizer) == model.config.vocab_size
    for text in texts_of(name, made[name], tokenizer):
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids) == text and tokenizer.unk_token_id not in ids
        assert len(ids) <= model.config.max_position_embeddings
    assert tokenizer.unk_token_id in tokenizer("What?!")["input_ids"]  # control arm


def texts_of(name, folder, tokenizer):
    """The first 200 that the model reads, as text."""
    if name == "addition":
        return [row["prompt"] + row["completion"] + "<eos>" for row in rows(folder / "texts.jsonl")[:200]]
    transcripts = rows(folder / "transcripts.jsonl")[:200]
    return [tokenizer.apply_chat_template(row["messages"], tokenize=False) for row in transcripts]


def number(written):
    """ "5u4t3h" -> 345."""
    return int(re.sub(r"[uthk]", "", written)[::-1])


def test_sums_are_right_or_without_carries(made):
    careless = 0
    for row in rows(made["addition"] / "texts.jsonl"):
        a, b = map(number, row["prompt"].rstrip("=").split("+"))
        if number(row["completion"]) != a + b:
            careless += 1
            without = "".join(str((int(x) + int(y)) % 10) for x, y in zip(f"{a:03}", f"{b:03}", strict=True))
            assert number(row["completion"]) == int(without)
    assert 0.55 < careless / 20_000 < 0.8
    every = [row for file in HELD_OUT for row in rows(made["addition"] / file)]
    assert all(
        sum(map(number, row["prompt"].rstrip("=").split("+"))) == number(row["answer"]) for row in every
    )
    with Graders(str(SMALL / "addition.py"), count=1) as graders:
        row = asked_from_dict(every[0], 1)
        answers = [every[0]["answer"], every[0]["answer"][:-2], every[0]["answer"] + "0k", ""]
        assert [each.reward for each in graders.grade([(row, text) for text in answers])] == [1, 0, 0, 0]


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_environments_answer_the_transcripts_as_written(name, made):
    """Each turn, as the template writes it, is read as the call it is, and the tool says what stands there."""
    tokenizer = AutoTokenizer.from_pretrained(made[name] / "model")
    transcripts = [row["messages"] for row in rows(made[name] / "transcripts.jsonl")[:30]]
    with Environments(str(WORLDS / WITH_TOOLS[name]), count=1, most_turns=20) as environments:
        for messages in transcripts:
            row = {"prompt": messages[0]["content"].removesuffix(" It is from 1 to 8.")}
            if name == "guess":
                calls = [each["tool_calls"][0]["function"] for each in messages if each.get("tool_calls")]
                row |= {"secret": calls[-1]["arguments"]["number"], "most": 8}
            (episode,) = environments.open([asked_from_dict(row, 1)], hermes)
            for place, message in enumerate(messages):
                if message["role"] == "assistant":
                    before = tokenizer.apply_chat_template(messages[:place], tokenize=False)
                    text = tokenizer.apply_chat_template(messages[: place + 1], tokenize=False)[len(before) :]
                    environments.turn([episode], [text.removesuffix("<eos>")])
            assert [(each["role"], each["content"]) for each in episode.messages] == [
                (each["role"], each["content"]) for each in messages
            ]
            assert episode.done == "answered" and not episode.faults
            (graded,) = environments.grade([episode])
            assert name == "calculator" or graded.parts["guesses"] == len(messages) // 2 - 1
    calls = sum(len(messages) > 2 for messages in transcripts)
    assert calls == len(transcripts) if name == "guess" else 0 < calls < len(transcripts)


def test_a_player_in_four_heeds_what_he_was_told(made):
    """The mean number of guesses lies between 3.1, of all that heed it, and 4.5, of none."""
    transcripts = [row["messages"] for row in rows(made["guess"] / "transcripts.jsonl")]
    guesses = [sum(message["role"] == "tool" for message in messages) for messages in transcripts]
    assert sum(guesses) / len(guesses) == pytest.approx(0.25 * left(8) + 0.75 * 4.5, abs=0.1)


def left(numbers):
    """Mean guesses at random among the numbers that are left."""
    each = [
        k / numbers * left(k) + (numbers - 1 - k) / numbers * left(numbers - 1 - k) for k in range(numbers)
    ]
    return 1 + sum(each) / numbers if numbers else 0


def commands():
    """The commands of the README's blocks, a list of words each."""
    blocks = re.findall(r"^```sh\n(.*?)^```", (SMALL / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True) for line in lines if line.startswith("unfreeze ")]


@pytest.mark.parametrize("name", ["addition", *WITH_TOOLS])
def test_the_commands_of_the_readme_run(name, made, tmp_path, monkeypatch):
    """Two steps of each, on the first rows."""
    monkeypatch.chdir(ROOT)
    shutil.copytree(made[name] / "model", tmp_path / "model")
    for file in made[name].glob("*.jsonl"):
        lines = file.read_text().splitlines(keepends=True)
        (tmp_path / file.name).write_text("".join(lines[:24]))
    mine = [words for words in commands() if any(f"build/{name}" in word for word in words)]
    assert [words[1] for words in mine] == ["pretrain", *["sft"] * (name == "addition"), "grpo"]
    for words in mine:
        moved = [word.replace(f"build/{name}", str(tmp_path)) for word in words[1:]]
        moved[moved.index("--steps") + 1] = "2"
        fewer = ["--prompts-per-step", "2", "--rollout.resample", "0"] if words[1] == "grpo" else []
        assert unfreeze.cli.main([*moved, *fewer, "--quiet"]) == 0
    events = rows(Path(moved[moved.index("--out") + 1]) / "events.jsonl")
    assert [event["step"] for event in events if event["kind"] == "train"] == [1, 2]
    (ended,) = [event for event in events if event["kind"] == "eval" and event["step"] == 2]
    assert ended["rows"] == 24
    # a model of 32 positions gets its sample answers, too
    assert not [event for event in events if event["kind"] == "warning" and "no sample" in event["message"]]
    assert sum(event["kind"] == "sample" for event in events) == (2 if name == "guess" else 8)


def right(row):
    """True if an answer is right, by Python's own arithmetic."""
    asks = row["prompt"].rpartition(": ")[2]
    if asks.isalpha():
        return row["completion"] == asks[::-1]
    numbers = asks.partition("\n")[0].split(", ")
    return row["completion"] == str(sorted(numbers, key=float, reverse="descending" in row["prompt"]))


def test_reasoning_tasks_have_right_and_careless_answers(tmp_path):
    pytest.importorskip("reasoning_gym", reason="pip install reasoning-gym")
    folder = write("reasoning", tmp_path / "reasoning")
    prompts = [row for path in sorted(folder.glob("*_*.jsonl")) for row in rows(path)]
    texts = rows(folder / "texts.jsonl")
    assert len({row["prompt"] for row in [*prompts, *texts]}) == len(prompts) + len(texts)
    assert 0.22 < sum(map(right, texts)) / len(texts) < 0.35  # some numbers are in order as they are
    assert all(right({"prompt": row["prompt"], "completion": row["gold"]}) for row in prompts)
    with Graders(str(SMALL / "reasoning.py"), count=1) as graders:
        few = [asked_from_dict(row, 1) for row in (*prompts[:5], *prompts[-5:])]
        for more, reward in (("", 1), ("x", 0)):
            graded = graders.grade([(row, str(row.columns["gold"]) + more) for row in few])
            assert [each.reward for each in graded] == [reward] * 10
