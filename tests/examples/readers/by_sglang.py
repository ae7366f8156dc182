# ruff: noqa: E402, SIM118, RUF012
"""SGLang's own configuration, model classes, weight loading and LoRA manager on folders, without a card.

    python by_sglang.py TASK.json OUT.json    in the environment of test_sglang.py

TASK: [{"folder": …, "adapter": folder}]. It believes to run on an H100: kernels are stand-ins, nothing is
computed. Each answer is {"error": …}, or what was loaded.
"""

import hashlib
import importlib.machinery
import json
import os
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from unittest.mock import MagicMock, patch

import bitsandbytes  # before there seems to be a card
import torch
import torch._dynamo
import transformers.models.auto
from safetensors import safe_open
from torch.overrides import TorchFunctionMode

KERNELS = (
    "torchvision torchaudio torchcodec flashinfer flash_attn flash_mla sgl_kernel sglang_kernel deep_gemm deep_ep"
    " kernels humming cutlass quack tilelang pynvml torch_memory_saver decord soundfile"
).split()
"""Modules that SGLang imports, and that need a card or are not needed to read weights."""


class StandIn(ModuleType):
    """A module with every name: a class where it is capitalised."""

    __path__ = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {}) if name[0].isupper() else MagicMock()


class StandIns:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in KERNELS:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return StandIn(spec.name)

    def exec_module(self, module):
        """Nothing of a stand-in is run."""


# these ask which optional libraries there are
for name in ("AutoConfig", "AutoModel", "AutoProcessor", "AutoImageProcessor", "AutoTokenizer"):
    getattr(transformers, name)
from transformers import AutoModelForCausalLM, PreTrainedModel, ProcessorMixin  # noqa: F401

sys.meta_path.insert(0, StandIns())
sys.modules["sglang.kernels.ops.gemm.cutedsl_dual_gemm"] = dual = StandIn("cutedsl_dual_gemm")
dual.DualGemmQuantMode = MagicMock()
torch.version.cuda = "12.9"
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 1
torch.cuda.current_device = lambda: 0
torch.cuda.set_device = lambda device: None
torch.cuda.get_device_capability = lambda device=None: (9, 0)
torch.cuda.get_device_name = lambda device=None: "NVIDIA H100"
torch.cuda.mem_get_info = lambda device=None: (79 << 30, 80 << 30)
torch.cuda.get_device_properties = lambda device=None: MagicMock(
    multi_processor_count=132, total_memory=80 << 30, major=9, minor=0
)
torch.cuda.Stream = torch.cuda.Event = MagicMock

import sglang
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
from sglang.srt.layers.quantization import marlin_utils_fp4
from sglang.srt.layers.quantization.compressed_tensors.schemes import (
    CompressedTensorsW4A16Fp4,
    CompressedTensorsW4A16Nvfp4MoE,
)
from sglang.srt.layers.quantization.compressed_tensors.schemes import compressed_tensors_w4a16_nvfp4 as nvfp4
from sglang.srt.lora import mem_pool
from sglang.srt.lora.lora_manager import LoRAManager
from sglang.srt.lora.lora_registry import LoRARef
from sglang.srt.model_loader import loader as loading
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.server_args import ServerArgs

NVFP4 = (CompressedTensorsW4A16Fp4, CompressedTensorsW4A16Nvfp4MoE)
mem_pool.is_pin_memory_available = lambda: False


