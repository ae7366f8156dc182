"""Reward of a mathematical answer: 1 if it equals the row's, in whatever form it is written.

    pip install '.[rl]'
    unfreeze reward show examples/rewards/math_answer.py --model MODEL --data problems.jsonl

    {"prompt": "What is 1/2 + 1/4? Put the answer into \\\\boxed{}.", "answer": "\\\\frac{3}{4}"}

math-verify compares with sympy. Some expressions would take it for ever; the grader's process is then killed,
and the answer counted as a time-out. So math-verify's own clock, which works in a main thread only, is off.
"""

from math_verify import parse, verify


def reward(prompt: str, completion: str, answer: str) -> float:
    """1 if the last expression of the completion is the answer, else 0."""
    expected = parse(f"${answer}$", parsing_timeout=None)
    if not expected:
        raise ValueError(f"the row's answer cannot be read: {answer}")
    written = parse(completion, parsing_timeout=None)
    return float(verify(expected, written, timeout_seconds=None, raise_on_error=True))
