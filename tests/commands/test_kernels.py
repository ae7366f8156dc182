"""unfreeze kernels measure and list, over an op of the test's own: progress, files, Ctrl-C, refusals, and
that what was measured is what runs."""

import json
import os

import pytest
import torch

from unfreeze import cli
from unfreeze.kernels.choice import choose, ops, record
from unfreeze.kernels.choice import measure as measuring
from unfreeze.kernels.choice.op import Candidate, Case, Op

KEY = record.device_key(torch.device("cpu"))


def slow(x):
    total = x * 0
    for _ in range(100):
        total = total + x
    return total


def wrong(x):
    return x * 101.0


def doubling(size):
    def inputs(device, dtype, generator):
        return (torch.randn(size, generator=generator).to(device, dtype).requires_grad_(),)

    return inputs


def planted(name, **candidates):
    made = {
        label: Candidate(lambda f=function: f, lambda device, dtype: "" if device == "cpu" else "no")
        for label, function in candidates.items()
    }
    made["gpu"] = Candidate(lambda: pytest.fail("loaded"), lambda device, dtype: "it needs a GPU")
    cases = (Case("small", doubling(8), (torch.float32,)), Case("large", doubling(64), (torch.float32,)))
    return Op(name, slow, made, cases, {torch.float32: 1e-5})


@pytest.fixture
def room(tmp_path, monkeypatch):
    """Two planted ops and empty folders of records."""
    made = {
        "hundredfold": planted("hundredfold", quick=lambda x: x * 100.0, wrong=wrong),
        "other": planted("other", quick=lambda x: x * 100.0),
    }
    monkeypatch.setattr(ops, "OPS", dict.fromkeys(made, ""))
    monkeypatch.setattr(ops, "import_op", lambda name: made[name])
    monkeypatch.setattr(record, "COMMITTED", tmp_path / "committed")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(choose, "_CHOSEN", {})
    choose._loaded.cache_clear(), record.read.cache_clear()
    threads = torch.get_num_threads()
    yield tmp_path
    torch.set_num_threads(threads)  # --threads is a setting of the process
    choose._loaded.cache_clear(), record.read.cache_clear()


def measure(unfreeze_json, *arguments):
    return unfreeze_json("kernels", "measure", "--device", "cpu", "--seconds", "0.001", *arguments)


def test_what_was_measured_is_what_runs(room, unfreeze_json):
    listed = unfreeze_json("kernels", "list", "--device", "cpu")
    assert {entry["runs"] for entry in listed["ops"]} == {"reference"} and "no record for" in listed["ops"][
        0
    ]["why"]
    result = measure(unfreeze_json)
    assert result["finished"] and result["device"] == KEY and not result["unmeasured"]
    assert result["file"] == str(room / "committed" / f"{KEY}.json") and json.loads(
        (room / "committed" / f"{KEY}.json").read_text()
    )
    assert len(result["rows"]) == 2 * 2 + 2
    listed = unfreeze_json("kernels", "list", "--device", "cpu")["ops"]
    assert [(entry["op"], entry["bucket"], entry["dtype"], entry["runs"]) for entry in listed] == [
        (op, bucket, "float32", "quick") for op in ("hundredfold", "other") for bucket in ("small", "large")
    ]
    standing = listed[0]["candidates"]
    assert (
        standing["wrong"].startswith("refused: error 1.0e-02")
        and standing["gpu"] == "cannot run: it needs a GPU"
    )
    assert " x, error " in standing["quick"]


def test_one_op_replaces_its_own_rows_only(room, unfreeze_json):
    measure(unfreeze_json)
    path = room / "committed" / f"{KEY}.json"
    before = {record.identity(row): row for row in json.loads(path.read_text())}
    path.write_text(json.dumps([{**row, "date": "2001-01-01"} for row in before.values()]))
    measure(unfreeze_json, "--op", "other")
    after = {record.identity(row): row["date"] for row in json.loads(path.read_text())}
    assert after.keys() == before.keys() and all(
        (date == "2001-01-01") == (key[0] == "hundredfold") for key, date in after.items()
    )


