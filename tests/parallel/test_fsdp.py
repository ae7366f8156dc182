"""Every weight trained in processes that hold a part of each (FSDP2): one process's gradients, losses, saves and
checkpoints. Processes are started once, by fsdp_runs.py."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from unfreeze import models
from unfreeze.checkpoint.manifest import Manifest, TensorInfo
from unfreeze.checkpoint.resolve import Placement
from unfreeze.config.sft import Config
from unfreeze.core.errors import ConfigError, DoesNotFit
from unfreeze.core.layout import RESIDENT, Layout
from unfreeze.core.rows import Rows
from unfreeze.job.planning.plan import Planning
from unfreeze.job.trained import AllWeights
from unfreeze.models.factory import from_config
from unfreeze.parallel.machine import Hardware
from unfreeze.parallel.placement.fsdp import Sharded, chunk, placement_of_rows
from unfreeze.parallel.plan import Work, measure_sizes, plan, plan_fields, refuse_if_too_large
from unfreeze.parallel.plan.layouts import Facts, layouts
from unfreeze.parallel.processes.collectives import ALONE

FAMILIES = ("deepseek_v3", "llama")
HYBRID = "nemotron_h"  # two steps only


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, forkserver: Any) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("fsdp")
    path = os.pathsep.join([str(Path(__file__).parents[1]), *(p for p in sys.path if p)])
    process = forkserver.run(
        [Path(__file__).with_name("fsdp_runs.py"), folder],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        timeout=280,
    )
    assert process.returncode == 0, process.stderr
    found = json.loads(process.stdout.splitlines()[-1])
    assert found["codes"] == [0] * 6, process.stderr
    return folder, found


def furthest(one: list[float], other: list[float]) -> float:
    """The largest relative difference of two lists of the same length."""
    return max(abs(a - b) / abs(a) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("family", [*FAMILIES, HYBRID])
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_all_gradients_are_one_processs(runs, family: str, kind: str):
    """bfloat16 too: backward's gradients are the same, and both sum them in float32."""
    folder, _ = runs
    one, two = (load_file(folder / f"{family}-{kind}-{size}.safetensors") for size in (1, 2))
    assert one.keys() == two.keys() and len(one) > 15
    for name, gradient in one.items():
        assert float((two[name] - gradient).norm()) <= 1e-5 * float(gradient.norm()), name


