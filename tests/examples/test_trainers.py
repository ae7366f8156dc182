"""examples/torch_ddp.py, deepspeed_zero3.py and lightning_module.py: published Qwen2 weights in our modules under
loops of others give the losses of `unfreeze sft --train all`, and no parameter is left empty (docs/why/trust.md L8)."""

import json
import os
import re
import runpy
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen2Config, Qwen2ForCausalLM

import unfreeze
from unfreeze.drill.sandbox import TINY_K2

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES, HERE = ROOT / "examples", Path(__file__).parent / "trainers"
PAGE = ROOT / "docs" / "howto" / "other_trainers.md"
SCRIPTS = ("torch_ddp", "deepspeed_zero3", "lightning_module")
STEPS = 4
SETTINGS = {"steps": STEPS, "tokens_per_step": 1024, "micro_batches": 2, "learning_rate": 1e-3, "seed": 3}
QWEN2_5_7B = {  # what its config.json says beside its sizes (../shared/data/configs/Qwen2.5-7B.json)
    "hidden_act": "silu",
    "attention_dropout": 0.0,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
}
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_window_layers": 2,
}


def losses(said):
    return [float(loss) for loss in re.findall(r"step \d+/\d+  loss ([0-9.]+)", said)]


def close(values, expected):
    return values == pytest.approx(expected, rel=1e-5)


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory):
    """A Qwen2 as transformers writes it, with biases that are not zero, and tiny-k2's tokenizer."""
    folder = tmp_path_factory.mktemp("qwen2")
    vocab = json.loads((TINY_K2 / "config.json").read_text())["vocab_size"]
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(**QWEN2_5_7B, **SMALL, vocab_size=vocab, bos_token_id=0, eos_token_id=1)
    )
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)
    for name in ("tiktoken.model", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(TINY_K2 / name, folder)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Rows of unequal length: the two micro-batches of a step have unequal numbers of supervised tokens."""
    path = tmp_path_factory.mktemp("data") / "chat.jsonl"
    lines = (TINY_K2 / "yoda_train.jsonl").read_text(encoding="utf-8").splitlines()[:120]
    long = {"question": "Count.", "answer": "one two three four five " * 16}
    path.write_text("\n".join([*lines, *[json.dumps(long)] * 6]) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def own(qwen2, data, tmp_path_factory):
    """The run whose losses all the others must have."""
    out = tmp_path_factory.mktemp("own") / "run"
    more = {"train": "all", "dtype": "float32", "schedule": "constant", "warmup": 0, "threads": 1}
    return unfreeze.sft(model=qwen2, data=data, out=out, samples=0, quiet=True, **more, **SETTINGS)


def start(processes, bin, script, *arguments, seconds=240):
    """A script as a user starts it. -> what it said on stdout. One that hangs is ended, with its processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    torchrun = [bin / "python", "-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    process = subprocess.Popen(
        [*torchrun, "--master-port", port, str(script), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # where a virtual environment has no unfreeze of its own, it is this one; DeepSpeed compiles an exchange
        # for CPUs at its first start, a minute of g++: it is kept beside the virtual environment's programs
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT / "src"),
            "TORCH_EXTENSIONS_DIR": str(bin.parent / "torch_extensions"),
        },
    )
    try:
        said, error = process.communicate(timeout=seconds)
    finally:
        if process.poll() is None:
            for each in [*psutil.Process(process.pid).children(recursive=True), process]:
                each.kill()
    assert process.returncode == 0, error[-4000:]
    return said


def flags(qwen2, data, out):
    given = {"model": qwen2, "data": data, "out": out, **SETTINGS}
    return [text for name, value in given.items() for text in (f"--{name.replace('_', '-')}", str(value))]


def same_weights(folder, own):
    """Updates of gradients that differ in rounding: AdamW's first steps move by the rate, whatever the size."""
    ours, theirs = (load_file(path / "model" / "model.safetensors") for path in (folder, own.path))
    assert ours.keys() == theirs.keys()
    return all(torch.allclose(ours[name], theirs[name], rtol=0, atol=1e-5) for name in ours)


