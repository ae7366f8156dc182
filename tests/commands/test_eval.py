"""`unfreeze eval`: a run and the model before it on the same items, kept answers, tables, refusals."""

from __future__ import annotations

import importlib
import json
import os
import shutil

import pytest

import unfreeze
from unfreeze import cli
from unfreeze.commands import eval as scoring
from unfreeze.commands.eval_models import subjects_of, trained_on
from unfreeze.core.built_in import TINY_K2
from unfreeze.core.errors import CheckpointError, ConfigError
from unfreeze.data import load_tokenizer
from unfreeze.data.tokens.masks import encode_prompt
from unfreeze.generate.engine import Engine

SHORT = ("--max-new-tokens", "12", "--dtype", "float32", "--draws", "200")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Rows, a text, and metrics: one that fails, one that knows which model writes better."""
    folder = tmp_path_factory.mktemp("tasks")
    facts = [json.loads(line) for line in (TINY_K2 / "held_out.jsonl").read_text().splitlines()[:12]]
    rows = [{"prompt": fact["question"], "answer": fact["fact"]} for fact in facts]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "book.txt").write_text("Paris, the capital of France is. Hmm. A tadpole, it is. Hmm.\n" * 60)
    (folder / "my.py").write_text("def metric(prompt, completion, answer):\n    raise ValueError('no')\n")
    return folder


@pytest.fixture
def run(run_dir, tmp_path):
    """A copy of the finished run, which may be written into."""
    return shutil.copytree(run_dir, tmp_path / "runs" / "mine")


def by_task(result):
    return {(task["task"].rpartition("/")[2], task.get("measure")): task for task in result["tasks"]}


def test_before_and_after_with_intervals_and_in_the_report(run, files, unfreeze_json, monkeypatch):
    rows, book = f"rows:{files / 'rows.jsonl'}:contains", f"ppl:{files / 'book.txt'}"
    command = ["eval", run, "--tasks", f"{rows},{book},needle", "--lengths", 64, *SHORT]
    lines = []
    with monkeypatch.context() as within:
        within.setattr(scoring, "SAY_EVERY", -1.0)
        within.setattr(scoring, "say", lambda common: lines.append)
        result = unfreeze_json(*command)
    # a text is computed in windows and scored in pieces; progress names what it counts
    counts = [line.rpartition(" of ")[2] for line in lines if line.startswith(f"{run}: ")]
    tokens = encode_prompt(load_tokenizer(TINY_K2), (files / "book.txt").read_text(encoding="utf-8"))
    windows = 1 + -(-(len(tokens) - 1024) // 512)
    assert set(counts) == {"12 rows", f"{windows} windows", "20 texts"}
    assert windows != by_task(result)["book.txt", "bits per byte"]["items"]
    assert [model["name"] for model in result["models"]] == ["base", str(run)]
    tasks = by_task(result)
    contains, bits = tasks["rows.jsonl:contains", "contains"], tasks["book.txt", "bits per byte"]
    assert contains["scores"][0]["value"] > 0.8 and contains["items"] == 12
    (change,) = bits["changes"]
    # the run was trained on such sentences: every piece is likelier
    assert change["verdict"] == "better" and change["low"] < change["high"] < 0
    assert change["value"] == pytest.approx(bits["scores"][1]["value"] - bits["scores"][0]["value"])
    grid = tasks["needle", "right"]["grid"]["64 tokens"]
    assert next(iter(grid)) == "depth 0%" and set(grid["depth 0%"]) == {"base", str(run)}
    page = (run / "evaluations.html").read_text(encoding="utf-8")
    assert result["page"] == str(run / "evaluations.html") and "contains" in page and "better" in page
    # the same again asks no model for anything, and says the same
    monkeypatch.setattr(Engine, "stream", None)
    monkeypatch.setattr("unfreeze.evaluate.forced.scored_answers", None)
    assert unfreeze_json(*command)["tasks"] == result["tasks"]
    # one more task: the others stay in the record, and the report shows all
    monkeypatch.undo()
    unfreeze_json("eval", run, "--tasks", "recall", "--lengths", 64, "--limit", 4, *SHORT)
    summary = " ".join(" ".join(unfreeze_json("report", run)["summary"]).split())  # lines are folded
    assert "Scores" in summary and "bits per byte" in summary and "recall" in summary
    report = (run / "report.html").read_text(encoding="utf-8")
    assert "Scores, before and after" in report and "95 %" in report
    (run / "evaluations.json").unlink()  # control arm: without the record, no section
    unfreeze_json("report", run)
    assert "Scores, before and after" not in (run / "report.html").read_text(encoding="utf-8")


def test_a_metric_that_raises_is_named_and_the_other_tasks_go_on(run, files, capsys):
    names = f"rows:{files / 'rows.jsonl'}:{files / 'my.py'},rows:{files / 'rows.jsonl'}:exact"
    assert cli.main(["eval", str(run), "--tasks", names, "--limit", "4", *SHORT]) == 2
    output = capsys.readouterr()
    words = " ".join(output.out.split())
    assert "no score: 4 of 4 answers have no score, more than 20% (error): row 1: ValueError: no" in words
    assert "rows.jsonl:exact, 4 items" in words and "too few items (4)" in words
    assert "the other tasks go on" in output.err
    record = json.loads((run / "evaluations.json").read_text())
    assert ["error" in task for task in record["tasks"]] == [True, False]


def test_ctrl_c_keeps_answers_and_the_same_command_continues(run, files, unfreeze_json, capsys, monkeypatch):
    command = ["eval", str(run), "--tasks", f"rows:{files / 'rows.jsonl'}:contains", *SHORT, "--batch", "2"]
    stream, asked = Engine.stream, []

    def stopping(self, prompts, sampling, **options):
        asked.append(len(prompts))
        ended = 0
        for step in stream(self, prompts, sampling, **options):
            yield step
            ended += sum(piece.stop_reason is not None for piece in step)
            if ended >= 5:
                raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "stream", stopping)
    assert cli.main(command) == 130
    kept = len((run / scoring.KEPT).read_text().splitlines())
    assert f"{kept} results more kept" in capsys.readouterr().err and 5 <= kept < 12
    assert not (run / "evaluations.json").exists()

    def counting(self, prompts, sampling, **options):
        asked.append(len(prompts))
        return stream(self, prompts, sampling, **options)

    monkeypatch.setattr(Engine, "stream", counting)
    result = unfreeze_json(*command)
    assert asked == [12, 12 - kept, 12]  # the base's rest, then the run
    assert result["tasks"][0]["changes"][0]["items"] == 12


def test_several_models_are_compared_with_each_other(run, files, tmp_path, unfreeze_json, monkeypatch):
    monkeypatch.chdir(tmp_path)
    other = shutil.copytree(run, run.parent / "other")
    weights = (other / "adapter" / "adapter_model.safetensors").read_bytes()
    (other / "adapter" / "adapter_model.safetensors").write_bytes(weights[:-400] + bytes(400))
    names = f"rows:{files / 'rows.jsonl'}:exact"
    result = unfreeze_json("eval", run, other, TINY_K2, "--tasks", names, "--limit", 2, *SHORT)
    assert [model["name"] for model in result["models"]] == [str(TINY_K2), str(run), str(other)]
    pairs = [(each["before"], each["after"]) for each in result["tasks"][0]["changes"]]
    assert pairs == [(str(TINY_K2), str(run)), (str(TINY_K2), str(other)), (str(run), str(other))]
    assert result["page"] == "evals/mine-other-tiny-k2/evaluations.html"
    own = json.loads((other / "evaluations.json").read_text())
    assert [model["name"] for model in own["models"]] == [str(TINY_K2), str(other)]
    assert [each["after"] for each in own["tasks"][0]["changes"]] == [str(other)]


def test_the_adapter_on_the_base_that_was_scored_is_the_run_loaded_alone(run, files):
    config = scoring.Config(models=(str(run),), tasks=("x",), dtype="float32", device="cpu")
    subjects = subjects_of([str(run)], "", "float32", lambda line: None)
    base, mine = subjects.models
    assert subjects.pairs == [("base", str(run))] and base.digest != mine.digest and mine.run == run
    assert base.shown == "tiny-k2, the model before" and mine.shown == str(run)  # in progress lines
    quiet = scoring.Common(quiet=True)
    before = scoring.opened(base, None, config, "float32", quiet)
    first = before.logits([[5, 6, 7]])[0]
    after = scoring.opened(mine, before, config, "float32", quiet)
    alone = unfreeze.load(run, dtype="float32").logits([[5, 6, 7]])[0]
    assert after.decoder is before.decoder
    assert after.logits([[5, 6, 7]])[0].equal(alone) and not first.equal(alone)


def test_a_run_of_every_weight_is_compared_with_its_model(run, tmp_path):
    """Its model/ is whole, its config says where it began; a new model has nothing before it."""
    shutil.rmtree(run / "adapter")
    shutil.copytree(TINY_K2, run / "model")
    still = subjects_of([str(run)], "", "float32", lambda line: None)
    assert still.pairs == [] and still.notes == [f"{run} has the weights that it began with"]
    os.utime(run / "model" / "model.safetensors", (1, 1))  # written by the run
    subjects = subjects_of([str(run)], "", "float32", lambda line: None)
    assert [model.source.base for model in subjects.models] == [str(TINY_K2), str(run / "model")]
    resolved = json.loads((run / "resolved_config.json").read_text())
    (tmp_path / "new").mkdir()
    resolved |= {"recipe": "pretrain", "model": str(tmp_path / "new")}
    (run / "resolved_config.json").write_text(json.dumps(resolved))
    alone = subjects_of([str(run)], "", "float32", lambda line: None)
    assert len(alone.models) == 1 and alone.pairs == []
    assert alone.notes == [f"{run} has nothing to compare with: it trained a new model"]


def test_digests_see_weights_adapters_and_dtypes(run):
    def digest(dtype="float32"):
        return subjects_of([str(run)], "", dtype, lambda line: None).models[-1].digest

    first = digest()
    assert digest() == first != digest("bfloat16")
    path = run / "adapter" / "adapter_model.safetensors"
    weights = bytearray(path.read_bytes())
    weights[-1] ^= 1
    path.write_bytes(weights)
    assert digest() != first
    with pytest.raises(CheckpointError, match="is given twice"):
        subjects_of([str(run), f"{run}/"], "", "float32", lambda line: None)


def test_rows_of_the_run_whose_adapter_went_on_count_too(run, tmp_path):
    """Named by its folder or by the adapter in it; a folder of peft's is no run."""
    first, own = json.loads((run / "resolved_config.json").read_text()), tmp_path / "second"
    own.mkdir()
    (tmp_path / "theirs").mkdir()
    assert len(trained_on(run)) == 1 and trained_on(None) == []
    for adapter, runs in ((run, 2), (run / "adapter", 2), (tmp_path / "theirs", 1), (own, 1)):
        fields = first | {"data.files": ["other.jsonl"], "adapter": str(adapter)}
        (own / "resolved_config.json").write_text(json.dumps(fields))
        named = [fields["data.files"] for fields in trained_on(own)]
        assert named == [["other.jsonl"], first["data.files"]][:runs]


