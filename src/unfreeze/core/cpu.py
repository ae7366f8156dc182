"""The class of this machine's CPU, by its instructions. Without torch.

    cpu-default < cpu-avx2 < cpu-avx512 < cpu-avx512-bf16 < cpu-amx       x86: each has those before it
    cpu-arm     < cpu-arm-bf16                                             ARM; unmeasured

UNFREEZE_CPU_CLASS=avx2 makes this process a CPU of fewer instructions than the machine has: our own choices
read the class here, and numba, torch, oneDNN and MKL are told by their own variables. They read those when
they are imported, so `import unfreeze` sets them (`restrict_cpu_class`); torch must not be imported before.
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

# what each class adds, as Linux spells it in /proc/cpuinfo; torch and oneDNN look for the same
_ADDED = {
    "cpu-avx2": {"avx2", "fma", "f16c"},
    "cpu-avx512": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
    "cpu-avx512-bf16": {"avx512_bf16"},
    "cpu-amx": {"amx_tile", "amx_bf16"},
}
# the variables by which a class is emulated: LLVM's name of the oldest CPU that has just these instructions
_NAMES = (
    *("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA"),
    "MKL_ENABLE_INSTRUCTIONS",
)
_TOLD = {
    "cpu-default": ("x86-64", "", "default", "SSE41", "SSE4_2"),
    "cpu-avx2": ("haswell", "", "avx2", "AVX2", "AVX2"),
    "cpu-avx512": ("skylake-avx512", "", "avx512", "AVX512_CORE", "AVX512"),
    "cpu-avx512-bf16": ("cooperlake", "", "avx512", "AVX512_CORE_BF16", "AVX512"),
}


@functools.cache
def cpu_class() -> str:
    """The class of this process's CPU: the machine's own, or a lower one by UNFREEZE_CPU_CLASS.

    Raises ConfigError where that variable names no class, one that the machine has not, or came too late.
    """
    own = machine_class()
    named = os.environ.get(VARIABLE)
    if not named:
        return own
    wanted = emulated(named, own)
    late = sorted(name for name, value in variables(wanted, own).items() if os.environ.get(name) != value)
    if late:
        raise ConfigError(
            f"{VARIABLE}={named} came after torch or numba: {', '.join(late)} not set",
            next=f"set {VARIABLE} in the shell, and import unfreeze before torch and numba",
        )
    return wanted


def has(name: str) -> bool:
    """Whether this process's CPU has the instructions of an x86 class, "cpu-avx512" for one."""
    return cpu_class() in X86 and X86.index(cpu_class()) >= X86.index(name)


@functools.cache
def loops_have(name: str) -> bool:
    """Whether numba's loops may use those instructions.

    They are not assumed where the user has set NUMBA_CPU_NAME or NUMBA_CPU_FEATURES.
    """
    told = {key: os.environ[key] for key in _NAMES[:2] if key in os.environ}
    ours = variables(cpu_class(), machine_class()) if os.environ.get(VARIABLE) else {}
    return has(name) and all(ours.get(key) == value for key, value in told.items())


def multiplies_bf16(name: str | None = None) -> bool:
    """Whether CPUs of that class, this process's by default, have instructions that multiply bfloat16.

    Without them a bf16 GEMM takes some 40 times as long as a float32 one. On ARM that is not measured.
    """
    return (name or cpu_class()) in ("cpu-avx512-bf16", "cpu-amx", "cpu-arm-bf16")


@functools.cache
def machine_class() -> str:
    """The class of the machine's CPU, whatever UNFREEZE_CPU_CLASS says."""
    if sys.platform == "darwin":
        return class_of_mac(_sysctl())
    try:
        return class_of(CPUINFO.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return X86[0]  # nothing is known: no instruction is assumed


def class_of(cpuinfo: str) -> str:
    """The class that Linux's /proc/cpuinfo speaks of: the flags of its first core."""
    match = re.search(r"^(flags|Features)\s*:\s*(.*)$", cpuinfo, re.MULTILINE)
    flags = set(match[2].split()) if match else set[str]()
    if match and match[1] == "Features":
        return ARM["bf16" in flags]
    return _widest(flags)


def class_of_mac(sysctl: str) -> str:
    """The class that macOS's `sysctl hw.optional machdep.cpu` speaks of."""
    if "hw.optional.arm64: 1" in sysctl:
        return ARM["hw.optional.arm.FEAT_BF16: 1" in sysctl]
    return _widest(set(sysctl.lower().split()))


def processor() -> str:
    """The processor's name as the system gives it."""
    try:
        text = CPUINFO.read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match[1].strip() if match else platform.processor() or platform.machine()


def emulated(named: str, own: str) -> str:
    """The class that UNFREEZE_CPU_CLASS=`named` asks for, on a machine of class `own`.

    Raises ConfigError where there is no such class, or the machine has fewer instructions.
    """
    wanted = named if named.startswith("cpu-") else f"cpu-{named}"
    known = X86 if own in X86 else ARM
    if wanted not in known:
        names = [name.removeprefix("cpu-") for name in known]
        raise ConfigError(
            f"{VARIABLE}={named}: there is no such class{nearest(named, names)}",
            next=f"one of {', '.join(names)}",
        )
    if known.index(wanted) > known.index(own) or (wanted != own and wanted not in _TOLD):
        raise ConfigError(
            f"{VARIABLE}={named}: this machine is {own}, and cannot run as {wanted}",
            next=f"unset {VARIABLE}, or name a class of fewer instructions",
        )
    return wanted


def variables(wanted: str, own: str) -> dict[str, str]:
    """The environment in which torch and numba run as class `wanted`; {} where that is the machine's own."""
    return {} if wanted == own else dict(zip(_NAMES, _TOLD[wanted], strict=True))


def restrict_cpu_class(imported: Container[str] = sys.modules) -> None:
    """Set the variables of UNFREEZE_CPU_CLASS, unless torch or numba is imported and has read them.

    What is wrong with it is raised by `cpu_class`.
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
