"""unfreeze tokenizer train and show: from files to a folder that a run starts from, and each refusal in a line."""

import gzip
import io
import json
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import unfreeze
from unfreeze import cli
from unfreeze.core.errors import ConfigError
from unfreeze.data import load_tokenizer
from unfreeze.tracking.live import TokenizerProgress

CHINESE = "今天 我们 学习 语言 模型 世界 中国 问题 方法 数据 可以 训练 文字 结果 时间 知道".split()
ENGLISH = "today we learn language models world data training method result question answer time".split()
DRAWN = random.Random(0)
TEXTS = [
    f"第{i}课：{''.join(DRAWN.choices(CHINESE, k=12))}。 Lesson {i}: {' '.join(DRAWN.choices(ENGLISH, k=9))}."
    for i in range(60)
]
VOCAB = 384
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> list[str]:
    """One corpus in three forms of file."""
    folder = tmp_path_factory.mktemp("corpus")
    rows = [json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in TEXTS]
    (folder / "a.jsonl").write_text("".join(rows[:15]), encoding="utf-8")
    (folder / "b.txt").write_text("\n\n".join(TEXTS[15:30]), encoding="utf-8")
    (folder / "c.jsonl.gz").write_bytes(gzip.compress("".join(rows[30:]).encode()))
    return [str(path) for path in sorted(folder.iterdir())]


@pytest.fixture(scope="module")
def trained(files, tmp_path_factory) -> dict:
    """The facts of a tokenizer, by Python."""
    out = tmp_path_factory.mktemp("made") / "tok"
    return unfreeze.train_tokenizer(files=files, out=out, vocab=VOCAB, reserved=8, held_out=0.2, quiet=True)


def run(capsys, *words: str) -> tuple[int, dict, str]:
    code = cli.main(["tokenizer", *words, "--json"])
    out, err = capsys.readouterr()
    return code, json.loads(out) if out else {}, err


def test_the_command_makes_what_python_makes(trained, files, tmp_path, capsys):
    words = ("--vocab", str(VOCAB), "--out", str(tmp_path / "tok"), "--reserved", "8", "--held-out", "0.2")
    code, facts, said = run(capsys, "train", *files, *words)
    assert code == 0 and facts["sha256"] == trained["sha256"]
    assert facts["documents"] + sum(row["documents"] for row in facts["held_out"].values()) == len(TEXTS)
    assert facts["vocabulary"] == {"base": VOCAB - 17, "total": VOCAB, "padded": VOCAB}
    rate = facts["held_out"]["zh"]["bytes_per_token"]
    assert rate > 1 and f"Chinese            {facts['held_out']['zh']['documents']}     {rate:.3f}" in said
    assert f"needs vocab_size {VOCAB}\n" in said


def test_an_unaligned_vocabulary_says_both_sizes(files, tmp_path, capsys):
    words = ("--vocab", "380", "--out", str(tmp_path / "tok"), "--reserved", "0", "--held-out", "0")
    _, facts, said = run(capsys, "train", *files, *words)
    assert facts["vocabulary"]["padded"] == 384 and "needs vocab_size 380, or 384 (a multiple of 64" in said
    assert "nothing was held out" in said and facts["held_out"] == {}


