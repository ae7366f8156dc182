"""Who takes part and who is gone: in threads over one store; killed processes are in test_torchrun.py."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from unfreeze.core.errors import ConfigError, ProcessGone, UserError
from unfreeze.parallel.processes import collectives, roll
from unfreeze.parallel.processes.roll import Roll, plainly

NODES = [("a", 0), ("a", 1), ("b", 0), ("b", 1)]  # host and place there of four processes


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(roll, "LOOK", timedelta(seconds=0.1))
    monkeypatch.setattr(roll, "PATIENCE", 0.5)
    monkeypatch.setattr(roll, "COMING_ALONE", timedelta(seconds=10))


def together(action: Callable[[Roll], Any], monkeypatch, nodes=NODES, pids=None) -> list[Any]:
    """What `action` gives in each process, or the error it raised there; within 60 s."""
    mine = threading.local()
    monkeypatch.setattr(roll, "_host", lambda: nodes[mine.rank][0])
    monkeypatch.setattr(os, "getpid", lambda: (pids or {}).get(mine.rank, os.getppid()))
    monkeypatch.setattr(roll, "started", lambda: type("At", (), {"local": nodes[mine.rank][1]}))
    store = dist.HashStore()

    def one(rank: int) -> Any:
        mine.rank = rank
        try:
            return action(Roll(store, rank, len(nodes)))
        except UserError as error:
            return error

    with ThreadPoolExecutor(len(nodes)) as threads:
        futures = [threads.submit(one, rank) for rank in range(len(nodes))]
        return [future.result(timeout=60) for future in futures]


def test_process_0_acts_first_then_the_first_of_each_other_node_then_all_others(monkeypatch):
    order: list[int] = []

    def act(each: Roll) -> Any:
        def slow() -> str:
            time.sleep(0.3 if not order else 0.0)  # three times longer than one look
            order.append(each._rank)
            return f"from {each._rank}"

        return each.act(each.first_of_nodes(), slow), each.node_first()

    found = together(act, monkeypatch)
    assert found == [("from 0", 0), ("from 1", 0), ("from 2", 2), ("from 3", 2)]
    assert order[:2] == [0, 2] and sorted(order[2:]) == [1, 3]


def test_one_alone_acts_and_its_error_ends_all(monkeypatch):
    def act(each: Roll) -> Any:
        first = each.act([[0]], lambda: "done")

        def fail() -> None:
            raise ConfigError("planted")

        with pytest.raises(UserError) as said:
            each.act([[0, 2]], fail if each._rank == 2 else lambda: None)
        return first, said.value.message

    stops = "process 2 failed, so this one stops too"
    assert together(act, monkeypatch) == [("done", stops), (None, stops), (None, "planted"), (None, stops)]


@pytest.mark.parametrize("agent", [False, True])
def test_process_0_whose_store_it_is_leaves_last(monkeypatch, agent):
    """Started without an agent: one that hears late of what process 0 did would find no store. Control arm: an
    agent's store stays, so nobody waits. Of one that was killed nobody waits."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", str(agent))
    monkeypatch.setattr(roll, "_runs", lambda pid: pid != -1)
    left: list[int] = []
    gone = [threading.Event() for _ in range(3)]
    after = {1: 0, 2: 1} if agent else {2: 1}  # each leaves behind another, but for what is tested

    def act(each: Roll) -> None:
        each.act([[0]], lambda: None)
        if each._rank == 3:
            return  # killed
        if each._rank in after:
            assert gone[after[each._rank]].wait(20)
        elif each._rank:
            time.sleep(0.3)  # process 0 would be gone by then
        each.leave(None)
        each.stay()
        left.append(each._rank)
        gone[each._rank].set()

    began = time.monotonic()
    together(act, monkeypatch, nodes=[("a", place) for place in range(4)], pids={3: -1})
    assert left == ([0, 1, 2] if agent else [1, 2, 0]) and time.monotonic() - began < roll.GRACE


def test_another_version_of_torch_is_refused_by_all_naming_the_process(monkeypatch):
    class Torch:
        @property
        def __version__(self) -> str:
            return "2.12.1+cpu" if threading.current_thread().name.endswith("_1") else "2.13.0+cpu"

    monkeypatch.setattr(roll, "torch", Torch())
    said = {str(error) for error in together(lambda each: None, monkeypatch, NODES[:2])}
    (line,) = said
    assert line.startswith("process 1 has torch 2.12.1+cpu, process 0 has 2.13.0+cpu")
    assert "next: install torch 2.13.0+cpu on a too" in line


