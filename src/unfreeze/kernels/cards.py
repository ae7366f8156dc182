"""GPUs: the facts of a card, and the support that its generation has.

compute capability 8.0 and later   Triton kernels, each checked at the first start on the card
7.5 (T4, RTX 20)                   float32 and plain torch: it has no bf16 units, and Triton needs 8.0
older                              refused: torch's own kernels are no longer built for it
ROCm                               as 8.0 and later; nobody has tried it yet, so the check decides
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

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


def present(device: torch.device) -> bool:
    """True if that device is a GPU of this machine."""
    return device.type == "cuda" and torch.cuda.is_available()


def driver_version(file: Path = DRIVER) -> str:
    """The version of NVIDIA's kernel driver; "" if there is none or it does not say."""
    match = re.search(r"\b(\d+\.\d+(?:\.\d+)?)\b", _text(file))
    return match[1] if match else ""


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


class Unused(NamedTuple):
    """The reason why torch does not use a GPU of this machine, and the next step."""

    why: str
    remedy: str

    def words(self) -> str:
        return self.why + f"; {self.remedy}" * bool(self.remedy)


def unused(root: Path = Path("/"), *, nodes_only: bool = False) -> Unused | None:
    """The reason why torch does not use a GPU of this machine; None if it does, or if there is none.

    nodes_only: count a GPU only if this process may open it. A container without GPUs still lists those of
    its host.
    """
    if torch.cuda.is_available():
        return None
    maker, opened = _maker(root)
    if not maker or (nodes_only and not opened):
        return None
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and hidden.partition(",")[0].strip() in ("", "-1"):  # CUDA stops at the first -1
        return Unused(f"CUDA_VISIBLE_DEVICES={hidden!r} hides the {maker} GPU", "unset CUDA_VISIBLE_DEVICES")
    if maker == "AMD" and torch.version.hip is None:
        words = f"torch {torch.__version__} is built without ROCm, so the AMD GPU is not used"
        return Unused(words, "install torch's ROCm build: https://pytorch.org/get-started/locally")
    if torch.version.cuda is None and torch.version.hip is None:
        version = torch.__version__.partition("+")[0]
        words = f"torch {torch.__version__} is built without CUDA, so the {maker} GPU is not used"
        return Unused(words, f"pip install --force-reinstall torch=={version}")
    if not opened:
        return Unused(
            f"the {maker} GPU of the host is not visible here", "start the container with --gpus all"
        )
    return _of_driver(root)


def passed_over(requested: str, device: torch.device) -> Unused | None:
    """The reason why "auto" took the CPU although this machine has a GPU; None if it did not."""
    if requested != "auto" or device.type != "cpu":
        return None
    card = here()
    return unused(nodes_only=True) if card is None else Unused(refuses(card), "")


def _maker(root: Path) -> tuple[str, bool]:
    """Return (maker of a GPU of this machine, True if its device files are here); "" without a GPU."""
    if (root / "dev/dxg").exists():
        return "Windows", True  # WSL: the GPU of Windows, whoever made it
    for maker, node in (("NVIDIA", "dev/nvidiactl"), ("AMD", "dev/kfd")):
        if (root / node).exists():
            return maker, True
    for device in sorted((root / "sys/bus/pci/devices").glob("*")):
        vendor, kind = (_text(device / name) for name in ("vendor", "class"))
        if vendor == "0x10de" and kind.startswith("0x03"):
            return "NVIDIA", False
    return "", False


def _of_driver(root: Path) -> Unused:
    """CUDA's own reason: torch is built for it, the device files are here, and it does not start."""
    try:
        torch.cuda.init()
        words = "torch sees no CUDA device"
    # RuntimeError, or AssertionError of a build without CUDA
    except Exception as error:
        words = " ".join(str(error).split()).partition(". ")[0][:200]
    wsl = (root / "dev/dxg").exists()
    if "too old" in words:
        older = "update it, or install a torch for an older CUDA: https://pytorch.org/get-started/locally"
        return Unused(f"the driver is too old for torch's CUDA {torch.version.cuda}: {words}", older)
    install = (
        "install NVIDIA's driver in Windows, not in WSL" if wsl else "install NVIDIA's driver; see nvidia-smi"
    )
    return Unused(words, install)


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


@functools.cache
def here() -> Card | None:
    """The card of the current CUDA device; None without one."""
    return card_of(torch.device("cuda", torch.cuda.current_device())) if torch.cuda.is_available() else None
