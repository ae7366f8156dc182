"""unfreeze upcycle as a command: its figures, the files beside the weights, what it refuses."""

import json

import pytest
import torch
import transformers

from tests.compress.test_upcycle import MOE, logits, random_model, refused, upcycled
from unfreeze import cli


@pytest.mark.parametrize("flags", [("--noise", 0.05), ("--drop", 0.5)])
def test_noise_and_drop_change_the_outputs_and_the_command_says_by_how_much(flags, tmp_path, capsys):
    model = random_model(tmp_path / "dense", "Llama", {})
    command = ["upcycle", model, "--out", tmp_path / "moe", "--experts", 4, *flags, "--json"]
    assert cli.main(list(map(str, command))) == 0
    said = capsys.readouterr()
    change = json.loads(said.out)["change"]
    assert change > 0.01
    assert f"of an MLP by {100 * change:.2g} %" in said.err
    assert (logits(tmp_path / "moe") - logits(model)).abs().max() > 1e-3
    # read back from the files with transformers' own layer
    moe = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "moe", dtype=torch.float32).model
    dense = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).model
    x_TD = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    changes = []
    for layer in range(3):
        x = x_TD * dense.layers[layer].post_attention_layernorm.weight
        with torch.no_grad():
            y, changed = dense.layers[layer].mlp(x), moe.layers[layer].mlp(x[None])
        changed = (changed[0] if isinstance(changed, tuple) else changed).reshape(64, 64)
        changes.append(float((changed - y).norm() / y.norm()))
    assert change == pytest.approx(max(changes), rel=1e-4)


def test_files_beside_the_weights_go_along_and_a_card_names_the_model(tmp_path):
    model = random_model(tmp_path / "tiny", "Llama", {})
    (model / "tokenizer.json").write_text("{}")
    (model / "README.md").write_text("---\nlicense: apache-2.0\n---\nmine")
    out = upcycled(model, tmp_path / "moe", "--experts", 3)
    assert (out / "tokenizer.json").read_text() == "{}"
    assert (out / "README.base.md").read_text().endswith("mine")
    card = (out / "README.md").read_text()
    assert 'license: "apache-2.0"' in card
    assert "A mixture of 3 experts, 2 per token, made of tiny with unfreeze" in card
    assert str(tmp_path) not in card
    assert json.loads((out / "upcycle.json").read_text())["settings"]["experts"] == 3


def test_the_plan_and_inspect_read_a_mixture(tmp_path, capsys):
    model = random_model(tmp_path / "dense", "Qwen3", {})
    out = upcycled(model, tmp_path / "moe")
    assert cli.main(["plan", "--model", str(out), "--json", "--quiet"]) == 0
    assert cli.main(["inspect", str(out), "--json", "--quiet"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["family"] == "qwen3_moe"


def test_bad_input_is_one_line_and_writes_nothing(tmp_path, capsys):
    model = random_model(tmp_path / "dense", "Llama", {})
    out = tmp_path / "out"
    cases = {
        ("--experts", "4", "--top-k", "5"): "--top-k 5 is more than --experts 4",
        ("--experts", "1"): "a mixture has at least 2",
        ("--experts", "0"): "a mixture has at least 2",
        ("--top-k", "1"): "the router gets no gradient",
        ("--add-experts", "2"): "is a dense llama",
        ("--noise", "-1"): "noise",
        ("--drop", "1.5"): "drop",
    }
    for flags, words in cases.items():
        assert words in refused(capsys, model, "--out", out, *flags)
        assert not out.exists()
    assert "unfreeze upcycle needs --out" in refused(capsys, model)
    assert "the model's own folder" in refused(capsys, model, "--out", model)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("")
    assert "holds mine, not an upcycle" in refused(capsys, model, "--out", tmp_path / "full")
    moe = upcycled(model, tmp_path / "moe")
    assert "is a mixture of 8 experts already" in refused(capsys, moe, "--out", out)
    said = refused(capsys, moe, "--out", out, "--add-experts", 2)
    assert "no bias for the choice alone" in said
    both = ("--add-experts", 2, "--experts", 4)
    assert "keeps a mixture's own experts" in refused(capsys, moe, "--out", out, *both)
    assert not out.exists()


def test_families_without_a_mixture_and_biases_that_mixtral_lacks_are_refused(tmp_path, capsys):
    gemma = random_model(tmp_path / "gemma", "Gemma2", {"head_dim": 16})
    said = refused(capsys, gemma, "--out", tmp_path / "out")
    assert "is a gemma2" in said
    assert "llama → mixtral, mistral → mixtral, qwen2 → qwen2_moe, qwen3 → qwen3_moe" in said
    for name in ("attention_bias", "mlp_bias"):
        llama = random_model(tmp_path / name, "Llama", {name: True})
        assert f"{name} is true" in refused(capsys, llama, "--out", tmp_path / "out")
    ernie = {"moe_num_experts": 8, "moe_k": 2, "moe_layer_start_index": 1}
    model = random_model(tmp_path / "ernie", "Ernie4_5_Moe", MOE | ernie)
    said = refused(capsys, model, "--out", tmp_path / "out", "--add-experts", 2)
    assert "softmax" in said
