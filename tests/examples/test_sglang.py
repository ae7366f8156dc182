"""SGLang itself reads what `unfreeze quantize` and `unfreeze export --for sglang` write: its config, its model
classes and their weight loading, its LoRA manager. No kernel runs (readers/by_sglang.py).

A folder is read whole if every number of its files lands in a parameter, and every parameter is written."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.compress.conftest import adapter_for, random_model, sharded
from tests.compress.quantize.conftest import run_quantize
from tests.examples.test_vllm import MADE

pytestmark = pytest.mark.others("sglang")
READ = Path(__file__).parent / "readers" / "by_sglang.py"
OF_RELEASES = {
    "deepseek_v3": {"moe_layer_freq": 1, "scoring_func": "sigmoid"}
}  # transformers' config has not
WAYS = {  # format -> of linear layers, of experts; None: refused
    "int4": ("CompressedTensorsWNA16", "CompressedTensorsWNA16MoE"),
    "int8": ("CompressedTensorsWNA16", "CompressedTensorsWNA16MoE"),
    "fp8": ("CompressedTensorsW8A16Fp8", None),
    "mxfp4": (None, "Mxfp4MoEMethod"),
    "nvfp4": ("CompressedTensorsW4A16Fp4", "CompressedTensorsW4A16Nvfp4MoE"),
    "nf4": ("BitsAndBytesLinearMethod", None),
}
REFUSED = {  # an expert's format, or a linear layer's
    "fp8": "'NoneType' object has no attribute 'num_bits'",  # input_activations, which it wants
    "mxfp4": "No compressed-tensors compatible scheme was found",
    "nf4": "does not support BitsAndBytes quantization yet",
}
PLAIN = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")
NOT_STORED = ("g_idx", "g_idx_sort_indices")  # made after loading


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """name -> bf16 folder."""
    root, made = tmp_path_factory.mktemp("made"), {}
    for name, (kind, settings, more) in MADE.items():
        tensors, config = random_model(kind, settings)
        half = {
            key: value if key.endswith("correction_bias") else value.bfloat16()
            for key, value in tensors.items()
        }
        more = more | OF_RELEASES.get(name, {})
        made[name] = sharded(root / name, half, config | {"dtype": "bfloat16"} | more)
    return made


@pytest.fixture(scope="module")
def by_sglang(tmp_path_factory):
    """tasks -> SGLang's answers; all in one process, whose imports take half a minute."""
    from tests.examples.conftest import variable

    def read(tasks):
        programs = Path(os.environ[variable("sglang")]) / "bin"
        folder = tmp_path_factory.mktemp("task")
        (folder / "task.json").write_text(json.dumps(tasks))
        command = [programs / "python", READ, folder / "task.json", folder / "out.json"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads((folder / "out.json").read_text())["answers"]

    return read


def tensors_of(folder):
    return {k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()}


def changed(source, folder, change, config=lambda table: table):
    """A copy of a folder with other tensors or another config."""
    folder.mkdir(parents=True)
    save_file(change(tensors_of(source)), folder / "model.safetensors", metadata={"format": "pt"})
    table = config(json.loads((source / "config.json").read_text()))
    (folder / "config.json").write_text(json.dumps(table))
    return {"folder": str(folder)}


def unwritten(answer):
    return [name for name in answer["unwritten"] if not name.endswith(NOT_STORED)]


def test_folders_are_read_whole_in_their_format_or_refused(folders, by_sglang, tmp_path):
    cases, tasks = [], []
    for name, base in folders.items():
        for to in WAYS:
            for modules in {(), ("all-linear",)} if name != "llama" else {("all-linear",)}:
                out = tmp_path / "-".join((name, to, *modules))
                run_quantize(base, out, to, modules)
                cases.append((name, to, modules, out))
                tasks.append({"folder": str(out)})
    answers = by_sglang(tasks)
    for (name, to, modules, out), answer in zip(cases, answers, strict=True):
        linear, experts = WAYS[to]
        dense = name == "llama"
        if (modules and linear is None) or (not dense and experts is None):
            assert REFUSED[to] in answer["error"], (out.name, answer)
        elif name == "deepseek_v3" and modules:  # all of q_a_proj and kv_a_proj_with_mqa is joined by rows
            assert "loaded_weight.shape" in answer["error"], (out.name, answer)
        else:
            assert "error" not in answer, (out.name, answer)
            ways = {way for module, way in answer["methods"].items() if not module.endswith("gate")}
            assert ways - set(PLAIN) == ({linear} if modules else set()) | (set() if dense else {experts})
            empty = [each for each in unwritten(answer) if not each.endswith("bias")]
            if to == "mxfp4":  # codes of experts, and nobody is told; docs/howto/quantize.md says it
                assert empty and all(".experts.w" in each for each in empty), out.name
                continue
            assert empty == [], out.name
            if to == "nf4":  # scales lie beside the parameters
                weights = [value for key, value in tensors_of(folders[name]).items() if "_proj." in key]
                own = sum(float(value.double().square().sum()) for value in weights)
                assert answer["squares"] == pytest.approx(own, rel=0.02), out.name
                continue
            before, after = answer["numbers"]
            assert 0 <= before - after <= 200, out.name  # weight_shape of fused matrices: two numbers each


def test_what_is_wrong_is_seen(folders, by_sglang, tmp_path):
    """Control arms of the test above: no folder, other names, and a list of dense modules without fused names."""
    run_quantize(folders["llama"], tmp_path / "llama", "int4", ("all-linear",))
    run_quantize(folders["deepseek_v3"], tmp_path / "deepseek_v3", "int4", ())

    def renamed(tensors):
        return tensors | {"x": tensors.pop("lm_head.weight")}

    def listed(table):
        own = table["quantization_config"]
        own["ignore"] = [name for name in own["ignore"] if "gate_up_proj" not in name]
        return table

    def flat(tensors):
        name = next(key for key in sorted(tensors) if key.endswith("down_proj.weight.absmax"))
        return tensors | {name: tensors[name] * 0}

    def as_gpt_oss(tensors):
        return {key.replace("weight_packed", "weight"): value for key, value in tensors.items()}

    run_quantize(folders["llama"], tmp_path / "nf4", "nf4", ("all-linear",))
    run_quantize(folders["qwen3_moe"], tmp_path / "mxfp4", "mxfp4", ())
    other, unlisted, scales, whole, codes, nothing = by_sglang(
        [
            changed(tmp_path / "llama", tmp_path / "renamed", renamed),
            changed(tmp_path / "deepseek_v3", tmp_path / "unlisted", dict, listed),
            changed(tmp_path / "nf4", tmp_path / "scales", flat),
            {"folder": str(tmp_path / "nf4")},
            changed(tmp_path / "mxfp4", tmp_path / "codes", as_gpt_oss),
            {"folder": str(tmp_path / "nothing")},
        ]
    )
    assert "error" in nothing
    assert "error" in other or unwritten(other) == ["lm_head.weight"]
    assert "gate_up_proj.weight" in unlisted["error"]
    assert scales["squares"] != pytest.approx(whole["squares"], rel=0.02)
    # its MXFP4 experts are named as gpt-oss's are, and have a bias that need not be stored
    assert all(each.endswith("bias") for each in unwritten(codes)), codes


def test_fused_matrices_with_different_numbers_are_refused(folders, by_sglang, tmp_path):
    """It checks NVFP4's weight_global_scale before the kernel; ours pass in the first test."""
    run_quantize(folders["qwen3_moe"], tmp_path / "same", "nvfp4", ("all-linear",))
    tasks = [{"folder": str(tmp_path / "same")}]
    for leaf in ("k_proj", "up_proj"):

        def double(tensors, leaf=leaf):
            name = next(key for key in sorted(tensors) if key.endswith(f"{leaf}.weight_global_scale"))
            return tensors | {name: tensors[name] * 2}

        tasks.append(changed(tmp_path / "same", tmp_path / leaf, double))
    same, linear, experts = by_sglang(tasks)
    assert "error" not in same
    assert "share one weight_global_scale" in linear["error"]
    assert "share one weight_global_scale" in experts["error"]


def test_an_adapter_reaches_the_layers(folders, by_sglang, tmp_path):
    from unfreeze.adapters import load_adapter, save_adapter
    from unfreeze.adapters.readers import SGLANG
    from unfreeze.checkpoint import open_checkpoint
    from unfreeze.generate.open import open_model

    tasks, own = [], []
    for name, base in folders.items():
        model = open_model(open_checkpoint(base))
        load_adapter(model, adapter_for(base, tmp_path / name / "adapter"))
        export = save_adapter(model, tmp_path / name / "export", base_name="base", reader=SGLANG)
        tensors = load_file(export / "adapter_model.safetensors")
        config = json.loads((export / "adapter_config.json").read_text())
        scale = config["lora_alpha"] / config["r"]
        own.append(
            [
                sum(
                    # B of experts is scaled where it is stored, others in the kernel
                    float(t.double().square().sum()) * (scale**2 if x == "B" and ".experts." in key else 1)
                    for key, t in tensors.items()
                    if f"lora_{x}" in key
                )
                for x in "AB"
            ]
        )
        tasks.append({"folder": str(base), "adapter": str(export)})
        if name == "llama":  # control arms: tensors under another name, and a target that is not in config
            strange = {key.replace("down_proj", "fc2"): value for key, value in tensors.items()}
            fewer = [each for each in config["target_modules"] if each != "down_proj"]
            for each, (t, c) in {
                "strange": (strange, config),
                "fewer": (tensors, config | {"target_modules": fewer}),
            }.items():
                (tmp_path / each).mkdir()
                save_file(t, tmp_path / each / "adapter_model.safetensors")
                (tmp_path / each / "adapter_config.json").write_text(json.dumps(c))
    tasks += [
        {"folder": str(folders["llama"]), "adapter": str(tmp_path / each)} for each in ("strange", "fewer")
    ]
    *good, strange, fewer = by_sglang(tasks)
    for answer, squares in zip(good, own, strict=True):
        assert answer["adapter"]["squares"] == pytest.approx(squares, rel=1e-2)  # in bf16
    for bad in (strange, fewer):
        assert "skipped because they did not match any target module" in bad["error"]