class OnHost(TorchFunctionMode):
    """Whatever is to lie on the card lies in the host's memory."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        def host(value):
            card = isinstance(value, (str, torch.device)) and str(value).startswith("cuda")
            return torch.device("cpu") if card else value

        if function is torch.Tensor.pin_memory:
            return args[0]
        named = {key: host(value) for key, value in (kwargs or {}).items() if key != "pin_memory"}
        return function(*map(host, args), **named)


def filled(model, byte):
    for parameter in model.parameters():
        parameter.data.view(-1).view(torch.uint8).fill_(byte)


def digests(model):
    return {
        name: hashlib.sha256(each.data.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, each in model.named_parameters()
    }


def loaded(config, loader, model):
    """Load over two backgrounds -> names of parameters that then differ: they were not written whole."""
    marks = []
    for byte in (0x35, 0x4A):
        filled(model, byte)
        if config.quantization == "bitsandbytes":
            for parameter in model.parameters():
                vars(parameter).pop("bnb_quant_state", None)
                vars(parameter).pop("bnb_shard_offsets", None)
            loader._load_weights(config, model)
        else:
            model.load_weights(loader._get_all_weights(config, model))
        marks.append(digests(model))
    return [name for name in marks[0] if marks[0][name] != marks[1][name]]


def numbers(folder):
    """Stored numbers of the files; those of the parameters are the same if every tensor was read once."""
    count = 0
    for path in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            count += sum(file.get_tensor(name).numel() for name in file.keys())
    return count


def methods(model):
    """module -> its way to hold weights."""
    ways = {}
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if method is not None and any(True for _ in module.parameters(recurse=False)):
            scheme = getattr(module, "scheme", None)
            ways[name] = type(method if scheme is None else scheme).__name__
    return ways


def squares(model):
    """Sum of squares of what bitsandbytes makes of its codes with the states that were loaded for them."""
    total = 0.0
    for parameter in model.parameters():
        offsets = getattr(parameter, "bnb_shard_offsets", ())
        for index, state in getattr(parameter, "bnb_quant_state", {}).items():
            codes = parameter.data[offsets[index] : offsets[index + 1]]
            weight = bitsandbytes.functional.dequantize_4bit(codes, state)
            total += float(weight.double().square().sum())
    return total


def one_number(model):
    """Prepare NVFP4 layers for their kernel, whose repacking is left out: it wants one number of fused matrices."""
    marlin = "prepare_nvfp4_layer_for_marlin", "prepare_moe_nvfp4_layer_for_marlin"
    with patch.object(nvfp4, marlin[0], MagicMock()), patch.object(marlin_utils_fp4, marlin[1], MagicMock()):
        for module in model.modules():
            if isinstance(getattr(module, "scheme", None), NVFP4):
                module.scheme.process_weights_after_loading(module)


def adapter(config, model, args, folder):
    """What of an adapter reaches a layer's memory: its wrapped modules, squares of A and of B."""
    manager = LoRAManager(
        base_model=model,
        base_hf_config=config.hf_config,
        max_loras_per_batch=1,
        load_config=LoadConfig(),
        dtype=config.dtype,
        server_args=args,
        lora_backend="triton",
        lora_paths=[LoRARef(lora_id="one", lora_name="one", lora_path=folder, pinned=False)],
    )
    manager.fetch_new_loras({"one"})
    pool = manager.memory_pool
    return {
        "modules": sorted(name for layer in manager.lora_modules for name in layer),
        "squares": [
            sum(float(layer.double().square().sum()) for each in buffers.values() for layer in each)
            for buffers in (pool.A_buffer, pool.B_buffer)
        ],
    }


def read(task):
    lora = {"enable_lora": True, "max_lora_rank": 16, "lora_strict_loading": True}
    args = ServerArgs(
        model_path=task["folder"],
        skip_tokenizer_init=True,
        context_length=64,
        **(lora if task.get("adapter") else {}),
    )
    publish(args, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    started()
    config = ModelConfig.from_server_args(args)
    way = "bitsandbytes" if config.quantization == "bitsandbytes" else "auto"
    loader = loading.get_model_loader(LoadConfig(load_format=way), config)
    quant = loading._get_quantization_config(config, loader.load_config)
    with loading.set_default_torch_dtype(config.dtype):
        model = loading._initialize_model(config, loader.load_config, quant)
        unwritten = loaded(config, loader, model)
    own = dict(model.named_parameters())
    answer = {
        "class": type(model).__name__,
        "methods": methods(model),
        "unwritten": unwritten,
        "numbers": [numbers(task["folder"]), sum(own[name].numel() for name in own.keys() - set(unwritten))],
    }
    if config.quantization == "bitsandbytes":
        answer["squares"] = squares(model)
    one_number(model)
    if task.get("adapter"):
        answer["adapter"] = adapter(config, model, args, task["adapter"])
    return answer


def started():
    if not torch.distributed.is_initialized():
        init_distributed_environment(1, 0, f"file://{tempfile.mkdtemp()}/meet", 0, backend="gloo")
        initialize_model_parallel(backend="gloo")


def main():
    answers = []
    for task in json.loads(Path(sys.argv[1]).read_text()):
        try:
            with OnHost():
                answers.append(read(task))
        except Exception as fault:
            if os.environ.get("TRACE"):
                import traceback

                traceback.print_exc()
            answers.append({"error": f"{type(fault).__name__}: {fault}"})
    Path(sys.argv[2]).write_text(json.dumps({"version": sglang.__version__, "answers": answers}))


main()
