"""Each process has its own GPU, its communicators are bound to it, and a hang leaves traces: with mocks."""

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from unfreeze.core.errors import ConfigError
from unfreeze.parallel.processes import collectives
from unfreeze.parallel.processes.gpus import TRACES, gpu_of, keep_traces, local_device
from unfreeze.parallel.processes.roll import Roll

CUDA, ALL_TRACES = torch.device("cuda"), [name for names in TRACES for name in names]


@pytest.fixture(autouse=True)
def own_environment(monkeypatch):
    for name in (
        *ALL_TRACES,
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "TORCHELASTIC_USE_AGENT_STORE",
    ):
        monkeypatch.delenv(name, raising=False)


def task(monkeypatch, local, on_node, visible, *, agent):
    values = {"RANK": local, "WORLD_SIZE": on_node, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": on_node}
    for name, value in values.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", str(agent))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)


@pytest.mark.parametrize(
    "local, on_node, visible, agent, want",
    [(3, 8, 8, True, 3), (0, 8, 8, False, 0), (3, 4, 1, False, 0), (1, 2, 4, False, 1)],
    ids=["torchrun", "tasks that see all", "a Slurm task that sees its own", "fewer tasks than GPUs"],
)
def test_a_process_takes_the_gpu_of_its_local_rank_or_the_only_one_it_sees(
    monkeypatch, local, on_node, visible, agent, want
):
    task(monkeypatch, local, on_node, visible, agent=agent)
    assert local_device(CUDA) == torch.device("cuda", want)
    assert local_device(torch.device("cuda", 5)) == torch.device("cuda", 5)  # asked for by number
    assert local_device(torch.device("cpu")) == torch.device("cpu")


@pytest.mark.parametrize("local, visible, agent", [(3, 2, True), (1, 1, True), (3, 2, False)])
def test_more_processes_than_gpus_are_refused_with_the_arithmetic(monkeypatch, local, visible, agent):
    task(monkeypatch, local, 4, visible, agent=agent)
    with pytest.raises(
        ConfigError, match=f"4 processes on this node, and torch sees {visible} GPU"
    ) as refused:
        local_device(CUDA)
    assert refused.value.next == f"torchrun --nproc-per-node {visible}, or --device cpu"


def test_without_torchrun_the_device_stays(monkeypatch):
    assert local_device(CUDA) == CUDA


def rolls(gpus_of_ranks):
    """What rank 0 finds when all have called the roll: each in a thread, as each waits for all."""
    store = dist.HashStore()
    with ThreadPoolExecutor(len(gpus_of_ranks)) as threads:
        calls = [
            threads.submit(Roll, store, r, len(gpus_of_ranks), gpu) for r, gpu in enumerate(gpus_of_ranks)
        ]
        return [call.exception() for call in calls]


def test_two_processes_on_one_gpu_are_found_at_the_roll():
    assert rolls(["GPU-a", "GPU-b"]) == [None, None] == rolls(["", ""])
    for error in rolls(["GPU-a", "GPU-b", "GPU-a"]):
        assert isinstance(error, ConfigError)
        assert "processes 0 and 2 have the same GPU (GPU-a)" in error.message
        assert error.next.startswith("torchrun --nproc-per-node 2")


def test_a_gpu_is_known_by_its_uuid(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="GPU-7"))
    assert gpu_of(CUDA) == "GPU-7" and gpu_of(torch.device("cpu")) == ""


def test_traces_of_a_hang_go_into_the_run_folder_unless_the_user_chose(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_NCCL_TRACE_BUFFER_SIZE", "7")
    monkeypatch.setenv("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
    keep_traces(tmp_path)
    found = {name: os.environ.get(name) for name in ALL_TRACES}
    for name in ALL_TRACES:
        os.environ.pop(name, None)
    assert found["TORCH_FR_DUMP_TEMP_FILE"] == f"{tmp_path}/nccl_trace_"
    assert found["TORCH_FR_BUFFER_SIZE"] is None and found["TORCH_NCCL_TRACE_BUFFER_SIZE"] == "7"
    assert found["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "0" and found["TORCH_NCCL_DESYNC_DEBUG"] == "1"


def test_the_names_of_traces_are_those_that_torch_reads():
    """In the headers and the library of the torch that is installed."""
    here = Path(torch.__file__).parent
    read = (here / "lib" / "libtorch_cpu.so").read_bytes()
    headers = [here / "include" / "torch" / "csrc" / "distributed" / "c10d" / "ProcessGroupNCCL.hpp"]
    read += b"".join(path.read_bytes() for path in headers if path.is_file())
    assert all(any(name.encode() in read for name in names) for names in TRACES)


def test_communicators_are_bound_to_the_gpu_at_the_start(monkeypatch, tmp_path):
    """nccl with device_id, and the traces set before it starts."""
    task(monkeypatch, 1, 2, 2, agent=True)
    asked = {}

    class Called:
        def __init__(self, store, rank, size, gpu):
            asked["gpu"] = gpu
            self.beside = self.watching = self.nothing

        @contextmanager
        def nothing(self, *_):
            yield

        def leave(self, error):
            asked["left"] = error

        def stay(self):
            pass

    def init(backend, **named):
        asked.update(named, backend=backend, traces=os.environ.get("TORCH_FR_DUMP_TEMP_FILE"))
        raise ConfigError("enough")

    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(collectives, "gpu_of", lambda device: "GPU-1")
    monkeypatch.setattr(collectives, "_met", lambda: (dist.HashStore(), 1, 2))
    monkeypatch.setattr(collectives, "Roll", Called)
    monkeypatch.setattr(dist, "init_process_group", init)
    with (
        pytest.raises(ConfigError, match="enough"),
        collectives.open_group(torch.device("cuda", 1), tmp_path),
    ):
        pass
    for name in ALL_TRACES:
        os.environ.pop(name, None)
    assert asked["backend"] == "nccl" and asked["device_id"] == torch.device("cuda", 1)
    assert asked["gpu"] == "GPU-1" and asked["traces"] == f"{tmp_path}/nccl_trace_"
    assert asked["timeout"] == timedelta(minutes=30)
