"""Pretraining from nothing to a checkpoint in the format its config declares; killed at the worst moment; and
what it refuses."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import unfreeze
from unfreeze import cli
from unfreeze.commands.demo import TINY_K2
from unfreeze.evaluate import perplexity
from unfreeze.job.end.result import next_command
from unfreeze.train import fit

SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}


@pytest.fixture
def start(tmp_path):
    """A folder with config and tokenizer, and no weights."""
    folder = tmp_path / "start"
    folder.mkdir()
    for name in ("tiktoken.model", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(TINY_K2 / name, folder / name)
    config = json.loads((TINY_K2 / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **SMALL}))
    return folder


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "corpus.txt"
    path.write_text(
        "\n\n".join(f"The young of animal number {i} is small. It grows." for i in range(40)),
        encoding="utf-8",
    )
    return path


def command(start, text, out, *more):
    return [
        "pretrain",
        "--model",
        str(start),
        "--data",
        str(text),
        "--out",
        str(out),
        "--steps",
        "3",
        "--tokens-per-step",
        "256",
        "--optimizer.warmup",
        "0",
        "--watch.samples",
        "2",
        *more,
    ]


def test_from_nothing_to_a_quantized_checkpoint(start, text, tmp_path, unfreeze_json, read_events):
    run = tmp_path / "run"
    result = unfreeze_json(*command(start, text, run))
    assert result["finished"] and result["steps"] == 3 and result["loss_last"] < result["loss_first"]
    tensors = load_file(run / "model" / "model.safetensors")
    packed = {name for name in tensors if name.endswith("weight_packed")}
    # quantization_config, and its ignore list
    assert len(packed) == 4 * 3 and all(".mlp.experts." in name for name in packed)
    assert (run / "model" / "config.json").read_text().count("pack-quantized") == 1
    for name in ("tiktoken.model", "tokenizer_config.json", "generation_config.json"):
        assert (run / "model" / name).read_bytes() == (start / name).read_bytes()
    model = unfreeze.load(run, dtype="float32")
    assert (
        len(model.generate("The young of", max_new_tokens=4)) > 0
        and model.logits([[1, 2, 3]])[0].isfinite().all()
    )

    for group in ("attention", "experts", "router", "embeddings", "norms", "lm_head"):
        entry = result["receipt"][group]
        assert entry["trained"] == entry["parameters"] and entry["grad_norm"] > 0 and entry["moved"] > 0
    assert json.loads((run / "plan.json").read_text())["adapter_parameters"] == 0
    assert [event["when"] for event in read_events(run, "sample")] == ["before", "before", "after", "after"]
    resolved = json.loads((run / "resolved_config.json").read_text())
    assert (resolved["effective"]["steps"], resolved["effective"]["sequence_length"]) == (3, 256)
    assert resolved["save.every"] == 0 and resolved["model"] == str(start)


def test_a_kill_while_the_result_is_written_leaves_a_run_that_writes_it(
    start, text, tmp_path, unfreeze_json, monkeypatch, capsys
):
    run = tmp_path / "run"

    def killed(source, target, replace=os.replace):
        if Path(target) == run / "model":
            raise KeyboardInterrupt
        return replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)  # all is written, and the name is not there yet
        assert cli.main([*command(start, text, run), "--quiet"]) == 130
    assert "saved as of step-000003" in capsys.readouterr().err
    assert not (run / "model").exists() and not list(run.glob(".model*"))
    again = unfreeze_json(*command(start, text, run))
    assert (
        again["finished"]
        and "already_finished" not in again
        and unfreeze.load(run, dtype="float32").logits([[1, 2]])[0].isfinite().all()
    )
    assert unfreeze_json(*command(start, text, run))["already_finished"]


def test_goes_on_from_its_own_dense_result(start, text, tmp_path, unfreeze_json, read_events):
    config = json.loads((start / "config.json").read_text())
    del config["quantization_config"]
    (start / "config.json").write_text(json.dumps(config))
    unfreeze_json(*command(start, text, tmp_path / "one"))
    unfreeze_json(*command(tmp_path / "one" / "model", text, tmp_path / "two", "--dtype", "bfloat16"))
    loaded = read_events(tmp_path / "two", "load")[0]
    assert loaded["bytes"] == sum(
        tensor.nbytes for tensor in load_file(tmp_path / "one" / "model" / "model.safetensors").values()
    )
    receipt = json.loads((tmp_path / "two" / "receipt.json").read_text())["groups"]
    # read from the fp32 sums beside the bf16 weights
    assert all(entry["grad_norm"] > 0 for entry in receipt.values())


def test_what_it_refuses(start, text, tmp_path, capsys):
    def refused(*arguments):
        assert cli.main([*arguments, "--quiet"]) == 2
        return capsys.readouterr().err

    assert "is packed (int4-pack-quantized)" in refused(*command(TINY_K2, text, tmp_path / "a"))
    config = json.loads((start / "config.json").read_text())
    (start / "config.json").write_text(json.dumps({"model_type": "kimi_k25", "text_config": config}))
    assert "nests its language model in text_config" in refused(*command(start, text, tmp_path / "b"))
    (start / "config.json").unlink()
    assert "has no config.json" in refused(*command(start, text, tmp_path / "c"))


def test_it_says_what_to_do_next(start, text, tmp_path, capsys):
    assert cli.main(command(start, text, tmp_path / "run")) == 0
    error = capsys.readouterr().err
    assert "next: unfreeze generate" in error and "unfreeze chat" not in error and "export" not in error
    assert "data: 40 rows, " in error and "memory: " in error and "trains: every weight" in error


def test_chat_is_proposed_where_conversations_were_read(tmp_path):
    """A model that has read texts alone continues them; one with any conversation may answer."""
    (tmp_path / "resolved_config.json").write_text(json.dumps({"recipe": "pretrain"}))
    for shapes, chats in (({"text": 9}, False), ({"text": 9, "messages": 1}, True), ({}, True)):
        (tmp_path / "events.jsonl").write_text(
            json.dumps({"kind": "data", "step": 0, "time": 1.0, "shapes": shapes}) + "\n"
        )
        line = next_command(tmp_path, {"finished": True, "steps": 2}, "", export=False)
        assert ("unfreeze chat" in line) == chats and "unfreeze generate" in line


def test_the_best_weights_are_published_beside_the_last(start, text, tmp_path, unfreeze_json, monkeypatch):
    losses = iter([9.0, 2.0, 3.0, 4.0])  # before training, then after steps 1, 2, 3

    def scripted(model, batches, **options):
        return perplexity.HeldoutLoss(loss=next(losses), perplexity=1.0, bits_per_byte=None, tokens=1)

    monkeypatch.setattr(perplexity, "heldout", scripted)
    run = tmp_path / "run"
    flags = ("--validation-fraction", "0.3", "--watch.validate-every", "1", "--watch.samples", "0")
    result = unfreeze_json(*command(start, text, run, *flags))
    assert result["best"] == {"step": 1, "loss": 2.0}
    saved = load_file(run / "state" / "step-000001" / "tensors.safetensors")
    best, last = (load_file(run / name / "model.safetensors") for name in ("model-best", "model"))
    name = "model.embed_tokens.weight"
    assert torch.equal(
        best[name].float(), saved[f"model.{name}"].to(best[name].dtype).float()
    ) and not torch.equal(best[name], last[name])
    assert unfreeze_json(*command(start, text, run, *flags))["already_finished"]

    # killed before it was written: the same command writes it, and leaves the model alone
    shutil.rmtree(run / "model-best")
    written = (run / "model" / "model.safetensors").stat().st_mtime_ns
    unfreeze_json(*command(start, text, run, *flags))
    again = load_file(run / "model-best" / "model.safetensors")
    assert all(torch.equal(again[key], tensor) for key, tensor in best.items())
    assert (run / "model" / "model.safetensors").stat().st_mtime_ns == written


MUON = [
    *("--optimizer.kind", "muon", "--optimizer.schedule", "one_cycle", "--optimizer.warmup", "0.3"),
    *("--sequence-length", "16", "--data.sequence-lengths", "4:0.3", "8:0.4", "--steps", "6"),
    *("--save.every", "1", "--watch.samples", "0", "--threads", "1", "--muon.qk-clip", "0.02"),
]


def test_muon_one_cycle_and_growing_documents_resume_to_the_bit(
    start, text, tmp_path, unfreeze_json, monkeypatch, capsys, read_events
):
    """Killed behind step 3, in the stage of 8 tokens. Rates are torch's one cycle; every step has its tokens."""
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    result = unfreeze_json(*command(start, text, straight, *MUON))
    assert result["finished"] and result["loss_last"] < result["loss_first"]

    def killed(state, *more, advance=fit.advance):
        seconds = advance(state, *more)
        if state.step == 4:
            raise KeyboardInterrupt
        return seconds

    with monkeypatch.context() as patch:
        patch.setattr(fit, "advance", killed)
        assert cli.main([*command(start, text, broken, *MUON), "--quiet"]) == 130
    assert sorted(path.name for path in (broken / "state").iterdir())[-1] == "step-000003"
    assert unfreeze_json(*command(start, text, broken, *MUON))["finished"]
    weights = [(run / "model/model.safetensors").read_bytes() for run in (straight, broken)]
    assert weights[0] == weights[1]

    steps = read_events(straight, "train")
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    theirs = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=6, pct_start=2 / 6)
    for step in steps:
        assert step["learning_rate"] == pytest.approx(theirs.get_last_lr()[0], abs=1e-12)
        optimizer.step()
        if step is not steps[-1]:
            theirs.step()
    supervised = [step["supervised_tokens"] / step["tokens"] for step in steps]
    assert supervised[1] < supervised[3] < supervised[5]  # each piece costs a target
    assert all(step["largest_logit"] > 0 for step in steps) and max(s["largest_logit"] for s in steps) > 0.02


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--data.sequence-lengths", "32:0.5"], "lengths must grow, and stay below sequence_length 16"),
        (["--data.sequence-lengths", "8"], "'8': expected LENGTH:SHARE, such as 256:0.3"),
        (["--data.sequence-lengths", "4:0.6", "8:0.6"], "add up to 1.2, more than 1"),
    ],
)
def test_lengths_that_do_not_grow_are_refused(start, text, tmp_path, capsys, more, said):
    assert cli.main([*command(start, text, tmp_path / "run", "--sequence-length", "16", *more)]) == 2
    assert said in capsys.readouterr().err


