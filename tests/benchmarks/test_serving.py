"""`dev bench serve`: its load, its checkpoints, and its client beside planted servers."""

import shlex

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.harness import serving
from benchmarks.harness.case import command
from benchmarks.harness.serving import Load, Server, checkpoint, fastest, take_turns
from benchmarks.harness.sides import SideFailed
from unfreeze.quant import Int4

PLANTED = "tests.benchmarks.planted_server"
LOAD = Load(["t1 t2", "t3", "t4", "t5"], [2, 6, 3, 5], 2)


@pytest.fixture
def planted(monkeypatch):
    def side(how: str, name: str = "transformers") -> str:
        monkeypatch.setitem(serving.COMMANDS, name, (PLANTED, how))
        return name

    return side


def test_servers_take_turns_and_usage_is_counted(planted, tmp_path):
    said: list[str] = []
    sides = Server(planted("same", "unfreeze"), tmp_path), Server(planted("same"), tmp_path)
    take_turns(sides, LOAD, 2, said.append)
    assert [line.split(",")[0] for line in said] == ["unfreeze", "transformers", "transformers", "unfreeze"]
    for side in sides:
        results = side.results(LOAD)
        assert (
            len(side.seconds) == 2
            and results["slowest"] <= results["served_per_second"] <= results["fastest"]
        )


def test_a_server_that_ends_answers_early_is_found(planted, tmp_path):
    with pytest.raises(SideFailed, match=r"answers of \[1, 5, 2, 4\] tokens, not \[2, 6, 3, 5\]"):
        Server(planted("less"), tmp_path).round(LOAD)


def test_a_way_that_does_not_start_is_kept_beside_the_fastest(planted, tmp_path):
    planted("same")
    best, results = fastest(tmp_path, ("", "--broken"), LOAD, 0, print)
    assert best == "" and "not ready" in results["--broken"] and "tokens/s" in results[""]


def test_lengths_spread_three_to_one(tmp_path):
    folders = checkpoint(tmp_path, "tiny-k2", 1)
    load = Load.draw(200, 8, 96, 16, folders["unfreeze"])
    assert min(load.lengths) == 32 and max(load.lengths) == 96
    assert {len(prompt.split()) for prompt in load.prompts} == {8}
    # both sides have the same numbers: the packed experts expand to the other side's
    packed, plain = (load_file(folders[side] / "model.safetensors") for side in ("unfreeze", "transformers"))
    name = "model.layers.1.mlp.experts.0.up_proj"
    parts = {
        suffix: packed[f"{name}.{suffix}"] for suffix in ("weight_packed", "weight_scale", "weight_shape")
    }
    assert torch.equal(Int4(group_size=32).dequantize(parts).bfloat16(), plain[f"{name}.weight"])
    assert torch.equal(packed["lm_head.weight"], plain["lm_head.weight"])


def test_flags_of_transformers_serve_can_be_typed():
    from benchmarks.cases.serve import Config
    from unfreeze.config.parse import parse

    typed = ["--their-flags=--continuous-batching --x 1 | "]
    config = parse(Config, typed, command="dev bench serve", description="")
    assert config.their_flags == typed[0][14:]
    assert shlex.split(command("serve", config))[4:] == typed  # so does the command in a row
