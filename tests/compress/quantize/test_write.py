"""A quantization that was stopped goes on; the disk is checked first; memory stays below two shards; what cannot
be written or loaded is refused before a byte is written."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.compress.quantize.conftest import run_quantize
from tests.compress.quantize.libraries import modules_of, tensors_of
from unfreeze.checkpoint import open_checkpoint
from unfreeze.compress.quantize.work import quantize_work
from unfreeze.core.errors import CheckpointError, ConfigError, DoesNotFit


class Stop(Exception):
    pass


def stop_after(files: int, out: Path):
    """Progress that ends the work once `files` are whole and the next is begun."""

    def progress(done: int, total: int) -> None:
        if len(list(out.glob("*.safetensors"))) >= files:
            raise Stop

    return progress


@pytest.fixture
def small_files(monkeypatch):
    """Files of at most 40,000 bytes: several of them."""
    monkeypatch.setattr("unfreeze.compress.merge.out_files.__defaults__", (40_000,))


def test_progress_ends_at_the_whole(bases, tmp_path, small_files):
    shown: list[tuple[int, int]] = []
    run_quantize(bases["moe"], tmp_path / "out", "int4", progress=lambda *both: shown.append(both))
    assert (
        shown[-1][0]
        == shown[-1][1]
        == sum(path.stat().st_size for path in tmp_path.glob("out/*.safetensors"))
    )


@pytest.mark.parametrize("to", ["int4", "nf4"])
def test_a_stopped_quantization_goes_on_and_gives_the_same_bytes(to, bases, tmp_path, small_files):
    whole, out = tmp_path / "whole", tmp_path / "out"
    record = run_quantize(bases["moe"], whole, to)
    with pytest.raises(Stop):
        run_quantize(bases["moe"], out, to, progress=stop_after(2, out))
    assert not (out / "config.json").exists()  # nobody takes it for a model
    with pytest.raises(CheckpointError, match="is a quantization by unfreeze quantize that was stopped"):
        open_checkpoint(out)
    first = sorted(out.glob("*.safetensors"))
    assert len(first) == 2 and not json.loads((out / "quantize.json").read_text())["finished"]
    with first[1].open("r+b") as file:  # one is damaged meanwhile
        file.seek(-1, os.SEEK_END)
        file.write(b"\x7f" if file.read(1) != b"\x7f" else b"\x01")
    before = [path.stat().st_ino for path in first]
    again = run_quantize(bases["moe"], out, to)
    after = [path.stat().st_ino for path in first]
    assert before[0] == after[0] and before[1] != after[1]
    assert {path.name for path in whole.iterdir()} == {path.name for path in out.iterdir()}
    for file in whole.iterdir():
        if file.name != "quantize.json":
            assert file.read_bytes() == (out / file.name).read_bytes(), file.name
    assert again.moved == record.moved and record.moved["experts"].matrices == 24


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path[:0] = [sys.argv[1]]
from unfreeze.compress import merge
merge.out_files.__defaults__ = (40_000,)
from tests.compress.quantize.conftest import run_quantize
base, out = map(Path, sys.argv[2:])

def progress(done, total):  # in the middle of the second file
    if list(out.glob("*.safetensors")) and list(out.glob(".*.unfinished-*")):
        os.kill(os.getpid(), signal.SIGKILL)

run_quantize(base, out, "int4", progress=progress)
"""


def test_a_killed_quantization_goes_on(bases, tmp_path, small_files, forkserver):
    out, root = tmp_path / "out", Path(__file__).parents[3]
    assert forkserver.run(["-c", KILLED, root, bases["llama"], out]).returncode == -signal.SIGKILL
    assert len(list(out.glob("*.safetensors"))) == 1 and list(out.glob(".*.unfinished-*"))
    first = next(out.glob("*.safetensors")).stat().st_ino
    run_quantize(bases["llama"], out, "int4")
    assert not list(out.glob(".*.unfinished-*"))
    run_quantize(bases["llama"], tmp_path / "whole", "int4")
    for file in (tmp_path / "whole").glob("*.safetensors"):
        assert file.read_bytes() == (out / file.name).read_bytes()
    assert first in [file.stat().st_ino for file in out.glob("*.safetensors")]


def test_a_folder_of_another_quantization_is_not_written_over(bases, tmp_path):
    run_quantize(bases["moe"], tmp_path / "out", "int4")
    with pytest.raises(ConfigError, match="holds a quantization with --to int4"):
        run_quantize(bases["moe"], tmp_path / "out", "int8")
    with pytest.raises(ConfigError, match="holds a quantization with --modules experts"):
        run_quantize(bases["moe"], tmp_path / "out", "int4", ("all-linear",))
    with pytest.raises(ConfigError, match="of another base"):
        run_quantize(bases["stacked"], tmp_path / "out", "int4")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"holds notes\.txt, not a quantization"):
        run_quantize(bases["moe"], tmp_path / "mine", "int4")
    record = tmp_path / "out/quantize.json"
    written = json.loads(record.read_text())
    for shards in ({"a": {}}, {"a": {"moved": {"experts": ["x"]}}}):
        record.write_text(json.dumps(written | {"shards": shards}))
        with pytest.raises(ConfigError, match=r"quantize\.json is damaged"):
            run_quantize(bases["moe"], tmp_path / "out", "int4")


def test_the_disk_is_asked_first(bases, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "unfreeze.compress.shards.shutil.disk_usage", lambda _: type("", (), {"free": 10_000})
    )
    with pytest.raises(DoesNotFit, match=r"for 1 file; .* free for"):
        run_quantize(bases["moe"], tmp_path / "out", "int4")
    assert not (tmp_path / "out").exists()