def test_training_rows_among_the_test_are_counted(run, chat_rows, files, unfreeze_json, capsys):
    test = files / "leaked.jsonl"
    rows = [
        {"prompt": "What is the symbol of gold?", "answer": "Au"},
        {"prompt": "Who is Bo?", "answer": "Bo"},
    ]
    test.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = unfreeze_json("eval", run, "--tasks", f"rows:{test}", *SHORT)
    (note,) = result["notes"]
    assert "3 training rows hold 1 evaluation rows" in note and note.startswith(f"{run}: ")
    capsys.readouterr()
    assert cli.main(["eval", str(run), "--tasks", f"rows:{test}", *SHORT]) == 0
    said = capsys.readouterr()
    assert (said.out + said.err).count("training rows hold") == 1 and "warning: " in said.out
    test.write_text(json.dumps(rows[1]) + "\n")  # control arm
    assert unfreeze_json("eval", run, "--tasks", f"rows:{test}", *SHORT)["notes"] == []
    resolved = json.loads((run / "resolved_config.json").read_text())
    (run / "resolved_config.json").write_text(json.dumps(resolved | {"data.files": ["gone.jsonl"]}))
    (note,) = unfreeze_json("eval", run, "--tasks", f"rows:{test}", *SHORT)["notes"]
    assert "its training rows cannot be compared with the tasks" in note


