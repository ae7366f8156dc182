"""Each word of another tool is answered by what is there; the commands and fields named are real."""

import importlib
import json
import re

import pytest

import unfreeze
from unfreeze import cli
from unfreeze.commands.demo import TINY_K2
from unfreeze.config import synonyms
from unfreeze.config.names import spellings
from unfreeze.config.parse import parse
from unfreeze.config.python import in_python
from unfreeze.config.sft import Config
from unfreeze.core.errors import ConfigError

FLAGS = [
    ("--qlora", "a 4-bit or 8-bit checkpoint is trained in its own format"),
    ("--resume-from-checkpoint", "the same command resumes its run"),
    ("--neftune-noise-alpha", "NEFTune is not built"),
    ("--flash-attn", "kernels are chosen for the machine"),
    ("--attn-implementation", "kernels are chosen for the machine"),
    ("--use-liger", "kernels are chosen for the machine"),
    ("--fsdp", "torchrun starts one process per GPU"),
    ("--deepspeed", "torchrun starts one process per GPU"),
    ("--push-to-hub", "a finished run is uploaded by export"),
    ("--hub-model-id", "a finished run is uploaded by export"),
    ("--chat-template", "chat_template.jinja in its folder"),
    ("--trust-remote-code", "code from a checkpoint is never run"),
    ("--logging-steps", "every step is recorded in RUN/events.jsonl"),
    ("--resize-token-embeddings", "tokens are added from a file, one per line"),
    ("--modules-to-save", "modules train fully beside the adapters by their names"),
    ("--group-by-length", "packing fills batches"),
    ("--rope-theta", "the rotary table is that of the model's config.json"),
    ("--completion-only-loss", "only answers are trained on"),
    ("--top-k", "answers are sampled from all words, as the loss needs"),
]
RUN = ["sft", "--model", "m", "--data", "d.jsonl"]


@pytest.mark.parametrize("flag, says", FLAGS)
def test_a_flag_that_has_no_field_is_answered_with_what_to_do(flag, says, capsys, tmp_path):
    assert cli.main([*RUN, flag, "5"]) == 2
    error = capsys.readouterr().err
    key = flag.removeprefix("--").replace("-", "_")
    remedy = f"next: {synonyms.NOT_HERE[key].next}\n"
    assert f"there is no flag {flag}; " in error and says in error and error.endswith(remedy)
    assert "nearest" not in error and "--help" not in remedy

    file = tmp_path / "run.toml"
    file.write_text(f'model = "m"\ndata = "d"\n[training]\n{key} = 5\n', encoding="utf-8")
    assert cli.main(["sft", str(file)]) == 2
    error = capsys.readouterr().err
    assert f"unknown key training.{key}; " in error and says in error and error.endswith(remedy)

    with pytest.raises(ConfigError) as raised:
        unfreeze.sft(model="m", data="d", **{key: 5})
    assert in_python(Config, says) in raised.value.message
    assert raised.value.next == in_python(Config, synonyms.NOT_HERE[key].next)


def test_a_command_within_a_remedy_stays_a_command_in_python():
    text = "torchrun -m unfreeze sft --model MODEL; then --steps 5"
    assert in_python(Config, text) == "torchrun -m unfreeze sft --model MODEL; then steps=5"


VALUES = [
    (["export", "r", "--for", "lmstudio"], "LM Studio read what --for gguf writes"),
    (["merge", "r", "--to", "q4_k_m"], "unfreeze export RUN --for gguf, then llama.cpp's llama-quantize"),
    ([*RUN, "--watch.track", "mlflow"], "RUN/events.jsonl has every figure"),
    ([*RUN, "--optimizer.moments", "adamw_8bit"], "; it is called int8 here"),
    ([*RUN, "--train", "lora"], "; it is called adapters here"),
]


@pytest.mark.parametrize("arguments, says", VALUES)
def test_a_value_of_another_tool_is_answered_with_ours(arguments, says, capsys):
    assert cli.main(arguments) == 2
    error = capsys.readouterr().err
    assert "is not one of" in error and says in error


def test_a_value_in_a_file_and_in_python_is_answered_too(tmp_path, capsys):
    file = tmp_path / "run.toml"
    file.write_text('model = "m"\ndata = "d"\n[optimizer]\nmoments = "8bit"\n', encoding="utf-8")
    assert cli.main(["sft", str(file)]) == 2
    assert "; it is called int8 here" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="; it is called adapters here"):
        unfreeze.sft(model="m", data="d", train="qlora")


@pytest.mark.parametrize(
    "word, says, remedy",
    [
        ("benchmark", "eval scores a model", "unfreeze eval RUN --tasks"),
        ("quantise", "the command is quantize, for a model in bf16", "unfreeze quantize MODEL --to int4"),
        ("vllm", "serve answers OpenAI's clients", "unfreeze serve MODEL_OR_RUN"),
        ("train-tokenizer", "tokenizer train makes one from text", "unfreeze tokenizer train corpus.jsonl"),
        ("ppo", "grpo learns from rewards", "unfreeze grpo --model MODEL"),
        ("resize", "tokens are added from a file", "--new-tokens new.txt"),
        ("ollama", "export writes a GGUF", "unfreeze export RUN --for gguf"),
        ("perplexity", "eval measures the perplexity of a text", "--tasks ppl:book.txt"),
    ],
)
def test_a_command_that_is_not_here_names_the_tool_that_has_it(word, says, remedy, capsys):
    assert cli.main([word]) == 2
    message, next_line = capsys.readouterr().err.splitlines()
    assert says in message and remedy in next_line


