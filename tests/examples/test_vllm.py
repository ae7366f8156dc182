"""vLLM itself reads what `unfreeze quantize` and `unfreeze export --for vllm` write: its config, its model
classes and their weight loading, its LoRA manager. No kernel runs (readers/by_vllm.py).

A folder is read whole if every number of its files lands in a parameter, and every parameter is written."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.compress.conftest import LLAMA, MOE, adapter_for, random_model, sharded
from tests.compress.quantize.conftest import run_quantize

pytestmark = pytest.mark.others("vllm")
READ = Path(__file__).parent / "readers" / "by_vllm.py"
SIZES = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 128, "max_position_embeddings": 128}
EXPERTS = {"moe_intermediate_size": 128, "num_experts_per_tok": 2}
MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
MADE = {
    "llama": ("Llama", LLAMA | SIZES | {"head_dim": 64}, {}),
    "qwen3_moe": ("Qwen3Moe", LLAMA | MOE | SIZES | EXPERTS | {"head_dim": 64}, {}),
    # the release's config names its routing; transformers' does not
    "deepseek_v3": ("DeepseekV3", LLAMA | SIZES | EXPERTS | MLA, {"topk_method": "noaux_tc"}),
}
WAYS = {  # format -> of linear layers, of experts
    "int4": ("CompressedTensorsWNA16", "CompressedTensorsWNA16MoEMethod"),
    "int8": ("CompressedTensorsWNA16", "CompressedTensorsWNA16MoEMethod"),
    "fp8": ("CompressedTensorsW8A16Fp8", None),
    "mxfp4": ("CompressedTensorsW4A4Mxfp4", "CompressedTensorsW4A4Mxfp4MoEMethod"),
    "nvfp4": ("CompressedTensorsW4A4Fp4", "CompressedTensorsW4A4Nvfp4MoEMethod"),
    "nf4": (None, None),
}
PLAIN = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")
OF_ACTIVATIONS = ("input_global_scale", "k_scale", "v_scale", "q_scale", "zero_point")
"""Parameters that a checkpoint without rounded activations and KV cache has not."""


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
        made[name] = sharded(root / name, half, config | {"dtype": "bfloat16"} | more)
    return made


@pytest.fixture(scope="module")
def by_vllm(request, tmp_path_factory):
    """tasks -> vLLM's answers; all in one process, whose imports take a minute."""
    from tests.examples.conftest import variable

    if variable("vllm") not in os.environ:  # a fixture of a module is made before the tests' own skip
        pytest.skip("runs in make nightly")
    programs = Path(os.environ[variable("vllm")]) / "bin"

    def read(tasks):
        folder = tmp_path_factory.mktemp("task")
        (folder / "task.json").write_text(json.dumps(tasks))
        command = [programs / "python", READ, folder / "task.json", folder / "out.json"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads((folder / "out.json").read_text())["answers"]

    return read


def missing(answer, names="missing"):
    return [name for name in answer[names] if not name.endswith(OF_ACTIVATIONS)]


def test_folders_are_read_whole_in_their_format_or_refused(folders, by_vllm, tmp_path):
    cases, tasks = [], []
    for name, base in folders.items():
        for to in WAYS:
            for modules in {(), ("all-linear",)} if name != "llama" else {("all-linear",)}:
                out = tmp_path / "-".join((name, to, *modules))
                run_quantize(base, out, to, modules)
                cases.append((name, to, modules, out))
                tasks.append({"folder": str(out)})
    tasks.append({"folder": str(tmp_path / "nothing")})
    wrong = tmp_path / "wrong"  # control arms: a tensor under another name, and one that is gone
    for name, change in (("renamed", lambda t: t | {"x": t.pop("lm_head.weight")}), ("gone", _without)):
        source = tmp_path / "llama-int4-all-linear"
        tensors = change(
            {k: v for file in sorted(source.glob("*.safetensors")) for k, v in load_file(file).items()}
        )
        (wrong / name).mkdir(parents=True)
        save_file(tensors, wrong / name / "model.safetensors", metadata={"format": "pt"})
        (wrong / name / "config.json").write_text((source / "config.json").read_text())
        tasks.append({"folder": str(wrong / name)})
    answers = by_vllm(tasks)
    for (name, to, modules, out), answer in zip(cases, answers, strict=False):
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
            assert ways - set(PLAIN) == wanted | (set() if dense else {experts}), out.name
    nothing, renamed, gone = answers[len(cases) :]
    assert "error" in nothing and "error" in renamed
    assert missing(gone) == ["lm_head.weight"]


def _without(tensors):
    del tensors["lm_head.weight"]
    return tensors


def test_matrices_that_it_fuses_have_one_number(folders, tmp_path):
    """CompressedTensorsW4A4Fp4 takes the largest of q, k and v; the method of experts gate's."""
    for name, base in folders.items():
        run_quantize(base, tmp_path / name, "nvfp4", ("all-linear",))
        tensors = {k: v for f in (tmp_path / name).glob("*.safetensors") for k, v in load_file(f).items()}
        numbers = {
            k.removesuffix(".weight_global_scale"): float(v) for k, v in tensors.items() if "global" in k
        }
        for leaf, other in (
            ("q_proj", "k_proj"),
            ("gate_proj", "up_proj"),
            ("q_a_proj", "kv_a_proj_with_mqa"),
        ):
            both = [(n, n.removesuffix(leaf) + other) for n in numbers if n.endswith(f".{leaf}")]
            for one, two in both:
                assert two not in numbers or numbers[one] == numbers[two], one


def test_an_adapter_reaches_the_layers(folders, by_vllm, tmp_path):
    """Of a dense model; adapters of mixtures need its kernels to be loaded: tests/adapters/test_readers.py."""
    name = "llama"
    from unfreeze.adapters import load_adapter, save_adapter
    from unfreeze.adapters.readers import VLLM
    from unfreeze.checkpoint import open_checkpoint
    from unfreeze.generate.open import open_model

    model = open_model(open_checkpoint(folders[name]))
    load_adapter(model, adapter_for(folders[name], tmp_path / "adapter"))
    save_adapter(model, tmp_path / "export", base_name="base", reader=VLLM)
    tensors = load_file(tmp_path / "export" / "adapter_model.safetensors")
    strange = {key.replace("down_proj", "fc2"): value for key, value in tensors.items()}
    (tmp_path / "strange").mkdir()
    save_file(strange, tmp_path / "strange" / "adapter_model.safetensors")
    config = (tmp_path / "export" / "adapter_config.json").read_text()
    (tmp_path / "strange" / "adapter_config.json").write_text(config)
    task = {"folder": str(folders[name])}
    good, bad = by_vllm([task | {"adapter": str(tmp_path / each)} for each in ("export", "strange")])
    assert good["adapter"]["aside"] == [], good
    scale = json.loads(config)["lora_alpha"] / json.loads(config)["r"]
    own = [
        sum(float(t.double().square().sum()) for k, t in tensors.items() if f"lora_{x}" in k) for x in "AB"
    ]
    assert good["adapter"]["squares"] == pytest.approx([own[0], own[1] * scale**2], rel=1e-2)  # in bf16
    assert "error" in bad or bad["adapter"]["aside"]  # control arm
