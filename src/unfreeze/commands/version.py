"""unfreeze --version: package, commit, torch, device."""

from __future__ import annotations

import unfreeze
from unfreeze.core.source import commit
from unfreeze.core.units import plural


def version() -> dict[str, str | None]:
    """Facts for a bug report. If torch cannot be imported, "torch" says why and "device" is None."""
    known: dict[str, str | None] = {"version": unfreeze.__version__, "commit": commit()}
    try:
        import torch  # takes nearly all of this command's time
    except (ImportError, OSError) as error:  # OSError: a shared library is missing or for another system
        reason = f"cannot be imported: {str(error).partition(chr(10))[0]}"
        return known | {"torch": reason, "device": None}
    return known | {"torch": torch.__version__, "device": device()}


def device() -> str:
    """Name the GPUs, else the processor with its instruction set."""
    import torch

    from unfreeze.kernels.choice.record import device_key
    from unfreeze.parallel.machine import num_cores, processor

    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        counts = {name: names.count(name) for name in names}
        gpus = ", ".join(f"{count} x {name}" if count > 1 else name for name, count in counts.items())
        return f"{gpus} (CUDA {torch.version.cuda})"
    return f"{processor()} ({device_key(torch.device('cpu'))}, {plural(num_cores(), 'core')})"


def line(known: dict[str, str | None]) -> str:
    """Format the facts of `version` as text."""
    device = f", {known['device']}" if known["device"] else ""
    return (
        f"unfreeze {known['version']} (commit {known['commit'] or 'unknown'})\ntorch {known['torch']}{device}"
    )
