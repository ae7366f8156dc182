"""What nine kinds of conversation become under each chat template, as hashes of their tokens and weights:
tests/templates.json.

Every row is encoded twice, with other words the second time: what is remembered of the first of a shape must
not change the second. A refusal is recorded as its class and the field that it names. To make the file anew:
    pytest tests/data/tokens/test_template_hashes.py --update-templates
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest

from unfreeze.commands.demo import TINY_K2
from unfreeze.core.errors import DataError
from unfreeze.data.rows.shapes import row_from_dict
from unfreeze.data.tokens.masks import Encoder
from unfreeze.data.tokens.tokenizer import load_tokenizer

ROOT = Path(__file__).resolve().parents[3]
RECORDED = ROOT / "tests" / "templates.json"
FOLDERS = {
    "tests": Path(__file__).with_name("templates"),
    "shared": ROOT.parent / "shared" / "data" / "templates",
}
"""The second is not on every machine: there, its rows are not compared."""
NOW = datetime(2026, 7, 1, 12)
TOKEN = re.compile(r"<\|[^|<>{}\s]+\|>|<｜[^｜<>{}\s]+｜>|<(?:start|end)_of_turn>|\[/?(?:INST|BOS|EOS)\]")
"""What is a special token in the tokenizer of a template that spells it."""

spec = importlib.util.spec_from_file_location("cases", ROOT / "benchmarks" / "templates.py")
cases = importlib.util.module_from_spec(spec)
spec.loader.exec_module(cases)


def conversations(word: str) -> dict[str, dict]:
    """Nine rows that say `word`."""
    system = {"role": "system", "content": f"Be brief, {word}."}
    question = {"role": "user", "content": f"What is 6*7, {word}? "}
    answer = {"role": "assistant", "content": f"It is forty-two, {word}."}
    more = [
        {"role": "user", "content": f"\nAnd 7*8, {word}?"},
        {"role": "assistant", "content": f" That makes fifty-six, {word}."},
    ]
    thought = {"reasoning_content": f"Six sevens, {word}, are 42."}
    long = f"{word} <|im_end|></s> Grüße, 世界! 👩‍🚀 e\u0301 <b>&amp;</b>\t" * 40
    call, returned = cases.call({"city": "Oslo", "days": 3})[1:]
    return {
        "plain": {"messages": [question, answer]},
        "system": {"messages": [system, question, answer]},
        "turns": {"messages": [system, question, answer, *more, question, answer]},
        "thinking": {"messages": [question, {**answer, **thought}, more[0], {**more[1], **thought}]},
        "tools": {"messages": [question, call, returned, answer], "tools": [cases.TOOL]},
        "empty answer": {"messages": [question, {**answer, "content": ""}]},
        "empty": {
            "messages": [{**system, "content": ""}, question, {**call, "content": ""}, returned, answer],
            "tools": [cases.TOOL],
        },
        "unicode": {"messages": [{**question, "content": long}, {**answer, "content": f"{long} {word}"}]},
        "continued": {"prompt": [system, question, answer, more[0]], "completion": [more[1]]},
    }


def tokenizer_of(source: str, folder: Path):
    """tiny-k2's ranks with the special tokens that a template spells."""
    end = next(end for end in [*cases.ends_of(source), "</s>"] if end)
    texts = ["<s>", "</s>", end, *cases.ends_of(source), *TOKEN.findall(source)]
    ranks = (TINY_K2 / "tiktoken.model").read_bytes()
    first = len(ranks.splitlines())
    added = {
        str(first + i): {"content": text, "special": True} for i, text in enumerate(dict.fromkeys(texts))
    }
    settings = {"added_tokens_decoder": added, "bos_token": "<s>", "eos_token": end, "chat_template": source}
    folder.mkdir()
    (folder / "tiktoken.model").write_bytes(ranks)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps({"vocab_size": first + len(added)}), encoding="utf-8")
    return load_tokenizer(folder, now=NOW)


