"""A teacher's top-k on disk: what it costs against the whole distribution, that a run reads it as it would ask the
teacher, and that what does not fit is refused."""

import json
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

from unfreeze import cli
from unfreeze.commands.demo import TINY_K2
from unfreeze.core.batch import Batch
from unfreeze.objectives.divergence import divergence, log_softmax
from unfreeze.teach.coding import Coding, top_of
from unfreeze.teach.store import IDS, LOG_Q, REST, one_writer, said_in

N, V, D = 400, 1000, 24


def like_a_models(n: int = N, words: int = V, seed: int = 0) -> torch.Tensor:
    """log q as models have them: some sure, some not; a long tail."""
    generator = torch.Generator().manual_seed(seed)
    ranks = torch.arange(1, words + 1).log()
    steep = 0.8 + 2.2 * torch.rand(n, 1, generator=generator)
    logits = -steep * ranks + 0.5 * torch.randn(n, words, generator=generator)
    orders = torch.rand(n, words, generator=generator).argsort(1)
    return logits.gather(1, orders).log_softmax(-1)


def brought_along(log_q_NV: torch.Tensor, coding: Coding) -> Batch:
    n = len(log_q_NV)
    said = coding.decode(coding.encode(*top_of(log_q_NV, coding.top_k)))
    extras = {name: torch.from_numpy(values) for name, values in zip((IDS, LOG_Q, REST), said, strict=True)}
    batch = Batch(
        torch.zeros(n).long(), torch.arange(n) % V, torch.ones(n), torch.arange(n), torch.tensor([0])
    )
    return replace(batch, extras=extras)


def asking(log_q_NV: torch.Tensor):
    return lambda batch: lambda rows, log_p_BV: log_q_NV[batch.supervised()][rows].clone()


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_every_word_kept_in_float32_is_the_teacher(beta):
    torch.manual_seed(0)
    log_q, head = like_a_models(), nn.Linear(D, V)
    batch = brought_along(log_q, Coding("float32", V, V))
    results = []
    for teacher in (asking(log_q), said_in):
        hidden = torch.randn(N, D, generator=torch.Generator().manual_seed(1)).requires_grad_()
        loss = divergence(hidden, head, batch, teacher, beta=beta, block_rows=64)
        (loss.sum / loss.count).backward()
        results.append(((loss.sum / loss.count).item(), hidden.grad))
    assert results[0][0] == pytest.approx(results[1][0], abs=1e-6)
    torch.testing.assert_close(results[0][1], results[1][1], rtol=0, atol=1e-8)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_the_rest_counts_as_one_more_word(beta):
    """D of the K + 1 outcomes, value and gradient, by torch's kl_div and autograd in float64."""
    torch.manual_seed(0)
    log_q, head, k = like_a_models(), nn.Linear(D, V), 8
    batch, hidden = brought_along(log_q, Coding("float32", k, V)), torch.randn(N, D, requires_grad=True)
    loss = divergence(hidden, head, batch, said_in, beta=beta, block_rows=100)
    loss.sum.backward()

    there = hidden.detach().double().requires_grad_()
    log_p = head.double()(there).log_softmax(-1)
    ids = log_q.topk(k).indices

    def coarse(log_x: torch.Tensor) -> torch.Tensor:
        left = log_x.scatter(1, ids, -torch.inf).logsumexp(-1, keepdim=True)
        return torch.cat([log_x.gather(1, ids), left], 1)

    def kl(of, to):
        return F.kl_div(to, of, log_target=True, reduction="sum")

    p, q = coarse(log_p), coarse(log_q.double())
    m = torch.log((1 - beta) * p.exp() + beta * q.exp())
    expected = kl(q, p) if beta == 0 else kl(p, q) if beta == 1 else beta * kl(q, m) + (1 - beta) * kl(p, m)
    expected.backward()
    assert loss.sum.item() == pytest.approx(expected.item(), rel=1e-5)
    torch.testing.assert_close(hidden.grad, there.grad.float(), rtol=1e-4, atol=1e-5)


