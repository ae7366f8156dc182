"""A merged folder holds W + ΔW of every module, rounded once, and every other tensor byte for byte; it loads
elsewhere; a merge that was stopped goes on; memory stays below two shards."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path

import pytest
import torch
import transformers
from compressed_tensors.compressors.pack_quantized import unpack_from_int32
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import unfreeze
from unfreeze.adapters import load_adapter
from unfreeze.checkpoint import open_checkpoint
from unfreeze.compress import deltas as deltas_file
from unfreeze.core.errors import ConfigError, DoesNotFit
from unfreeze.generate.open import open_model

IDS = [[5, 6, 7, 8, 9, 10, 30, 41, 77], [80, 3, 90]]
FORMATS = ("int4", "fp8", "llama", "moe", "stacked")


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors, read by the safetensors library."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def expanded(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """module -> its weight in float64, packed ones by compressed-tensors' unpacking or the formula of FP8."""
    found = {}
    for name, tensor in tensors.items():
        module, _, suffix = name.rpartition(".")
        if suffix == "weight_packed":
            scale = tensors[f"{module}.weight_scale"]
            codes = unpack_from_int32(tensor, 4, torch.Size((len(scale), 32 * scale.shape[1])))
            found[module] = (codes.bfloat16() * scale.repeat_interleave(32, 1)).double()
        elif suffix == "weight" and f"{name}_scale_inv" in tensors:
            each = tensors[f"{name}_scale_inv"].double().repeat_interleave(32, 0).repeat_interleave(32, 1)
            found[module] = tensor.double() * each
        elif suffix == "weight" and tensor.dim() == 2:
            found[module] = tensor.double()
        elif ".experts." in name and tensor.dim() == 3:  # stacked
            own = name.rpartition(".")[0]
            for e, matrix in enumerate(tensor.double()):
                if "gate_up" in name:
                    found[f"{own}.{e}.gate_proj"], found[f"{own}.{e}.up_proj"] = matrix.chunk(2)
                else:
                    found[f"{own}.{e}.down_proj"] = matrix
    return found


def deltas(per_expert: Path) -> dict[str, torch.Tensor]:
    """module -> lora_alpha / r · B A in float64, from the file with a pair for every expert."""
    config = json.loads((per_expert / "adapter_config.json").read_text())
    factors = load_file(per_expert / "adapter_model.safetensors")
    scale = config["lora_alpha"] / config["r"]
    modules = [name.removesuffix(".lora_A.weight") for name in factors if name.endswith(".lora_A.weight")]
    return {
        name.removeprefix("base_model.model."): scale
        * factors[f"{name}.lora_B.weight"].double()
        @ factors[f"{name}.lora_A.weight"].double()
        for name in modules
    }


def steps(tensors: dict[str, torch.Tensor], module: str, like: torch.Tensor) -> torch.Tensor | float:
    """Half the distance between neighbouring numbers of the format around W', and float32's own error."""
    if f"{module}.weight_packed" in tensors:
        step = tensors[f"{module}.weight_scale"].double().repeat_interleave(32, 1)
        return step * (0.5 + 7 * 2**-8) + 1e-6  # 7 steps are rounded to bf16
    if f"{module}.weight_scale_inv" in tensors:
        scale = tensors[f"{module}.weight_scale_inv"].double()
        each = scale.repeat_interleave(32, 0).repeat_interleave(32, 1)
        return like.abs() * 2**-4 + each * 2**-10 + 1e-6
    return like.abs() * 2**-8 + 1e-6  # bf16 has 8 significant bits


def beyond(base: Path, out: Path, delta: dict[str, torch.Tensor]) -> list[str]:
    """Modules of the merged folder that are not W + ΔW within half a step of their format."""
    before, tensors = expanded(tensors_of(base)), tensors_of(out)
    after = expanded(tensors)
    assert after.keys() == before.keys() and delta.keys() <= after.keys()
    wanted = {name: before[name] + delta.get(name, 0) for name in before}
    return [
        name
        for name, weight in wanted.items()
        if (
            (after[name] - weight).abs()
            > steps(tensors, name, torch.maximum(weight.abs(), after[name].abs()))
        ).any()
    ]


