"""A model from [shape] and a tokenizer: trained, read by transformers, measured beside n-grams, resumed."""

import json
import math

import pytest
import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers, trainers

import unfreeze
from unfreeze import cli
from unfreeze.data import Example, encode_files, load_tokenizer, pack, validation_batches
from unfreeze.evaluate.perplexity import heldout
from unfreeze.job.watch.validation import supervised_bytes
from unfreeze.objectives.cross_entropy import cross_entropy

WORDS = "the wind blows over 山 and the river runs to 海 under a cold moon — émigré".split()


def texts(count):
    return [
        " ".join(WORDS[(7 * i + 3 * j * j) % len(WORDS)] for j in range(12 + i % 9)) for i in range(count)
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A byte-level tokenizer of 300 tokens, and 60 texts."""
    here = tmp_path_factory.mktemp("new")
    (here / "tok").mkdir()
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(texts(60), trainer)
    made.save(str(here / "tok" / "tokenizer.json"))
    (here / "tok" / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}')
    rows = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts(60))
    (here / "texts.jsonl").write_text(rows, encoding="utf-8")
    return here


def command(folder, out, *more):
    fixed = ["--tokenizer", folder / "tok", "--data", folder / "texts.jsonl", "--out", out, "--steps", "4"]
    sizes = "--shape.hidden-size 32 --shape.num-hidden-layers 2 --shape.num-attention-heads 2".split()
    others = "--tokens-per-step 256 --validation-fraction 0.2 --watch.samples 1 --sequence-length 64".split()
    return ["pretrain", *map(str, fixed), *sizes, *others, *more]


MOE = ["--shape.family", "qwen3_moe", "--shape.num-experts", "4"]


@pytest.mark.parametrize("family", [["--shape.family", "llama"], MOE])
def test_transformers_reads_the_result(folder, tmp_path, unfreeze_json, family):
    result = unfreeze_json(*command(folder, tmp_path / "run", *family))
    assert result["finished"] and result["loss_last"] < result["loss_first"]
    assert result["loss_first"] == pytest.approx(math.log(320), abs=0.3)  # 300 ids in 320 rows
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "run" / "model", dtype=torch.float32
    )
    ids = transformers.AutoTokenizer.from_pretrained(tmp_path / "run" / "model")("the river 山")["input_ids"]
    ours = unfreeze.load(tmp_path / "run", dtype="float32")
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(ours.logits([ids])[0], expected, atol=1e-5, rtol=1e-4)


def test_rows_without_a_token_are_never_sampled(folder, tmp_path, unfreeze_json):
    unfreeze_json(*command(folder, tmp_path / "run", "--shape.family", "llama"))
    model = unfreeze.load(tmp_path / "run", dtype="float32")
    with torch.no_grad():
        model.decoder.lm_head.weight[:20] *= 0.01
        model.decoder.lm_head.weight[300:] = (
            50 * model.decoder.lm_head.weight[20:40]
        )  # likelier than any token
    prompts = [[token] for token in range(60, 160)]
    likely = [int(logits[-1].argmax()) for logits in model.logits(prompts)]
    assert max(likely) >= 300  # control arm: a sampler that takes the head as it is would choose them
    answers = model.generate(prompts, max_new_tokens=10, temperature=1.0, seed=0, n=10)
    drawn = [token for answer in answers for token in answer]
    assert len(drawn) > 5000 and max(drawn) < 300


def test_the_start_says_the_parameters_and_n_grams(folder, tmp_path, capsys, read_events):
    assert cli.main(command(folder, tmp_path / "run", *MOE)) == 0
    lines = capsys.readouterr().err
    assert "2 of 4 experts a token;" in lines and "active," in lines and "without embeddings)" in lines
    (baseline,) = read_events(tmp_path / "run", "baseline")
    bits = {each["order"]: each["bits_per_byte"] for each in baseline["ngrams"]}
    assert bits[5] < bits[3] < bits[1] and baseline["all_rows"] and baseline["all_held_out"]
    assert f"unigram {bits[1]:.3f}, trigram {bits[3]:.3f}, 5-gram {bits[5]:.3f}" in lines.replace("\n  ", " ")
    last = read_events(tmp_path / "run", "eval")[-1]
    assert f"{last['bits_per_byte']:.3f} held out: below the unigram, above the trigram" in lines
    # the bytes of the held-out targets are those of the raw text, less each first token
    held_out = read_events(tmp_path / "run", "data")[0]["held_out"]
    assert last["rows"] == held_out and baseline["held_out_bytes"] > 0
    assert last["bits_per_byte"] == pytest.approx(
        last["loss"] / math.log(2) * last["tokens"] / baseline["held_out_bytes"], rel=1e-6
    )


def test_a_resumed_run_keeps_its_shape_and_another_is_refused(folder, tmp_path, unfreeze_json, capsys):
    unfreeze_json(*command(folder, tmp_path / "run", *MOE))
    longer = ["--steps", "6", "--save.allow-changed", "steps"]
    again = unfreeze_json(*command(folder, tmp_path / "run", *MOE, *longer))
    assert again["finished"] and again["steps"] == 6
    whole = unfreeze_json(*command(folder, tmp_path / "whole", *MOE, "--optimizer.schedule", "constant"))
    assert whole["finished"]
    other = command(folder, tmp_path / "run", "--shape.family", "llama", "--steps", "8")
    assert cli.main([*other, "--quiet"]) == 2
    assert "shape.family" in capsys.readouterr().err


@pytest.mark.parametrize(
    "change, words",
    [
        ({"--shape.num-attention-heads": "3"}, "hidden_size 32 is not a multiple of num_attention_heads 3"),
        ({"--shape.family": "gpt5"}, "'gpt5' cannot be made new"),
        ({"--tokenizer": "nowhere"}, "tokenizer = 'nowhere' is not a folder"),
        ({"--data": "{one}"}, "leaves none for"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(folder, tmp_path, capsys, change, words):
    (tmp_path / "one.txt").write_text("one line alone\n")
    arguments = command(folder, tmp_path / "run", "--shape.family", "llama")
    for flag, value in change.items():
        arguments[arguments.index(flag) + 1] = value.format(one=tmp_path / "one.txt")
    assert cli.main([*arguments, "--quiet"]) == 2
    error = capsys.readouterr().err.strip()
    assert words in error and len(error.splitlines()) == 2 and len(error.splitlines()[0]) <= 160
    assert not (tmp_path / "run" / "model").exists() and not list(tmp_path.glob("run/state/step*"))


# --- bits per byte


@pytest.fixture(scope="module")
def examples(folder):
    return encode_files(
        [str(folder / "texts.jsonl")],
        tokenizer=load_tokenizer(folder / "tok"),
        sequence_length=16,
        truncation="split",
        supervise="all",
    ).examples


def test_bytes_are_those_of_the_raw_text_though_pieces_cut_characters(folder, tmp_path):
    tokenizer = load_tokenizer(folder / "tok")
    written = ["龘靐齉爩鱻" * 7, "the river 龗 麤 runs to 海 " * 6]  # characters of three tokens
    rows = "".join(json.dumps({"text": text}) + "\n" for text in written)
    (tmp_path / "rare.jsonl").write_text(rows)
    options = {"sequence_length": 16, "truncation": "split", "supervise": "all"}
    examples = encode_files([str(tmp_path / "rare.jsonl")], tokenizer=tokenizer, **options).examples
    # a piece begins with the last token of the one before it, so only the first token of a text is no target
    begun = {example.row: example.tokens[0] for example in reversed(examples)}
    assert len(begun) == 2 < len(examples)
    firsts = sum(len(tokenizer.token_bytes(token) or b"") for token in begun.values())
    raw = sum(len(text.encode()) for text in written)
    assert supervised_bytes(examples, tokenizer) == raw - firsts
    # control arm: decoding pieces turns parts of a character into U+FFFD, three bytes
    decoded = sum(len(tokenizer.decode(list(example.tokens[1:])).encode()) for example in examples)
    assert decoded > raw


def test_the_loss_is_one_whatever_the_batch_and_the_packing(examples):
    from unfreeze.models.from_shape import config_of

    config = config_of(
        "qwen3_moe",
        {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "num_experts": 4},
        {},
        vocabulary=300,
        positions=64,
    )
    model = unfreeze.models.from_config(config, torch.float32, device="cpu")
    unfreeze.models.initialize(model, 0)
    kept = examples[:32]
    longest = max(example.num_tokens for example in kept)
    losses = [
        heldout(model, validation_batches(kept, count * longest), bytes_total=1000).loss
        for count in (1, 4, 16)
    ]
    assert losses == pytest.approx([losses[0]] * 3, abs=1e-6)
    with torch.no_grad():
        alone = [cross_entropy(model.hidden(pack([e])), model.lm_head, pack([e])) for e in kept[:8]]
        batch = pack(list(kept[:8]))
        packed = cross_entropy(model.hidden(batch), model.lm_head, batch)
    assert float(packed.sum) == pytest.approx(sum(float(each.sum) for each in alone), rel=1e-5)
    # control arm: documents that see each other have another loss
    joined = [token for example in kept[:8] for token in example.tokens]
    weights = [weight for example in kept[:8] for weight in example.weights]
    with torch.no_grad():
        mixed = pack([Example(joined, weights)])
        seen = cross_entropy(model.hidden(mixed), model.lm_head, mixed)
    assert abs(float(seen.sum) / float(packed.sum) - 1) > 1e-4
