"""Rows of several turns under a template that rewrites earlier turns, through the whole of sft: against
transformers and peft, and over days."""

import json
import re
import shutil
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from peft import PeftModel
from tokenizers import decoders, models, pre_tokenizers, trainers

from unfreeze import cli
from unfreeze.adapters import LoraConfig, attach, save_adapter
from unfreeze.checkpoint import open_checkpoint
from unfreeze.generate.open import open_model

RELEASED = Path(__file__).resolve().parents[3] / "shared" / "data" / "templates" / "qwen3.jinja"
OWN = Path(__file__).resolve().parents[1] / "data" / "tokens" / "templates" / "qwen3.jinja"
DATED = (
    "{{ '<|im_start|>system\n' + strftime_now('%d %b %Y') + '<|im_end|>\n' }}{% for m in messages %}{{"
    " '<|im_start|>' + m.role + '\n' }}{% if m.reasoning_content %}{{ '<think>' + m.reasoning_content +"
    " '</think>' }}{% endif %}{{ m.content + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{"
    " '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
STEPS, SEED = 20, 0


def talk(number: int) -> list[dict]:
    """Two or three turns; the last of some rows with reasoning."""
    messages = []
    for turn in range(2 + number % 2):
        thought = {"reasoning_content": f"Count {number} and {turn}."} if (number + turn) % 3 == 0 else {}
        messages += [
            {"role": "user", "content": f"What is {number} plus {turn}?"},
            {"role": "assistant", "content": f"It is {number + turn}.", **thought},
        ]
    return messages


ROWS = [talk(number) for number in range(5)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """A Qwen3 of 60 thousand weights as transformers saves it, with a byte-level tokenizer and Qwen3's
    template."""
    folder = tmp_path_factory.mktemp("qwen3")
    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(
        [message["content"] for row in ROWS for message in row] + ["user system assistant think"], trainer
    )
    bpe.add_tokens(["<think>", "</think>"])
    bpe.save(str(folder / "tokenizer.json"))
    template = (RELEASED if RELEASED.exists() else OWN).read_text(encoding="utf-8")
    template = re.sub(r"\{%-? (end)?generation -?%\}", "", template)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=bpe.get_vocab_size(),
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        initializer_range=0.1,
        tie_word_embeddings=False,
    )
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("data") / "talks.jsonl"
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in ROWS), encoding="utf-8")
    return path


def sft(model: Path, data: Path, out: Path, *more: object) -> list[dict]:
    arguments = [
        "sft",
        "--quiet",
        "--model",
        model,
        "--data",
        data,
        "--out",
        out,
        "--watch.samples",
        0,
        "--dtype",
        "float32",
        "--seed",
        SEED,
        "--tokens-per-step",
        256,
        "--optimizer.schedule",
        "constant",
        "--optimizer.warmup",
        0,
        "--learning-rate",
        1e-3,
        "--lora.rank",
        4,
        "--lora.alpha",
        8,
        *more,
    ]
    assert cli.main(list(map(str, arguments))) == 0
    return [json.loads(line) for line in (out / "events.jsonl").read_text(encoding="utf-8").splitlines()]