@pytest.mark.parametrize("to", ["same", "bf16", "int4"])
@pytest.mark.parametrize("base", FORMATS)
def test_every_module_is_w_plus_delta_within_half_a_step(base, to, bases, adapter, merging, tmp_path):
    folder, per_expert = adapter(base)
    record = merging.run(bases[base], folder, tmp_path / "out", to)
    delta = deltas(per_expert)
    assert beyond(bases[base], tmp_path / "out", delta) == []
    stacks = 3 if base == "stacked" else 1  # gate and up are one matrix of a stack
    assert len(record.rows) == len(delta) - (8 if stacks > 1 else 0)
    assert {info.dtype for info in open_checkpoint(tmp_path / "out").tensors.values()} <= {
        "same": {"BF16", "F32", "F8_E4M3", "I32"},
        "bf16": {"BF16", "F32"},
        "int4": {"BF16", "F32", "I32"},
    }[to]


PLANTED = {
    "no scale": "_product(A, B, 1.0)",
    "B the other way": "(B.flip(0).float() @ A.float()) * scale",
    "A transposed": "(B.float() @ A.float().reshape(A.shape[1], A.shape[0]).t()) * scale",
}


@pytest.mark.parametrize("fault", PLANTED)
def test_control_arm_a_wrong_product_is_seen(fault, bases, adapter, merging, tmp_path, monkeypatch):
    folder, per_expert = adapter("int4")
    product = deltas_file._product
    monkeypatch.setattr(
        deltas_file,
        "_product",
        lambda A, B, scale: eval(PLANTED[fault], {"A": A, "B": B, "scale": scale, "_product": product}),
    )
    merging.run(bases["int4"], folder, tmp_path / "out", "bf16")
    assert len(beyond(bases["int4"], tmp_path / "out", deltas(per_expert))) > 40


def test_control_arm_another_experts_delta_is_seen(bases, adapter, merging, tmp_path, monkeypatch):
    folder, per_expert = adapter("moe")
    right = deltas_file.Deltas.of
    monkeypatch.setattr(
        deltas_file.Deltas,
        "of",
        lambda self, place, weight=None: right(
            self,
            type(place)(place.site, place.projection, 1 - place.expert, place.half)
            if place.expert < 2
            else place,
            weight,
        ),
    )
    merging.run(bases["moe"], folder, tmp_path / "out", "bf16")
    wrong = beyond(bases["moe"], tmp_path / "out", deltas(per_expert))
    assert len(wrong) == 2 * 2 * 3 and all(".experts.0." in name or ".experts.1." in name for name in wrong)


@pytest.mark.parametrize("base", FORMATS)
def test_what_no_adapter_touches_is_copied_byte_for_byte(base, bases, adapter, merging, tmp_path):
    folder, per_expert = adapter(base, targets=("attention",))
    merging.run(bases[base], folder, tmp_path / "out")
    touched = tuple(f"{module}." for module in deltas(per_expert))
    before, after = tensors_of(bases[base]), tensors_of(tmp_path / "out")
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(raw(before[name]), raw(after[name]))}
    assert changed and all(name.startswith(touched) for name in changed)
    # the same files with the same tensors, and config.json and what lies beside as they were
    for file in bases[base].iterdir():
        if file.suffix == ".safetensors":
            assert names(file) == names(tmp_path / "out" / file.name)
        elif file.name != "model.safetensors.index.json":
            assert file.read_bytes() == (tmp_path / "out" / file.name).read_bytes()
    index, ours = (
        json.loads((at / "model.safetensors.index.json").read_text())
        for at in (bases[base], tmp_path / "out")
    )
    assert index["weight_map"] == ours["weight_map"]


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def names(file: Path) -> set[str]:
    with safe_open(file, "pt") as opened:
        return set(opened.keys())


