"""The fenced blocks of docs/start and docs/howto, and a folder in which their commands can run.

MODEL, TEACHER, chat.jsonl, runs/mine and the other names that the pages use are there, small.
"""

import json
import random
import re
import shlex
import string
from pathlib import Path
from typing import NamedTuple

from unfreeze.commands.demo import TINY_K2

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*(ROOT / "docs/start").glob("*.md"), *(ROOT / "docs/howto").glob("*.md")])
FENCE = re.compile(r'^```(\w*)(?: title="([^"]+)")?\n(.*?)^```', re.MULTILINE | re.DOTALL)
RUN = 'model = "MODEL"\nout = "runs/file"\n[data]\nfiles = "chat.jsonl"\n[training]\nsteps = 2\n'


class Block(NamedTuple):
    language: str
    title: str
    text: str


def blocks_of(page: Path) -> list[Block]:
    return [Block(*match.groups(default="")) for match in FENCE.finditer(page.read_text(encoding="utf-8"))]


def commands_of(block: Block) -> list[list[str]]:
    """The commands of unfreeze in a block of the shell; a comment behind one is left out."""
    lines = (shlex.split(line, comments=True) for line in block.text.splitlines())
    return [words for words in lines if words and words[0] in ("unfreeze", "torchrun")]


def lay_out(folder: Path, *, made: bool) -> None:
    """Write the files that the pages name into `folder`; `made`: also those that earlier commands make."""
    rows = [json.loads(line) for line in (TINY_K2 / "yoda_train.jsonl").read_text().splitlines()[:48]]
    facts = (TINY_K2 / "held_out.jsonl").read_text().splitlines(keepends=True)
    pairs = [
        {"prompt": row["question"], "chosen": row["answer"], "rejected": f"I do not know {number}."}
        for number, row in enumerate(rows)
    ]
    talks = [
        {
            "messages": [
                {"role": "user", "content": r["question"]},
                {"role": "assistant", "content": r["answer"]},
            ]
        }
        for r in rows
    ]
    files = {
        "chat.jsonl": talks[:40],
        "more.jsonl": talks[40:],
        "held_out.jsonl": talks[40:],
        "pairs.jsonl": pairs,
        "seeds.jsonl": rows[:8],
        "prompts.jsonl": [{"prompt": row["question"]} for row in rows[:3]],
    }
    for name, lines in files.items():
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    quoted = "".join(f'"{row["question"]}","{row["answer"]}"\n' for row in rows)
    (folder / "rows.csv").write_text("question,reply\n" + quoted)
    (folder / "facts.jsonl").write_text("".join(facts[:12]))
    (folder / "yoda.py").write_text('metric = lambda prompt, completion, **row: "Hmm" in completion\n')
    (folder / "book.txt").write_text("\n\n".join(row["answer"] for row in rows))
    drawn = random.Random(0)  # words enough for a vocabulary of 8192
    words = ["".join(drawn.choices(string.ascii_lowercase, k=6)) for _ in range(6_000)] * 2
    texts = (" ".join(words[at : at + 100]) for at in range(0, len(words), 100))
    (folder / "corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (tools,) = (b.text for b in blocks_of(ROOT / "docs/howto/tools.md") if b.language == "json")
    (folder / "tools.jsonl").write_text(tools)
    if made:
        for name in ("run", "mine", "model", "chosen"):
            (folder / f"{name}.toml").write_text(RUN)
        for name in ("mine", "tuned", "warm"):
            adapter = folder / "runs" / name / "adapter"
            adapter.mkdir(parents=True)
            (adapter.parent / "resolved_config.json").write_text('{"model": "MODEL", "lora.rank": 16}')
            (adapter / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 16, "lora_alpha": 32}')
