"""A shortage of memory is "does not fit": within a ulimit the plan refuses, in a run the allocator's error becomes
DoesNotFit with flags that take less."""

import json
import re
import sys

import pytest
import torch

import unfreeze
from unfreeze import cli
from unfreeze.commands.demo import TINY_K2
from unfreeze.core.errors import DoesNotFit, ran_out
from unfreeze.core.process import room_words
from unfreeze.objectives import cross_entropy

pytestmark = pytest.mark.usefixtures("fewer_layers")

FIELDS = {"steps": 2, "tokens_per_step": 256, "samples": 0, "dtype": "float32", "device": "cpu", "threads": 1}


def allocates(hidden_TD, lm_head, batch):
    """A loss for which no machine has the memory: torch's own error."""
    torch.empty(2**60, dtype=torch.uint8)
    return cross_entropy(hidden_TD, lm_head, batch)


def test_a_run_without_memory_does_not_fit_and_names_flags_that_take_less(chat_rows, tmp_path):
    with pytest.raises(DoesNotFit) as raised:
        unfreeze.sft(
            model=TINY_K2, data=chat_rows, out=tmp_path / "run", quiet=True, objective=allocates, **FIELDS
        )
    assert re.search(
        r"memory ran out: 1048576.0 TiB could not be allocated; the plan was .*B of ", str(raised.value)
    )
    assert re.match(
        r"place=\{\"(recompute|keep_layers|experts)\"|micro_batches|tokens_per_step", raised.value.next
    )


def test_where_compiling_may_have_taken_the_room_more_room_is_named_first(chat_rows, tmp_path, monkeypatch):
    monkeypatch.setattr("unfreeze.job.planning.shortage.COMPILED", 2**60)
    with pytest.raises(DoesNotFit) as raised:
        unfreeze.sft(
            model=TINY_K2, data=chat_rows, out=tmp_path / "run", quiet=True, objective=allocates, **FIELDS
        )
    assert raised.value.next.startswith(
        "end other programs or raise ulimit -v, as compiling takes up to 0.8 GiB; or "
    )


@pytest.mark.parametrize(
    ("words", "short"),
    [
        ("could not create a primitive", True),
        ("could not create a memory object", True),
        ("could not create a primitive descriptor for a matmul primitive", False),
    ],
)
def test_what_onednn_says_of_a_shortage_is_one(words, short):
    assert bool(ran_out(RuntimeError(words))) == short


def test_a_start_says_where_compiling_may_need_more_than_there_is():
    mib = 2**20
    assert room_words(347 * mib, 391 * mib, "cpu") == "391.0 MiB (compiling may need more)"
    assert room_words(347 * mib, 2000 * mib, "cpu") == room_words(347 * mib, 2000 * mib, "cuda") == "2.0 GiB"


def test_another_error_of_a_run_stays_what_it_is(chat_rows, tmp_path):
    def breaks(hidden_TD, lm_head, batch):
        raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes do not match"):
        unfreeze.sft(
            model=TINY_K2, data=chat_rows, out=tmp_path / "r", quiet=True, objective=breaks, **FIELDS
        )


def test_a_command_without_memory_does_not_fit(monkeypatch, capsys):
    monkeypatch.setitem(cli.COMMANDS, "inspect", cli.Command("tests.job.shortage", "", ""))
    monkeypatch.setattr(
        "importlib.import_module", lambda name: type("M", (), {"main": lambda *_: torch.empty(2**60)})
    )
    assert cli.main(["inspect", "x"]) == 2
    error = capsys.readouterr().err
    assert "DoesNotFit: memory ran out: " in error and "fault" not in error and "ulimit -v" in error


LIMITED = """
import json, resource, sys
from pathlib import Path
import torch
from unfreeze import cli
from unfreeze.parallel.machine import hardware, own_limit

def mapped():
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmSize:")]
    return int(line.split()[1]) * 1024

free = own_limit()
limit = mapped() + 2**30
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
found = hardware("cpu")
print(json.dumps([free, limit - mapped(), found.available, found.limit, found.shared(2).available]))
sys.exit(cli.main(["sft", "--model", sys.argv[1], "--data", sys.argv[2], "--out", sys.argv[3], "--dtype", "float32",
    "--tokens-per-step", "4000000", "--sequence-length", "128", "--place.recompute", "nothing", "--steps", "1", "--quiet"]))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_AS is Linux's")
def test_a_ulimit_is_in_the_plan(chat_rows, tmp_path, forkserver):
    """Oracle: the kernel's VmSize."""
    done = forkserver.run(["-c", LIMITED, TINY_K2, chat_rows, tmp_path / "run"])
    free, left, available, limit, shared = json.loads(done.stdout.splitlines()[0])
    assert free is None and limit == "ulimit" and abs(available - left) < 2**24
    assert shared == available  # each process has a limit of its own
    assert done.returncode == 2, done.stderr
    assert "DoesNotFit: peak " in done.stderr and "within this shell's ulimit" in done.stderr
    assert "next: raise ulimit -v: compiling takes up to 0.8 GiB beside the peak; then --" in done.stderr
