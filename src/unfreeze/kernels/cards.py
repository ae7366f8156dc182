"""GPUs: the facts of a card, and the support that its generation has.

compute capability 8.0 and later   Triton kernels, each checked at the first start on the card
7.5 (T4, RTX 20)                   float32 and plain torch: it has no bf16 units, and Triton needs 8.0
older                              refused: torch's own kernels are no longer built for it
ROCm                               as 8.0 and later; nobody has tried it yet, so the check decides
"""

from __future__ import annotations

import functools
import importlib.metadata
import re
from dataclasses import dataclass
from pathlib import Path

import torch

OLDEST, TRITON = (7, 5), (8, 0)
"""Compute capabilities: the oldest supported, and the oldest that Triton compiles for."""
DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Card:
    """A GPU.

    capability  CUDA's compute capability (9, 0); of ROCm the numbers that torch gives
    memory      bytes
    driver      version of the kernel driver, "" if unknown
    runtime     "CUDA 13.0", "ROCm 6.4"
    built       the architectures that torch's kernels are built for: "sm_90", "compute_90", "gfx942"
    """

    name: str
    capability: tuple[int, int]
    memory: int
    driver: str
    runtime: str
    built: tuple[str, ...] = ()

    @property
    def rocm(self) -> bool:
        return self.runtime.startswith("ROCm")

    @property
    def slice(self) -> bool:
        """True for a MIG slice: part of a card, with its own memory."""
        return "MIG" in self.name

    def words(self) -> str:
        major, minor = self.capability
        generation = "" if self.rocm else f", compute capability {major}.{minor}"
        driver = f", driver {self.driver}" if self.driver else ""
        return f"{self.name}{generation}, {self.runtime}{driver}"


def card_of(device: torch.device) -> Card:
    """The card of a CUDA device that is here."""
    of_device = torch.cuda.get_device_properties(device)
    hip = torch.version.hip
    return Card(
        name=of_device.name,
        capability=(of_device.major, of_device.minor),
        memory=of_device.total_memory,
        driver=driver_version(),
        runtime=f"ROCm {hip}" if hip else f"CUDA {torch.version.cuda}",
        built=tuple(torch.cuda.get_arch_list()),
    )


def driver_version(file: Path = DRIVER) -> str:
    """The version of NVIDIA's kernel driver; "" if there is none or it does not say."""
    try:
        found = re.search(r"\b(\d+\.\d+(?:\.\d+)?)\b", file.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return ""
    return found[1] if found else ""


def triton_version() -> str:
    """The version of Triton; "" if it is not installed."""
    for name in ("triton", "pytorch-triton-rocm", "triton-rocm"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def refuses(card: Card) -> str:
    """The reason why nothing runs on that card; "" if it is supported."""
    if card.rocm:
        return ""
    major, minor = card.capability
    if card.capability < OLDEST:
        return (
            f"{card.name} has compute capability {major}.{minor}; it needs {OLDEST[0]}.{OLDEST[1]} or later"
        )
    if card.built and not any(_runs(name, card.capability) for name in card.built):
        return (
            f"torch {torch.__version__} has no kernels for {card.name} (sm_{major}{minor}); it is built for"
            f" {', '.join(card.built)}"
        )
    return ""


def _runs(built: str, capability: tuple[int, int]) -> bool:
    """True if code for that architecture runs on a card of that capability.

    Machine code ("sm_86") runs on cards of its major version, from its minor one on. "compute_90" is compiled
    further by the driver, for any later card.
    """
    match = re.fullmatch(r"(sm|compute)_(\d+)(\d)[af]?", built)
    if match is None:
        return False
    of_code = int(match[2]), int(match[3])
    return of_code <= capability and (match[1] == "compute" or of_code[0] == capability[0])


def triton_refuses(card: Card) -> str:
    """The reason why Triton compiles nothing for that card; "" if it does."""
    if card.rocm or card.capability >= TRITON:
        return ""
    major, minor = card.capability
    return f"compute capability {major}.{minor}; Triton needs {TRITON[0]}.{TRITON[1]}"


@functools.cache
def here() -> Card | None:
    """The card of the current CUDA device; None without one."""
    return card_of(torch.device("cuda", torch.cuda.current_device())) if torch.cuda.is_available() else None
