# ruff: noqa: E402, SIM118, RUF012
"""vLLM's own configuration, model classes, weight loading and LoRA manager on folders, without a card or kernels.

    python by_vllm.py TASK.json OUT.json    in the environment of test_vllm.py

TASK: [{"folder": …, "adapters": {name: folder}}]. It believes to run on an H100: its CUDA extensions are
stand-ins, because they need a driver; nothing is computed. Each answer is {"error": …}, or what was loaded.
"""

import hashlib
import json
import os
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from unittest.mock import MagicMock

os.environ |= {
    "VLLM_CACHE_ROOT": tempfile.mkdtemp(),
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "CRITICAL",
}

import torch
from safetensors import safe_open


class Kernels(ModuleType):
    """A module, or a namespace of torch.ops, with every name."""

    __path__ = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock()


for name in ("_C_stable_libtorch", "_C", "_moe_C", "_moe_C_stable_libtorch"):
    sys.modules[f"vllm.{name}"] = ModuleType(name)
sys.modules["vllm.vllm_flash_attn"] = Kernels("vllm.vllm_flash_attn")

import vllm
from vllm import platforms
from vllm.platforms.cuda import NonNvmlCudaPlatform
from vllm.platforms.interface import DeviceCapability


class Card(NonNvmlCudaPlatform):
    """An H100 as vLLM asks for it."""

    get_device_capability = classmethod(lambda cls, device_id=0: DeviceCapability(9, 0))
    get_device_name = classmethod(lambda cls, device_id=0: "NVIDIA H100")
    get_device_total_memory = classmethod(lambda cls, device_id=0: 80 << 30)
    device_count = classmethod(lambda cls: 1)
    num_compute_units = classmethod(lambda cls, device_id=0: 132)
    is_pin_memory_available = classmethod(lambda cls: False)
    import_kernels = classmethod(lambda cls: None)


platforms._current_platform = Card()
import vllm._custom_ops as ops

for name in ("_C", "_moe_C", "_C_cache_ops"):
    setattr(torch.ops, name, Kernels(name))
for name in dir(ops):
    if "support" in name:
        setattr(ops, name, lambda *each, **named: True)

from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.lora import model_manager
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import WorkerLoRAManager
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models import registry
from vllm.utils.torch_utils import set_default_torch_dtype


def _no_kernels(manager, *sizes):
    manager.supports_mm = False
    manager.punica_wrapper_mapping = {model_manager.DEFAULT_LANGUAGE_WRAPPER_KEY: MagicMock()}


model_manager.LoRAModelManager._init_punica_wrapper = _no_kernels
registry._run_in_subprocess = lambda look: look()  # the stand-ins are here
torch.cuda.Stream = torch.cuda.Event = MagicMock


def filled(model, byte):
    for parameter in model.parameters():
        parameter.data.view(-1).view(torch.uint8).fill_(byte)


def digests(model):
    return {
        name: hashlib.sha256(each.data.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, each in model.named_parameters()
    }


def loaded(config, model):
    """Load over two backgrounds: a parameter that then differs was not written whole."""
    loader, marks = get_model_loader(config.load_config), []
    for byte in (0x35, 0x4A):
        filled(model, byte)
        written = model.load_weights(loader.get_all_weights(config.model_config, model))
        marks.append(digests(model))
    return written, [name for name in marks[0] if marks[0][name] != marks[1][name]]


def numbers(folder):
    """Stored numbers of the files, and those of the parameters are the same if every tensor was read once."""
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


def adapter(config, model, folder):
    """What of an adapter reaches a layer: its modules, squares of A and of scaled B; and names left aside."""
    manager = WorkerLoRAManager(config, torch.device("cpu"), {})
    manager.vocab_size = config.model_config.get_vocab_size()
    manager.create_lora_manager(model, config)
    lora = manager._load_adapter(LoRARequest("one", 1, str(folder)))
    inside = manager._adapter_manager
    inside.add_adapter(lora)
    inside.activate_adapter(1)
    squares = [0.0, 0.0]
    for module in inside.modules.values():
        for place, stacks in enumerate(("lora_a_stacked", "lora_b_stacked")):
            for stack in getattr(module, stacks, ()):
                squares[place] += float(stack.double().square().sum())
    return {
        "modules": sorted(lora.loras),
        "aside": sorted(set(lora.loras) - set(inside.modules)),
        "squares": squares,
    }


def read(task):
    lora = {"enable_lora": True, "max_lora_rank": 16} if task.get("adapter") else {}
    config = EngineArgs(
        model=task["folder"], skip_tokenizer_init=True, enforce_eager=True, max_model_len=64, **lora
    ).create_engine_config()
    with set_current_vllm_config(config), set_default_torch_dtype(config.model_config.dtype):
        started(config)
        model = initialize_model(vllm_config=config)
        written, partly = loaded(config, model)
        own = dict(model.named_parameters())
        answer = {
            "class": type(model).__name__,
            "methods": methods(model),
            "missing": sorted(own.keys() - written),
            "partly": partly,
            "numbers": [numbers(task["folder"]), sum(own[name].numel() for name in written)],
        }
        if task.get("adapter"):
            answer["adapter"] = adapter(config, model, task["adapter"])
        return answer


def started(config):
    """Groups of one process; those of experts are made for mixtures only."""
    from vllm.distributed import parallel_state as groups

    if not torch.distributed.is_initialized():
        init_distributed_environment(1, 0, f"file://{tempfile.mkdtemp()}/meet", 0, backend="gloo")
    if groups.model_parallel_is_initialized():
        groups.destroy_model_parallel()
    initialize_model_parallel(1, 1, backend="gloo")


def main():
    answers = []
    for task in json.loads(Path(sys.argv[1]).read_text()):
        try:
            answers.append(read(task))
        except Exception as fault:
            if os.environ.get("TRACE"):
                import traceback

                traceback.print_exc()
            answers.append({"error": f"{type(fault).__name__}: {fault}"})
    Path(sys.argv[2]).write_text(json.dumps({"version": vllm.__version__, "answers": answers}))


main()
