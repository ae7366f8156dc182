"""Published weights in our modules, trained by DeepSpeed's ZeRO-3, for users of a DeepSpeed loop.

    pip install deepspeed
    torchrun --nproc-per-node 2 examples/deepspeed_zero3.py --model Qwen/Qwen2.5-0.5B --data chat.jsonl

ZeRO-3 shards every parameter into flat pieces, one per process. Outside of a forward pass its .data has
torch.Size([0]), so code that fills it then fills nothing. Two ways are right
(tests/examples/test_trainers.py compares both with the files, bit for bit):
    --load before     each process reads the whole model, then deepspeed.initialize shards it: simple
    --load gathered   shard the model while it is built, then gather one parameter after another, which
                      process 0 reads: for a model that is larger than a process's memory
With the same settings its losses are those of `unfreeze sft --train all`, within 1e-5.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import deepspeed
import torch
import tyro
from torch import distributed, nn

from unfreeze import models
from unfreeze.checkpoint import Manifest, open_checkpoint, save_checkpoint
from unfreeze.checkpoint.resolve import resolve
from unfreeze.checkpoint.stream import stream
from unfreeze.data import Batches, check_vocab, encode_files, load_tokenizer
from unfreeze.generate.open import open_model
from unfreeze.models.publish import published
from unfreeze.objectives.cross_entropy import cross_entropy

ZERO3 = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},  # 0: cut small ones too
    "zero_allow_untested_optimizer": True,  # torch's AdamW; DeepSpeed's own for a CPU needs a compiler
}


@dataclass(frozen=True)
class Config:
    model: str  # checkpoint folder, or Hugging Face id
    data: str  # JSON Lines: messages, question/answer, …
    out: str = "runs/deepspeed_zero3"  # folder of model/, the trained checkpoint
    load: Literal["before", "gathered"] = "before"
    steps: int = 100
    tokens_per_step: int = 4096
    micro_batches: int = 2  # of all processes together; a multiple of their number
    learning_rate: float = 2e-5
    clip: float = 1.0
    seed: int = 0


class SumOfLosses(nn.Module):
    """batch -> sum of the losses of its supervised tokens. DeepSpeed gathers the forward's parameters."""

    def __init__(self, decoder: models.Decoder):
        super().__init__()
        self.decoder = decoder
        # the loss needs lm_head after lm_head's own forward: keep it whole until this module's is over
        deepspeed.zero.register_external_parameter(self, decoder.lm_head.weight)

    def forward(self, batch):
        return cross_entropy(self.decoder.hidden(batch), self.decoder.lm_head, batch).sum


def gathered(manifest: Manifest, device: str) -> models.Decoder:
    """A model that is sharded while it is built, and filled under GatheredParameters."""
    shape = models.shape(manifest.config)
    # The dtype is the config's: float32 without "bf16" or "fp16" in it. Init(dtype=torch.float32) gives
    # bfloat16 where there is no fp16, as on a CPU (DeepSpeed 0.19.8).
    with deepspeed.zero.Init(config_dict_or_path=ZERO3):
        decoder = models.build(shape, dtype=torch.float32, device=device)
    # ds_shape is the whole shape. resolve: each tensor of the files has one place, and nothing is left over
    whole = {name: (p.dtype, tuple(p.ds_shape)) for name, p in decoder.named_parameters()}
    beside = {"ignore": models.ignored(shape), "tied": models.tied(shape)}
    placements = resolve(manifest, models.rules(shape), whole, **beside)
    for name, parameter in decoder.named_parameters():
        with deepspeed.zero.GatheredParameters(parameter, modifier_rank=0):  # leaving it: process 0's is cut
            if distributed.get_rank() == 0:
                stream([place for place in placements if place.param == name], {name: parameter.data})
    return decoder


def main(config: Config) -> None:
    deepspeed.init_distributed()  # nccl, and gloo on a CPU
    rank, size = distributed.get_rank(), distributed.get_world_size()
    device = f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu"

    manifest = open_checkpoint(config.model, progress=print)
    decoder = (gathered if config.load == "gathered" else open_model)(manifest, device=device)
    model = SumOfLosses(decoder)
    optimizer = torch.optim.AdamW(model.parameters(), config.learning_rate, (0.9, 0.95), weight_decay=0.0)
    parts = config.micro_batches // size  # of this process
    settings = ZERO3 | {"gradient_accumulation_steps": parts, "gradient_clipping": config.clip}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    head = decoder.lm_head.weight
    print(f"process {rank}: lm_head is {head.shape} here, {head.ds_shape} in all", flush=True)

    # Data: whole documents end to end, no padding. Every process draws the same micro-batches.
    tokenizer, tokens = load_tokenizer(manifest.path), config.tokens_per_step // config.micro_batches
    check_vocab(tokenizer, decoder.shape.vocab_size)
    examples = encode_files([config.data], tokenizer, tokens).examples
    batches = Batches(examples, tokens, config.seed, micro_batches=config.micro_batches)
    for step in range(config.steps):
        drawn, _ = next(batches)
        # One count N for all micro-batches of all processes; known to each, so nothing is exchanged for it.
        # A mean per micro-batch would weigh a token of a short one more than one of a long one.
        count = max(sum(float(batch.weights_T.sum()) for batch in drawn), 1.0)
        total = torch.zeros((), device=device)
        for batch in drawn[rank::size]:
            loss = engine(batch.to(device)) / count
            # DeepSpeed divides by `parts` and takes the mean over processes: times both is the sum over N
            engine.backward(loss * config.micro_batches)
            engine.step()  # updates after the last of them
            total += loss.detach()
        distributed.all_reduce(total)
        if rank == 0:
            print(f"step {step + 1}/{config.steps}  loss {float(total):.7f}", flush=True)

    # The weights as a checkpoint: made whole one after another, all processes together; process 0 writes.
    values = {}
    for name, parameter in decoder.named_parameters():
        with deepspeed.zero.GatheredParameters(parameter):
            values |= {name: parameter.detach().cpu().clone()} if rank == 0 else {}
    if rank == 0:
        weights = published(decoder, manifest.config, values=values)
        save_checkpoint(Path(config.out) / "model", manifest.config, weights)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
