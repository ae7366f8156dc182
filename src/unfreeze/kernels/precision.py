"""The compute dtype: bfloat16 if the hardware has bf16 matmul units, float32 otherwise.

A CPU without bf16 instructions emulates them: two cores with AVX2 reach 0.9 GFLOP/s in bf16 and 115.9 in
float32 (torch.mm, 512 x 1,024 x 1,024, torch 2.13). Packed weights stay packed in either case. On a CPU bf16
weights stay bf16 too: float32 arithmetic widens them as they are used (widened.py).
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, NamedTuple

from unfreeze.core.cpu import cpu_class, multiplies_bf16

if TYPE_CHECKING:
    import torch

AUTO = "auto"


class Precision(NamedTuple):
    """The dtype of the computation, "bfloat16" or "float32", and the reason for it."""

    name: str
    why: str


NEW = Precision("float32", "new weights train in float32")


def precision(requested: str, device: torch.device | str) -> Precision:
    """The dtype for a device of this machine. requested: "auto", "bfloat16" or "float32"."""
    kind = str(device).partition(":")[0]
    best = precision_on(kind, multiplies(device))
    return best if requested == AUTO else as_asked(requested, best, kind)


def as_asked(name: str, best: Precision, kind: str) -> Precision:
    """A dtype requested by the user, and the consequence if "auto" would take another."""
    if name == best.name:
        return Precision(name, "as asked")
    fast = f"{_here(kind)} is fast in bfloat16 too"
    return Precision(name, f"as asked; {fast if name == 'float32' else f'{best.why}, so it is slow'}")


def precision_on(kind: str, bf16: bool | None = None) -> Precision:
    """The dtype that "auto" takes on a device of that kind ("cpu", "cuda").

    bf16: True if it multiplies bfloat16. None: use this machine's CPU; assume that an absent GPU does.
    """
    bf16 = (kind != "cpu" or multiplies_bf16()) if bf16 is None else bf16
    if bf16:
        return Precision("bfloat16", f"{_here(kind)} has bf16 matmul units")
    return Precision("float32", f"{_here(kind)} has no bfloat16 units")


def _here(kind: str) -> str:
    return f"this CPU ({cpu_class().removeprefix('cpu-')})" if kind == "cpu" else "the GPU"


def multiplies(device: torch.device | str) -> bool:
    """True if that device, which must be on this machine, has instructions that multiply bfloat16."""
    if str(device).startswith("cuda"):
        import torch

        with torch.cuda.device(device) if torch.device(device).index is not None else nullcontext():
            return torch.cuda.is_bf16_supported(including_emulation=False)
    return multiplies_bf16()


def slow(name: str, device: torch.device | str) -> str:
    """The reason why a dtype is slow on a device of this machine; "" if it is not."""
    if name != "bfloat16" or multiplies(device):
        return ""
    return f"dtype = bfloat16 is slow here: {precision_on(str(device).partition(':')[0], False).why}"
