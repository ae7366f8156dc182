"""How processes share a step: a number of micro-batches that they cannot share equally is refused first."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from unfreeze import cli
from unfreeze.core.errors import ConfigError
from unfreeze.core.torchrun import Started, nearest_multiples, sharers, started
from unfreeze.job.end.folder import _gone
from unfreeze.job.opening.processes import alone, refuse_uneven
from unfreeze.job.planning.plan import as_it_began, tokens_words
from unfreeze.job.watch.spikes import spike_guard
from unfreeze.parallel.processes.collectives import ALONE
from unfreeze.recipes.sft import Config
from unfreeze.train.events import emit_nonfinite
from unfreeze.train.follower import Follower
from unfreeze.train.nonfinite import Named
from unfreeze.train.optim import NonFinite
from unfreeze.train.run import config_hash


def config(parts: int, **fields: object) -> Config:
    return Config(model="m", data=("d.jsonl",), micro_batches=parts, **fields)


@pytest.mark.parametrize(
    ("parts", "size", "near"), [(4, 3, [3, 6]), (1, 2, [2, 4]), (9, 8, [8, 16]), (5, 2, [4, 6])]
)
def test_the_two_nearest_multiples_are_named(parts, size, near):
    with pytest.raises(ConfigError) as refused:
        refuse_uneven(config(parts), size)
    assert f"{parts} micro_batches per step is no multiple of {size} processes" in refused.value.message
    assert refused.value.next == " or ".join(f"--micro-batches {count}" for count in near)
    for count in near:
        refuse_uneven(config(count), size)
    assert nearest_multiples(near[0], size) == [near[0]]


def test_a_run_that_goes_on_names_the_numbers_of_processes_that_share_it(tmp_path):
    saved = config(4).record()
    save = tmp_path / "state" / "step-000001"
    save.mkdir(parents=True)
    record = {"step": 1, "config": saved, "config_hash": config_hash(saved), "schedule": {"steps": 2}}
    (save / "state.json").write_text(
        json.dumps({**record, "optimizer": {}, "cursor": None}), encoding="utf-8"
    )
    goes_on = config(4, out=str(tmp_path))
    with pytest.raises(
        ConfigError, match="has 4 micro_batches per step, which is no multiple of 3"
    ) as refused:
        refuse_uneven(goes_on, 3)
    assert refused.value.next.endswith("(torchrun --nproc-per-node): 1, 2, 4")
    for size in sharers(4):
        refuse_uneven(goes_on, size)
    assert sharers(12) == [1, 2, 3, 4, 6, 12]


class Eight(type(ALONE)):
    """Process 0 of eight."""

    size = 8


def test_tokens_of_a_step_grow_with_the_processes_unless_they_were_given(tmp_path):
    left, asked = config(8, out=str(tmp_path)), config(8, out=str(tmp_path), tokens_per_step=4096)
    assert as_it_began(left, ALONE).training.tokens_per_step == 4096
    assert as_it_began(left, Eight()).training.tokens_per_step == 8 * 4096
    assert as_it_began(asked, Eight()).training.tokens_per_step == 4096
    assert tokens_words(as_it_began(left, Eight()), 8) == "32,768 tokens (4,096 in each of 8 processes)"
    assert tokens_words(left, 1) == "4,096 tokens"


@pytest.mark.parametrize("recorded", [4096, 32768])
def test_a_resumed_run_keeps_its_tokens_of_a_step_with_any_number_of_processes(recorded, tmp_path):
    fields = {**config(8).record(), "training.tokens_per_step": recorded, "recipe": "sft"}
    (tmp_path / "resolved_config.json").write_text(json.dumps(fields, default=str), encoding="utf-8")
    for group in (ALONE, Eight()):
        goes_on = as_it_began(config(8, out=str(tmp_path)), group)
        assert goes_on.training.tokens_per_step == recorded


def test_it_is_refused_before_the_data_is_looked_at_and_before_torch(tmp_path, monkeypatch, capsys):
    """Neither the model nor the data exists; nothing is looked up and no folder is made."""

    def never(*arguments: object, **options: object) -> None:
        raise AssertionError("looked at")

    monkeypatch.setattr("unfreeze.job.job.alone", never)
    monkeypatch.setattr("unfreeze.job.job.pick_device", never)
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("RANK", "0")
    line = f"sft --model no/where --data d.jsonl --micro-batches 4 --out {tmp_path / 'run'}"
    assert cli.main(line.split()) == 2
    assert "4 micro_batches per step is no multiple of 3 processes" in capsys.readouterr().err
    assert not Path(tmp_path / "run").exists()


def test_what_torchrun_says(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    assert started() == Started()  # a RANK without a WORLD_SIZE is not torchrun's
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert started() == Started(rank=3, size=4, local=3, on_node=4, node=0, nodes=1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert started() == Started(rank=3, size=4, local=1, on_node=2, node=1, nodes=2)


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"WORLD_SIZE": "abc"}, "WORLD_SIZE is 'abc', which is not a number"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is 0: a run has at least one process"),
        ({"WORLD_SIZE": "2", "RANK": "-1"}, "RANK is '-1', which is not a number"),
        ({"WORLD_SIZE": "2", "RANK": "5"}, "RANK is 5, but WORLD_SIZE is 2: there is no such process"),
        ({"WORLD_SIZE": "2", "RANK": "1", "LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE is 0: a run has at"),
    ],
)
def test_what_torchrun_never_says_is_one_line(variables, words, tmp_path, monkeypatch, capsys):
    """A RANK that is not there would wait for the others; and --help answers whatever is set."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cli.main(f"sft --model no/where --data d.jsonl --out {tmp_path / 'run'}".split()) == 2
    said = capsys.readouterr().err
    assert words in said and "Traceback" not in said
    with pytest.raises(SystemExit, match=r"^0$"):
        cli.main(["sft", "--help"])


