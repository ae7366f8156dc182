"""Tasks of reasoning-gym (pip install reasoning-gym), which make their rows and grade them.

python examples/environments/reasoning_tasks.py chain_sum 500 > prompts.jsonl
unfreeze grpo --model MODEL --data prompts.jsonl --reward examples/environments/reasoning_tasks.py

Further arguments are settings of the task: chain_sum 500 max_terms=2. A row has the task's name, its
question, answer and metadata. The answer is what follows "Answer:" in the model's text, or all of it.
"""

import json
import sys
from functools import cache

import reasoning_gym


@cache
def task(name: str):
    return reasoning_gym.create_dataset(name, size=1)


def reward(prompt: str, completion: str, task_name: str, gold: str, metadata: str) -> float:
    entry = {"question": prompt, "answer": gold, "metadata": json.loads(metadata)}
    return float(task(task_name).score_answer(completion.rpartition("Answer:")[2].strip(), entry))


def main(name: str, size: str, *settings: str) -> None:
    pairs = (setting.split("=") for setting in settings)
    chosen = {field: json.loads(value) for field, value in pairs}
    for entry in reasoning_gym.create_dataset(name, **{"size": int(size), "seed": 0, **chosen}):
        row = {"prompt": entry["question"], "task_name": name, "gold": entry["answer"]}
        print(json.dumps({**row, "metadata": json.dumps(entry["metadata"], default=str)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
