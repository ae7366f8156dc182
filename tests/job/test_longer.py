"""A run on more positions than its base has: what it writes, and what goes on from it, has the scaling."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers

import unfreeze
from unfreeze import cli
from unfreeze.checkpoint import open_checkpoint, save_checkpoint
from unfreeze.commands.demo import TINY_K2
from unfreeze.config.adapter import ROPE, longer_of
from unfreeze.core.batch import Batch
from unfreeze.core.errors import AdapterError
from unfreeze.core.longer import Longer
from unfreeze.generate.open import open_model
from unfreeze.models import build, initialize, shape
from unfreeze.models.longer import lengthened
from unfreeze.models.publish import published

STORIES = Path(__file__).resolve().parents[3] / "shared" / "data" / "stories260k"
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.2,
    "tie_word_embeddings": True,
    "vocab_size": 1536,
    "torch_dtype": "float32",
}
SCALED = ("--rope-scaling", "yarn", "--rope-factor", "4")
IDS = list(range(5, 205))
"""More tokens than the base has positions."""


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base") / "base"
    model = build(shape(CONFIG), dtype=torch.float32, device="cpu")
    initialize(model, 0)
    extra = {name: TINY_K2 / name for name in ("tiktoken.model", "tokenizer_config.json")}
    save_checkpoint(folder, CONFIG, published(model, CONFIG), extra=extra)
    return folder


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Documents of about 150 tokens."""
    path = tmp_path_factory.mktemp("data") / "long.jsonl"
    row = {"prompt": "Count.", "completion": " ".join(map(str, range(60)))}
    path.write_text("".join(json.dumps({**row, "prompt": f"Count to {n}."}) + "\n" for n in range(12)))
    return path


def sft(model, rows, out, *flags):
    line = ["sft", "--model", model, "--data", rows, "--out", out, "--tokens-per-step", 512, "--steps", 2]
    line += ["--dtype", "float32", "--watch.samples", 0, "--threads", 1, "--lora.rank", 2]
    return [str(word) for word in [*line, "--learning-rate", "5e-2", *flags]]


@pytest.fixture(scope="module")
def run(base, rows, tmp_path_factory):
    out = tmp_path_factory.mktemp("longer") / "run"
    assert cli.main([*sft(base, rows, out, *SCALED), "--quiet"]) == 0
    return out


