"""`--new-tokens`: runs that add tokens, and what transformers and peft read of their folders."""

import json
import shutil
import warnings
from pathlib import Path

import gguf
import pytest
import tokenizers
import torch
import transformers
from peft import PeftModel
from safetensors.torch import load_file
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

import unfreeze
from unfreeze import cli
from unfreeze.commands import serve
from unfreeze.commands.demo import TINY_K2
from unfreeze.commands.serve_models import sources_of
from unfreeze.config.parse import parse
from unfreeze.core.errors import ConfigError
from unfreeze.data import load_tokenizer
from unfreeze.generate.new_tokens import add_tokens, read_new_tokens

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
NEW = ["<call>", "</call>", "naïve sum"]
WORDS = "--tokens-per-step 96 --learning-rate 1e-2 --watch.samples 0 --dtype float32 --lora.rank 2".split()
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
}
TEXT = "Please <call>add 2 3</call> as a naïve sum."


def chat(n):
    return {"prompt": f"What is {n} and 3?", "completion": f"It is <call>add {n} 3</call>, a naïve sum."}


@pytest.fixture(scope="module", params=["untied", "tied"])
def base(request, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator([json.dumps(chat(n)) for n in range(9)], trainer)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHATML
    )
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    # tied: a vocabulary that is padded by one row, so that one new token is free and two are not
    tied = request.param == "tied"
    size = bpe.get_vocab_size() + tied
    config = transformers.Qwen3Config(**SIZES, vocab_size=size, tie_word_embeddings=tied, eos_token_id=2)
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    (folder / "new.txt").write_text("\n".join(NEW) + "\n")
    (folder / "rows.jsonl").write_text("".join(json.dumps(chat(n)) + "\n" for n in range(6)))
    pairs = [
        {**chat(n), "chosen": chat(n)["completion"], "rejected": f"It is {n}, no <call>."} for n in range(4)
    ]
    for pair in pairs:
        del pair["completion"]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    return folder


def run_of(base, files, out, *more, command="sft", data="rows.jsonl", code=0):
    given = ["--model", base, "--data", files / data, "--out", out, *more]
    assert cli.main([command, "--quiet", *map(str, given), *WORDS]) == code
    return out