def test_a_clip_without_muon_is_refused(start, text, tmp_path, capsys):
    assert cli.main([*command(start, text, tmp_path / "run"), "--muon.qk-clip", "100"]) == 2
    assert "muon.qk_clip needs optimizer.kind = muon" in capsys.readouterr().err


def test_settings_of_muon_without_muon_are_refused(start, text, tmp_path, capsys):
    more = ["--muon.update-scale", "original"]
    assert cli.main([*command(start, text, tmp_path / "run"), *more]) == 2
    assert "[muon] has settings, but optimizer.kind is adamw" in capsys.readouterr().err


def test_a_clip_of_frozen_attention_is_refused(start, text, tmp_path, capsys):
    more = ["--optimizer.kind", "muon", "--muon.qk-clip", "100", "--training.only", "experts 0-1"]
    assert cli.main([*command(start, text, tmp_path / "run"), *more]) == 2
    assert "muon.qk_clip scales attention, which training.only freezes" in capsys.readouterr().err


def test_muon_is_refused_where_adapters_train(start, text, tmp_path, capsys):
    words = ["sft", "--model", str(start), "--data", str(text), "--out", str(tmp_path / "run")]
    assert cli.main([*words, "--optimizer.kind", "muon"]) == 2
    assert "optimizer.kind is muon, but adapters train" in capsys.readouterr().err
