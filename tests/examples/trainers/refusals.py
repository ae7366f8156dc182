"""Run beside Lightning: what it says to its FSDP and DeepSpeed strategies on a CPU. Prints one JSON object."""

import json

import lightning
import torch
from lightning.pytorch import strategies

QUIET = {"logger": False, "enable_checkpointing": False}  # nothing is written


class One(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)

    def training_step(self, x, index):
        return self.layer(x).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def says(strategy):
    try:
        trainer = lightning.Trainer(accelerator="cpu", devices=1, strategy=strategy, max_steps=1, **QUIET)
        trainer.fit(One(), torch.utils.data.DataLoader(torch.zeros(2, 2)))
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


named = {"fsdp": strategies.FSDPStrategy(), "deepspeed": strategies.DeepSpeedStrategy(), "ddp": "auto"}
said = {name: says(strategy) for name, strategy in named.items()}
print(json.dumps({"version": lightning.__version__, **said}))
