"""`unfreeze distill`: a student on packed experts learns a run; the loss is what plain torch says; bad teachers are
refused in one line before a weight is read."""

import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import unfreeze
from unfreeze import cli
from unfreeze.checkpoint import open_checkpoint
from unfreeze.checkpoint.same import same_weights
from unfreeze.commands.demo import TINY_K2
from unfreeze.core.errors import ConfigError
from unfreeze.data import load_tokenizer, pack
from unfreeze.data.store.dataset import encode_file
from unfreeze.teach.teacher import Asked

WORDS = [
    "--tokens-per-step",
    128,
    "--learning-rate",
    "5e-3",
    "--watch.samples",
    0,
    "--dtype",
    "float32",
    "--optimizer.warmup",
    0,
]
SMALL = ["--lora.rank", 2, "--lora.targets", "attention", "experts"]


def hashes(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    turns = [{"prompt": f"What is {n}?", "completion": f"{n}, it is. Hmm."} for n in range(12)]
    path.write_text("".join(json.dumps(row) + "\n" for row in turns))
    return path


@pytest.fixture
def distill(capsys, rows, tmp_path):
    def run(*arguments, code=0, out=tmp_path / "student", steps=2, data=rows):
        given = ["--model", TINY_K2, "--data", data, "--out", out, "--steps", steps, *WORDS, *SMALL]
        assert cli.main(list(map(str, ["distill", "--json", *given, *arguments]))) == code
        said = capsys.readouterr()
        return said.err if code else json.loads(said.out.splitlines()[-1])

    return run


def trains(run):
    found = [json.loads(line) for line in (Path(run) / "events.jsonl").read_text().splitlines()]
    return [event for event in found if event["kind"] == "train"]


def expected(teacher, rows, *, temperature, alpha, steps=1):
    """The first step's loss, from logits of both models as plain torch has them, in float64."""
    tokenizer = load_tokenizer(TINY_K2)
    batch = pack(encode_file(rows, tokenizer, 128).examples[:])
    said = []
    for name in (TINY_K2, teacher):
        model = unfreeze.load(name, dtype="float32").decoder
        with torch.no_grad():
            said.append(model.logits(model.hidden(batch)).double()[:, : tokenizer.named_size])
    p, q = ((logits / temperature).log_softmax(-1) for logits in said)
    apart = F.kl_div(p, q, log_target=True, reduction="none").sum(-1)
    entropy = F.cross_entropy(said[0], batch.targets_T, reduction="none")
    each = alpha * entropy + (1 - alpha) * temperature**2 * apart
    weights = batch.weights_T.double()
    return [float((x * weights).sum() / weights.sum()) for x in (each, apart, entropy)]


def test_a_run_as_teacher_on_packed_experts(distill, run_dir, rows, held_rows, tmp_path):
    before = hashes(run_dir), hashes(TINY_K2)
    short = tmp_path / "few.jsonl"
    short.write_text("".join(rows.read_text().splitlines(True)[:4]))
    asked = ["--temperature", 2, "--alpha", 0.25, "--validation", held_rows]
    result = distill("--teacher", run_dir, *asked, data=short, steps=6)
    events = trains(result["run"])
    loss, apart, entropy = expected(run_dir, short, temperature=2.0, alpha=0.25)
    assert events[0]["loss"] == pytest.approx(loss, rel=1e-4)
    assert events[0]["divergence"] == pytest.approx(apart, rel=1e-4)
    assert events[0]["cross_entropy"] == pytest.approx(entropy, rel=1e-4)
    assert events[-1]["divergence"] < 0.7 * events[0]["divergence"]
    # the teacher and the base are as they were; what trained is the adapter, experts included
    assert (hashes(run_dir), hashes(TINY_K2)) == before
    names = load_file(Path(result["run"]) / "adapter" / "adapter_model.safetensors")
    assert any("experts" in name for name in names)
    assert unfreeze.FinishedRun(result["run"]).receipt["experts"]["trained"] > 0
    lines = json.loads((Path(result["run"]) / "plan.json").read_text())["start"]
    (line,) = [line for line in lines if line.startswith("learns from: ")]
    assert line.startswith(f"learns from: {run_dir} (an adapter of the same base, ")
    assert line.endswith(", frozen); forward KL, temperature 2, 0.25 of cross entropy")
    page = (Path(result["run"]) / "report.html").read_text()
    assert "Divergence" in page and "Cross entropy" in page


def test_the_base_with_its_adapters_off_holds_the_model_near(distill, tmp_path):
    """It begins as its own teacher: divergence 0, and the data moves it away. No second model is planned."""
    result = distill("--teacher", "base", "--alpha", 0.5, steps=3)
    events = trains(result["run"])
    assert events[0]["divergence"] == pytest.approx(0, abs=1e-6) and events[-1]["divergence"] > 1e-3
    assert events[-1]["cross_entropy"] < events[0]["cross_entropy"]
    terms = json.loads((Path(result["run"]) / "plan.json").read_text())["terms"]
    assert "second model" not in terms and "what the second model said" in terms


@pytest.mark.nightly  # tests/teach/test_on_policy.py resumes in every suite
def test_broken_off_and_resumed_it_is_the_same_to_the_bit(distill, run_dir, tmp_path):
    arguments = ["--teacher", run_dir, "--optimizer.schedule", "constant"]
    whole = distill(*arguments, out=tmp_path / "whole", steps=4)
    distill(*arguments, out=tmp_path / "parts", steps=2)
    parts = distill(*arguments, "--save.allow-changed", "steps", out=tmp_path / "parts", steps=4)
    weights = [load_file(Path(r["run"]) / "adapter/adapter_model.safetensors") for r in (whole, parts)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--teacher", TINY_K2], "is the model itself, so nothing would be learned"),
        (["--teacher", "base"], "the model is its own teacher"),
        (["--teacher", "base", "--train", "all", "--alpha", "0.5"], "has no adapters"),
        (["--teacher", "/nowhere"], "/nowhere does not exist"),
        (
            ["--teacher", "base", "--alpha", "0.5", "--distillation.beta", "0.3"],
            "beta needs divergence = jsd",
        ),
        (["--teacher", "base", "--alpha", "1.5"], "alpha"),
    ],
)
def test_a_teacher_that_cannot_be_is_refused(distill, arguments, says, tmp_path):
    assert says in distill(*arguments, code=2)
    assert not (tmp_path / "student" / "state").exists()


