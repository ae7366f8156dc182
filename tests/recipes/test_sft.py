"""The main job from end to end on the model the package carries: a run folder, its receipt, resume, export,
and what is refused."""

import json
import os
import shlex
from pathlib import Path

import pytest
import torch

import unfreeze
from unfreeze import cli
from unfreeze.commands.demo import TINY_K2
from unfreeze.generate.engine import Engine
from unfreeze.models.blocks.rope import Rope

pytestmark = pytest.mark.usefixtures("fewer_layers")

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"


@pytest.fixture
def data(chat_rows) -> Path:
    return chat_rows


def sft(capsys, *arguments) -> dict:
    """Run `unfreeze sft … --json` in this process and give its result."""
    code = cli.main(["sft", "--json", "--quiet", *map(str, arguments)])
    out = capsys.readouterr()
    assert code == 0, out.err
    return json.loads(out.out.splitlines()[-1])


def command(data: Path, out: Path, *more) -> list[str]:
    return [
        "--model",
        str(TINY_K2),
        "--data",
        str(data),
        "--out",
        str(out),
        "--tokens-per-step",
        "256",
        "--learning-rate",
        "2e-3",
        *map(str, more),
    ]


def events(run: Path, kind: str) -> list[dict]:
    found = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [event for event in found if event["kind"] == kind]


def losses(run: Path) -> list[float]:
    return [event["loss"] for event in events(run, "train")]


def test_every_linear_layer_learns_and_the_receipt_says_so(capsys, data, tmp_path):
    run = tmp_path / "run"
    result = sft(capsys, *command(data, run, "--steps", 12, "--lora.rank", 4, "--lora.experts-rank", 2))
    assert result["run"] == str(run) and result["steps"] == 12 and result["loss_last"] < result["loss_first"]
    for group in ("attention", "experts", "shared_experts", "mlp"):
        entry = result["receipt"][group]
        assert (
            entry["trained"] > 0
            and entry["grad_norm"] > 0
            and entry["moved"] > 0
            and entry["output_change"] > 0
        )
    assert result["receipt"]["router"]["trained"] == 0
    assert result["receipt"]["experts"]["experts_reached"] == result["receipt"]["experts"]["experts"]
    for name in (
        "resolved_config.json",
        "plan.json",
        "receipt.json",
        "events.jsonl",
        "report.html",
        "adapter/adapter_config.json",
    ):
        assert (run / name).stat().st_size > 0
    train = next(
        json.loads(line) for line in (run / "events.jsonl").read_text().splitlines() if '"train"' in line
    )
    assert {
        "kind",
        "step",
        "loss",
        "tokens",
        "seconds",
        "learning_rate",
        "grad_norm",
        "peak_bytes",
    } <= train.keys()

    base, tuned = unfreeze.load(TINY_K2, dtype="float32"), unfreeze.load(run, dtype="float32")
    ids = [[5, 6, 7, 8]]
    assert (base.logits(ids)[0] - tuned.logits(ids)[0]).abs().max() > 1e-2

    again = sft(capsys, *command(data, run, "--steps", 12, "--lora.rank", 4, "--lora.experts-rank", 2))
    assert again["already_finished"] and again["steps"] == 12 and len(losses(run)) == 12
    # asked again, it is still a finished run
    assert [event["reason"] for event in events(run, "end")] == ["done"]


def test_a_run_measures_the_gap_between_its_sampler_and_its_trainer(capsys, data, tmp_path):
    sft(capsys, *command(data, tmp_path / "run", "--steps", 2, "--watch.samples", 2, "--dtype", "float32"))
    before, after = events(tmp_path / "run", "gap")
    assert (before["when"], before["step"], after["when"], after["step"]) == ("before", 0, "after", 2)
    for gap in (before, after):
        assert (
            0 < gap["logprob_gap_mean"] <= gap["logprob_gap_max"] <= 1e-4
            and 2 <= gap["logprob_gap_tokens"] <= 128
            and "warning" not in gap
        )


def test_control_arm_a_cached_pass_at_other_positions_is_said(capsys, data, tmp_path, monkeypatch):
    tables, step = Rope.tables, Engine._step

    def shifted(self, step_of, tokens):
        with monkeypatch.context() as patch:
            patch.setattr(Rope, "tables", lambda rope, positions, *rest: tables(rope, positions + 1, *rest))
            return step(self, step_of, tokens)

    monkeypatch.setattr(Engine, "_step", shifted)
    sft(capsys, *command(data, tmp_path / "run", "--steps", 1, "--watch.samples", 1, "--dtype", "float32"))
    gap = events(tmp_path / "run", "gap")[0]
    assert (
        gap["logprob_gap_max"] > 1e-2
        and "the cached and the packed pass do not compute the same" in gap["warning"]
    )


