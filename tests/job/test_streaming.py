"""A run of large files: it begins before their last row is encoded, and is the same run however it goes on."""

import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest

import unfreeze
from unfreeze import cli
from unfreeze.commands.demo import TINY_K2
from unfreeze.commands.doctor import Config, findings_of
from unfreeze.core.conform import violations
from unfreeze.core.errors import DataError
from unfreeze.data import Stats
from unfreeze.data.rows import scan
from unfreeze.data.store import encoded, streamed
from unfreeze.job import data as job_data
from unfreeze.job.opening.streaming import Followed
from unfreeze.report.events import AT_LEAST, LEAKED
from unfreeze.report.learnt import finding
from unfreeze.report.run import read_run

pytestmark = pytest.mark.usefixtures("fewer_layers")

STEPS = 6
ALL = ("--steps", 10)  # as many as come to the last of 80 rows


@pytest.fixture(autouse=True)
def small(monkeypatch, tmp_path):
    """Files of more than 60 rows are large; windows of 500 tokens."""
    monkeypatch.setattr(job_data, "MANY_ROWS", 60)
    for name, value in {"HEAD": 10, "WINDOW": 500, "FULL": 1, "BATCH_ROWS": 8}.items():
        monkeypatch.setattr(streamed, name, value)
    monkeypatch.setattr(encoded, "LEAST_BYTES", 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def all_taken_before(monkeypatch, step):
    """What is encoded aside is taken before that step, to its last row, and before no other: else it would hang
    on whether ten steps or 80 rows are faster here."""

    def take(stream):
        stream.drawn = getattr(stream, "drawn", 0) + 1
        if stream.drawn == step:
            stream._waits = True
            while stream.whole is None and stream.error is None:
                stream._more()

    monkeypatch.setattr(streamed.Stream, "take", take)


def write(path, count=80, bad=None):
    rows = [
        json.dumps({"question": f"What is {n}?", "answer": f"{n}, it is. " * (1 + n % 4)})
        for n in range(count)
    ]
    if bad is not None:
        rows[bad] = "{broken"
    path.write_text("\n".join(rows) + "\n")
    return path


@pytest.fixture
def rows(tmp_path):
    return write(tmp_path / "rows.jsonl")


def run(rows, out, *more, code=0):
    command = ["sft", "--quiet", "--model", TINY_K2, "--data", rows, "--out", out, "--tokens-per-step", 256]
    flags = [
        "--steps",
        STEPS,
        "--lora.rank",
        1,
        "--threads",
        1,
        "--save-every",
        1,
        "--save.keep",
        99,
        "--watch.samples",
        1,
    ]
    assert cli.main([str(part) for part in [*command, *flags, *more]]) == code
    return out


def losses(out):
    return [(event["step"], event["loss"]) for event in events(out, "train")]


def events(out, kind):
    found = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    assert not [fault for event in found for fault in violations(event)]
    return [event for event in found if event["kind"] == kind]


def killed(out, step, to):
    """A run's folder as a kill behind a step leaves it."""
    shutil.copytree(out, to)
    for later in range(step + 1, STEPS + 1):
        shutil.rmtree(to / "state" / f"step-{later:06d}")
    shutil.rmtree(to / "adapter")
    lines = (to / "events.jsonl").read_text().splitlines(keepends=True)
    (to / "events.jsonl").write_text("".join(line for line in lines if json.loads(line)["kind"] != "end"))
    return to


def adapter(out):
    return next((out / "adapter").glob("*.safetensors")).read_bytes()


def test_cold_warm_and_killed_it_is_the_same_run(rows, tmp_path, monkeypatch):
    all_taken_before(monkeypatch, 4)
    flags = ["--validation-fraction", 0.05, "--watch.validate-every", 3]
    cold = run(rows, tmp_path / "cold", *flags)
    begun, whole = events(cold, "data")
    assert begun["step"] == 0 and begun["rows_in_files"] == 80 and begun["rows"] < 40
    assert whole["step"] == 4 and "rows_in_files" not in whole and whole["rows"] == 80
    assert begun["summary"].startswith("the first rows of 80 in the files, as many as training needs: ")
    warm = run(rows, tmp_path / "warm", *flags)
    assert [event["rows"] for event in events(warm, "data")] == [80]
    early = killed(cold, 2, tmp_path / "early")
    late = killed(cold, STEPS - 2, tmp_path / "late")
    run(rows, late, *flags)  # from the store
    shutil.rmtree(encoded.root())
    run(rows, early, *flags)  # encoded anew
    for other in (warm, early, late):
        assert losses(other) == losses(cold) and adapter(other) == adapter(cold)
        assert [e["loss"] for e in events(other, "eval")] == [e["loss"] for e in events(cold, "eval")]
        assert [e["text"] for e in events(other, "sample")] == [e["text"] for e in events(cold, "sample")]


def test_control_arm_fewer_rows_or_epochs_are_encoded_before_the_first_step(rows, tmp_path, monkeypatch):
    few = write(tmp_path / "few.jsonl", 60)
    for name, file, flags in (("few", few, []), ("weights", rows, ["--data.weights", 1])):
        (account,) = events(run(file, tmp_path / name, *flags), "data")
        assert account["step"] == 0 and "rows_in_files" not in account
    monkeypatch.setattr(job_data, "MANY_ROWS", 1000)
    (account,) = events(run(rows, tmp_path / "limit"), "data")
    assert account["step"] == 0 and account["rows"] == 80
    # a run that began so goes on so
    out = killed(tmp_path / "limit", 4, tmp_path / "later")
    monkeypatch.setattr(job_data, "MANY_ROWS", 60)
    assert losses(run(rows, out)) == losses(tmp_path / "limit")


@pytest.mark.parametrize("length", ["steps = 2", "epochs = 0.05"])
def test_the_doctor_encodes_into_the_store_that_the_run_reads(rows, tmp_path, length):
    """Read in windows, or whole: what a row becomes hangs on no other. Control arm: of another sequence length."""
    (tmp_path / "run.toml").write_text(f"tokens_per_step = 256\n{length}\n")

    def encoded_again(out, *more):
        """Whether the run that follows a doctor begins before its last row is encoded."""
        doctor = ["doctor", TINY_K2, "--data", rows, "--config", tmp_path / "run.toml"]
        sft = ["sft", tmp_path / "run.toml", "--model", TINY_K2, "--data", rows, "--lora.rank", 1]
        stores = []
        for command in (doctor, [*sft, *more, "--threads", 1, "--watch.samples", 0, "--out", out]):
            assert cli.main(["--quiet", *map(str, command)]) == 0
            stores.append({path.name: path.stat().st_mtime_ns for path in encoded.root().iterdir()})
        shutil.rmtree(encoded.root())
        return stores[0] != stores[1] or "rows_in_files" in events(out, "data")[0]

    assert not encoded_again(tmp_path / "run")
    assert encoded_again(tmp_path / "control", "--data.sequence-length", 128)


def test_the_doctor_counts_bad_rows_of_large_files(tmp_path):
    (tmp_path / "run.toml").write_text("steps = 2\n")
    bad = write(tmp_path / "bad.jsonl", bad=70)
    given = Config(model=str(TINY_K2), data=str(bad), config=str(tmp_path / "run.toml"))
    (found,) = [each for each in findings_of(given) if each.check == "data"][1:]
    assert found.level == "fault" and found.line.startswith("1 of 80 rows cannot be read")
    assert "row 71: broken JSON" in found.line


def test_a_run_of_epochs_is_read_whole(rows, tmp_path):
    command = [
        "sft",
        "--quiet",
        "--model",
        TINY_K2,
        "--data",
        rows,
        "--out",
        tmp_path / "run",
        "--epochs",
        0.05,
    ]
    assert cli.main([str(part) for part in [*command, "--tokens-per-step", 256, "--watch.samples", 0]]) == 0
    (account,) = events(tmp_path / "run", "data")
    assert account["rows"] == 80 and "rows_in_files" not in account


def test_a_run_in_windows_does_not_go_on_for_epochs(rows, tmp_path, capsys):
    out = killed(run(rows, tmp_path / "run"), 2, tmp_path / "again")
    toml = tmp_path / "epochs.toml"
    toml.write_text(
        f"model = {json.dumps(str(TINY_K2))}\nout = {json.dumps(str(out))}\n[data]\nfiles = [{json.dumps(str(rows))}]\n"
        "[training]\nepochs = 3.0\ntokens_per_step = 256\n"
    )
    capsys.readouterr()
    flags = ["--lora.rank", 1, "--threads", 1, "--save-every", 1, "--save.keep", 99, "--watch.samples", 1]
    allowed = ["--save.allow-changed", "steps", "epochs"]
    assert cli.main([str(part) for part in ["sft", toml, "--quiet", *flags, *allowed]]) == 2
    assert "cannot resume: this run reads its rows in windows" in capsys.readouterr().err


def test_a_bad_row_that_is_found_later_stops_the_run_behind_a_save(tmp_path, capsys):
    order = np.random.default_rng([0, 0]).permutation(80).tolist()  # of rows, some 15 to a window
    bad = next(row for row in order[40:] if row not in np.linspace(0, 79, 10).astype(int))
    rows = write(tmp_path / "rows.jsonl", bad=bad)
    out = run(rows, tmp_path / "run", *ALL, "--save-every", 0, "--seed", 0, code=2)
    said = capsys.readouterr().err
    steps = len(losses(out))
    assert "broken JSON at column 2" in said and f"; step {steps} is saved" in said
    assert [path.name for path in (out / "state").iterdir()] == [f"step-{steps:06d}"]
    # skipped, it goes on there, as a run that skipped it from the beginning
    skip = [*ALL, "--save-every", 0, "--seed", 0, "--data.on-bad-row", "skip"]
    run(rows, out, *skip, "--save.allow-changed", "on_bad_row")
    assert losses(out) == losses(run(rows, tmp_path / "skipped", *skip))
    assert [event["bad"] for event in events(out, "data")][-1] == 1


def test_a_bad_row_is_warned_about_when_it_is_found(tmp_path):
    said = []
    stats = Stats(rows=80)
    stream = SimpleNamespace(whole=None, error=None, stats=lambda: Stats(rows=90))
    log = SimpleNamespace(emit=lambda kind, step, message: said.append((kind, step, message)))
    state = SimpleNamespace(step=3, run=SimpleNamespace(events=log))
    told = []
    hook = Followed(stream, stats, lambda stats, step: told.append((stats.rows, step)), lambda stats: [])
    hook(state, None)
    assert not said and not told
    stream.error = DataError("rows.jsonl, row 7: broken JSON")
    for _ in range(2):
        hook(state, None)
    found = "rows.jsonl, row 7: broken JSON; the run stops when it needs the rows from there on"
    assert said == [("warning", 3, found)] and not told
    for _ in range(2):
        hook.end(state)
    assert told == [(90, 3)]


def test_a_run_that_ends_before_says_what_was_encoded(rows, tmp_path, monkeypatch):
    all_taken_before(monkeypatch, 3)
    out = run(rows, tmp_path / "run", "--steps", 2)
    begun, ended = events(out, "data")
    assert ended["rows_in_files"] == begun["rows_in_files"] == 80 and ended["step"] == 2
    assert not [path for path in encoded.root().iterdir()], "half a store is not kept"
    said = json.loads((out / "events.jsonl").read_text().splitlines()[-1])
    assert said["kind"] in ("data", "end")


def test_the_loop_of_ones_own(rows, tmp_path):
    out = run(rows, tmp_path / "run")
    shutil.rmtree(encoded.root())
    flags = {"lora.rank": 1}
    job = unfreeze.prepare(
        model=str(TINY_K2),
        data=str(rows),
        out=str(tmp_path / "own"),
        tokens_per_step=256,
        steps=STEPS,
        threads=1,
        samples=1,
        save_every=1,
        keep_saves=99,
        quiet=True,
        **flags,
    )
    for batch in job.batches:
        job.forward_backward(batch)
        job.optim_step()
    assert losses(tmp_path / "own") == losses(out) and len(events(tmp_path / "own", "data")) == 2


@pytest.mark.parametrize("looked", [True, False])
def test_rows_held_out_beside_windows_that_are_trained_on_are_found_before_they_are_encoded(
    rows, tmp_path, monkeypatch, looked
):
    """Ten rows as they stand in the data, anywhere in it, and one in other words of JSON, found as its row comes.
    The control arm without a look at the raw rows finds them only so."""
    all_taken_before(monkeypatch, 4)
    if not looked:
        monkeypatch.setattr(scan.Repeated, "__call__", lambda self, raw: None)
    held, each = tmp_path / "held.jsonl", rows.read_text().splitlines()
    other = [json.dumps({"question": f"Is it {n}?", "answer": f"It is {n}."}) for n in range(4)]
    spaced = json.dumps(json.loads(each[40]), indent=None, separators=(" ,  ", ":"))
    held.write_text("\n".join([*each[::8], spaced, *other]) + "\n")
    out = run(rows, tmp_path / "run", *ALL, "--validation", held, "--watch.validate-every", 5)
    told = [event["message"] for event in events(out, "warning")]
    later = [message for message in told if message.startswith(AT_LEAST)]
    assert events(out, "data")[0]["held_out"] == (4 if looked else 15) + looked
    if looked:
        assert told[0] == f"10 of 15 {LEAKED}, so they are left out of validation"
        assert later[-1] == f"{AT_LEAST}1 of 5 {LEAKED}"
        assert events(out, "eval")[0]["rows"] == 5
    else:
        assert later[-1] == f"{AT_LEAST}11 of 15 {LEAKED}" and len(later) == 2  # more as more is read
    assert not finding(read_run(out)).learnt