def rounding(words: int, top_k: int = 32) -> tuple[float, float]:
    """(KL of what was rounded from what was not, the loss's difference), nats a token, for a student near by."""
    log_q = like_a_models(words=words)
    exact, coded = (brought_along(log_q, Coding(name, top_k, words)) for name in ("float32", "compact"))
    q, r = (torch.cat([b.extras[LOG_Q], b.extras[REST][:, None]], 1).double() for b in (exact, coded))
    student = (log_q + 0.7 * torch.randn(N, words, generator=torch.Generator().manual_seed(2))).log_softmax(
        -1
    )
    head = nn.Linear(words, words, bias=False)
    nn.init.eye_(head.weight)
    losses = [divergence(student, head, b, said_in, block_rows=64) for b in (exact, coded)]
    apart = [(loss.sum / loss.count).item() for loss in losses]
    return F.kl_div(r, q, log_target=True, reduction="sum").item() / N, abs(apart[0] - apart[1])


def test_compact_costs_less_than_a_thousandth_of_a_nat():
    cost, difference = rounding(V)
    assert 0 <= cost < 1e-4 and difference < 1e-3
    assert Coding("compact", 32, 163_840).nbytes == 118 and Coding("compact", 32, 262_144).nbytes <= 120


def test_control_arm_coarser_steps_cost_more(monkeypatch):
    from unfreeze.teach import coding

    monkeypatch.setattr(coding, "STEPS", 4)
    cost, difference = rounding(V)
    assert cost > 1e-3 and difference > 1e-3


def test_what_is_written_is_read():
    coding = Coding("compact", 5, 70_000)
    ids = np.array([[69_999, 0, 1, 65_536, 2]])
    log_q = np.log(np.array([[0.5, 0.2, 0.1, 0.05, 0.001]], np.float32))
    raw = coding.encode(ids, log_q, np.log([0.149]))
    assert raw.shape == (1, coding.nbytes) and coding.nbytes == (5 * (17 + 11) + 16 + 7) // 8
    back = coding.decode(raw)
    assert back[0].tolist() == ids.tolist()
    np.testing.assert_allclose(back[1], log_q, atol=0.012)
    assert np.exp(back[1]).sum() + np.exp(back[2]).sum() == pytest.approx(1, abs=1e-6)


# --- runs

WORDS = ["--tokens-per-step", 128, "--dtype", "float32", "--optimizer.warmup", 0]
RUN = [
    "--steps",
    3,
    "--learning-rate",
    "5e-3",
    "--watch.samples",
    0,
    "--lora.rank",
    2,
    "--lora.targets",
    "attention",
]


def command(*arguments, rows, code=0):
    given = ["distill", "--json", "--quiet", "--model", TINY_K2, "--data", rows, *WORDS, *arguments]
    assert cli.main(list(map(str, given))) == code


def write(path: Path, count: int) -> Path:
    turns = [{"prompt": f"What is {n}?", "completion": f"{n}, it is. Hmm."} for n in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in turns))
    return path


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return write(tmp_path_factory.mktemp("rows") / "rows.jsonl", 12)


@pytest.fixture(scope="module")
def store(tmp_path_factory, run_dir, rows):
    """Of run_dir, every word in float32."""
    folder = tmp_path_factory.mktemp("store") / "said"
    command(
        "--teacher",
        run_dir,
        "--prepare",
        folder,
        "--distillation.coding",
        "float32",
        "--distillation.top-k",
        4096,
        rows=rows,
    )
    return folder


def losses(run: Path) -> list[float]:
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [event["loss"] for event in events if event["kind"] == "train"]


def test_a_run_from_the_store_is_the_run_that_asks(store, run_dir, rows, tmp_path, monkeypatch):
    command("--teacher", run_dir, "--out", tmp_path / "asks", *RUN, rows=rows)
    opened = []
    from unfreeze.generate import open as opening

    monkeypatch.setattr(
        opening, "open_model", lambda *a, real=opening.open_model, **o: opened.append(1) or real(*a, **o)
    )
    # another order of the rows, and another packing of them, are found too
    command("--teacher", store, "--out", tmp_path / "reads", *RUN, rows=rows)
    assert len(opened) == 1  # the student alone
    assert losses(tmp_path / "reads") == pytest.approx(losses(tmp_path / "asks"), abs=1e-6)
    mixed = tmp_path / "mixed.jsonl"
    mixed.write_text("".join(reversed(rows.read_text().splitlines(True))))
    command("--teacher", store, "--out", tmp_path / "mixed", *RUN, "--training.packing", "none", rows=mixed)


