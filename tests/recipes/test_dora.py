"""`--lora.dora true` and `--lora.start pissa` from flags to folders: runs that go on, and what is refused."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from unfreeze import cli, models
from unfreeze.adapters.files import read_files
from unfreeze.checkpoint import save_checkpoint
from unfreeze.commands.demo import TINY_K2
from unfreeze.config.adapter import lora_of
from unfreeze.models.publish import published

TINY = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
WORDS = ["--tokens-per-step", "64", "--learning-rate", "2e-3", "--watch.samples", "0", "--dtype", "float32"]
KINDS = {
    "dora": ["--lora.dora"],
    "pissa": ["--lora.start", "pissa"],
    "both": ["--lora.dora", "--lora.start", "pissa_niter_4"],
}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "llama"
    config = TINY | {"vocab_size": json.loads((TINY_K2 / "config.json").read_text())["vocab_size"]}
    model = models.build(models.shape(config), dtype=torch.float32, device="cpu")
    models.initialize(model, 0)
    names = ("tiktoken.model", "tokenizer_config.json", "generation_config.json")
    extra = {name: TINY_K2 / name for name in names}
    save_checkpoint(folder, config, published(model, config), extra=extra)
    return folder


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    turns = [{"prompt": f"What is {n}?", "completion": f"{n}, it is. Hmm."} for n in range(4)]
    path.write_text("".join(json.dumps(row) + "\n" for row in turns))
    return path


def sft(*arguments, code=0):
    assert cli.main(["sft", "--quiet", *map(str, arguments), "--lora.rank", "4", *WORDS]) == code


def written(run):
    return load_file(run / "adapter/adapter_model.safetensors")


@pytest.mark.parametrize(
    "kind", ["both", *(pytest.param(k, marks=pytest.mark.nightly) for k in ("dora", "pissa"))]
)
def test_a_run_that_goes_on_equals_one_that_was_not_interrupted(kind, base, rows, tmp_path, capsys):
    common = ["--model", base, "--data", rows, *KINDS[kind]]
    sft(*common, "--out", tmp_path / "whole", "--steps", 4, "--optimizer.schedule", "constant")
    cut = [*common, "--out", tmp_path / "cut", "--optimizer.schedule", "constant"]
    sft(*cut, "--steps", 2)
    sft(*cut, "--steps", 4, "--allow-changed", "steps")
    whole, again = written(tmp_path / "whole"), written(tmp_path / "cut")
    assert whole.keys() == again.keys() and all(torch.equal(whole[name], again[name]) for name in whole)
    saved = load_file(tmp_path / "whole/state/step-000004/tensors.safetensors")
    assert any(name.startswith("after_update.") for name in saved) == (kind != "dora")

    # a changed start or kind is another run
    sft(*[word for word in cut if word not in KINDS[kind]], "--steps", 4, code=2)
    error = capsys.readouterr().err
    assert ("lora.start" if kind == "pissa" else "lora.dora") in error and "for a new run" in error

    # the receipt, and what the plan counted
    plan = json.loads((tmp_path / "whole/plan.json").read_text())
    model_parts = [t for name, t in saved.items() if name.startswith("model.")]
    assert plan["adapter_parameters"] == sum(t.numel() for t in model_parts)
    receipt = json.loads((tmp_path / "whole/receipt.json").read_text())
    groups = receipt.get("groups", receipt)
    assert all(g["connected"] for g in groups.values() if isinstance(g, dict) and g.get("trained"))


def test_another_run_goes_on_from_the_adapter(base, rows, tmp_path):
    """PiSSA's is a LoRA of twice the rank by then."""
    sft("--model", base, "--data", rows, *KINDS["both"], "--out", tmp_path / "one", "--steps", 2)
    fields = lora_of(tmp_path / "one")
    assert (fields["rank"], fields["alpha"], fields["start"], fields["dora"]) == (8, 64.0, "lora", True)
    arguments = ["sft", "--quiet", "--adapter", tmp_path / "one", "--data", rows, "--out", tmp_path / "two"]
    assert cli.main([*map(str, arguments), "--steps", "1", *WORDS]) == 0
    one, two = written(tmp_path / "one"), written(tmp_path / "two")
    assert {n: t.shape for n, t in one.items()} == {n: t.shape for n, t in two.items()}
    assert all(not torch.equal(one[name], two[name]) for name in one if "magnitude" in name)
    assert lora_of(tmp_path / "one/adapter")["dora"] is True


