"""unfreeze --version: package, commit, torch, device."""

from __future__ import annotations

import unfreeze
from unfreeze.core.source import commit


def version() -> dict[str, str | None]:
    """What a bug report needs. torch and device: why there is none, where torch cannot be imported."""
    known: dict[str, str | None] = {"version": unfreeze.__version__, "commit": commit()}
    try:
        import torch  # all of this command's time
    except (ImportError, OSError) as error:  # OSError: a library beside it is missing or of another system
        reason = f"cannot be imported: {str(error).partition(chr(10))[0]}"
        return known | {"torch": reason, "device": None}
    return known | {"torch": torch.__version__, "device": device()}


def device() -> str:
    """The GPUs, else the processor with its class of instructions."""
    import torch

    from unfreeze.kernels.choice.record import device_key
    from unfreeze.parallel.machine import num_cores, processor

    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        counts = {name: names.count(name) for name in names}
        gpus = ", ".join(f"{count} x {name}" if count > 1 else name for name, count in counts.items())
        return f"{gpus} (CUDA {torch.version.cuda})"
    return f"{processor()} ({device_key(torch.device('cpu'))}, {num_cores()} cores)"


def line(known: dict[str, str | None]) -> str:
    """Those facts for people."""
    device = f", {known['device']}" if known["device"] else ""
    return (
        f"unfreeze {known['version']} (commit {known['commit'] or 'unknown'})\ntorch {known['torch']}{device}"
    )