def test_the_model_itself_copied_elsewhere_is_refused_and_one_that_moved_is_not(distill, tmp_path):
    """Whatever its folder is called; a copy of which one matrix of one layer moved is another model."""
    shutil.copytree(TINY_K2, copy := tmp_path / "copy")
    said = distill("--teacher", copy, code=2)
    assert "looks like a copy of the model" in said
    own, other = open_checkpoint(TINY_K2), open_checkpoint(copy)
    assert same_weights(own, other)
    one_layer = [info for info in other.tensors.values() if ".1." in info.name and "expert" not in info.name]
    assert len(one_layer) > 6
    for info in one_layer[::3]:
        with info.file.open("r+b") as file:
            file.seek(at := info.offset + info.nbytes // 2)
            byte = file.read(1)
            for value, same in ((byte[0] ^ 1, False), (byte[0], True)):
                file.seek(at)
                file.write(bytes([value]))
                file.flush()
                assert same_weights(own, other) is same


def test_a_run_on_the_models_own_base_is_no_second_copy_and_the_same_to_the_bit(
    distill, run_dir, tmp_path, monkeypatch
):
    runs = {}
    for how in ("one base", "two copies"):
        if how == "two copies":
            monkeypatch.setattr(Asked, "_on_the_same", lambda self, start: False)
        runs[how] = Path(distill("--teacher", run_dir, out=tmp_path / how, steps=3)["run"])
    weights = [load_file(run / "adapter/adapter_model.safetensors") for run in runs.values()]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    losses = [[event["loss"] for event in trains(run)] for run in runs.values()]
    assert losses[0] == losses[1] and losses[0][0] > 0
    plans = [json.loads((run / "plan.json").read_text()) for run in runs.values()]
    adapter = sum(path.stat().st_size for path in (run_dir / "adapter").glob("*.safetensors"))
    one, two = (each["terms"]["second model"] for each in plans)
    assert one == adapter and two == adapter + plans[0]["terms"]["base"]
    assert any("an adapter of the same base" in line for line in plans[0]["start"])


@pytest.fixture
def other_words(tmp_path):
    """tiny-k2 with two of its words exchanged: as many ids, other words."""
    folder = tmp_path / "other"
    shutil.copytree(TINY_K2, folder)
    lines = (folder / "tiktoken.model").read_text().splitlines()
    one, two = lines[300].split(), lines[301].split()
    lines[300:302] = [f"{two[0]} {one[1]}", f"{one[0]} {two[1]}"]
    (folder / "tiktoken.model").write_text("\n".join(lines) + "\n")
    return folder


def test_a_teacher_of_another_vocabulary_is_refused_with_both_sizes_and_hashes(
    distill, other_words, monkeypatch
):
    def never(*_, **__):
        raise AssertionError("a weight was read")

    monkeypatch.setattr("unfreeze.generate.open.place", never)
    said = distill("--teacher", other_words, code=2)
    assert said.count("ids, hash") == 2 and "has another vocabulary" in said


def test_from_python(run_dir, rows, tmp_path):
    run = unfreeze.distill(
        model=TINY_K2,
        teacher=run_dir,
        data=str(rows),
        out=tmp_path / "python",
        steps=1,
        divergence="jsd",
        beta=0.3,
        rank=2,
        samples=0,
        tokens_per_step=128,
        quiet=True,
    )
    assert run.finished and run.loss is not None and run.loss > 0
    with pytest.raises(ConfigError, match="teacher"):
        unfreeze.distill(model=TINY_K2, data=str(rows))


@pytest.mark.nightly
def test_two_processes_are_one(run_dir, rows, tmp_path):
    """Each has the teacher; the micro-batches are dealt. The losses are those of one process."""
    line = ["distill", "--quiet", "--model", TINY_K2, "--teacher", run_dir, "--data", rows, *WORDS, *SMALL]
    line = list(map(str, [*line, "--steps", 3, "--micro-batches", 2, "--alpha", 0.3, "--threads", 1]))
    assert cli.main([*line, "--out", str(tmp_path / "one")]) == 0
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", port]
    subprocess.run(
        [*start, "-m", "unfreeze", *line, "--out", str(tmp_path / "two")],
        check=True,
        timeout=280,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    one, two = trains(tmp_path / "one"), trains(tmp_path / "two")
    for name in ("loss", "divergence", "cross_entropy"):
        assert [event[name] for event in two] == pytest.approx([event[name] for event in one], rel=1e-5)


@pytest.mark.nightly
def test_experts_from_disk_are_read_for_the_base_as_a_teacher_too(distill, tmp_path):
    """The layers are visited once more, between forward and backward; every number is the resident model's."""
    arguments = ["--teacher", "base", "--alpha", 0.5, "--place.recompute", "layers"]
    runs = [
        distill(*arguments, "--place.experts", where, out=tmp_path / where, steps=3)["run"]
        for where in ("device", "disk")
    ]
    here, disk = ([(event["loss"], event["divergence"]) for event in trains(run)] for run in runs)
    assert here == disk and here[-1][1] > 0


@pytest.mark.parametrize(
    "flags, options",
    [
        ([], {"beta": 0.0, "temperature": 1.0, "alpha": 0.0}),
        (
            ["--distillation.divergence", "reverse", "--alpha", 0.25],
            {"beta": 1.0, "temperature": 1.0, "alpha": 0.25},
        ),
        (
            ["--distillation.divergence", "jsd", "--distillation.beta", 0.3, "--temperature", 2],
            {"beta": 0.3, "temperature": 2.0, "alpha": 0.0},
        ),
    ],
)
def test_each_flag_reaches_the_loss(flags, options):
    """A loss without one of them runs and learns something else: no figure of a short run tells."""
    from unfreeze.config.distill import Config
    from unfreeze.config.parse import parse
    from unfreeze.recipes.distill import parts

    given = ["--model", "m", "--teacher", "t", "--data", "d", *flags]
    config = parse(Config, list(map(str, given)), command="distill", description="")
    teacher = parts(config).second
    assert teacher.temperature == options["temperature"] and teacher.beta == options["beta"]
    minimised = teacher.minimise(print, 7)
    assert minimised.func.__name__ == "divergence"
    assert minimised.keywords == {"teacher": print, "vocab": 7, **options}


def test_a_missing_teacher_is_in_the_call_that_is_shown():
    with pytest.raises(ConfigError, match="distill needs teacher") as refused:
        unfreeze.distill(model="m", data="d")
    assert refused.value.next == 'unfreeze.distill(model="…", data="chat.jsonl", teacher="…")'
