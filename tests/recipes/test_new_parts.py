"""A model from [shape] with parts: trained, opened again by the other commands, resumed; what is refused, in one line.

The tokenizer and the texts are those of test_new_model.py, made here again.
"""

import json

import pytest
import tokenizers
import transformers
from tokenizers import models, pre_tokenizers, trainers

import unfreeze
from unfreeze import cli

WORDS = "the wind blows over and the river runs to the sea under a cold moon".split()
PARTS = [
    {"at": "layers.*", "part": "deep_norm"},
    {"at": "layers.0.self_attn", "part": "sliding_window", "window": 8},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tokenizer of letters and their pairs, and 40 texts."""
    here = tmp_path_factory.mktemp("parts")
    (here / "tok").mkdir()
    texts = [" ".join(WORDS[(7 * i + 3 * j * j) % len(WORDS)] for j in range(12 + i % 9)) for i in range(40)]
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=280,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(texts, trainer)
    made.save(str(here / "tok" / "tokenizer.json"))
    (here / "tok" / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}')
    (here / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (here / "run.toml").write_text(f"""
tokenizer = "{here / "tok"}"
steps = 3
tokens_per_step = 256
[shape]
family = "llama"
hidden_size = 32
num_hidden_layers = 2
num_attention_heads = 2
parts = [{{ at = "layers.*", part = "deep_norm" }},
         {{ at = "layers.0.self_attn", part = "sliding_window", window = 8 }}]
[data]
files = "{here / "texts.jsonl"}"
sequence_length = 64
validation_fraction = 0.0
[watch]
samples = 0
""")
    return here


@pytest.fixture(scope="module")
def run(folder):
    out = folder / "run"
    assert cli.main(["pretrain", str(folder / "run.toml"), "--out", str(out), "--quiet"]) == 0
    return out


def refused(capsys, *arguments) -> str:
    """The one line of a command that is refused, without its remedy."""
    capsys.readouterr()
    assert cli.main([*map(str, arguments), "--quiet"]) == 2
    message, remedy = capsys.readouterr().err.strip().splitlines()
    assert remedy.startswith("  next: ") and len(message) <= 200
    return message


def test_the_folder_names_its_parts_and_no_other_program_takes_it(run, tmp_path):
    config = json.loads((run / "model" / "config.json").read_text())
    assert config["parts"] == PARTS and config["base_model_type"] == "llama"
    assert config["model_type"] == "unfreeze_parts" and config["architectures"] == [
        "UnfreezePartsForCausalLM"
    ]
    with pytest.raises(ValueError, match="unfreeze_parts"):
        transformers.AutoConfig.from_pretrained(run / "model")
    # control arm: under its family's name transformers takes the folder for a llama
    own = {
        name: of for name, of in config.items() if name not in ("parts", "base_model_type", "architectures")
    }
    (tmp_path / "config.json").write_text(json.dumps({**own, "model_type": "llama"}))
    assert type(transformers.AutoConfig.from_pretrained(tmp_path)).__name__ == "LlamaConfig"


def test_other_commands_open_it(run, folder, unfreeze_json, capsys):
    decoder = unfreeze.load(run, dtype="float32").decoder
    assert decoder.shape.kind == "llama with deep_norm, sliding_window"
    assert [layer.self_attn.mask.window for layer in decoder.layers] == [8, None]
    facts = unfreeze_json("inspect", str(run / "model"))
    assert (facts["model_type"], facts["parts"]) == ("llama", ["deep_norm", "sliding_window"])
    capsys.readouterr()
    assert cli.main(["doctor", str(run / "model"), "--data", str(folder / "texts.jsonl")]) == 0
    assert "llama with deep_norm, sliding_window: 20 tensors" in capsys.readouterr().out
    assert unfreeze_json("plan", str(run / "model"), "--hardware", "H200")["fits"]


def test_a_run_is_resumed(run, folder, unfreeze_json, capsys):
    again = ["pretrain", str(folder / "run.toml"), "--out", str(run), "--steps", "4"]
    assert unfreeze_json(*again, "--save.allow-changed", "steps")["steps"] == 4
    capsys.readouterr()
    assert cli.main([*again, "--shape.parts", json.dumps(PARTS[0]), "--quiet"]) == 2
    assert "1 field differs" in (words := capsys.readouterr().err) and "shape.parts" in words


def test_an_adapter_trains_merges_and_is_not_exported(run, folder, tmp_path, unfreeze_json, capsys):
    sft = ["sft", "--model", run / "model", "--data", folder / "texts.jsonl", "--out", tmp_path / "sft"]
    more = ["--steps", "2", "--tokens-per-step", "128", "--watch.samples", "0"]
    assert unfreeze_json(*map(str, sft), *more)["finished"]
    card = (tmp_path / "sft" / "adapter" / "README.md").read_text()
    assert "unfreeze chat" in card and "PeftModel" not in card and "library_name" not in card
    merged = tmp_path / "merged"
    assert cli.main(["merge", str(tmp_path / "sft"), "--to", "bf16", "--out", str(merged), "--quiet"]) == 0
    config = json.loads((merged / "config.json").read_text())
    assert config["parts"] == PARTS and "transformers import" not in (merged / "README.md").read_text()
    assert unfreeze.load(merged).decoder.shape.parts
    assert "no program but unfreeze" in refused(capsys, "export", tmp_path / "sft", "--for", "vllm")


def test_commands_that_need_the_familys_own_model_refuse(run, tmp_path, capsys):
    words = refused(capsys, "dev", "bisect", run / "model", "--against", "hf")
    assert "transformers has no models of type unfreeze_parts" in words
    words = refused(capsys, "upcycle", run / "model", "--experts", "4", "--out", tmp_path / "up")
    assert "other parts than its family's" in words and not (tmp_path / "up").exists()


@pytest.mark.parametrize(
    "part, words",
    [
        ({"at": "layers.*", "part": "deap_norm"}, "'deap_norm' is no part; nearest: 'deep_norm'"),
        ({"at": "layers.5", "part": "post_norm"}, "the model has layers 0 to 1"),
        ({"at": "layers.*.self_attn", "part": "sliding_window", "window": 0}, "window is 0"),
    ],
)
def test_a_wrong_part_is_one_line_and_nothing_is_written(folder, tmp_path, capsys, part, words):
    arguments = [
        "pretrain",
        folder / "run.toml",
        "--out",
        tmp_path / "run",
        "--shape.parts",
        json.dumps(part),
    ]
    message = refused(capsys, *arguments)
    assert message.startswith("ConfigError: shape.parts: ") and words in message
    assert not (tmp_path / "run" / "model").exists()


def test_help_lists_the_parts(capsys):
    with pytest.raises(SystemExit):
        cli.main(["pretrain", "--help", "parts"])
    page = capsys.readouterr().out
    assert "deep_norm" in page and "arXiv:2203.00555" in page
