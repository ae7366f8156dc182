"""LLVM code inside numba loops: for instructions that numba has no name for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba.extending import intrinsic

Value = Any
"""An ir.Value. llvmlite does not say what type the methods of its builder return."""


def instruction(function: Callable[..., object]) -> Callable[..., Any]:
    """numba's intrinsic, as loops call it: without the first argument, which is numba's typing context."""
    return intrinsic(function)
