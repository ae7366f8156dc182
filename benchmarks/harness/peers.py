"""The peers' sides: transformers, peft and Liger-Kernel, set up as their documentation recommends for speed.

The one file of the benchmarks that imports them, inside functions, in worker processes of their own
(tests/test_layout.py names it).
"""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any, Literal

import torch

from benchmarks.harness.job import BETAS, LEARNING_RATE, MAX_NORM, tokens_of
from benchmarks.harness.rows import installed
from benchmarks.harness.sides import Worker
from benchmarks.harness.timing import wait
from benchmarks.harness.ways import DTYPES, Way
from unfreeze.checkpoint.manifest import read_json
from unfreeze.core.errors import ConfigError
from unfreeze.parallel.machine import resident_bytes

ATTENTION = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
HYBRID = tuple("q_proj k_proj v_proj o_proj out_proj in_proj_qkv in_proj_z in_proj_b in_proj_a".split())
EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
PAD = 1
Trained = Literal["experts", "attention", "all-linear", "hybrid"]
"""hybrid: the projections of both kinds of layers, and the experts."""


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
    model = transformers.DeepseekV3ForCausalLM.from_pretrained(
        checkpoint, config=config, dtype=getattr(torch, dtype), **options
    ).to(device)
    cast(model, dtype)  # experts that were expanded come in the dtype of their scales
    return model


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
    targets: Any = {"all-linear": "all-linear", "hybrid": list(HYBRID)}.get(trained, list(ATTENTION))

    def model_of(folder: str) -> Any:
        if trained in ("all-linear", "hybrid"):
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
            target_parameters=list(EXPERTS) if trained in ("experts", "hybrid") else None,
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


class Paced:
    """transformers' generate with its cache, greedy, paused between calls: it runs in a thread of its own.

    After each token generate asks its stopping criteria; there the thread waits until more are asked for.
    """

    def __init__(self, model: Any):
        self.model, self.way = model, Way(str(model.dtype).removeprefix("torch."))
        self.tokens: list[list[int]] = []
        self._asked: SimpleQueue[int] = SimpleQueue()
        self._done: SimpleQueue[BaseException | None] = SimpleQueue()
        self._thread = Thread()

    def prepare(self, dtype: str, experts: str = "", cache: str = "dynamic") -> dict[str, Any]:
        """Continue in this way (harness/ways.py). Parameters are cast; tables and biases stay as loaded."""
        self.way = Way(dtype, experts, cache)
        cast(self.model, dtype)
        return {}

    def start(self, prompts: list[list[int]], new: int) -> dict[str, Any]:
        self._thread = Thread(target=self._generate, args=(prompts, new), daemon=True)
        self._thread.start()
        return self.steps(1)

    def steps(self, count: int) -> dict[str, Any]:
        self._asked.put(count)
        if (fault := self._done.get()) is not None:
            raise fault
        return {}

    def finish(self) -> dict[str, Any]:
        self._asked.put(0)
        self._thread.join()
        return {"tokens": self.tokens}

    def attempt(self, prompts: list[list[int]], steps: int, seconds: float, **way: str) -> dict[str, Any]:
        """-> step_ms, the median of at most `steps` steps and `seconds`, after one that isn't counted."""
        self.prepare(**way)
        self.start(prompts, steps + 2)
        times, end = [], time.perf_counter() + seconds
        for index in range(steps + 1):
            started = time.perf_counter()
            self.steps(1)
            times += [time.perf_counter() - started] if index else []
            if times and time.perf_counter() > end:
                break
        self.finish()
        return {"step_ms": 1e3 * statistics.median(times)}

    def _generate(self, prompts: list[list[int]], new: int) -> None:
        transformers, left = library("transformers"), self._asked.get()
        model, device = self.model, self.model.device
        tokens_SL = torch.tensor(prompts, device=device)
        pace = self

        class Pause(transformers.StoppingCriteria):
            def __call__(self, input_ids: torch.Tensor, scores: Any, **options: Any) -> torch.Tensor:
                nonlocal left
                left -= 1
                if left == 0:
                    wait(input_ids.device)
                    pace._done.put(None)
                    left = pace._asked.get()
                    # a prompt is read by the default; from the first token on as chosen, as transformers
                    # itself changes it on a GPU (generation/utils.py, _optimize_model_for_decode)
                    if pace.way.experts:
                        model.set_experts_implementation(pace.way.experts)
                return torch.full((len(input_ids),), left == 0, device=input_ids.device)

        options: dict[str, Any] = {"cache_implementation": "static"} if "static" in self.way.cache else {}
        if self.way.cache == "static compiled":
            options["compile_config"] = transformers.CompileConfig()
            options["compile_config"]._compile_all_devices = True  # transformers compiles on GPUs only
        if self.way.experts:
            model.set_experts_implementation("grouped_mm")
        try:
            ids = model.generate(
                tokens_SL,
                attention_mask=torch.ones_like(tokens_SL),
                do_sample=False,
                min_new_tokens=new,
                max_new_tokens=new,
                use_cache=True,
                stopping_criteria=transformers.StoppingCriteriaList([Pause()]),
                pad_token_id=1,
                **options,
            )
            self.tokens = ids[:, tokens_SL.shape[1] :].tolist()
            if left:
                raise ValueError(f"{left} more steps were asked for than the {new} tokens of this generation")
        except BaseException as error:
            self._done.put(error)


