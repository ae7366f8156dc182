"""The class of a CPU by its instructions, and a machine made narrower by UNFREEZE_CPU_CLASS."""

import json
import os
import subprocess
import sys

import pytest

from unfreeze.core import cpu
from unfreeze.core.errors import ConfigError

# flags as /proc/cpuinfo of these machines has them, shortened to those with a vector unit's name
HASWELL = "fma sse4_1 sse4_2 movbe avx f16c abm bmi1 avx2 bmi2"
SKYLAKE = f"{HASWELL} avx512f avx512dq rdseed adx avx512cd avx512bw avx512vl"
ZEN4 = f"{SKYLAKE} avx512ifma avx512_bf16 avx512vbmi avx512_vnni"
SAPPHIRE = f"{ZEN4} amx_bf16 avx512_fp16 amx_tile amx_int8"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("flags\t\t: fpu sse sse2 ssse3 sse4_1 sse4_2 avx", "cpu-default"),
        (f"flags\t\t: {HASWELL}", "cpu-avx2"),
        (f"flags\t\t: {SKYLAKE.replace('avx512vl', '')}", "cpu-avx2"),  # Xeon Phi: torch runs it as AVX2
        (f"flags\t\t: {SKYLAKE}", "cpu-avx512"),
        (f"flags\t\t: {ZEN4}", "cpu-avx512-bf16"),
        (f"flags\t\t: {SAPPHIRE}", "cpu-amx"),
        ("Features\t: fp asimd crc32 asimdhp", "cpu-arm"),
        ("Features\t: fp asimd sve i8mm bf16", "cpu-arm-bf16"),
        ("", "cpu-default"),
    ],
)
def test_the_class_is_that_of_the_flags(text, name):
    assert cpu.class_of(f"processor\t: 0\nmodel name\t: X\n{text}\nbugs\t\t: avx2\n") == name


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("hw.optional.arm64: 1\nhw.optional.arm.FEAT_BF16: 1", "cpu-arm-bf16"),  # M2 on
        ("hw.optional.arm64: 1\nhw.optional.arm.FEAT_BF16: 0", "cpu-arm"),
        (
            "machdep.cpu.features: FPU FMA SSE4.2 F16C\nmachdep.cpu.leaf7_features: RDWRFSGS BMI1 AVX2 BMI2",
            "cpu-avx2",
        ),
        ("", "cpu-default"),
    ],
)
def test_the_class_of_a_mac(text, name):
    assert cpu.class_of_mac(text) == name


def test_which_classes_multiply_bf16():
    assert [name for name in (*cpu.X86, *cpu.ARM) if cpu.multiplies_bf16(name)] == [
        "cpu-avx512-bf16",
        "cpu-amx",
        "cpu-arm-bf16",
    ]


def test_a_class_has_the_instructions_of_those_before_it(monkeypatch):
    monkeypatch.setattr(cpu, "cpu_class", lambda: "cpu-avx512")
    assert [cpu.has(name) for name in cpu.X86] == [True, True, True, False, False]
    monkeypatch.setattr(cpu, "cpu_class", lambda: "cpu-arm-bf16")
    assert not any(map(cpu.has, cpu.X86))


@pytest.mark.parametrize(
    ("named", "own", "sentence"),
    [
        ("avx512", "cpu-avx2", "UNFREEZE_CPU_CLASS=avx512: this machine is cpu-avx2"),
        ("amx", "cpu-avx512-bf16", "UNFREEZE_CPU_CLASS=amx: this machine is cpu-avx512-bf16"),
        ("avx2", "cpu-arm-bf16", "UNFREEZE_CPU_CLASS=avx2: there is no such class"),
        ("arm", "cpu-arm-bf16", "UNFREEZE_CPU_CLASS=arm: this machine is cpu-arm-bf16"),
        ("avx512bf16", "cpu-amx", "UNFREEZE_CPU_CLASS=avx512bf16: there is no such class"),
    ],
)
def test_a_class_that_the_machine_has_not_is_refused_by_name(named, own, sentence):
    with pytest.raises(ConfigError, match=sentence):
        cpu.emulated(named, own)


def test_the_machines_own_class_changes_nothing():
    assert cpu.emulated("amx", "cpu-amx") == cpu.emulated("cpu-amx", "cpu-amx") == "cpu-amx"
    assert cpu.variables("cpu-amx", "cpu-amx") == {}


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {
        name: value for name, value in os.environ.items() if name not in (*cpu._NAMES, "UNFREEZE_CPU_CLASS")
    }
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env={**kept, **environment}
    )


NARROW = """
import unfreeze, json, re
import numpy as np, torch
from unfreeze.core import cpu
from unfreeze.kernels.attention import blocked_loops
from unfreeze.kernels.loops import bf16_cpu, row_dots
from unfreeze.kernels.loops.numba_options import OPTIONS, array, njit

# a loop of plain code, and one that is given instructions by name where the class has them
softmax = blocked_loops.softmax.loop
scores, sums = torch.randn(8, 32), torch.zeros(8)
softmax(0, 2, array(scores), 0, 4, np.float32(1.0), array(scores), array(sums))

@njit(**OPTIONS)
def dots(codes, scales, x, out):
    row_dots.row_dots(row_dots.int4_row(codes, scales, 16), x, np.arange(out.size), out)

dots(np.zeros(64, np.uint8), np.zeros(4, np.uint16), np.zeros((2, 128), np.float32), np.zeros(2, np.float32))
code = [text for loop in (softmax, dots) for text in loop.inspect_asm().values()]
print(json.dumps([
    cpu.cpu_class(), torch.backends.cpu.get_cpu_capability(), bf16_cpu.available(), len(code),
    sorted({word for text in code for word in re.findall("zmm|ymm|vdpbf16ps|vpermw|vfmadd", text)}),
]))
"""
needs_avx512 = pytest.mark.skipif(
    cpu.machine_class() not in cpu.X86[2:], reason="this machine has no AVX512 to do without"
)


@needs_avx512
def test_as_avx2_no_compiled_loop_has_an_instruction_of_avx512(tmp_path):
    done = python(NARROW, UNFREEZE_CPU_CLASS="avx2", NUMBA_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ["cpu-avx2", "AVX2", False, 2, ["vfmadd", "ymm"]]


@needs_avx512
def test_after_torch_it_is_too_late():
    done = python("import torch, unfreeze.core.cpu as cpu\ncpu.cpu_class()", UNFREEZE_CPU_CLASS="avx2")
    assert "UNFREEZE_CPU_CLASS=avx2 was set after torch" in done.stderr and "NUMBA_CPU_NAME" in done.stderr


def test_a_command_refuses_a_class_that_there_is_not():
    done = python(
        "from unfreeze import cli\nraise SystemExit(cli.main(['inspect', '.']))", UNFREEZE_CPU_CLASS="avx3"
    )
    assert done.returncode == 2 and "UNFREEZE_CPU_CLASS=avx3: there is no such class" in done.stderr


def test_loops_do_not_assume_what_numba_was_told_by_the_user(monkeypatch):
    monkeypatch.setattr(cpu, "cpu_class", lambda: "cpu-amx")
    monkeypatch.delenv("UNFREEZE_CPU_CLASS", raising=False)
    for name in cpu._NAMES:
        monkeypatch.delenv(name, raising=False)
    loops_have = cpu.loops_have.__wrapped__
    assert loops_have("cpu-avx512-bf16")
    monkeypatch.setenv("NUMBA_CPU_NAME", "generic")
    assert not loops_have("cpu-avx512-bf16")
