"""1 for the right sum, and up to half for digits at their places: an answer that is nearly right counts too.

Only a right answer has 1 or more, so pass@1 is the share of right answers.
"""


def reward(prompt: str, completion: str, answer: str) -> dict[str, float]:
    right = sum(ours == theirs for ours, theirs in zip(completion, answer, strict=False))
    return {"exact": float(completion == answer), "digits": right / max(len(answer), len(completion)) / 2}
