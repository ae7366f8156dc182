"""Hybrids trained whole in two processes that hold a part of each weight (FSDP2): one process's gradients and losses.
Processes are started once, by hybrid_runs.py."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

FAMILIES = ("qwen3_next", "kimi_linear", "lfm2_moe", "deepseek_v4", "chain_of_experts")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, forkserver: Any) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("hybrids")
    path = os.pathsep.join([str(Path(__file__).parents[1]), *(p for p in sys.path if p)])
    process = forkserver.run(
        [Path(__file__).with_name("hybrid_runs.py"), folder],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        timeout=200,
    )
    assert process.returncode == 0, process.stderr
    facts = json.loads(process.stdout.splitlines()[-1])
    assert facts["codes"] == [0, 0], process.stderr
    return folder, facts


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_all_gradients_are_one_processs(runs, family: str, kind: str):
    folder, _ = runs
    one, two = (load_file(folder / f"{family}-{kind}-{size}.safetensors") for size in (1, 2))
    assert one.keys() == two.keys() and len(one) > 15
    for name, gradient in one.items():
        assert float((two[name] - gradient).norm()) <= 1e-5 * float(gradient.norm()), name


@pytest.mark.parametrize("family", FAMILIES)
def test_losses_and_norms_are_one_processs(runs, family: str):
    facts = runs[1]
    one = facts["1"][f"{family} float32"]
    for two in (found[f"{family} float32"] for found in facts["2"]):
        for field in ("losses", "norms"):
            assert two[field] == pytest.approx(one[field], rel=1e-5)
    assert one["losses"][-1] < one["losses"][0]


def test_random_decays_are_one_processs_and_not_rounded(runs):
    one = runs[1]["1"]["drawn"]
    assert len(one) == 2 and all(found["drawn"] == pytest.approx(one, rel=1e-7) for found in runs[1]["2"])


@pytest.mark.parametrize("family", FAMILIES[:2])
def test_decays_are_gathered_in_float32_under_bf16(runs, family: str):
    for found in (runs[1]["1"], *runs[1]["2"]):
        assert found[f"{family} bfloat16"]["decays"] == ["torch.float32"]
