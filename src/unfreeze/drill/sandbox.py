"""Sandbox: a temporary folder with small random checkpoints, each written once.

Faults are planted in copies, never in the user's files.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unfreeze.core.built_in import TINY_K2
from unfreeze.core.command import Common
from unfreeze.core.schema import Event

if TYPE_CHECKING:
    from unfreeze.core.batch import Batch
    from unfreeze.data import Tokenizer
    from unfreeze.models import Decoder

TOKENIZER_FILES = ("tiktoken.model", "tokenizer_config.json", "generation_config.json")
VOCAB = 1536  # ids of tiny-k2's tokenizer, which every sandbox model uses

BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "initializer_range": 0.1,
    "bos_token_id": 1280,
    "eos_token_id": 1281,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2},
    "qwen2": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 8},
    "qwen3_moe": {
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    },
    "deepseek_v3": MLA,
    "deepseek_v3-int4": MLA,
}
ROWS: list[dict[str, Any]] = [
    {"question": "What is the capital of France?", "answer": "Paris, the capital of France is. Hmm."},
    {
        "messages": [
            {"role": "user", "content": "Hello."},
            {"role": "assistant", "content": "Greet you, I do. Hmm."},
        ]
    },
    {
        "instruction": "Name the young of a frog.",
        "input": "",
        "output": "A tadpole, the young of a frog is. Hmm.",
    },
    {"prompt": "What is the symbol of gold?", "completion": "Au, the symbol of gold is. Hmm."},
    {"question": "Which colour has the sky?", "answer": "Blue, the sky is. Hmm."},
    {"text": "Paris is the capital of France."},
]
QUIET = Common(quiet=True)


class Sandbox:
    """Files and models that a plant can break. The caller removes `root`."""

    def __init__(self, root: Path):
        self.root = root
        self._written: dict[str, Path] = {}
        self._count = 0

    def fresh(self, name: str) -> Path:
        """Return an unused path."""
        self._count += 1
        return self.root / f"{name}-{self._count}"

    def config(self, family: str) -> dict[str, Any]:
        """Contents of config.json of a sandbox model."""
        model_type, _, packed = family.partition("-")
        config = {"model_type": model_type, **BASE, **FAMILIES[family]}
        if packed:
            k2 = json.loads((TINY_K2 / "config.json").read_text(encoding="utf-8"))
            config["quantization_config"] = k2["quantization_config"]
        return config

    def checkpoint(self, family: str) -> Path:
        """Random checkpoint of a family, written once. Do not change it."""
        if family not in self._written:
            self._written[family] = self.write(self.config(family), self.root / family)
        return self._written[family]

    def write(
        self,
        config: dict[str, Any],
        folder: Path,
        max_shard_bytes: int = 10**9,
        change: Callable[[Decoder], Any] | None = None,
    ) -> Path:
        """Write a random checkpoint of any config, with tiny-k2's tokenizer.

        change: called with the model before it is written.
        """
        import torch

        from unfreeze import models
        from unfreeze.checkpoint import save_checkpoint
        from unfreeze.models.publish import published

        model = models.build(models.shape(config), dtype=torch.float32, device="cpu")
        models.initialize(model, seed=0)
        if change is not None:
            change(model)
        extra = {name: TINY_K2 / name for name in TOKENIZER_FILES}
        save_checkpoint(
            folder, config, published(model, config), extra=extra, max_shard_bytes=max_shard_bytes
        )
        return folder

    def copy(self, family: str) -> Path:
        """Copy of a checkpoint, to be broken."""
        target = self.fresh(family)
        shutil.copytree(self.checkpoint(family), target)
        return target

    def sharded(self, family: str) -> Path:
        """New checkpoint in several shards with an index."""
        return self.write(self.config(family), self.fresh(family), max_shard_bytes=60_000)

    def open(self, folder: Path, dtype: str = "float32") -> Decoder:
        """Open the model of a checkpoint folder; its weights are trainable."""
        from unfreeze.checkpoint import open_checkpoint
        from unfreeze.generate.open import dtype_of, open_model

        return open_model(open_checkpoint(folder), dtype_of(dtype))

    def model(self, family: str, dtype: str = "float32") -> Decoder:
        """New copy of a sandbox model in memory."""
        return self.open(self.checkpoint(family), dtype)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of tiny-k2."""
        from unfreeze.data import load_tokenizer

        return load_tokenizer(TINY_K2)

    def rows(self, rows: Sequence[dict[str, Any] | str | bytes] = ROWS) -> Path:
        """Write a data file; a text or bytes becomes a line verbatim."""
        path = self.fresh("data").with_suffix(".jsonl")
        lines = [
            row if isinstance(row, bytes) else (row if isinstance(row, str) else json.dumps(row)).encode()
            for row in rows
        ]
        path.write_bytes(b"".join(line + b"\n" for line in lines))
        return path

    def batch(self, lengths: Sequence[int], supervised: Sequence[int] | None = None, seed: int = 0) -> Batch:
        """Pack random documents; the last `supervised` targets of each carry loss (default: all)."""
        from unfreeze.data import pack

        return pack(self.examples(lengths, supervised, seed))

    def examples(
        self, lengths: Sequence[int], supervised: Sequence[int] | None = None, seed: int = 0
    ) -> list[Any]:
        """Documents of `batch`, before packing."""
        import random

        from unfreeze.data import Example

        draw = random.Random(seed)
        counts = supervised if supervised is not None else [length - 1 for length in lengths]
        return [
            Example(
                [draw.randrange(256) for _ in range(length)], [0.0] * (length - count) + [1.0] * count, row
            )
            for row, (length, count) in enumerate(zip(lengths, counts, strict=True), start=1)
        ]

    def loop(self, model: Decoder, batches: Sequence[list[Batch]], steps: int, **options: Any) -> list[Event]:
        """Run the real loop, `train.fit`, cycling over steps of micro-batches. -> its events.

        options: out (run folder), after_update, and arguments of fit (on_step, saves, …).
        """
        from itertools import cycle

        from unfreeze import models
        from unfreeze.objectives.cross_entropy import cross_entropy
        from unfreeze.train.fit import fit
        from unfreeze.train.optim import AdamW
        from unfreeze.train.run import Run
        from unfreeze.train.schedule import Schedule
        from unfreeze.train.state import start_or_resume

        events: list[Event] = []
        with Run(options.pop("out", None) or self.fresh("loop"), {}, listeners=(events.append,)) as run:
            state = start_or_resume(
                run,
                model,
                optimizer=options.pop("optimizer", None) or AdamW(model),
                schedule=Schedule(1e-3, steps),
                after_update=options.pop("after_update", ()),
            )
            endless = ((step, {"position": 0}) for step in cycle(batches))
            fit(state, endless, cross_entropy, **{"recompute": models.keep_inputs, **options})
        return events

    def sft(self, **fields: Any) -> dict[str, Any]:
        """Run a real `unfreeze sft` in this process. -> its result.

        Default: four steps of 128 tokens.
        """
        from unfreeze.recipes import sft

        return sft.train(self.sft_config(**fields), QUIET)

    def grpo(self, reward: str, out: Path, **fields: Any) -> dict[str, Any]:
        """Run a real `unfreeze grpo` of four steps with a function that returns `reward`. -> its result."""
        from unfreeze.adapters import LoraConfig
        from unfreeze.recipes import grpo

        file = self.fresh("reward").with_suffix(".py")
        file.write_text(f"def reward(prompt, completion):\n    return {reward}\n", encoding="utf-8")
        config: dict[str, Any] = {
            "model": str(self.checkpoint("llama")),
            "data": {"files": (str(self.rows([{"prompt": f"What is {n}?"} for n in range(8)])),)},
            "reward": str(file),
            "out": str(out),
            "training": {"steps": 4},
            "rollout": {"prompts_per_step": 4, "answers": 4, "max_new_tokens": 8, "cut": "score"},
            "memory": {"dtype": "float32", "device": "cpu", "threads": 1},
            "watch": {"samples": 0},
            "lora": LoraConfig(rank=2, alpha=4.0),
            **fields,
        }
        config["rollout"] |= {"resample": 0}
        config["grading"] = {"processes": 1, **fields.get("grading", {})}
        return grpo.train(grpo.Config.model_validate(config), QUIET)

    def sft_config(self, **fields: Any) -> Any:
        """Config for `sft`."""
        from unfreeze.adapters import LoraConfig
        from unfreeze.recipes import sft

        model = fields.pop("model", None) or self.checkpoint("llama")
        data = fields.pop("data", None) or self.rows()
        out = fields.pop("out", None) or self.fresh("run")
        defaults = {
            "steps": 4,
            "tokens_per_step": 128,
            "samples": 0,
            "dtype": "float32",
            "device": "cpu",
            "threads": 1,
            "warmup": 0.0,
            "learning_rate": 5e-3,
            "lora": LoraConfig(rank=2, alpha=4.0),
        }
        named = {"model": str(model), "data": (str(data),), "out": str(out)}
        return sft.Config.model_validate({**named, **defaults, **fields})
