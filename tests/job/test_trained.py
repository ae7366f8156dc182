"""unfreeze sft --train all: every weight of a dense checkpoint, from plan to result; what resumes bit for
bit, and what is refused."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import unfreeze
from unfreeze import cli, models
from unfreeze.checkpoint import save_checkpoint
from unfreeze.commands.demo import TINY_K2
from unfreeze.config.parse import parse
from unfreeze.models.publish import published
from unfreeze.recipes import sft
from unfreeze.train import fit

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data" / "stories260k"
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


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    """The Llama of ../shared/data where it is, else a random one with the tokenizer the package carries."""
    if SHARED.is_dir():
        return SHARED
    folder = tmp_path_factory.mktemp("models") / "llama"
    config = TINY | {"vocab_size": json.loads((TINY_K2 / "config.json").read_text())["vocab_size"]}
    model = models.build(models.shape(config), dtype=torch.float32, device="cpu")
    models.initialize(model, 0)
    extra = {
        name: TINY_K2 / name for name in ("tiktoken.model", "tokenizer_config.json", "generation_config.json")
    }
    save_checkpoint(folder, config, published(model, config), extra=extra)
    return folder


def command(model: Path, data: Path, out: Path, *more) -> list[str]:
    flags = [
        "--train",
        "all",
        "--tokens-per-step",
        256,
        "--sequence-length",
        128,
        "--learning-rate",
        1e-3,
        "--optimizer.warmup",
        0,
        "--watch.samples",
        1,
    ]
    return list(map(str, ["sft", "--model", model, "--data", data, "--out", out, *flags, *more]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_weight_learns_and_the_result_is_a_checkpoint(
    llama, chat_rows, tmp_path, unfreeze_json, capsys, dtype
):
    from transformers import AutoModelForCausalLM

    run = tmp_path / "run"
    result = unfreeze_json(*command(llama, chat_rows, run, "--steps", 12, "--dtype", dtype))
    assert (
        result["finished"]
        and result["loss_last"] < result["loss_first"] - 0.3
        and result["model"] == str(run / "model")
    )
    assert all(
        entry["trained"] == entry["parameters"] and entry["grad_norm"] > 0
        for entry in result["receipt"].values()
    )
    record = json.loads((run / "resolved_config.json").read_text())
    assert (
        record["train"] == "all"
        and record["lora"] is None
        and "adapter" not in {path.name for path in run.iterdir()}
    )
    plan = json.loads((run / "plan.json").read_text())
    parameters = sum(entry["parameters"] for entry in result["receipt"].values())
    width = 4 if dtype == "float32" else 2
    assert (plan["terms"] | plan["beside"])["gradients"] == width * parameters and plan[
        "adapter_parameters"
    ] == 0
    assert plan["terms"]["optimizer"] == (8 if dtype == "float32" else 12) * parameters
    saved = load_file(run / "state" / "step-000012" / "tensors.safetensors")
    moments = sum(
        t.nbytes for name, t in saved.items() if name.startswith(("optimizer.exp_avg", "optimizer.master"))
    )
    assert moments == plan["terms"]["optimizer"]

    ids = torch.randint(3, 500, (1, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(run / "model", dtype=torch.float32)(ids).logits[0]
        before = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)(ids).logits[0]
    torch.testing.assert_close(
        unfreeze.load(run, dtype="float32").logits(ids.tolist())[0],
        theirs,
        rtol=0,
        atol=1e-4 * theirs.abs().max().item(),
    )
    assert (
        theirs - before
    ).abs().max() > 1e-2 * before.abs().max()  # control: the published weights give other logits

    assert unfreeze_json(*command(llama, chat_rows, run, "--steps", 12, "--dtype", dtype))["already_finished"]
    assert unfreeze_json("generate", run, "--tokens", "1", "5", "--max-new-tokens", "3")["tokens"]
    assert cli.main(["export", str(run), "--quiet"]) == 2
    assert (
        f"others read {run / 'model'}, a whole model, as it is\n  next: unfreeze export"
        in capsys.readouterr().err
    )
    assert cli.main(command(llama, chat_rows, run, "--steps", 12, "--dtype", dtype)) == 0
    assert "next: unfreeze chat" in (said := capsys.readouterr().err) and "unfreeze export" not in said


def test_a_run_that_goes_on_equals_one_that_was_not_interrupted_bit_for_bit(
    llama, chat_rows, tmp_path, unfreeze_json, read_events, monkeypatch
):
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    flags = ("--steps", 6, "--save-every", 2, "--optimizer.weight-decay", 0.1)
    unfreeze_json(*command(llama, chat_rows, straight, *flags))
    steps = iter(range(5))
    step = fit.train_step

    def killed(*arguments, **more):
        if next(steps) == 3:
            raise KeyboardInterrupt
        return step(*arguments, **more)

    with monkeypatch.context() as patch:
        patch.setattr(fit, "train_step", killed)
        assert cli.main([*command(llama, chat_rows, broken, *flags), "--quiet"]) == 130
    assert not (broken / "model").exists()
    result = unfreeze_json(*command(llama, chat_rows, broken, *flags))
    assert result["finished"]
    losses = [[event["loss"] for event in read_events(run, "train")] for run in (straight, broken)]
    assert losses[0] == losses[1] and len(losses[0]) == 6
    for file in ("state/step-000006/tensors.safetensors", "model/model.safetensors"):
        assert (straight / file).read_bytes() == (broken / file).read_bytes()


def test_what_it_refuses_before_work(llama, chat_rows, tmp_path, capsys):
    def refused(*arguments) -> str:
        assert cli.main([*map(str, arguments), "--quiet"]) == 2
        return capsys.readouterr().err

    packed = refused(*command(TINY_K2, chat_rows, tmp_path / "a"))
    assert (
        "is packed (int4-pack-quantized)" in packed
        and "masters and moments" in packed
        and "--train adapters (sft, prefer, distill)" in packed
    )
    # the default, but asked for
    assert 'train = "all"' in refused(*command(llama, chat_rows, tmp_path / "c", "--lora.rank", 16))
    (tmp_path / "run.toml").write_text('train = "all"\n[lora]\nrank = 16\n')
    assert "in a file: the whole table [lora]" in refused(
        "sft", tmp_path / "run.toml", "--model", llama, "--data", chat_rows
    )
    assert not any(
        (tmp_path / name / "events.jsonl").read_text().count('"load"')
        for name in "ac"
        if (tmp_path / name).exists()
    )


def test_what_is_trained_never_changes_within_a_run(llama, chat_rows, tmp_path, unfreeze_json, capsys):
    unfreeze_json(*command(llama, chat_rows, tmp_path, "--steps", 1, "--watch.samples", 0))
    shutil.rmtree(tmp_path / "model")
    other = [
        word if word != "all" else "adapters" for word in command(llama, chat_rows, tmp_path, "--steps", 1)
    ]
    assert cli.main([*other, "--quiet"]) == 2
    assert "train can never change within a run" in capsys.readouterr().err


def test_its_learning_rate_is_a_tenth_unless_one_is_given():
    def rate(*flags: str) -> float:
        flat = ["--model", "m", "--data", "d", *flags]
        return parse(sft.Config, flat, command="sft", description="").optimizer.learning_rate

    assert rate() == 2e-4 and rate("--train", "all") == 2e-5
    assert (
        rate("--train", "all", "--learning-rate", "2e-4")
        == rate("--learning_rate=2e-4", "--train=all")
        == 2e-4
    )


DEEPSEEK = {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_nextn_predict_layers": 1,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
}
AHEAD = "model.layers.2."


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory) -> Path:
    """A random DeepSeek-V3 in bf16 with float32 norms and a head for later tokens, its experts one by one."""
    folder = tmp_path_factory.mktemp("models") / "deepseek"
    config = DEEPSEEK | {"vocab_size": json.loads((TINY_K2 / "config.json").read_text())["vocab_size"]}
    model = models.build(models.shape(config), dtype=torch.float32, device="cpu")
    models.initialize(model, 0)
    extra = {
        name: TINY_K2 / name for name in ("tiktoken.model", "tokenizer_config.json", "generation_config.json")
    }
    save_checkpoint(folder, config, published(model, config), extra=extra)
    tensors = load_file(folder / "model.safetensors")
    tensors = {name: tensor.float() if "layernorm" in name else tensor for name, tensor in tensors.items()}
    generator = torch.Generator().manual_seed(3)
    tensors |= {
        AHEAD + "eh_proj.weight": torch.randn(32, 64, generator=generator).bfloat16(),
        AHEAD + "enorm.weight": torch.randn(32, generator=generator).half(),
        AHEAD + "shared_head.norm.weight": torch.randn(32, generator=generator),
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_each_tensor_keeps_its_dtype_and_what_is_not_trained_its_bytes(
    deepseek, chat_rows, tmp_path, unfreeze_json
):
    from transformers import AutoModelForCausalLM

    run = tmp_path / "run"
    unfreeze_json(*command(deepseek, chat_rows, run, "--steps", 2, "--dtype", "float32"))
    before, after = load_file(deepseek / "model.safetensors"), load_file(run / "model" / "model.safetensors")
    assert {name: tensor.dtype for name, tensor in after.items()} == {
        name: tensor.dtype for name, tensor in before.items()
    }
    ahead = [name for name in before if name.startswith(AHEAD)]
    assert len(ahead) == 3 and all(
        before[name].numpy(force=True).tobytes() == after[name].numpy(force=True).tobytes()
        for name in ahead
        if before[name].dtype != torch.bfloat16
    )
    assert all(torch.equal(before[name], after[name]) for name in ahead)
    moved = [name for name in before if not torch.equal(before[name], after[name])]
    assert len(moved) > 10 and not set(moved) & set(ahead)
    ids = torch.randint(3, 500, (1, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(run / "model", dtype=torch.float32)(ids).logits[0]
    torch.testing.assert_close(
        unfreeze.load(run, dtype="float32").logits(ids.tolist())[0], theirs, rtol=0, atol=1e-4
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_float32_checkpoint_stays_float32_to_the_bit_of_the_masters(
    deepseek, chat_rows, tmp_path, unfreeze_json, dtype
):
    full = tmp_path / "full"
    shutil.copytree(deepseek, full)
    generator = torch.Generator().manual_seed(4)
    tensors = {
        name: tensor.float() + 1e-4 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in load_file(full / "model.safetensors").items()
    }
    save_file(tensors, full / "model.safetensors", metadata={"format": "pt"})
    run = tmp_path / "run"
    unfreeze_json(*command(full, chat_rows, run, "--steps", 2, "--dtype", dtype))
    written = load_file(run / "model" / "model.safetensors")
    assert {tensor.dtype for tensor in written.values()} == {torch.float32}
    saved = load_file(run / "state" / "step-000002" / "tensors.safetensors")
    kind = "model." if dtype == "float32" else "optimizer.master."
    masters = {name.removeprefix(kind): tensor for name, tensor in saved.items() if name.startswith(kind)}
    plain = {
        name: tensor
        for name, tensor in masters.items()
        if ".experts." not in name or ".shared_experts." in name
    }
    assert len(plain) > 10 and all(torch.equal(written[name], tensor) for name, tensor in plain.items())
    stack = masters["model.layers.1.mlp.experts.gate_up_proj.weight"]
    assert torch.equal(written["model.layers.1.mlp.experts.3.up_proj.weight"], stack[3, 16:])
    # control: rounding would be seen
    assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in plain.values())
