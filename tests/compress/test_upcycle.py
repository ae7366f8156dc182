"""unfreeze upcycle: transformers' logits of both folders are the same, and its control arms are not."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from unfreeze import cli
from unfreeze.checkpoint import open_checkpoint
from unfreeze.compress import shards, upcycle
from unfreeze.compress.draws import Change, beside_parent, router_rows
from unfreeze.compress.grow import closed, parents_of
from unfreeze.compress.measured import largest_change
from unfreeze.core.errors import ConfigError

SMALL = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 20000.0, "original_max_position_embeddings": 16}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "rope_theta": 5e5, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 16}
DENSE = {
    "llama": ("Llama", {}),
    "llama, scaled positions": (
        "Llama",
        {"rope_parameters": LLAMA3, "tie_word_embeddings": True, "head_dim": 32},
    ),
    "mistral, a window": ("Mistral", {"sliding_window": 8, "head_dim": 32}),
    "mistral": ("Mistral", {"sliding_window": None, "num_key_value_heads": 4}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2, a wider one": ("Qwen2", {"intermediate_size": 160, "rms_norm_eps": 1e-3}),
    "qwen3": ("Qwen3", {"head_dim": 32, "rope_parameters": YARN}),
    "qwen3, biases": ("Qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
}
BECOMES = {"Llama": "Mixtral", "Mistral": "Mixtral", "Qwen2": "Qwen2Moe", "Qwen3": "Qwen3Moe"}
MLA = {"num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16}
MLA |= {"qk_rope_head_dim": 8, "v_head_dim": 16, "first_k_dense_replace": 1, "n_routed_experts": 8}
MOE = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
BIASED = {
    "deepseek_v3": ("DeepseekV3", MLA | {"n_group": 1, "topk_group": 1}),
    "deepseek_v3, groups": ("DeepseekV3", MLA | {"n_group": 4, "topk_group": 2}),
    "glm4_moe": ("Glm4Moe", {"n_routed_experts": 8, "head_dim": 16, "first_k_dense_replace": 1}),
    "minimax_m2": ("MiniMaxM2", {"num_local_experts": 8, "head_dim": 16, "rotary_dim": 8}),
    "lfm2_moe": (
        "Lfm2Moe",
        {
            "num_experts": 8,
            "num_dense_layers": 1,
            "use_expert_bias": True,
            "layer_types": ["full_attention", "conv", "full_attention"],
        },
    ),
}


def random_model(folder: Path, kind: str, settings: dict, dtype: torch.dtype = torch.float32) -> Path:
    """A random model as transformers writes it, with norms, biases and selection biases that are not 1 or 0."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SMALL | settings, pad_token_id=None)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    model.to(dtype).save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for number, (name, tensor) in enumerate(tensors.items()):
        if tensor.ndim == 1:
            drawn = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(number))
            tensors[name] = tensor + (0.3 * drawn).to(tensor.dtype)
        elif ".mlp." in name or "feed_forward" in name or "block_sparse_moe" in name:
            tensors[name] = tensor * 4  # so that experts decide the logits
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def logits(folder: Path, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    ids = torch.randint(0, SMALL["vocab_size"], (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(ids).logits.float()


def upcycled(model: Path, out: Path, *flags: object) -> Path:
    assert cli.main(["upcycle", str(model), "--out", str(out), "--quiet", *map(str, flags)]) == 0
    return out


def refused(capsys, *arguments: object) -> str:
    assert cli.main(["upcycle", *map(str, arguments)]) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("name", DENSE)
def test_a_mixture_has_the_dense_models_logits_in_transformers(name, tmp_path):
    kind, settings = DENSE[name]
    model = random_model(tmp_path / "dense", kind, settings)
    out = upcycled(model, tmp_path / "moe", "--experts", 4, "--top-k", 2)
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == [f"{BECOMES[kind]}ForCausalLM"]
    dense, moe = logits(model), logits(out)
    assert dense.std() > 0.1
    assert (moe - dense).abs().max() <= 1e-5
    # control arm: an expert that is not the dense MLP shows
    tensors = load_file(out / "model.safetensors")
    last = next(key for key in reversed(sorted(tensors)) if "experts.3." in key and ".2." in key)
    tensors[last] = tensors[last] * 1.05
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    assert (logits(out) - dense).abs().max() > 1e-4


@pytest.mark.parametrize("kind", ["Qwen2", "Qwen3"])
def test_weights_that_do_not_sum_to_one_are_seen(kind, tmp_path):
    """The control arm of the normalisation: with norm_topk_prob false the logits differ."""
    model = random_model(tmp_path / "dense", kind, {})
    out = upcycled(model, tmp_path / "moe", "--experts", 4)
    config = json.loads((out / "config.json").read_text())
    assert config["norm_topk_prob"] is True
    (out / "config.json").write_text(json.dumps(config | {"norm_topk_prob": False}))
    assert (logits(out) - logits(model)).abs().max() > 1e-2


def test_bf16_weights_are_the_same_bits_and_logits_differ_by_rounding_alone(tmp_path):
    """In float32 arithmetic a bf16 mixture is exact; in bf16 the sum over experts rounds once more."""
    for kind in ("Mistral", "Qwen2"):
        model = random_model(tmp_path / kind, kind, {}, torch.bfloat16)
        out = upcycled(model, tmp_path / f"{kind}-moe", "--experts", 4)
        assert (logits(out) - logits(model)).abs().max() <= 1e-5
        dense = logits(model, torch.bfloat16)
        assert (logits(out, torch.bfloat16) - dense).abs().max() <= 0.05 * dense.abs().max()
    before, after = (
        load_file(tmp_path / "Mistral" / "model.safetensors"),
        load_file(tmp_path / "Mistral-moe" / "model.safetensors"),
    )
    assert torch.equal(
        before["model.layers.1.mlp.up_proj.weight"],
        after["model.layers.1.block_sparse_moe.experts.3.w3.weight"],
    )
    assert {tensor.dtype for tensor in after.values()} == {torch.bfloat16}


def test_dropped_channels_are_the_same_in_the_three_matrices():
    gate, up, down = torch.randn(40, 8), torch.randn(40, 8), torch.randn(8, 40)
    change = Change(seed=3, drop=0.25)
    new = [change.applied(w, "0.1", name) for w, name in ((gate, "gate"), (up, "up"), (down, "down"))]
    rows = [(a != b).any(1) for a, b in zip((gate, up), new, strict=False)] + [(down != new[2]).any(0)]
    assert int(rows[0].sum()) == 10
    assert torch.equal(rows[0], rows[1])
    assert torch.equal(rows[0], rows[2])
    other = change.applied(gate, "0.2", "gate")
    assert not torch.equal((gate != other).any(1), rows[0])


def test_drawn_channels_have_the_mean_and_deviation_of_those_they_replace():
    weight = 5 + 2 * torch.randn(4000, 16)
    new = Change(drop=1.0).applied(weight, "0.0", "up")
    assert float(new.mean()) == pytest.approx(float(weight.mean()), abs=0.05)
    assert float(new.std()) == pytest.approx(float(weight.std()), rel=0.02)
    noisy = Change(noise=0.1).applied(weight, "0.0", "up") - weight
    assert float(noisy.square().mean().sqrt()) == pytest.approx(
        0.1 * float(weight.square().mean().sqrt()), rel=0.02
    )


@pytest.mark.parametrize("name", BIASED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_added_experts_change_no_logit_in_transformers(name, dtype, tmp_path):
    kind, settings = BIASED[name]
    model = random_model(tmp_path / "model", kind, MOE | settings, dtype)
    out = upcycled(model, tmp_path / "more", "--add-experts", 4, "--noise", 0.1)
    assert open_checkpoint(out).config != open_checkpoint(model).config
    before, after = logits(model), logits(out)
    assert (after - before).abs().max() <= 1e-5
    # control arm: opened, they change the logits
    tensors = load_file(out / "model.safetensors")
    for key in tensors:
        if key.endswith(("e_score_correction_bias", "expert_bias")):
            tensors[key][..., 8:] += 2
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    assert (logits(out) - before).abs().max() > 1e-3


def test_new_experts_are_a_group_of_their_own_where_a_router_has_groups(tmp_path, capsys):
    model = random_model(tmp_path / "model", *("DeepseekV3", MOE | MLA | {"n_group": 4, "topk_group": 2}))
    said = refused(capsys, model, "--out", tmp_path / "more", "--add-experts", 3)
    assert "4 groups of 2 experts" in said
    assert "--add-experts 4" in said
    out = upcycled(model, tmp_path / "more", "--add-experts", 2)
    config = json.loads((out / "config.json").read_text())
    assert (config["n_routed_experts"], config["n_group"], config["topk_group"]) == (10, 5, 2)


def test_stacked_experts_grow_like_single_ones(tmp_path):
    model = random_model(tmp_path / "model", *("Glm4Moe", MOE | BIASED["glm4_moe"][1]))
    tensors = load_file(model / "model.safetensors")
    stacked = {key: value for key, value in tensors.items() if ".experts." not in key}
    for layer in (1, 2):
        own = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            torch.stack([tensors[f"{own}.{e}.{part}_proj.weight"] for e in range(8)])
            for part in ("gate", "up", "down")
        )
        stacked[f"{own}.gate_up_proj"], stacked[f"{own}.down_proj"] = torch.cat((gate, up), 1), down
    other = tmp_path / "stacked"
    shutil.copytree(model, other)
    save_file(stacked, other / "model.safetensors", metadata={"format": "pt"})
    flags = ("--add-experts", 3, "--drop", 0.5)
    one = load_file(upcycled(model, tmp_path / "one", *flags) / "model.safetensors")
    two = load_file(upcycled(other, tmp_path / "two", *flags) / "model.safetensors")
    for layer in (1, 2):
        own = f"model.layers.{layer}.mlp.experts"
        assert len(two[f"{own}.down_proj"]) == 11
        for expert in range(11):
            assert torch.equal(two[f"{own}.down_proj"][expert], one[f"{own}.{expert}.down_proj.weight"])
            rows = [one[f"{own}.{expert}.{part}_proj.weight"] for part in ("gate", "up")]
            assert torch.equal(two[f"{own}.gate_up_proj"][expert], torch.cat(rows))


def test_prediction_heads_beside_the_model_grow_too(tmp_path):
    model = random_model(tmp_path / "model", *("Glm4Moe", MOE | BIASED["glm4_moe"][1]))
    tensors = load_file(model / "model.safetensors")
    last = {key: value for key, value in tensors.items() if key.startswith("model.layers.2.")}
    tensors |= {key.replace(".2.", ".3.", 1): value.clone() for key, value in last.items()}
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    after = load_file(upcycled(model, tmp_path / "more", "--add-experts", 2) / "model.safetensors")
    assert "model.layers.3.mlp.experts.9.up_proj.weight" in after
    assert len(after["model.layers.3.mlp.gate.weight"]) == 10


def test_a_closed_bias_is_below_all_others_by_more_than_a_score():
    for dtype in (torch.float32, torch.bfloat16):
        for least in (0.0, -0.3, 7.7, -1000.0, 40000.0):
            bias = torch.tensor([least, least + 1, least + 2]).to(dtype)
            assert closed(bias) + 1 < float(bias.double().min())
            assert float(torch.tensor(closed(bias)).to(dtype)) == closed(bias)


def test_the_busiest_experts_are_copied_first():
    assert parents_of(torch.tensor([0.2, -0.5, 0.1, -0.4]).double(), 2, 0, 0) == [1, 3]
    assert parents_of(torch.zeros(2).double(), 5, 0, 0) in ([0, 1, 0, 1, 0], [1, 0, 1, 0, 1])
    orders = {tuple(parents_of(torch.zeros(8).double(), 8, 0, layer)) for layer in range(4)}
    assert len(orders) == 4


def test_a_router_row_is_like_its_parents_and_not_the_same():
    parent = torch.randn(4096)
    row = beside_parent(parent, 0, 0, 8)
    assert float(row.norm() / parent.norm()) == pytest.approx(1, abs=0.05)
    assert float(torch.cosine_similarity(row, parent, 0)) == pytest.approx(0.5**0.5, abs=0.05)
    assert float(router_rows(8, 4096, 0.02, 0, 3).std()) == pytest.approx(0.02, rel=0.02)


def test_a_stopped_upcycle_continues_to_the_same_bytes(tmp_path, monkeypatch):
    model = random_model(tmp_path / "dense", "Qwen2", {})
    manifest = open_checkpoint(model)
    wish = upcycle.Upcycle(4, 2, Change(noise=0.1), 0.02)
    monkeypatch.setattr("unfreeze.compress.upcycle.made_files.__defaults__", (150_000,))
    work = upcycle.dense_work(manifest, wish)
    inputs = upcycle.inputs_of(manifest, experts=4)
    upcycle.write(work, tmp_path / "whole", inputs, None)
    files = sorted(path.name for path in (tmp_path / "whole").glob("*.safetensors"))
    assert len(files) > 5
    killed = tmp_path / "killed"
    shards_done = []

    def stop(done: int, total: int) -> None:
        shards_done.append(done)
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        upcycle.write(work, killed, inputs, stop)
    assert not (killed / "config.json").exists()
    with pytest.raises(Exception, match="an upcycle that was stopped"):
        open_checkpoint(killed)
    there = {path.name: path.stat().st_mtime_ns for path in killed.glob("*.safetensors")}
    assert 0 < len(there) < len(files)
    upcycle.write(work, killed, inputs, None)
    for name in [*files, "config.json", "model.safetensors.index.json"]:
        assert (killed / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert all((killed / name).stat().st_mtime_ns == at for name, at in there.items())
    with pytest.raises(ConfigError, match="an upcycle with --experts 4"):
        upcycle.write(work, killed, inputs | {"experts": 8}, None)
    assert largest_change(manifest, open_checkpoint(killed)) > 1e-3
    assert shards.begun(shards.Record(inputs, file="upcycle.json", noun="upcycle"), killed).finished


def test_a_quantized_model_is_refused_with_the_remedy(bases, tmp_path, capsys):
    for name in ("fp8", "int4"):
        said = refused(capsys, bases[name], "--out", tmp_path / "out", "--add-experts", 2)
        assert "is quantized" in said
        assert "--to bf16" in said


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from tests.compress.test_upcycle import killed
killed(Path(sys.argv[2]), Path(sys.argv[3]))
"""
FLAGS = ("--experts", 4, "--noise", 0.1)


def killed(model: Path, out: Path) -> None:
    """The command in a process that is killed in the middle of its third file."""
    upcycle.made_files.__defaults__ = (150_000,)
    put, files = upcycle.Shard.put, set()

    def then_die(shard: upcycle.Shard, name: str, *more: object) -> None:
        put(shard, name, *more)
        files.add(shard.path)
        if len(files) == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    upcycle.Shard.put = then_die
    upcycled(model, out, *FLAGS)


def test_a_killed_upcycle_goes_on(tmp_path, forkserver, monkeypatch):
    model, out = random_model(tmp_path / "dense", "Llama", {}), tmp_path / "out"
    assert forkserver.run(["-c", KILLED, Path(__file__).parents[2], model, out]).returncode == -9
    there = {path: path.stat().st_ino for path in out.glob("*.safetensors")}
    assert there
    assert list(out.glob(".*.unfinished-*"))
    assert not (out / "config.json").exists()
    monkeypatch.setattr("unfreeze.compress.upcycle.made_files.__defaults__", (150_000,))
    upcycled(model, out, *FLAGS)
    upcycled(model, tmp_path / "at once", *FLAGS)
    assert {path: path.stat().st_ino for path in there} == there
    assert not list(out.glob(".*.unfinished-*"))
    for file in (tmp_path / "at once").glob("*.safetensors"):
        assert file.read_bytes() == (out / file.name).read_bytes()


def test_no_more_than_a_matrix_is_in_memory_at_once(tmp_path, monkeypatch):
    """Experts are written matrix by matrix, of a stack too; copies go in pieces."""
    put, sizes = upcycle.Shard.put, []

    def watched(shard: upcycle.Shard, name: str, tensor: torch.Tensor, *more: int) -> None:
        sizes.append(tensor.numel())
        put(shard, name, tensor, *more)

    monkeypatch.setattr("unfreeze.compress.upcycle.Shard.put", watched)
    upcycled(random_model(tmp_path / "dense", "Qwen2", {}), tmp_path / "moe", "--noise", 0.1)
    assert max(sizes) == 64 * 96
    glm = random_model(tmp_path / "glm", *("Glm4Moe", MOE | BIASED["glm4_moe"][1]))
    sizes.clear()
    upcycled(glm, tmp_path / "more", "--add-experts", 8, "--noise", 0.1)
    assert max(sizes) == 64 * 32


def test_a_full_disk_is_seen_before_anything_is_written(tmp_path, monkeypatch, capsys):
    model = random_model(tmp_path / "dense", "Llama", {})
    monkeypatch.setattr(
        "unfreeze.compress.shards.shutil.disk_usage", lambda _: type("", (), {"free": 100_000})
    )
    said = refused(capsys, model, "--out", tmp_path / "moe")
    assert " for 1 file;" in said
    assert not (tmp_path / "moe").exists()


@pytest.mark.parametrize("kind", ["Llama", "Qwen3"])
def test_fields_that_a_config_leaves_to_its_class_are_written_out(kind, tmp_path):
    """Mixtral's defaults are others: rope_theta 1e6, eps 1e-5, 8 key-value heads."""
    model = random_model(tmp_path / "dense", kind, {"num_key_value_heads": 4, "head_dim": 16})
    config = json.loads((model / "config.json").read_text())
    left_out = ["rope_parameters", "rms_norm_eps", "tie_word_embeddings"]
    left_out += ["num_key_value_heads", "head_dim"] if kind == "Llama" else []
    short = {name: value for name, value in config.items() if name not in left_out}
    (model / "config.json").write_text(json.dumps(short))
    out = upcycled(model, tmp_path / "moe", "--experts", 4)
    assert (logits(out) - logits(model)).abs().max() <= 1e-5
