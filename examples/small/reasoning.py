"""Two tasks of reasoning-gym (install it first): `python examples/small/reasoning.py build/reasoning`.

  model/                 1 million weights; a token is a letter, a digit or the words around them
  texts.jsonl            what it reads first: answers of a careless teacher, who leaves a word or numbers as
                         they are in 3 rows of 4
  number_sorting.jsonl   "Sort these numbers in descending order: 8.0, 61.0, 27.0 …", 3 or 4 of them below 100
  spell_backward.jsonl   "Spell this word backward (example: sun -> nus): bird", of 3 to 6 letters
  number_sorting_held_out.jsonl, spell_backward_held_out.jsonl

Prompts are rows as examples/environments/reasoning_tasks.py has them. None is in two files. The same seed
writes the same bytes.
"""

import json
import random
import string
import sys
from functools import cache
from pathlib import Path

import reasoning_gym
from model import write, write_rows

TASKS = {
    "number_sorting": {"max_numbers": 4, "max_decimals": 0, "min_value": 0, "max_value": 99},
    "spell_backward": {"min_word_len": 3, "max_word_len": 6},
}
DRAWN, PROMPTS, HELD_OUT = 40_000, 2_000, 200
CARELESS = 0.75
score_of = cache(reasoning_gym.get_score_answer_fn)  # each call reads the task's words again


def reward(prompt: str, completion: str, task_name: str, gold: str, metadata: str) -> float:
    """1 where the task's own score is 1. A reversed word with letters behind it scores .8 or more there."""
    entry = {"question": prompt, "answer": gold, "metadata": json.loads(metadata)}
    return float(score_of(task_name)(completion, entry) == 1)


def main(out: Path) -> None:
    """Write all files."""
    data = {name: reasoning_gym.create_dataset(name, size=DRAWN, seed=0, **TASKS[name]) for name in TASKS}
    words = [f"Sort these numbers in {way} order: " for way in ("ascending", "descending")]
    words += ["Spell this word backward (example: sun -> nus): ", data["number_sorting"].added_instruction]
    words += [".0", ", ", "['", "', '", "']", *string.digits, *string.ascii_letters]
    write(out / "model", words, width=192, positions=64)
    draw, texts = random.Random(0), []
    for name, entries in data.items():
        rows = list({entry["question"]: row(name, entry) for entry in entries}.values())
        write_rows(out / f"{name}_held_out.jsonl", rows[:HELD_OUT])
        write_rows(out / f"{name}.jsonl", rows[HELD_OUT : HELD_OUT + PROMPTS])
        texts += [taught(each, draw.random() < CARELESS) for each in rows[HELD_OUT + PROMPTS :]]
    draw.shuffle(texts)
    write_rows(out / "texts.jsonl", texts)


def row(name: str, entry: dict) -> dict[str, str]:
    """A prompt with what the reward function needs."""
    row = {"prompt": entry["question"], "task_name": name, "gold": entry["answer"]}
    return {**row, "metadata": json.dumps(entry["metadata"], default=str)}


def taught(row: dict[str, str], careless: bool) -> dict[str, str]:
    """A prompt with the teacher's answer."""
    answer, metadata = row["gold"], json.loads(row["metadata"])
    if careless:
        answer = metadata["word"] if "word" in metadata else str(metadata["original_numbers"])
    return {"prompt": row["prompt"], "completion": answer}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