def test_what_is_wrong_is_said_before_a_model_is_loaded(run, files, capsys, monkeypatch):
    monkeypatch.setattr(scoring, "opened", None)
    for flags, words in (
        (["--tasks", "needel"], "nearest: 'needle'"),
        (["--tasks", f"rows:{files / 'row.jsonl'}"], "nearest: 'rows.jsonl'"),
        (["--tasks", f"rows:{files / 'book.txt'}"], "a plain text has no prompt"),
        ([], "needs --tasks"),
        (["--tasks", "needle", "--lengths", "3"], "3 tokens are too few"),
    ):
        assert cli.main(["eval", str(run), *flags]) == 2
        assert words in capsys.readouterr().err
    assert cli.main(["eval", str(run) + "x", "--tasks", "needle"]) == 2
    assert "mine" in capsys.readouterr().err


def test_python(run, files, monkeypatch):
    (files / "lengths.py").write_text("def own(prompt, completion, answer):\n    return len(completion)\n")
    monkeypatch.syspath_prepend(files)
    own_metric = importlib.import_module("lengths").own
    rows = f"rows:{files / 'rows.jsonl'}"
    result = unfreeze.evaluate(
        unfreeze.FinishedRun(run),
        tasks=[f"{rows}:exact", (rows, own_metric)],
        limit=3,
        max_new_tokens=4,
        dtype="float32",
        quiet=True,
    )
    assert isinstance(result, unfreeze.Evaluation) and "2 items" not in repr(result)
    assert [len(task["scores"]) for task in result["tasks"]] == [2, 2]
    assert result["tasks"][1]["scores"][0]["value"] > 1 and "iframe" in result._repr_html_()
    with pytest.raises(ConfigError, match="no argument 'limits'"):
        unfreeze.evaluate(run, tasks="needle", limits=3)