def far(ours, theirs) -> float:
    return max((a - b).abs().max().item() for a, b in zip(ours, theirs, strict=True))


def ours(folder: Path, adapter: Path | None = None) -> list[torch.Tensor]:
    model = open_model(open_checkpoint(folder))
    if adapter is not None:
        load_adapter(model, adapter)
    from unfreeze.data import Example, pack

    with torch.no_grad():
        return [
            model.logits(model.hidden(pack([Example(ids, [0.0] + [1.0] * (len(ids) - 1))]))) for ids in IDS
        ]


def theirs(folder: Path, kind: str, dtype=torch.float32, **options) -> list[torch.Tensor]:
    """transformers' logits in float32. What it expands is left in bf16; widening that changes no number.

    It knows Kimi's architecture as deepseek_v3 only, and its names of experts by that.
    """
    config = getattr(transformers, f"{kind}Config").from_pretrained(folder)
    config.model_type = getattr(transformers, f"{kind}Config").model_type
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        model = getattr(transformers, f"{kind}ForCausalLM").from_pretrained(
            folder, config=config, dtype=dtype, attn_implementation="eager", **options
        )
        if dtype == torch.bfloat16:  # linear layers in INT4 are expanded when they are first used
            model.eval()(torch.tensor([IDS[0]]))
        for parameter in model.parameters():
            parameter.data = parameter.data.float()
        return [model.eval()(torch.tensor([ids])).logits[0] for ids in IDS]


KINDS = {"int4": "DeepseekV3", "fp8": "Qwen3Moe", "llama": "Llama", "moe": "Qwen3Moe", "stacked": "Qwen3Moe"}


@pytest.mark.parametrize("base", FORMATS)
def test_a_bf16_merge_loads_in_transformers_with_the_logits_of_base_and_adapter(
    base, bases, adapter, merging, tmp_path
):
    """bf16 rounds each weight by at most 2^-8 of it, 0.4 %: the logits follow within 2 % of what the adapter does."""
    folder, _ = adapter(base)
    merging.run(bases[base], folder, tmp_path / "out", "bf16")
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert "quantization_config" not in config
    assert "bfloat16" in (config.get("torch_dtype"), config.get("dtype"))
    beside, without, read = ours(bases[base], folder), ours(bases[base]), ours(tmp_path / "out")
    assert far(read, theirs(tmp_path / "out", KINDS[base])) < 1e-4
    assert far(read, beside) < 0.02 * far(
        beside, without
    )  # control: without the adapter it is 50 times as far


@pytest.mark.parametrize(
    ("base", "to"),
    [
        ("int4", "same"),
        ("fp8", "same"),
        ("llama", "int4"),
        ("moe", "int4"),
        ("fp8", "int4"),
        ("stacked", "int4"),
    ],
)
def test_a_packed_merge_loads_in_transformers_with_our_logits_of_it(
    base, to, bases, adapter, merging, tmp_path
):
    folder, _ = adapter(base)
    merging.run(bases[base], folder, tmp_path / "out", to)
    # scales as the file has them: FP8's are float32
    options = {} if to == "same" else {"dtype": torch.bfloat16}
    if base == "fp8" and to == "same":
        options["quantization_config"] = transformers.FineGrainedFP8Config(
            dequantize=True, weight_block_size=(32, 32)
        )
    assert far(ours(tmp_path / "out"), theirs(tmp_path / "out", KINDS[base], **options)) < 1e-4
    packed = [name for name in tensors_of(tmp_path / "out") if name.endswith(("weight_packed", "scale_inv"))]
    assert packed


class Stop(Exception):
    pass


def stop_after(files: int, out: Path):
    """Progress that ends the merge once `files` are whole and the next is begun."""

    def progress(done: int, total: int) -> None:
        if len(list(out.glob("*.safetensors"))) >= files:
            raise Stop

    return progress