def test_a_run_starts_from_the_folder(trained, files, tmp_path):
    """A config.json beside the tokenizer is all that pretrain needs; transformers opens what comes out."""
    start = tmp_path / "start"
    start.mkdir()
    for path in Path(trained["path"]).iterdir():
        (start / path.name).write_bytes(path.read_bytes())
    (start / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    done = unfreeze.pretrain(
        model=start,
        data=files[0],
        out=tmp_path / "run",
        steps=3,
        tokens_per_step=256,
        sequence_length=128,
        samples=0,
        dtype="float32",
        device="cpu",
        threads=1,
        quiet=True,
    )
    assert done.finished and len(done.losses) == 3
    model = tmp_path / "run" / "model"
    theirs, ours = AutoTokenizer.from_pretrained(model), load_tokenizer(model)
    assert theirs(TEXTS[0])["input_ids"] == [ours.bos_id, *ours.encode(TEXTS[0], specials=False)]
    loaded = AutoModelForCausalLM.from_pretrained(model)
    assert (
        loaded.get_input_embeddings().weight.shape[0] == AutoConfig.from_pretrained(model).vocab_size == VOCAB
    )
    assert loaded.generation_config.eos_token_id == sorted(ours.eos_ids) or set(
        loaded.generation_config.eos_token_id
    ) == set(ours.eos_ids)
    chat = theirs.apply_chat_template(
        [{"role": "user", "content": "a"}], add_generation_prompt=True, tokenize=False
    )
    assert chat == "<|bos|><|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"


def test_a_config_with_fewer_rows_than_ids_is_refused(trained, files, tmp_path, capsys):
    start = tmp_path / "start"
    start.mkdir()
    for path in Path(trained["path"]).iterdir():
        (start / path.name).write_bytes(path.read_bytes())
    (start / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": VOCAB - 1}), encoding="utf-8")
    assert (
        cli.main(["pretrain", "--model", str(start), "--data", files[0], "--out", str(tmp_path / "run")]) == 2
    )
    assert f"the tokenizer has {VOCAB} ids" in capsys.readouterr().err


# show


def test_show_gives_ids_bytes_and_pieces(trained, capsys):
    text = "今天𠮷 a\n"
    code, facts, said = run(capsys, "show", trained["path"], text)
    own = load_tokenizer(trained["path"])
    assert code == 0 and [piece["id"] for piece in facts["pieces"]] == own.encode(text, specials=False)
    assert bytes.fromhex("".join(piece["bytes"] for piece in facts["pieces"])) == text.encode()
    assert facts["bytes_per_token"] == len(text.encode()) / facts["tokens"]
    lines = said.splitlines()
    assert lines[0].count("|") == facts["tokens"] - 1 and "<f0>" in lines[0] and "\u23ce" in lines[0]
    assert lines[-1].endswith("bytes per token") and "\x1b" not in said


def test_show_reads_special_tokens_only_if_asked(trained, capsys):
    own = load_tokenizer(trained["path"])
    ids = [
        [piece["id"] for piece in run(capsys, "show", trained["path"], "<|im_end|>", *more)[1]["pieces"]]
        for more in ((), ("--specials",))
    ]
    assert ids[1] == [own.token_id("<|im_end|>")] and not set(ids[0]) & own.special_ids


def test_show_reads_standard_input_and_other_tokenizers(monkeypatch, capsys):
    class Typed(io.StringIO):
        buffer = io.BytesIO("今天".encode())

    monkeypatch.setattr(sys, "stdin", Typed())
    code, facts, _ = run(capsys, "show", "tiny-k2", "-")
    assert code == 0 and b"".join(bytes.fromhex(p["bytes"]) for p in facts["pieces"]).decode() == "今天"


def test_a_text_in_colour(trained, monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert cli.main(["tokenizer", "show", trained["path"], "今天 we [bold]learn"]) == 0
    out = capsys.readouterr().out
    assert "\x1b[30;46m今天\x1b[0m" in out
    assert re.sub("\x1b[^m]*m", "", out).splitlines()[0] == "今天 we [bold]learn"


# refusals: one line each, and no folder

REFUSED = {
    "": "tokenizer takes train or show, got nothing",
    "trian x": "got 'trian'; nearest: 'train'",
    "train {bytes} --vocab 8192": "bytes.txt, row 3: byte 5 (0xff) is not UTF-8",
    "train {one} --vocab 8192": "1 document (4 B) give 0: no other pair of tokens occurs twice",
    "train {good} --vocab 300": "256 bytes + 9 special tokens + 64 reserved = 329, before any merge",
    "train {good} --vocab 100000": "vocab 100000 needs 99,671 merges; ",
    "train {good} --vocab 384 --reserved 8 --out {taken}": "exists and is not empty; a tokenizer is written",
    "train {gone}": "is not a file or folder",
    "train {empty} --vocab 384": "there is no text in empty.txt",
    "show {taken} x": "has no tokenizer",
    "show /nowhere x": "is neither a folder nor a Hugging Face id",
}


@pytest.mark.parametrize("line", REFUSED)
def test_a_refusal_is_one_line_and_leaves_nothing(line, files, tmp_path, capsys):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "kept").write_text("")
    (tmp_path / "bytes.txt").write_bytes(b"fine\n\nnot \xff fine\n")
    (tmp_path / "one.txt").write_text("abcd")
    (tmp_path / "empty.txt").write_text("\n")
    places = {name: tmp_path / f"{name}.txt" for name in ("bytes", "one", "gone", "empty")}
    words = line.format(good=" ".join(files), taken=tmp_path / "taken", **places).split()
    if words[:1] == ["train"] and "--out" not in words:
        words += ["--out", str(tmp_path / "tok")]
    assert cli.main(["tokenizer", *words]) == 2
    error = capsys.readouterr().err
    assert REFUSED[line] in error and "Traceback" not in error and len(error.splitlines()) <= 2
    assert not (tmp_path / "tok").exists() and not list(tmp_path.glob(".*"))
    assert [path.name for path in (tmp_path / "taken").iterdir()] == ["kept"]


def test_a_token_that_stands_for_a_byte_is_shown_as_one(tmp_path, capsys):
    """A vocabulary of characters with byte fallback, as Llama 2's: 中 is three tokens of a byte each."""
    from tokenizers import Tokenizer, decoders, models

    vocab = {"<unk>": 0, **{f"<0x{byte:02X}>": 1 + byte for byte in range(256)}, "a": 257}
    backend = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    facts = unfreeze_show(capsys, str(tmp_path), "a中\n")
    assert [(piece["text"], piece["bytes"]) for piece in facts["pieces"]] == [
        ("a", None), (None, "e4"), (None, "b8"), (None, "ad"), ("\n", "0a"),
    ]  # fmt: skip
    assert cli.main(["tokenizer", "show", str(tmp_path), "a中"]) == 0
    printed = capsys.readouterr().out
    assert "a|<e4>|<b8>|<ad>" in printed and "\ufffd" not in printed


def unfreeze_show(capsys, *words):
    assert cli.main(["tokenizer", "show", *words, "--json", "--quiet"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_proposed_number_of_reserved_tokens_works(files, tmp_path, capsys):
    words = ["tokenizer", "train", *files, "--vocab", "300", "--out", str(tmp_path / "tok"), "--quiet"]
    assert cli.main(words) == 2
    assert "or --reserved 0, which leaves 35 merges" in capsys.readouterr().err
    assert cli.main([*words, "--reserved", "0"]) == 0
    assert cli.main([*words[:-5], "--vocab", "265", *words[-3:]]) == 2
    assert "--reserved 0" not in capsys.readouterr().err  # control: no merge would be left


@pytest.mark.parametrize(
    ("line", "given", "flag"),
    [
        ("train {folder}/a.jsom --out {folder}/tok", "give FILES a .jsonl", "--files"),
        ("train {folder}/z* --out {folder}/tok", "give FILES a .jsonl", "--files"),
        ("show {folder}/here x", "give the folder of a tokenizer or model as DIR", "--model"),
    ],
)
def test_advice_about_a_name_without_a_flag_names_no_flag(line, given, flag, tmp_path, capsys):
    (tmp_path / "a.json").write_text("")
    (tmp_path / "hero").mkdir()
    assert cli.main(["tokenizer", *line.format(folder=tmp_path).split()]) == 2
    error = capsys.readouterr().err
    assert given in error and flag not in error
    assert "*" in line or "nearest: 'a.json'" in error or "nearest: 'hero'" in error


def test_the_proposed_vocabulary_works(files, tmp_path, capsys):
    words = ["tokenizer", "train", *files, "--out", str(tmp_path / "tok"), "--quiet"]
    assert cli.main([*words, "--vocab", "100000"]) == 2
    proposed = capsys.readouterr().err.rpartition("--vocab ")[2].split(",")[0]
    assert cli.main([*words, "--vocab", proposed]) == 0
    assert load_tokenizer(tmp_path / "tok").vocab_size == int(proposed)


def test_a_wrong_keyword_names_the_nearest():
    with pytest.raises(ConfigError, match="nearest: 'vocab'") as error:
        unfreeze.train_tokenizer(files="a.txt", out="tok", vocabs=8)
    assert "unfreeze tokenizer train --help" in error.value.next


def test_bad_rows_are_skipped_if_asked_and_counted(tmp_path, capsys):
    path = tmp_path / "corpus.txt"
    path.write_bytes(b"\n\n".join(text.encode() for text in TEXTS) + b"\n\n\xff\n")
    words = (
        "--vocab",
        str(VOCAB),
        "--out",
        str(tmp_path / "tok"),
        "--reserved",
        "8",
        "--data.on-bad-row",
        "skip",
    )
    _, facts, said = run(capsys, "train", str(path), *words)
    assert facts["bad_rows"] == 1 and "warning: 1 bad row was skipped" in said


# long work


def test_progress_tells_reading_from_merging():
    now, stream = [0.0], io.StringIO()
    with TokenizerProgress(stream=stream, clock=lambda: now[0]) as progress:
        for second in range(12):
            now[0] = float(second)
            progress(min(second, 8) * 10**6, 8 * 10**6, done=second > 8)
    assert stream.getvalue().splitlines() == [
        "read  5.0 MB of 8.0 MB  5.0 s",
        "merge  8.0 MB of 8.0 MB  10 s",
    ]


def test_ctrl_c_leaves_nothing(tmp_path):
    """While the library merges, which nobody can interrupt."""
    corpus = tmp_path / "corpus.txt"
    code = (
        "import threading, time\n"
        "import tokenizers\n"
        "from unfreeze import cli\n"
        "from unfreeze.data.tokens import trained\n"
        "def merging(backend, texts, trainer):\n"
        "    list(texts)\n"
        "    print('merging', flush=True)\n"
        "    time.sleep(60)\n"
        "class Slow:\n"
        "    train_from_iterator = merging\n"
        "trained.tokenizers.Tokenizer = lambda model: Slow()\n"
        f"raise SystemExit(cli.main(['tokenizer', 'train', {str(corpus)!r}, '--out', {str(tmp_path / 'tok')!r}]))\n"
    )
    corpus.write_text("\n\n".join(TEXTS), encoding="utf-8")
    began = time.monotonic()
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "merging\n"
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=50)
    assert process.returncode == 130 and time.monotonic() - began < 55
    assert error == "interrupted: nothing was written; run the same command again\n"
    assert [path.name for path in tmp_path.iterdir()] == ["corpus.txt"]
