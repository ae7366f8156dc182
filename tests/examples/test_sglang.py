"""SGLang itself reads what `unfreeze quantize` and `unfreeze export --for sglang` write: its config, its model
classes and their weight loading, its LoRA manager. No kernel runs (readers/by_sglang.py).

A folder is read whole if every number of its files lands in a parameter, and every parameter is written."""

from functools import partial

import pytest

from tests.compress.quantize.conftest import run_quantize
from tests.examples.servers import (
    PLAIN,
    adapter_as,
    answers,
    changed,
    exported,
    head_renamed,
    made,
    quantized,
    squares,
    tensors_of,
    under_another_name,
)
from unfreeze.adapters.readers import SGLANG

pytestmark = pytest.mark.others("sglang")
by_sglang = partial(answers, "sglang")
# transformers' config has not
OF_RELEASES = {"deepseek_v3": {"moe_layer_freq": 1, "scoring_func": "sigmoid"}}
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
NOT_STORED = ("g_idx", "g_idx_sort_indices")  # made after loading


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """name -> bf16 folder."""
    return made(tmp_path_factory.mktemp("made"), OF_RELEASES)


def unwritten(answer):
    return [name for name in answer["unwritten"] if not name.endswith(NOT_STORED)]


def test_folders_are_read_whole_in_their_format_or_refused(folders, tmp_path):
    cases = quantized(folders, WAYS, tmp_path)
    read = by_sglang([{"folder": str(out)} for *_, out in cases])
    for (name, to, modules, out), answer in zip(cases, read, strict=True):
        linear, experts = WAYS[to]
        dense = name == "llama"
        if (modules and linear is None) or (not dense and experts is None):
            assert REFUSED[to] in answer["error"], (out.name, answer)
        elif name == "deepseek_v3" and modules:  # all of q_a_proj and kv_a_proj_with_mqa is joined by rows
            assert "loaded_weight.shape" in answer["error"], (out.name, answer)
        else:
            assert "error" not in answer, (out.name, answer)
            ways = {way for module, way in answer["methods"].items() if not module.endswith("gate")}
            assert ways - PLAIN == ({linear} if modules else set()) | (set() if dense else {experts})
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


def test_what_is_wrong_is_seen(folders, tmp_path):
    """Control arms of the test above: no folder, other names, and a list of dense modules without fused names."""
    run_quantize(folders["llama"], tmp_path / "llama", "int4", ("all-linear",))
    run_quantize(folders["deepseek_v3"], tmp_path / "deepseek_v3", "int4", ())

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
            changed(tmp_path / "llama", tmp_path / "renamed", head_renamed),
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


def test_fused_matrices_with_different_numbers_are_refused(folders, tmp_path):
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


def test_an_adapter_reaches_the_layers(folders, tmp_path):
    tasks, own = [], []
    for name, base in folders.items():
        export, tensors, config = exported(base, tmp_path / name, SGLANG)
        scale = config["lora_alpha"] / config["r"]
        # B of experts is scaled where it is stored, others in the kernel
        own.append(squares(tensors, lambda key, scale=scale: scale if ".experts." in key else 1))
        tasks.append({"folder": str(base), "adapter": str(export)})
        if name == "llama":  # control arms: tensors under another name, and a target that is not in config
            fewer = [each for each in config["target_modules"] if each != "down_proj"]
            adapter_as(tmp_path / "strange", under_another_name(tensors), config)
            adapter_as(tmp_path / "fewer", tensors, config | {"target_modules": fewer})
    tasks += [
        {"folder": str(folders["llama"]), "adapter": str(tmp_path / each)} for each in ("strange", "fewer")
    ]
    *good, strange, fewer = by_sglang(tasks)
    for answer, squared in zip(good, own, strict=True):
        assert answer["adapter"]["squares"] == pytest.approx(squared, rel=1e-2)  # in bf16
    for bad in (strange, fewer):
        assert "skipped because they did not match any target module" in bad["error"]