@pytest.mark.parametrize("to", ["same", "int4"])
def test_a_stopped_merge_goes_on_and_gives_the_same_bytes(to, bases, adapter, merging, tmp_path, monkeypatch):
    monkeypatch.setattr("unfreeze.compress.merge.out_files.__defaults__", (400_000,))
    folder, _ = adapter("int4")
    whole = tmp_path / "whole"
    merging.run(bases["int4"], folder, whole, to)
    out = tmp_path / "out"
    with pytest.raises(Stop):
        merging.run(bases["int4"], folder, out, to, progress=stop_after(2, out))
    assert not (out / "config.json").exists()  # nobody takes it for a model
    assert not list(out.glob(".*.unfinished-*"))
    first = sorted(out.glob("*.safetensors"))
    assert len(first) == 2 and not json.loads((out / "merge.json").read_text())["finished"]
    # one is damaged meanwhile; another process was killed while it wrote the third
    with first[1].open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x7f" if file.read(1) != b"\x7f" else b"\x01")
    (out / ".model-00003.safetensors.unfinished-1").write_bytes(b"half")
    before = [path.stat().st_ino for path in first]
    merging.run(bases["int4"], folder, out, to)
    after = [path.stat().st_ino for path in first]
    assert before[0] == after[0] and before[1] != after[1]
    for file in whole.iterdir():
        if file.name != "merge.json":
            assert file.read_bytes() == (out / file.name).read_bytes(), file.name
    assert {path.name for path in whole.iterdir()} == {path.name for path in out.iterdir()}


def test_another_merge_and_other_files_are_not_written_over(bases, adapter, merging, tmp_path):
    folder, other = adapter("llama")
    merging.run(bases["llama"], folder, tmp_path / "out")
    for said, options in (("--to same", {"to": "bf16"}), ("--scales refit", {"scales": "keep"})):
        with pytest.raises(ConfigError, match=f"holds a merge with {said}"):
            merging.run(bases["llama"], folder, tmp_path / "out", **options)
    with pytest.raises(ConfigError, match="holds a merge of another adapter"):
        merging.run(bases["llama"], other, tmp_path / "out")
    with pytest.raises(ConfigError, match="of another base and of another adapter"):
        merging.run(bases["moe"], adapter("moe")[0], tmp_path / "out")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"holds notes\.txt, not a merge"):
        merging.run(bases["llama"], folder, tmp_path / "mine")


