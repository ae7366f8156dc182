"""Started by torchrun beside DeepSpeed: are the weights complete, both ways that examples/deepspeed_zero3.py loads?

    torchrun whole_weights.py SCRIPT CHECKPOINT

Prints one JSON object: for each way the parameters that are not the file's, bit for bit, once made whole again;
what is in memory outside of a forward; and what our own loader says to a model that is cut already.
"""

import importlib.util
import json
import sys

import deepspeed
import torch
from safetensors.torch import load_file
from torch import distributed

from unfreeze import models
from unfreeze.checkpoint import open_checkpoint
from unfreeze.core.errors import CheckpointError
from unfreeze.generate.open import open_model
from unfreeze.parallel.placement.place import place


def script(path):
    spec = importlib.util.spec_from_file_location("script", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["script"] = module
    spec.loader.exec_module(module)
    return module


def different(decoder, file):
    """The parameters whose whole is not the file's tensor."""
    found = []
    for name, parameter in decoder.named_parameters():
        with deepspeed.zero.GatheredParameters(parameter):
            if parameter.dtype != file[name].dtype or not torch.equal(parameter.detach(), file[name]):
                found.append(name)
    return found


def main():
    example, folder = script(sys.argv[1]), sys.argv[2]
    deepspeed.init_distributed()
    manifest, file = open_checkpoint(folder), load_file(f"{folder}/model.safetensors")
    before = open_model(manifest)
    model = example.SumOfLosses(before)
    optimizer = torch.optim.AdamW(model.parameters())
    deepspeed.initialize(model=model, optimizer=optimizer, config=example.ZERO3)
    # memory that nobody has written holds NaN from here on, not the weights of the model before
    torch.use_deterministic_algorithms(True, warn_only=True)
    gathered = example.gathered(manifest, "cpu")
    sizes = {tuple(parameter.shape) for way in (before, gathered) for parameter in way.parameters()}
    try:
        place(gathered, manifest, models.rules(gathered.shape), device="cpu")
        refused = ""
    except CheckpointError as error:
        refused = str(error)
    said = {
        "parameters": len(file),
        "before": different(before, file),
        "gathered": different(gathered, file),
        "sizes outside of a forward": sorted(sizes),
        "place on a cut model": refused,
    }
    if distributed.get_rank() == 0:
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