def test_what_cannot_be_is_refused_before_anything_is_written(base, rows, tmp_path, capsys):
    run = ["--data", rows, "--out", tmp_path / "run", "--steps", 1]
    sft("--model", TINY_K2, *run, *KINDS["dora"], code=2)
    assert "--lora.targets attention" in capsys.readouterr().err
    sft("--model", TINY_K2, *run, *KINDS["pissa"], "--place.experts", "disk", code=2)
    assert "place.experts = disk leaves some elsewhere" in capsys.readouterr().err


def in_two_processes(line):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start = f"-m torch.distributed.run --nproc-per-node 2 --master-port {port} -m unfreeze".split()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *start, *line], capture_output=True, text=True, timeout=500, env=environment
    )


def losses(run):
    events = map(json.loads, (run / "events.jsonl").read_text().splitlines())
    return [event["loss"] for event in events if event["kind"] == "train"]


@pytest.mark.nightly  # 40 s: a start of Python in two processes for each
@pytest.mark.parametrize("kind", ["dora", "dora, split", "pissa"])
def test_two_processes_equal_one(kind, rows, tmp_path):
    """Each has one of a step's two micro-batches. With a split of 2 each has half of the experts too.

    A sum of two float32 gradients is the same in either order, and m and the starts are the first process's:
    so little more than the last bit may differ.
    """
    line = [
        "sft",
        "--model",
        TINY_K2,
        "--data",
        rows,
        *WORDS[2:],
        "--tokens-per-step",
        128,
        "--device",
        "cpu",
    ]
    line += ["--micro-batches", 2, "--lora.rank", 4, "--steps", 4, "--threads", 1, "--quiet"]
    line += ["--lora.targets", "attention", *KINDS[kind.partition(",")[0]]]
    line = [*map(str, line)]
    assert cli.main([*line, "--out", str(tmp_path / "one")]) == 0
    split = ["--place.split", "2"] if "split" in kind else []
    done = in_two_processes([*line, *split, "--out", str(tmp_path / "two")])
    assert done.returncode == 0, done.stderr[-4000:]
    one, two = losses(tmp_path / "one"), losses(tmp_path / "two")
    assert two == pytest.approx(one, rel=1e-5) and len(two) == 4
    (config, mine), (other, theirs) = (read_files(tmp_path / name / "adapter") for name in ("one", "two"))
    assert config == other and mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        assert (theirs[name] - tensor).norm() <= 1e-5 * tensor.norm(), name
    if "dora" in kind:  # control: m is there, and it moved
        assert any(name.endswith("lora_magnitude_vector") for name in mine)


@pytest.mark.nightly  # two starts of Python in two processes
@pytest.mark.parametrize("kind", ["dora", "pissa"])
def test_weights_that_lie_elsewhere_are_refused_in_every_process(kind, rows, tmp_path):
    line = ["sft", "--model", TINY_K2, "--data", rows, *WORDS, "--steps", 1, "--lora.targets", "attention"]
    line += [*KINDS[kind], "--out", tmp_path / "run", "--place.rest", "peers", "--micro-batches", 2]
    done = in_two_processes([*map(str, line)])
    name = "lora.dora" if kind == "dora" else "lora.start = pissa"
    assert done.returncode and f"{name} starts from whole weights, and place.rest = peers" in done.stderr
    assert not list((tmp_path / "run").glob("state/*"))
