"""GPUs that Triton's bundled compilers compile for, and what a compiled kernel needs of them."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

PTXAS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas-blackwell"


@dataclass(frozen=True)
class Target:
    """A GPU's instruction set. shared: bytes of shared memory that a block may have; cards that have it."""

    name: str
    gpu: GPUTarget
    shared: int
    cards: str


def _nvidia(capability: int, shared_kib: int, cards: str) -> Target:
    return Target(f"sm_{capability}", GPUTarget("cuda", capability, 32), shared_kib << 10, cards)


TARGETS = {
    target.name: target
    for target in (
        _nvidia(80, 163, "A100"),
        _nvidia(86, 99, "A40, RTX 3090"),
        _nvidia(89, 99, "L40S, RTX 4090"),
        _nvidia(90, 227, "H100, H200"),
        _nvidia(100, 227, "B200"),
        _nvidia(120, 99, "RTX 5090, RTX PRO 6000"),
        Target("gfx942", GPUTarget("hip", "gfx942", 64), 64 << 10, "MI300X"),
    )
}
"""Shared memory: CUDA programming guide, compute capabilities; AMD's CDNA3 instruction set (LDS)."""


@dataclass(frozen=True)
class Report:
    """The needs of a program: registers a thread, bytes of spills (stores and loads) and of shared memory.

    store  the widest global store in it, bytes; 0 for AMD
    """

    registers: int
    spilled: int
    shared: int
    warps: int
    store: int

    @property
    def cell(self) -> str:
        """A cell of the page."""
        words = f"{self.registers}, {self.shared / 1024:.1f}"
        return f"{words}, **{self.spilled}**" if self.spilled else words


def compiled(launch: Any, target: Target) -> Any:
    source = ASTSource(launch.kernel, *launch.specialised())
    return triton.compile(source, target=target.gpu, options=launch.options)


def report(made: Any) -> Report:
    """Of a compiled kernel. Raises RuntimeError if ptxas refuses it."""
    registers, spilled, store = _amd(made.asm["amdgcn"]) if "amdgcn" in made.asm else _nvidia_needs(made)
    return Report(registers, spilled, made.metadata.shared, made.metadata.num_warps, store)


def _amd(text: str) -> tuple[int, int, int]:
    """Of its metadata: vector registers, bytes of spilled vector registers a thread.

    Scalar registers that do not suffice go to lanes of vector registers, not to memory.
    """
    registers, spills = (
        int(re.findall(rf"\.{name}:\s+(\d+)", text)[0]) for name in ("vgpr_count", "vgpr_spill_count")
    )
    return registers, 8 * spills, 0


def _nvidia_needs(made: Any) -> tuple[int, int, int]:
    ptx = made.asm["ptx"]
    architecture = re.findall(r"^\.target (\w+)", ptx, re.M)[0]
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [PTXAS, "-v", "--gpu-name", architecture, file.name, "-o", "/dev/null"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = done.stderr + done.stdout
    registers = re.search(r"Used (\d+) registers", said)
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)
    if registers is None or spills is None:
        raise RuntimeError(said)
    stores = re.findall(r"st\.global(?:\.v(\d))?\.b(\d+)", ptx)
    widest = max((int(many or 1) * int(bits) // 8 for many, bits in stores), default=0)
    return int(registers[1]), int(spills[1]) + int(spills[2]), widest


def faults(launch: Any, found: Report, target: Target, widest: bool) -> str:
    """What makes exit code 1. widest: True if its stores must be of 16 bytes."""
    wrong = []
    if found.spilled and launch.label.startswith("bf16"):
        wrong.append(f"{found.spilled} bytes of spills")
    if found.shared > target.shared:
        wrong.append(f"{found.shared} bytes of shared memory, a block may have {target.shared}")
    if widest and 0 < found.store < 16:
        wrong.append(f"stores of {found.store} bytes, 16 wanted")
    return "; ".join(wrong)
