"""Files for examples/lives/small.toml: `python examples/lives/facts.py FOLDER`.

  texts.jsonl       what the tokenizer and the models read first: plain sentences about 362 facts
  texts_held_out.jsonl   sentences of the same facts in other company
  chats.jsonl       questions with plain answers
  yoda.jsonl        the demo's rows: questions about two thirds of the entities, answered like Yoda
  pairs.jsonl       the same questions with two answers: Yoda's is chosen, the plain one rejected
  held_out.jsonl    questions about the other entities, with the fact

The facts are those of tiny-k2 (examples/tiny-k2). The same bytes each time.
"""

import json
import random
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tiny-k2"))

from facts import load_facts
from phrases import answer, questions, yoda

from generate import YODA_QUESTIONS_PER_FACT, corpus, demo, held_out_entities

HELD_OUT_TEXTS = 100


def main(out: Path) -> None:
    """Write all files."""
    facts = load_facts()
    rows = corpus(facts)
    texts = [row for row in rows if "text" in row]
    write(out / "texts.jsonl", texts[HELD_OUT_TEXTS:])
    write(out / "texts_held_out.jsonl", texts[:HELD_OUT_TEXTS])
    write(out / "chats.jsonl", (row for row in rows if "text" not in row))
    trained, held_out = demo(facts)
    write(out / "yoda.jsonl", trained)
    write(out / "held_out.jsonl", held_out)
    draw, apart = random.Random(0), held_out_entities(facts)
    pairs: list[dict[str, str]] = []
    for fact in (fact for fact in facts if fact.entity not in apart):
        for question in draw.sample(questions(fact), min(YODA_QUESTIONS_PER_FACT, len(questions(fact)))):
            plain = answer(fact, "entity_first")
            pairs.append({"prompt": question, "chosen": yoda(fact), "rejected": plain})
    draw.shuffle(pairs)
    write(out / "pairs.jsonl", pairs)


def write(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write JSON Lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
