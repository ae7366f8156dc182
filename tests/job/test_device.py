"""The allocator is set before CUDA starts and said in the plan (docs/why/trust.md L2); fragmentation is an event
field. CUDA itself is not needed here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from unfreeze import cli
from unfreeze.core.errors import ConfigError
from unfreeze.core.layout import RESIDENT
from unfreeze.job.opening.device import ALLOCATOR, SEGMENTS, allocator_line, pick_device, set_allocator
from unfreeze.job.opening.precision import warn_device
from unfreeze.job.planning.plan import emit_plan
from unfreeze.kernels import cards
from unfreeze.parallel.machine import hardware
from unfreeze.parallel.plan import Sizes, Work, plan, plan_lines
from unfreeze.parallel.processes.collectives import ALONE
from unfreeze.train import memory
from unfreeze.train.run import Run


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch):
    for name in ALLOCATOR:
        monkeypatch.setenv(name, "")  # so that monkeypatch puts back what the test's own code sets
        monkeypatch.delenv(name)


def test_it_is_set_before_torch_is_imported():
    code = (
        "import sys, os; from unfreeze.job.opening import device; assert 'torch' not in"
        " sys.modules\ndevice.set_allocator(); assert 'torch' not in sys.modules;"
        " print(os.environ['PYTORCH_CUDA_ALLOC_CONF'])"
    )
    environment = {name: value for name, value in os.environ.items() if name not in ALLOCATOR}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == SEGMENTS, done.stderr


def test_pick_device_sets_it_and_the_line_says_so():
    assert pick_device("cpu") == torch.device("cpu")
    assert allocator_line() == (
        "allocator: expandable segments (PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True)",
        True,
    )


@pytest.mark.parametrize("name", ALLOCATOR)
def test_the_users_choice_stays_and_is_said(monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.setenv(name, "max_split_size_mb:128")
    set_allocator()
    assert [os.environ.get(each) for each in ALLOCATOR if each != name] == [None]
    line, grows = allocator_line()
    assert (
        not grows
        and line.startswith(f"allocator: {name}=max_split_size_mb:128 has no expandable segments")
        and f"export {ALLOCATOR[0]}" in line
    )


def test_control_arm_after_cuda_has_started_it_is_too_late_and_the_plan_warns(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    set_allocator()
    assert not any(name in os.environ for name in ALLOCATOR)
    sizes = Sizes(1, 1, 4, hidden_size=1, stream_size=1, num_layers=1, vocab_size=1, layer=1)
    small = plan(sizes, RESIDENT, Work(tokens=1), replace(hardware(), kind="cuda"))
    with Run(tmp_path, {}) as run:
        emit_plan(run, small, ALONE)
    (event,) = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert event["warning"].startswith(
        "allocator: CUDA started before expandable segments could be set"
    ) and event["lines"] == [*plan_lines(small), event["lines"][-1]]


def test_fragmentation_is_reserved_minus_allocated_on_cuda_only(monkeypatch: pytest.MonkeyPatch):
    assert memory.memory_fields(torch.device("cpu")).keys() == {"peak_bytes"}
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 70)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 100)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 60)
    assert memory.memory_fields(torch.device("cuda")) == {"peak_bytes": 70, "fragmentation_bytes": 40}


@pytest.mark.parametrize("ask", ["pick_device", "device_of"])
def test_a_second_gpu_becomes_the_current_device_once(monkeypatch, ask):
    """Triton launches on the current device: without this its kernels would run on the first."""
    from unfreeze.generate.open import device_of

    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", lambda enabled: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    card = cards.Card("H100", (9, 0), 80 << 30, "580.65", "CUDA 13.0")
    monkeypatch.setattr(cards, "card_of", lambda device: card)
    found = {"pick_device": pick_device, "device_of": device_of}[ask]("cuda:1")
    assert found == torch.device("cuda", 1) and chosen == [torch.device("cuda", 1)]
    with pytest.raises(ConfigError, match=r"'cuda:2', but there are 2 here"):
        device_of("cuda:2")


def test_a_card_that_is_too_old_is_refused_and_auto_takes_the_cpu(monkeypatch):
    from unfreeze.generate.open import device_of

    old = cards.Card("Tesla V100", (7, 0), 16 << 30, "535.1", "CUDA 12.6")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cards, "card_of", lambda device: old)
    monkeypatch.setattr(cards, "here", lambda: old)
    with pytest.raises(ConfigError, match=r"'cuda', but Tesla V100 has compute capability 7\.0") as caught:
        device_of("cuda")
    assert caught.value.next == "--device cpu" and device_of("auto") == torch.device("cpu")


@pytest.mark.parametrize("ask", ["pick_device", "device_of"])
@pytest.mark.parametrize(
    "name, there, kept_away",
    [("cuda", True, True), ("auto", True, True), ("auto", False, False), ("cpu", True, False)],
)
def test_cudnn_is_kept_away_from_attention_on_cuda_only(monkeypatch, ask, name, there, kept_away):
    """It would build a plan for each of the shapes that packed documents have, half a second each."""
    from unfreeze.generate.open import device_of

    told: list[bool] = []
    card = cards.Card("H100", (9, 0), 80 << 30, "580.65", "CUDA 13.0")
    monkeypatch.setattr(cards, "card_of", lambda device: card)
    monkeypatch.setattr(cards, "here", lambda: card if there else None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", told.append)
    assert {"pick_device": pick_device, "device_of": device_of}[ask](name).type == (
        "cuda" if kept_away else "cpu"
    )
    assert told == [False] * kept_away


@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_a_card_that_others_fill_is_one_line(name, monkeypatch):
    from unfreeze.generate.open import device_of

    def busy(*_):
        raise RuntimeError(
            "CUDA error: all CUDA-capable devices are busy or unavailable. CUDA kernel errors might"
        )

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cards, "card_of", busy)
    monkeypatch.setattr(cards, "here", busy)
    with pytest.raises(ConfigError, match="cannot be used: CUDA error: all CUDA-capable devices") as caught:
        device_of(name)
    assert caught.value.next.startswith("nvidia-smi")


@pytest.mark.parametrize("name", ["mps", "mps:0", "xpu", "hpu", "npu", "xla", "gpu", "meta", "cuda:", "CUDA"])
def test_a_device_for_which_nothing_is_built_is_refused_before_anything_is_opened(name, tmp_path, capsys):
    """mps was taken, and died in the first step. The model and the data need not be there."""
    from unfreeze.generate.open import device_of

    for ask in (device_of, pick_device):
        with pytest.raises(ConfigError, match=f"device is '{name}'") as caught:
            ask(name)
        assert caught.value.next == "--device cpu"
    for command in ("sft --model none --data none.jsonl", "pretrain --model none --data none", "chat none"):
        assert cli.main([*command.split(), "--device", name]) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"ConfigError: --device = '{name}': ") and "cpu" in said.splitlines()[0]
    (tmp_path / "run.toml").write_text(f'model = "m"\ndata = "d"\ndevice = "{name}"\n')
    assert cli.main(["sft", str(tmp_path / "run.toml")]) == 2
    assert f"device = '{name}': " in capsys.readouterr().err


@pytest.mark.parametrize("name", ["cpu", "auto"])
def test_a_cpu_is_taken_on_any_machine(name, monkeypatch):
    """A Mac's too: torch sees its GPU as mps, and "auto" does not take it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert pick_device(name) == torch.device("cpu")


@pytest.mark.parametrize(
    ("asked", "card", "words"),
    [
        ("auto", None, "this run is on the CPU: the driver is too old; update it"),
        ("auto", "old", "this run is on the CPU: it is too old"),
        ("cpu", None, ""),
    ],
)
def test_a_gpu_that_is_not_used_is_a_warning_of_the_run(monkeypatch, asked, card, words):
    """Not if the CPU was asked for."""
    monkeypatch.setattr(cards, "here", lambda: card)
    monkeypatch.setattr(cards, "refuses", lambda card: "it is too old")
    monkeypatch.setattr(
        cards, "unused", lambda nodes_only: cards.Unused("the driver is too old", "update it")
    )
    said = []
    folder = SimpleNamespace(step=0, events=SimpleNamespace(emit=lambda *_, message: said.append(message)))
    config = SimpleNamespace(memory=SimpleNamespace(device=asked, dtype="float32"))
    warn_device(folder, config, torch.device("cpu"))
    assert said == [words] * bool(words)