@pytest.fixture(scope="module")
def run(base, files, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "new"
    more = ["--new-tokens", files / "new.txt", "--steps", 4, "--save.every", 2]
    return run_of(base, files, out, *more)


def in_peft(base, run):
    """transformers and peft as the card says."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(run / "adapter")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        if len(tokenizer) > model.config.vocab_size:
            model.resize_token_embeddings(len(tokenizer))
        return tokenizer, PeftModel.from_pretrained(model, run / "adapter").eval()


def logits_of(model, ids):
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0]


def test_the_plan_names_the_new_tokens_and_an_export_that_works(run):
    events = map(json.loads, (run / "events.jsonl").read_text().splitlines())
    plan = next(event for event in events if event["kind"] == "plan")
    assert "rank 2 on all-linear and 3 new tokens, " in " ".join(plan["start"])
    assert plan["export_for"] == "peft" and "unfreeze merge RUN --to bf16" in plan["export_note"]


def test_a_new_token_is_one_id_here_and_in_transformers(base, run):
    ours, theirs = (
        load_tokenizer(run / "tokenizer"),
        transformers.AutoTokenizer.from_pretrained(run / "adapter"),
    )
    before = load_tokenizer(base)
    ids = [before.vocab_size + n for n in range(3)]
    assert [ours.encode(text, specials=False) for text in NEW] == [[id] for id in ids]
    assert [theirs.convert_tokens_to_ids(text) for text in NEW] == ids
    assert ours.encode(TEXT, specials=False) == theirs.encode(TEXT, add_special_tokens=False)
    assert len(ours.encode(TEXT, specials=False)) < len(before.encode(TEXT, specials=False))  # control
    assert ours.decode(ours.encode(TEXT, specials=False)) == TEXT
    # the rows of the run were encoded with them
    event = next(e for e in map(json.loads, (run / "events.jsonl").open()) if e["kind"] == "data")
    rendered = CHATML and [
        f"<|im_start|>user\n{chat(n)['prompt']}<|im_end|>\n<|im_start|>assistant\n"
        f"{chat(n)['completion']}<|im_end|>\n"
        for n in range(6)
    ]
    wanted = sum(len(theirs.encode(text, add_special_tokens=False)) for text in rendered)
    assert abs(event["tokens"] - wanted) <= 6  # the newline after the last turn is not an example's


def test_peft_has_the_logits_of_the_run_and_of_the_merged_folder(base, run, tmp_path):
    tokenizer, theirs = in_peft(base, run)
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    wanted = logits_of(theirs, ids)
    model = unfreeze.load(run, dtype="float32")
    ours = model.logits([ids])[0]
    assert ours.shape[1] == wanted.shape[1] and (ours - wanted).abs().max() < 1e-4
    assert model.tokenizer.token_id("<call>") is not None
    assert isinstance(model.chat("What is 1 and 3?", max_new_tokens=3), str)
    plain = unfreeze.load(base, dtype="float32").logits([ids[:1]])[0]
    assert (ours[:1, : plain.shape[1]] - plain).abs().max() > 1e-3  # control

    out = tmp_path / "merged"
    assert cli.main(["merge", str(run), "--no-check", "--out", str(out), "--quiet"]) == 0
    merged = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    assert (logits_of(merged, ids) - wanted).abs().max() < 1e-4
    assert merged.config.vocab_size == ours.shape[1] == len(tokenizer)
    again = transformers.AutoTokenizer.from_pretrained(out)
    assert again.encode(TEXT, add_special_tokens=False) == ids
    assert (unfreeze.load(out, dtype="float32").logits([ids])[0] - wanted).abs().max() < 1e-4
    # exported for peft: the same rows and tokenizer
    assert cli.main(["export", str(run), "--out", str(tmp_path / "e"), "--quiet"]) == 0
    one, other = (load_file(f / "adapter_model.safetensors") for f in (run / "adapter", tmp_path / "e"))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    assert (tmp_path / "e/tokenizer.json").read_bytes() == (run / "adapter/tokenizer.json").read_bytes()
    assert "resize_token_embeddings" in (run / "adapter/README.md").read_text()


def gguf_of(source, file):
    """(tensors, fields but the name) of the file that is exported."""
    assert cli.main(["export", str(source), "--for", "gguf", "--out", str(file), "--quiet"]) == 0
    reader = gguf.GGUFReader(file)
    fields = {name: field.contents() for name, field in reader.fields.items() if name != "general.name"}
    return {tensor.name: tensor.data.tobytes() for tensor in reader.tensors}, fields


def test_a_gguf_has_the_tokens_and_rows_of_the_merged_folder(base, run, tmp_path):
    tensors, fields = gguf_of(run, tmp_path / "run.gguf")
    out = tmp_path / "merged"
    assert cli.main(["merge", str(run), "--to", "bf16", "--no-check", "--out", str(out), "--quiet"]) == 0
    assert (tensors, fields) == gguf_of(out, tmp_path / "merged.gguf")
    tokens = fields["tokenizer.ggml.tokens"]
    assert tokens[-3:] == NEW and len(tokens) == fields["qwen3.vocab_size"]
    before, own = gguf_of(base, tmp_path / "base.gguf")  # control arm
    assert NEW[0] not in own["tokenizer.ggml.tokens"] and own["tokenizer.ggml.tokens"] != tokens
    assert before.keys() == tensors.keys() and before["token_embd.weight"] != tensors["token_embd.weight"]


def test_a_gguf_has_the_embeddings_of_the_merged_folder(base, files, tmp_path):
    more = ["--lora.targets", "attention,embed_tokens", "--steps", 2]
    if "untied" not in str(base):  # two matrices in the run, one in the files
        more = [word if word != more[1] else "attention" for word in more]
    run, out = run_of(base, files, tmp_path / "run", *more), tmp_path / "merged"
    assert cli.main(["merge", str(run), "--to", "bf16", "--no-check", "--out", str(out), "--quiet"]) == 0
    tensors = gguf_of(run, tmp_path / "run.gguf")[0]
    assert tensors == gguf_of(out, tmp_path / "merged.gguf")[0]
    before = gguf_of(base, tmp_path / "base.gguf")[0]
    assert (before["token_embd.weight"] != tensors["token_embd.weight"]) == ("untied" in str(base))


def test_it_is_served_by_itself_alone(base, run):
    config = parse(serve.Config, [str(run)], command="serve", description="", positional=True)
    sources = sources_of(config, print)
    assert sources.base.adapter == run / "adapter" and not sources.places and sources.name == "new"
    assert sources.manifest.tokens == run / "adapter"
    two = parse(serve.Config, [str(run), f"other={run}"], command="serve", description="", positional=True)
    with pytest.raises(ConfigError, match="is served by itself"):
        sources_of(two, print)


def test_a_resumed_run_is_the_same_and_another_file_is_refused(base, run, files, tmp_path, capsys):
    again = tmp_path / "again"
    shutil.copytree(run, again)
    for name in ("state/step-000004", "adapter"):
        shutil.rmtree(again / name)
    more = ["--new-tokens", files / "new.txt", "--steps", 4, "--save.every", 2]
    run_of(base, files, again, *more)
    one, other = (load_file(f / "adapter/adapter_model.safetensors") for f in (run, again))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    rows = [name for name in one if "trainable_tokens" in name]
    first = load_file(base / "model.safetensors")["model.embed_tokens.weight"]
    parts = load_tokenizer(base).encode(NEW[0], specials=False)
    assert rows and all(not torch.allclose(one[name][0], first[parts].mean(0), atol=1e-4) for name in rows)
    changed = tmp_path / "new.txt"
    changed.write_text("<call>\n</call>\nanother\n")
    shutil.rmtree(again / "state/step-000004")
    shutil.rmtree(again / "adapter")
    own = (files / "new.txt").read_text()
    (files / "new.txt").write_text(changed.read_text())
    try:
        run_of(base, files, again, *more, code=2)
    finally:
        (files / "new.txt").write_text(own)
    assert "has other tokens than when the run began" in capsys.readouterr().err


def test_it_goes_on_and_in_pairs(base, run, files, tmp_path):
    more = run_of(base, files, tmp_path / "more", "--adapter", run, "--steps", 1)
    one, other = (load_file(f / "adapter/adapter_model.safetensors") for f in (run, more))
    assert one.keys() == other.keys()
    assert any(not torch.equal(one[name], other[name]) for name in one if "trainable_tokens" in name)
    ours = load_tokenizer(more / "adapter")
    assert len(ours.encode("<call>", specials=False)) == 1
    pairs = run_of(
        base,
        files,
        tmp_path / "pairs",
        *("--new-tokens", files / "new.txt", "--steps", 1),
        command="prefer",
        data="pairs.jsonl",
    )
    events = [json.loads(line) for line in (pairs / "events.jsonl").open()]
    step = next(event for event in events if event["kind"] == "train")
    assert step["loss"] == pytest.approx(0.6931, abs=1e-3)  # the policy is the reference at first
    assert any("trainable_tokens" in name for name in load_file(pairs / "adapter/adapter_model.safetensors"))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "has 0 tokens"),
        ("\n\n", "has 0 tokens"),
        ("<a>\n<a>\n", "has '<a>' twice"),
        ("<a>\n   \n", "a token of spaces only"),
        ("<|im_end|>\n", "has 1 of 1 token already; first: '<|im_end|>'"),
        ("What\n", "token already"),
        ('["<a>", 3]', "holds 3, which is no token"),
    ],
)
def test_bad_files_are_refused_in_one_line_before_work(base, files, tmp_path, capsys, text, why):
    (tmp_path / "new.txt").write_text(text)
    run_of(base, files, tmp_path / "no", "--new-tokens", tmp_path / "new.txt", "--steps", 1, code=2)
    said = capsys.readouterr().err
    assert why in said and len(said.strip().splitlines()) == 2
    assert not (tmp_path / "no/adapter").exists()


def test_a_tokenizer_of_tiktoken_is_refused_by_name(files, tmp_path, capsys):
    more = ["--new-tokens", files / "new.txt", "--steps", 1]
    run_of(TINY_K2, files, tmp_path / "no", *more, code=2)
    assert "has a tokenizer in tiktoken's format" in capsys.readouterr().err


def test_forms_of_the_file(tmp_path):
    path = tmp_path / "new.json"
    path.write_text('["<a>", {"content": "<b>", "special": true}]')
    assert [(token.text, token.special) for token in read_new_tokens(path)] == [("<a>", False), ("<b>", True)]
    path.write_text("[INST]\r\n\r\n[/INST] x\r\n")
    assert [token.text for token in read_new_tokens(path)] == ["[INST]", "[/INST] x"]


@pytest.mark.parametrize("prefix", [True, False])
def test_a_token_is_found_in_the_middle_of_a_word_of_llama_2s_tokenizer(prefix, tmp_path):
    """Its normalizer puts a "▁" before the text, and before each token that is looked for in normalized text."""
    bpe = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    steps = [normalizers.Prepend("▁")] * prefix + [normalizers.Replace(" ", "▁")]
    bpe.normalizer = normalizers.Sequence(steps)
    trainer = trainers.BpeTrainer(vocab_size=90, special_tokens=["<unk>"], show_progress=False)
    bpe.train_from_iterator(["It is x < c a l > add 2 3 < / c >, a naive sum."] * 3, trainer)
    source = tmp_path / "base"
    transformers.PreTrainedTokenizerFast(tokenizer_object=bpe, unk_token="<unk>").save_pretrained(source)
    (source / "config.json").write_text("{}")
    (tmp_path / "new.txt").write_text("<call>\nnaive sum\n")
    before = load_tokenizer(source)
    added = add_tokens(source, before, read_new_tokens(tmp_path / "new.txt"), tmp_path / "out")
    ours, theirs = (load_tokenizer(added.folder), transformers.AutoTokenizer.from_pretrained(added.folder))
    for text in ("x<call>add", "<call><call>", "a naive sum.", "\n<call>"):
        ids = ours.encode(text, specials=False)
        assert ids == theirs.encode(text, add_special_tokens=False)
        wanted = [added.ids[0]] * text.count("<call>") + [added.ids[1]] * text.count("naive sum")
        assert [id for id in ids if id in added.ids] == wanted


def test_a_base_packed_while_loaded_merges_into_a_folder_that_loads(base, files, tmp_path, unfreeze_json):
    run = run_of(
        base, files, tmp_path / "run", "--new-tokens", files / "new.txt", "--quantize", "int8", "--steps", 2
    )
    merged = Path(unfreeze_json("merge", run, "--out", tmp_path / "merged")["path"])
    size = len(transformers.AutoTokenizer.from_pretrained(merged))
    assert json.loads((merged / "config.json").read_text())["vocab_size"] == size
    assert unfreeze.load(merged).decoder.shape.vocab_size == size


def test_merge_and_eval_score_the_model_before_it_had_the_tokens(
    base, files, tmp_path, unfreeze_json, read_events
):
    held = tmp_path / "held.jsonl"
    held.write_text("".join(json.dumps(chat(n)) + "\n" for n in range(20, 23)))
    words = ["--new-tokens", files / "new.txt", "--validation", held, "--steps", 2]
    run = run_of(base, files, tmp_path / "run", *words)
    gain = unfreeze_json("merge", run, "--to", "bf16", "--out", tmp_path / "merged")["gain"]
    assert gain["base"] == pytest.approx(read_events(run, "eval")[0]["loss"], rel=1e-4)
    scored = unfreeze_json("eval", run, "--tasks", f"rows:{held}", "--max-new-tokens", 2)
    assert "base" in json.dumps(scored)


def test_a_packed_head_is_trained_beside_and_gets_no_rows(base, files, tmp_path, unfreeze_json, capsys):
    if json.loads((base / "config.json").read_text())["tie_word_embeddings"]:
        pytest.skip("a tied head is not packed")
    words = ["--to", "int8", "--modules", "all-linear", "lm_head", "--out", tmp_path / "packed"]
    packed = unfreeze_json("quantize", base, *words)["path"]
    run_of(packed, files, tmp_path / "run", "--steps", 1, "--lora.targets", "all-linear", "lm_head")
    run_of(packed, files, tmp_path / "other", "--steps", 1, "--new-tokens", files / "new.txt", code=2)
    assert "the output head, which is packed" in capsys.readouterr().err


@pytest.mark.parametrize("text, unused", [("<call>one", True), ("<call>one<never>", False)])
def test_new_tokens_that_no_row_has_are_warned_of(text, unused, base, tmp_path):
    """Control arm: rows that have both."""
    (tmp_path / "new.txt").write_text("<call>\n<never>\n")
    rows = [{"prompt": f"{n}?", "completion": text} for n in range(3)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = run_of(base, tmp_path, tmp_path / "run", "--new-tokens", tmp_path / "new.txt", "--steps", "1")
    words = "1 of 2 new tokens are in none of 3 rows; first: '<never>'"
    assert (words in (run / "events.jsonl").read_text()) == unused


def test_the_remedy_for_a_tokenizer_of_tiktoken_gives_the_same_tokens(tmp_path):
    """Control arm: beside a config.json that transformers does not know, it reads no tokenizer."""
    for name in ("tiktoken.model", "tokenizer_config.json"):
        shutil.copy(TINY_K2 / name, tmp_path / name)
    transformers.AutoTokenizer.from_pretrained(tmp_path).save_pretrained(tmp_path)
    shutil.copy(TINY_K2 / "config.json", tmp_path / "config.json")
    assert (tmp_path / "tokenizer.json").is_file()
    before, after = load_tokenizer(TINY_K2), load_tokenizer(tmp_path)
    rows = (TINY_K2 / "held_out.jsonl").read_text(encoding="utf-8").splitlines()[:40]
    for text in [*rows, "don't HELLO'S\n\n  1234567", "漢字かな한국어 mixed中文english", "Łódź é"]:
        assert before.encode(text, specials=False) == after.encode(text, specials=False)
    turn = "<|im_user|>user<|im_middle|>x<|im_end|>"
    assert before.encode(turn, specials=True) == after.encode(turn, specials=True)
    with pytest.raises(AttributeError, match="max_position_embeddings"):
        transformers.AutoTokenizer.from_pretrained(TINY_K2)
