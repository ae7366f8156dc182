"""llama.cpp itself reads what `unfreeze export --for gguf` writes: its logits are transformers', its tokens ours.

It computes in float32 with a file of float32, so that a difference is a fault and not a rounding: it multiplies
bf16 and q8_0 weights with rounded activations. Its GELU is a table of float16 numbers.
"""

import json
import random
import subprocess
import unicodedata
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, trainers
from tokenizers import models as kinds

from tests.compress.conftest import adapter_for
from tests.compress.gguf.made import MADE, QWEN2, checkpoint, weights_of, written
from unfreeze.checkpoint import open_checkpoint
from unfreeze.compress.deltas import Deltas
from unfreeze.compress.gguf.families import settings
from unfreeze.compress.gguf.file import write_gguf
from unfreeze.compress.gguf.lora import planned_lora
from unfreeze.compress.gguf.tensors import planned
from unfreeze.compress.gguf.vocabulary import vocabulary_of
from unfreeze.generate.open import open_model

pytestmark = pytest.mark.others("llama_cpp")
ROOT = Path(__file__).resolve().parents[2]
READ = Path(__file__).parent / "llama_cpp" / "read.py"
IDS = [5, 17, 3, 88, 41, 2, 9, 60, 61, 62, 63, 64, 200, 301, 7, 8]
LLAMA3 = QWEN2.replace(r"\p{N}|", r"\p{N}{1,3}|")
STRINGS = 10_000


