"""unfreeze swap: transformers' logits before; all that stays has its bits; a stopped swap goes on."""

import json
import os
import shutil
import signal
import weakref
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import unfreeze
from tests.compress.test_upcycle import logits, random_model
from unfreeze import cli
from unfreeze.compress import swap, upcycle
from unfreeze.compress.swapped import Wish, same
from unfreeze.core.errors import UserError

IDS = torch.randint(0, 96, (40,), generator=torch.Generator().manual_seed(1)).tolist()
ATTENTION = "layers.*.self_attn"


def swapped(model: Path, out: Path, *words: object) -> Path:
    assert cli.main(["swap", str(model), *map(str, words), "--out", str(out), "--quiet"]) == 0
    return out


def ours(folder: Path, ids: list[int] = IDS) -> torch.Tensor:
    return unfreeze.load(folder, dtype="float32").logits([ids])[0]


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def assert_same_bits(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> None:
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype
        assert torch.equal(after[name].view(torch.uint8), tensor.view(torch.uint8)), name


@pytest.mark.parametrize("kind", ["Llama", "Qwen3", "Mistral"])
def test_full_in_place_of_full_is_the_same_folder(kind, tmp_path):
    model = random_model(tmp_path / "model", kind, {"sliding_window": None} if kind == "Mistral" else {})
    (model / "README.md").write_text("mine")
    (model / "tokenizer_config.json").write_text("{}")
    before = logits(model)
    out = swapped(model, tmp_path / "out", ATTENTION, "full")
    names = sorted(path.name for path in model.iterdir())
    assert names == sorted(path.name for path in out.iterdir())
    for name in names:
        assert (out / name).read_bytes() == (model / name).read_bytes()
    assert torch.equal(logits(out), before)  # transformers loads it, too
    swapped(model, out, ATTENTION, "full")  # a second time: nothing to write
    # control arm: a window is not full
    other = swapped(model, tmp_path / "other", ATTENTION, "sliding_window", "--set", "window=8")
    assert (ours(other) - ours(model)).abs().max() > 1e-2


def test_a_window_has_the_logits_of_transformers_mistral(tmp_path):
    plain = random_model(tmp_path / "plain", "Mistral", {"sliding_window": None})
    window = tmp_path / "window"
    shutil.copytree(plain, window)
    config = json.loads((plain / "config.json").read_text())
    (window / "config.json").write_text(json.dumps(config | {"sliding_window": 8}))
    oracle = transformers.AutoModelForCausalLM.from_pretrained(window, dtype=torch.float32).eval()
    with torch.no_grad():
        wanted = oracle(torch.tensor([IDS])).logits[0]
    out = swapped(plain, tmp_path / "out", ATTENTION, "sliding_window", "--set", "window=8")
    assert (ours(out) - wanted).abs().max() <= 1e-5
    back = swapped(out, tmp_path / "back", ATTENTION, "full")
    assert torch.equal(ours(back), ours(plain))
    # control arm: one token more in the window
    other = swapped(plain, tmp_path / "other", ATTENTION, "sliding_window", "--set", "window=9")
    assert (ours(other) - wanted).abs().max() > 1e-3


def test_norms_on_queries_and_keys_are_those_of_transformers_qwen3(tmp_path):
    llama = random_model(tmp_path / "llama", "Llama", {"rms_norm_eps": 1e-6})
    out = swapped(llama, tmp_path / "out", ATTENTION, "qk_norm")
    assert_same_bits(tensors(llama), tensors(out))
    config = json.loads((llama / "config.json").read_text())
    qwen = {**config, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
    file = out / "config.json"
    mine = file.read_text()
    file.write_text(json.dumps(qwen))
    wanted = logits(out)
    ids = torch.randint(0, 96, (2, 40), generator=torch.Generator().manual_seed(1)).tolist()
    file.write_text(mine)
    model = unfreeze.load(out, dtype="float32")
    assert (torch.stack(model.logits(ids)) - wanted).abs().max() <= 1e-5
    # control arm: a gain that is not 1
    with torch.no_grad():
        model.decoder.layers[1].self_attn.q_norm.weight.mul_(1.5)
    assert (torch.stack(model.logits(ids)) - wanted).abs().max() > 1e-3


def test_packed_experts_of_tiny_k2_stay_packed_to_the_bit(tmp_path, planted_parts):
    out = swapped(unfreeze.TINY_K2, tmp_path / "out", "layers.1-3.self_attn", "gated", "--seed", 3)
    before, after = tensors(unfreeze.TINY_K2), tensors(out)
    assert_same_bits(before, after)
    assert any(name.endswith("weight_packed") for name in before)
    new = sorted(after.keys() - before.keys())
    assert new == [f"model.layers.{layer}.self_attn.out_gate.weight" for layer in (1, 2, 3)]
    assert {after[name].dtype for name in new} == {torch.bfloat16}
    model = unfreeze.load(out, dtype="float32")
    assert len(model.decoder.packed_weights()) == 6
    assert model.generate([1280, 5, 6], max_new_tokens=3)
    for name in ("tiktoken.model", "tokenizer_config.json", "generation_config.json"):
        assert (out / name).read_bytes() == (unfreeze.TINY_K2 / name).read_bytes()
    # a gate of 0 is the model without the part
    with torch.no_grad():
        for layer in model.decoder.layers[1:]:
            layer.self_attn.out_gate.weight.zero_()
    ids = list(range(60))
    assert torch.equal(model.logits([ids])[0], ours(unfreeze.TINY_K2, ids))


def test_a_changed_bit_of_a_kept_tensor_is_seen(tmp_path, monkeypatch):
    """The control arm of the bits: a copy that rounds to bf16 and back differs."""
    model = random_model(tmp_path / "model", "Llama", {})

    def rounded(name, info):
        tensor = load_file(info.file)[info.name]
        return upcycle.put(name, tensor.bfloat16().to(tensor.dtype))

    monkeypatch.setattr(swap, "copied", rounded)
    out = swapped(model, tmp_path / "out", ATTENTION, "qk_norm")
    with pytest.raises(AssertionError):
        assert_same_bits(tensors(model), tensors(out))


def test_what_cannot_stay_packed_is_refused_by_name(tmp_path, planted_parts, capsys):
    out = tmp_path / "out"
    for words, said in (
        (("layers.2", "unpacked"), "model.layers.2.mlp.experts.gate_up_proj is packed in"),
        (("layers.2", "kept", "--init", "new"), "its codes cannot be drawn anew"),
    ):
        assert cli.main(["swap", str(unfreeze.TINY_K2), *words, "--out", str(out)]) == 2
        assert said in capsys.readouterr().err
        assert not out.exists()
    # the dense layer has no experts, and can be drawn
    new = tensors(swapped(unfreeze.TINY_K2, out, "layers.0", "kept", "--init", "new"))
    before = tensors(unfreeze.TINY_K2)
    assert new.keys() == before.keys()
    changed = {name for name in new if not torch.equal(new[name], before[name])}
    assert all(name.startswith("model.layers.0.") for name in changed)
    assert "model.layers.0.mlp.up_proj.weight" in changed
    assert json.loads((out / "config.json").read_text()) == json.loads(
        (unfreeze.TINY_K2 / "config.json").read_text()
    )


def test_shapes_that_do_not_fit_are_refused_or_drawn(tmp_path, planted_parts, capsys):
    model = random_model(tmp_path / "model", "Llama", {})
    assert cli.main(["swap", str(model), ATTENTION, "narrow", "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert "k_proj.weight is [32, 64], and narrow needs [16, 64]" in said
    assert "--init new" in said
    out = swapped(model, tmp_path / "out", "layers.1.self_attn", "narrow", "--init", "new")
    before, after = tensors(model), tensors(out)
    changed = {name for name in before if not torch.equal(after[name], before[name])}
    assert {name.rpartition("self_attn.")[0] for name in changed} == {"model.layers.1."}
    assert after["model.layers.1.self_attn.k_proj.weight"].shape == (16, 64)
    std = float(after["model.layers.1.self_attn.q_proj.weight"].std())
    assert std == pytest.approx(0.02, rel=0.1)  # initializer_range
    into = float(after["model.layers.1.self_attn.o_proj.weight"].std())
    assert into == pytest.approx(0.02 / 6**0.5, rel=0.1)  # and 1/sqrt(2 · 3 layers) into the residual


def test_drawn_values_follow_the_seed_alone(tmp_path, planted_parts):
    """Files and memory, two processes' ways, one and three files: the same bits; another seed's differ."""
    words = ("layers.1-2.self_attn", "gated")
    one = tensors(swapped(unfreeze.TINY_K2, tmp_path / "one", *words, "--seed", 1))
    again = tensors(swapped(unfreeze.TINY_K2, tmp_path / "again", *words, "--seed", 1))
    other = tensors(swapped(unfreeze.TINY_K2, tmp_path / "other", *words, "--seed", 2))
    name = "model.layers.2.self_attn.out_gate.weight"
    assert torch.equal(one[name], again[name])
    assert not torch.equal(one[name], other[name])
    assert not torch.equal(one[name], one[name.replace(".2.", ".1.")])
    loaded = unfreeze.load(unfreeze.TINY_K2, dtype="bfloat16")
    in_memory = unfreeze.swap(loaded, *words, seed=1).decoder
    assert torch.equal(in_memory.layers[2].self_attn.out_gate.weight, one[name])


def test_names_inside_a_larger_model_and_tensors_beside_it_stay(tmp_path):
    """A vision release: the language model's names have a prefix, and so have new ones."""
    model = random_model(tmp_path / "model", "Mistral", {"sliding_window": None})
    own = {f"language_model.{name}": tensor for name, tensor in tensors(model).items()}
    own["vision_tower.patch_conv.weight"] = torch.randn(4, 4)
    save_file(own, model / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({"model_type": "mistral3", "text_config": config}))
    out = swapped(model, tmp_path / "out", "layers.0.self_attn", "qk_norm")
    after = tensors(out)
    assert_same_bits(own, after)
    assert after.keys() - own.keys() == {
        f"language_model.model.layers.0.self_attn.{name}_norm.weight" for name in "qk"
    }
    assert ours(out).isfinite().all()
    swapped_again = swapped(out, tmp_path / "again", "layers.1.self_attn", "qk_norm")
    assert len(json.loads((swapped_again / "config.json").read_text())["parts"]) == 2


def test_a_second_swap_adds_to_the_parts(tmp_path):
    model = random_model(tmp_path / "model", "Llama", {"tie_word_embeddings": True})
    one = swapped(model, tmp_path / "one", ATTENTION, "sliding_window", "--set", "window=8")
    two = swapped(one, tmp_path / "two", "layers.1-2.self_attn", "qk_norm")
    config = json.loads((two / "config.json").read_text())
    assert config["model_type"] == "unfreeze_parts"
    assert config["base_model_type"] == "llama"
    assert "architectures" not in config
    assert config["parts"] == [
        {"at": ATTENTION, "part": "sliding_window", "window": 8},
        {"at": "layers.1-2.self_attn", "part": "qk_norm"},
    ]
    assert_same_bits(tensors(model), tensors(two))
    # what is there already is a copy, and transformers refuses the model
    same_again = swapped(two, tmp_path / "again", ATTENTION, "sliding_window", "--set", "window=8")
    assert (same_again / "config.json").read_bytes() == (two / "config.json").read_bytes()
    with pytest.raises(ValueError, match="unfreeze_parts"):
        transformers.AutoModelForCausalLM.from_pretrained(two)


def test_settings_and_parts_decide_what_is_the_same():
    linear = torch.nn.Linear(2, 3, device="meta")
    assert same(linear, torch.nn.Linear(2, 3, device="meta"))
    assert not same(linear, torch.nn.Linear(2, 4, device="meta"))
    assert not same(linear, torch.nn.Linear(2, 3, bias=False, device="meta"))
    other = torch.nn.Linear(2, 3, device="meta")
    other.extra = 1
    assert not same(linear, other)
    assert not same(torch.nn.Sequential(linear), torch.nn.Sequential(linear, linear))


KILLED = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from tests.compress.test_swap import killed
killed(Path(sys.argv[2]), Path(sys.argv[3]))
"""


def killed(model: Path, out: Path) -> None:
    """The command in a process that is killed in the middle of its third file."""
    upcycle.made_files.__defaults__ = (30_000,)
    copy, files = upcycle.Shard.copy, set()

    def then_die(shard: upcycle.Shard, name: str, *more: object) -> None:
        copy(shard, name, *more)
        files.add(shard.path)
        if len(files) == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    upcycle.Shard.copy = then_die
    swapped(model, out, ATTENTION, "qk_norm")


def test_a_killed_swap_goes_on(tmp_path, forkserver, monkeypatch, capsys):
    model, out = random_model(tmp_path / "model", "Llama", {}), tmp_path / "out"
    assert forkserver.run(["-c", KILLED, Path(__file__).parents[2], model, out]).returncode == -9
    there = {path: path.stat().st_ino for path in out.glob("*.safetensors")}
    assert there
    assert list(out.glob(".*.unfinished-*"))
    assert not (out / "config.json").exists()
    assert cli.main(["inspect", str(out)]) == 2
    assert "a swap that was stopped" in capsys.readouterr().err
    other = ["swap", str(model), ATTENTION, "qk_norm", "--seed", "1", "--out", str(out)]
    assert cli.main(other) == 2
    assert "holds a swap with --seed 0" in capsys.readouterr().err
    monkeypatch.setattr("unfreeze.compress.upcycle.made_files.__defaults__", (30_000,))
    swapped(model, out, ATTENTION, "qk_norm")
    swapped(model, tmp_path / "at once", ATTENTION, "qk_norm")
    assert {path: path.stat().st_ino for path in there} == there
    assert not list(out.glob(".*.unfinished-*"))
    for file in (tmp_path / "at once").iterdir():
        if file.name != "swap.json":
            assert file.read_bytes() == (out / file.name).read_bytes()


def test_a_stopped_copy_goes_on_and_others_files_are_left_alone(tmp_path, monkeypatch, capsys):
    model, out = random_model(tmp_path / "model", "Llama", {}), tmp_path / "out"
    out.mkdir()
    (out / ".model.safetensors.unfinished-1").write_bytes(b"half")
    shutil.copy(model / "generation_config.json", out)
    swapped(model, out, ATTENTION, "full")
    assert sorted(path.name for path in out.iterdir()) == sorted(path.name for path in model.iterdir())
    (out / "mine.txt").write_text("")
    assert cli.main(["swap", str(model), ATTENTION, "full", "--out", str(out)]) == 2
    assert "holds mine.txt, not this model" in capsys.readouterr().err


def test_a_full_disk_is_seen_before_anything_is_written(tmp_path, monkeypatch, capsys):
    model = random_model(tmp_path / "model", "Llama", {})
    for module in ("shards", "swap"):
        monkeypatch.setattr(
            f"unfreeze.compress.{module}.shutil.disk_usage", lambda _: type("", (), {"free": 1000})
        )
    for part in ("full", "qk_norm"):
        assert cli.main(["swap", str(model), ATTENTION, part, "--out", str(tmp_path / "out")]) == 2
        assert "disk: " in capsys.readouterr().err
        assert not (tmp_path / "out").exists()


def test_no_more_than_a_new_parameter_is_in_memory_at_once(tmp_path, monkeypatch, planted_parts):
    """Copies go in pieces; drawn values are made when their turn comes, one after the other."""
    alive, drawn = [], swap.value_of

    def watched(*arguments):
        value = drawn(*arguments)
        alive.append(weakref.ref(value))
        assert sum(ref() is not None for ref in alive) <= 2  # the last one is dropped behind the new one
        return value

    monkeypatch.setattr(swap, "value_of", watched)
    swapped(unfreeze.TINY_K2, tmp_path / "out", ATTENTION, "gated")
    assert len(alive) == 4


def test_wishes_are_checked():
    assert Wish(ATTENTION, "sliding_window", {"window": 4}).words == "window=4"
    with pytest.raises(UserError, match="nearest: 'window'"):
        _ = Wish(ATTENTION, "sliding_window", {"windov": 4}).words