def test_two_processes_of_a_plain_ddp_loop_have_the_losses_of_a_run(qwen2, data, own, tmp_path, forkserver):
    """Forked as torchrun starts them; by torchrun itself start the loops of others, below."""
    run = [HERE / "forked.py", "2", EXAMPLES / "torch_ddp.py", *flags(qwen2, data, tmp_path)]
    ended = forkserver.run(run, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=240)
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert len(own.losses) == STEPS and close(losses(ended.stdout), own.losses)
    assert same_weights(tmp_path, own)


@pytest.mark.parametrize(
    "line, bug",
    [
        ("count = max(sum(float(batch.weights_T.sum()) for batch in drawn), 1.0)", None),
        ("model(batch.to(device)) / count", "model(batch.to(device)) / float(batch.weights_T.sum()) / 2"),
    ],
    ids=["as it is, in one process", "a mean of means"],
)
def test_a_mean_per_micro_batch_is_seen_in_the_losses(
    qwen2, data, own, tmp_path, monkeypatch, capsys, line, bug
):
    source = (EXAMPLES / "torch_ddp.py").read_text(encoding="utf-8")
    assert source.count(line) == 1
    (tmp_path / "script.py").write_text(source.replace(line, bug or line), encoding="utf-8")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        alone = {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free.getsockname()[1]}
    for name, value in alone.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(sys, "argv", ["script.py", *flags(qwen2, data, tmp_path)])
    runpy.run_path(str(tmp_path / "script.py"), run_name="__main__")
    assert close(losses(capsys.readouterr().out), own.losses) == (bug is None)


@pytest.mark.parametrize("name", SCRIPTS)
def test_each_is_short_flat_and_has_a_loop_of_its_own(name):
    source = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
    assert len(source.splitlines()) <= 135 and max(map(len, source.splitlines())) <= 110
    assert not any(part in source for part in ("unfreeze.job", "unfreeze.api", "unfreeze.train", "recipes"))


# --- adapters on packed experts, with expert parallelism

PACKED = {"steps": 2, "tokens_per_step": 256, "micro_batches": 4, "learning_rate": 1e-3, "rank": 2, "seed": 3}


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """The run of one process whose losses and norms the loop must have."""
    out, data = tmp_path_factory.mktemp("packed") / "run", TINY_K2 / "yoda_train.jsonl"
    more = {"dtype": "float32", "schedule": "constant", "warmup": 0, "threads": 1, "alpha": 32.0}
    return unfreeze.sft(model=TINY_K2, data=data, out=out, samples=0, quiet=True, **more, **PACKED)