def theirs(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model.eval()(torch.tensor([IDS])).logits[0]


def test_its_documents_are_longer_than_the_bases_positions(run, read_events):
    data = read_events(run, "data")[0]
    assert data["truncated"] == 0 and data["tokens"] / data["examples"] > 64
    record = json.loads((run / "resolved_config.json").read_text())
    assert (record["rope.scaling"], record["rope.factor"]) == ("yarn", 4)


def test_control_arm_without_the_fields_they_are_cut(base, rows, tmp_path, read_events):
    assert cli.main([*sft(base, rows, tmp_path / "run"), "--quiet"]) == 0
    assert read_events(tmp_path / "run", "data")[0]["truncated"] == 12
    assert not (tmp_path / "run" / "adapter" / ROPE).exists()


def test_merged_it_has_the_runs_logits_in_transformers_at_positions_the_base_lacks(
    base, run, tmp_path, unfreeze_json, capsys
):
    out = tmp_path / "out"
    unfreeze_json("merge", run, "--out", out, "--no-check")
    config = json.loads((out / "config.json").read_text())
    assert config["max_position_embeddings"] == 256 and config["architectures"] == CONFIG["architectures"]
    table = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert config["rope_parameters"] == {**table, "rope_theta": 1e4} and config["rope_theta"] == 1e4
    assert config["rope_scaling"] == {**table, "type": "yarn"}
    ours = unfreeze.load(run, dtype="float32").logits([IDS])[0]
    torch.testing.assert_close(theirs(out), ours, rtol=0, atol=1e-4)
    assert (theirs(base) - ours).abs().max() > 1e-2  # control
    assert cli.main(["inspect", str(out)]) == 0
    assert "256 positions (yarn, factor 4)" in capsys.readouterr().out


def test_a_merge_into_bf16_and_every_weight_have_it_too(base, rows, run, tmp_path, unfreeze_json):
    unfreeze_json("merge", run, "--to", "bf16", "--out", tmp_path / "out", "--no-check")
    flags = [word for word in sft(base, rows, tmp_path / "all", *SCALED, "--train", "all")]
    at = flags.index("--lora.rank")
    assert cli.main([*flags[:at], *flags[at + 2 :], "--quiet"]) == 0
    for folder in (tmp_path / "out", tmp_path / "all" / "model"):
        config = json.loads((folder / "config.json").read_text())
        assert config["rope_scaling"]["rope_type"] == "yarn" and config["max_position_embeddings"] == 256
    ours = unfreeze.load(tmp_path / "all", dtype="float32").logits([IDS])[0]
    torch.testing.assert_close(theirs(tmp_path / "all" / "model"), ours, rtol=0, atol=1e-4)


def test_an_adapter_that_moved_or_is_exported_keeps_it(base, run, tmp_path, unfreeze_json):
    shutil.copytree(run / "adapter", tmp_path / "moved")
    unfreeze_json("export", run, "--for", "vllm", "--out", tmp_path / "exported")
    wanted = unfreeze.load(run, dtype="float32").logits([IDS])[0]
    for folder in (tmp_path / "moved", tmp_path / "exported"):
        assert longer_of(folder) == Longer("yarn", 4.0)
        torch.testing.assert_close(unfreeze.load(folder, dtype="float32").logits([IDS])[0], wanted)
        card = (folder / "README.md").read_text()
        assert "yarn, factor 4" in card and "--hf-overrides" in card
    assert json.loads((tmp_path / "moved" / ROPE).read_text())["config"]["max_position_embeddings"] == 256
    (tmp_path / "moved" / ROPE).write_text('{"scaling": "yarn", "factor": 0}')
    with pytest.raises(AdapterError, match="factor 0; known: yarn"):
        longer_of(tmp_path / "moved")


def test_a_run_that_continues_it_has_it_and_one_that_resumes_cannot_change_it(
    base, rows, run, tmp_path, capsys, read_events
):
    line = ["sft", "--adapter", run, "--data", rows, "--out", tmp_path / "on", "--steps", 1, "--threads", 1]
    line += ["--dtype", "float32", "--watch.samples", 0, "--tokens-per-step", 512]
    assert cli.main([str(word) for word in line]) == 0
    assert "positions: 256 (yarn, factor 4)" in capsys.readouterr().err
    assert longer_of(tmp_path / "on") == Longer("yarn", 4.0)
    assert read_events(tmp_path / "on", "data")[0]["truncated"] == 0
    other = sft(base, rows, run, "--rope-scaling", "yarn", "--rope-factor", "8", "--steps", "3")
    assert cli.main([*other, "--save.allow-changed", "steps", "--quiet"]) == 2
    assert "rope.factor" in capsys.readouterr().err


def test_plan_says_it_and_what_is_half_given_is_refused(base, capsys):
    assert cli.main(["plan", str(base), "--hardware", "cpu:24GB", *SCALED, "--sequence-length", "200"]) == 0
    assert "positions are scaled: yarn, factor 4" in capsys.readouterr().out
    assert cli.main(["plan", str(base), "--rope-factor", "4"]) == 2
    assert "rope.scaling = none, rope.factor = 4: give both" in capsys.readouterr().err


@pytest.mark.skipif(not STORIES.is_dir(), reason="the shared model is not here")
def test_what_scaling_costs_a_real_model_on_short_texts_falls_as_it_follows_its_base(tmp_path):
    """stories260k on its own stories: yarn costs a fifth of the loss before training, less after eight steps."""
    plain = unfreeze.load(STORIES, dtype="float32")
    prompts = [f"Once upon a time, a little {who}" for who in ("girl", "boy", "dog", "cat")]
    answers = plain.generate(prompts, max_new_tokens=120, temperature=1.0, seed=1)
    stories = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    documents = [[1, *plain.tokenizer.encode(story, specials=False)] for story in stories]
    rows = tmp_path / "stories.jsonl"
    rows.write_text("".join(json.dumps({"text": story}) + "\n" for story in stories))
    line = ["distill", "--teacher", STORIES, "--model", STORIES, "--data", rows, "--out", tmp_path / "run"]
    line += ["--train", "all", *SCALED, "--tokens-per-step", 512, "--steps", 8, "--learning-rate", "2e-3"]
    line += ["--dtype", "float32", "--watch.samples", 0, "--threads", 1, "--quiet"]
    assert cli.main([str(word) for word in line]) == 0
    trained = unfreeze.load(tmp_path / "run", dtype="float32")
    scaled = open_model(lengthened(open_checkpoint(STORIES), Longer("yarn", 4.0)))
    before, without, after = (loss_of(each, documents) for each in (plain.decoder, scaled, trained.decoder))
    assert without > 1.1 * before and after - before < 0.7 * (without - before), (before, without, after)


@torch.no_grad()
def loss_of(decoder, documents):
    """Mean loss of the documents' tokens."""
    losses = []
    for document in documents:
        ids, ones = torch.tensor(document), torch.ones(len(document))
        batch = Batch(ids, ids, ones, torch.arange(len(document)), torch.tensor([0]))
        log_probs = decoder.logits(decoder.hidden(batch))[:-1].log_softmax(-1)
        losses.append(-log_probs.gather(1, ids[1:, None]))
    return float(torch.cat(losses).mean())
