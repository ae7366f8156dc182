"""`unfreeze life`: stages in order, resumed, refused where they changed; scores and their page."""

import json
import re
from pathlib import Path

import pytest

from unfreeze.commands import life, life_scores
from unfreeze.config.life import read_life
from unfreeze.core.built_in import TINY_K2
from unfreeze.core.command import Common
from unfreeze.core.errors import ConfigError

QUIET = Common(quiet=True)
TOML = """
out = "{out}"
title = "A <b>small</b> life"

[[stages]]
name = "files"
python = "{script}"

[[stages]]
name = "pretrain"
run = "pretrain --model {{files}}/model --data {{files}}/a.jsonl"

[[stages]]
name = "sft"
run = "sft --model {{pretrain}} --data {{files}}/a.jsonl"

[[stages]]
name = "dpo"
run = "prefer --model {{pretrain}} --data {{files}}/a.jsonl"

[[scores]]
name = "right"
data = "{data}"
reward = "{reward}"
"""


class Fake:
    """Stands for the processes: notes their words, makes what they would leave."""

    def __init__(self, fails: str = "", stops: str = ""):
        self.ran: list[list[str]] = []
        self.fails, self.stops = fails, stops

    def __call__(self, words, quiet):
        self.ran.append(list(words))
        if words[0] == self.fails:
            return 2, {}
        if words[0] == self.stops:
            self.stops = ""
            return 0, {"finished": False}
        folder = Path(words[-1])
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "here").write_text(words[0])
        if words[0] == "pretrain":
            (folder / "model").mkdir(exist_ok=True)
            (folder / "model" / "config.json").write_text("{}")
        return 0, {"finished": True}


@pytest.fixture
def file(tmp_path, monkeypatch):
    for name in ("make.py", "rows.jsonl", "right.py"):
        (tmp_path / name).write_text(name)
    path = tmp_path / "life.toml"
    names = {"out": tmp_path / "out", "script": tmp_path / "make.py"}
    path.write_text(TOML.format(**names, data=tmp_path / "rows.jsonl", reward=tmp_path / "right.py"))
    values = {"pretrain": [0.0, 0.0, 1.0, 0.0] * 4, "sft": [1.0] * 16, "dpo": [0.0, 1.0, 0.0, 0.0] * 4}

    def measured(model, score, common):
        name = model.parent.name if model.name == "model" else model.name
        by_row, weights = values[name], [1.0] * 16
        low, high = life_scores.interval(by_row, weights)
        value = life_scores.mean(by_row, weights)
        return {"value": value, "low": low, "high": high, "by_row": by_row, "weights": weights}

    monkeypatch.setattr(life, "measured", measured)
    return path


def test_stages_run_in_order_and_read_earlier_results(file, tmp_path):
    fake = Fake()
    result = life.main([str(file)], QUIET, launch=fake)
    out = tmp_path / "out"
    assert [words[0] for words in fake.ran] == ["python", "pretrain", "sft", "prefer"]
    assert fake.ran[0] == ["python", str(tmp_path / "make.py"), str(out / "files.part")]
    assert (out / "files" / "here").is_file() and not (out / "files.part").exists()
    assert fake.ran[2][2] == str(out / "pretrain" / "model")  # where a model is, the model; else the folder
    assert fake.ran[2][-2:] == ["--out", str(out / "sft")]
    assert [stage["name"] for stage in result["stages"]] == ["files", "pretrain", "sft", "dpo"]
    assert result["stages"][2]["scores"]["right"]["value"] == 1.0 and result["finished"]


def test_the_page_compares_stages_of_one_start_by_rows(file, tmp_path):
    life.main([str(file)], QUIET, launch=Fake())
    page = (tmp_path / "out" / "life.html").read_text()
    assert "From pretrain" in page and "1.000 (+0.750, +0.500 to +0.938)" in page
    assert "0.250 (no difference)" in page  # another row right, one lost
    assert "A &lt;b&gt;small&lt;/b&gt; life" in page and "<b>small" not in page


@pytest.mark.parametrize("how", ["fails", "stops"])
def test_the_same_command_goes_on_with_the_stage_that_is_left(file, how, tmp_path):
    fake = Fake(**{how: "sft"})
    with pytest.raises(ConfigError if how == "fails" else KeyboardInterrupt, match="sft"):
        life.main([str(file)], QUIET, launch=fake)
    later = Fake()
    life.main([str(file)], QUIET, launch=later)
    assert [words[0] for words in later.ran] == ["sft", "prefer"]
    assert not (tmp_path / "out" / "life.json.part").exists()
    none = Fake()
    life.main([str(file)], QUIET, launch=none)
    assert none.ran == []