def test_the_spike_guard_of_every_process_has_the_steps_before_that_only_process_0_wrote(
    tmp_path, monkeypatch
):
    """Else process 0 would skip an update that the others make. Here process 1 of a run that goes on."""
    monkeypatch.setattr("unfreeze.train.guards.SpikeGuard", lambda *given, **options: options["history"])
    of_process_0 = json.dumps([[2.0, 1.0], [1.9, 0.9]])
    job = SimpleNamespace(
        group=SimpleNamespace(texts=lambda text: [of_process_0, text]),
        state=SimpleNamespace(step=2, model=None, run=SimpleNamespace(path=tmp_path, shown=tmp_path)),
        config=config(2),
        placed=SimpleNamespace(objective=None),
        **dict.fromkeys(("recompute", "describe")),
    )
    (tmp_path / "events.jsonl").write_text("")  # a process beyond the first has a folder of its own
    assert spike_guard(job) == [[2.0, 1.0], [1.9, 0.9]]  # type: ignore[arg-type]
    job.group = ALONE
    assert spike_guard(job) == []  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        (3, "gone in step 4; saved: nothing yet"),
        (4, "gone after the last step, 4, while writing its results; saved: nothing yet"),
    ],
)
def test_one_that_goes_while_results_are_written_is_in_no_step(steps, said, tmp_path):
    told = [{"kind": "start", "step": 0, "steps": 4, "time": 0.0}]
    told += [{"kind": "train", "step": step, "time": 0.0} for step in range(1, steps + 1)]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in told))
    run = SimpleNamespace(path=tmp_path, step=0, began=True)
    assert _gone("process 0 is gone", run, "").message.removeprefix("process 0 is ") == said  # type: ignore[arg-type]


def test_where_several_run_torch_does_not_print_its_frames(monkeypatch):
    """Of a store that went with process 0: it reads the variable once, when it is imported."""
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "")
    monkeypatch.delenv("TORCH_CPP_LOG_LEVEL")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert alone(config(2), None, None) is None  # type: ignore[arg-type]
    assert os.environ["TORCH_CPP_LOG_LEVEL"] == "ERROR"
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "INFO")
    alone(config(2), None, None)  # type: ignore[arg-type]
    assert os.environ["TORCH_CPP_LOG_LEVEL"] == "INFO"  # the user's own stays


def test_a_process_beyond_the_first_tells_of_the_folder_that_stays(tmp_path):
    """Its own is removed at the end."""
    (tmp_path / "state" / "step-000002").mkdir(parents=True)
    saved = {
        "step": 2,
        "config": {},
        "config_hash": config_hash({}),
        "schedule": {"steps": 4},
        "optimizer": {},
    }
    (tmp_path / "state" / "step-000002" / "state.json").write_text(json.dumps({**saved, "cursor": None}))
    with Follower(tmp_path, {}) as follower:
        assert follower.path != tmp_path and follower.shown == tmp_path
        state = SimpleNamespace(run=follower, step=2)
        said = str(emit_nonfinite(NonFinite("the loss is nan"), Named("NaN first at x"), state))  # type: ignore[arg-type]
    assert f"the last save is {tmp_path / 'state' / 'step-000002'}" in said
    assert f"({tmp_path / 'suspects.jsonl'})" in said and str(follower.path) not in said
