"""Python as a way in: the same runs as the command line's, results to look at, a loop of one's own that loses
nothing."""

import json
import subprocess
import sys

import pytest

import unfreeze
from unfreeze import api, cli
from unfreeze.config.python import in_python
from unfreeze.config.sft import Config
from unfreeze.core.errors import ConfigError, DataError
from unfreeze.drill.sandbox import TINY_K2

FIELDS = {
    "rank": 2,
    "steps": 4,
    "tokens_per_step": 256,
    "samples": 0,
    "dtype": "float32",
    "device": "cpu",
    "threads": 1,
    "validation_fraction": 0.2,
}


def losses(run):
    return unfreeze.FinishedRun(run).losses


@pytest.fixture(scope="module", autouse=True)
def fewer_layers(two_layers):
    """Runs of this file train the first two of tiny-k2's four layers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "TINY_K2", two_layers)
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory, chat_rows):
    out = tmp_path_factory.mktemp("api") / "whole"
    return unfreeze.sft(model=TINY_K2, data=chat_rows, out=out, quiet=True, **FIELDS)


def test_a_run_gives_numbers_tables_answers_and_a_page(whole):
    assert whole.finished and len(whole.losses) == 4 and whole.loss == whole.losses[-1]
    assert whole.receipt["experts"]["sites_moved"] > 0 and {"train", "receipt", "end"} <= {
        event["kind"] for event in whole.events
    }
    assert isinstance(whole.chat("What is the capital of France?", max_new_tokens=4), str)
    assert whole.generate("Paris is", max_new_tokens=4) == whole.model.generate("Paris is", max_new_tokens=4)
    report = whole.report()
    assert (
        report.path.is_file()
        and "<iframe srcdoc=" in report._repr_html_()
        and "sandbox" in report._repr_html_()
    )
    assert "moved" in repr(whole.receipt) and "<pre>" in whole.receipt._repr_html_()
    written = whole.export("peft")
    assert (written / "adapter_config.json").is_file() and written.name == "export-peft"
    assert "4 of 4" in repr(whole) and "<pre>" in whole._repr_html_()


def test_the_command_line_makes_the_same_run(whole, tmp_path, chat_rows):
    flags = [
        text
        for name, value in FIELDS.items()
        for text in (f"--{'lora.' * (name == 'rank')}{name.replace('_', '-')}", str(value))
    ]
    assert (
        cli.main(
            [
                "sft",
                "--model",
                str(TINY_K2),
                "--data",
                str(chat_rows),
                "--out",
                str(tmp_path / "cli"),
                "--quiet",
                *flags,
            ]
        )
        == 0
    )
    assert losses(tmp_path / "cli") == whole.losses


def test_a_loop_of_ones_own_is_the_same_run_and_leaving_it_saves(whole, tmp_path, chat_rows):
    def prepared():
        return unfreeze.prepare(model=TINY_K2, data=chat_rows, out=tmp_path / "own", quiet=True, **FIELDS)

    job = prepared()
    for number, batch in enumerate(job.batches):
        gradients = job.forward_backward(batch)
        assert gradients.norm > 0 and job.state.step == number
        with pytest.raises(ConfigError, match="twice without optim_step"):  # it would train on the last alone
            job.forward_backward(batch[-1])
        job.optim_step()
        if number == 1:
            break
    assert (tmp_path / "own" / "state" / "step-000002").is_dir() and (tmp_path / "own" / "adapter").is_dir()

    with pytest.raises(RuntimeError, match="mine"):
        for batch in prepared().batches:
            prepared_job = batch  # the body fails before its step: nothing is counted
            raise RuntimeError("mine")
    assert prepared_job

    job = prepared()
    assert job.state.step == 2
    for batch in job.batches:
        job.forward_backward(batch)
        job.optim_step()
    assert losses(tmp_path / "own") == whole.losses  # to the bit: one loop, cut in two, driven from outside
    held_out = [
        [event["loss"] for event in run.events if event["kind"] == "eval"]
        for run in (whole, unfreeze.FinishedRun(tmp_path / "own"))
    ]
    assert held_out[0] == held_out[1]
    with pytest.raises(ConfigError, match="is finished"):
        prepared()


def test_an_objective_and_a_hook_are_functions(tmp_path, chat_rows):
    from unfreeze.objectives.cross_entropy import cross_entropy

    calls, steps = [], []

    def objective(hidden_TD, lm_head, batch):
        calls.append(batch.num_tokens)
        return cross_entropy(hidden_TD, lm_head, batch)

    hook = lambda state, result: steps.append((state.step, result.loss))  # noqa: E731
    run = unfreeze.sft(
        model=TINY_K2,
        data=chat_rows,
        out=tmp_path / "run",
        quiet=True,
        objective=objective,
        on_step=[hook],
        **FIELDS,
    )
    assert len(calls) >= 4 and steps == list(enumerate(run.losses, start=1))


def test_an_update_without_gradients_is_refused(tmp_path, chat_rows):
    job = unfreeze.prepare(model=TINY_K2, data=chat_rows, out=tmp_path / "run", quiet=True, **FIELDS)
    with job, pytest.raises(ConfigError, match="no gradients"):
        job.optim_step()


@pytest.mark.parametrize(
    "fields, says",
    [
        ({"rnak": 4}, "unfreeze.sft has no argument 'rnak'; nearest: 'rank'"),
        ({}, "needs model and data"),
        ({"learning_rate": -1.0}, "learning_rate = -1"),
        ({"rank": 0}, "rank = 0"),
        ({"lora": {"rang": 3}}, "unknown key lora.rang"),
        ({"train": "all", "rank": 3}, "trains every weight and has no adapters"),
    ],
)
def test_a_wrong_argument_is_one_clear_error(fields, says):
    given = {"model": str(TINY_K2), "data": "chat.jsonl"} if fields else {}
    with pytest.raises(ConfigError, match=says):
        unfreeze.sft(**given, **fields)


def test_a_toml_file_and_keywords_on_top(tmp_path, chat_rows):
    file = tmp_path / "run.toml"
    toml = {name: value for name, value in FIELDS.items() if name != "rank"} | {
        "model": str(TINY_K2),
        "data": str(chat_rows),
        "steps": 9,
    }
    file.write_text(
        "".join(f"{name} = {json.dumps(value)}\n" for name, value in toml.items()) + "[lora]\nrank = 8\n"
    )
    clip = {"clip": 0.5}
    run = unfreeze.sft(file, steps=1, rank=2, optimizer=clip, out=tmp_path / "run", quiet=True)
    recorded = json.loads((tmp_path / "run" / "resolved_config.json").read_text())
    assert len(run.losses) == 1 and recorded["training.steps"] == 1 and recorded["lora.rank"] == 2
    assert recorded["optimizer.clip"] == 0.5


def test_rows_become_a_file_of_the_run_and_the_same_rows_the_same_run(tmp_path, chat_rows, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [json.loads(line) for line in chat_rows.read_text().splitlines()]
    fields = {**FIELDS, "steps": 1, "quiet": True}
    run = unfreeze.sft(model=TINY_K2, data=rows, **fields)
    (file,) = run.path.glob("rows-*.jsonl")
    assert [json.loads(line) for line in file.read_text().splitlines()] == rows
    assert run.path.parent.name == "runs" and run.path.name == f"tiny-k2-{file.stem}"
    # control arms: a list of paths, other rows, and the same call again, which trains nothing
    of_paths = unfreeze.sft(model=TINY_K2, data=[chat_rows], out=tmp_path / "paths", **fields)
    assert of_paths.losses == run.losses
    assert unfreeze.sft(model=TINY_K2, data=rows[:-1], **fields).path != run.path
    again = unfreeze.sft(model=TINY_K2, data=rows, **fields)
    assert again.path == run.path and len(again.losses) == 1
    with pytest.raises(DataError, match="a row is not JSON: Object of type set"):
        unfreeze.sft(model=TINY_K2, data=[{"text": {"a"}}], **fields)


class Frame:
    """What a pandas DataFrame answers with."""

    columns = ("prompt", "completion", "system")

    def to_dict(self, orient):
        assert orient == "records"
        return [{"prompt": "Q", "completion": "A", "system": float("nan")}]


class Hub:
    """What a datasets.Dataset answers with."""

    column_names = ("prompt", "completion")

    def to_list(self):
        return [{"prompt": "Q", "completion": "A"}]


def test_tables_of_other_libraries_are_rows():
    plain = [{"prompt": "Q", "completion": "A"}]
    assert api._rows(Frame()) == api._rows(Hub()) == api._rows(plain) == plain
    assert api._rows("chat.jsonl") == "chat.jsonl" and api._rows(None) is None  # control arm


@pytest.mark.parametrize(
    "data, says, next",
    [
        ({"prompt": "Q", "completion": "A"}, "data is a single dict", "data=[row]"),
        ({"train": Hub()}, "several splits: train", 'data=data["train"]'),
        ([], "data is empty", "data=[{"),
        ((row for row in [{"prompt": "Q", "completion": "A"}]), "data is a generator", "data=list(data)"),
        ([{"Question": "Q", "Answer": "A"}], "are missing", 'columns={"question": "Question", "answer": "Answer"}'),
        ([{"query": "Q", "reply": "A"}], "no known field", 'columns={"prompt": "NAME", "completion": "NAME"}'),
    ],
)  # fmt: skip
def test_a_remedy_in_python_is_python(data, says, next, tmp_path):
    with pytest.raises(DataError, match=says) as error:
        unfreeze.sft(model=TINY_K2, data=data, out=tmp_path / "run", quiet=True, **FIELDS)
    assert error.value.next.startswith(next)


@pytest.mark.parametrize(
    "flags, python",
    [
        ("--device cpu", 'device="cpu"'),
        ("correct the row, or --data.on-bad-row skip", 'correct the row, or **{"data.on_bad_row": "skip"}'),
        ("--optimizer.clip 0.5, --place.recompute layers", 'optimizer={"clip": 0.5}, place={"recompute": "layers"}'),
        ("--sequence-length higher (and --tokens-per-step, if", "sequence_length higher (and tokens_per_step, if"),
        ("--epochs 40, or --tokens-per-step 1,024", "epochs=40, or tokens_per_step=1024"),
        ("--lora.rank 8", "rank=8"),
        # control arms: no flag of a run, and a command
        ("--hardware 1xH100", "--hardware 1xH100"),
        ("unfreeze sft --model M", "unfreeze sft --model M"),
    ],
)  # fmt: skip
def test_flags_are_spelled_as_keywords(flags, python):
    assert in_python(Config, flags) == python


def test_importing_unfreeze_and_naming_its_functions_brings_no_torch():
    code = (
        "import sys, unfreeze; unfreeze.sft, unfreeze.prepare; assert 'torch' not in sys.modules and 'numpy'"
        " not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_finished_run_whose_data_changed_is_not_taken_for_done(tmp_path, chat_rows):
    data = tmp_path / "chat.jsonl"
    data.write_bytes(chat_rows.read_bytes())
    given = {"model": TINY_K2, "data": data, "out": tmp_path / "run", "quiet": True, **FIELDS}
    # control arm: the same data, nothing trained
    assert unfreeze.sft(**given).losses == unfreeze.sft(**given).losses
    data.write_text(data.read_text().replace("Paris", "Lyon"))
    with pytest.raises(ConfigError, match=r"is finished, but .*chat.jsonl has changed since"):
        unfreeze.sft(**given)


def test_data_that_make_few_steps_are_said(tmp_path, chat_rows):
    few = {**FIELDS, "validation_fraction": 0.0} | {"steps": None, "epochs": 0.5}
    run = unfreeze.sft(model=TINY_K2, data=chat_rows, out=tmp_path / "few", quiet=True, **few)
    warnings = [event["message"] for event in run.events if event["kind"] == "warning"]
    (warning,) = [message for message in warnings if "few steps: 1 of" in message]
    assert (
        "few steps: 1 of 256 tokens; 50% of the rows are seen once: unfreeze init " in warning
        and warning.endswith(", or --epochs 20")
    )
    asked = unfreeze.sft(
        model=TINY_K2, data=chat_rows, out=tmp_path / "asked", quiet=True, **few | {"steps": 1}
    )
    # control arm: a number that was asked for
    warnings = [event["message"] for event in asked.events if event["kind"] == "warning"]
    assert not [message for message in warnings if "few steps" in message]


def test_the_package_lists_its_public_nouns_alone():
    """Not the rooms that happen to be imported, nor what the package imports for itself."""
    assert dir(unfreeze) == sorted(unfreeze.__all__) and "PackageNotFoundError" not in dir(unfreeze)
    assert all(hasattr(unfreeze, name) for name in dir(unfreeze))


def test_swap_returns_a_model_that_the_loop_of_the_example_trains(tmp_path):
    """examples/sft_loop.py with a swapped model in place of the loaded one: adapters learn, the base stays."""
    import torch

    from unfreeze.adapters import LoraConfig, attach
    from unfreeze.core.batch import Batch
    from unfreeze.objectives.cross_entropy import cross_entropy
    from unfreeze.train.optim import AdamW

    base = unfreeze.load(TINY_K2, dtype="float32")
    model = unfreeze.swap(base, "layers.*.self_attn", "full")
    assert type(model) is type(base)
    assert model.chat("Hello.", max_new_tokens=2) == base.chat("Hello.", max_new_tokens=2)
    frozen = {name: value.clone() for name, value in model.decoder.state_dict().items()}
    attach(model.decoder, LoraConfig(rank=2), 0)
    optimizer, losses = AdamW(model.decoder), []
    tokens = torch.tensor(model.encode_chat("What is the capital of France?") * 4)
    batch = Batch(
        tokens, tokens.roll(-1), torch.ones(len(tokens)), torch.arange(len(tokens)), torch.tensor([0])
    )
    for _ in range(3):
        loss = cross_entropy(model.decoder.hidden(batch), model.decoder.lm_head, batch)
        optimizer.zero_grad()
        (loss.sum / len(tokens)).backward()
        optimizer.collect()
        optimizer.update(1e-2, 1.0)
        losses.append(float(loss.sum.detach()))
    assert losses[-1] < losses[0]
    after = model.decoder.state_dict()
    assert all(torch.equal(after[name], value) for name, value in frozen.items())
    with pytest.raises(ConfigError, match="has adapters"):
        unfreeze.swap(whole_run(tmp_path), "layers.*.self_attn", "full")


def whole_run(folder):
    """A run's folder with an adapter."""
    folder.joinpath("resolved_config.json").write_text(json.dumps({"model": str(TINY_K2)}))
    (folder / "adapter").mkdir()
    (folder / "adapter" / "adapter_config.json").write_text("{}")
    return folder
