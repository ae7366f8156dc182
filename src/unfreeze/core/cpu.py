"""Class of this machine's CPU, by its instruction sets. Without torch.

    cpu-default < cpu-avx2 < cpu-avx512 < cpu-avx512-bf16 < cpu-amx       x86: each includes the previous ones
    cpu-arm     < cpu-arm-bf16                                             ARM; unmeasured

UNFREEZE_CPU_CLASS=avx2 makes this process use fewer instructions than the machine has. Our own choices read
the class here; numba, torch, oneDNN and MKL read their own variables when they are imported. So
`import unfreeze` sets these variables (`restrict_cpu_class`), and torch must not be imported before.
"""

from __future__ import annotations

import functools
import os
import platform
import re
import subprocess
import sys
from collections.abc import Container
from pathlib import Path

from unfreeze.core.errors import ConfigError, nearest

VARIABLE = "UNFREEZE_CPU_CLASS"
CPUINFO = Path("/proc/cpuinfo")
X86 = ("cpu-default", "cpu-avx2", "cpu-avx512", "cpu-avx512-bf16", "cpu-amx")
ARM = ("cpu-arm", "cpu-arm-bf16")

# flags that each class adds, as in Linux's /proc/cpuinfo; torch and oneDNN check the same
_ADDED = {
    "cpu-avx2": {"avx2", "fma", "f16c"},
    "cpu-avx512": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
    "cpu-avx512-bf16": {"avx512_bf16"},
    "cpu-amx": {"amx_tile", "amx_bf16"},
}
# variables that emulate a class: the first is LLVM's name of the oldest CPU with just these instructions
_NAMES = (
    *("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA"),
    "MKL_ENABLE_INSTRUCTIONS",
)
_LEVELS = {
    "cpu-default": ("x86-64", "", "default", "SSE41", "SSE4_2"),
    "cpu-avx2": ("haswell", "", "avx2", "AVX2", "AVX2"),
    "cpu-avx512": ("skylake-avx512", "", "avx512", "AVX512_CORE", "AVX512"),
    "cpu-avx512-bf16": ("cooperlake", "", "avx512", "AVX512_CORE_BF16", "AVX512"),
}


@functools.cache
def cpu_class() -> str:
    """Return the class of this process's CPU: the machine's own, or a lower one set by UNFREEZE_CPU_CLASS.

    Raises ConfigError if the variable names no class or one above the machine's, or was set too late.
    """
    own = machine_class()
    named = os.environ.get(VARIABLE)
    if not named:
        return own
    wanted = emulated(named, own)
    late = sorted(name for name, value in variables(wanted, own).items() if os.environ.get(name) != value)
    if late:
        raise ConfigError(
            f"{VARIABLE}={named} was set after torch or numba was imported: {', '.join(late)} not set",
            next=f"set {VARIABLE} in the shell, and import unfreeze before torch and numba",
        )
    return wanted


def has(name: str) -> bool:
    """True if this process's CPU has the instructions of an x86 class such as "cpu-avx512"."""
    return cpu_class() in X86 and X86.index(cpu_class()) >= X86.index(name)


@functools.cache
def loops_have(name: str) -> bool:
    """True if numba's loops can use those instructions.

    False if the user set NUMBA_CPU_NAME or NUMBA_CPU_FEATURES.
    """
    user_set = {key: os.environ[key] for key in _NAMES[:2] if key in os.environ}
    ours = variables(cpu_class(), machine_class()) if os.environ.get(VARIABLE) else {}
    return has(name) and all(ours.get(key) == value for key, value in user_set.items())


def multiplies_bf16(name: str | None = None) -> bool:
    """True if CPUs of that class (default: this process's) have instructions that multiply bfloat16.

    Without them a bf16 GEMM takes about 40 times as long as a float32 one (not measured on ARM).
    """
    return (name or cpu_class()) in ("cpu-avx512-bf16", "cpu-amx", "cpu-arm-bf16")


@functools.cache
def machine_class() -> str:
    """Class of the machine's CPU, regardless of UNFREEZE_CPU_CLASS."""
    if sys.platform == "darwin":
        return class_of_mac(_sysctl())
    try:
        return class_of(CPUINFO.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return X86[0]  # unknown: assume no instructions


def class_of(cpuinfo: str) -> str:
    """Class by the flags of the first core in Linux's /proc/cpuinfo."""
    match = re.search(r"^(flags|Features)\s*:\s*(.*)$", cpuinfo, re.MULTILINE)
    flags = set(match[2].split()) if match else set[str]()
    if match and match[1] == "Features":
        return ARM["bf16" in flags]
    return _widest(flags)


def class_of_mac(sysctl: str) -> str:
    """Class by the output of macOS's `sysctl hw.optional machdep.cpu`."""
    if "hw.optional.arm64: 1" in sysctl:
        return ARM["hw.optional.arm.FEAT_BF16: 1" in sysctl]
    return _widest(set(sysctl.lower().split()))


def processor() -> str:
    """Name of the processor, from the system."""
    try:
        text = CPUINFO.read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match[1].strip() if match else platform.processor() or platform.machine()


def emulated(named: str, own: str) -> str:
    """Return the class named by UNFREEZE_CPU_CLASS=`named`, on a machine of class `own`.

    Raises ConfigError if there is no such class, or if the machine has fewer instructions.
    """
    wanted = named if named.startswith("cpu-") else f"cpu-{named}"
    known = X86 if own in X86 else ARM
    if wanted not in known:
        names = [name.removeprefix("cpu-") for name in known]
        raise ConfigError(
            f"{VARIABLE}={named}: there is no such class{nearest(named, names)}",
            next=f"one of {', '.join(names)}",
        )
    if known.index(wanted) > known.index(own) or (wanted != own and wanted not in _LEVELS):
        raise ConfigError(
            f"{VARIABLE}={named}: this machine is {own} and cannot run as {wanted}",
            next=f"unset {VARIABLE}, or name a lower class",
        )
    return wanted


def variables(wanted: str, own: str) -> dict[str, str]:
    """Environment variables that make torch and numba run as class `wanted`; {} for the machine's own."""
    return {} if wanted == own else dict(zip(_NAMES, _LEVELS[wanted], strict=True))


def restrict_cpu_class(imported: Container[str] = sys.modules) -> None:
    """Set the variables for UNFREEZE_CPU_CLASS, unless torch or numba is already imported.

    Errors are left to `cpu_class` to raise.
    """
    try:
        wanted = variables(emulated(os.environ[VARIABLE], machine_class()), machine_class())
    except ConfigError:
        return
    if "torch" not in imported and "numba" not in imported:
        os.environ.update(wanted)


def _widest(flags: set[str]) -> str:
    widest = X86[0]
    for name, added in _ADDED.items():
        if not flags >= added:
            break
        widest = name
    return widest


def _sysctl() -> str:
    command = ["sysctl", "hw.optional", "machdep.cpu"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=10).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
