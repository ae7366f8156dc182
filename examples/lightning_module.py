"""Published weights in our modules as a LightningModule, for users of a Lightning Trainer.

    pip install lightning
    python examples/lightning_module.py --model Qwen/Qwen2.5-0.5B --data chat.jsonl
    torchrun --nproc-per-node 2 examples/lightning_module.py … --strategy ddp --processes 2

Under "ddp" each process reads the whole model and holds it; Lightning averages the gradients. With the same
settings its losses are those of `unfreeze sft --train all`, within 1e-5. On a CPU Lightning refuses its FSDP
and DeepSpeed strategies (its words: docs/howto/other_trainers.md); deepspeed_zero3.py does without
Lightning.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import lightning
import torch
import tyro

from unfreeze.checkpoint import open_checkpoint, save_checkpoint
from unfreeze.core.batch import Batch
from unfreeze.data import Batches, check_vocab, encode_files, load_tokenizer
from unfreeze.generate.open import open_model
from unfreeze.models.publish import published
from unfreeze.objectives.cross_entropy import cross_entropy


@dataclass(frozen=True)
class Config:
    model: str  # checkpoint folder, or Hugging Face id
    data: str  # JSON Lines: messages, question/answer, …
    out: str = "runs/lightning"  # folder of model/, the trained checkpoint
    strategy: Literal["auto", "ddp"] = "auto"
    processes: int = 1  # as torchrun's --nproc-per-node; "auto" has one
    steps: int = 100
    tokens_per_step: int = 4096
    micro_batches: int = 2  # of all processes together; a multiple of their number
    learning_rate: float = 2e-5
    clip: float = 1.0
    seed: int = 0


class FineTuning(lightning.LightningModule):
    """Every weight of a checkpoint, trained in float32."""

    def __init__(self, config: Config):
        super().__init__()
        self.config, self.manifest = config, open_checkpoint(config.model)
        # Here, so that the weights are there before a strategy wraps the module: Lightning moves it to its
        # device later. Streamed from the files; each tensor has one place, and nothing is left over.
        self.decoder = open_model(self.manifest)
        self.total = 0.0

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), self.config.learning_rate, (0.9, 0.95), weight_decay=0.0)

    def train_dataloader(self) -> Iterator[tuple[Batch, float]]:
        """This process's micro-batches of each step, with the supervised tokens N of all processes' ones."""
        config, rank, size = self.config, self.trainer.global_rank, self.trainer.world_size
        tokenizer, tokens = load_tokenizer(self.manifest.path), config.tokens_per_step // config.micro_batches
        check_vocab(tokenizer, self.decoder.shape.vocab_size)
        examples = encode_files([config.data], tokenizer, tokens).examples
        batches = Batches(
            examples, tokens, config.seed, micro_batches=config.micro_batches
        )  # the same order in every process

        def of_this_process() -> Iterator[tuple[Batch, float]]:
            while True:
                drawn, _ = next(batches)
                count = max(sum(float(batch.weights_T.sum()) for batch in drawn), 1.0)
                yield from ((batch, count) for batch in drawn[rank::size])

        return of_this_process()

    def training_step(self, drawn: tuple[Batch, float], index: int) -> torch.Tensor:
        # Lightning divides by accumulate_grad_batches, and DDP takes the mean over processes. Together they
        # divide by micro_batches; with N / micro_batches as the divisor that is the sum over N again. A mean
        # per micro-batch would weigh a token of a short one more than one of a long one.
        batch, count = drawn
        loss = cross_entropy(self.decoder.hidden(batch), self.decoder.lm_head, batch).sum
        self.total += loss.detach() / count
        return loss * (self.config.micro_batches / count)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Once per step, after its last micro-batch."""
        loss, self.total = self.trainer.strategy.reduce(self.total, reduce_op="sum"), 0.0
        if self.trainer.is_global_zero:
            print(f"step {self.global_step + 1}/{self.config.steps}  loss {float(loss):.7f}", flush=True)


def main(config: Config) -> None:
    module = FineTuning(config)
    trainer = lightning.Trainer(
        strategy=config.strategy,
        devices=config.processes,
        precision="32-true",
        max_steps=config.steps,
        accumulate_grad_batches=config.micro_batches // config.processes,
        gradient_clip_val=config.clip,
        use_distributed_sampler=False,  # each process draws its own part already
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(module)
    if trainer.is_global_zero:
        weights = published(module.decoder, module.manifest.config)
        save_checkpoint(Path(config.out) / "model", module.manifest.config, weights)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