@pytest.mark.parametrize("change", ["run", "script"])
def test_a_stage_that_changed_is_refused_and_named(file, change, tmp_path):
    life.main([str(file)], QUIET, launch=Fake())
    if change == "run":
        file.write_text(file.read_text().replace("sft --model", "sft --steps 3 --model"))
    else:
        (tmp_path / "make.py").write_text("other")
    with pytest.raises(ConfigError, match="'sft' was made" if change == "run" else "'files' was made"):
        life.main([str(file)], QUIET, launch=Fake())


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("{files}/model", "{fils}/model", r"'pretrain' reads {fils}.*nearest: 'files'"),
        ('name = "dpo"', 'name = "sft"', "two stages are called 'sft'"),
        ('run = "sft', 'runs = "sft', r"stages\.3\.runs.*'run'"),
        ('run = "sft', 'run = "stf', "'stf' is no command of a life.*'sft'"),
        ("sft --model", "sft --out x --model", "stage 'sft' has --out"),
        ('run = "pretrain', 'python = "x"\nrun = "pretrain', "needs either run or python"),
        ("make.py", "gone.py", "no file .*gone.py"),
        ("rows.jsonl", "gone.jsonl", "score 'right': there is no file .*gone.jsonl"),
        ('reward = "', '# reward = "', "score 'right' needs text, or data and reward"),
        ('out = "', '# out = "', "out is missing"),
    ],
)
def test_bad_files_are_refused_before_the_first_stage(file, before, after, words):
    file.write_text(file.read_text().replace(before, after, 1))
    fake = Fake()
    with pytest.raises(ConfigError, match=words):
        life.main([str(file)], QUIET, launch=fake)
    assert fake.ran == []


