"""Metrics that can take forever on some answer; they run in processes that can be killed.

A grader's process imports this file by its name, so nothing heavy stands here.
"""

from __future__ import annotations

import re
from typing import Any


def regex(prompt: Any, completion: str, answer: list[str]) -> float:
    """Return 1 if one of the patterns occurs in the answer."""
    return float(any(re.search(each, completion) for each in answer))


def math_verify(prompt: Any, completion: str, answer: list[str]) -> float:
    """Return 1 if the last expression of the answer equals one of the row's, in whatever form it is written.

    math-verify's own clock works in a main thread only, so it is off: the process has one.
    """
    from math_verify import parse, verify

    written = parse(completion, parsing_timeout=None)  # type: ignore[arg-type]
    for each in answer:
        expected = parse(f"${each}$", parsing_timeout=None) or parse(each, parsing_timeout=None)  # type: ignore[arg-type]
        if not expected:
            raise ValueError(f"the row's answer cannot be read: {each}")
        if verify(expected, written, timeout_seconds=None, raise_on_error=True):  # type: ignore[arg-type]
            return 1.0
    return 0.0


BY_NAME = {"regex": regex, "math-verify": math_verify}
