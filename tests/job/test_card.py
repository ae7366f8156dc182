"""The card beside an adapter, read by the Hub's own library, and the upload against a stand-in of the Hub."""

import base64
import json
import re
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from huggingface_hub import ModelCard

from unfreeze import cli
from unfreeze.commands.demo import TINY_K2
from unfreeze.job.end.card import card, hub_id, license_of


def test_a_runs_adapter_has_a_card_that_the_hub_reads_and_the_tokenizer(run_dir):
    folder = run_dir / "adapter"
    read = ModelCard.load(folder / "README.md")
    assert read.data.library_name == "peft" and read.data.tags == ["lora", "unfreeze"]
    assert read.data.base_model is None  # a folder of this machine is no id
    text = (folder / "README.md").read_text()
    assert "Held-out" in text or "Loss" in text
    assert "chat" in text and "lora.rank" in text and "unfreeze sft --model tiny-k2" in text
    assert str(run_dir.parent) not in text and str(TINY_K2.parent) not in text
    assert "Training further in peft makes another model" in text
    assert (folder / "tiktoken.model").read_bytes() == (TINY_K2 / "tiktoken.model").read_bytes()


def test_the_base_is_named_by_its_id_with_its_licence(tmp_path):
    (tmp_path / "README.md").write_text(
        "---\ntags: [a]\nlicense: other\nlicense_name: modified-mit\n---\n# x\n"
    )
    read = ModelCard(card("org/base-7b", tmp_path, None, has_experts=False))
    assert (read.data.base_model, read.data.license, read.data.license_name) == (
        "org/base-7b",
        "other",
        "modified-mit",
    )
    assert "another model" not in read.text
    (tmp_path / "README.md").write_text("license: mit\n")  # no front matter
    assert license_of(tmp_path) == [] and not hub_id("/a/b") and not hub_id("base")


def test_an_id_that_is_given_is_an_id_though_a_folder_has_its_name(run_dir, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "base").mkdir(parents=True)
    assert not hub_id("org/base")  # control arm: one that nobody gave may be the folder
    given = ["export", str(run_dir), "--out", "out", "--quiet", "--base-id"]
    assert cli.main([*given, "org/base"]) == 0
    assert ModelCard.load(tmp_path / "out" / "README.md").data.base_model == "org/base"
    assert cli.main([*given, "base"]) == 2 and "is not a Hub id" in capsys.readouterr().err


