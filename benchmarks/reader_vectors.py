"""Load our exports with vLLM's and SGLang's own code and record ΔW·v of each linear layer.

    pip download --no-deps vllm==0.33.0 sglang==0.5.23
    python benchmarks/reader_vectors.py vllm-0.33.0-*.whl sglang-0.5.23-*.whl --write tests/adapters/read_by

Needs no GPU and installs neither: only the modules in LOADING are imported from a wheel, and everything else
that they import is a stand-in. The reader's code for adapter_config.json, tensor names, scale and fused
layers runs; its kernels do not. tests/adapters/test_readers.py holds our files and our ΔW
against what is written here. The adapters are made of exact binary fractions, so they are the same bytes on
every machine.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
from safetensors.torch import load_file
from torch import Tensor

from unfreeze import models
from unfreeze.adapters import LoraConfig, attach, save_adapter, sites
from unfreeze.adapters.readers import READERS

LOADING = {
    "vllm": [
        "vllm",
        "vllm.lora",
        *(f"vllm.lora.{name}" for name in ("peft_helper", "lora_weights", "lora_model", "utils")),
        "vllm.lora.model_manager",
    ],
    "sglang": [
        *("sglang", "sglang.srt", "sglang.srt.lora", "sglang.srt.layers", "sglang.srt.layers.utils"),
        *(f"sglang.srt.layers.utils.{name}" for name in ("__init__", "common")),
        *(f"sglang.srt.lora.{name}" for name in ("lora", "lora_config", "utils")),
    ],
}
SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}
MLA = {
    "model_type": "deepseek_v3",
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 8,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
LLAMA = {"model_type": "llama", "num_key_value_heads": 1}
CASES: dict[str, tuple[dict[str, Any], LoraConfig]] = {
    "mla": (MLA, LoraConfig(rank=4, alpha=8.0, experts_rank=3)),
    "mla-some": (MLA, LoraConfig(rank=2, alpha=8.0, targets=("*.experts.down_proj", "q_a_proj"))),
    "mla-no-q-rank": ({**MLA, "q_lora_rank": None}, LoraConfig(rank=2, alpha=8.0, targets=("attention",))),
    "llama": (LLAMA, LoraConfig(rank=3, alpha=8.0, scaling="alpha/sqrt(r)")),
    "llama-some": (LLAMA, LoraConfig(rank=2, alpha=8.0, targets=("k_proj", "up_proj"))),
}


def made(case: str) -> models.Decoder:
    """The model of a case on meta, with adapters on the host whose numbers are multiples of 1/8."""
    config, lora = CASES[case]
    shape = models.shape({**SIZES, **config})
    with torch.device("meta"):
        model = models.build(shape, dtype=torch.float32, device="meta")
    attach(model, lora, 0, device="cpu")
    with torch.no_grad():
        for number, site in enumerate(sites(model)):
            for step, parameter in enumerate(site.adapter.parameters()):
                values = torch.arange(parameter.numel()) * (7 + step) + 3 * number
                parameter.copy_(((values % 13) - 6).view(parameter.shape) / 8)
    return model


def probe(width: int) -> Tensor:
    """v [in], whole numbers."""
    return ((torch.arange(width) * 5) % 7 - 3).double()


def export(case: str, reader: str, folder: Path) -> str:
    """Our export for a reader. -> the sha256 of its two files."""
    save_adapter(made(case), folder, base_name="base", reader=READERS[reader])
    both = b"".join(
        (folder / name).read_bytes() for name in ("adapter_config.json", "adapter_model.safetensors")
    )
    return hashlib.sha256(both).hexdigest()


class StandIn(ModuleType):
    """A module with every name: a class where it is capitalised, else something that can be called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        base = {"__class_getitem__": classmethod(lambda cls, item: cls)}
        return type(name, (), base) if name[0].isupper() else MagicMock()


class StandIns:
    """Imports of a wheel's LOADING are real; every other module of it is a stand-in."""

    def __init__(self, package: str, root: Path):
        self.package, self.root = package, root

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name.partition(".")[0] not in (self.package, "triton"):
            return None
        if name not in LOADING[self.package]:
            return ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]
        place = self.root.joinpath(*name.split("."))
        if (place / "__init__.py").is_file():  # one that LOADING names
            return importlib.util.spec_from_file_location(name, place / "__init__.py")
        if place.is_dir():  # the package, without what its __init__ would import
            spec = ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]
            spec.submodule_search_locations = [str(place)]
            return spec
        return importlib.util.spec_from_file_location(name, place.with_suffix(".py"))

    def create_module(self, spec: ModuleSpec) -> Any:
        if spec.name in LOADING[self.package]:
            return None
        return StandIn(spec.name)

    def exec_module(self, module: object) -> None:
        """Nothing of a stand-in is run."""


