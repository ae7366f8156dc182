"""Published weights in our modules, trained by a plain torch loop under DistributedDataParallel.

    torchrun --nproc-per-node 2 examples/torch_ddp.py --model Qwen/Qwen2.5-0.5B --data chat.jsonl

The smallest loop of one's own over the modules: torch's optimizer, torch's DDP. Each process holds the whole
model in float32. With the same settings its losses are those of `unfreeze sft --train all`, within 1e-5
(tests/examples/test_trainers.py). deepspeed_zero3.py and lightning_module.py are the same with a library.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from unfreeze import models
from unfreeze.checkpoint import open_checkpoint, save_checkpoint
from unfreeze.data import Batches, check_vocab, encode_files, load_tokenizer
from unfreeze.generate.open import open_model
from unfreeze.models.publish import published
from unfreeze.objectives.cross_entropy import cross_entropy


@dataclass(frozen=True)
class Config:
    model: str  # checkpoint folder, or Hugging Face id
    data: str  # JSON Lines: messages, question/answer, …
    out: str = "runs/torch_ddp"  # folder of model/, the trained checkpoint
    steps: int = 100
    tokens_per_step: int = 4096
    micro_batches: int = 2  # of all processes together; a multiple of their number
    learning_rate: float = 2e-5
    clip: float = 1.0
    seed: int = 0


class SumOfLosses(nn.Module):
    """batch -> sum of the losses of its supervised tokens; DDP's backward starts here."""

    def __init__(self, decoder: models.Decoder):
        super().__init__()
        self.decoder = decoder

    def forward(self, batch):
        return cross_entropy(self.decoder.hidden(batch), self.decoder.lm_head, batch).sum


def main(config: Config) -> None:
    distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, size = distributed.get_rank(), distributed.get_world_size()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)

    # Model, before DDP looks at it: streamed from the files. Each tensor has one place, nothing is left over.
    manifest = open_checkpoint(config.model, progress=print)
    decoder = open_model(manifest, torch.float32, device)
    model = DistributedDataParallel(SumOfLosses(decoder))
    optimizer = torch.optim.AdamW(model.parameters(), config.learning_rate, (0.9, 0.95), weight_decay=0.0)

    # Data: whole documents end to end, no padding. Every process draws the same micro-batches.
    tokenizer, tokens = load_tokenizer(manifest.path), config.tokens_per_step // config.micro_batches
    check_vocab(tokenizer, decoder.shape.vocab_size)
    batches = Batches(
        encode_files([config.data], tokenizer, tokens).examples,
        tokens,
        config.seed,
        micro_batches=config.micro_batches,
    )

    for step in range(config.steps):
        drawn, _ = next(batches)
        # One count N for all micro-batches of all processes; known to each, so nothing is exchanged for it.
        # A mean per micro-batch would weigh a token of a short one more than one of a long one.
        count = max(sum(float(batch.weights_T.sum()) for batch in drawn), 1.0)
        own, total = drawn[rank::size], torch.zeros((), device=device)
        for index, batch in enumerate(own):
            # gradients are exchanged once, with the last micro-batch; DDP takes their mean over processes, so
            # `size` makes a sum of it again
            with nullcontext() if index == len(own) - 1 else model.no_sync():
                loss = model(batch.to(device)) / count
                (loss * size).backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        optimizer.step()
        optimizer.zero_grad()
        distributed.all_reduce(total)
        if rank == 0:
            print(f"step {step + 1}/{config.steps}  loss {float(total):.7f}", flush=True)

    if rank == 0:
        save_checkpoint(Path(config.out) / "model", manifest.config, published(decoder, manifest.config))
    # or DDP would end the group while it holds Python's lock, for which the group's own thread may wait
    del model
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