def digest(examples) -> str:
    """Of the tokens and weights of a row's examples."""
    made = hashlib.blake2b(digest_size=8)
    for example in examples:
        made.update(f"{len(example.tokens)};".encode())
        made.update(np.asarray(example.tokens, dtype="<i4").tobytes())
        made.update(np.asarray(example.weights, dtype="<f4").tobytes())
    return f"{len(examples)}:{made.hexdigest()}"


def refusal(error: DataError) -> str:
    """Class and field, as the message names it."""
    field = re.search(r"messages\[\d+\](?:[.\w]|\[\d+\])*", error.message)
    return f"{type(error).__name__}: {field[0] if field else 'the row'}"


def became(encoder: Encoder, row: dict) -> str:
    try:
        return digest(encoder(row_from_dict(row, 1)).examples)
    except DataError as error:
        return refusal(error)


def hashes(source: str, folder: Path) -> dict[str, str]:
    """Of each kind of conversation: of the first row of its shape, and of a second one."""
    encoder = Encoder(tokenizer_of(source, folder), 4096)
    first, second = conversations("Zoë"), conversations("Bob, and the others")
    return {kind: f"{became(encoder, first[kind])} {became(encoder, second[kind])}" for kind in first}


def all_hashes(folder: Path) -> dict[str, dict[str, str]]:
    return {
        f"{where}/{path.stem}": hashes(path.read_text(encoding="utf-8"), folder / f"{where} {path.stem}")
        for where, place in FOLDERS.items()
        for path in sorted(place.glob("*.jinja"))
    }


def differing(before: dict[str, dict[str, str]], now: dict[str, dict[str, str]]) -> list[str]:
    """One line for each conversation that differs, and for each template that is new or gone."""
    here = {name.partition("/")[0] for name in now}
    found = [f"{name}: gone" for name in before if name not in now and name.partition("/")[0] in here]
    for name, rows in now.items():
        if name not in before:
            found.append(f"{name}: new")
            continue
        for kind in rows.keys() | before[name].keys():
            if rows.get(kind) != before[name].get(kind):
                found.append(f"{name}, {kind}: {before[name].get(kind)} became {rows.get(kind)}")
    return found


@pytest.fixture
def recorded():
    return json.loads(RECORDED.read_text(encoding="utf-8"))


def test_templates_make_what_is_recorded(request, tmp_path):
    now = all_hashes(tmp_path)
    if request.config.getoption("--update-templates"):
        kept = json.loads(RECORDED.read_text(encoding="utf-8")) if RECORDED.exists() else {}
        here = {name.partition("/")[0] for name in now}
        others = {name: rows for name, rows in kept.items() if name.partition("/")[0] not in here}
        RECORDED.write_text(json.dumps(others | now, indent=1) + "\n", encoding="utf-8")
    assert not differing(json.loads(RECORDED.read_text(encoding="utf-8")), now)


def test_every_template_is_recorded_with_nine_conversations(recorded):
    here = {f"tests/{path.stem}" for path in FOLDERS["tests"].glob("*.jinja")}
    assert here <= recorded.keys() and len(recorded) >= 20
    assert all(len(rows) == 9 for rows in recorded.values())
    taught = [row for rows in recorded.values() for row in rows.values() if re.match(r"\d+:", row)]
    assert len(taught) > 100, "most are taught, not refused"


def test_control_arm_another_template_and_another_weight_are_named(recorded, tmp_path, monkeypatch):
    source = (FOLDERS["tests"] / "qwen2.jinja").read_text(encoding="utf-8")
    name = "tests/qwen2"
    before = {name: recorded[name]}
    assert not differing(before, {name: hashes(source, tmp_path / "same")})
    changed = hashes(source.replace("'<|im_end|>'", "'<|im_end|> '", 1), tmp_path / "changed")
    assert f"{name}, plain" in "\n".join(differing(before, {name: changed}))

    def lighter(self, row, tokens, weights, bounded=Encoder._bounded):
        return bounded(self, row, tokens, [*weights[:-1], 0.5])

    monkeypatch.setattr(Encoder, "_bounded", lighter)
    light = differing(before, {name: hashes(source, tmp_path / "light")})
    assert any(line.startswith(f"{name}, turns: ") for line in light)
    assert differing(before, {"tests/other": {}}) == [f"{name}: gone", "tests/other: new"]
