"""Going on with a changed configuration: refused by field, unless it is allowed and can be (docs/why/trust.md
R2)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import unfreeze
from unfreeze import cli
from unfreeze.checkpoint import open_checkpoint
from unfreeze.checkpoint.same import weights_digest
from unfreeze.commands.demo import TINY_K2
from unfreeze.config import grpo
from unfreeze.config.names import fields, of_today
from unfreeze.core.errors import ConfigError
from unfreeze.job.end.folder import refuse_other_recipe
from unfreeze.job.end.resume import DERIVED, FIXED, allowed
from unfreeze.kernels.precision import precision
from unfreeze.recipes.sft import Config
from unfreeze.report import verdict
from unfreeze.report.run import read_run
from unfreeze.train.run import Run, config_hash

pytestmark = pytest.mark.usefixtures("fewer_layers")

RECORD = Config(model="m", data=("d.jsonl",)).record()


def may_change(*names: str) -> list[str]:
    return allowed(Config(model="m", data=("d.jsonl",), allow_changed=names))


def test_fixed_and_derived_fields_exist():
    rewarded = grpo.Config(model="m", data="d", reward="my.py").record()
    packed = Config(model="m", data="d", quantize="int4", quantize_modules=("experts",)).record()
    other = Config(model="m", data="d", lora={"dora": True, "start": "pissa"}).record()
    assert set(FIXED) <= set(RECORD) | set(rewarded) | set(packed) | set(other)
    assert set(DERIVED) <= set(fields(Config))


def test_what_follows_from_a_field_is_allowed_with_it():
    assert may_change("learning_rate", "lora.alpha", "clip") == [
        "optimizer.learning_rate",
        "lora.alpha",
        "optimizer.clip",
        "schedule.peak",
    ]
    assert set(may_change("steps")) == {
        "training.steps",
        "schedule.steps",
        "schedule.warmup_steps",
        "schedule.decay_steps",
    }


@pytest.mark.parametrize(
    ("field", "words"),
    [
        (
            "lora.rank",
            (
                "allow_changed names lora.rank, which can never change within a run: it decides the shape of the"
                " trained tensors"
            ),
        ),
        ("seed", "seed, which can never change within a run: the saved position in the data would be wrong"),
        ("validation_fraction", "can never change within a run: rows that it trained on would be held out"),
        (
            "learning-rat",
            (
                "allow_changed names 'learning-rat', which is not a field of a run's configuration; nearest:"
                " 'learning_rate'"
            ),
        ),
    ],
)
def test_what_cannot_be_allowed_is_refused(field: str, words: str):
    with pytest.raises(ConfigError, match=words):
        may_change(field)


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory, chat_rows: Path) -> list[str]:
    """A run stopped after step 2 of 4; -> its command."""
    out = tmp_path_factory.mktemp("resume") / "run"
    command = [
        "sft",
        "--quiet",
        "--model",
        str(TINY_K2),
        "--data",
        str(chat_rows),
        "--out",
        str(out),
        "--tokens-per-step",
        "128",
        "--steps",
        "4",
        "--lora.rank",
        "1",
        "--watch.samples",
        "0",
        "--save-every",
        "1",
        "--save.keep",
        "9",
        "--threads",
        "1",
    ]
    assert cli.main(command) == 0
    shutil.copy(out / "events.jsonl", out.with_name("straight.jsonl"))
    for path in (out / "state" / "step-000003", out / "state" / "step-000004", out / "adapter"):
        shutil.rmtree(path)
    return command


def again(interrupted: list[str], tmp_path: Path, *more: str) -> tuple[int, Path]:
    """The run once more, in a copy of its folder."""
    at = interrupted.index("--out") + 1
    out = tmp_path / "run"
    shutil.copytree(interrupted[at], out)
    return cli.main([*interrupted[:at], str(out), *interrupted[at + 1 :], *more]), out


def straight(interrupted: list[str]) -> list[float]:
    return losses(Path(interrupted[interrupted.index("--out") + 1]).parent, "straight.jsonl")


def losses(run: Path, file: str = "events.jsonl") -> list[float]:
    events = [json.loads(line) for line in (run / file).read_text().splitlines()]
    return [event["loss"] for event in events if event["kind"] == "train"]


def test_a_changed_field_is_refused_with_the_flag_that_would_allow_it(
    interrupted: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    code, run = again(interrupted, tmp_path, "--learning-rate", "0.001")
    said = capsys.readouterr().err
    assert code == 2 and said.splitlines() == [
        (
            f"ConfigError: {run} was trained to step 2 with another configuration; 1 field differs (saved ->"
            " now): optimizer.learning_rate: 0.0002 -> 0.001"
        ),
        (
            f"  next: --out {run}-2 for a new run, or the saved values to resume, or"
            " --save.allow-changed optimizer.learning_rate to go on here"
        ),
    ]


def test_a_flag_that_is_given_once_is_named_with_the_fields_that_it_has(
    interrupted: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    changed = ["--learning-rate", "0.001", "--steps", "6"]
    code, run = again(interrupted, tmp_path, *changed, "--save.allow-changed", "steps")
    said = capsys.readouterr().err
    assert code == 2 and said.rstrip().endswith(
        "or --save.allow-changed training.steps optimizer.learning_rate to go on here"
    )
    at = interrupted.index("--out") + 1
    flags = ["--save.allow-changed", "training.steps", "optimizer.learning_rate"]  # as it says
    assert cli.main([*interrupted[:at], str(run), *interrupted[at + 1 :], *changed, *flags]) == 0


def test_an_allowed_change_goes_on_and_is_a_warning(interrupted: list[str], tmp_path: Path, read_events):
    code, run = again(
        interrupted,
        tmp_path,
        "--learning-rate",
        "0.001",
        "--steps",
        "6",
        "--save.allow-changed",
        "learning_rate",
        "training.steps",
    )
    assert code == 0
    (warning,) = [event for event in read_events(run, "warning") if "as allowed" in event["message"]]
    assert warning["message"] == (
        "resumed with another configuration, as allowed: optimizer.learning_rate: 0.0002 -> 0.001;"
        " training.steps: 4 -> 6"
    )
    train = read_events(run, "train")
    assert [event["step"] for event in train] == [1, 2, 3, 4, 5, 6] and train[2][
        "learning_rate"
    ] == pytest.approx(0.00075)  # cosine, 2/6
    assert losses(run)[:2] == straight(interrupted)[:2]


def test_a_finished_run_can_be_made_longer(interrupted: list[str], tmp_path: Path, read_events):
    _, run = again(interrupted, tmp_path)
    at = interrupted.index("--out") + 1
    assert (
        cli.main(
            [
                *interrupted[:at],
                str(run),
                *interrupted[at + 1 :],
                "--steps",
                "5",
                "--save.allow-changed",
                "steps",
            ]
        )
        == 0
    )
    assert [event["step"] for event in read_events(run, "train")] == [1, 2, 3, 4, 5]


def test_what_is_no_target_is_said_before_what_the_folder_was_trained_with(
    interrupted: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    code, _ = again(interrupted, tmp_path, "--lora.targets", "attentoin")
    said = capsys.readouterr().err
    assert code == 2 and "attentoin" in said and "nearest" in said and "another configuration" not in said
    # one that is there is another configuration
    code = cli.main([*interrupted, "--lora.targets", "attention"])
    assert code == 2 and "another configuration" in capsys.readouterr().err


def test_steps_and_epochs_together_say_which_decides(tmp_path: Path, chat_rows: Path, read_events):
    command = [
        "sft",
        "--quiet",
        "--model",
        str(TINY_K2),
        "--data",
        str(chat_rows),
        "--out",
        str(tmp_path / "run"),
    ]
    command += ["--tokens-per-step", "128", "--watch.samples", "0", "--lora.rank", "1", "--threads", "1"]
    assert cli.main([*command, "--steps", "1", "--epochs", "2"]) == 0
    said = [event["message"] for event in read_events(tmp_path / "run", "warning")]
    assert "steps 1 and epochs 2 are both given; steps is used" in said


def test_epochs_are_those_of_the_data_trained_on_in_every_session(
    tmp_path: Path, chat_rows: Path, read_events, capsys: pytest.CaptureFixture[str]
):
    """A finished run of 2 epochs made longer to 5, with rows held out: it ends with epoch 5.0, as it was asked."""
    command = ["sft", "--model", str(TINY_K2), "--data", str(chat_rows), "--out", str(tmp_path / "run")]
    command += ["--tokens-per-step", "128", "--watch.samples", "0", "--lora.rank", "1", "--threads", "1"]
    command += ["--validation-fraction", "0.3", "--device", "cpu"]
    assert cli.main([*command, "--epochs", "2"]) == 0
    assert cli.main([*command, "--epochs", "5", "--save.allow-changed", "epochs"]) == 0
    train = read_events(tmp_path / "run", "train")
    of_one = len(train) / 5
    assert [event["epoch"] for event in train] == pytest.approx([(i + 1) / of_one for i in range(len(train))])
    said = capsys.readouterr().err
    assert "epoch 2.0  loss" in said and "epoch 5.0  loss" in said


def test_of_a_finished_run_a_new_folder_is_the_next_command_and_it_works(
    tmp_path: Path, chat_rows: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """The default folder, tried again with other flags. To allow them would change nothing but the record."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(chat_rows, "chat.jsonl")
    command = ["sft", "--quiet", "--model", str(TINY_K2), "--data", "chat.jsonl", "--device", "cpu"]
    command += ["--tokens-per-step", "128", "--watch.samples", "0", "--lora.rank", "1", "--threads", "1"]
    assert cli.main([*command, "--steps", "2"]) == 0
    capsys.readouterr()
    for flags in (["--steps", "2", "--learning-rate", "0.001"], ["--steps", "1"]):
        assert cli.main([*command, *flags]) == 2
        said = capsys.readouterr().err.splitlines()[-1]
        assert said == "  next: --out runs/tiny-k2-chat-2 for a new run"
    assert cli.main([*command, *flags, *said.split()[1:3]]) == 0
    # control arm: more steps can go on in the folder, and the next free name is another
    assert cli.main([*command, "--steps", "3"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    allowed = "--save.allow-changed training.steps"
    assert said == f"  next: --out runs/tiny-k2-chat-3 for a new run, or {allowed} to go on here"
    assert cli.main([*command, "--steps", "3", *allowed.split()]) == 0


def test_a_fixed_field_is_refused_with_its_reason(
    interrupted: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    code, _ = again(interrupted, tmp_path, "--lora.rank", "2")
    said = capsys.readouterr().err
    assert (
        code == 2
        and "lora.rank: 1 -> 2; lora.rank can never change within a run: it decides the shape of the trained tensors"
        in said
    )
    assert "--save.allow-changed" not in said


def test_another_recipe_in_a_runs_folder_is_refused(interrupted: list[str], tmp_path: Path):
    """What is minimised would change, and no field says so."""
    run = tmp_path / "other"
    run.mkdir()
    (run / "resolved_config.json").write_text('{"recipe": "sft"}', encoding="utf-8")
    refuse_other_recipe(run, "sft")
    model = tmp_path / "model"
    model.mkdir()
    refuse_other_recipe(model, "sft")  # control arm: a new folder
    (model / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="holds a model, and a run needs a folder of its own"):
        refuse_other_recipe(model, "sft")
    refuse_other_recipe(tmp_path / "none", "distill")
    with pytest.raises(ConfigError, match="is a run of unfreeze sft, and this is unfreeze distill"):
        refuse_other_recipe(run, "distill")


def test_control_arm_without_the_refusal_the_run_goes_on_with_other_numbers(
    interrupted: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Run, "refuse_changes", lambda *arguments: None)
    code, run = again(interrupted, tmp_path, "--optimizer.weight-decay", "9", "--learning-rate", "0.01")
    assert code == 0 and len(losses(run)) == 4
    assert losses(run) != straight(interrupted)


def test_the_unchanged_command_gives_the_same_losses(interrupted: list[str], tmp_path: Path):
    code, run = again(interrupted, tmp_path)
    assert code == 0 and losses(run) == straight(interrupted) and len(losses(run)) == 4


def test_a_run_of_the_code_before_there_were_tables_goes_on(interrupted: list[str], tmp_path: Path):
    """resolved_config.json and state.json as that code wrote them for the same command (old_run.json)."""
    at = interrupted.index("--out") + 1
    text = Path(__file__).with_name("old_run.json").read_text(encoding="utf-8")
    data = Path(interrupted[interrupted.index("--data") + 1]).resolve()
    for word, value in (("MODEL", TINY_K2), ("DATA", data), ("OUT", tmp_path / "run")):
        text = text.replace(f'"{word}"', json.dumps(str(value)))
    text = text.replace('"bfloat16"', json.dumps(precision("auto", "cpu").name))  # by the CPU it ran on
    old = json.loads(text)
    out = tmp_path / "run"
    shutil.copytree(interrupted[at], out)
    resolved, state = out / "resolved_config.json", out / "state" / "step-000002" / "state.json"
    new, config = json.loads(state.read_text()), old["state.json"]["config"]
    # its default of then; one that goes on keeps it (job/test_recompute.py)
    assert new["config"]["place.recompute"] == "auto" and config["recompute"] == "selective"
    assert {**new["config"], "place.recompute": "selective"} == of_today(Config, config), (
        "earlier runs could not be resumed: say about(since=…) at a new field of the config"
    )
    state.write_text(json.dumps({**new, "config": config, "config_hash": config_hash(config)}))
    resolved.write_text(json.dumps(old["resolved_config.json"]))

    # what reads a run's folder, and the run itself
    config = read_run(out).config
    names = ("optimizer.learning_rate", "training.tokens_per_step", "lora.rank")
    assert [config[name] for name in names] == [0.0002, 128, 1]
    assert verdict.rerun_command(read_run(out)).count("--tokens-per-step 128") == 1
    changed = [*interrupted[:at], str(out), *interrupted[at + 1 :], "--optimizer.clip", "2"]
    assert cli.main(changed) == 2
    assert cli.main([*interrupted[:at], str(out), *interrupted[at + 1 :]]) == 0
    assert losses(out) == straight(interrupted)
    after = json.loads(resolved.read_text())
    fields = {key: value for key, value in old["resolved_config.json"].items() if key != "effective"}
    assert {key: after[key] for key in of_today(Config, fields)} == of_today(Config, fields)
    assert cli.main(["compare", str(out), interrupted[at]]) == 0 and cli.main(["report", str(out)]) == 0
    assert unfreeze.load(out, dtype="float32").logits([[1, 2, 3]])[0].shape[0] == 3


def test_a_run_that_this_version_cannot_go_on_with_is_refused_by_name_and_version(
    interrupted: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    at = interrupted.index("--out") + 1
    out = tmp_path / "run"
    shutil.copytree(interrupted[at], out)
    state = out / "state" / "step-000002" / "state.json"
    record = json.loads(state.read_text())
    config = {**record["config"], "optimizer.momentum": 0.9}
    state.write_text(json.dumps({**record, "config": config, "config_hash": config_hash(config)}))
    assert cli.main([*interrupted[:at], str(out), *interrupted[at + 1 :]]) == 2
    said = capsys.readouterr().err.splitlines()
    version = unfreeze.__version__
    assert said == [
        f"ConfigError: {out} cannot be resumed by unfreeze {version}: unfreeze {version} started it with"
        " optimizer.momentum, which this version does not have",
        f"  next: give another folder with --out, or use unfreeze {version}",
    ]
    (out / "resolved_config.json").unlink()  # which says the version
    assert cli.main([*interrupted[:at], str(out), *interrupted[at + 1 :]]) == 2
    assert "another version started it with" in capsys.readouterr().err


def test_another_base_under_the_same_path_is_refused_and_one_in_other_files_is_not(
    interrupted: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    model, run = tmp_path / "model", tmp_path / "run"
    shutil.copytree(TINY_K2, model)
    words = dict(zip(interrupted[2::2], interrupted[3::2], strict=True))
    words |= {"--model": str(model), "--out": str(run), "--steps": "1"}
    command = ["sft", "--quiet", *(word for pair in words.items() for word in pair)]
    assert cli.main(command) == 0
    longer = [*command, "--steps", "2", "--save.allow-changed", "steps"]
    own = open_checkpoint(model)
    digest = weights_digest(own)
    (name, info), *_ = ((n, i) for n, i in own.tensors.items() if n.endswith("1.self_attn.o_proj.weight"))
    with info.file.open("r+b") as file:
        file.seek(at := info.offset + info.nbytes // 2)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))
    assert weights_digest(open_checkpoint(model)) != digest, name
    assert cli.main(longer) == 2
    assert "has other weights than when this run started" in capsys.readouterr().err

    # the same weights in other files are the same; and an earlier version's save says nothing of them
    (record,) = run.glob("state/*/state.json")
    saved = json.loads(record.read_text())
    assert saved.pop("base") == digest
    with info.file.open("r+b") as file:
        file.seek(at)
        file.write(byte)
    resharded = tmp_path / "resharded"
    shutil.copytree(model, resharded, ignore=shutil.ignore_patterns("*.safetensors*"))
    weights = {key: value for file in model.glob("*.safetensors") for key, value in load_file(file).items()}
    save_file(dict(reversed(weights.items())), resharded / "model.safetensors")
    assert weights_digest(open_checkpoint(resharded)) == digest
    record.write_text(json.dumps(saved))
    assert cli.main(longer) == 0


def test_other_rows_are_refused_before_a_weight_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Control arm: with the rows as they were the same call loads and goes on."""
    rows = (unfreeze.TINY_K2 / "yoda_train.jsonl").read_text(encoding="utf-8").splitlines()[:30]
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(rows) + "\n", encoding="utf-8")

    def run(steps: int) -> None:
        fields = {"data": str(data), "out": str(tmp_path / "run"), "tokens_per_step": 256, "dtype": "float32"}
        more = {"save.allow_changed": ["steps"], "watch.samples": 0, "threads": 1, "quiet": True}
        unfreeze.sft(model=str(TINY_K2), steps=steps, **fields, **more)

    def loads() -> int:
        events = (tmp_path / "run" / "events.jsonl").read_text(encoding="utf-8").splitlines()
        return sum(json.loads(line)["kind"] == "load" for line in events)

    run(1)
    data.write_text("\n".join(rows[:-1]) + "\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="cannot resume: the data changed"):
        run(2)
    assert loads() == 1
    data.write_text("\n".join(rows) + "\n", encoding="utf-8")
    run(2)
    assert loads() == 2
