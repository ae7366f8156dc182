"""LLVM code inside numba loops, for instructions that numba does not expose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba.extending import intrinsic

Value = Any
"""An ir.Value. llvmlite does not annotate the return types of its builder's methods."""


def instruction(function: Callable[..., object]) -> Callable[..., Any]:
    """numba's intrinsic, as loops call it: without the first argument, numba's typing context."""
    return intrinsic(function)


def instruction_of_kind(function: Callable[..., object]) -> Callable[..., Any]:
    """The same, where constants among the arguments arrive as literals: they choose the code."""
    decorate: Any = intrinsic(prefer_literal=True)
    return decorate(function)
