"""`unfreeze prefer` from end to end on packed experts: the first loss is what plain torch says, what it is compared
with is the model as it began, and a run goes on, holds out and reports as every run does."""

import json
import math
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import unfreeze
from unfreeze import cli
from unfreeze.commands.demo import TINY_K2
from unfreeze.core.errors import UserError
from unfreeze.data import encode_files, load_tokenizer, pack
from unfreeze.job.watch import signs
from unfreeze.job.watch.signs import WINDOW, by_length, falls
from unfreeze.objectives.preference import WITHOUT_REFERENCE

WORDS = [
    "--tokens-per-step",
    192,
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


def write(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def some(count: int, first: int = 0) -> list[dict]:
    return [
        {"prompt": f"What is {n}?", "chosen": f"{n}, it is. Hmm.", "rejected": f"It is the number {n}."}
        for n in range(first, first + count)
    ]


@pytest.fixture(scope="module", autouse=True)
def fewer_layers(two_layers):
    """Runs of this file train the first two of tiny-k2's four layers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "TINY_K2", two_layers)
        yield


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> Path:
    return write(tmp_path_factory.mktemp("rows") / "pairs.jsonl", some(16))


@pytest.fixture
def prefer(capsys, rows, tmp_path):
    def run(*arguments, code=0, out=tmp_path / "run", steps=2, data=rows, small=SMALL, model=TINY_K2):
        given = ["--model", model, "--data", data, "--out", out, "--steps", steps, *WORDS, *small]
        assert cli.main(list(map(str, ["prefer", "--json", *given, *arguments]))) == code
        said = capsys.readouterr()
        return said.err if code else json.loads(said.out.splitlines()[-1])

    return run


def events(run, kind: str) -> list[dict]:
    found = [json.loads(line) for line in (Path(run) / "events.jsonl").read_text().splitlines()]
    return [event for event in found if event["kind"] == kind]


def sums(model, path: Path) -> list[tuple[float, float, int, int]]:
    """(log p of chosen, of rejected, their tokens) of every pair, in float64 by plain torch."""
    found = []
    for example in encode_files([path], load_tokenizer(TINY_K2), 96, answers="pairs").examples:
        both = []
        for document in example.documents():
            batch = pack([document])
            with torch.no_grad():
                logp = model.logits(model.hidden(batch)).double().log_softmax(-1)
            each = logp.gather(1, batch.targets_T[:, None])[:, 0] * batch.weights_T
            both.append((float(each.sum()), int(batch.weights_T.sum())))
        (w, n_w), (v, n_v) = both
        found.append((w, v, n_w, n_v))
    return found


def test_dpo_on_packed_experts_begins_at_log_two_and_prefers_what_was_chosen(prefer, tmp_path):
    held_out = write(tmp_path / "held.jsonl", some(6, 50))
    result = prefer("--validation", held_out, steps=10)
    train, evals = events(result["run"], "train"), events(result["run"], "eval")
    # the policy begins as its own reference: equal to the bit, since its adapters add exactly 0
    assert train[0]["loss"] == pytest.approx(math.log(2), abs=1e-7) and train[0]["margin"] == 0
    assert train[-1]["loss"] < 0.5 * math.log(2) and train[-1]["accuracy"] == 1
    assert evals[0]["loss"] == pytest.approx(math.log(2), abs=1e-7)
    assert evals[-1]["loss"] < evals[0]["loss"] and evals[-1]["accuracy"] > 0.8
    assert set(evals[-1]) >= {"loss", "accuracy", "margin", "tokens"} and "perplexity" not in evals[-1]
    # every group that was asked for learned, and the page shows both answers' probabilities
    assert result["receipt"]["experts"]["trained"] > 0 and result["receipt"]["experts"]["moved"] > 0
    plan = json.loads((Path(result["run"]) / "plan.json").read_text())
    assert "second model" not in plan["terms"]  # the adapters are switched off
    page = (Path(result["run"]) / "report.html").read_text()
    for words in ("Margin of rewards", "Log-probability of chosen answers", "Tokens of rejected answers"):
        assert words in page
    # the margin after training, from the trained model and the base by plain torch
    trained, base = (
        unfreeze.load(result["run"], dtype="float32").decoder,
        unfreeze.load(TINY_K2, dtype="float32").decoder,
    )
    pairs = zip(sums(trained, held_out), sums(base, held_out), strict=True)
    margin = sum(0.1 * ((w - v) - (w0 - v0)) for (w, v, *_), (w0, v0, *_) in pairs) / 6
    assert evals[-1]["margin"] == pytest.approx(margin, rel=1e-4)


@pytest.mark.parametrize("loss", WITHOUT_REFERENCE)
def test_losses_without_a_reference_are_what_plain_torch_says(loss, prefer, tmp_path):
    few = write(tmp_path / "few.jsonl", some(2))
    result = prefer("--loss", loss, data=few, steps=6)
    beta = {"simpo": 2.0, "orpo": 0.1}[loss]
    each = []
    for w, v, n_w, n_v in sums(unfreeze.load(TINY_K2, dtype="float32").decoder, few):
        mean_w, mean_v = w / n_w, v / n_v
        if loss == "simpo":
            each.append(math.log1p(math.exp(-(beta * (mean_w - mean_v) - 1.0))))
        else:
            odds = [mean - math.log(1 - math.exp(mean)) for mean in (mean_w, mean_v)]
            each.append(-mean_w + beta * math.log1p(math.exp(odds[1] - odds[0])))
    train = events(result["run"], "train")
    assert train[0]["loss"] == pytest.approx(sum(each) / 2, rel=1e-4)
    assert train[-1]["loss"] < train[0]["loss"]


@pytest.mark.parametrize("loss", ["ipo", "kto"])
def test_ipo_and_kto_learn(loss, prefer, tmp_path):
    """KTO also of rows with a label; its z is 0 at the start, and its loss 1/2."""
    data = write(tmp_path / f"{loss}.jsonl", some(8))
    if loss == "kto":
        labels = [
            {"prompt": row["prompt"], "completion": row[name], "label": name == "chosen"}
            for row in some(8)
            for name in ("chosen", "rejected")
        ]
        data = write(data, labels)
    train = events(prefer("--loss", loss, data=data, steps=8)["run"], "train")
    first = {"ipo": (1 / (2 * 0.1)) ** 2, "kto": 0.5}[loss]
    assert train[0]["loss"] == pytest.approx(first, rel=1e-6)
    assert train[-1]["loss"] < 0.97 * train[0]["loss"] and train[-1]["margin"] > 0
    assert ("kl" in train[0]) == (loss == "kto")


def test_a_run_that_is_broken_off_goes_on_to_the_bit(prefer, tmp_path):
    extra = ["--save.allow-changed", "steps", "--optimizer.schedule", "constant"]
    whole = prefer(*extra, steps=5, out=tmp_path / "whole")
    prefer(*extra, steps=2, out=tmp_path / "parts")
    prefer(*extra, steps=5, out=tmp_path / "parts")
    losses = [[event["loss"] for event in events(run, "train")] for run in (whole["run"], tmp_path / "parts")]
    assert losses[0] == losses[1]
    files = [
        Path(run) / "adapter" / "adapter_model.safetensors" for run in (whole["run"], tmp_path / "parts")
    ]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_going_on_from_an_adapter_compares_with_that_adapter(prefer, tmp_path, rows):
    """The model as it began: margin 0 and log 2 again. Control arm: with the base the margin would not be 0."""
    first = prefer(steps=4, out=tmp_path / "first")
    moved = events(first["run"], "train")[-1]["margin"]
    again = prefer("--adapter", first["run"], steps=2, out=tmp_path / "again", small=[])
    train = events(again["run"], "train")
    assert abs(moved) > 0.05
    assert train[0]["margin"] == pytest.approx(0, abs=1e-5)
    assert train[0]["loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert train[1]["margin"] > 0


@pytest.mark.nightly
def test_two_processes_equal_one(prefer, rows, tmp_path):
    one = prefer("--micro-batches", 2, out=tmp_path / "one", steps=3)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["--model", TINY_K2, "--data", rows, "--out", tmp_path / "two", "--steps", 3, *WORDS, *SMALL]
    words += ["--micro-batches", 2, "--device", "cpu", "--quiet"]
    started = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    started += ["--master-addr", "127.0.0.1", "--master-port", str(port), "-m", "unfreeze", "prefer"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [*started, *map(str, words)], check=True, timeout=120, env=environment, capture_output=True
    )
    for single, double in zip(events(one["run"], "train"), events(tmp_path / "two", "train"), strict=True):
        for name in ("loss", "margin", "accuracy", "logp_chosen", "length_rejected"):
            assert double[name] == pytest.approx(single[name], rel=1e-5, abs=1e-5), name


BAD = {
    "equal": ({"prompt": "a", "chosen": "b", "rejected": "b"}, [], "the same answer"),
    "empty": ({"prompt": "a", "chosen": "b", "rejected": ""}, [], "field rejected is empty"),
    "no pair": ({"prompt": "a", "completion": "b"}, [], "not a pair of answers"),
    "a label for dpo": ({"prompt": "a", "completion": "b", "label": True}, [], "compares pairs"),
    "no boolean": ({"prompt": "a", "completion": "b", "label": "so-so"}, ["--loss", "kto"], "expected true or false"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_rows_end_in_one_line_before_a_weight_is_read(name, prefer, tmp_path):
    row, words, said = BAD[name]
    error = prefer(
        *words, data=write(tmp_path / "bad.jsonl", [*some(1), row] if not words else [row]), code=2
    )
    assert said in error and "Traceback" not in error and len(error.strip().splitlines()) <= 2
    assert not list(tmp_path.glob("run/state/*"))


def test_fields_of_another_loss_and_python(rows, tmp_path):
    with pytest.raises(UserError, match="gamma needs loss = simpo"):
        unfreeze.prefer(model=TINY_K2, data=str(rows), gamma=1.0, out=str(tmp_path / "a"), quiet=True)
    run = unfreeze.prefer(
        model=TINY_K2, data=some(4), loss="simpo", steps=1, rank=2, dtype="float32", out=str(tmp_path / "b"), samples=1,
        tokens_per_step=192, quiet=True,
    )  # fmt: skip
    assert len(run.losses) == 1 and [e for e in run.events if e["kind"] == "sample"]
    # its own hooks stay beside those of the caller
    assert json.loads((run.path / "resolved_config.json").read_text())["preference.beta"] == 2.0


def steps(name: str, values, **beside) -> list[dict[str, float]]:
    return [{name: value, **{key: of[i] for key, of in beside.items()}} for i, value in enumerate(values)]


def test_chosen_answers_that_become_less_likely_are_said_once():
    draw = torch.Generator().manual_seed(0)
    noise = torch.randn(80, generator=draw).tolist()
    for slope, said in (
        (-0.01, True),
        (0.0, False),
        (0.01, False),
    ):  # rewards: beta 0.1, so 8 nats over the run
        rewards = [slope * i + 0.02 * x for i, x in enumerate(noise)]
        found = falls(steps("reward_chosen", rewards, reward_rejected=[-0.05 * i for i in range(80)]), 0.1)
        assert bool(found) == said, slope
    assert falls(steps("reward_chosen", [0.0] * WINDOW + [-9.0] * (WINDOW - 1)), 0.1) == ""  # too early
    # of pure noise nothing is said: 200 runs of random pairs
    wrong = 0
    for seed in range(200):
        random = torch.randn(64, generator=torch.Generator().manual_seed(seed)) * 5 - 60
        wrong += bool(falls(steps("logp_chosen", random.tolist(), logp_rejected=random.tolist()), 0.0))
    assert wrong == 0


def test_length_that_explains_the_choice_is_said():
    lengths = {"length_chosen": [80.0] * 20, "length_rejected": [40.0] * 20}
    longer, agrees = [0.9] * 20, [0.95] * 20
    seen = steps("longer", longer, by_length=agrees, **lengths)
    assert "longer one in 90 % of the pairs (80 tokens to 40)" in by_length(seen)
    assert "--loss simpo" in by_length(seen, 0.1)
    assert by_length(seen, 0.0).endswith("balance the lengths")  # simpo itself
    # control arms: balanced lengths; a model that does not follow length; and the shorter ones
    assert by_length(steps("longer", [0.5] * 20, by_length=agrees, **lengths)) == ""
    assert by_length(steps("longer", longer, by_length=[0.5] * 20, **lengths)) == ""
    assert "the shorter one" in by_length(steps("longer", [0.1] * 20, by_length=[0.1] * 20, **lengths))


def test_a_run_says_its_sign_once_and_not_again_where_it_goes_on(prefer, tmp_path, monkeypatch):
    monkeypatch.setattr(signs, "WINDOW", 2)
    words = ["--save.allow-changed", "steps", "--optimizer.schedule", "constant"]
    rows = [{**row, "chosen": row["chosen"] * 3} for row in some(8)]
    data = write(tmp_path / "long.jsonl", rows)
    for count in (6, 9):
        run = prefer(*words, steps=count, data=data, out=tmp_path / "long")["run"]
    said = [e["message"] for e in events(run, "warning") if e["message"].startswith(signs.LENGTH)]
    assert len(said) == 1 and "in 100 % of the pairs" in said[0]


@pytest.mark.parametrize(
    "loss, flags, options",
    [
        (
            "dpo",
            ["--preference.beta", 0.3, "--preference.label-smoothing", 0.2],
            {"beta": 0.3, "label_smoothing": 0.2},
        ),
        ("simpo", ["--preference.gamma", 0.4], {"beta": 2.0, "gamma": 0.4}),
        (
            "kto",
            ["--preference.desirable-weight", 2, "--preference.undesirable-weight", 3],
            {"beta": 0.1, "desirable_weight": 2.0, "undesirable_weight": 3.0},
        ),
    ],
)
def test_each_flag_reaches_the_loss(loss, flags, options):
    """A loss without one of them runs and learns something else: no figure of a short run tells."""
    from unfreeze.config.parse import parse
    from unfreeze.config.prefer import Config
    from unfreeze.recipes.prefer import parts

    given = ["--model", "m", "--data", "d", "--loss", loss, *flags]
    made = parts(parse(Config, list(map(str, given)), command="prefer", description=""))
    minimised = made.objective if made.second is None else made.second.minimise(print)
    assert minimised.keywords.items() >= {"kind": loss, **options}.items()
    assert minimised.keywords.get("reference") is (None if loss == "simpo" else print)
