"""Every event that real runs write conforms to core/schema.py: a fine-tuning, a pretraining, the demo's own,
and a step that was not finite."""

import json
import shutil

import pytest

from unfreeze.commands import demo
from unfreeze.core.batch import Loss
from unfreeze.core.conform import violations
from unfreeze.core.schema import KINDS
from unfreeze.evaluate.gap import Gap

WRITTEN = set("data plan load sample gap start kernels train receipt save end".split())
"""The kinds that a short sft run writes."""


def events_of(folder):
    return [json.loads(line) for line in (folder / "events.jsonl").read_text(encoding="utf-8").splitlines()]


def test_a_fine_tuning_run(run_dir):
    events = events_of(run_dir)
    assert [fault for event in events for fault in violations(event)] == []
    kinds = {event["kind"] for event in events} - {"warning"}  # its rows are there three times
    assert kinds == WRITTEN, (
        f"an sft run now writes {sorted(kinds - WRITTEN)}, and no longer {sorted(WRITTEN - kinds)}: if that is meant,"
        " change WRITTEN in tests/job/test_events.py"
    )
    train = next(event for event in events if event["kind"] == "train")
    assert "error" not in train and train["expert_load"].keys() == train["expert_balance"].keys()
    assert "correct" in train, (
        "metrics of the objective stand in train events; cross entropy has `correct`. If sft's default objective"
        " has others, name them here"
    )


def test_control_arm_an_event_with_a_planted_fault_is_named(run_dir):
    train = next(event for event in events_of(run_dir) if event["kind"] == "train")
    assert violations(train | {"peak_bytes": "much"}) and violations(
        {name: value for name, value in train.items() if name != "loss"}
    )


def test_the_demos_samples_and_scores(run_dir, tmp_path):
    run = tmp_path / "demo"
    shutil.copytree(run_dir, run)
    measured = {"style_before": 0.0, "style_after": 99.5, "facts_before": 100.0, "facts_after": 97.0}
    measured |= {"known": 1.0}
    demo.write_samples(
        run,
        [{"question": "Who?", "fact": "I", "relation": "who", "entity": "me"}],
        ["I."],
        ["I, it is."],
        measured,
        (Gap(1e-7, 1e-6, 64, (0, 0)), Gap(1e-7, 2e-6, 64, (0, 0))),
        3,
    )
    added = events_of(run)[len(events_of(run_dir)) :]
    assert [event["kind"] for event in added] == ["sample", "sample", "gap", "eval", "gap", "eval"]
    assert [fault for event in added for fault in violations(event)] == []


def test_a_step_that_is_not_finite(tmp_path, chat_rows, monkeypatch, capsys):
    from unfreeze import cli

    def broken(hidden_TD, lm_head, batch):
        return Loss(hidden_TD.sum() * float("nan"), float(batch.weights_T.sum()), {})

    # the default objective of recipes/sft.py, by the place it is imported from when a run starts
    monkeypatch.setattr("unfreeze.objectives.cross_entropy.cross_entropy", broken)
    flags = [
        "--model",
        demo.TINY_K2,
        "--data",
        chat_rows,
        "--out",
        tmp_path / "run",
        "--tokens-per-step",
        128,
        "--watch.samples",
        0,
        "--lora.rank",
        1,
    ]
    assert cli.main(["sft", "--quiet", *map(str, flags)]) != 0
    events = events_of(tmp_path / "run")
    assert [event["error"] for event in events if event["kind"] == "train"], capsys.readouterr().err
    assert [fault for event in events for fault in violations(event)] == []


def test_a_run_with_validation_configured_by_a_file(tmp_path, chat_rows, held_rows):
    """Evaluations, samples between, and `track` as a TOML key: the tracker's folder is there, and is nothing
    that the schema must know."""
    from unfreeze import cli

    text = (
        f'model = "{demo.TINY_K2}"\ndata = ["{chat_rows}"]\nout = "{tmp_path / "run"}"\nsteps = 2\nsamples ='
        " 1\nwarmup = 0\n"
    )
    text += (
        f'tokens_per_step = 128\nvalidation = "{held_rows}"\nvalidate_every = 1\ntrack ='
        ' ["tensorboard"]\n[lora]\nrank = 1\n'
    )
    (tmp_path / "run.toml").write_text(text)
    assert cli.main(["sft", "--quiet", str(tmp_path / "run.toml")]) == 0
    events = events_of(tmp_path / "run")
    assert [fault for event in events for fault in violations(event)] == []
    assert {"eval", "sample"} <= {event["kind"] for event in events} and list(
        (tmp_path / "run" / "tensorboard").iterdir()
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_without_its_fields_is_a_fault(kind):
    required = KINDS[kind].__required_keys__ - {"kind", "step", "time"}
    found = violations({"kind": kind, "step": 0, "time": 0.0})
    assert {fault.path[0] for fault in found} == required, f"core/schema.py, the class of {kind!r}"