def test_what_a_model_is_asked_before_its_first_step_leaves_its_weights_divided(runs):
    """prefer --train all --preference.reference cached: a forward pass gathers, and the optimizer needs the parts."""
    facts = runs[1]
    expected, *others = (part["asked first"] for part in (facts["1"][0], *facts["2"]))
    for found in others:
        assert furthest(expected, found) <= 1e-5 and expected[1] < expected[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_losses_and_norms_are_one_processs(runs, family: str):
    """Over documents of 2 to 60 tokens, some fully masked, packed and one for each process."""
    facts = runs[1]
    expected, (two, other) = facts["1"][0][f"{family} float32"], (f[f"{family} float32"] for f in facts["2"])
    assert two["losses"] == other["losses"] and two["norms"] == other["norms"]
    assert furthest(expected["losses"], two["losses"]) <= 1e-5 and len(two["losses"]) == 5
    assert furthest(expected["norms"], two["norms"]) <= 1e-5
    assert two["loads"] == expected["loads"]


def test_two_steps_of_a_hybrid_are_one_processs(runs):
    facts = runs[1]
    one, two = (facts[n][0][f"{HYBRID} float32"] for n in ("1", "2"))
    for name in ("losses", "norms"):
        assert furthest(one[name], two[name]) <= 1e-5 and len(two[name]) == 2
    assert two["loads"] == one["loads"] and two["losses"][1] < two["losses"][0]


@pytest.mark.parametrize("family", FAMILIES)
def test_in_bfloat16_losses_stay_beside_one_processs(runs, family: str):
    """Micro-batches of one process are summed in another order, and roundings decide on experts: 1 %."""
    facts = runs[1]
    one, two = (facts[n][0][f"{family} bfloat16"]["losses"] for n in ("1", "2"))
    assert furthest(one, two) <= 1e-2


@pytest.mark.parametrize("policy", ["selective", "elementwise", "nothing"])
def test_every_recompute_policy_gives_the_same(runs, policy: str):
    assert furthest(runs[1]["1"][0][policy], runs[1]["2"][0][policy]) <= 1e-5


@pytest.mark.parametrize("policy", ["selective", "elementwise", "nothing"])
def test_what_an_objective_reads_inside_layers_gives_the_same(runs, policy: str):
    assert furthest(runs[1]["1"][0][f"taps {policy}"], runs[1]["2"][0][f"taps {policy}"]) <= 1e-5
    assert furthest(runs[1]["1"][0]["selective"], runs[1]["1"][0]["taps selective"][::2]) > 1e-2  # it counts


def test_control_arm_a_mean_for_a_sum_halves_the_gradient(runs):
    expected = runs[1]["1"][0]["deepseek_v3 float32"]["norms"][0]
    for facts in runs[1]["2"]:
        assert facts["mean"] == pytest.approx(expected / 2, rel=1e-5)


def test_an_optimizer_made_while_weights_are_gathered_is_refused_and_control_arm_it_would_not_train_them(
    runs,
):
    for facts in runs[1]["2"]:
        assert facts["late"]["said"].startswith("model.embed_tokens.weight has 32 rows and 16 of 32 are")
        ends = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
        assert set(facts["late"]["still"]) == ends  # all others moved


def test_the_same_collectives_on_all_processes_whatever_the_routing(runs):
    two, other = runs[1]["2"]
    for name in ("deepseek_v3 float32", "llama float32", "deepseek_v3 bfloat16"):
        assert two[name]["calls"] == other[name]["calls"]
        # as many in every step of as many micro-batches: two of each process, then four
        assert len(set(two[name]["calls"][0::2])) == len(set(two[name]["calls"][1::2])) == 1
        # in each micro-batch ends and two layers are gathered, layers again in backward; three units are summed
        assert two[name]["calls"][0].count("all_gather_single") == 2 * (1 + 2 * 2)
        assert two[name]["calls"][0].count("reduce_scatter_single") == 2 * 3
    assert two["skewed"]["calls"] == other["skewed"]["calls"]
    assert two["skewed"]["loads"][0]["1"][2:] == [0] * 6  # all tokens went to two experts
    assert furthest(runs[1]["1"][0]["skewed"]["losses"], two["skewed"]["losses"]) <= 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_each_process_holds_and_reads_half_of_the_checkpoint(runs, family: str):
    folder, facts = runs
    infos = load_file(folder / family / "model.safetensors").values()
    for found in facts["2"]:
        by_rank = found[f"{family} float32"]["bytes"]
        assert sum(by_rank) == sum(tensor.nbytes for tensor in infos)
        assert max(by_rank) <= 1.03 * min(by_rank)
        assert 2 * found[f"{family} float32"]["rows"] == facts["1"][0][f"{family} float32"]["rows"]


def losses(run: Path) -> list[float]:
    return [float(line) for line in (run / "losses.jsonl").read_text().splitlines()]


def test_saved_by_2_gone_on_with_by_1_and_by_4_gives_the_unbroken_runs_losses(runs):
    folder, _ = runs
    straight, broken = losses(folder / "straight"), losses(folder / "resumed")
    assert len(straight) == 5 and furthest(straight, broken) <= 1e-5
    names = sorted(path.name for path in (folder / "resumed/state/step-000005").iterdir())
    assert names == ["state.json", *(f"tensors-0000{i}-of-00004.safetensors" for i in (1, 2, 3, 4))]
    # in bfloat16 the save of masters alone becomes weights and masters again
    assert furthest(losses(folder / "half-straight"), losses(folder / "half")) <= 1e-5
    assert len(losses(folder / "half")) == 4
    # 8-bit moments go on in as many processes
    assert losses(folder / "int8") == sorted(losses(folder / "int8"), reverse=True)
    assert len(losses(folder / "int8")) == 3


@pytest.mark.parametrize("written", ["deepseek_v3-torch.float32", "llama-torch.float32"])
def test_the_checkpoint_is_one_processs_in_shards_with_an_index(runs, written: str):
    folder, _ = runs
    one = load_file(folder / f"{written}-written-1" / "model.safetensors")
    two = folder / f"{written}-written-2"
    index = json.loads((two / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    assert sorted(path.name for path in two.iterdir()) == sorted(
        ["config.json", "model.safetensors.index.json", *files]
    )
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in one.values())
    shards = {file: load_file(two / file) for file in files}
    assert {name for shard in shards.values() for name in shard} == one.keys() == index["weight_map"].keys()
    for name, tensor in one.items():
        other = shards[index["weight_map"][name]][name]
        assert other.dtype == tensor.dtype and float((other - tensor).norm()) <= 1e-5 * float(tensor.norm())


def test_transformers_reads_the_checkpoint(runs):
    """And gives the logits that one process's gives."""
    transformers = pytest.importorskip("transformers")
    folder, _ = runs
    tokens = torch.arange(12)[None]
    found = [
        transformers.AutoModelForCausalLM.from_pretrained(folder / f"llama-torch.float32-written-{n}")
        for n in (1, 2)
    ]
    with torch.no_grad():
        one, two = (model(tokens).logits for model in found)
    assert float((one - two).abs().max()) <= 1e-5 * float(one.abs().max())


# ----------------------------------------------------------------------- rows and refusals


def test_rows_are_cut_as_torch_cuts_them():
    for of in (1, 2, 5, 7, 8):
        for parts in (1, 2, 3, 4):
            rows = [chunk(of, index, parts) for index in range(parts)]
            cut = [len(part) for part in torch.arange(of).chunk(parts)]
            assert [len(part) for part in rows] == cut + [0] * (parts - len(cut))
            assert [i for part in rows for i in range(part.first, part.last)] == list(range(of))


def placement(shape: tuple[int, ...], start: int, *, transposed: bool = False) -> Placement:
    numel = torch.Size(shape).numel()
    info = TensorInfo(
        name="w", dtype="F32", shape=shape, nbytes=4 * numel, file=Path("model.safetensors"), offset=1000
    )
    return Placement(info, "w", (), start, start + numel, 0, transposed=transposed)


def test_a_placement_is_narrowed_to_the_rows_it_fills():
    # a parameter [6, 10] of two tensors, [4, 10] and [2, 10]; rows 3 and 4 are of both
    parts = [
        placement_of_rows(placement(size, at), (6, 10), Rows(3, 5, 6))
        for size, at in (((4, 10), 0), ((2, 10), 40))
    ]
    assert [(p.start, p.stop, p.info.offset, p.info.nbytes) for p in parts if p] == [
        (0, 10, 1000 + 120, 40),
        (10, 20, 1000, 40),
    ]
    assert placement_of_rows(placement((4, 10), 0), (6, 10), Rows(4, 6, 6)) is None
    # experts stored transposed are cut between matrices; a matrix is not cut across its rows
    whole = placement_of_rows(placement((6, 5, 2), 0, transposed=True), (6, 2, 5), Rows(2, 4, 6))
    assert whole is not None and (whole.info.shape, whole.info.offset) == ((2, 5, 2), 1080)
    with pytest.raises(ConfigError, match="stored transposed and cannot be read by rows"):
        placement_of_rows(placement((5, 6), 0, transposed=True), (6, 5), Rows(2, 4, 6))


def test_what_is_packed_or_frozen_is_refused_in_a_line():
    config = {
        "model_type": "qwen3",
        "vocab_size": 16,
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 64,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
    }
    model = from_config(config, torch.float32)
    model.model.norm.weight.requires_grad_(False)
    with pytest.raises(ConfigError, match=r"place.weights is sharded, and model.norm.weight is frozen"):
        Sharded(model, ALONE, torch.float32, "cpu")


# ----------------------------------------------------------------------- the plan

LLAMA = {
    "model_type": "llama",
    "vocab_size": 8192,
    "hidden_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "intermediate_size": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize(("kind", "batches", "measured"), [("float32", 1, 700), ("bfloat16", 2, 702)])
def test_the_plan_counts_the_part_held_here_and_what_is_gathered(kind: str, batches: int, measured: int):
    """measured: MB of a process of two above its libraries, at the peak of two steps of 64 tokens in each
    micro-batch; blocks of 64 KiB and more returned as they are freed. The plan is above it, by a fifth at
    most."""
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[kind]
    sizes = measure_sizes(models.build(models.shape(LLAMA), dtype=dtype, device="meta"), None)
    asked: dict[str, Any] = {"tokens": 64, "longest": 64, "processes": 2, "micro_batches": 2 * batches}
    here = Hardware("cpu", "here", 2, 2**34, 2**34)
    divided = plan(sizes, RESIDENT.but(weights="sharded"), Work(**asked), here)
    assert measured * 1e6 <= divided.training <= 1.2 * measured * 1e6
    half = -(-sizes.elements // 2)
    assert divided.terms["base"] == 4 * half and divided.terms["optimizer"] == 8 * half
    # control arms: all in each process, and parts that are gathered at no cost
    assert plan(sizes, RESIDENT, Work(**asked), here).training > 1.5 * measured * 1e6
    assert divided.training - divided.terms["gathered weights"] < measured * 1e6


def test_weights_are_divided_where_all_in_each_does_not_fit_or_as_asked():
    def held(processes: int, every_weight: bool = True, **place: Any) -> list[str]:
        facts = Facts("cpu", processes, num_experts=0, every_weight=every_weight)
        return list(dict.fromkeys(layout.weights for layout in layouts(Layout(**place), facts)))

    assert held(2) == ["device", "sharded"] and held(1) == held(2, every_weight=False) == ["device"]
    assert held(2, weights="sharded") == ["sharded"] and held(2, weights="device") == ["device"]
    with pytest.raises(ConfigError, match=r"place.weights is sharded, but there is one process") as one:
        held(1, weights="sharded")
    assert "torchrun --nproc-per-node 2" in str(one.value)
    with pytest.raises(ConfigError, match=r"place.weights is sharded, but adapters are trained"):
        held(2, every_weight=False, weights="sharded")


def test_auto_divides_where_memory_asks_for_it_and_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The same run with room for all in each process, for a half only, and for neither."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    start = Manifest(path=tmp_path, config=LLAMA, tensors={}, prefix="", files=())
    config = Config.model_validate(
        {
            "model": "m",
            "data": ["d.jsonl"],
            "train": "all",
            "memory": {"dtype": "float32", "micro_batches": 2},
        }
    )

    def planned(gigabytes: float) -> Any:
        bytes_ = int(gigabytes * 1e9)
        monkeypatch.setattr(
            "unfreeze.parallel.machine.hardware", lambda place: Hardware("cpu", "here", 2, bytes_, bytes_)
        )
        trained: Any = AllWeights()
        shape, cpu = models.shape(LLAMA), torch.device("cpu")
        return Planning(config, trained, start, shape, cpu, processes=2, longest=256).first()[1]

    roomy, tight = planned(16), planned(3)
    assert roomy.fits and not roomy.layout.sharded and not roomy.why_layout
    assert tight.fits and tight.layout.sharded
    assert tight.why_layout.startswith("everything on the device; recompute layers would take ")
    assert any("are sharded over 2 processes" in line for line in plan_fields(tight)["lines"])
    with pytest.raises(DoesNotFit, match="gathered weights"):
        refuse_if_too_large(planned(0.5))