@pytest.mark.parametrize("reader", ["sglang", "peft"])
def test_export_is_verified_and_loads_with_the_same_logits(capsys, data, tmp_path, reader):
    run = tmp_path / "run"
    sft(capsys, *command(data, run, "--steps", 3, "--lora.rank", 2))
    assert cli.main(["export", str(run), "--for", reader, "--json", "--quiet"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    ids = [[5, 6, 7, 8, 9]]
    torch.testing.assert_close(
        unfreeze.load(result["path"], dtype="float32").logits(ids)[0],
        unfreeze.load(run, dtype="float32").logits(ids)[0],
        rtol=0,
        atol=1e-5,
    )


def test_ctrl_c_saves_and_the_same_command_goes_on_bit_for_bit(capsys, data, tmp_path, forkserver):
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    options = ("--steps", 6, "--lora.rank", 2, "--watch.samples", 0)
    sft(capsys, *command(data, straight, *options))
    pressed = (  # in step 3, however fast the steps are
        "import signal, sys; from unfreeze import cli; from unfreeze.train import fit; real = fit.train_step\n"
        "def step(*given, **named):\n    step.count += 1\n    if step.count == 3:"
        " signal.raise_signal(signal.SIGINT)\n    return real(*given, **named)\n"
        "step.count, fit.train_step = 0, step; sys.exit(cli.main(sys.argv[1:]))"
    )
    process = forkserver.run(
        ["-c", pressed, "sft", "--json", *command(data, broken, *options)],
        # sums are split by threads: bit for bit needs as many
        env={**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())},
    )
    assert process.returncode == 0, process.stderr
    first = json.loads(process.stdout.splitlines()[-1])
    assert not first["finished"] and first["steps"] == 3 and "give the same command again" in process.stderr
    second = sft(capsys, *command(data, broken, *options))
    assert second["finished"] and second["steps"] == 6
    assert losses(broken) == losses(straight)


@pytest.mark.parametrize(
    "change, words",
    [
        (["--validation", "nowhere.jsonl"], "is not a file"),
        (["--data", "nowhere.jsonl"], "--data is given twice"),
        (["--lora.targets", "atention"], "nearest"),
        (["--model", "no/such/model/here"], "does not exist"),
        (["--learning-rate", "0"], "--learning-rate 0: must be more than 0.0"),
    ],
)
def test_what_cannot_work_is_refused_before_work(capsys, data, tmp_path, change, words):
    assert cli.main(["sft", "--quiet", *command(data, tmp_path / "run"), *change]) == 2
    error = capsys.readouterr().err
    assert words in error and "Traceback" not in error


def test_a_changed_config_is_refused_naming_the_field(capsys, data, tmp_path):
    run = tmp_path / "run"
    sft(capsys, *command(data, run, "--steps", 2, "--lora.rank", 2, "--watch.samples", 0))
    (run / "adapter" / "adapter_config.json").unlink()
    assert (
        cli.main(
            ["sft", "--quiet", *command(data, run, "--steps", 2, "--lora.rank", 3, "--watch.samples", 0)]
        )
        == 2
    )
    assert "lora.rank: 2 -> 3" in capsys.readouterr().err


def test_bad_rows_are_skipped_counted_and_never_sampled(capsys, tmp_path, read_events):
    rows = [
        "{broken",
        json.dumps({"messages": [{"role": "assistant", "content": "I speak first. Hmm."}]}),
        json.dumps({"question": "Who are you?", "answer": "tiny-k2, I am."}),
        json.dumps({"question": "", "answer": "x"}),
        json.dumps({"question": "Who are you?", "answer": "Asked again, I am."}),
        json.dumps({"text": "word " * 2000}),
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    run = tmp_path / "run"
    flags = (
        "--steps",
        1,
        "--lora.rank",
        1,
        "--data.on-bad-row",
        "skip",
        "--sequence-length",
        2000,
        "--optimizer.warmup",
        0,
    )
    assert cli.main(["sft", *command(tmp_path / "rows.jsonl", run, *flags)]) == 0
    error = capsys.readouterr().err
    (account,) = read_events(run, "data")
    assert (account["rows"], account["truncated"], account["rows"] - account["bad"] - account["dropped"]) == (
        6,
        1,
        account["examples"],
    )
    assert "data: 6 rows" in error and "left out: row 1: broken JSON" in error
    assert (
        "sequence_length 2000 is limited to 256 by tokens_per_step" in error
        and "sequence_length 2000" in (run / "report.html").read_text()
    )
    before = [event for event in read_events(run, "sample") if event["when"] == "before"]
    assert [event["prompt"] for event in before].count("Who are you?") == 1  # though two rows ask it
    assert "bad rows skipped" in (run / "report.html").read_text()
    assert "next: unfreeze chat" in error and "--for peft" in error
    resolved = json.loads((run / "resolved_config.json").read_text())
    assert (
        resolved["effective"]["sequence_length"] == 256
        and resolved["effective"]["steps"] == 1
        and resolved["watch.samples"] == 4
    )


def test_a_prompt_that_leaves_no_room_for_an_answer_is_a_warning(capsys, tmp_path, read_events):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"question": "why " * 485, "answer": "Hmm."}) + "\n")
    run = tmp_path / "run"
    flags = (
        "--steps",
        1,
        "--lora.rank",
        1,
        "--tokens-per-step",
        1024,
        "--data.truncation",
        "error",
        "--optimizer.warmup",
        0,
    )
    assert cli.main(["sft", "--quiet", *command(tmp_path / "rows.jsonl", run, *flags)]) == 0, (
        capsys.readouterr().err
    )
    assert not read_events(run, "sample")
    assert "leaves fewer than 64" in read_events(run, "warning")[0]["message"]


