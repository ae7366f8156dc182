"""The first value of one parameter is that of a whole new model: the same constants, the same spread."""

import pytest
import torch
from family_case import SMALL
from family_cases import CASES, NO_IDS

from unfreeze import models
from unfreeze.core.errors import CheckpointError
from unfreeze.models.init import first_value

NAMES = ("llama", "gemma3-window", "qwen3-next", "deepseek-v3", "qwen3-moe")


def made(name: str, device: str) -> models.Decoder:
    shape = models.shape(CASES[name].made({**SMALL, **NO_IDS}).to_dict())
    return models.build(shape, dtype=torch.float32, device=device)


@pytest.mark.parametrize("name", [name for name in NAMES if name in CASES])
def test_each_parameter_begins_as_in_a_new_model(name):
    whole, empty = made(name, "cpu"), made(name, "meta")
    models.initialize(whole, 0)
    compared = 0
    for param, wanted in whole.named_parameters():
        value = first_value(empty, param, torch.Generator().manual_seed(1))
        assert value.shape == wanted.shape
        assert value.dtype == torch.float32
        if float(wanted.detach().float().std(correction=0)) == 0:
            assert torch.equal(value, wanted.detach()), param
        elif wanted.numel() >= 500:
            ratio = float(value.std()) / float(wanted.detach().std())
            assert 0.85 < ratio < 1.18, (param, ratio)
            compared += 1
    assert compared >= 10


def test_a_table_and_codes_have_no_first_value():
    empty = made("llama", "meta")
    empty.model.register_buffer("codes", torch.zeros(2, dtype=torch.int32))
    with pytest.raises(CheckpointError, match=r"model.codes is a table or a packed weight"):
        first_value(empty, "model.codes", torch.Generator())