@pytest.fixture(scope="module")
def said(forkserver):
    """Two copies of two processes that share the experts."""
    flags = [text for name, value in PACKED.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    run = [HERE / "forked.py", "4", EXAMPLES / "expert_parallel.py", *flags, "--expert-parallel", "2"]
    ended = forkserver.run(run, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=120)
    assert ended.returncode == 0, ended.stderr[:4000]
    return ended.stdout


def test_data_and_expert_parallelism_have_the_losses_of_one_process(packed, said):
    assert len(packed.losses) == 2 and close(losses(said), packed.losses)


def test_the_norm_counts_every_gradient_once(packed, said):
    norms = [float(norm) for norm in re.findall(r"norm ([0-9.]+)", said)]
    events = [json.loads(line) for line in (packed.path / "events.jsonl").read_text().splitlines()]
    assert norms == pytest.approx([e["grad_norm"] for e in events if e["kind"] == "train"], rel=1e-4)


def test_what_the_processes_sum_is_on_their_device():
    """nccl takes no tensor of the host."""
    script = runpy.run_path(str(EXAMPLES / "expert_parallel.py"))
    summed = []
    group = SimpleNamespace(sum_=summed.extend)
    mesh = SimpleNamespace(all=group, held=lambda name: SimpleNamespace(summed=group, copies=2))
    script["sum_gradients"]({"A": torch.nn.Parameter(torch.ones(2, device="meta"))}, mesh)
    assert [tensor.device.type for tensor in summed] == ["meta", "meta"]
    assert "total = torch.zeros((), device=device)" in (EXAMPLES / "expert_parallel.py").read_text()


def test_it_is_short_and_has_no_part_of_our_loop():
    source = (EXAMPLES / "expert_parallel.py").read_text(encoding="utf-8")
    assert len(source.splitlines()) <= 135 and max(map(len, source.splitlines())) <= 110
    assert not any(part in source for part in ("unfreeze.job", "unfreeze.api", "unfreeze.train", "recipes"))


# --- beside DeepSpeed and Lightning (make nightly)


@pytest.mark.others("trainers")
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("load", ["before", "gathered"])
def test_zero3_has_the_losses_of_a_run(qwen2, data, own, tmp_path, programs, load, processes):
    arguments = [*flags(qwen2, data, tmp_path), "--load", load]
    said = start(processes, programs, EXAMPLES / "deepspeed_zero3.py", *arguments, seconds=600)
    assert close(losses(said), own.losses) and same_weights(tmp_path, own)
    assert said.count("lm_head is torch.Size([0]) here, torch.Size([1536, 64]) in all") == processes


@pytest.mark.others("trainers")
@pytest.mark.parametrize("strategy, processes", [("auto", 1), ("ddp", 2)])
def test_lightning_has_the_losses_of_a_run(qwen2, data, own, tmp_path, programs, strategy, processes):
    more = ["--strategy", strategy, "--processes", str(processes)]
    said = start(processes, programs, EXAMPLES / "lightning_module.py", *flags(qwen2, data, tmp_path), *more)
    assert close(losses(said), own.losses) and same_weights(tmp_path, own)


def whole(processes, programs, script, qwen2):
    said = start(processes, programs, HERE / "whole_weights.py", script, qwen2, seconds=600)
    return json.loads(next(line for line in said.splitlines() if line.startswith('{"parameters"')))


@pytest.mark.others("trainers")
def test_under_zero3_every_weight_is_the_files_bit_for_bit(qwen2, programs):
    found = whole(2, programs, EXAMPLES / "deepspeed_zero3.py", qwen2)
    assert found["parameters"] == 27 and found["before"] == found["gathered"] == []
    assert found["sizes outside of a forward"] == [[0]]
    # our own loader does not fill nothing: it says so
    assert "shape" in found["place on a cut model"] or "[0]" in found["place on a cut model"]


@pytest.mark.others("trainers")
@pytest.mark.parametrize(
    "line, bug",
    [
        ("modifier_rank=0", "modifier_rank=None"),
        ("zero.Init(config_dict_or_path=ZERO3)", "zero.Init(config_dict_or_path=ZERO3, dtype=torch.float32)"),
    ],
    ids=["what was read is thrown away", "rounded to bfloat16"],
)
def test_a_hole_in_the_weights_is_seen(qwen2, programs, tmp_path, line, bug):
    source = (EXAMPLES / "deepspeed_zero3.py").read_text(encoding="utf-8")
    assert source.count(line) == 1
    (tmp_path / "script.py").write_text(source.replace(line, bug), encoding="utf-8")
    found = whole(1, programs, tmp_path / "script.py", qwen2)
    # a norm's ones and round biases are the same in bfloat16
    assert found["before"] == [] and "lm_head.weight" in found["gathered"] and len(found["gathered"]) > 13


@pytest.mark.others("trainers")
def test_lightning_refuses_fsdp_and_deepspeed_on_a_cpu_in_the_words_of_the_page(programs):
    said = subprocess.run(
        [programs / "python", str(HERE / "refusals.py")], capture_output=True, text=True, timeout=120
    )
    assert said.returncode == 0, said.stderr
    found = json.loads(said.stdout.splitlines()[-1])
    assert found["ddp"] == "trained"
    page = PAGE.read_text(encoding="utf-8")
    assert f"Lightning {found['version']}" in page
    assert all(found[name] in page for name in ("fsdp", "deepspeed")), found
