"""unfreeze quantize as a command: what it says and writes beside the weights, and what it refuses in one line."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from tests.compress.conftest import LLAMA, MOE, random_model, sharded
from unfreeze import cli
from unfreeze.checkpoint import open_checkpoint
from unfreeze.core.errors import CheckpointError


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    made = {}
    for name, kind, settings in (("llama", "Llama", LLAMA), ("moe", "Qwen3Moe", LLAMA | MOE)):
        tensors, config = random_model(kind, settings)
        half = {key: value.bfloat16() for key, value in tensors.items()}
        made[name] = sharded(root / name, half, config | {"dtype": "bfloat16"})
    return made


def run(capsys, *words) -> tuple[int, str, dict]:
    code = cli.main([*map(str, words), "--json"])
    printed = capsys.readouterr()
    return code, printed.err, json.loads(printed.out) if printed.out else {}


def test_it_says_sizes_movement_what_stayed_and_the_next_command(folders, tmp_path, capsys):
    out = tmp_path / "out"
    (folders["moe"] / "README.md").write_text("---\nlicense: apache-2.0\n---\nmine")
    code, said, result = run(capsys, "quantize", folders["moe"], "--to", "int4", "--out", out)
    assert code == 0
    before, after = open_checkpoint(folders["moe"]), open_checkpoint(out)
    assert (result["before"], result["after"]) == (before.nbytes, after.nbytes)
    # 24 matrices of 2,048 weights: half a byte and 1/16 each, and a shape of 8 bytes
    assert result["bits"] == pytest.approx(4.5 + 64 / 2048)
    packed = {key: tensor for file in out.glob("*.safetensors") for key, tensor in load_file(file).items()}
    dense = {key: t for file in folders["moe"].glob("*.safetensors") for key, t in load_file(file).items()}
    off = size = 0.0
    for key, codes in packed.items():
        module, _, suffix = key.rpartition(".")
        if suffix == "weight_packed":
            nibbles = torch.stack([(codes >> 4 * place & 15) - 8 for place in range(8)], -1).flatten(1)
            value = nibbles.double() * packed[f"{module}.weight_scale"].double().repeat_interleave(32, 1)
            weight = dense[f"{module}.weight"].double()
            off, size = off + float((value - weight).square().sum()), size + float(weight.square().sum())
    assert result["moved"]["experts"]["error"] == pytest.approx((off / size) ** 0.5, rel=1e-2)
    assert f"experts {100 * result['moved']['experts']['error']:.2g} % (24 matrices)" in said
    assert "bits for each quantized weight" in said and "Left as they are (always)" in said
    assert "attention" in said and "(not in --modules)" in said and "router" in said
    assert f"unfreeze chat {out}" in said and "transformers 5.23 loads it with compressed-tensors" in said
    card = (out / "README.md").read_text()
    assert 'license: "apache-2.0"' in card and "# moe, INT4" in card and "| router | 2 | 0: as in" in card
    assert str(tmp_path) not in card and (out / "README.base.md").read_text().endswith("mine")
    record = json.loads((out / "quantize.json").read_text())
    assert record["finished"] and record["bits"] == result["bits"]
    # weights that are not its own are left alone, and not mixed with it
    other = out / "model-extra.safetensors"
    other.write_bytes(b"mine")
    code, said, _ = run(capsys, "quantize", folders["moe"], "--to", "int4", "--out", out)
    assert code == 2 and f"{out} holds model-extra.safetensors, which this quantization does not" in said
    assert f"next: a new folder: --out {out}-int4" in said and other.read_bytes() == b"mine"
    other.unlink()
    # the same command again changes nothing
    files = {file: file.stat().st_ino for file in out.glob("*.safetensors")}
    assert run(capsys, "quantize", folders["moe"], "--to", "int4", "--out", out)[2] == result
    assert files == {file: file.stat().st_ino for file in out.glob("*.safetensors")}


@pytest.mark.parametrize(
    ("base", "to", "words"),
    [
        ("llama", "nvfp4", "transformers 5.23 loads it with compressed-tensors."),
        ("moe", "nvfp4", "transformers 5.23 has no loader for NVFP4 experts"),
        (
            "llama",
            "nf4",
            "transformers 5.23 and SGLang 0.5.23 load it with bitsandbytes; vLLM 0.33 does not.",
        ),
        ("moe", "nf4", "transformers 5.23, vLLM 0.33 and SGLang 0.5.23 have no loader for NF4 experts"),
        ("moe", "fp8", "vLLM 0.33 and SGLang 0.5.23 refuse such FP8 experts."),
        ("moe", "mxfp4", "loads it with compressed-tensors; SGLang 0.5.23 leaves its experts empty."),
        ("llama", "mxfp4", "loads it with compressed-tensors; SGLang 0.5.23 refuses it."),
    ],
)
def test_the_card_says_who_loads_it(base, to, words, folders, tmp_path, capsys):
    code, said, _ = run(capsys, "quantize", folders[base], "--to", to, "--out", tmp_path / "out")
    assert code == 0 and words in said and words in (tmp_path / "out/README.md").read_text()


def test_a_quantized_folder_is_planned_inspected_and_talked_with(folders, tmp_path, capsys):
    out = tmp_path / "out"
    assert run(capsys, "quantize", folders["llama"], "--to", "fp8", "--out", out)[0] == 0
    assert run(capsys, "inspect", out)[0] == 0
    assert run(capsys, "plan", "--model", out)[0] == 0


def refused(capsys, *words) -> str:
    code, said, _ = run(capsys, *words)
    assert code == 2
    message, remedy = said.strip().splitlines()[-2:]
    assert remedy.startswith("  next: ") and len(message) < 400
    return f"{message}\n{remedy}"


def test_bad_input_is_one_line_and_writes_nothing(folders, tmp_path, capsys):
    out = tmp_path / "out"
    llama, moe = folders["llama"], folders["moe"]
    assert "--modules experts: a llama is dense, without experts" in refused(
        capsys, "quantize", llama, "--to", "int4", "--out", out, "--modules", "experts"
    )
    assert "the model's own folder" in refused(capsys, "quantize", moe, "--to", "int4", "--out", moe)
    assert "needs --out" in refused(capsys, "quantize", moe, "--to", "int4")
    assert "needs --to" in refused(capsys, "quantize", moe, "--out", out)
    assert "is not one of" in refused(capsys, "quantize", moe, "--to", "int3", "--out", out)
    assert "quantize takes a bf16 model" in refused(capsys, "quantize", moe, "--to", "bf16", "--out", out)
    assert "INT4" in refused(capsys, "quantize", moe, "--to", "4bit", "--out", out).upper()
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine").write_text("")
    assert "holds mine, not a quantization" in refused(
        capsys, "quantize", moe, "--to", "int4", "--out", tmp_path / "full"
    )
    assert not out.exists()
    assert run(capsys, "quantize", moe, "--to", "int4", "--out", out)[0] == 0
    again = refused(capsys, "quantize", out, "--to", "int8", "--out", tmp_path / "twice")
    assert "is quantized already (int4-pack-quantized)" in again and "take the bf16 release" in again
    run_folder = tmp_path / "run"
    run_folder.mkdir()
    (run_folder / "adapter_config.json").write_text("{}")
    assert "unfreeze merge" in refused(
        capsys, "quantize", run_folder, "--to", "int4", "--out", tmp_path / "x"
    )


def test_several_processes_are_refused_and_the_hint_is_the_command(folders, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"
    words = ("quantize", folders["llama"], "--to", "int8", "--out", out)
    with monkeypatch.context() as patch:
        for rank in ("0", "1"):
            patch.setenv("RANK", rank)
            patch.setenv("WORLD_SIZE", "2")
            message, remedy = refused(capsys, *words).splitlines()
            assert "quantize runs in one process, but torchrun started 2" in message
        assert not out.exists()
        patch.setenv("RANK", "2")
        assert "RANK is 2, but WORLD_SIZE is 2" in refused(capsys, *words)
    hint = remedy.partition("without torchrun: unfreeze ")[2].split()
    assert hint == [str(word) for word in words]
    monkeypatch.setenv("WORLD_SIZE", "1")  # control arm
    assert run(capsys, *hint)[0] == 0 and open_checkpoint(out).nbytes


def test_a_width_without_groups_is_refused_with_formats_that_take_it(tmp_path, capsys):
    tensors, config = random_model("Llama", LLAMA | {"intermediate_size": 72, "num_hidden_layers": 1})
    half = {key: value.bfloat16() for key, value in tensors.items()}
    base = sharded(tmp_path / "odd", half, config | {"dtype": "bfloat16"})
    for to in ("int4", "mxfp4", "nvfp4"):
        words = refused(capsys, "quantize", base, "--to", to, "--out", tmp_path / to)
        assert "down_proj [64, 72]: 72 input columns do not divide into groups" in words
        hints = words.partition("next: ")[2].split("--to ")[1:]
        assert [hint[:4].strip(" ,") for hint in hints] == ["int8", "fp8"]
        assert not (tmp_path / to).exists()
    for to in ("int8", "fp8"):
        assert run(capsys, "quantize", base, "--to", to, "--out", tmp_path / to)[0] == 0


def test_other_words_lead_here(folders, capsys):
    for word in ("quantise", "quantization", "int4", "awq"):
        assert "unfreeze quantize MODEL --to int4" in refused(capsys, word)
    merged = refused(capsys, "merge", folders["llama"], "--to", "int4")
    assert "has no adapter to merge" in merged and f"unfreeze quantize {folders['llama']} --to int4" in merged
    assert "quantize writes it" in refused(capsys, "merge", folders["llama"], "--to", "nf4")


def test_a_folder_with_other_files_is_refused_before_a_download(tmp_path, capsys, monkeypatch):
    def download(*_, **__):
        raise CheckpointError("downloaded", next="nothing")

    monkeypatch.setattr("unfreeze.checkpoint.open_checkpoint", download)
    words, notes = ["quantize", "org/name", "--to", "int4", "--out", tmp_path], tmp_path / "notes.txt"
    notes.write_text("mine")
    said = refused(capsys, *words)
    assert f"{tmp_path} holds notes.txt, not a quantization" in said
    assert f"next: a new folder: --out {tmp_path}-int4" in said and notes.read_text() == "mine"
    notes.unlink()
    assert "downloaded" in refused(capsys, *words)  # control arm: an empty folder


def test_a_cut_tokenizer_is_refused_before_a_byte_is_written(folders, tmp_path, capsys):
    model, out = tmp_path / "model", tmp_path / "out"
    shutil.copytree(folders["llama"], model)
    for text, code in (('{"model": {', 2), ("{}", 0)):  # control arm: a whole file
        (model / "tokenizer.json").write_text(text)
        got, words, _ = run(capsys, "quantize", model, "--to", "int8", "--out", out)
        assert got == code and ("tokenizer.json is not JSON" in words) == (code == 2)
        assert out.exists() == (code == 0)


def test_columns_need_rows(folders, tmp_path, capsys):
    flags = ["quantize", folders["llama"], "--to", "int8", "--out", tmp_path / "out", "--columns", "text=t"]
    code, words, _ = run(capsys, *flags)
    assert code == 2 and "--columns has no effect without rows" in words
    assert run(capsys, *flags[:-2])[0] == 0  # control arm
