"""vLLM itself reads what `unfreeze quantize` and `unfreeze export --for vllm` write: its config, its model
classes and their weight loading, its LoRA manager. No kernel runs (readers/by_vllm.py).

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
from unfreeze.adapters.readers import VLLM

pytestmark = pytest.mark.others("vllm")
by_vllm = partial(answers, "vllm")
WAYS = {  # format -> of linear layers, of experts
    "int4": ("CompressedTensorsWNA16", "CompressedTensorsWNA16MoEMethod"),
    "int8": ("CompressedTensorsWNA16", "CompressedTensorsWNA16MoEMethod"),
    "fp8": ("CompressedTensorsW8A16Fp8", None),
    "mxfp4": ("CompressedTensorsW4A4Mxfp4", "CompressedTensorsW4A4Mxfp4MoEMethod"),
    "nvfp4": ("CompressedTensorsW4A4Fp4", "CompressedTensorsW4A4Nvfp4MoEMethod"),
    "nf4": (None, None),
}
OF_ACTIVATIONS = ("input_global_scale", "k_scale", "v_scale", "q_scale", "zero_point")
"""Parameters that a checkpoint without rounded activations and KV cache has not."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """name -> bf16 folder."""
    return made(tmp_path_factory.mktemp("made"))


def missing(answer, names="missing"):
    return [name for name in answer[names] if not name.endswith(OF_ACTIVATIONS)]


def test_folders_are_read_whole_in_their_format_or_refused(folders, tmp_path):
    cases = quantized(folders, WAYS, tmp_path)
    source, wrong = tmp_path / "llama-int4-all-linear", tmp_path / "wrong"
    tasks = [
        *({"folder": str(out)} for *_, out in cases),
        # control arms: no folder, a tensor under another name, and one that is gone
        {"folder": str(tmp_path / "nothing")},
        changed(source, wrong / "renamed", head_renamed),
        changed(source, wrong / "gone", _without),
    ]
    read = by_vllm(tasks)
    for (name, to, modules, out), answer in zip(cases, read, strict=False):
        linear, experts = WAYS[to]
        dense = name == "llama"
        if linear is None:
            assert "Unknown quantization method: bitsandbytes" in answer["error"], out.name
        elif experts is None and not dense:
            assert "For Fused MoE layers" in answer["error"], out.name
        else:
            assert "error" not in answer, (out.name, answer)
            assert missing(answer) == missing(answer, "partly") == [], out.name
            before, after = answer["numbers"]
            assert 0 <= before - after <= 200, out.name  # weight_shape of fused matrices: two numbers each
            ways = {
                way for module, way in answer["methods"].items() if not module.endswith((".attn", "gate"))
            }
            wanted = {linear} if modules else set()
            assert ways - PLAIN == wanted | (set() if dense else {experts}), out.name
    nothing, renamed, gone = read[len(cases) :]
    assert "error" in nothing and "error" in renamed
    assert missing(gone) == ["lm_head.weight"]


def _without(tensors):
    del tensors["lm_head.weight"]
    return tensors


def test_matrices_that_it_fuses_have_one_number(folders, tmp_path):
    """CompressedTensorsW4A4Fp4 takes the largest of q, k and v; the method of experts gate's."""
    for name, base in folders.items():
        run_quantize(base, tmp_path / name, "nvfp4", ("all-linear",))
        tensors = tensors_of(tmp_path / name).items()
        numbers = {k.removesuffix(".weight_global_scale"): float(v) for k, v in tensors if "global" in k}
        for leaf, other in (
            ("q_proj", "k_proj"),
            ("gate_proj", "up_proj"),
            ("q_a_proj", "kv_a_proj_with_mqa"),
        ):
            both = [(n, n.removesuffix(leaf) + other) for n in numbers if n.endswith(f".{leaf}")]
            for one, two in both:
                assert two not in numbers or numbers[one] == numbers[two], one


def test_an_adapter_reaches_the_layers(folders, tmp_path):
    """Of a dense model; adapters of mixtures need its kernels to be loaded: tests/adapters/test_readers.py."""
    base = folders["llama"]
    export, tensors, config = exported(base, tmp_path, VLLM)
    adapter_as(tmp_path / "strange", under_another_name(tensors), config)
    task = {"folder": str(base)}
    good, bad = by_vllm([task | {"adapter": str(each)} for each in (export, tmp_path / "strange")])
    assert good["adapter"]["aside"] == [], good
    own = squares(tensors, lambda key: config["lora_alpha"] / config["r"])
    assert good["adapter"]["squares"] == pytest.approx(own, rel=1e-2)  # in bf16
    assert "error" in bad or bad["adapter"]["aside"]  # control arm
