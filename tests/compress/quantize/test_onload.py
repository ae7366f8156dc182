"""A release packed while it is loaded is, bit for bit, the folder that `unfreeze quantize` writes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from unfreeze import models
from unfreeze.checkpoint import Manifest, open_checkpoint, packing
from unfreeze.checkpoint.resolve import Params, resolve
from unfreeze.checkpoint.same import same_weights, weights_digest
from unfreeze.checkpoint.tensors import stored_tensor
from unfreeze.compress.calibrate.calibration import matrices_of
from unfreeze.compress.quantize import formats
from unfreeze.compress.quantize.onload import packed_on_load
from unfreeze.compress.quantize.work import quantize_work
from unfreeze.compress.quantize.write import inputs_of, write
from unfreeze.config.lora import LoraConfig
from unfreeze.config.sft import PackedFormat, PackedModules
from unfreeze.core.errors import CheckpointError, ConfigError, UserError
from unfreeze.core.rows import Rows
from unfreeze.generate.open import open_model
from unfreeze.parallel.placement.owned import divide, placement_of_experts
from unfreeze.parallel.placement.peers import rest_of
from unfreeze.parallel.placement.units import layout_of
from unfreeze.parallel.plan import plan_here

FORMATS = tuple(formats.FORMATS)
GPT_OSS = {
    "vocab_size": 88,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 256,
}


@pytest.fixture(scope="module")
def folders(bases, merging, tmp_path_factory) -> dict[str, Path]:
    """The bf16 bases, and gpt-oss, whose experts are one tensor on disk, transposed."""
    tensors, config = merging.random_model("GptOss", GPT_OSS)
    half = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    own = merging.sharded(tmp_path_factory.mktemp("bases") / "gpt_oss", half, config | {"dtype": "bfloat16"})
    return {**{name: bases[name] for name in ("llama", "moe", "stacked")}, "gpt_oss": own}


@pytest.fixture(scope="module")
def written(folders, tmp_path_factory):
    """(base, format, modules) -> the manifest of the folder that quantize writes."""
    known = {}

    def make(base: str, to: str, modules: tuple[str, ...] = ()) -> Manifest:
        if (base, to, modules) not in known:
            manifest, out = open_checkpoint(folders[base]), tmp_path_factory.mktemp("out") / f"{base}-{to}"
            write(quantize_work(manifest, to, modules), out, inputs_of(manifest, to, modules), None)
            known[base, to, modules] = open_checkpoint(out)
        return known[base, to, modules]

    return make


def bits(tensor: torch.Tensor) -> tuple[object, ...]:
    flat = tensor.detach().cpu().contiguous().view(-1)
    return tensor.dtype, tuple(tensor.shape), bytes(flat.view(torch.uint8).numpy().tobytes())


def loaded(manifest: Manifest) -> dict[str, tuple[object, ...]]:
    """Every parameter and buffer of the model in memory, as bits."""
    model = open_model(manifest, torch.float32)
    return {name: bits(tensor) for name, tensor in [*model.named_parameters(), *model.named_buffers()]}


def stored(manifest: Manifest) -> dict[str, tuple[object, ...]]:
    return {name: bits(stored_tensor(info)) for name, info in manifest.tensors.items()}


CASES = [
    *((base, to, ("all-linear",)) for base in ("llama", "moe") for to in FORMATS),
    ("stacked", "int4", ("all-linear",)),
    ("stacked", "nf4", ("all-linear",)),
    ("moe", "int4", ()),
    ("moe", "int4", ("experts", "lm_head")),
    ("llama", "nf4", ()),
    ("gpt_oss", "mxfp4", ("experts",)),
]


@pytest.mark.parametrize(("base", "to", "modules"), CASES)
def test_the_model_is_that_of_the_folder(folders, written, base: str, to: str, modules) -> None:
    """The same names, dtypes, shapes and bits: as files and in memory. And the same config.json."""
    folder, packed = written(base, to, modules), packed_on_load(open_checkpoint(folders[base]), to, modules)
    assert stored(folder) == stored(packed)
    assert packed.nbytes == folder.nbytes < packed.on_load.released.nbytes
    assert packed.config == json.loads((folder.path / "config.json").read_text())
    assert loaded(folder) == loaded(packed)
    assert packed.is_packed() and not packed.on_load.released.is_packed()


def test_a_matrix_in_blocks_of_rows_is_the_same_and_a_wrong_block_is_seen(
    folders, written, monkeypatch
) -> None:
    """The control arm: rows of a block that are rounded with another's scales are not the folder's."""
    wanted = {to: loaded(written("moe", to, ("all-linear",))) for to in ("int4", "fp8", "int8", "mxfp4")}
    monkeypatch.setattr("unfreeze.quant.requantize.BLOCK", 3 * 64)
    for to, tensors in wanted.items():
        assert loaded(packed_on_load(open_checkpoint(folders["moe"]), to, ("all-linear",))) == tensors, to
    whole = loaded(written("moe", "nvfp4", ("all-linear",)))
    # NVFP4 has one scale for a whole matrix
    monkeypatch.setattr("unfreeze.quant.requantize.by_rows", lambda codec: True)
    packed = packed_on_load(open_checkpoint(folders["moe"]), "nvfp4", ("all-linear",))
    with pytest.raises((RuntimeError, AssertionError)):
        assert loaded(packed) == whole


def test_another_rounding_is_seen(folders, written, monkeypatch) -> None:
    """The control arm of the comparison: one code of one matrix."""
    whole = formats.nearest

    def off(weight, codec, name):
        parts = whole(weight, codec, name)
        if name.endswith("layers.1.mlp.down_proj"):
            parts["weight_packed"][3, 1] ^= 1
        return parts

    packed = packed_on_load(open_checkpoint(folders["llama"]), "int4")
    tensors = {
        name: info
        if info.packed_from is None
        else replace(info, packed_from=replace(info.packed_from, round=off))
        for name, info in packed.tensors.items()
    }
    before, after = loaded(written("llama", "int4")), loaded(replace(packed, tensors=tensors))
    assert [name for name in before if before[name] != after[name]] == [
        "model.layers.1.mlp.down_proj.weight_packed"
    ]


def test_formats_and_modules_are_those_of_quantize() -> None:
    assert PackedFormat.__args__ == FORMATS and PackedModules.__args__ == formats.MODULES


def test_a_packed_base_is_not_the_same_weights_as_the_release(folders) -> None:
    """A bf16 teacher of a student on the packed base is a model of its own; so are they in `unfreeze eval`."""
    released = open_checkpoint(folders["moe"])
    packed, again, other = (packed_on_load(released, to) for to in ("int4", "int4", "fp8"))
    assert same_weights(packed, again) and weights_digest(packed) == weights_digest(again)
    for one in (released, other):
        assert not same_weights(packed, one) and weights_digest(packed) != weights_digest(one)


@pytest.mark.parametrize("name", ["llama", "moe"])
def test_the_plan_counts_what_is_resident(folders, written, name: str) -> None:
    """Before anything is read: bytes of the model in memory, and of loading it. Of bf16 it would be another."""
    released = open_checkpoint(folders[name])
    packed = packed_on_load(released, "int4", ("all-linear",))
    shape = models.shape(packed.config)
    options = {"dtype": "bfloat16", "device": "cpu", "tokens": 64}
    before, after, folder = (
        plan_here(shape, manifest, LoraConfig(), **options)
        for manifest in (released, packed, written(name, "int4", ("all-linear",)))
    )
    model = open_model(packed, torch.bfloat16, as_stored=True)
    tensors = {id(t): t.nbytes for t in [*model.parameters(), *model.buffers()]}
    assert after.terms["base"] == sum(tensors.values()) == folder.terms["base"]
    assert after.terms["base"] < before.terms["base"]
    assert after.load == folder.load + packing.packing_bytes(packed) and packing.packing_bytes(packed) > 0
    assert packing.packing_bytes(released) == 0


def test_a_config_alone_is_planned_as_its_release(folders, tmp_path) -> None:
    released = open_checkpoint(folders["moe"])
    alone = Manifest(folders["moe"], released.config, {}, "", ())
    of_files, of_config = (
        packed_on_load(manifest, "int4", ("all-linear",)) for manifest in (released, alone)
    )
    facts = [{i.name: (i.dtype, i.shape) for i in m.tensors.values()} for m in (of_files, of_config)]
    assert facts[0] == facts[1]


def placements_of(manifest: Manifest, model=None):
    shape = models.shape(manifest.config)
    model = models.meta_model(shape, manifest, torch.float32)
    params: Params = {name: (t.dtype, tuple(t.shape)) for name, t in model.state_dict().items()}
    return resolve(manifest, models.rules(shape), params, tied=models.tied(shape)), params, model


def test_processes_read_each_matrix_once_and_keep_its_parts_together(folders) -> None:
    """Divided over three, with peers, and experts split in two: each matrix is packed by one process."""
    packed = packed_on_load(open_checkpoint(folders["moe"]), "nvfp4", ("all-linear",))
    placements, params, _ = placements_of(packed)
    layer = [p for p in placements if ".layers.0." in p.param and ".experts." not in p.param]
    layout = layout_of(list(dict.fromkeys(p.param for p in layer)), params)
    for parts in (divide(placements, [1.0, 1.0, 1.0]), rest_of(layout, layer, 3).reads):
        whole = [p for part in parts for p in part if p.info.packed_from is not None]
        assert all(parts)
        homes = {}
        for rank, part in enumerate(parts):
            for p in part:
                if p.info.packed_from is not None:
                    homes.setdefault((p.info.file, p.info.offset), set()).add(rank)
        assert homes and all(len(ranks) == 1 for ranks in homes.values())
        assert len(whole) == len({(p.info.name) for p in whole})  # none is cut
    read = sum(map(packing.bytes_read, placements))
    assert read == packed.on_load.released.nbytes


def test_experts_of_one_tensor_are_cut_between_processes(folders, written) -> None:
    """gpt-oss: experts 1 to 3 of four, made from their slice of the stack."""
    packed = packed_on_load(open_checkpoint(folders["gpt_oss"]), "mxfp4", ("experts",))
    work = quantize_work(open_checkpoint(folders["gpt_oss"]), "mxfp4")
    names = [matrix.name for matrix in matrices_of(work)]  # of a calibration: each expert has its own
    assert len({*names}) == len(names) == 2 * 4 * 2 and "model.layers.1.mlp.experts.down_proj[3]" in names
    placements, params, _ = placements_of(packed)
    flat = {}
    for placement in placements:
        if placement.info.packed_from is not None:
            shape = params[placement.param][1]
            part = placement_of_experts(placement, shape, Rows(1, 3, 4))
            flat[placement.param] = torch.zeros((2, *shape[1:]), dtype=params[placement.param][0]), part
    tensors = {name: tensor.view(-1) for name, (tensor, _) in flat.items()}
    from unfreeze.checkpoint.stream import Files

    with Files() as files:
        list(packing.fill([part for _, part in flat.values()], tensors, files.raw))
    whole = dict(open_model(written("gpt_oss", "mxfp4", ("experts",))).named_buffers())
    assert flat and all(torch.equal(tensor, whole[name][1:3]) for name, (tensor, _) in flat.items())


def test_what_cannot_be_packed_is_refused_in_one_line(folders, written) -> None:
    with pytest.raises(ConfigError, match=r"quantized already \(int4-pack-quantized\)"):
        packed_on_load(written("moe", "int4"), "fp8")
    with pytest.raises(ConfigError, match="dense, without experts") as refused:
        packed_on_load(open_checkpoint(folders["llama"]), "int4", ("experts",))
    assert refused.value.next == "--quantize-modules all-linear"
    with pytest.raises(UserError, match="INT4 needs a matrix per expert; gpt_oss") as refused:
        packed_on_load(open_checkpoint(folders["gpt_oss"]), "int4")
    assert refused.value.next == "--quantize mxfp4, as gpt-oss is published"


def test_a_weight_that_is_not_finite_is_named(folders, tmp_path) -> None:
    import shutil

    shutil.copytree(folders["llama"], tmp_path / "nan")
    file = next((tmp_path / "nan").glob("model-00001*"))
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("_proj.weight"))
    tensors[name][0, 0] = float("nan")
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match="NaN") as refused:
        open_model(packed_on_load(open_checkpoint(tmp_path / "nan"), "int4"))
    assert name.removesuffix(".weight") in refused.value.message


MEASURE = """
import sys, torch
from unfreeze import models
from unfreeze.checkpoint import open_checkpoint
from unfreeze.checkpoint.packing import packing_bytes
from unfreeze.compress.quantize.onload import packed_on_load
from unfreeze.generate.open import open_model

