"""Bases in bf16 that vLLM and SGLang read, and the answers of their own code (readers/), for test_vllm.py and
test_sglang.py."""

import json
import os
import subprocess
import tempfile
from pathlib import Path

from safetensors.torch import load_file, save_file

from tests.compress.conftest import LLAMA, MOE, adapter_for, random_model, sharded
from tests.compress.quantize.conftest import run_quantize
from tests.examples.conftest import variable
from unfreeze.adapters import load_adapter, save_adapter
from unfreeze.checkpoint import open_checkpoint
from unfreeze.generate.open import open_model

READERS = Path(__file__).parent / "readers"
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
PLAIN = {"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"}


def made(root, of_releases=None):
    """name -> bf16 folder. of_releases: name -> more fields of config.json."""
    folders = {}
    for name, (kind, settings, more) in MADE.items():
        tensors, config = random_model(kind, settings)
        half = {
            key: value if key.endswith("correction_bias") else value.bfloat16()
            for key, value in tensors.items()
        }
        more = more | (of_releases or {}).get(name, {})
        folders[name] = sharded(root / name, half, config | {"dtype": "bfloat16"} | more)
    return folders


def answers(library, tasks):
    """What readers/by_<library>.py answers to tasks; all in one process, whose imports take up to a minute."""
    programs = Path(os.environ[variable(library)]) / "bin"
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        (folder / "task.json").write_text(json.dumps(tasks))
        script = READERS / f"by_{library}.py"
        command = [programs / "python", script, folder / "task.json", folder / "out.json"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads((folder / "out.json").read_text())["answers"]


def quantized(folders, formats, root):
    """(base, format, modules, folder) of every base in every format; of mixtures, their experts alone too."""
    cases = []
    for name, base in folders.items():
        for to in formats:
            for modules in {(), ("all-linear",)} if name != "llama" else {("all-linear",)}:
                out = root / "-".join((name, to, *modules))
                run_quantize(base, out, to, modules)
                cases.append((name, to, modules, out))
    return cases


def tensors_of(folder):
    return {k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()}


def changed(source, folder, change, config=lambda table: table):
    """The task of a copy of a folder with other tensors or another config."""
    folder.mkdir(parents=True)
    save_file(change(tensors_of(source)), folder / "model.safetensors", metadata={"format": "pt"})
    table = config(json.loads((source / "config.json").read_text()))
    (folder / "config.json").write_text(json.dumps(table))
    return {"folder": str(folder)}


def head_renamed(tensors):
    """A control arm: the head under another name."""
    return tensors | {"x": tensors.pop("lm_head.weight")}


def exported(base, folder, reader):
    """(folder, tensors, config) of a random adapter that is exported for a reader."""
    model = open_model(open_checkpoint(base))
    load_adapter(model, adapter_for(base, folder / "adapter"))
    export = save_adapter(model, folder / "export", base_name="base", reader=reader)
    config = json.loads((export / "adapter_config.json").read_text())
    return export, load_file(export / "adapter_model.safetensors"), config


def adapter_as(folder, tensors, config):
    """A copy of an adapter with other tensors or another config."""
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config))


def under_another_name(tensors):
    """A control arm: an adapter's down_proj under a name that no layer has."""
    return {key.replace("down_proj", "fc2"): value for key, value in tensors.items()}


def squares(tensors, factor):
    """[of A, of B]: the squares of an adapter's numbers. factor: B's name -> what multiplies it when loaded."""
    return [
        sum(
            float(t.double().square().sum()) * (factor(key) ** 2 if x == "B" else 1)
            for key, t in tensors.items()
            if f"lora_{x}" in key
        )
        for x in "AB"
    ]
