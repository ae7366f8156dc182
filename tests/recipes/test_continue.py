"""`unfreeze sft --adapter`: a run that goes on from an adapter begins where that adapter's run ended."""

import json
import shutil
import warnings

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file

import unfreeze
from unfreeze import cli
from unfreeze.commands.demo import TINY_K2
from unfreeze.job.trained import TOKENIZER_FILES

WORDS = ["--tokens-per-step", "64", "--learning-rate", "2e-3", "--watch.samples", "0", "--dtype", "float32"]


def sft(capsys, *arguments, code=0):
    assert cli.main(["sft", "--json", *map(str, arguments), *WORDS]) == code
    said = capsys.readouterr()
    return said.err if code else json.loads(said.out.splitlines()[-1])


def evals(run):
    found = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [event["loss"] for event in found if event["kind"] == "eval"]


@pytest.fixture(scope="module", autouse=True)
def fewer_layers(two_layers):
    """Runs of this file train the first two of tiny-k2's four layers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "TINY_K2", two_layers)
        yield


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    turns = [{"prompt": f"What is {n}?", "completion": f"{n}, it is. Hmm."} for n in range(4)]
    path.write_text("".join(json.dumps(row) + "\n" for row in turns))
    return path


@pytest.fixture(scope="module")
def first(tmp_path_factory, rows, held_rows):
    """A run with other ranks in its experts, and its last validation."""
    out = tmp_path_factory.mktemp("first") / "run"
    ranks = ["--lora.rank", "4", "--lora.experts-rank", "3", "--lora.alpha", "8"]
    given = ["--model", TINY_K2, "--data", rows, "--validation", held_rows, "--out", out, "--steps", 3]
    assert cli.main(["sft", "--quiet", *map(str, given), *ranks, *WORDS]) == 0
    return out, evals(out)[-1]


@pytest.fixture
def again(tmp_path, rows, held_rows):
    """The arguments of a run that goes on, and its folder."""
    out = tmp_path / "again"
    data = ["--data", rows, "--validation", held_rows]
    return ["--model", TINY_K2, *data, "--out", out, "--steps", 2], out


@pytest.mark.parametrize("source", ["run", "adapter", "export"])
def test_the_first_validation_is_the_last_of_the_run_before(source, first, again, capsys, tmp_path):
    run, last = first
    if source == "adapter":
        shutil.copytree(run / "adapter", tmp_path / "sent")
        run = tmp_path / "sent"
    if source == "export":
        assert cli.main(["export", str(run), "--for", "sglang", "--out", str(tmp_path / "e"), "--quiet"]) == 0
        run = tmp_path / "e"
    arguments, out = again
    sft(capsys, *arguments, "--adapter", run)
    assert evals(out)[0] == pytest.approx(last, rel=0, abs=1e-6)
    assert abs(evals(out)[-1] - last) > 1e-4  # and it learns
    config = json.loads((out / "resolved_config.json").read_text())
    # an export has one rank: what of it is padding shows in its numbers only
    assert (config["lora.rank"], config["lora.experts_rank"]) == (4, None if source == "export" else 3)

    # the same ranks are written
    shapes = {
        name: tensor.shape
        for name, tensor in load_file(first[0] / "adapter/adapter_model.safetensors").items()
    }
    after = load_file(out / "adapter/adapter_model.safetensors")
    assert {name: tensor.shape for name, tensor in after.items()} == shapes


def test_the_model_is_the_adapters_base_unless_one_is_given(first, again, capsys, tmp_path):
    (_, base, *arguments), out = again
    assert sft(capsys, *arguments, "--adapter", first[0])["finished"]
    assert json.loads((out / "resolved_config.json").read_text())["model"] == str(base)
    shutil.rmtree(out)
    sent = tmp_path / "sent"
    shutil.copytree(first[0] / "adapter", sent)
    named = json.loads((sent / "adapter_config.json").read_text())
    (sent / "adapter_config.json").write_text(json.dumps({**named, "base_model_name_or_path": "/no/where"}))
    said = sft(capsys, *arguments, "--adapter", sent, code=2)
    assert "is an adapter of /no/where: " in said and "--model DIR" in said and not out.exists()
    assert sft(capsys, "--model", base, *arguments, "--adapter", sent)["finished"]  # control arm
    (sent / "adapter_config.json").write_text(json.dumps({**named, "base_model_name_or_path": None}))
    assert "so the adapter's base is unknown" in sft(capsys, *arguments, "--adapter", sent, code=2)
    assert "needs --model" in sft(capsys, *arguments, code=2)  # without --adapter


def test_without_it_a_run_begins_elsewhere(first, again, capsys):
    """Control arm."""
    arguments, out = again
    sft(capsys, *arguments)
    assert abs(evals(out)[0] - first[1]) > 1e-3


def test_it_resumes_and_another_adapter_is_not_resumed(first, again, capsys, tmp_path):
    arguments, out = again
    whole = sft(capsys, *arguments, "--adapter", first[0])
    assert whole["finished"]
    shutil.copytree(first[0] / "adapter", tmp_path / "other")
    (out / "adapter" / "adapter_config.json").unlink()  # so that it is not just finished
    said = sft(capsys, *arguments, "--adapter", tmp_path / "other", code=2)
    assert "with another c" in said and str(tmp_path / "other") in said
    assert sft(capsys, *arguments, "--adapter", first[0])["finished"]
    assert (out / "adapter" / "adapter_config.json").is_file()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--lora.rank", 8], "lora.rank = 8, but the adapter in"),
        (["--train", "all"], "remove adapter"),
        (["--adapter", "nowhere"], "nowhere is not a run and has no adapter_config.json"),
    ],
)
def test_what_contradicts_it_is_refused_without_a_folder(more, said, first, again, capsys):
    arguments, out = again
    assert said in sft(
        capsys, *arguments, *([] if "--adapter" in more else ["--adapter", first[0]]), *more, code=2
    )
    assert not out.exists()


def test_an_adapter_that_is_not_plain_lora_is_refused_without_a_folder(first, again, capsys, tmp_path):
    shutil.copytree(first[0] / "adapter", tmp_path / "odd")
    path = tmp_path / "odd" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"lora_bias": True}))
    arguments, out = again
    assert "lora_bias = True is not built" in sft(capsys, *arguments, "--adapter", tmp_path / "odd", code=2)
    assert not out.exists()


def test_the_zeros_that_an_export_needs_are_named_as_such(rows, capsys, tmp_path):
    run, given = tmp_path / "run", ["--data", rows, "--steps", 1]
    sft(capsys, "--model", TINY_K2, *given, "--out", run, "--lora.targets", "q_a_proj", "--lora.rank", 2)
    for reader in ("sglang", "peft"):
        out = tmp_path / reader
        assert cli.main(["export", str(run), "--for", reader, "--out", str(out), "--quiet"]) == 0
    asked = [*given, "--out", tmp_path / "again", "--adapter"]
    said = sft(capsys, *asked, tmp_path / "sglang", code=2)
    assert "A and B of 2 of its matrices (kv_a_proj_with_mqa) are all zeros" in said
    assert "the run itself, or its export for peft" in said
    assert sft(capsys, *asked, tmp_path / "peft")["finished"]  # control arm


FUSED = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
FOREIGN = {
    "llama": {"target_modules": ["q_proj", "down_proj"], "use_rslora": True, "rank_pattern": {"q_proj": 2}},
    "qwen3-moe": {"target_modules": ["q_proj"], "target_parameters": FUSED, "alpha_pattern": {"q_proj": 3}},
    "deepseek": {"target_modules": ["q_a_proj", "gate_proj", "up_proj", "down_proj"]},  # rewritten by peft
}
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
MODELS = {
    "llama": ("Llama", SMALL),
    "qwen3-moe": ("Qwen3Moe", {**SMALL, **EXPERTS, "num_experts": 4, "head_dim": 8}),
    "deepseek": (
        "DeepseekV3",
        {
            **SMALL,
            **EXPERTS,
            "num_attention_heads": 2,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            **{
                "q_lora_rank": 16,
                "kv_lora_rank": 8,
                "qk_nope_head_dim": 8,
                "qk_rope_head_dim": 8,
                "v_head_dim": 8,
            },
        },
    ),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_an_adapter_that_peft_made_is_trained_on_and_read_by_peft_again(
    case, rows, held_rows, capsys, tmp_path
):
    family, sizes = MODELS[case]
    vocab = json.loads((TINY_K2 / "config.json").read_text())["vocab_size"]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**sizes, vocab_size=vocab)
    config._attn_implementation = config._experts_implementation = "eager"
    base = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    folder = tmp_path / "base"
    base.save_pretrained(folder)
    for name in TOKENIZER_FILES:
        if (TINY_K2 / name).is_file() and name != "generation_config.json":
            shutil.copy(TINY_K2 / name, folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        settings = peft.LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **FOREIGN[case])
        tuned = peft.get_peft_model(base, settings).eval()
        for name, parameter in tuned.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
        tuned.save_pretrained(tmp_path / "theirs")
        ids = torch.tensor([[5, 6, 7, 300, 401, 77]])
        theirs = tuned(ids).logits[0].detach()
        config_path = tmp_path / "theirs" / "adapter_config.json"
        said = json.loads(config_path.read_text())
        config_path.write_text(json.dumps({**said, "base_model_name_or_path": str(folder)}))
        assert (
            unfreeze.load(tmp_path / "theirs", dtype="float32").logits(ids.tolist())[0] - theirs
        ).abs().max() < 1e-4

        out = tmp_path / "run"
        data = ["--data", rows, "--validation", held_rows, "--steps", 2]
        sft(capsys, "--model", folder, *data, "--out", out, "--adapter", tmp_path / "theirs")
        plain = tmp_path / "plain"
        sft(capsys, "--model", folder, *data, "--out", plain)
        assert abs(evals(out)[0] - evals(plain)[0]) > 1e-3  # the adapter was there at the first validation
        assert evals(out)[1] < evals(out)[0]

        # what was trained on, in peft's hands
        ours = unfreeze.load(out, dtype="float32").logits(ids.tolist())[0]
        again = getattr(transformers, f"{family}ForCausalLM").from_pretrained(folder, dtype=torch.float32)
        again = peft.PeftModel.from_pretrained(again, out / "adapter").eval()
        assert (ours - again(ids).logits[0]).abs().max() < 1e-4 < (ours - theirs).abs().max()