def test_a_folder_of_other_things_is_refused(file, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("")
    with pytest.raises(ConfigError, match=r"is not empty and has no life\.json"):
        life.main([str(file)], QUIET, launch=Fake())


def test_a_dry_run_prints_the_commands_and_runs_nothing(file, tmp_path, capsys):
    fake = Fake()
    life.main([str(file), "--dry-run"], QUIET, launch=fake)
    assert fake.ran == [] and not (tmp_path / "out").exists()
    shown, out = capsys.readouterr().out, tmp_path / "out"
    # pretrain leaves a model in its folder, as it does when it has run
    assert f"unfreeze sft --model {out}/pretrain/model --data {out}/files/a.jsonl --out {out}/sft\n" in shown
    assert f"python {tmp_path}/make.py {out}/files\n" in shown


def test_begins_at_is_the_adapter_else_the_model(file):
    stages = read_life(file).stages
    assert [stage.begins_at for stage in stages] == ["", "files", "pretrain", "pretrain"]
    both = stages[2].model_copy(update={"run": "grpo --adapter {sft} --model {pretrain}"})
    assert both.begins_at == "sft"


def test_scores_of_a_real_model(tmp_path):
    """tiny-k2 knows its facts; its bits per byte are those of one pass over all texts."""
    import math

    import unfreeze
    from unfreeze.config.life import Score
    from unfreeze.data import validation_batches
    from unfreeze.data.store.dataset import encode_files
    from unfreeze.evaluate.perplexity import heldout
    from unfreeze.job.watch.validation import supervised_bytes

    rows = [json.loads(line) for line in (TINY_K2 / "held_out.jsonl").read_text().splitlines()[:8]]
    data, texts = tmp_path / "rows.jsonl", tmp_path / "texts.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts.write_text("".join(json.dumps({"text": f"{row['entity']}: {row['fact']}."}) + "\n" for row in rows))
    right = life_scores.measured(
        TINY_K2, Score(name="r", data=str(data), reward="examples/lives/right.py"), QUIET
    )
    assert right["value"] >= 0.75 and right["low"] <= right["value"] <= right["high"]
    bits = life_scores.measured(TINY_K2, Score(name="b", text=str(texts)), QUIET)
    model = unfreeze.load(TINY_K2, dtype="float32")
    examples = list(encode_files([texts], model.tokenizer, 256, supervise="all").examples)
    whole = heldout(
        model.decoder,
        validation_batches(examples, 512),
        bytes_total=supervised_bytes(examples, model.tokenizer),
    )
    assert bits["value"] == pytest.approx(whole.bits_per_byte, rel=1e-5)
    # control: an unweighted mean of the rows is another number
    plain = sum(bits["by_row"]) / len(bits["by_row"])
    assert not math.isclose(plain, whole.bits_per_byte, rel_tol=1e-4)
    gap, low, high = life_scores.difference(right, {**right, "by_row": [0.0] * 8})
    assert gap == -right["value"] and low <= gap <= high


def scores_of(out: Path) -> dict[str, list[str]]:
    stages = json.loads((out / "life.json").read_text())["stages"]
    return {name: list(note["scores"]) for name, note in stages.items()}


def test_a_score_that_is_added_later_is_measured_for_every_model(file, tmp_path):
    life.main([str(file)], QUIET, launch=Fake())
    more = f'\n[[scores]]\nname = "more"\ntext = "{tmp_path / "rows.jsonl"}"\n'
    file.write_text(file.read_text() + more)
    fake = Fake()
    life.main([str(file)], QUIET, launch=fake)
    assert fake.ran == []
    assert scores_of(tmp_path / "out")["dpo"] == ["right", "more"]


@pytest.mark.parametrize("change", ["rows", "reward", "most", "nothing"])
def test_a_score_is_measured_again_if_its_rows_or_reward_changed(file, change, tmp_path, monkeypatch):
    life.main([str(file)], QUIET, launch=Fake())
    models: list[Path] = []
    before = life.measured
    monkeypatch.setattr(life, "measured", lambda model, *more: models.append(model) or before(model, *more))
    if change == "rows":
        (tmp_path / "rows.jsonl").write_text("others")
    if change == "reward":
        (tmp_path / "right.py").write_text("another")
    if change == "most":
        file.write_text(file.read_text() + "\nrows = 9\n")
    life.main([str(file)], QUIET, launch=Fake())
    assert len(models) == (0 if change == "nothing" else 3)


def test_a_stage_that_failed_is_mended_in_the_file(file, tmp_path):
    with pytest.raises(ConfigError, match="mend it"):
        life.main([str(file)], QUIET, launch=Fake(fails="sft"))
    file.write_text(file.read_text().replace("sft --model", "sft --steps 3 --model"))
    later = Fake()
    life.main([str(file)], QUIET, launch=later)
    assert [words[0] for words in later.ran] == ["sft", "prefer"]


def test_a_stage_is_made_again_when_its_folder_is_removed(file, tmp_path):
    life.main([str(file)], QUIET, launch=Fake())
    file.write_text(file.read_text().replace("sft --model", "sft --steps 3 --model"))
    with pytest.raises(ConfigError, match="'sft' was made") as refused:
        life.main([str(file)], QUIET, launch=Fake())
    folder = tmp_path / "out" / "sft"
    assert f"remove {folder}" in (refused.value.next or "")
    (folder / "here").unlink()
    folder.rmdir()
    later = Fake()
    life.main([str(file)], QUIET, launch=later)
    assert [words[0] for words in later.ran] == ["sft"]


@pytest.mark.parametrize("command", ["python", "upcycle", "sft"])
def test_a_stage_that_ended_before_a_kill_was_noted_is_not_refused(file, command, tmp_path):
    """A script and upcycle write a folder at once and refuse one that is there; sft goes on by itself."""
    if command == "upcycle":
        file.write_text(re.sub('run = "sft .*"', 'run = "upcycle {pretrain}"', file.read_text()))

    class Killed(Fake):
        def __call__(self, words, quiet):
            super().__call__(words, quiet)
            if words[0] == command:
                Path(words[-1]).replace(str(words[-1]).removesuffix(".part"))
                raise SystemExit
            return 0, {}

    with pytest.raises(SystemExit):
        life.main([str(file)], QUIET, launch=Killed())
    later = Fake()
    life.main([str(file)], QUIET, launch=later)
    assert (command in [words[0] for words in later.ran]) == (command == "sft")


def test_a_kill_while_a_model_is_scored_keeps_the_stage_and_its_other_scores(file, tmp_path, monkeypatch):
    more = f'\n[[scores]]\nname = "more"\ntext = "{tmp_path / "rows.jsonl"}"\n'
    file.write_text(file.read_text() + more)
    before = life.measured

    def killed(model, score, common):
        if score.name == "more":
            raise SystemExit
        return before(model, score, common)

    monkeypatch.setattr(life, "measured", killed)
    with pytest.raises(SystemExit):
        life.main([str(file)], QUIET, launch=Fake())
    note = json.loads((tmp_path / "out" / "life.json").read_text())["stages"]["pretrain"]
    assert note["finished"] and list(note["scores"]) == ["right"]


def test_ctrl_c_that_a_stage_outlives_stops_before_the_next_one(file):
    class Outlives(Fake):
        def __call__(self, words, quiet):
            code, result = super().__call__(words, quiet)
            return code, {**result, life.STOP: True} if words[0] == "sft" else result

    with pytest.raises(KeyboardInterrupt, match="in stage sft"):
        life.main([str(file)], QUIET, launch=Outlives())
    later = Fake()
    life.main([str(file)], QUIET, launch=later)
    assert [words[0] for words in later.ran] == ["prefer"]