def mixed(checkpoint: str, device: str) -> Worker:
    """transformers' generate; a row ends at its length and is padded until the last one ends.

    calls: choose -> dtype, the faster of two; generate -> lengths.
    """
    transformers, model = library("transformers"), loaded(checkpoint, device, "bfloat16").eval()

    def generate(prompts: list[list[int]], lengths: list[int]) -> dict[str, Any]:
        ids_SL, ends_S = torch.tensor(prompts, device=device), torch.tensor(lengths, device=device)

        class AtLength(transformers.StoppingCriteria):
            eos_token_id = PAD  # generate pads ended rows if one of its criteria has this attribute

            def __call__(self, input_ids: torch.Tensor, scores: Any, **options: Any) -> torch.Tensor:
                return ends_S <= input_ids.shape[1] - ids_SL.shape[1]

        most = max(lengths)
        options = {"do_sample": False, "max_new_tokens": most, "pad_token_id": PAD, "eos_token_id": None}
        ends = transformers.StoppingCriteriaList([AtLength()])
        mask = torch.ones_like(ids_SL)
        out = model.generate(ids_SL, attention_mask=mask, stopping_criteria=ends, **options)
        made_SL = out[:, ids_SL.shape[1] :]
        after_S = [int((row[end:] != PAD).sum()) for row, end in zip(made_SL, lengths, strict=True)]
        if any(after_S) or made_SL.shape[1] != most:
            raise ValueError("a row went on after its length")
        return {"lengths": lengths}

    def choose(**prompts: Any) -> dict[str, Any]:
        seconds: dict[str, float] = {}
        for dtype in DTYPES:
            cast(model, dtype)
            started = time.perf_counter()
            generate(**prompts)
            seconds[dtype] = time.perf_counter() - started
        best = min(seconds, key=lambda dtype: seconds[dtype])
        cast(model, best)
        return {"dtype": best}

    return Worker({"choose": choose, "generate": generate})


def loaded(checkpoint: str, device: str, dtype: str) -> Any:
    """A causal model of transformers; the experts of a Kimi-format checkpoint are expanded."""
    if "n_routed_experts" in read_json(Path(checkpoint) / "config.json"):
        return deepseek(checkpoint, "experts", device, dtype)
    wanted = getattr(torch, dtype)
    return library("transformers").AutoModelForCausalLM.from_pretrained(checkpoint, dtype=wanted).to(device)


def generator(checkpoint: str, device: str = "cpu", dtype: str = "bfloat16", adapter: str = "") -> Worker:
    """transformers' generate. calls: of Paced.

    adapter: a folder, which peft merges into the weights, its way without latency. Beside them it would
    expand the product of every expert's factors in every step: 10 s a step on the machine of the first rows.
    """
    model = loaded(checkpoint, device, dtype)
    if adapter:
        model = library("peft").PeftModel.from_pretrained(model, adapter).merge_and_unload()
    running = Paced(model.eval())
    names = ("prepare", "start", "steps", "finish", "attempt")
    return Worker({name: getattr(running, name) for name in names})


def cast(model: Any, dtype: str) -> None:
    """Cast every parameter. Buffers stay: rotary frequencies and routing biases are float32 by intent."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(getattr(torch, dtype))