def test_what_does_not_fit_is_refused(store, rows, tmp_path, capsys):
    more = write(tmp_path / "more.jsonl", 14)
    command("--teacher", store, "--out", tmp_path / "a", *RUN, rows=more, code=2)
    assert "lacks 2 of 14 documents of this data (first: row 13)" in capsys.readouterr().err
    command("--teacher", store, "--out", tmp_path / "b", *RUN, "--temperature", 2, rows=rows, code=2)
    assert "was made at temperature 1, and 2 is requested" in capsys.readouterr().err

    other = tmp_path / "other"
    other.mkdir()
    head = json.loads((store / "teacher.json").read_text())
    for field, value, says in (
        ("vocabulary", {**head["vocabulary"], "hash": "0" * 12}, "has another vocabulary"),
        ("whole", False, "is incomplete"),
        ("format", 9, "format is 9"),
    ):
        (other / "teacher.json").write_text(json.dumps({**head, field: value}))
        command("--teacher", other, "--out", tmp_path / "c", *RUN, rows=rows, code=2)
        assert says in capsys.readouterr().err
    part = next(store.glob("part-*"))
    tensors = load_file(part)
    save_file(tensors | {"counts": tensors["counts"] + 1}, other / part.name)
    (other / "teacher.json").write_text(json.dumps(head))
    command("--teacher", other, "--out", tmp_path / "c", *RUN, rows=rows, code=2)
    assert "rows of" in capsys.readouterr().err
    assert not (tmp_path / "c" / "state").exists()


def test_preparing_goes_on_where_it_was_killed_and_asks_nothing_twice(
    store, run_dir, rows, tmp_path, forkserver
):
    """A process that is killed behind its second part; the rest is what the store that was made at once has."""
    folder = tmp_path / "said"
    script = (
        "import os, signal, sys; from unfreeze import cli; from unfreeze.teach import store\n"
        "store.PART_TOKENS, real = 8, store.StoreWriter.flush\n"
        "def flush(writing):\n    real(writing)\n    if writing._number == 2:"
        " os.kill(os.getpid(), signal.SIGKILL)\n"
        "store.StoreWriter.flush = flush; sys.exit(cli.main(sys.argv[1:]))"
    )
    given = [
        "--teacher",
        run_dir,
        "--prepare",
        folder,
        "--distillation.coding",
        "float32",
        "--distillation.top-k",
        4096,
    ]
    line = [
        "distill",
        "--json",
        "--quiet",
        "--model",
        TINY_K2,
        "--data",
        rows,
        *WORDS[2:],
        "--tokens-per-step",
        32,
        *given,
    ]
    assert forkserver.run(["-c", script, *line]).returncode == -signal.SIGKILL
    assert not json.loads((folder / "teacher.json").read_text())["whole"]
    before = {path: path.read_bytes() for path in folder.glob("part-*")}
    assert len(before) == 2
    command(*given, rows=rows)
    assert all(path.read_bytes() == content for path, content in before.items())

    whole = json.loads((folder / "teacher.json").read_text())
    assert whole["whole"] and (whole["top_k"], whole["documents"]) == (whole["vocabulary"]["size"], 12)
    coding = Coding("float32", whole["top_k"], whole["top_k"])

    def said(folder):
        """Key -> the log q of every word, of each token."""
        found = {}
        for path in sorted(folder.glob("part-*")):
            tensors = load_file(path)
            for key, raw in zip(
                tensors["keys"], tensors["rows"].split(tensors["counts"].tolist()), strict=True
            ):
                ids, log_q, _ = map(torch.from_numpy, coding.decode(raw.numpy()))
                found[key.numpy().tobytes()] = torch.zeros(log_q.shape).scatter_(1, ids.long(), log_q)
        return found

    once, again = said(store), said(folder)
    assert once.keys() == again.keys()
    for key, log_q in once.items():  # packed otherwise, so summed in another order
        torch.testing.assert_close(again[key], log_q, rtol=0, atol=2e-5)


