"""What a run leaves behind is of its last step, whatever was there before: an interruption's adapter, the model
of a shorter run."""

from __future__ import annotations

import json
import os
import signal

import pytest
from safetensors.torch import load_file

from unfreeze import cli
from unfreeze.commands.demo import TINY_K2
from unfreeze.job.end import written
from unfreeze.job.trained import Adapters
from unfreeze.models import build, initialize, shape
from unfreeze.train import fit

DENSE = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "vocab_size": 1536,
}


def sft(model, chat_rows, out, *flags):
    line = ["sft", "--model", model, "--data", chat_rows, "--out", out, "--tokens-per-step", 256]
    line += ["--sequence-length", 128, "--dtype", "float32", "--watch.samples", 0, "--threads", 1, "--quiet"]
    return cli.main(
        [str(word) for word in [*line, "--optimizer.warmup", 0, "--learning-rate", "5e-2", *flags]]
    )


@pytest.fixture
def dense(tmp_path):
    import torch

    from unfreeze.checkpoint import save_checkpoint
    from unfreeze.models.publish import published

    model = build(shape(DENSE), dtype=torch.float32, device="cpu")
    initialize(model, 0)
    extra = {name: TINY_K2 / name for name in ("tiktoken.model", "tokenizer_config.json")}
    save_checkpoint(tmp_path / "dense", DENSE, published(model, DENSE), extra=extra)
    return tmp_path / "dense"


def of_last_save(out):
    """The checkpoint in <out>/model has the weights of the newest save."""
    newest = max((out / "state").iterdir())
    saved, model = load_file(newest / "tensors.safetensors"), load_file(out / "model" / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    return saved[f"model.{name}"].to(model[name].dtype).equal(model[name])


def test_a_run_made_longer_writes_the_model_of_its_last_step(dense, chat_rows, tmp_path, monkeypatch):
    out, flags = tmp_path / "run", ["--train", "all"]
    assert sft(dense, chat_rows, out, *flags, "--steps", 1) == 0 and of_last_save(out)
    longer = [*flags, "--save.allow-changed", "steps", "--steps"]
    assert sft(dense, chat_rows, out, *longer, 2) == 0 and of_last_save(out)
    assert json.loads((out / written.FILE).read_text()) == {"model": 2}
    assert not list(out.glob(".*")) and sft(dense, chat_rows, out, *flags, "--steps", 2) == 0

    # control arm: what is there counts as written
    monkeypatch.setattr("unfreeze.job.job.is_noted", lambda run, folder: True)
    assert sft(dense, chat_rows, out, *longer, 3) == 0 and not of_last_save(out)


def test_a_kill_before_an_interrupted_runs_adapter_is_written_anew(chat_rows, tmp_path, monkeypatch):
    """The interruption's adapter is there; the next start writes that of the last step."""
    out, flags = tmp_path / "run", ["--steps", 2, "--lora.rank", 2, "--lora.targets", "attention"]
    adapter = out / "adapter" / "adapter_model.safetensors"
    train_step, write = fit.train_step, Adapters.write

    def interrupted(*arguments, **options):
        os.kill(os.getpid(), signal.SIGTERM)
        return train_step(*arguments, **options)

    def killed(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(fit, "train_step", interrupted)
        sft(TINY_K2, chat_rows, out, *flags)
    first = adapter.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(Adapters, "write", killed)
        assert sft(TINY_K2, chat_rows, out, *flags) == 130
    assert adapter.read_bytes() == first and (out / "state" / "step-000002").is_dir()
    assert sft(TINY_K2, chat_rows, out, *flags) == 0
    assert adapter.read_bytes() != first and json.loads((out / written.FILE).read_text()) == {"adapter": 2}
    monkeypatch.setattr(Adapters, "write", write)
    assert sft(TINY_K2, chat_rows, out, *flags) == 0  # and is finished


def test_a_run_of_before_has_written_what_is_there(tmp_path):
    folder = tmp_path / "adapter"
    assert written.is_noted(tmp_path, folder)
    written.forget_written(tmp_path)
    assert not written.is_noted(tmp_path, folder)
    written.note(tmp_path, folder, 3)
    assert written.is_noted(tmp_path, folder) and not written.is_noted(tmp_path, tmp_path / "adapter-best")