def test_a_field_of_training_is_not_sent_to_a_command_without_it(capsys):
    assert cli.main(["chat", str(TINY_K2), "--lr", "1"]) == 2
    assert "; training has it: unfreeze sft --learning-rate\n" in capsys.readouterr().err
    assert cli.main([*RUN, "--kd_alpha", "1"]) == 2
    assert "; training has it: unfreeze distill --alpha\n" in capsys.readouterr().err
    grpo = ["grpo", *RUN[1:], "--reward", "my.py"]
    assert cli.main([*grpo, "--epsilon", "0.2", "--loss-type", "dapo"]) == 2
    error = capsys.readouterr().err
    assert (
        "; it is called --clip-low here (the bound 1 - clip_low)" in error and "of grpo: ppo, cispo" in error
    )


def hints() -> list[str]:
    """All that the tables say, message and remedy apart."""
    both = [*synonyms.NOT_HERE.values(), *synonyms.COMMANDS.values()]
    return sorted({part for hint in both for part in hint} | set(synonyms.VALUES.values()))


def config_of(command, part=""):
    module = importlib.import_module(cli.COMMANDS[command].module)
    module = getattr(module, "PARTS", {}).get(part, module)
    return getattr(module, {"kernels": "Listed", "synth": "PlanConfig"}.get(command, "Config"))


def commands_in(text: str) -> list[list[str]]:
    """The words of each `unfreeze COMMAND …` in a hint."""
    command = "|".join(cli.COMMANDS)
    named = re.findall(rf"unfreeze ((?:{command})(?: [^,;:(]+(?:,\d[^ ,;]*)?)?)", text)
    return [words.split() for words in named]


LINES = [words for text in hints() for words in commands_in(text)]


@pytest.mark.parametrize(
    "words", [words for words in LINES if any(w.startswith("--") for w in words)], ids=str
)
def test_each_command_named_is_one_that_parses(words):
    command, *arguments = words
    if "--sweep" in arguments:
        arguments = arguments[: arguments.index("--sweep")]
    if arguments[0].startswith("--") and "--model" not in arguments and command == "sft":
        arguments += ["--model", "MODEL", "--data", "FILE"]
    positional = not arguments[0].startswith("--")
    config = config_of(command, arguments[0])
    parse(config, arguments, command=command, description="", positional=positional)


def test_control_arm_a_command_with_a_flag_that_is_not_there_is_seen():
    (words,) = commands_in("it is done by unfreeze export RUN --format peft")
    with pytest.raises(ConfigError, match="no flag --format"):
        parse(config_of("export"), words[1:], command="export", description="", positional=True)


def test_every_flag_named_by_itself_is_a_field():
    every = {
        f"--{name.replace('_', '-')}"
        for command in cli.COMMANDS
        if command not in ("bench", "kernels", "drill", "data")
        for name in spellings(config_of(command))
    }
    named = {flag for text in hints() for flag in re.findall(r"(?<![\w-])--[a-z][\w.-]*", text)}
    others = {"--sweep", "--nproc-per-node", "--model_name_or_path", "--dataset_name", "--use_peft"}
    others |= {"--neftune_noise_alpha", "--lora_dropout", "--model_args", "--tasks"}
    others |= {"--enable-lora", "--lora-modules", "--outtype"}
    assert named - every <= others, f"no command has {sorted(named - every - others)}"


def test_no_hint_is_longer_than_a_line():
    long = [text for text in hints() if len(text) > 140]
    assert not long


def test_tokens_added_by_transformers_train(tmp_path, unfreeze_json):
    """Added and resized elsewhere: every weight trains, the new rows among them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config

    bytes_alone = Tokenizer(models.BPE())
    bytes_alone.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_alone.decoder = decoders.ByteLevel()
    every_byte = trainers.BpeTrainer(initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    bytes_alone.train_from_iterator([], every_byte)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytes_alone)
    tokenizer.add_special_tokens({"eos_token": "<end>"})
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=256,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    before = len(tokenizer)
    assert tokenizer.add_tokens(["<new>"]) == 1
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(tmp_path / "m")
    tokenizer.save_pretrained(tmp_path / "m")
    data = tmp_path / "new.jsonl"
    data.write_text(json.dumps({"text": "<new> is a token."}) + "\n", encoding="utf-8")
    result = unfreeze_json(
        "sft", "--train", "all", "--model", tmp_path / "m", "--data", data, "--steps", 1, "--out",
        tmp_path / "r", "--watch.samples", 0, "--dtype", "float32", "--tokens-per-step", 64,
    )  # fmt: skip
    assert result["finished"]
    encoded = unfreeze.load(tmp_path / "r").tokenizer.encode("<new> is a token.", specials=True)
    assert encoded[0] == before