@pytest.mark.parametrize("out", ["file", "file/inside"])
def test_an_out_that_cannot_be_a_folder_is_the_users_to_mend(capsys, data, tmp_path, out):
    (tmp_path / "file").write_text("mine")
    assert cli.main(["sft", "--quiet", *command(data, tmp_path / out)]) == 2
    error = capsys.readouterr().err
    assert str(tmp_path / out) in error and "--out" in error and "report it" not in error
    assert (tmp_path / "file").read_text() == "mine"


def test_home_is_expanded_in_every_path(capsys, data, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").symlink_to(TINY_K2)
    (tmp_path / "chat.jsonl").write_bytes(data.read_bytes())
    paths = 'model = "~/model"\ndata = "~/chat.jsonl"\nout = "~/runs/x"\n'
    (tmp_path / "run.toml").write_text(paths + "steps = 1\nsamples = 0\nwarmup = 0\n[lora]\nrank = 1\n")
    result = sft(capsys, "~/run.toml", "--tokens-per-step", 256)
    assert result["run"] == str(tmp_path / "runs" / "x") and unfreeze.load(
        "~/runs/x", dtype="float32"
    ).logits([[1]])


def test_ctrl_c_before_the_first_step_says_that_nothing_was_trained(capsys, data, tmp_path, monkeypatch):
    def pressed(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("unfreeze.parallel.plan.plan_run", pressed)
    typed = command(data, tmp_path / "my run", "--steps", 3)
    assert cli.main(["sft", "--quiet", *typed]) == 130
    error = capsys.readouterr().err
    assert (
        error == "interrupted: nothing was trained yet; give the same command again:"
        f" {shlex.join(['unfreeze', 'sft', *typed])}\n"
    )


@pytest.mark.parametrize("model", ["tiny-k2", "stories260k"])
def test_the_shared_yoda_rows_train_both_models(capsys, tmp_path, model):
    if not SHARED.is_dir():
        pytest.skip(f"{SHARED} is not on this machine; the rows above cover the same ground")
    folder = unfreeze.TINY_K2 if model == "tiny-k2" else SHARED / model
    result = sft(
        capsys,
        "--model",
        folder,
        "--data",
        SHARED / "yoda_train.jsonl",
        "--out",
        tmp_path / "run",
        "--steps",
        3,
        "--lora.rank",
        4,
        "--tokens-per-step",
        512,
        "--sequence-length",
        256,
        "--watch.samples",
        1,
        "--optimizer.warmup",
        0,
    )
    # each step sees other rows, so three losses need not fall; the receipt says that every group learned
    assert (
        result["finished"]
        and result["steps"] == 3
        and all(entry["moved"] > 0 for entry in result["receipt"].values() if entry["trained"])
    )
    assert unfreeze.load(tmp_path / "run", dtype="float32").logits([[1, 403, 407]])[0].isfinite().all()
