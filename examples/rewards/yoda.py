"""1 for an answer in Yoda's word order that states the fact, else 0: the task of `unfreeze demo`, by reward.

unfreeze grpo --model tiny-k2 --adapter RUN --data yoda_train.jsonl --validation held_out.jsonl \
    --reward examples/rewards/yoda.py

The files are in the folder `unfreeze.TINY_K2`. A row has the fact itself, or an answer that states it.
"""

from unfreeze.evaluate.style import split_yoda, style_obeyed


def reward(prompt: str, completion: str, fact: str = "", answer: str = "", entity: str = "") -> float:
    parts = split_yoda(answer)
    wanted = fact or (parts[0] if parts else "")
    return float(style_obeyed(completion, entity=entity) and wanted.lower() in completion.lower())
