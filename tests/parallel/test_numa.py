"""A process whose experts lie in host memory runs on the cores beside its GPU, and its pages are touched first."""

import logging
import os
import threading
from types import SimpleNamespace

import psutil
import pytest
import torch

from unfreeze.parallel.processes import lanes
from unfreeze.parallel.processes.numa import bind, pci_address

CUDA = torch.device("cuda", 3)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Two nodes, the GPU on the second, and a process that may run on every second core."""
    properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    folder = tmp_path / "bus" / "pci" / "devices" / "0000:1b:00.0"
    folder.mkdir(parents=True)
    (folder / "numa_node").write_text("1\n")
    for node, cores in enumerate(("0-3,8-11", "4-7,12-15,20")):
        (tmp_path / "devices" / "system" / "node" / f"node{node}").mkdir(parents=True)
        (tmp_path / "devices" / "system" / "node" / f"node{node}" / "cpulist").write_text(f"{cores}\n")
    bound = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(0, 24, 2)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda thread, cores: bound.append((thread, cores)))
    return tmp_path, bound, folder / "numa_node"


def test_every_thread_runs_on_the_allowed_cores_of_the_node_of_its_gpu(machine, caplog):
    """Those that torch has started already too; new ones inherit it."""
    sys, bound, _ = machine
    ended = threading.Event()
    other = threading.Thread(target=ended.wait)
    other.start()
    assert pci_address(CUDA) == "0000:1b:00.0"
    with caplog.at_level(logging.INFO):
        assert bind(CUDA, 3, sys) == [4, 6, 12, 14, 20]
    ended.set(), other.join()
    assert all(cores == [4, 6, 12, 14, 20] for _, cores in bound)
    assert {os.getpid(), other.native_id} <= {thread for thread, _ in bound}
    assert caplog.messages == ["process 3: bound to 5 cores of NUMA node 1, where its GPU is"]


@pytest.mark.parametrize("node", ["-1", "7", "", "none"])
def test_it_stays_where_it_is_if_the_machine_does_not_say(machine, node):
    sys, bound, file = machine
    file.write_text(node)
    assert bind(CUDA, 0, sys) == [] and not bound
    assert bind(torch.device("cpu"), 0, sys) == []
    file.unlink()
    assert bind(CUDA, 0, sys) == [] and not bound


def test_it_stays_if_it_may_run_on_no_core_of_that_node(machine, monkeypatch):
    sys, bound, _ = machine
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    assert bind(CUDA, 0, sys) == [] and not bound


def test_pages_are_there_before_they_are_registered(monkeypatch):
    """Else the driver would fault them in one by one: the process's memory has grown before it is asked."""
    grown, process = [], psutil.Process()
    before = process.memory_info().rss
    runtime = SimpleNamespace(
        cudaHostRegister=lambda *_: grown.append(process.memory_info().rss - before) or 0,
        cudaHostUnregister=lambda *_: 0,
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    memory = lanes.pinned(96 << 20)
    assert len(memory) == 96 << 20 and grown[0] > 90 << 20
