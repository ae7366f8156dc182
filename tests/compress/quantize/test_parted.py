"""NVFP4 matrices that vLLM 0.33 and SGLang 0.5.23 multiply as one: a merge keeps their one number, or says that it
does not and which merge does."""

from __future__ import annotations

import json
import re
import shlex
from itertools import combinations

import pytest
from safetensors.torch import load_file, save_file

from unfreeze import cli

TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
NUMBER = ".weight_global_scale"
WARNING = re.compile(r"warning: (\S+) and (\w+) no longer share one NVFP4 number: .*\n  next: (.*)\n")


def numbers(folder):
    tensors = {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}
    return {k.removesuffix(NUMBER): float(v) for k, v in tensors.items() if k.endswith(NUMBER)}


def apart(folder):
    """Pairs of modules with two numbers."""
    of = numbers(folder)
    pairs = [pair for group in TOGETHER for pair in combinations(group, 2)]
    both = [(n, f"{n.removesuffix(one)}{two}") for one, two in pairs for n in of if n.endswith(f".{one}")]
    assert both
    return {(one, two) for one, two in both if of[one] != of[two]}


def merge(base, adapter, out, capsys, *words):
    code = cli.main(["merge", str(adapter), "--base", str(base), "--no-check", "--out", str(out), *words])
    said = capsys.readouterr().err
    assert code == 0, said
    return said


@pytest.mark.parametrize("scales", ["refit", "keep", "keep-change"])
def test_a_small_change_keeps_the_one_number(scales, quantized, merging, tmp_path, capsys):
    base = quantized("moe", "nvfp4", "all-linear")
    adapter = merging.adapter_for(base, tmp_path / "adapter", size=0.02)
    said = merge(base, adapter, tmp_path / "out", capsys, "--scales", scales)
    assert "NVFP4" not in said and numbers(tmp_path / "out") == numbers(base) and not apart(base)


@pytest.mark.parametrize("base, targets", [("llama", ("*.q_proj",)), ("moe", ("experts",))])
def test_a_large_change_is_warned_of_and_the_next_command_keeps_it(
    base, targets, quantized, merging, tmp_path, capsys
):
    base = quantized(base, "nvfp4", "all-linear")
    adapter = merging.adapter_for(base, tmp_path / "adapter", targets=targets, size=1.0)
    said = merge(base, adapter, tmp_path / "out", capsys)
    one, leaf, command = WARNING.search(said).groups()
    other = f"{one.rpartition('.')[0]}.{leaf}"
    assert {(one, other), (other, one)} & apart(tmp_path / "out")
    assert WARNING.search(merge(base, adapter, tmp_path / "out", capsys)), "the same command says it again"
    assert cli.main([*shlex.split(command)[1:], "--no-check"]) == 0
    assert not WARNING.search(capsys.readouterr().err)
    assert numbers(tmp_path / "out-keep") == numbers(base) != numbers(tmp_path / "out")


def test_control_arm_numbers_that_were_two_before_are_not_warned_of(quantized, merging, tmp_path, capsys):
    whole, base = quantized("llama", "nvfp4", "all-linear"), tmp_path / "base"
    base.mkdir()
    for file in whole.iterdir():
        if file.suffix == ".json":
            (base / file.name).write_text(file.read_text())
            continue
        tensors = load_file(file)
        halved = {k: v / 2 for k, v in tensors.items() if k.endswith(f"q_proj{NUMBER}")}
        save_file(tensors | halved, base / file.name, metadata={"format": "pt"})
    adapter = merging.adapter_for(base, tmp_path / "adapter", targets=("*.q_proj",), size=1.0)
    said = merge(base, adapter, tmp_path / "out", capsys)
    assert "NVFP4" not in said and apart(base) and numbers(tmp_path / "out") != numbers(base)
    assert json.loads((tmp_path / "out" / "merge.json").read_text())["finished"]
