"""The scaling of rotary frequencies with which a run reaches positions beyond those of its base."""

from __future__ import annotations

from dataclasses import dataclass

SCALINGS = ("yarn", "linear", "ntk")
MAX_FACTOR = 1024


@dataclass(frozen=True)
class Longer:
    """scaling: of SCALINGS. factor: new positions / old ones, above 1."""

    scaling: str
    factor: float

    def __str__(self) -> str:
        return f"{self.scaling}, factor {self.factor:g}"