def test_one_that_does_not_come_is_named(monkeypatch, capsys):
    """Where torchrun's agents started them later than without: there nobody begins by himself."""
    monkeypatch.setattr(roll, "COMING_ALONE", timedelta(seconds=0.6))
    monkeypatch.setattr(roll, "SAID", 0.1)
    with pytest.raises(UserError, match="processes 1 and 2 of 3 did not start within"):
        Roll(dist.HashStore(), 0, 3)
    said = "process 0 waits for processes 1 and 2 of 3, at most 0 minutes\n"
    assert capsys.readouterr().err == said
    store = dist.HashStore()
    store.set("here/0", member("elsewhere", 1))
    with pytest.raises(UserError, match="process 2 of 3 did not start within"):
        Roll(store, 1, 3)
    assert not capsys.readouterr().err  # process 0 says it
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert roll.coming() == roll.COMING


def a_dead_process() -> int:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    return gone.pid


def test_a_process_that_is_killed_is_named_on_its_own_host_and_on_others(monkeypatch):
    """Process 1 of host a: process 0 sees that its id runs no more, those of host b learn it from process 0."""

    def act(each: Roll) -> Any:
        if each._rank == 1:
            return None
        with each.watching(lambda who: ProcessGone(f"{who} in step 41")):
            try:
                raise RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1")
            finally:
                each.leave(ProcessGone("lost"))

    nobody, first, *others = (lambda found: (found[1], found[0], *found[2:]))(
        together(act, monkeypatch, pids={1: a_dead_process()})
    )
    assert nobody is None
    for error in (first, *others):
        assert isinstance(error, ProcessGone) and error.exit_code == 1
        assert error.message == "process 1 is gone (connection closed) in step 41"
    assert [error.silent for error in (first, *others)] == [False, True, True]  # one says it


def test_one_that_ends_with_an_error_is_named_with_it_and_waiting_for_it_ends(monkeypatch):
    def act(each: Roll) -> Any:
        if each._rank == 0:
            each.leave(ConfigError("the disk is on fire", next="run"))
            return None
        return each.act([[0]], lambda: None)

    _, error = together(act, monkeypatch, NODES[:2])
    assert isinstance(error, ProcessGone)
    assert error.message == "process 0 is gone (it ended with ConfigError: the disk is on fire)"
    assert not error.silent


def member(host: str, pid: int) -> str:
    return json.dumps({"host": host, "pid": pid, "torch": roll.torch.__version__, "local": 0})


def test_control_arm_an_error_of_its_own_is_nobodys_absence(monkeypatch):
    """Also where another process is gone: a wrong shape is a fault of this one."""
    store = dist.HashStore()
    store.set("here/1", member("elsewhere", 1))
    here = Roll(store, 0, 2)
    with pytest.raises(RuntimeError, match="sizes of tensors"), here.watching(plainly):
        raise RuntimeError("the sizes of tensors differ")
    with pytest.raises(ProcessGone, match="another process does not answer"), here.watching(plainly):
        raise RuntimeError("Connection closed by peer")


def test_the_thread_beside_a_run_ends_a_process_that_waits_for_a_gpu(monkeypatch, capfd):
    """Torch tells it nothing: the agent's SIGTERM does, or what another process found. It is one line."""
    ended: list[int] = []
    monkeypatch.setattr(roll, "GRACE", 0.2)
    store = dist.HashStore()
    store.set("here/1", member(roll._host(), a_dead_process()))
    here = Roll(store, 0, 2)
    here.told = lambda who: ProcessGone(f"{who} in step 3; saved: step-000002")
    monkeypatch.setattr(os, "_exit", ended.append)
    former = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        with here.beside():
            signal.signal(signal.SIGTERM, lambda *_: None)  # as the loop's Interrupt does
            os.kill(os.getpid(), signal.SIGTERM)
            until = time.monotonic() + 20
            while not ended and time.monotonic() < until:
                time.sleep(0.05)
    finally:
        signal.signal(signal.SIGTERM, former)
    assert ended and ended[0] == 1
    line = "ProcessGone: process 1 is gone (connection closed) in step 3; saved: step-000002"
    assert capfd.readouterr().err.splitlines()[0] == line


def test_a_port_in_use_is_said_in_one_line(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", str(port))
        with pytest.raises(ConfigError) as said:
            collectives._met()
    assert said.value.message == (
        f"the processes cannot meet at 127.0.0.1:{port} (MASTER_ADDR, MASTER_PORT): another program has that port"
    )
    for wrong in ("65536", "x", "-1"):
        monkeypatch.setenv("MASTER_PORT", wrong)
        with pytest.raises(ConfigError, match=f"MASTER_PORT is '{wrong}', which is no port"):
            collectives._met()
    monkeypatch.delenv("MASTER_PORT")
    with pytest.raises(
        ConfigError, match=r"WORLD_SIZE is set, but other variables .*: MASTER_PORT is not set"
    ):
        collectives._met()
