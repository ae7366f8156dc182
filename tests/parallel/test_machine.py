"""What the machine has: against files laid out as the kernel writes them, and against the system's own tools
here."""

import os
import shutil
import subprocess
from pathlib import Path

import psutil
import pytest
import torch

from unfreeze.parallel.machine import (
    UNLIMITED,
    container_memory,
    hardware,
    host_memory,
    num_cores,
    processor,
    resident_bytes,
)


def test_this_machine_as_its_own_tools_say():
    found = hardware("cpu")
    assert (found.kind, found.cores, found.name) == (
        "cpu",
        len(os.sched_getaffinity(0)),
        processor(),
    ) and found.name
    assert 0 < found.available <= found.total <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    status = Path("/proc/self/status")
    if status.exists():  # the kernel's own line, read a moment apart
        (line,) = [line for line in status.read_text().splitlines() if line.startswith("VmRSS:")]
        assert abs(int(line.split()[1]) * 1024 - resident_bytes()) < 2**24
    if shutil.which("nproc"):
        said = subprocess.run(
            ["nproc"], capture_output=True, text=True, check=True, env={"PATH": os.environ["PATH"]}
        )
        assert num_cores() == int(said.stdout)


def test_an_unlimited_cgroup_and_an_absent_one_bound_nothing(tmp_path):
    proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    assert container_memory(cgroup, proc) is None
    (proc / "self" / "cgroup").write_text("9:memory:/\n")
    (cgroup / "memory").mkdir(parents=True)
    limit = cgroup / "memory" / "memory.limit_in_bytes"
    limit.write_text(f"{9223372036854771712}\n")  # what cgroup v1 writes for no limit
    assert container_memory(cgroup, proc) is None
    limit.write_text(f"{UNLIMITED - 1}\n")  # control
    assert container_memory(cgroup, proc) == (UNLIMITED - 1, UNLIMITED - 1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_a_cuda_device_is_the_one_torch_names():
    found = hardware("cuda")
    assert (
        found.name == torch.cuda.get_device_name()
        and found.kind == "cuda"
        and 0 < found.available <= found.total
    )


def test_memory_is_read_from_proc_and_within_the_containers_limit(tmp_path, monkeypatch):
    proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(
        "MemTotal:       16000000 kB\nMemFree: 1 kB\nMemAvailable:   12000000 kB\nBuffers: 1 kB\nCached: 1 kB\n"
        "Active: 1 kB\nInactive: 1 kB\nShmem: 1 kB\n"
    )
    with monkeypatch.context() as patch:
        patch.setattr(psutil, "PROCFS_PATH", str(proc))
        assert host_memory() == (16000000 * 1024, 12000000 * 1024)
    assert container_memory(cgroup, proc) is None

    (cgroup / "job" / "step").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text("0::/job/step\n")
    (cgroup / "job" / "step" / "memory.max").write_text("max\n")
    (cgroup / "job" / "memory.max").write_text(f"{4 * 2**30}\n")  # the limit of a parent counts
    (cgroup / "job" / "memory.current").write_text(f"{3 * 2**30}\n")
    (cgroup / "job" / "memory.stat").write_text(f"anon 5\ninactive_file {2**29}\n")
    assert container_memory(cgroup, proc) == (4 * 2**30, 2**30 + 2**29)

    (proc / "self" / "cgroup").write_text("9:memory:/box\n")  # cgroup v1
    (cgroup / "memory" / "box").mkdir(parents=True)
    (cgroup / "memory" / "box" / "memory.limit_in_bytes").write_text(f"{2**31}\n")
    (cgroup / "memory" / "box" / "memory.usage_in_bytes").write_text(f"{2**30}\n")
    assert container_memory(cgroup, proc) == (2**31, 2**30)