def changed(base: Path, folder: Path, name: str, change) -> Path:
    """A copy of a checkpoint with one tensor changed."""
    folder.mkdir()
    tensors = tensors_of(base)
    tensors[name] = change(tensors[name])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_bytes((base / "config.json").read_bytes())
    return folder


def test_a_weight_with_nan_is_named(bases, tmp_path):
    name = "model.layers.1.mlp.experts.2.up_proj.weight"

    def with_nan(tensor: torch.Tensor) -> torch.Tensor:
        tensor[3, 5] = torch.nan
        return tensor

    base = changed(bases["moe"], tmp_path / "base", name, with_nan)
    with pytest.raises(CheckpointError) as raised:
        run_quantize(base, tmp_path / "out", "int4")
    assert raised.value.message.startswith("model.layers.1.mlp.experts.2.up_proj: 1 of 2048 weights are NaN")
    assert not (tmp_path / "out/config.json").exists()


def test_widths_modules_and_bases_that_cannot_be_quantized_are_refused(bases, merging, tmp_path):
    odd = {
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 72,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
    }
    tensors, config = merging.random_model("Llama", odd)
    base = merging.sharded(tmp_path / "odd", {n: t.bfloat16() for n, t in tensors.items()}, config)
    words = r"model\.layers\.0\.mlp\.down_proj \[64, 72\]: 72 input columns do not divide into groups of 32"
    with pytest.raises(ConfigError, match=words) as raised:
        run_quantize(base, tmp_path / "out", "int4")
    assert "--to int8 or --to fp8" in raised.value.next
    run_quantize(base, tmp_path / "int8", "int8")
    with pytest.raises(ConfigError, match="--modules experts: a llama is dense"):
        run_quantize(bases["llama"], tmp_path / "out", "int4", ("experts",))
    for name in ("int4", "fp8"):
        with pytest.raises(ConfigError, match=r"is quantized already \((int4-pack-quantized|fp8-block)\)"):
            run_quantize(bases[name], tmp_path / "out", "int4")
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_that_loading_would_refuse_is_not_begun(bases, tmp_path, monkeypatch):
    """Planted: a format that writes another number of scales than its reader expects."""
    from unfreeze.compress import work

    right = work.stored_parts

    def other(codec, rows, columns):
        parts = right(codec, rows, columns)
        scale = codec.suffixes[1]
        return parts | {scale: (parts[scale][0], (rows, 1 + columns // 32))}

    monkeypatch.setattr(work, "stored_parts", other)
    with pytest.raises(CheckpointError, match="tensors have the wrong shape"):
        run_quantize(bases["llama"], tmp_path / "out", "int4")
    assert not (tmp_path / "out").exists()


def test_another_rounding_gets_every_matrix_with_its_name(bases, tmp_path):
    """The joint of calibration: (W float32, codec, name) -> parts."""
    from unfreeze.compress.quantize.formats import nearest
    from unfreeze.compress.quantize.write import inputs_of, write

    for base, count in (("moe", 24), ("stacked", 24), ("llama", 14)):
        seen: dict[str, torch.Tensor] = {}

        def half(weight, codec, name, seen=seen):
            seen[name] = weight
            return nearest(weight / 2, codec, name)

        manifest = open_checkpoint(bases[base])
        out = tmp_path / base
        write(quantize_work(manifest, "int4", round=half), out, inputs_of(manifest, "int4", ()), None)
        assert len(seen) == count and all(weight.dtype == torch.float32 for weight in seen.values())
        run_quantize(bases[base], tmp_path / f"{base}-plain", "int4")
        ours, plain = tensors_of(out), tensors_of(tmp_path / f"{base}-plain")
        assert seen.keys() == modules_of(ours, "int4").keys()
        name = next(iter(seen))
        scale = f"{name}.weight_scale"
        assert torch.equal(ours[scale] * 2, plain[scale]) and ours.keys() == plain.keys()


MEMORY = """
import sys
from pathlib import Path
sys.path[:0] = [sys.argv[1]]
from unfreeze.compress import rounding
from tests.compress.quantize.conftest import run_quantize

def status(name):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(name))

def grown(base, out):
    open("/proc/self/clear_refs", "w").write("5")  # the peak counts from here
    before = status("VmRSS")
    run_quantize(base, out, "int4")
    return status("VmHWM") - before

base, small, out = map(Path, sys.argv[2:])
grown(small, out / "warm")
usual = grown(base, out / "usual")
kept, right = [], rounding._read
def holding(*arguments):  # every matrix is held, as a quantization in memory would
    found = right(*arguments)
    kept.append(found[0].clone())
    return found
rounding._read = holding
print(usual, grown(base, out / "planted"))
"""


@pytest.mark.nightly  # its small twin is test_merge.py's: the same files and the same reading
def test_memory_stays_below_two_shards(merging, tmp_path):
    """4 shards of some 10 MB: it grows by less than two of them, by more than four where it holds what it read."""
    wide = {"vocab_size": 96, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 1}
    wide |= {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64}
    one, config = merging.random_model("Llama", wide)
    small = merging.sharded(tmp_path / "small", one, config)
    layers = {
        name.replace("layers.0", f"layers.{layer}"): tensor.bfloat16()
        for name, tensor in one.items()
        for layer in range(8)
    }
    base = merging.sharded(tmp_path / "wide", layers, config | {"num_hidden_layers": 8}, 4)
    shard = max(file.stat().st_size for file in base.glob("*.safetensors"))
    (tmp_path / "out").mkdir()
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(root), str(base), str(small), str(tmp_path / "out")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    usual, planted = map(int, done.stdout.split()[-2:])
    assert usual < 2 * shard < 4 * shard < planted, (usual, planted, shard)