def by_vllm(folder: Path, case: str) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(layer, A, scaled B), from LoRAModel.from_local_checkpoint and the manager's fusing."""
    helpers = importlib.import_module("vllm.lora.peft_helper")
    model_of = importlib.import_module("vllm.lora.lora_model")
    manager = importlib.import_module("vllm.lora.model_manager").LoRAModelManager
    model_of.PIN_MEMORY = False
    config, names = CASES[case][0], [c for c in _layers(folder)]

    # what the manager knows of the model: DeepseekV2ForCausalLM and LlamaForCausalLM.packed_modules_mapping,
    # and RoutedExperts.make_expert_params_mapping (gate, down, up of each expert)
    packed = {"gate_up_proj": ["gate_proj", "up_proj"]}
    if "q_lora_rank" not in config:
        packed["qkv_proj"] = ["q_proj", "k_proj", "v_proj"]
    elif config["q_lora_rank"]:
        packed["fused_qkv_a_proj"] = ["q_a_proj", "kv_a_proj_with_mqa"]
    experts = [
        f"experts.{e}.{name}"
        for e in range(config.get("n_routed_experts", 0))
        for name in ("gate_proj", "down_proj", "up_proj")
    ]
    parents = sorted({name.rpartition(".")[0].partition(".experts.")[0] for name in names})
    modules = {
        f"{parent}.{fused}": [f"{parent}.{part}" for part in parts]
        for parent in parents
        for fused, parts in {**packed, "experts": experts}.items()
        if parts
    }
    expected = {name.rsplit(".", 1)[-1] for name in names} | set(experts)

    helper = helpers.PEFTHelper.from_local_dir(str(folder), 64)
    lora = model_of.LoRAModel.from_local_checkpoint(
        str(folder), expected, helper, lora_model_id=1, device="cpu"
    )
    me = MagicMock()
    me.packed_modules, me.modules = modules, {}
    me.is_pooling_model = me._enable_moe_shared_loras = me._is_non_gated_moe = False
    me._get_lora_layer_weights = lambda model, name: model.get_lora(name)
    me._restrict_to_local_experts = lambda name, parts: parts
    me._pop_lora_weights = lambda model, parts: [model.loras.pop(part, None) for part in parts]
    importlib.import_module("vllm.lora.model_manager").PIN_MEMORY = False
    manager._create_merged_loras_inplace(me, lora)
    for name, layer in lora.loras.items():
        if not isinstance(layer.lora_a, list):
            yield name, layer.lora_a, layer.lora_b
        elif name.endswith(".experts"):
            for projection, A, B in zip(
                ("gate_proj", "down_proj", "up_proj"), layer.lora_a, layer.lora_b, strict=True
            ):
                yield from ((f"{name}.{e}.{projection}", A[e], B[e]) for e in range(A.shape[0]))
        else:
            for part, A, B in zip(modules[name], layer.lora_a, layer.lora_b, strict=True):
                if A is not None:
                    yield part, A, B


def by_sglang(folder: Path, case: str) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(layer, A, scaled B), from LoRAAdapter.initialize_weights_from_tensors."""
    lora = importlib.import_module("sglang.srt.lora.lora")
    utils = importlib.import_module("sglang.srt.lora.utils")
    config = importlib.import_module("sglang.srt.lora.lora_config").LoRAConfig(str(folder))
    base = SimpleNamespace(num_hidden_layers=2, architectures=[], model_type=CASES[case][0]["model_type"])
    adapter = lora.LoRAAdapter("one", config, base, None, None)
    tensors = load_file(folder / "adapter_model.safetensors")
    sizes = {name: tensor.shape for name, tensor in tensors.items()}
    adapter.initialize_weights_from_tensors(tensors)
    targets = utils.get_normalized_target_modules(config.target_modules)
    parts = {
        "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "gate_up_proj": ("gate_proj", "up_proj"),
    }
    for layer in adapter.layers:
        for name, A in layer.weights.items():
            if "lora_A" not in name:
                continue
            utils.get_target_module_name(name, targets)  # a weight that matches no target is skipped
            B = layer.weights[name.replace("lora_A", "lora_B")]
            fused = next((fused for fused in parts if f".{fused}." in name), "")
            names = [name.replace(fused, part) for part in parts[fused]] if fused else [name]
            outs = [sizes[part.replace("lora_A", "lora_B")][0] for part in names]
            for part, a, b in zip(names, A.split(config.r), B.split(outs), strict=True):
                site = part.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                yield site, a, b * adapter.scaling


def _layers(folder: Path) -> list[str]:
    names = load_file(folder / "adapter_model.safetensors")
    return [n.removeprefix("base_model.model.").rpartition(".lora_")[0] for n in names if "lora_A" in n]


READ = {"vllm": by_vllm, "sglang": by_sglang}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("wheels", nargs="+", type=Path)
    parser.add_argument("--write", type=Path, required=True, help="folder of the records")
    arguments = parser.parse_args()
    for wheel in arguments.wheels:
        reader, version = wheel.name.split("-")[:2]
        with tempfile.TemporaryDirectory() as scratch:
            root, cases = Path(scratch), {}
            with zipfile.ZipFile(wheel) as archive:
                wanted = [name.replace(".", "/") + ".py" for name in LOADING[reader]]
                archive.extractall(root, [name for name in archive.namelist() if name in wanted])
            sys.meta_path.insert(0, StandIns(reader, root))  # type: ignore[arg-type]
            for case in CASES:
                folder = root / "export" / case
                sha256 = export(case, reader, folder)
                read = {
                    name: (B.double() @ (A.double() @ probe(A.shape[1]))).tolist()
                    for name, A, B in READ[reader](folder, case)
                }
                cases[case] = {"sha256": sha256, "layers": read}
        arguments.write.mkdir(parents=True, exist_ok=True)
        record = {"reader": reader, "version": version, "by": "benchmarks/reader_vectors.py", "cases": cases}
        path = arguments.write / f"{reader}.json"
        path.write_text(json.dumps(record, indent=1) + "\n")
        print(f"{path}: {reader} {version}, {sum(len(c['layers']) for c in cases.values())} layers")


if __name__ == "__main__":
    main()
