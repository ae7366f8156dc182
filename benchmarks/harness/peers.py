"""The peers' sides: transformers, peft and Liger-Kernel, set up as their documentation recommends for speed.

The one file of the benchmarks that imports them, inside functions, in worker processes of their own
(tests/test_layout.py names it).
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from typing import Any, Literal

import torch

from benchmarks.harness.job import BETAS, LEARNING_RATE, MAX_NORM, tokens_of
from benchmarks.harness.rows import installed
from benchmarks.harness.sides import Worker
from benchmarks.harness.timing import wait
from unfreeze.core.errors import ConfigError
from unfreeze.parallel.machine import resident_bytes

ATTENTION = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
Trained = Literal["experts", "attention", "all-linear"]


def library(name: str) -> Any:
    """transformers, peft or liger_kernel, quiet; ConfigError with the command that installs it."""
    try:
        module = importlib.import_module(name)
    except ImportError:
        raise ConfigError(
            f"this side needs {name}, which is not installed", next=f"pip install {name.replace('_', '-')}"
        ) from None
    if name == "transformers":
        module.utils.logging.set_verbosity_error()
        module.utils.logging.disable_progress_bar()
    return module


def liger_refuses(device: str) -> str:
    """The reason transformers + Liger cannot be measured here; "" if it can."""
    if device == "cpu":
        return "Liger-Kernel's kernels are Triton kernels and need a GPU; this is a CPU"
    return "" if installed("liger-kernel") else "liger-kernel is not installed: pip install liger-kernel"


def deepseek(checkpoint: str, trained: Trained, device: str, dtype: str = "bfloat16") -> Any:
    """Load the Kimi-format checkpoint in transformers, which dequantizes it.

    Frozen experts on a CPU run eagerly, the fastest there by measurement. On a GPU transformers chooses.
    """
    transformers = library("transformers")
    config = transformers.DeepseekV3Config.from_pretrained(checkpoint)
    config.model_type = "deepseek_v3"  # Kimi says kimi_k2, which transformers knows under this name only
    options = {"experts_implementation": "eager"} if trained == "attention" and device == "cpu" else {}
    return transformers.DeepseekV3ForCausalLM.from_pretrained(
        checkpoint, config=config, dtype=getattr(torch, dtype), **options
    ).to(device, getattr(torch, dtype))  # experts that were expanded come in the dtype of their scales


def peft(
    checkpoint: str,
    checked: str,
    trained: Trained,
    rank: int,
    documents: int,
    length: int,
    device: str = "cpu",
    dtype: str = "bfloat16",
    checkpointing: bool = False,
) -> Worker:
    """LoRA by peft. Dense models: on every linear layer. Kimi: on the attention projections, and on the
    routed experts through target_parameters. calls: step, state, check.
    """
    before, transformers = resident_bytes(), library("transformers")
    targets: Any = "all-linear" if trained == "all-linear" else list(ATTENTION)

    def model_of(folder: str) -> Any:
        if trained == "all-linear":
            base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).to(
                device
            )
        else:
            base = deepseek(folder, trained, device, dtype)
        base.requires_grad_(False)
        config = library("peft").LoraConfig(
            r=rank,
            lora_alpha=2 * rank,
            lora_dropout=0.0,
            target_modules=targets,
            target_parameters=list(EXPERTS) if trained == "experts" else None,
        )
        return library("peft").get_peft_model(base, config)

    def check() -> dict[str, Any]:
        model = model_of(checked).eval()
        tokens_BL = checked_tokens(model, length, device)
        with torch.no_grad():
            return {"loss_fresh": float(model(input_ids=tokens_BL, labels=tokens_BL, use_cache=False).loss)}

    model = model_of(checkpoint)
    if checkpointing:  # as transformers' Trainer does with gradient_checkpointing=True
        model.enable_input_require_grads()  # or frozen layers behind a checkpoint would pass no gradient
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return _training(model, documents, length, before, check)


def checked_tokens(model: Any, length: int, device: str) -> torch.Tensor:
    """The tokens of `job.check`."""
    drawn = torch.Generator().manual_seed(1)
    return tokens_of(drawn, 2, min(length, 128), model.config.vocab_size).to(device)


def dense(
    checkpoint: str,
    checked: str,
    liger: bool,
    device: str,
    documents: int,
    length: int,
    dtype: str = "bfloat16",
) -> Worker:
    """Build full fine-tuning in transformers, in one dtype throughout, of a model from a checkpoint folder.

    calls: step, state, check.
    """
    before = resident_bytes()
    transformers = library("transformers")
    if liger:
        apply = library("liger_kernel.transformers").apply_liger_kernel_to_qwen2
        apply(rope=True, rms_norm=True, swiglu=True, cross_entropy=False, fused_linear_cross_entropy=True)

    def model_of(folder: str) -> Any:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
        return model.to(device)

    def check() -> dict[str, Any]:
        model = model_of(checked)
        tokens_BL = checked_tokens(model, length, device)
        loss = model(input_ids=tokens_BL, labels=tokens_BL, use_cache=False).loss
        loss.backward()
        norms = [
            parameter.grad.double().norm() for parameter in model.parameters() if parameter.grad is not None
        ]
        return {
            "loss_fresh": float(loss.detach()),
            "loss_moved": float(loss.detach()),
            "grad_norm": float(torch.stack(norms).norm()),
        }

    return _training(model_of(checkpoint), documents, length, before, check)


def _training(
    model: Any, documents: int, length: int, runtime_bytes: int, check: Callable[[], dict[str, Any]]
) -> Worker:
    """A step as transformers' Trainer does it: forward with labels, backward, clipping to 1, fused AdamW."""
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, betas=BETAS, weight_decay=0.0, fused=True)
    generator = torch.Generator().manual_seed(0)
    gradients: list[int] = []

    def step() -> dict[str, Any]:
        tokens_BL = tokens_of(generator, documents, length, model.config.vocab_size).to(model.device)
        loss = model(input_ids=tokens_BL, labels=tokens_BL, use_cache=False).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, MAX_NORM)
        gradients[:] = [sum(parameter.grad.nbytes for parameter in trained if parameter.grad is not None)]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return {"loss": float(loss.detach()), "grad_norm": float(norm)}

    def state() -> dict[str, Any]:
        weights = {id(tensor): tensor.nbytes for tensor in [*model.parameters(), *model.buffers()]}
        moments = [
            tensor.nbytes
            for entry in optimizer.state.values()
            for tensor in entry.values()
            if isinstance(tensor, torch.Tensor)
        ]
        return {"weights": sum(weights.values()), "gradients": sum(gradients), "optimizer": sum(moments)}

    facts = {
        "trained_parameters": sum(parameter.numel() for parameter in trained),
        "runtime_bytes": runtime_bytes,
    }
    return Worker({"step": step, "state": state, "check": check}, facts)


