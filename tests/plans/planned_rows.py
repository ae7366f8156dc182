"""The rows of tests/plans.json: a model or a run, and the machine that it is planned for.

Made anew by `pytest tests/plans --update-plans`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from unfreeze import models
from unfreeze.checkpoint import save_checkpoint
from unfreeze.commands.demo import TINY_K2
from unfreeze.config.sft import Config
from unfreeze.models.publish import published
from unfreeze.parallel.machine import Hardware

CONFIGS = Path(__file__).with_name("configs.json")

PLANNED = [
    ("Kimi-K2-Thinking", "8xH200", "--lora.rank 16"),
    ("Kimi-K2-Thinking", "1xH200+768GB", "--lora.rank 8"),
    ("Kimi-K2-Thinking", "8xH100", "--lora.rank 8"),
    ("Kimi-K2-Thinking", "8xH100+1TB", "--lora.rank 8"),
    ("Kimi-K2-Thinking", "16xH100", "--lora.rank 16"),
    ("Kimi-K2-Thinking", "1xRTX5090+768GB", "--lora.rank 8"),
    ("Kimi-K2-Thinking", "cpu:768GB", "--lora.rank 4 --dtype bfloat16"),
    ("Qwen3-30B-A3B", "1xRTX4090+128GB", "--lora.rank 8"),
    ("Qwen3-30B-A3B", "1xL40S+128GB", "--lora.rank 16"),
    ("Qwen3-30B-A3B", "1xH100", ""),
    ("Qwen3-30B-A3B", "1xRTX4090", ""),
    ("Qwen3-30B-A3B", "8xH100", "--tokens-per-step 65536 --micro-batches 16"),
    ("Qwen3-30B-A3B", "8xH200+1TB", "--train all"),
    ("Qwen3-30B-A3B", "8xH200+1TB", "--place.experts host"),
    ("Qwen3-30B-A3B", "8xH200+1TB", "--place.experts disk --place.split 4"),
    ("Qwen3-30B-A3B", "8xH200+1TB", "--place.rest peers --place.split 1"),
    ("Qwen3-30B-A3B", "8xH200+1TB", "--place.boundary host --place.recompute layers"),
    ("Qwen3-30B-A3B", "8xH200+1TB", "--place.optimizer host"),
    ("Qwen3-30B-A3B", "cpu:24GB", "--dtype float32"),
    ("Qwen3-30B-A3B", "cpu:96GB", "--dtype bfloat16 --tokens-per-step 2048"),
    ("Qwen3-8B", "1xRTX4090", ""),
    ("Qwen3-8B", "1xRTX4090+128GB", "--sequence-length 32768"),
    ("Qwen3-8B", "8xH100", "--train all --tokens-per-step 16384"),
    ("Qwen3-8B", "cpu:64GB", "--place.recompute selective --place.keep-layers 4 --tokens-per-step 4096"),
    ("gpt-oss-20b", "1xRTX4090+64GB", ""),
    ("gpt-oss-20b", "2xH100", "--optimizer.moments int8"),
    ("DeepSeek-V3", "16xH200", "--lora.rank 8"),
    ("DeepSeek-V3", "8xH200+2TB", "--lora.rank 8 --lora.experts-rank 2"),
]
"""Model, --hardware, other flags of `unfreeze plan`."""

MB = 2**20
RUNS = [
    ("tiny-k2", "cpu", 2**30, 0, 1, {}),
    ("tiny-k2", "cpu", 2**30, 0, 1, {"place.experts": "disk", "place.buffer": 1e-4}),
    ("tiny-k2", "cpu", 31 * MB, 0, 1, {"recompute": "layers"}),
    ("tiny-k2", "cpu", 25 * MB, 0, 4, {"recompute": "layers", "micro_batches": 4}),
    ("tiny-k2", "cpu", 2**30, 0, 2, {"place.split": 2, "micro_batches": 2}),
    ("tiny-k2", "cpu", 2**30, 0, 2, {"place.rest": "peers", "micro_batches": 4}),
    ("tiny-k2", "cuda", 2**30, 2**30, 1, {"optimizer_moments": "int8"}),
    ("tiny-k2", "cuda", 2**30, 2**30, 1, {"place.boundary": "host", "recompute": "selective"}),
    ("tiny-k2", "cuda", 2**30, 2**30, 1, {"place.optimizer": "host", "place.experts": "host"}),
    ("tiny-k2", "cuda", 14 * MB, 2**30, 1, {"recompute": "layers"}),
    ("tiny-k2", "cuda", 14 * MB, 2**30, 4, {"micro_batches": 4}),
    ("dense", "cpu", 2**30, 0, 1, {"train": "all"}),
    ("dense", "cpu", 2**30, 0, 2, {"train": "all", "place.weights": "sharded", "micro_batches": 2}),
    ("dense", "cuda", 60 * MB, 2**30, 4, {"train": "all", "micro_batches": 4}),
]
"""Model, kind of device, its free bytes, those of host memory, processes, fields of `unfreeze sft`."""

DENSE = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


def dense(folder: Path) -> Path:
    """A checkpoint without experts."""
    model = models.build(models.shape(DENSE), dtype=torch.bfloat16, device="cpu")
    models.initialize(model, seed=0)
    save_checkpoint(folder / "dense", DENSE, published(model, DENSE))
    return folder / "dense"


def planned(folder: Path) -> Iterator[dict[str, Any]]:
    """Each of PLANNED: how it is asked for, where what lies, and the bytes."""
    from unfreeze.commands.opened import open_for_plan
    from unfreeze.commands.plan import configured, plan_on
    from unfreeze.parallel.plan.fleet import fleet

    for name, text in json.loads(CONFIGS.read_text(encoding="utf-8")).items():
        (folder / f"{name}.json").write_text(json.dumps(text), encoding="utf-8")

    @cache
    def opened(name: str) -> Any:
        return open_for_plan(configured(["--model", str(folder / f"{name}.json")])[0])

    for name, machine, flags in PLANNED:
        config, _ = configured(["--model", str(folder / f"{name}.json"), *flags.split()])
        with (
            pytest.MonkeyPatch.context() as patch
        ):  # what would fit instead is said elsewhere, and takes long
            patch.setattr("unfreeze.commands.plan._instead", lambda *given: ([], ""))
            found = plan_on(config, fleet(machine), opened(name)).fields()
        sizes = found["bytes"]
        yield {
            "asked": " ".join(filter(None, (name, machine, flags))),
            "fits": found["fits"],
            "place": _placed(found),
            "not_built": len(found["not_built"]),
            "tokens": found["tokens_per_step"],
            "adapter_parameters": found["adapter_parameters"],
            **{part: sizes[part] for part in ("device_terms", "host_terms", "disk", "experts_per_device")},
        }


def _placed(found: dict[str, Any]) -> dict[str, Any]:
    """Where what lies, in the words of the record."""
    place = found["place"]
    return {
        "experts": place["experts"],
        "groups": bool(place["buffer"]),
        "split": place["split"],
        "rest": place["rest"],
        "moments": place["optimizer"],
        "adapters": place["adapters"],
        "boundary": place["boundary"],
        "recompute": place["recompute"],
    }


def runs(folder: Path) -> Iterator[dict[str, Any]]:
    """Each of RUNS, as a run of it would be planned on that machine."""
    from unfreeze.checkpoint import open_checkpoint
    from unfreeze.job.planning.plan import Planning
    from unfreeze.recipes.sft import parts

    folders = {"tiny-k2": Path(TINY_K2), "dense": dense(folder)}
    for name, kind, memory, host, processes, fields in RUNS:
        given = {"model": str(folders[name]), "data": ["d.jsonl"], "tokens_per_step": 512, **fields}
        given |= {"dtype": "bfloat16"}
        config = Config.model_validate(given)
        start = open_checkpoint(str(folders[name]))
        machine = Hardware(kind, kind, 2, memory, memory, host=host)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("unfreeze.parallel.machine.hardware", lambda device, machine=machine: machine)
            patch.setattr("unfreeze.job.planning.plan.computed_here", lambda config, device: config)
            shape, device = models.shape(start.config), torch.device(kind)
            trained = parts(config).trained
            planning = Planning(config, trained, start, shape, device, processes=processes)
            _, found = planning.first()
        asked = [
            name,
            kind,
            f"{memory // MB} MB",
            f"{processes} processes",
            *(f"{k}={v}" for k, v in fields.items()),
        ]
        yield {
            "asked": " ".join(asked),
            "fits": found.fits,
            "place": _of_run(found),
            "terms": {term: size for term, size in found.terms.items() if size},
            "load": found.load,
            "host": found.host,
            "adapter_parameters": found.adapter_parameters,
        }


def _of_run(found: Any) -> dict[str, Any]:
    layout = found.layout
    return {
        "experts": layout.experts,
        "buffer": layout.buffer_bytes,
        "split": layout.split,
        "weights": layout.weights,
        "rest": layout.rest,
        "moments": layout.optimizer,
        "boundary": layout.boundary,
        "recompute": layout.recompute,
    }


def rows(folder: Path) -> list[dict[str, Any]]:
    """All rows, alike on every machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)  # scratch of attention is counted by thread
    try:
        return [*planned(folder), *runs(folder)]
    finally:
        torch.set_num_threads(threads)