def test_a_users_own_records_and_a_file_of_choice(room, unfreeze_json):
    assert measure(unfreeze_json, "--to", "user")["file"] == str(
        room / "cache" / "unfreeze" / "kernels" / f"{KEY}.json"
    )
    assert {entry["runs"] for entry in unfreeze_json("kernels", "list", "--device", "cpu")["ops"]} == {
        "quick"
    }
    assert (
        measure(unfreeze_json, "--out", room / "mine.json")["file"] == str(room / "mine.json")
        and (room / "mine.json").exists()
    )
    assert not (room / "committed").exists()


def test_ctrl_c_keeps_what_was_measured(room, unfreeze_json, monkeypatch, capsys):
    real, calls = measuring.measure, []

    def interrupted(*arguments):
        calls.append(arguments)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(measuring, "measure", interrupted)
    result = measure(unfreeze_json)
    assert not result["finished"] and len(calls) == 4
    kept = {
        record.identity(row)[0::2] for row in json.loads((room / "committed" / f"{KEY}.json").read_text())
    }
    assert kept == {("hundredfold", "small"), ("hundredfold", "large"), ("other", "small")}


def test_a_reference_that_fails_is_said_and_the_rest_measured(room, unfreeze_json, monkeypatch):
    real = measuring.measure

    def failing(op, case, *rest):
        if case.bucket == "small":
            raise RuntimeError("out of memory")
        return real(op, case, *rest)

    monkeypatch.setattr(measuring, "measure", failing)
    result = measure(unfreeze_json)
    assert [entry["cell"] for entry in result["unmeasured"]] == [
        "hundredfold, small, float32",
        "other, small, float32",
    ]
    assert result["unmeasured"][0]["reason"] == "RuntimeError: out of memory" and {
        row["bucket"] for row in result["rows"]
    } == {"large"}


def test_progress_names_threads_medians_and_refusals(room, capsys):
    assert (
        cli.main(
            [
                "kernels",
                "measure",
                "--device",
                "cpu",
                "--seconds",
                "0.001",
                "--threads",
                "1",
                "--op",
                "hundredfold",
            ]
        )
        == 0
    )
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith(f"{KEY}, torch {torch.__version__}, 1 thread, CPU time")
    assert (
        said[1].startswith("  1/2  hundredfold, small, float32: quick ")
        and "wrong refused: error 1.0e-02, tolerance 1.0e-05" in said[1]
    )
    assert " us, error " in said[1] and "; reference " in said[1] and said[-1].startswith("4 rows in ")
    assert cli.main(["kernels", "list", "--device", "cpu"]) == 0
    short = capsys.readouterr().out.splitlines()
    assert any(line.split()[:2] == ["hundredfold", "quick"] for line in short) and "--all" in short[-1]
    assert len(short) == 2 + len({line.split()[0] for line in short[1:-1]})  # a line for each op
    assert cli.main(["kernels", "list", "--device", "cpu", "--all"]) == 0
    table = capsys.readouterr().out
    assert "hundredfold" in table and "quick" in table and "hundredfold gpu: it needs a GPU" in table


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_package_folder_that_cannot_be_written_is_refused_before_the_work(room, capsys):
    room.chmod(0o555)
    try:
        assert cli.main(["kernels", "measure", "--device", "cpu"]) == 2
    finally:
        room.chmod(0o755)
    assert "cannot be written" in capsys.readouterr().err


def test_a_place_that_cannot_be_a_file_is_refused_before_the_work_and_names_out(room, capsys, monkeypatch):
    (room / "committed").write_text("a file where the folder should be")
    monkeypatch.setattr(measuring, "measure", lambda *_: pytest.fail("measured"))
    assert cli.main(["kernels", "measure", "--device", "cpu"]) == 2
    error = capsys.readouterr().err
    assert "cannot be written" in error and "--to user, or --out FILE" in error and "Traceback" not in error


@pytest.mark.parametrize(
    "arguments, said",
    [(["measur"], "nearest: 'measure'"), ([], "got nothing"), (["list", "--op", "rms"], "no op 'rms'")],
)
def test_a_wrong_word_is_one_clear_line(arguments, said, capsys):
    assert cli.main(["kernels", *arguments]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_here_is_refused(capsys):
    assert cli.main(["kernels", "measure", "--device", "cuda"]) == 2
    assert "sees no CUDA device" in capsys.readouterr().err