def generator(checkpoint: str, device: str = "cpu", dtype: str = "bfloat16") -> Worker:
    """transformers' generate with its cache, greedy. calls: generate."""
    transformers = library("transformers")
    model = deepseek(checkpoint, "experts", device, dtype).eval()

    class Clock(transformers.StoppingCriteria):
        """Called once after each token; stops nothing."""

        def __init__(self) -> None:
            self.times: list[float] = []

        def __call__(self, input_ids: torch.Tensor, scores: Any, **options: Any) -> torch.Tensor:
            wait(input_ids.device)
            self.times.append(time.perf_counter())
            return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    def generate(prompts: list[list[int]], new: int) -> dict[str, Any]:
        clock, tokens_SL = Clock(), torch.tensor(prompts, device=device)
        with torch.no_grad():
            ids = model.generate(
                tokens_SL,
                attention_mask=torch.ones_like(tokens_SL),
                do_sample=False,
                min_new_tokens=new,
                max_new_tokens=new,
                use_cache=True,
                stopping_criteria=transformers.StoppingCriteriaList([clock]),
                pad_token_id=1,
            )
        return {
            "tokens": ids[:, tokens_SL.shape[1] :].tolist(),
            "decode_seconds": clock.times[-1] - clock.times[0],
        }

    return Worker({"generate": generate})
