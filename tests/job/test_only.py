"""training.only: some experts train and nothing else moves, not a bit of it, not by weight decay either."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from unfreeze import cli, models
from unfreeze.checkpoint import open_checkpoint, save_checkpoint
from unfreeze.commands.demo import TINY_K2
from unfreeze.core.errors import ConfigError
from unfreeze.core.rows import Rows
from unfreeze.data import Example, pack
from unfreeze.job.only import OnlyExperts
from unfreeze.models.only import _checksum, rows_of, train_only
from unfreeze.models.publish import published
from unfreeze.objectives.cross_entropy import cross_entropy
from unfreeze.parallel.plan import model_of

V3 = {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_nextn_predict_layers": 0,
    "max_position_embeddings": 512,
    "vocab_size": json.loads((TINY_K2 / "config.json").read_text())["vocab_size"],
}
BESIDE = ("tiktoken.model", "tokenizer_config.json", "generation_config.json")


def written(folder: Path, config: dict, dtype: str = "float32") -> Path:
    """A random model with tiny-k2's tokenizer; its biases are not zero."""
    config = config | {"dtype": dtype}
    model = models.build(models.shape(config), dtype=torch.float32, device="cpu")
    models.initialize(model, 0)
    for moe in model.moe_layers().values():
        if moe.gate.e_score_correction_bias is not None:
            moe.gate.e_score_correction_bias.copy_(torch.linspace(-0.1, 0.1, len(moe.gate.weight)))
    extra = {name: TINY_K2 / name for name in BESIDE}
    save_checkpoint(folder, config, published(model, config), extra=extra)
    return folder


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def grown(request, tmp_path_factory) -> Path:
    """A DeepSeek-V3 of 4 experts with 2 closed ones more."""
    root = tmp_path_factory.mktemp("grown")
    base = written(root / "base", V3, request.param)
    assert cli.main(["upcycle", str(base), "--add-experts", "2", "--out", str(root / "more"), "--quiet"]) == 0
    return root / "more"


def flags_of(model: Path, data: Path, out: Path, *more: object, steps: int) -> list[str]:
    command = ["sft", "--train", "all", "--model", model, "--data", data, "--out", out, "--quiet"]
    command += ["--steps", steps, "--tokens-per-step", 64, "--sequence-length", 64, "--watch.samples", 0]
    command += ["--learning-rate", "1e-2", "--optimizer.weight-decay", 0.1, *more]
    return list(map(str, command))


def trained(model: Path, data: Path, out: Path, *more: object, steps: int = 14) -> Path:
    assert cli.main(flags_of(model, data, out, *more, steps=steps)) == 0
    return out


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def moved(before: Path, after: Path) -> set[str]:
    first, last = tensors(before), tensors(after)
    assert first.keys() == last.keys()
    assert [last[name].dtype for name in first] == [tensor.dtype for tensor in first.values()]
    return {name for name in first if not torch.equal(first[name], last[name])}


def of_expert(number: int) -> set[str]:
    return {f"model.layers.1.mlp.experts.{number}.{part}_proj.weight" for part in ("gate", "up", "down")}


ROUTER, BIAS = "model.layers.1.mlp.gate.weight", "model.layers.1.mlp.gate.e_score_correction_bias"
ONLY = ("--training.only", "experts 4-5", "--optimizer.balance-rate", 0.15)


def test_new_experts_open_and_train_while_nothing_else_moves(grown, chat_rows, tmp_path, read_events):
    run = trained(grown, chat_rows, tmp_path / "run", *ONLY)
    assert moved(grown, run / "model") == of_expert(4) | of_expert(5) | {ROUTER, BIAS}
    before, after = tensors(grown), tensors(run / "model")
    for name in (ROUTER, BIAS):
        assert torch.equal(before[name][:4], after[name][:4])
        assert not torch.equal(before[name][4:], after[name][4:])
    loads = [event["expert_load"]["1"] for event in read_events(run, "train")]
    assert sum(loads[0][4:]) == 0  # closed: min(b) - 1.0625, so eight updates of 0.15 before a token comes
    assert sum(loads[-1][4:]) > 0
    group = json.loads((run / "receipt.json").read_text())["groups"]["experts"]
    assert group["experts"] == 6
    assert 1 <= group["experts_reached"] <= 2
    assert group["parameters"] == 6 * 3 * 32 * 16
    assert group["frozen_moved"] == 0