def test_the_disk_is_asked_first_and_only_for_what_is_left(bases, adapter, merging, tmp_path, monkeypatch):
    folder, _ = adapter("llama")
    size = sum(file.stat().st_size for file in bases["llama"].glob("*.safetensors"))

    def disk(free):
        monkeypatch.setattr(
            "unfreeze.compress.shards.shutil.disk_usage", lambda _: type("", (), {"free": free})
        )

    disk(size // 2)
    with pytest.raises(DoesNotFit, match=r"for 3 files; .* free for"):
        merging.run(bases["llama"], folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    disk(10**12)
    with pytest.raises(Stop):
        merging.run(bases["llama"], folder, tmp_path / "out", progress=stop_after(2, tmp_path / "out"))
    disk(size // 2)  # enough for the third
    assert merging.run(bases["llama"], folder, tmp_path / "out").finished


def test_two_merges_at_once_are_refused(bases, adapter, merging, tmp_path):
    folder, _ = adapter("llama")

    def second(done, total):
        with pytest.raises(ConfigError, match="another process is merging"):
            merging.run(bases["llama"], folder, tmp_path / "out")

    merging.run(bases["llama"], folder, tmp_path / "out", progress=second)


MEMORY = """
import sys
from pathlib import Path
sys.path[:0] = [sys.argv[1]]
from unfreeze.compress import rounding
import conftest

def status(name):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(name))

def grown(base, adapter, out):
    open("/proc/self/clear_refs", "w").write("5")  # the peak counts from here
    before = status("VmRSS")
    conftest.run_merge(base, adapter, out)
    return status("VmHWM") - before

base, adapter, small, small_adapter, out = map(Path, sys.argv[2:])
grown(small, small_adapter, out / "warm")
usual = grown(base, adapter, out / "usual")
kept, right = [], rounding._read
def holding(*arguments):  # every matrix is held, as a merge in memory would
    found = right(*arguments)
    kept.append(found[0].clone())
    return found
rounding._read = holding
print(usual, grown(base, adapter, out / "planted"))
"""


def test_memory_stays_below_two_shards(merging, tmp_path, forkserver):
    """6 shards of some 19 MB: a merge grows by less than two of them, and by more than four where it holds what
    it made. A matrix takes 2 MB in float32 here."""
    wide = {"vocab_size": 96, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 1}
    wide |= {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64}
    one, config = merging.random_model("Llama", wide)
    small = merging.sharded(tmp_path / "small", one, config)
    merging.adapter_for(small, tmp_path / "small-adapter")
    layers = {
        name.replace("layers.0", f"layers.{layer}"): tensor.bfloat16()
        for name, tensor in one.items()
        for layer in range(18)
    }
    base = merging.sharded(tmp_path / "wide", layers, config | {"num_hidden_layers": 18}, 6)
    adapter = merging.adapter_for(base, tmp_path / "wide-adapter")
    shard = max(file.stat().st_size for file in base.glob("*.safetensors"))
    folders = (base, adapter, small, tmp_path / "small-adapter", tmp_path / "out")
    (tmp_path / "out").mkdir()
    done = forkserver.run(["-c", MEMORY, Path(__file__).parent, *folders])
    assert done.returncode == 0, done.stderr
    usual, planted = map(int, done.stdout.split()[-2:])
    assert usual < 2 * shard < 4 * shard < planted, (usual, planted, shard)


def test_a_merged_folder_talks(bases, adapter, merging, tmp_path):
    folder, _ = adapter("int4")
    merging.run(bases["int4"], folder, tmp_path / "out", "bf16")
    assert isinstance(
        unfreeze.load(tmp_path / "out", dtype="float32").chat(
            "What is the capital of France?", max_new_tokens=4
        ),
        str,
    )


def test_a_language_model_inside_another_keeps_its_prefix(bases, adapter, merging, tmp_path):
    """Kimi-K2.5: text tensors begin with language_model., and what stands beside is carried byte for byte."""
    folder, per_expert = adapter("int4")
    tower = {"vision_tower.patch.weight": torch.randn(4, 32), "mm_projector.bias": torch.randn(4)}
    inner = {f"language_model.{name}": tensor for name, tensor in tensors_of(bases["int4"]).items()}
    text = json.loads((bases["int4"] / "config.json").read_text())
    config = {"model_type": "kimi_k25", "text_config": text, "vision_config": {}, "dtype": "bfloat16"}
    base = merging.sharded(tmp_path / "base", inner | tower, config)
    for to in ("same", "bf16", "int4"):
        merging.run(base, folder, tmp_path / to, to)
        out = tensors_of(tmp_path / to)
        plain = {name.removeprefix("language_model."): tensor for name, tensor in out.items()}
        for name, tensor in tower.items():
            assert torch.equal(plain.pop(name), tensor)
        inside = merging.sharded(tmp_path / f"plain-{to}", plain, text)
        assert beyond(bases["int4"], inside, deltas(per_expert)) == []
        written = json.loads((tmp_path / to / "config.json").read_text())
        assert ("quantization_config" in written["text_config"]) == (to == "same")
        assert open_model(open_checkpoint(tmp_path / to)) is not None


@pytest.mark.parametrize("base", ["fp8", "int4"])
def test_an_expert_that_learned_nothing_is_copied_and_has_no_rounding(
    base, bases, adapter, merging, tmp_path
):
    """B of an expert that no token met is zero. Quantizing its weight anew could change it all the same."""
    folder, _ = adapter(base)
    tensors = load_file(folder / "adapter_model.safetensors")
    experts = 4 if base == "fp8" else 16
    for name, tensor in tensors.items():
        if (
            ".experts." in name and "shared" not in name and "lora_B" in name
        ):  # the expert is the fastest index
            tensor.view(tensor.shape[0], -1, experts)[..., 1] = 0
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    record = merging.run(bases[base], folder, tmp_path / "out")
    before, after = tensors_of(bases[base]), tensors_of(tmp_path / "out")
    still = [name for name in before if ".mlp.experts.1." in name]
    assert still and all(torch.equal(raw(before[name]), raw(after[name])) for name in still)
    assert any(not torch.equal(raw(before[n]), raw(after[n])) for n in before if ".mlp.experts.2." in n)
    assert not any(".mlp.experts.1." in row.module for row in record.rows)


def test_a_damaged_record_is_refused(bases, adapter, merging, tmp_path):
    folder, _ = adapter("llama")
    merging.run(bases["llama"], folder, tmp_path / "out")
    record = tmp_path / "out/merge.json"
    for name, value in (
        ("shards", []),
        ("shards", {"a": 1}),
        ("shards", {"a": {"rounding": [{"module": 1}]}}),
    ):
        written = json.loads(record.read_text())
        record.write_text(json.dumps(written | {name: value}))
        with pytest.raises(ConfigError, match=r"merge\.json is damaged"):
            merging.run(bases["llama"], folder, tmp_path / "out")
        record.write_text(json.dumps(written))


@pytest.mark.parametrize(
    ("base", "scales"),
    [
        ("int4", "refit"),
        ("fp8", "keep"),
        pytest.param("int4", "keep", marks=pytest.mark.nightly),  # 4 s
        pytest.param("fp8", "refit", marks=pytest.mark.nightly),
    ],
)
def test_rows_at_a_time_give_the_bytes_and_figures_of_the_whole_matrix(
    base, scales, bases, adapter, merging, tmp_path, monkeypatch
):
    folder, _ = adapter(base)
    whole = merging.run(bases[base], folder, tmp_path / "whole", "same", scales)
    monkeypatch.setattr("unfreeze.quant.requantize.BLOCK", 3000)  # 23 rows of 128, or one block of FP8
    cut = merging.run(bases[base], folder, tmp_path / "cut", "same", scales)
    for file in (tmp_path / "whole").glob("*.safetensors"):
        assert file.read_bytes() == (tmp_path / "cut" / file.name).read_bytes()
    for left, right in zip(whole.rows, cut.rows, strict=True):
        assert left.module == right.module
        for way, found in left.ways.items():
            assert found.size == pytest.approx(right.ways[way].size, rel=1e-6)
            assert found.cosine == pytest.approx(right.ways[way].cosine, rel=1e-6)
            assert found.anew == right.ways[way].anew


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path[:0] = [sys.argv[1]]
import conftest
base, adapter, out = map(Path, sys.argv[2:])

def progress(done, total):  # in the middle of the second file
    if list(out.glob("*.safetensors")) and list(out.glob(".*.unfinished-*")):
        os.kill(os.getpid(), signal.SIGKILL)

conftest.run_merge(base, adapter, out, progress=progress)
"""


def test_a_killed_merge_goes_on(bases, adapter, merging, tmp_path, forkserver):
    folder, _ = adapter("llama")
    out = tmp_path / "out"
    words = ["-c", KILLED, Path(__file__).parent, bases["llama"], folder, out]
    assert forkserver.run(words).returncode == -9
    whole, half = list(out.glob("*.safetensors")), list(out.glob(".*.unfinished-*"))
    assert len(whole) == 1 and half and not (out / "config.json").exists()
    before = whole[0].stat().st_ino
    merging.run(bases["llama"], folder, out)
    merging.run(bases["llama"], folder, tmp_path / "at once")
    assert whole[0].stat().st_ino == before and not list(out.glob(".*.unfinished-*"))
    for file in (tmp_path / "at once").glob("*.safetensors"):
        assert file.read_bytes() == (out / file.name).read_bytes()