def by_llama_cpp(programs, folder, model, **task):
    out = folder / ("o.json" if "texts" in task else "o.npy")
    (folder / "task.json").write_text(
        json.dumps({"model": str(model), "out": str(out), **task}), encoding="utf-8"
    )
    done = subprocess.run([programs / "python", READ, folder / "task.json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(out.read_text()) if "texts" in task else np.load(out)


def file_of(weights, family, folder, to):
    table = {"general.name": "tiny"}
    table |= {f"{family.arch}.{key}": value for key, value in settings(weights.shape, family)}
    vocabulary = vocabulary_of(folder, weights.shape.vocab_size, "qwen2")
    path = folder / f"{to}.gguf"
    write_gguf(path, family.arch, table, planned(weights, family, to), [vocabulary.add_to])
    return path


@torch.no_grad()
def by_transformers(name, folder):
    kind = getattr(transformers, f"{MADE[name].name}ForCausalLM")
    model = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model(torch.tensor([IDS])).logits[0].numpy()


@pytest.mark.parametrize("name", MADE)
def test_logits(name, programs, tmp_path):
    folder = checkpoint(name, tmp_path / name)
    expected = by_transformers(name, folder)
    weights, family = weights_of(folder)
    exact = by_llama_cpp(programs, tmp_path, file_of(weights, family, folder, "F32"), ids=IDS)
    assert np.abs(exact - expected).max() < (1e-2 if "gemma" in name else 1e-4)
    for to, least in (("BF16", 0.9), ("Q8_0", 0.6)):  # these load, and mostly have the same likeliest token
        rounded = by_llama_cpp(programs, tmp_path, file_of(weights, family, folder, to), ids=IDS)
        assert (rounded.argmax(-1) == expected.argmax(-1)).mean() >= least


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gpt_oss"])
def test_an_adapter_beside_its_base(name, programs, tmp_path):
    base = checkpoint(name, tmp_path / name)
    deltas = Deltas(open_model(open_checkpoint(base)), adapter_for(base, tmp_path / "adapter"))
    merged, family = weights_of(base, deltas)
    expected = by_llama_cpp(programs, tmp_path, file_of(merged, family, base, "F32"), ids=IDS)
    tensors, table = planned_lora(merged, deltas, family)
    write_gguf(tmp_path / "lora.gguf", family.arch, table, tensors)
    plain = file_of(weights_of(base)[0], family, base, "F32")
    beside = by_llama_cpp(programs, tmp_path, plain, ids=IDS, lora=str(tmp_path / "lora.gguf"))
    assert np.abs(beside - expected).max() < 1e-3
    assert np.abs(by_llama_cpp(programs, tmp_path, plain, ids=IDS) - expected).max() > 1e-2  # control


def strings():
    """Lines of pages and code, Chinese, other scripts, spaces and digits, all composed (NFC)."""
    draw = random.Random(0)
    lines = [
        line
        for pattern in ("docs/**/*.md", "src/**/*.py")
        for path in sorted(ROOT.glob(pattern))
        for line in path.read_text(encoding="utf-8").splitlines()
        if line.strip()
    ]
    chosen = draw.sample(lines, STRINGS * 4 // 10)
    chinese = "的一是在不了有和人这中大为上个国我以要他时来用们生到作地于出就分对成会可主发年动同工也能下过子说产种面而方后多定行学法所民得经十三之进着等部度家电力里如水化高自二理起小物现实加量都两体制机当使点从业本去把性好应开它合还因由其些然前外天政四日那社义事平形相全表间样与关各重新线内数正心反你明看原又么利比或但质气第向道命此变条只没结解问意建月公无系军很情者最立代想已通并提直题党程展五果料象员革位入常文总次品式活设及管特件长求老头基资边流路级少图山统接知较将组见计别她手角期根论运农指几九区强放决西被干做必战先回则任取据处"
    marks = "，。！？；：“”《》（）、 \n12ab"
    for _ in range(STRINGS * 3 // 10):
        chosen.append(
            "".join(
                draw.choice(marks) if draw.random() < 0.15 else draw.choice(chinese)
                for _ in range(draw.randint(1, 40))
            )
        )
    ranges = [(0x20, 0x7F), (0xA0, 0x180), (0x391, 0x3CA), (0x410, 0x450), (0x5D0, 0x5EB), (0x621, 0x64B), (0x905, 0x93A),
              (0xE01, 0xE31), (0x3041, 0x3097), (0xAC00, 0xAD00), (0x1F600, 0x1F640)]  # fmt: skip
    for _ in range(STRINGS * 2 // 10):
        text = ""
        for _ in range(draw.randint(1, 6)):
            low, high = draw.choice(ranges)
            text += "".join(chr(draw.randrange(low, high)) for _ in range(draw.randint(1, 8)))
            text += draw.choice(["", " ", "  ", "\n", "\t", "'s", "'LL", "1234", "..."])
        chosen.append(text)
    while len(chosen) < STRINGS:
        chosen.append(
            "".join(
                draw.choice([" ", "  ", "\n", "\n\n", "\t", "a", "the", "7", "19", "=="])
                for _ in range(draw.randint(1, 20))
            )
        )
    return [unicodedata.normalize("NFC", text) for text in chosen]


def trained(folder, rules, whole=False):
    """A byte-level BPE of 4,000 ids that was trained on the strings, with the rules of a release."""
    tokenizer = Tokenizer(kinds.BPE(ignore_merges=whole))
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not rules or rules == "digits")
    first = (
        []
        if not rules
        else [
            pre_tokenizers.Digits(True)
            if rules == "digits"
            else pre_tokenizers.Split(Regex(rules), "isolated")
        ]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*first, last])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=4000, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(strings(), trainer)
    tokenizer.add_special_tokens([AddedToken("<|endoftext|>", special=True, normalized=False)])
    return written(tokenizer, folder, {"eos_token": "<|endoftext|>"})


def pieces(folder):
    """SentencePiece's kind: bytes where no piece fits, merges over spaces spelled as one character."""
    tokenizer = Tokenizer(kinds.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", "always")
    controls = [AddedToken(text, special=True, normalized=False) for text in ("<unk>", "<s>", "</s>")]
    names = [*controls, *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(
        vocab_size=4000, special_tokens=names, limit_alphabet=900, show_progress=False
    )
    tokenizer.train_from_iterator([text.replace("\n", " ") for text in strings()], trainer)
    file = json.loads(tokenizer.to_str())
    file["added_tokens"] = [token for token in file["added_tokens"] if not token["content"].startswith("<0x")]
    tokenizer = Tokenizer.from_str(json.dumps(file))
    tokenizer.pre_tokenizer = None
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return written(tokenizer, folder, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"})


@pytest.mark.parametrize("kind", ["qwen2", "llama-bpe", "dbrx", "gpt-2", "starcoder", "default"])
def test_tokens_of_10_000_strings(kind, programs, tmp_path):
    rules = {"qwen2": QWEN2, "llama-bpe": LLAMA3, "dbrx": LLAMA3, "gpt-2": "", "starcoder": "digits"}
    folder = tmp_path / "t"
    pieces(folder) if kind == "default" else trained(folder, rules[kind], whole=kind == "llama-bpe")
    arch = "llama" if kind == "default" else "qwen2"
    vocabulary = vocabulary_of(folder, 4096, arch)
    assert vocabulary.pre == kind
    write_gguf(tmp_path / "v.gguf", arch, {f"{arch}.context_length": 64}, [], [vocabulary.add_to])
    texts = strings()
    theirs = by_llama_cpp(programs, tmp_path, tmp_path / "v.gguf", texts=texts)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.encode_special_tokens = True  # as plain text, like llama.cpp without parse_special
    ours = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    other = [text for text, a, b in zip(texts, ours, theirs, strict=True) if a != b]
    assert not other, f"{len(other)} of {len(texts)} differ: {other[:3]!r}"