def test_without_it_the_old_experts_move(grown, chat_rows, tmp_path):
    """The control arm: the same run without training.only."""
    run = trained(grown, chat_rows, tmp_path / "run", "--optimizer.balance-rate", 0.15, steps=1)
    changed = moved(grown, run / "model")
    assert (of_expert(0) | of_expert(1) | of_expert(2) | of_expert(3)) & changed
    assert "lm_head.weight" in changed
    assert not torch.equal(tensors(grown)[BIAS][:4], tensors(run / "model")[BIAS][:4])


def test_a_stopped_run_resumes_to_the_same_bits(grown, chat_rows, tmp_path):
    steady = (*ONLY, "--optimizer.schedule", "constant")
    parts = trained(grown, chat_rows, tmp_path / "parts", *steady, steps=9)
    at_9 = tensors(parts / "model")
    trained(grown, chat_rows, parts, *steady, "--save.allow-changed", "training.steps", steps=12)
    once = trained(grown, chat_rows, tmp_path / "once", *steady, steps=12)
    assert moved(once / "model", parts / "model") == set()
    assert not torch.equal(at_9[BIAS], tensors(parts / "model")[BIAS])


@pytest.mark.nightly
def test_two_processes_train_them_as_one(grown, chat_rows, tmp_path):
    more = ["--memory.micro-batches", 2]
    one = trained(grown, chat_rows, tmp_path / "one", *ONLY, *more, steps=10)
    flags = flags_of(grown, chat_rows, tmp_path / "two", *ONLY, *more, steps=10)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    start = f"-m torch.distributed.run --nproc-per-node 2 --master-port {port} -m unfreeze".split()
    subprocess.run([sys.executable, *start, *flags], check=True, timeout=200)
    first, second = tensors(one / "model"), tensors(tmp_path / "two" / "model")
    for name in first:
        torch.testing.assert_close(first[name], second[name], rtol=1e-4, atol=1e-5)
    assert moved(grown, tmp_path / "two" / "model") == of_expert(4) | of_expert(5) | {ROUTER, BIAS}


def moe_of(config: dict) -> models.Decoder:
    torch.manual_seed(0)
    model = models.build(models.shape(config), dtype=torch.float32, device="cpu")
    models.initialize(model, 0)
    return model


def test_gradients_are_the_rows_of_the_whole_models():
    """The trained rows get the gradient that they have in a model that trains in full."""
    whole, part = moe_of(V3), moe_of(V3)
    train_only(part, Rows(1, 3, 4))
    documents = [Example(list(range(3, 15)), [1.0] * 12), Example(list(range(40, 49)), [1.0] * 9)]
    for model in (whole, part):
        hidden_TD = model.hidden(pack(documents), recompute=models.plain)
        cross_entropy(hidden_TD, model.lm_head, pack(documents)).sum.backward()
    full = dict(whole.named_parameters())
    for name, parameter in part.named_parameters():
        rows = name.endswith(("gate_up_proj.weight", "down_proj.weight", "mlp.gate.weight"))
        if not parameter.requires_grad:
            assert parameter.grad is None
            continue
        assert rows
        assert len(parameter) == 2
        assert torch.equal(parameter.grad, full[name].grad[1:3])
        assert parameter.grad.any()


def test_the_plan_counts_what_trains(grown, chat_rows, tmp_path):
    manifest = open_checkpoint(grown)
    sizes = model_of(models.shape(manifest.config), manifest, None, torch.float32, torch.device("cpu"))
    planned = OnlyExperts("experts 4-5", 0.1).planned(sizes).sizes
    train_only(model := moe_of(manifest.config), Rows(4, 6, 6))
    assert planned.elements == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert planned.passing == 6 * 3 * 32 * 16
    whole, part = (
        trained(grown, chat_rows, tmp_path / name, "--optimizer.balance-rate", 0.15, *more, steps=1)
        for name, more in (("whole", ()), ("part", ONLY[:2]))
    )
    terms = [json.loads((run / "plan.json").read_text())["terms"] for run in (whole, part)]
    assert terms[1]["optimizer"] < 0.1 * terms[0]["optimizer"]


