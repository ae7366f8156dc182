"""Claims about open_checkpoint: equal to the safetensors library on good files, one clear CheckpointError on
each bad one (docs/why/trust.md L7)."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from unfreeze.checkpoint import open_checkpoint
from unfreeze.checkpoint.manifest import read_config
from unfreeze.checkpoint.tensors import TORCH_DTYPE
from unfreeze.core.errors import CheckpointError
from unfreeze.quant import not_followed, recognise

SHARED = Path(__file__).resolve().parents[3] / "shared"


def refusal(folder: Path | str) -> str:
    """The message of the one CheckpointError; it always names a next step."""
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    assert caught.value.next
    return caught.value.message


@pytest.mark.parametrize("shards", [1, 3])
def test_equals_the_safetensors_library(tmp_path: Path, kimi, shards: int) -> None:
    manifest = open_checkpoint(kimi.write(tmp_path / "m", kimi.tensors(), shards=shards))
    seen = 0
    for file in manifest.files:
        with safe_open(file, "pt") as theirs:
            for name in theirs.keys():  # noqa: SIM118
                tensor, info = theirs.get_tensor(name), manifest.tensors[name]
                assert (TORCH_DTYPE[info.dtype], info.shape, info.nbytes, info.file) == (
                    tensor.dtype,
                    tuple(tensor.shape),
                    tensor.nbytes,
                    file,
                )
                with file.open("rb") as raw:
                    raw.seek(info.offset)
                    assert (
                        raw.read(info.nbytes)
                        == tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
                    )
                seen += 1
    assert seen == len(manifest.tensors) == len(kimi.tensors())
    assert manifest.nbytes == sum(tensor.nbytes for tensor in kimi.tensors().values())
    assert (
        manifest.config["model_type"] == "kimi_k2"
        and manifest.prefix == ""
        and manifest.generation_config == {}
    )


def test_shared_checkpoint_without_tokenizer() -> None:
    folder = SHARED / "data" / "tiny-kimi-int4"
    if not folder.is_dir():
        pytest.skip(f"{folder} is not here; test_equals_the_safetensors_library covers the same ground")
    manifest = open_checkpoint(folder)
    # expected_logits.safetensors is not in the index
    assert len(manifest.tensors) == 187 and len(manifest.files) == 1


def test_kimi_k25_prefix_and_nested_config(tmp_path: Path, kimi) -> None:
    tensors = kimi.tensors("language_model.") | {"vision_tower.patch.weight": torch.zeros(2)}
    manifest = open_checkpoint(kimi.write(tmp_path / "m", tensors, config={"text_config": kimi.config}))
    assert manifest.prefix == "language_model."
    assert {"model.norm.weight", "vision_tower.patch.weight"} <= manifest.by_model_name().keys()


def test_links_as_in_the_hub_cache_are_followed(tmp_path: Path, kimi) -> None:
    blobs = kimi.write(tmp_path / "models--org--name" / "blobs", kimi.tensors(), shards=2)
    snapshot = blobs.parent / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(os.path.relpath(file, snapshot))
    assert len(open_checkpoint(snapshot).tensors) == len(kimi.tensors())


def test_missing_shard(tmp_path: Path, kimi) -> None:
    folder = kimi.write(tmp_path / "m", kimi.tensors(), shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    message = refusal(folder)
    assert (
        "model-00002-of-00003.safetensors is missing (2 of 3 shards present)" in message
        and "unfinished download" in message
    )


def test_truncated_file(tmp_path: Path, kimi) -> None:
    folder = kimi.write(tmp_path / "m", kimi.tensors())
    file = folder / "model.safetensors"
    os.truncate(file, file.stat().st_size - 1)
    message = refusal(folder)
    assert "1 of its" in message and "cut off" in message and "unfinished download" in message


@pytest.mark.parametrize("keep", [0, 5, 8, 100])
def test_truncated_inside_the_header(tmp_path: Path, kimi, keep: int) -> None:
    folder = kimi.write(tmp_path / "m", kimi.tensors())
    os.truncate(folder / "model.safetensors", keep)
    assert "truncated" in refusal(folder)


def test_lfs_pointer(tmp_path: Path, kimi) -> None:
    folder = kimi.write(tmp_path / "m", kimi.tensors())
    (folder / "model.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n"
    )
    assert "Git LFS" in refusal(folder)


def test_trailing_bytes(tmp_path: Path, kimi) -> None:
    folder = kimi.write(tmp_path / "m", kimi.tensors())
    with (folder / "model.safetensors").open("ab") as file:
        file.write(b"x")
    assert "longer than" in refusal(folder)


def test_index_pointing_to_a_file_that_is_not_there(tmp_path: Path, kimi) -> None:
    folder = kimi.write(tmp_path / "m", kimi.tensors(), shards=2)
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("model-00001-of-00002", "model-00001-of-00009"))
    assert "model-00001-of-00009.safetensors is missing (1 of 2 shards present)" in refusal(folder)


@pytest.mark.parametrize("shards_are_there", [True, False])
def test_weights_that_are_there_twice_are_refused(tmp_path: Path, kimi, shards_are_there: bool) -> None:
    """transformers' save_pretrained leaves both where a folder is written in shards, then whole, or the reverse:
    it then reads model.safetensors, whatever the index says."""
    folder = kimi.write(tmp_path / "m", kimi.tensors(), shards=2)
    kimi.write(tmp_path / "whole", kimi.tensors())
    (tmp_path / "whole" / "model.safetensors").rename(folder / "model.safetensors")
    if not shards_are_there:
        for file in folder.glob("model-*-of-*.safetensors"):
            file.unlink()
    assert "holds weights twice" in refusal(folder)
    (folder / "model.safetensors.index.json").unlink()
    assert [file.name for file in open_checkpoint(folder).files] == ["model.safetensors"]


def test_index_and_files_disagree(tmp_path: Path, kimi) -> None:
    folder = kimi.write(tmp_path / "m", kimi.tensors(), shards=2)
    index = folder / "model.safetensors.index.json"
    good = json.loads(index.read_text())
    extra = {"weight_map": good["weight_map"] | {"model.layers.9.x": "model-00001-of-00002.safetensors"}}
    index.write_text(json.dumps(extra))
    assert "model.layers.9.x" in refusal(folder)
    index.write_text(
        json.dumps({"weight_map": {k: v for k, v in good["weight_map"].items() if k != "lm_head.weight"}})
    )
    assert "1 of" not in refusal(folder) and "lm_head.weight" in refusal(folder)
    index.write_text(json.dumps(good))
    assert open_checkpoint(folder)  # control: the index as it was is accepted


@pytest.mark.parametrize(
    "name",
    [
        "../x.safetensors",
        "/etc/passwd",
        "a/b.safetensors",
        "..\\x.safetensors",
        "x.bin",
        "",
        ".safetensors",
        3,
    ],
)
def test_index_cannot_lead_out_of_the_folder(tmp_path: Path, kimi, name: object) -> None:
    folder = kimi.write(tmp_path / "m", kimi.tensors(), shards=2)
    save_file({"lm_head.weight": torch.zeros(1)}, tmp_path / "x.safetensors")
    index = folder / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"] | {"lm_head.weight": name}
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert "plain name" in refusal(folder)


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda h: h["model.norm.weight"].update(dtype="F13"), "unknown dtype"),
        (lambda h: h["model.norm.weight"].update(shape=[63]), "does not fill its bytes"),
        (lambda h: h["model.norm.weight"].update(shape=[-64]), "malformed"),
        (lambda h: h["model.norm.weight"].update(shape=[64.0]), "malformed"),
        (lambda h: h["model.norm.weight"].update(data_offsets=[128, 0]), "malformed"),
        (lambda h: h["model.norm.weight"].update(data_offsets=[0, 128]), "overlap"),
        (lambda h: h["model.norm.weight"].update(data_offsets=[10**9, 10**9 + 128]), "gap"),
        (lambda h: h.pop("model.embed_tokens.weight"), "gap"),
        (lambda h: h.update({"x": 1}), "malformed"),
    ],
)
def test_hand_made_headers(tmp_path: Path, kimi, rewrite_header, edit, said: str) -> None:
    folder = kimi.write(tmp_path / "m", kimi.tensors())
    rewrite_header(folder / "model.safetensors", edit)
    assert said in refusal(folder)


def test_header_that_is_not_json_or_repeats_a_name(tmp_path: Path, kimi) -> None:
    folder = kimi.write(tmp_path / "m", kimi.tensors())
    entry = b'"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
    for text in (b"{" + entry + b"," + entry + b"}", b"[1, 2]", b"{not json", b"\xff\xfe{}"):
        (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))
        assert "damaged header" in refusal(folder)


def test_two_files_hold_the_same_tensor(tmp_path: Path, kimi) -> None:
    tensors = kimi.tensors()
    folder = kimi.write(tmp_path / "m", tensors, shards=2)
    save_file(
        {n: tensors[n] for n in [*list(tensors)[1::2], "model.embed_tokens.weight"]},
        folder / "model-00002-of-00002.safetensors",
    )
    assert "two files" in refusal(folder)


def test_folders_that_are_no_checkpoint(tmp_path: Path, kimi) -> None:
    assert (
        "does not exist; nearest: 'kimi'"
        in (kimi.write(tmp_path / "kimi", kimi.tensors()), refusal(tmp_path / "kimmi"))[1]
    )
    assert "is a file" in refusal(tmp_path / "kimi" / "config.json")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "no config.json" in refusal(empty)
    (empty / "config.json").write_text("{}")
    assert "no .safetensors" in refusal(empty)
    (empty / "pytorch_model.bin").write_bytes(b"\x80\x04")
    assert "pickled" in refusal(empty)
    (empty / "config.json").write_text("{")
    assert "not JSON" in refusal(empty)
    (empty / "config.json").write_text("[]")
    assert "not an object" in refusal(empty)
    (empty / "config.json").write_text("{}")
    for name in ("a", "b"):
        save_file({name: torch.zeros(1)}, empty / f"{name}.safetensors")
    assert "no model.safetensors.index.json" in refusal(empty)


GPTQ = {
    "bits": 4,
    "group_size": 128,
    "desc_act": False,
    "model_file_base_name": "model",
}  # AutoGPTQ's of 2023
AWQ = {"zero_point": True, "q_group_size": 64, "w_bit": 4, "version": "GEMM"}  # autoawq's of 2023
AUTOROUND = {"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:auto_gptq"}


@pytest.mark.parametrize(
    ("name", "table", "method"),
    [
        ("quantize_config.json", GPTQ, "gptq"),
        ("quant_config.json", AWQ, "awq"),
        ("quantize_config.json", AWQ, "awq"),
        ("quantization_config.json", AUTOROUND, "auto-round"),
        ("hf_quant_config.json", {"quantization": {"quant_algo": "FP8"}}, "modelopt"),
    ],
)
def test_a_quantization_beside_the_config_counts_as_its_own(tmp_path: Path, name, table, method) -> None:
    (tmp_path / name).write_text(json.dumps(table))
    (tmp_path / f"release.{name}").write_text(json.dumps(table))
    config = tmp_path / "config.json"
    for file in (config, tmp_path / "release.json", tmp_path / "alone.json"):
        file.write_text('{"model_type": "llama"}')
    for source in (tmp_path, config, tmp_path / "release.json"):
        assert read_config(source)["quantization_config"]["quant_method"] == method
        assert recognise(read_config(source)).codecs
    # control arms: not beside this one, and the config's own comes first
    assert "quantization_config" not in read_config(tmp_path / "alone.json")
    config.write_text('{"quantization_config": {"quant_method": "fp8"}}')
    assert read_config(config)["quantization_config"] == {"quant_method": "fp8"}


def test_a_release_whose_weights_modelopt_left_alone_is_dense(tmp_path: Path) -> None:
    table = {"quant_algo": None, "kv_cache_quant_algo": "FP8"}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": table}))
    (tmp_path / "config.json").write_text("{}")
    found = read_config(tmp_path)
    assert recognise(found) is None and "kv_cache_quant_algo" in not_followed(found)
    table["quant_algo"] = "FP8"  # control arm
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": table}))
    assert recognise(read_config(tmp_path)) is not None


def test_no_tensor_is_read(tmp_path: Path, kimi) -> None:
    """The tensors' bytes may be a hole: a file with only its header and a length opens as well."""
    folder = kimi.write(tmp_path / "m", kimi.tensors())
    file = folder / "model.safetensors"
    size, raw = file.stat().st_size, file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    file.write_bytes(raw[: 8 + length])
    os.truncate(file, size)
    assert len(open_checkpoint(folder).tensors) == len(kimi.tensors())


@pytest.mark.parametrize("trained", ["model", "adapter"])
def test_a_runs_folder_is_refused_with_what_every_command_can_take(tmp_path, trained):
    """upcycle takes the model as its first word, pretrain no adapter: the advice names neither's flag."""
    (tmp_path / "resolved_config.json").write_text("{}")
    (tmp_path / trained).mkdir()
    with pytest.raises(CheckpointError, match="is a training run, not a checkpoint") as refused:
        open_checkpoint(tmp_path)
    advice = {
        "model": f"give its model: {tmp_path / 'model'}",
        "adapter": f"unfreeze merge {tmp_path}, which writes a checkpoint; sft and others continue a run with"
        " --adapter",
    }
    assert refused.value.next == advice[trained]