def of_transformers(checkpoint: Path, tmp_path: Path) -> list[float]:
    """The same training by transformers, peft and torch: one turn a step, rendered and tokenized by
    AutoTokenizer, in the order of (seed, epoch)."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    documents = []
    for row in ROWS:
        for turn in range(1, len(row), 2):
            prompt = tokenizer.apply_chat_template(row[:turn], add_generation_prompt=True, tokenize=False)
            whole = tokenizer.apply_chat_template(row[: turn + 1], tokenize=False)
            assert whole.startswith(prompt) and whole.endswith("<|im_end|>\n")
            ids = [
                tokenizer(text, add_special_tokens=False).input_ids
                for text in (prompt, whole[len(prompt) : -1])
            ]
            documents.append(ids)

    ours = open_model(open_checkpoint(str(checkpoint)), torch.float32, torch.device("cpu"))
    attach(ours, LoraConfig(rank=4, alpha=8), SEED)
    # the same random A; of a dense model it is peft's own layout
    save_adapter(ours, tmp_path / "start", base_name=str(checkpoint))
    base = transformers.Qwen3ForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager"
    )
    model = PeftModel.from_pretrained(base, tmp_path / "start", is_trainable=True)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    order: list[int] = []
    for epoch in range(3):  # documents, and then their batches, each of one
        documents_B = np.random.default_rng([SEED, epoch]).permutation(len(documents))
        of_batches = np.random.SeedSequence([SEED, epoch], spawn_key=(1,))
        order += list(documents_B[np.random.default_rng(of_batches).permutation(len(documents))])
    losses = []
    for place in order[:STEPS]:
        prompt, completion = documents[place]
        ids = torch.tensor([prompt + completion])
        labels = torch.tensor([[-100] * len(prompt) + completion])
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


def test_twenty_steps_on_talks_of_several_turns_equal_transformers_and_peft(checkpoint, rows, tmp_path):
    events = sft(checkpoint, rows, tmp_path / "run", "--steps", STEPS, "--training.packing", "none")
    data = next(event for event in events if event["kind"] == "data")
    assert data["rows"] == 5 and data["examples"] == sum(len(row) // 2 for row in ROWS) == 12
    ours = [event["loss"] for event in events if event["kind"] == "train"]
    theirs = of_transformers(checkpoint, tmp_path)
    assert (
        len(ours) == len(theirs) == STEPS
        and max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) <= 1e-5
    )


class AnotherDay(datetime):
    """The clock of another day."""

    @classmethod
    def now(cls, tz=None):
        return cls(2031, 3, 14, 15, 9, 26)


@pytest.fixture
def dated(checkpoint, tmp_path) -> Path:
    """The checkpoint with a template that writes today's date, as Llama-3.2's does."""
    folder = shutil.copytree(checkpoint, tmp_path / "dated")
    (folder / "chat_template.jinja").write_text(DATED, encoding="utf-8")
    return folder


def losses(events: list[dict]) -> list[float]:
    return [event["loss"] for event in events if event["kind"] == "train"]


def test_a_run_goes_on_another_day_with_the_same_losses(dated, rows, tmp_path, monkeypatch):
    """Four steps today, and the same run to step eight years later. Control arm: a run that starts then has
    other losses."""
    apart, together, later = (tmp_path / name for name in ("apart", "together", "later"))
    sft(dated, rows, apart, "--steps", 4)
    date = json.loads((apart / "resolved_config.json").read_text(encoding="utf-8"))["data.template_date"]
    whole = losses(sft(dated, rows, together, "--steps", 8, "--data.template-date", date))
    monkeypatch.setattr("unfreeze.job.end.folder.datetime", AnotherDay)
    monkeypatch.setattr("unfreeze.data.tokens.templates.datetime", AnotherDay)
    assert losses(sft(dated, rows, apart, "--steps", 8, "--save.allow-changed", "steps")) == whole
    assert (
        json.loads((apart / "resolved_config.json").read_text(encoding="utf-8"))["data.template_date"] == date
    )
    assert losses(sft(dated, rows, later, "--steps", 8)) != whole


def test_a_date_or_variable_that_is_none_is_refused(dated, rows, tmp_path, capsys):
    for flag, value, says in (
        ("date", "tomorrow", "expected a date such as"),
        ("variables", "thinking", "expected NAME=VALUE"),
    ):
        assert (
            cli.main(
                [
                    "sft",
                    "--model",
                    str(dated),
                    "--data",
                    str(rows),
                    "--out",
                    str(tmp_path / "x"),
                    f"--template-{flag}",
                    value,
                ]
            )
            == 2
        )
        assert says in capsys.readouterr().err


def test_a_template_variable_reaches_the_template(checkpoint, rows, tmp_path, capsys):
    """Qwen3's `enable_thinking=false` puts an empty think block into the prompt."""
    if not RELEASED.exists():
        pytest.skip("the release's template is not on this machine")
    shown = []
    for more in ([], ["--data.template-variables", "enable_thinking=false"]):
        assert (
            cli.main(
                [
                    "data",
                    "show",
                    str(rows),
                    "--model",
                    str(checkpoint),
                    "--row",
                    "3",
                    "--json",
                    "--quiet",
                    *more,
                ]
            )
            == 0
        )
        sample = json.loads(capsys.readouterr().out)["samples"][0]
        text = "".join(
            text for text, weight in zip(sample["texts"], sample["weights"], strict=True) if not weight
        )
        shown.append("<think>\n\n</think>" in text)
    assert shown == [False, True]
