"""An exported adapter in the hands of peft over transformers, everything read from the files on disk, against
ours."""

import errno
import json
import os
import shlex
import shutil
import warnings

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file

import unfreeze
from unfreeze import cli, models
from unfreeze.adapters import LoraConfig
from unfreeze.checkpoint import open_checkpoint
from unfreeze.commands.demo import TINY_K2
from unfreeze.core.units import format_bytes
from unfreeze.job.end.result import next_command
from unfreeze.job.planning.plan import export_hint

IDS = [[5, 6, 7, 8, 9, 10, 300, 401, 77], [1280, 3, 900]]


def oracle(folder):
    """transformers' own reading of tiny-k2. It knows Kimi's architecture as deepseek_v3 only, so a copy says
    that.

    dtype=float32 leaves the experts that compressed-tensors expands in bf16, and its grouped product then
    rounds activations to bf16 too:
    0.018 off in the logits. Widened to float32 (exact: the expanded values are bf16 numbers), the arithmetic
    is ours.
    """
    shutil.copytree(TINY_K2, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "deepseek_v3"}))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers.DeepseekV3ForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
    for parameter in model.parameters():
        parameter.data = parameter.data.float()
    return model.eval()


@torch.no_grad()
def logits(model):
    return [model(torch.tensor([ids])).logits[0] for ids in IDS]


def far(ours, theirs) -> float:
    return max((a - b).abs().max().item() for a, b in zip(ours, theirs, strict=True))


def test_peft_reads_the_adapter_of_a_run_as_it_lies_there(run_dir, tmp_path):
    base = oracle(tmp_path / "copy")
    assert far(unfreeze.load(TINY_K2, dtype="float32").logits(IDS), logits(base)) < 1e-4
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tuned = peft.PeftModel.from_pretrained(base, run_dir / "adapter").eval()
    ours = unfreeze.load(run_dir, dtype="float32").logits(IDS)
    assert far(ours, logits(tuned)) < 1e-4
    assert (
        far(ours, unfreeze.load(TINY_K2, dtype="float32").logits(IDS)) > 1e-2
    )  # control: the adapter does something


@pytest.mark.parametrize(
    ("flag", "reader", "layout"),
    [
        ("--for", "peft", "peft"),
        ("--for", "vllm", "per-expert"),
        ("--for", "sglang", "per-expert"),
        ("--layout", "vllm", "per-expert"),
        ("--layout", "per-expert", "per-expert"),
    ],
)
def test_an_export_loads_with_the_logits_of_the_run(flag, reader, layout, run_dir, unfreeze_json, tmp_path):
    result = unfreeze_json("export", run_dir, flag, reader, "--out", tmp_path / layout)
    assert result["layout"] == layout and result["for"] == reader.replace("per-expert", "vllm")
    assert result["verified"]["nonzero"] == result["verified"]["matrices"] > 0
    # float32 products in another order of ranks (the fused layout pads), so equal to rounding, not to the bit;
    # vLLM is not given kv_b_proj, which it never applies
    lost = far(
        unfreeze.load(result["path"], dtype="float32").logits(IDS),
        unfreeze.load(run_dir, dtype="float32").logits(IDS),
    )
    dropped = {name.rsplit(".", 1)[-1] for name in result["dropped"]}
    if result["for"] == "vllm":
        assert dropped == {"kv_b_proj"} and lost > 1e-4
    else:
        assert not dropped and lost < 1e-5
    names = load_file(tmp_path / layout / "adapter_model.safetensors")
    assert any(".experts.15.up_proj." in name for name in names) == (layout == "per-expert")


def test_without_out_it_lies_in_the_run_and_says_what_was_verified(run_dir, capsys):
    assert cli.main(["export", str(run_dir), "--for", "vllm"]) == 0
    error = capsys.readouterr().err
    assert (
        (run_dir / "export-vllm" / "adapter_config.json").is_file()
        and "modules match" in error
        and "vllm 0.33.0 does not apply kv_b_proj" in error
        and "issues/48974" in error
        and "next time: --lora.targets kv_a_proj_with_mqa o_proj" in error
    )


def test_quiet_does_not_hide_what_the_reader_leaves_out(run_dir, tmp_path, capsys):
    words = ["export", str(run_dir), "--for", "vllm", "--quiet", "--out"]
    assert cli.main([*words, str(tmp_path / "a")]) == 0
    said = capsys.readouterr().err
    assert (
        said.startswith("warning: vllm") and "does not apply kv_b_proj" in said and "read again" not in said
    )
    words[words.index("vllm")] = "peft"  # control arm: peft applies all
    assert cli.main([*words, str(tmp_path / "b")]) == 0
    assert not capsys.readouterr().err


