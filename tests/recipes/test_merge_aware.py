"""Runs trained through the rounding of their merge: the merged folder has the run's held-out loss."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parent))
from runs import Stopped, adapter, of_kind, stopping_at

import unfreeze
from unfreeze import cli
from unfreeze.core.errors import ConfigError

pytestmark = pytest.mark.usefixtures("fewer_layers")

WORDS = {
    "steps": 4,
    "rank": 4,
    "tokens_per_step": 128,
    "learning_rate": 2e-2,
    "lora.targets": ["experts"],
    "samples": 0,
    "dtype": "float32",
    "threads": 1,
    "quiet": True,
}


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    turns = [{"prompt": f"What is {n}?", "completion": f"{n}, it is. Hmm."} for n in range(12)]
    path.write_text("".join(json.dumps(row) + "\n" for row in turns))
    return path


@pytest.fixture
def sft(rows, held_rows, tmp_path):
    def run(out="run", **fields):
        words = {"model": unfreeze.TINY_K2, "data": str(rows), "validation": str(held_rows)}
        return unfreeze.sft(**{**words, "out": tmp_path / out, **WORDS, **fields})

    return run


def merged(run, capsys, *flags) -> tuple[dict, str]:
    """The result of `unfreeze merge`, and what it said."""
    out = run.path / f"merged{len(list(run.path.glob('merged*')))}"
    assert cli.main(["merge", str(run.path), "--out", str(out), "--json", *flags]) == 0
    said = capsys.readouterr()
    return json.loads(said.out.splitlines()[-1]), said.err


def losses(run) -> dict[int, float]:
    return {event["step"]: event["loss"] for event in of_kind(run, "eval")}


@pytest.mark.parametrize(
    "scales", ["refit", *(pytest.param(way, marks=pytest.mark.nightly) for way in ("keep", "keep-change"))]
)
def test_the_merged_folder_has_the_loss_of_the_runs_validation(scales, sft, capsys):
    run = sft(merge_aware="int4", merge_aware_from=0.5, merge_aware_scales=scales)
    flags = ["--scales", scales] if scales != "refit" else []
    result, said = merged(run, capsys, "--to", "int4", *flags)
    assert result["gain"]["merged"] == pytest.approx(losses(run)[4], rel=0, abs=1e-5)
    assert result["gain"]["adapter"] == pytest.approx(
        losses(run)[4], rel=0, abs=1e-5
    )  # rounded, as it trained
    assert "another merge" not in said and "is lost" not in said
    result, said = merged(run, capsys, "--to", "bf16")
    assert abs(result["gain"]["merged"] - losses(run)[4]) > 1e-3  # control arm: without the rounding
    assert (
        f"warning: this run was trained for another merge: --to int4{f' --scales {scales}' if flags else ''}"
        in said
    )


def test_it_begins_after_its_share_of_the_steps_and_resumes_to_the_bit(sft):
    plain, whole = sft("plain"), sft("whole", merge_aware="same", merge_aware_from=0.5)
    steps = [[event["loss"] for event in of_kind(run, "train")] for run in (plain, whole)]
    assert steps[0][:2] == steps[1][:2] and steps[0][2] != steps[1][2]
    words = {"merge_aware": "same", "merge_aware_from": 0.5, "save.every": 1}
    with pytest.raises(Stopped):
        sft("parts", **words, on_step=[stopping_at(3)])  # the save is that of the step at which it begins
    parts = sft("parts", **words)
    assert all(torch.equal(ours, adapter(parts)[name]) for name, ours in adapter(whole).items())
    assert losses(parts)[4] == losses(whole)[4]


@pytest.mark.nightly  # 6 s: two runs; tests/adapters/merge_aware has a layer that is recomputed
def test_recompute_changes_no_bit(sft):
    runs = [sft(name, merge_aware="same", **{"place.recompute": name}) for name in ("nothing", "layers")]
    first, second = map(adapter, runs)
    assert all(torch.equal(first[name], second[name]) for name in first)


REFUSED = {
    "fp8": ({"merge_aware": "fp8"}, "merge_aware is fp8, but .* is in int4-pack-quantized"),
    "attention": ({"merge_aware": "same", "lora.targets": ["attention"]}, "merging rounds no adapted weight"),
    "all": ({"merge_aware": "int4", "train": "all", "lora.targets": None}, "lora.merge_aware are given"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_merge_does_not_round_is_refused_before_work(case, sft, tmp_path):
    fields, words = REFUSED[case]
    with pytest.raises(ConfigError, match=words) as refused:
        sft(**fields)
    assert len(refused.value.message) <= 140 or case == "all"
    assert refused.value.next and not list((tmp_path / "run").glob("state/*"))


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """tiny-k2 in bf16."""
    from unfreeze.checkpoint import open_checkpoint

    folder = tmp_path_factory.mktemp("dense") / "model"
    tensors = {}
    scheme = open_checkpoint(unfreeze.TINY_K2).scheme()
    parts = load_file(unfreeze.TINY_K2 / "model.safetensors")
    for name, tensor in parts.items():
        module, _, suffix = name.rpartition(".")
        if suffix == "weight_packed":
            own = {part: parts[f"{module}.{part}"] for part in ("weight_packed", "weight_scale")}
            tensors[f"{module}.weight"] = scheme.codecs[0].dequantize(own).contiguous()
        elif suffix not in ("weight_scale", "weight_shape"):
            tensors[name] = tensor
    shutil.copytree(unfreeze.TINY_K2, folder, ignore=lambda *_: ["model.safetensors"])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.nightly  # 20 s: kernels of another base are chosen; tests/compress has its weights
def test_a_bf16_base_trains_as_its_int4_merge_also_where_no_adapter_is(dense, sft, capsys):
    """A merge packs attention too: it has no adapter, and is rounded when the rounding begins."""
    run = sft(model=dense, merge_aware="int4", merge_aware_from=0.5)
    result, _ = merged(run, capsys, "--to", "int4")
    assert result["gain"]["merged"] == pytest.approx(losses(run)[4], rel=0, abs=1e-5)
    _, said = merged(run, capsys, "--to", "same", "--no-check")
    assert "another merge: --to int4" in said
    for name in ("nf4", "same"):
        with pytest.raises(ConfigError, match="is not quantized: a merge writes int4") as refused:
            sft("other", model=dense, merge_aware=name)
        assert f"unfreeze quantize {dense} --to " in refused.value.next


def test_a_policy_samples_from_the_rounded_weights(tmp_path):
    my = tmp_path / "my.py"
    my.write_text("def reward(prompt, completion, **row):\n    return completion.count('e')\n")
    run = unfreeze.grpo(
        model=unfreeze.TINY_K2,
        data=[{"prompt": f"What is {n}?"} for n in range(6)],
        reward=str(my),
        out=tmp_path / "run",
        steps=3,
        prompts_per_step=2,
        answers=4,
        max_new_tokens=8,
        **{"rollout.cut": "score", "rank": 2, "samples": 0, "dtype": "float32", "learning_rate": 2e-2},
        **{"merge_aware": "same", "lora.targets": ["experts"], "quiet": True},
    )
    # the sampler's log-probabilities are those of the trainer, whose forward pass is rounded
    gaps = [event["gap_max"] for event in of_kind(run, "train")]
    assert len(gaps) == 3 and max(gaps) <= 1e-5


@pytest.mark.nightly  # 60 s: three starts of Python with a compiled kernel each
@pytest.mark.parametrize("split", ["1", "2"])
def test_two_processes_equal_one(split, rows, held_rows, tmp_path):
    """Each has half of the micro-batches; with a split of 2, each rounds half of the experts too."""
    words = [
        "sft",
        "--model",
        unfreeze.TINY_K2,
        "--data",
        rows,
        "--validation",
        held_rows,
        "--steps",
        3,
        "--rank",
        4,
    ]
    words += [
        "--tokens-per-step",
        128,
        "--micro-batches",
        2,
        "--learning-rate",
        "2e-2",
        "--lora.targets",
        "experts",
    ]
    words += [
        "--watch.samples",
        0,
        "--dtype",
        "float32",
        "--device",
        "cpu",
        "--merge-aware",
        "same",
        "--quiet",
    ]
    words = [*map(str, words), "--merge-aware-from", "0.4"]
    assert cli.main([*words, "--out", str(tmp_path / "one")]) == 0
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    started = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-addr",
        "127.0.0.1",
    ]
    started += ["--master-port", port, "-m", "unfreeze", *words, "--place.split", split]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    two = [*started, "--out", str(tmp_path / "two")]
    subprocess.run(two, check=True, timeout=300, env=environment, capture_output=True)

    def losses(name: str) -> list[float]:
        events = map(json.loads, (tmp_path / name / "events.jsonl").read_text().splitlines())
        return [event["loss"] for event in events if event["kind"] in ("train", "eval")]

    one, two = losses("one"), losses("two")
    assert two[:-1] == pytest.approx(one[:-1], rel=1e-6 if split == "1" else 1e-5)
    # With a split a token's experts are summed in another order. After three steps of Adam that is enough for a
    # code at a boundary to be the next one: measured 7e-5 of the last loss
    assert two[-1] == pytest.approx(one[-1], rel=1e-6 if split == "1" else 2e-4)