class Hub(BaseHTTPRequestHandler):
    """What huggingface_hub asks for when it makes a repository and commits small files."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        self.server.asked.append((self.path, self.headers.get("Authorization")))
        if self.path.endswith("/repos/create"):
            made = json.loads(body)
            self.server.made = made
            self.say({"url": "https://huggingface.co/org/name", "name": "org/name", "id": "org/name"})
        elif "/preupload/" in self.path:
            files = json.loads(body)["files"]
            self.say(
                {
                    "files": [
                        {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files
                    ]
                }
            )
        elif "/commit/" in self.path:
            for line in body.decode().splitlines():
                row = json.loads(line)
                if row["key"] == "file":
                    self.server.files[row["value"]["path"]] = base64.b64decode(row["value"]["content"])
            self.say(
                {
                    "success": True,
                    "commitOid": "0" * 40,
                    "commitUrl": "https://huggingface.co/org/name/commit/0",
                }
            )
        else:
            self.say({"errors": [], "warnings": []})

    def do_GET(self):
        self.server.asked.append((self.path, self.headers.get("Authorization")))
        self.say(
            {
                "id": "org/name",
                "modelId": "org/name",
                "sha": "0" * 40,
                "siblings": [],
                "tags": [],
                "private": True,
            }
        )

    def say(self, value):
        raw = json.dumps(value).encode()
        self.send_response(self.server.status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *words):
        """Silent."""


@pytest.fixture
def hub(monkeypatch):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.asked, server.files, server.made, server.status = [], {}, None, 200
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("HF_TOKEN", "hf_made_up")
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    yield server
    server.shutdown()


def export(run_dir, tmp_path, *more):
    return cli.main(["export", str(run_dir), "--for", "peft", "--out", str(tmp_path / "out"), *more])


def test_push_uploads_what_lies_in_the_folder_after_a_yes(hub, run_dir, tmp_path, capsys):
    asked = ["--push", "org/name", "--base-id", "org/base", "--yes"]
    assert export(run_dir, tmp_path, *asked) == 0, capsys.readouterr().err
    assert "uploaded: http://127.0.0.1" in capsys.readouterr().err
    here = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert hub.files == here and {"README.md", "adapter_config.json", "tiktoken.model"} <= here.keys()
    assert hub.made.get("visibility", hub.made.get("private")) in ("private", True) and (
        "Bearer hf_made_up" in {who for _, who in hub.asked}
    )
    assert json.loads(here["adapter_config.json"])["base_model_name_or_path"] == "org/base"
    assert ModelCard(here["README.md"].decode()).data.base_model == "org/base"


def test_nothing_is_uploaded_without_a_yes_a_base_that_others_have_or_a_right_name(
    hub, run_dir, tmp_path, capsys, monkeypatch
):
    given = ["--push", "org/name", "--base-id", "org/base"]
    assert export(run_dir, tmp_path, *given) == 2  # nobody can be asked
    assert "next: --yes" in capsys.readouterr().err
    assert export(run_dir, tmp_path, "--push", "org/name", "--yes") == 2
    assert "--base-id org/name" in capsys.readouterr().err
    assert export(run_dir, tmp_path, "--push", "name", "--base-id", "org/base", "--yes") == 2
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.stdin.readline", lambda: "n\n", raising=False)
    assert export(run_dir, tmp_path, *given) == 0
    assert "Continue? [y/N]" in (said := capsys.readouterr().err) and "not uploaded" in said
    assert not hub.asked
    hub.status = 403
    assert export(run_dir, tmp_path, *given, "--yes") == 2
    assert "upload to org/name failed: 403" in (said := capsys.readouterr().err)
    assert "hf auth login" in said
    hub.status = 500
    assert export(run_dir, tmp_path, *given, "--yes") == 2
    assert "500" in (said := capsys.readouterr().err) and "next: try again; the files are kept in" in said
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # where nobody answers
    assert export(run_dir, tmp_path, *given, "--yes") == 2
    assert "upload to org/name failed: the Hub cannot be reached\n" in (said := capsys.readouterr().err)
    assert "next: go online, and try again; the files are kept in" in said
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()


def test_an_adapter_goes_on_a_base_that_lies_elsewhere(run_dir, tmp_path, unfreeze_json, capsys):
    shutil.copytree(run_dir / "adapter", tmp_path / "sent")
    path = tmp_path / "sent" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": "no/where"}))
    asked = ["--prompt", "Hello", "--max-new-tokens", "3", "--device", "cpu"]
    there = unfreeze_json("generate", run_dir, *asked)
    assert (
        unfreeze_json("generate", tmp_path / "sent", *asked, "--base", TINY_K2)["tokens"] == there["tokens"]
    )
    assert cli.main(["generate", str(tmp_path / "sent"), *asked]) == 2
    assert "if the base is elsewhere: --base DIR" in capsys.readouterr().err
    assert cli.main(["generate", str(TINY_K2), *asked, "--base", str(TINY_K2)]) == 2
    assert "base = " in capsys.readouterr().err


def test_a_link_in_a_checkpoint_does_not_bring_other_files_along(run_dir, tmp_path):
    base = tmp_path / "base"
    shutil.copytree(TINY_K2, base)
    (tmp_path / "secret").write_text("token")
    (base / "special_tokens_map.json").symlink_to(tmp_path / "secret")
    out = tmp_path / "out"
    assert cli.main(["export", str(run_dir), "--base", str(base), "--out", str(out)]) == 2
    assert not any(path.read_text(errors="replace") == "token" for path in out.glob("*") if path.is_file())


def test_the_card_of_an_export_is_about_its_reader_and_what_it_leaves_out(run_dir, tmp_path):
    assert (
        cli.main(["export", str(run_dir), "--for", "vllm", "--out", str(tmp_path / "vllm"), "--quiet"]) == 0
    )
    text = (tmp_path / "vllm" / "README.md").read_text()
    assert "PeftModel" not in text and "library_name: peft" not in text and "have the layout of vllm" in text
    assert (
        "does not apply" in text and "kv_b_proj" in text and ModelCard(text).data.tags == ["lora", "unfreeze"]
    )
    # control arm: peft's own
    assert "PeftModel" in (run_dir / "adapter" / "README.md").read_text()


def test_the_cards_lines_load_the_model_in_transformers(run_dir, tmp_path):
    """Control arm: transformers refuses the model_type that the release names, so the plain line would fail."""
    from transformers import AutoModelForCausalLM

    from unfreeze.commands.demo import TINY_K2
    from unfreeze.job.end.card import usage

    text = (run_dir / "adapter" / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert code == "\n".join(usage("tiny-k2", "kimi_k2", adapter="FOLDER_OR_ID_OF_THIS_ADAPTER")[3:-2]) + "\n"
    lines = code.replace('"tiny-k2"', repr(str(TINY_K2))).replace('"FOLDER_OR_ID_OF_THIS_ADAPTER"', "adapter")
    scope = {"adapter": str(run_dir / "adapter")}
    exec(lines, scope)
    assert any("lora" in name for name, _ in scope["model"].named_parameters())
    with pytest.raises(ValueError, match="kimi_k2"):
        AutoModelForCausalLM.from_pretrained(TINY_K2)
    assert "AutoModelForCausalLM" in "".join(usage("org/base", "qwen3"))


def test_a_command_names_an_adapter_by_its_run_and_no_folder_of_this_machine(run_dir, monkeypatch):
    from unfreeze.job.end import card

    command = "unfreeze grpo --adapter /home/me/runs/warm/adapter --reward /home/me/my.py --data a/b.jsonl"
    monkeypatch.setattr(card, "rerun_command", lambda run: command)
    text = "\n".join(card._of_run(run_dir))
    assert "unfreeze grpo --adapter warm/adapter --reward my.py --data a/b.jsonl" in text
    assert "/home/me" not in text


def packed_run(folder):
    """(a llama whose linear layers are INT4, an adapter of it as a run writes it)."""
    from types import SimpleNamespace

    import torch

    from unfreeze import models
    from unfreeze.adapters import attach, sites
    from unfreeze.checkpoint import open_checkpoint, save_checkpoint
    from unfreeze.config.lora import LoraConfig
    from unfreeze.generate.open import open_model
    from unfreeze.job.trained import Adapters
    from unfreeze.models.publish import published
    from unfreeze.parallel.processes.mesh import ONE

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 160}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **sizes, **heads}
    whole = models.build(models.shape(config), dtype=torch.float32, device="cpu")
    models.initialize(whole, 0)
    save_checkpoint(folder / "whole", config, published(whole, config))
    words = ["quantize", str(folder / "whole"), "--to", "int4", "--modules", "all-linear", "--quiet"]
    assert cli.main([*words, "--out", str(folder / "base")]) == 0
    manifest, trained = open_checkpoint(folder / "base"), Adapters(LoraConfig(rank=4), 0)
    model = open_model(manifest)
    attach(model, trained.lora, 0)
    with torch.no_grad():
        for site in sites(model):
            site.adapter.B.normal_(0, 0.1, generator=torch.Generator().manual_seed(0))
    run = SimpleNamespace(path=folder)
    state = SimpleNamespace(model=model, optimizer=SimpleNamespace(masters=None), run=run)
    trained.write(state, manifest, str(folder / "base"), ONE, folder / "adapter")
    return folder / "base", folder / "adapter"


def test_the_card_of_a_base_with_packed_linear_layers_has_them_expanded(tmp_path):
    from unfreeze.quant.formats import unpacking

    _, adapter = packed_run(tmp_path)
    text = (adapter / "README.md").read_text()
    assert "from transformers import AutoModelForCausalLM, CompressedTensorsConfig" in text
    assert "packing = CompressedTensorsConfig(run_compressed=False)" in text
    assert 'from_pretrained("base", quantization_config=packing)' in text
    table = {"quantization_config": {"quant_method": "compressed-tensors"}}
    assert unpacking(table, ["model.layers.0.mlp.experts.0.up_proj"]) is None  # as tiny-k2, above
    assert unpacking({"quantization_config": {"quant_method": "fp8"}}, ["model.layers.0.mlp.up_proj"]) is None
    assert unpacking({}, []) is None


@pytest.mark.nightly  # transformers, peft and compressed-tensors are imported and expand the base
def test_its_lines_load_the_adapter_on_packed_linear_layers_in_peft(tmp_path):
    """Control arm: without the argument peft finds no weight in the packed layers."""
    import torch

    import unfreeze

    base, adapter = packed_run(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", (adapter / "README.md").read_text(), re.DOTALL)
    lines = code.replace('"base"', repr(str(base))).replace('"FOLDER_OR_ID_OF_THIS_ADAPTER"', "adapter")
    scope = {"adapter": str(adapter)}
    exec(lines, scope)
    ids = [5, 9, 33, 120, 7, 64]
    with torch.no_grad():
        theirs = scope["model"].float()(torch.tensor([ids])).logits[0]
    ours = unfreeze.load(adapter, dtype="float32").logits([ids])[0]
    assert torch.allclose(ours, theirs, atol=1e-4)
    with pytest.raises(AttributeError):
        exec(lines.replace(", quantization_config=packing", ""), {"adapter": str(adapter)})


@pytest.mark.parametrize(
    "config, record, kind",
    [
        ({}, None, "LoRA"),
        ({"use_dora": True}, None, "DoRA"),
        ({}, {"lora.start": "pissa_niter_4"}, "LoRA (PiSSA)"),
        ({"use_dora": True}, {"lora.start": "lora"}, "DoRA"),
    ],
)
def test_a_card_names_the_kind_of_adapter(config, record, kind, tmp_path):
    from unfreeze.commands.demo import TINY_K2
    from unfreeze.config.adapter import kind_of
    from unfreeze.job.end.card import card

    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    if record:
        (tmp_path / "resolved_config.json").write_text(json.dumps(record))
    assert kind_of(tmp_path, tmp_path if record else None) == kind
    text = card("org/base", TINY_K2, None, has_experts=False, kind=kind_of(tmp_path, tmp_path))
    assert f"A {kind} adapter for org/base, made with unfreeze." in text