def kib(field):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(field))

small, folder, to = sys.argv[1:]
open_model(packed_on_load(open_checkpoint(small), to))  # threads and lazy imports first
manifest = packed_on_load(open_checkpoint(folder), to)

def grown(plant):
    open("/proc/self/clear_refs", "w").write("5")  # the peak counts from here
    before = kib("VmRSS")
    # the bug this guards against: the release whole in memory beside the packed model
    held = open_model(manifest.on_load.released, torch.bfloat16) if plant else None
    model = open_model(manifest, torch.bfloat16)
    return (kib("VmHWM") - before) * 1024, sum(t.nbytes for t in [*model.parameters(), *model.buffers()])

print(*grown(False), grown(True)[0], packing_bytes(manifest), manifest.on_load.released.nbytes)
"""
LARGE = {
    "vocab_size": 64,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "max_position_embeddings": 64,
}


@pytest.mark.parametrize("to", ["int4", pytest.param("nf4", marks=pytest.mark.nightly)])
def test_peak_host_memory(folders, tmp_path: Path, to: str, forkserver) -> None:
    """docs/why/trust.md L1, of a process of its own: the packed model, and a matrix while it is packed. Control
    arm: beside the whole release."""
    if not Path("/proc/self/status").exists():
        pytest.skip("/proc/self/status (Linux) gives the peak")
    config = transformers.LlamaConfig(**LARGE)
    with torch.device("meta"):
        wanted = transformers.LlamaForCausalLM(config).state_dict()
    noise = torch.randn(2**20, generator=torch.Generator().manual_seed(0)).bfloat16()
    tensors = {n: noise.repeat(-(-t.numel() // 2**20))[: t.numel()].view(t.shape) for n, t in wanted.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(
        json.dumps(config.to_dict() | {"architectures": None, "dtype": "bfloat16"})
    )
    done = forkserver.run(["-c", MEASURE, folders["llama"], tmp_path, to])
    assert done.returncode == 0, done.stderr
    said = done.stdout
    peak, final, planted, beside, released = map(int, said.split())
    assert final < released / 2 and peak >= 0.9 * final  # the measurement sees the weights
    assert peak <= final + beside + 2**23 < planted, (peak, final, beside, planted)
