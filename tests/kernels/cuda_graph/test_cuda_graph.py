"""Launches and their capture. The graph itself needs a GPU; what is done around it is held by a stand-in of
torch.cuda."""

import weakref
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from unfreeze.core.errors import ConfigError
from unfreeze.kernels.cuda_graph import OP, CannotCapture, Launches, bucket, pays, replay
from unfreeze.kernels.loops import scratch


def doubling():
    buffer = torch.ones(3)
    return Launches(lambda x: x * 2, (buffer,), 1, torch.float32), buffer


def test_without_a_record_the_launches_are_made_each_time():
    launches, buffer = doubling()
    assert torch.equal(replay(launches), torch.full((3,), 2.0))
    buffer.fill_(5)
    assert torch.equal(replay(launches), torch.full((3,), 10.0)) and launches.captured is None
    assert not pays(torch.device("cpu"), torch.float32, 1)


def test_a_graph_is_refused_off_cuda_by_name():
    with pytest.raises(ConfigError, match="cannot run as 'cuda_graph' here: device cpu"):
        replay(doubling()[0], "cuda_graph")


def test_rows_decide_the_bucket():
    assert [bucket(rows) for rows in (1, 2, 16, 17, 64, 65)] == [
        "1 row",
        *["2 to 16 rows"] * 2,
        *["17 to 64 rows"] * 2,
        "other",
    ]
    assert {case.bucket for case in OP.cases} == {"1 row", "2 to 16 rows", "17 to 64 rows"}


@pytest.fixture
def fake_cuda(monkeypatch):
    """What capture() asks of torch.cuda, each call noted; a graph runs nothing at replay."""
    from unfreeze.kernels.cuda_graph import capture

    said, mode = [], ["default"]

    @contextmanager
    def noted(name):
        said.append(f"{name}:")
        try:
            yield
        finally:
            said.append(f":{name}")

    def set_mode(name):
        mode[0] = name
        said.append(f"watch {name}")

    class Here:
        def wait_stream(self, other):
            pass

        def __format__(self, how):
            return "here"

    stream = Here()
    cuda = SimpleNamespace(
        device=lambda d: noted("device"),
        Stream=lambda: stream,
        current_stream=lambda: stream,
        stream=lambda s: noted("aside"),
        CUDAGraph=lambda: SimpleNamespace(replay=lambda: said.append("replay")),
        graph=lambda g, **how: noted("graph"),
        get_sync_debug_mode=lambda: mode[0],
        set_sync_debug_mode=set_mode,
        set_stream=lambda s: said.append(f"current: {s}"),
        empty_cache=lambda: said.append("empty cache"),
    )
    monkeypatch.setattr(capture, "torch", SimpleNamespace(cuda=cuda, OutOfMemoryError=torch.OutOfMemoryError))
    return capture, said, mode


def test_it_is_called_once_freely_once_watched_and_once_to_capture(fake_cuda):
    capture, said, mode = fake_cuda
    scratch.scratch("replay test", (4,), torch.float32, torch.device("cpu"))
    launches = Launches(lambda x: said.append("run") or x + 1, (torch.zeros(1),), 1, torch.float32)
    for _ in range(2):
        assert capture.replay(launches).item() == 1
    wanted = [
        "device:",
        "aside:",
        "run",
        "watch error",
        "run",
        "watch default",
        ":aside",
        "graph:",
        "run",
        ":graph",
        "current: here",
        ":device",
        "replay",
        "replay",
    ]
    assert said == wanted and mode == ["default"]
    assert any(buffer.numel() for buffer in launches.captured.scratch), (
        "what the graph writes into outlives a larger request"
    )


def test_a_launch_that_waits_is_refused_with_torchs_words_and_the_watch_is_taken_away(fake_cuda):
    capture, said, mode = fake_cuda

    def run(x):
        if mode[0] == "error":
            raise RuntimeError("called a synchronizing CUDA operation\nand a long trace")
        return x

    launches = Launches(run, (torch.zeros(1),), 1, torch.float32)
    with pytest.raises(CannotCapture, match=r"^called a synchronizing CUDA operation$"):
        capture.replay(launches)
    assert mode == ["default"] and launches.captured is None and "graph:" not in said


@pytest.mark.parametrize("call", [1, 2, 3], ids=["warm-up", "watched", "captured"])
def test_without_memory_nothing_is_captured_or_kept(fake_cuda, call):
    """The launches that run instead need the memory: of the graph, and of results that a traceback holds."""
    capture, said, mode = fake_cuda
    calls, made = [], []

    def run(x):
        calls.append("run")
        result = x + 1
        made.append(weakref.ref(result))
        if len(calls) == call:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {call} MiB")
        return result

    launches = Launches(run, (torch.zeros(1),), 1, torch.float32)
    with pytest.raises(CannotCapture, match=r"^the GPU has no memory left for a graph") as caught:
        capture.replay(launches)
    assert [result() for result in made] == [None] * call, "while the error is handled"
    assert launches.captured is None and caught.value.__context__ is None
    assert mode == ["default"] and said[-3:] == ["current: here", "empty cache", ":device"]


def test_a_capture_that_cannot_end_either_leaves_the_callers_stream_current(fake_cuda, monkeypatch):
    """torch then raises another error, and does not go back to the stream."""
    capture, said, _ = fake_cuda

    class Graph:
        def __enter__(self):
            capture.torch.cuda.set_stream("capturing")

        def __exit__(self, *error):
            raise RuntimeError("operation failed due to a previous error during capture")

    def run(x):
        if said[-1] == "current: capturing":
            raise torch.OutOfMemoryError("full")
        return x

    monkeypatch.setattr(capture.torch.cuda, "graph", lambda g, **how: Graph())
    with pytest.raises(CannotCapture, match=r"^the GPU has no memory left for a graph"):
        capture.replay(Launches(run, (torch.zeros(1),), 1, torch.float32))
    assert said[-4:] == ["current: capturing", "current: here", "empty cache", ":device"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_graph_reads_what_its_buffers_hold_now():
    (args,) = [
        case.inputs(torch.device("cuda"), torch.float32, torch.Generator().manual_seed(0))
        for case in OP.cases[:1]
    ]
    launches = args[0]
    first = replay(launches, "cuda_graph").clone()
    torch.testing.assert_close(first, launches.run(*launches.buffers), rtol=1e-5, atol=1e-5)
    launches.buffers[0].mul_(-2)
    second = replay(launches, "cuda_graph")
    torch.testing.assert_close(second, launches.run(*launches.buffers), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(first, second)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu_a_value_asked_for_is_refused():
    launches = Launches(lambda x: x * float(x.sum()), (torch.ones(3, device="cuda"),), 1, torch.float32)
    with pytest.raises(CannotCapture, match="synchroniz"):
        replay(launches, "cuda_graph")
    assert torch.equal(torch.ones(2, device="cuda").cumsum(0).cpu(), torch.tensor([1.0, 2.0])), (
        "the device goes on working"
    )
