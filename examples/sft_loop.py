"""Supervised fine-tuning as one flat script: all of training, to read from top to bottom and to fork.

    python examples/sft_loop.py              # the built-in tiny-k2 learns to answer like Yoda
    python examples/sft_loop.py --model org/name --data chat.jsonl --steps 500 --dtype bfloat16

With the same settings its losses are those of `unfreeze sft`, in float32 to the bit (tests/examples).
Left out are the command's other parts: memory plan, saves, resuming, guards, receipt, validation, report.

T tokens of a step, all documents end to end; N of them supervised; D model width; V vocabulary; R rank.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import tyro

import unfreeze
from unfreeze import models
from unfreeze.adapters import LoraConfig, attach, save_adapter, verify_adapter
from unfreeze.checkpoint import open_checkpoint
from unfreeze.data import Batches, check_vocab, encode_files, load_tokenizer
from unfreeze.generate.open import dtype_of, open_model
from unfreeze.objectives.cross_entropy import cross_entropy
from unfreeze.train.optim import AdamW
from unfreeze.train.schedule import Schedule

TINY_K2 = Path(unfreeze.__file__).parent / "assets" / "tiny-k2"


@dataclass(frozen=True)
class Config:
    model: str = str(TINY_K2)  # checkpoint folder, or Hugging Face id
    data: str = str(TINY_K2 / "yoda_train.jsonl")  # JSON Lines: messages, question/answer, …
    out: str = "runs/sft_loop"  # folder of metrics.jsonl and adapter/
    steps: int = 120
    tokens_per_step: int = 1024
    rank: int = 16
    alpha: float = 32.0
    learning_rate: float = 1e-3
    clip: float = 1.0  # limit of the gradient norm; 0: none
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the computation; packed weights stay packed
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    seed: int = 0  # of the adapters' A and of the data order


def main(config: Config) -> None:
    # Checkpoint: config.json, and the names, dtypes and shapes of all tensors. No weight is read yet, so
    # what does not fit together is refused within a second.
    manifest = open_checkpoint(config.model, progress=print)
    shape = models.shape(manifest.config)
    tokenizer = load_tokenizer(manifest.path)
    check_vocab(tokenizer, shape.vocab_size)

    # Data: row -> messages -> chat template -> token ids, each with a weight: 1 in the assistant's turns,
    # else 0. A document longer than a step loses its tail. Batches puts whole documents end to end, at most
    # T = tokens_per_step together and without padding. Their order is a function of (seed, epoch). It also
    # shifts: targets_T[t] = tokens_T[t + 1] within a document, and the weights likewise.
    dataset = encode_files([config.data], tokenizer, min(shape.max_positions, config.tokens_per_step))
    batches = Batches(dataset.examples, config.tokens_per_step, config.seed)
    print(f"data: {dataset.stats.summary()}")

    # Model: weights are streamed from file to place. INT4 experts stay INT4, the rest is in `dtype`.
    decoder = open_model(manifest, dtype_of(config.dtype), config.device, warn=print)

    # Adapters: y = W x + (alpha / R) B A x at every linear layer and every routed expert. A [R, in] is
    # random, B [out, R] is 0, so the model's output is unchanged at first. W is frozen.
    sites = attach(decoder, LoraConfig(rank=config.rank, alpha=config.alpha), config.seed)
    trained = sum(p.numel() for p in decoder.parameters() if p.requires_grad)
    print(f"model: {shape.model_type}, adapters at {len(sites)} places, {trained:,} trained parameters")

    # Optimizer: AdamW over what requires a gradient. Schedule: 3 % of the steps linear warm-up, then cosine.
    optimizer = AdamW(decoder, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = Schedule(config.learning_rate, config.steps, "cosine", warmup_steps=round(0.03 * config.steps))

    folder = Path(config.out)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "metrics.jsonl", "w", encoding="utf-8") as metrics:
        for step in range(config.steps):
            started = time.perf_counter()

            # The next T tokens. N is counted on the host, so that nothing waits for a GPU here.
            (host_batch,), _ = next(batches)
            count = max(float(host_batch.weights_T.sum()), 1.0)
            batch = host_batch.to(decoder.device)

            # Forward. hidden_TD [T, D]; a document sees only itself. The loss is a sum over N positions,
            # sum_t logsumexp(z_t) - z_t[target_t], z_t = lm_head(hidden_t) [V]; never all [N, V] at once.
            hidden_TD = decoder.hidden(batch)
            loss = cross_entropy(hidden_TD, decoder.lm_head, batch)

            # Backward, of the mean over N. To accumulate over several batches, add up their counts first,
            # then call backward on each loss.sum / count: means of batches would weigh tokens unequally.
            optimizer.zero_grad()
            (loss.sum / count).backward()
            optimizer.collect()  # gradients of bfloat16 weights go to float32; adapters have that already

            # Update. g is scaled to norm <= clip; then w -= lr m / (sqrt(v) + eps), m and v running means
            # of g and g², divided by 1 - beta^t. A norm that is not finite raises before a weight moves.
            rate = schedule.learning_rate(step)
            update = optimizer.update(rate, config.clip)

            # Metrics: nats per supervised token; share of these tokens that were the model's first choice.
            fields = {
                "step": step + 1,
                "loss": float(loss.sum.detach()) / count,
                "correct": float(loss.metrics["correct"]) / count,
                "grad_norm": update.grad_norm,
                "learning_rate": rate,
                "tokens": batch.num_tokens,
                "seconds": time.perf_counter() - started,
            }
            metrics.write(json.dumps(fields) + "\n")
            speed = f"{batch.num_tokens / fields['seconds']:,.0f} tokens/s"
            print(f"step {step + 1}/{config.steps}  loss {fields['loss']:.4f}  {speed}", flush=True)

    # Adapter: A and B in float32 with the name of the base, read again and compared with what is in memory.
    base = str(Path(config.model).resolve()) if Path(config.model).is_dir() else config.model
    save_adapter(decoder, folder / "adapter", base_name=base, prefix=manifest.prefix)
    verify_adapter(decoder, folder / "adapter")
    print(f"next: unfreeze chat {folder / 'adapter'}    unfreeze export {folder / 'adapter'} --for vllm")


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