def test_a_runs_end_names_an_export_that_applies_all_and_the_plan_says_what_vllm_leaves_out(run_dir):
    """A note on vLLM in a run's last lines reads like an error; export --for vllm says it (above)."""
    manifest = open_checkpoint(TINY_K2)
    model = models.meta_model(models.shape(manifest.config), manifest, torch.float32)
    reader, note = export_hint(LoraConfig(), manifest, model)
    assert reader == "peft" and note.startswith("vllm does not apply kv_b_proj; ")
    name = shlex.quote(str(run_dir))
    line = f"next: unfreeze chat {name}    unfreeze export {name} --for peft"
    assert next_command(run_dir, {"finished": True}, "", True) == line
    assert any(note in text for text in json.loads((run_dir / "plan.json").read_text())["lines"])
    others = tuple(note.partition("--lora.targets ")[2].split())
    # control arm: nothing is left out of these, and of no adapters
    for lora in (LoraConfig(targets=others), None):
        assert export_hint(lora, manifest, model) == ("vllm", "")


def test_two_readers_at_once_are_refused(run_dir, capsys):
    assert cli.main(["export", str(run_dir), "--for", "sglang", "--layout", "peft"]) == 2
    assert "for sglang and layout peft contradict each other" in capsys.readouterr().err


def test_a_whole_model_has_nothing_to_export_and_a_file_is_no_folder(run_dir, capsys, tmp_path):
    assert cli.main(["export", str(TINY_K2)]) == 2
    assert "has no adapter to export" in capsys.readouterr().err
    (tmp_path / "file").write_text("mine")
    assert cli.main(["export", str(run_dir), "--out", str(tmp_path / "file")]) == 2
    assert f"out = '{tmp_path}/file' is a file, not a folder" in capsys.readouterr().err
    assert cli.main(["export", str(run_dir), "--out", str(tmp_path / "file" / "deep" / "er")]) == 2
    assert f"deep/er': {tmp_path}/file is a file, not a folder" in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("lies_there", [False, True])
def test_a_full_disk_leaves_no_folder_and_says_the_bytes(lies_there, run_dir, capsys, monkeypatch, tmp_path):
    out = tmp_path / "new" / "export"
    if lies_there:
        out.mkdir(parents=True)
        (out / "notes.txt").write_text("mine")

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("unfreeze.checkpoint.save.os.fsync", full)
        assert cli.main(["export", str(run_dir), "--out", str(out), "--quiet"]) == 2
    said = capsys.readouterr().err
    needed = sum(value.nbytes for value in load_file(run_dir / "adapter/adapter_model.safetensors").values())
    assert f"is full: {format_bytes(needed)} needed" in said and " free" in said
    left = [path.name for path in tmp_path.rglob("*") if path.is_file()]
    assert left == (["notes.txt"] if lies_there else []) and (tmp_path / "new").exists() == lies_there
    assert cli.main(["export", str(run_dir), "--out", str(out), "--quiet"]) == 0  # control arm: with room


def test_what_is_exported_is_not_written_over(run_dir, capsys):
    for out in (run_dir / "adapter", run_dir):
        assert cli.main(["export", str(run_dir), "--out", str(out)]) == 2
        assert "is the folder being exported" in capsys.readouterr().err


def test_somebody_elses_readme_stays(run_dir, capsys, tmp_path):
    (tmp_path / "README.md").write_text("mine")
    assert cli.main(["export", str(run_dir), "--out", str(tmp_path)]) == 2
    assert "unfreeze did not write" in capsys.readouterr().err
    assert (tmp_path / "README.md").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]  # refused before any work


def test_a_tokenizer_of_another_model_is_not_taken_for_the_bases(run_dir, capsys, tmp_path):
    """A reader of the folder would encode with it, and --push would upload it, or what a link leads to."""
    out = tmp_path / "out"
    given = ["export", str(run_dir), "--out", str(out), "--quiet"]
    assert cli.main(given) == 0 == cli.main(given)  # control arm: an export of its own is written again
    (tmp_path / "secret").write_text("s")
    for make in (lambda path: path.write_text("{}"), lambda path: path.symlink_to(tmp_path / "secret")):
        make(out / "tokenizer.json")  # tiny-k2 has tiktoken.model
        assert cli.main(given) == 2
        assert "tokenizer.json belongs to another model" in capsys.readouterr().err
        (out / "tokenizer.json").unlink()