@pytest.mark.parametrize("use_igate", [True, False])
def test_passes_of_a_chain_share_the_rows_that_train(use_igate, tmp_path):
    """Each stack of experts is divided and counted once; its rows have the gradient of all passes."""
    sizes = ("hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers", "vocab_size")
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = {name: V3[name] for name in sizes} | heads | {"n_routed_experts": 4, "num_experts_per_tok": 2}
    config |= {"model_type": "chain_of_experts", "inner_iter": 3, "use_igate": use_igate}
    documents = pack([Example(list(range(3, 15)), [1.0] * 12)])
    whole, part = moe_of(config), moe_of(config)
    train_only(part, Rows(1, 3, 4))
    for model in (whole, part):
        hidden_TD = model.hidden(documents, recompute=models.plain)
        cross_entropy(hidden_TD, model.lm_head, documents).sum.backward()
    trained = {name: p for name, p in part.named_parameters() if p.requires_grad}
    full = dict(whole.named_parameters())
    for name, parameter in trained.items():
        torch.testing.assert_close(parameter.grad, full[name].grad[1:3], rtol=1e-5, atol=1e-7)
    manifest = open_checkpoint(written(tmp_path, config))
    sizes = model_of(models.shape(manifest.config), manifest, None, torch.float32, torch.device("cpu"))
    planned = OnlyExperts("experts 1-2", 0.1).planned(sizes).sizes
    assert planned.elements == sum(p.numel() for p in trained.values())
    assert planned.last_elements == sum(p.numel() for n, p in trained.items() if ".layers.0." in n)


def test_a_checksum_sees_one_bit_of_one_number():
    weight = torch.randn(3, 4)
    before = _checksum(weight)
    assert _checksum(weight.clone()) == before
    weight.view(torch.int32)[1, 2] ^= 1
    assert _checksum(weight) != before


def test_a_receipt_names_a_frozen_expert_that_moved():
    from unfreeze.models.only import divided

    model = moe_of(V3)
    train_only(model, Rows(2, 4, 4))
    parts = dict(divided(model))
    before = {name: part.checksums() for name, part in parts.items()}
    part = parts["model.layers.1.mlp.experts.down_proj.weight"]
    part.whole[3] += 1  # trains: not counted
    assert {name: part.checksums() for name, part in parts.items()} == before
    part.whole[1] *= 0.999  # decayed, as a planted bug would
    now = part.checksums()
    assert [
        a != b for a, b in zip(before["model.layers.1.mlp.experts.down_proj.weight"], now, strict=True)
    ] == [False, True]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("expert 3", "is not known"),
        ("experts 3-1", "experts are 0 to 7"),
        ("experts 4-8", "experts are 0 to 7"),
        ("", "is not known"),
    ],
)
def test_other_words_are_refused(words, message):
    with pytest.raises(ConfigError, match=message):
        rows_of(words, 8)


def test_ranges_and_single_experts_are_read():
    assert rows_of("experts 4-7", 8) == Rows(4, 8, 8)
    assert rows_of("experts 5", 8) == Rows(5, 6, 8)
    with pytest.raises(ConfigError, match="has no experts"):
        rows_of("experts 5", 0)


def test_closed_experts_that_nothing_opens_are_refused(grown, chat_rows, tmp_path, capsys):
    command = ["sft", "--train", "all", "--model", grown, "--data", chat_rows, "--out", tmp_path / "run"]
    command += ["--training.only", "experts 4-5", "--steps", 1]
    assert cli.main(list(map(str, command))) == 2
    assert "experts 4-5 are closed" in capsys.readouterr().err


@pytest.mark.parametrize("flag", [("--training.only", "experts 1"), ("--optimizer.balance-rate", "0.1")])
def test_adapters_take_neither(chat_rows, flag, capsys):
    assert cli.main(["sft", "--model", str(TINY_K2), "--data", str(chat_rows), *flag]) == 2
    assert "adapters train" in capsys.readouterr().err