def test_another_teacher_does_not_go_on_in_the_folder(store, run_dir, rows, tmp_path, capsys):
    command(
        "--teacher",
        run_dir,
        "--prepare",
        store,
        "--distillation.coding",
        "float32",
        "--distillation.top-k",
        7,
        rows=rows,
        code=2,
    )
    assert "belongs to another top_k" in capsys.readouterr().err
    command("--teacher", store, "--prepare", tmp_path / "x", rows=rows, code=2)
    assert "--prepare needs a teacher" in capsys.readouterr().err


def test_bytes_that_changed_on_disk_are_refused_when_they_are_read(store, rows, tmp_path, capsys):
    """Control arm: the store as it was written trains (above). A bit of a probability is seen as one of an id is."""
    other = tmp_path / "other"
    shutil.copytree(store, other)
    (part,) = other.glob("part-*")
    content = bytearray(part.read_bytes())
    content[-1000] ^= 1  # the tensors' bytes are last
    part.write_bytes(content)
    command("--teacher", other, "--out", tmp_path / "a", *RUN, rows=rows, code=2)
    assert "was changed on disk" in capsys.readouterr().err
    head = json.loads((other / "teacher.json").read_text())
    (other / "teacher.json").write_text(json.dumps({**head, "vocabulary": {"size": "many"}}))
    command("--teacher", other, "--out", tmp_path / "a", *RUN, rows=rows, code=2)
    assert "vocabulary is {'size': 'many'}, which is not read" in capsys.readouterr().err


def test_a_folder_has_one_writer_and_one_teacher(run_dir, rows, tmp_path, capsys):
    """Two saves of one run have the same name and headers; their bytes tell them apart."""
    given = ["--distillation.coding", "float32", "--distillation.top-k", 4, "--prepare"]
    with one_writer(tmp_path / "busy"):
        command("--teacher", run_dir, *given, tmp_path / "busy", rows=rows, code=2)
        assert "another process is writing" in capsys.readouterr().err
    command("--teacher", run_dir, *given, rows, rows=rows, code=2)
    assert "is a file, not a folder" in capsys.readouterr().err

    for name, changed in (("a", False), ("b", True)):
        shutil.copytree(TINY_K2, tmp_path / name / "model")
        path = tmp_path / name / "model" / "model.safetensors"
        tensors = load_file(path)
        scale = 1.5 if changed else 1.25  # neither is the student itself
        save_file({n: t * scale if t.is_floating_point() else t for n, t in tensors.items()}, path)
    command("--teacher", tmp_path / "a" / "model", *given, tmp_path / "said", rows=rows)
    capsys.readouterr()
    command("--teacher", tmp_path / "b" / "model", *given, tmp_path / "said", rows=rows, code=2)
    assert "belongs to another teacher" in capsys.readouterr().err


def test_a_teacher_that_says_nan_is_refused_with_the_row_and_impossible_words_are_kept(store, tmp_path):
    """Packed to bits NaN would be some probability. Control arm: the same without NaN is written, -inf too."""
    from unfreeze.core.errors import CheckpointError
    from unfreeze.data import Example, pack
    from unfreeze.job.asking import ask
    from unfreeze.teach.store import StoreParts, StoreWriter

    examples = [Example([1, 2, 3, 4], [0.0, 0.0, 1.0, 1.0], row) for row in (7, 8)]
    for coding in (Coding("compact", 3, 16), Coding("float32", 3, 16)):
        log_q_NV = torch.zeros(4, 16).log_softmax(-1)
        log_q_NV[0] = torch.tensor([0.0, *[-torch.inf] * 15])
        folder = tmp_path / coding.name

        def says(batch, log_q_NV=log_q_NV):
            return lambda rows, like: log_q_NV[rows].clone()

        with one_writer(folder):
            writing = StoreWriter(folder, json.loads((store / "teacher.json").read_text()), coding)
            ask(writing, says, examples, pack(examples))
            writing.flush()
            _, log_q, _ = coding.decode(StoreParts(folder, coding).rows(examples[0].checksum))
            assert np.isfinite(log_q).all() and log_q[0, 0] == pytest.approx(0) and (log_q[0, 1:] < -30).all()
            log_q_NV[2, 5] = torch.nan
            with pytest.raises(CheckpointError, match="NaN at a token of row 8"):
                ask(writing, says, examples, pack(examples))


def test_log_softmax_of_half_precision_is_float32():
    assert log_softmax(torch.zeros(1, 3).bfloat16(), 2.0, torch.float32).dtype == torch.float32
