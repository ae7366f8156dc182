"""On a GPU every family computes what it computes on a CPU: logits and all gradients."""

import copy

import pytest
import torch
from family_cases import CASES, batch_of, oracle, ours

from unfreeze import models

LENGTHS = (130, 7, 200)
"""Of the documents: longer than a tile of any kernel, and shorter than one."""
FLOAT32 = 2e-4
"""Largest difference from the CPU, of the largest value."""
SLACK = 0.01
"""Added to twice the CPU's own rounding in bfloat16."""

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def results(model: models.Decoder, documents: list[list[int]], device: str) -> dict[str, torch.Tensor]:
    """Logits and the gradients of every parameter, on the CPU in float64."""
    model.requires_grad_(True)
    logits_TV = model.logits(model.hidden(batch_of(documents).to(device)))
    probe_V = torch.randn(model.shape.vocab_size, generator=torch.Generator().manual_seed(1)).to(device)
    ((logits_TV.float().log_softmax(-1) * probe_V).sum() / len(logits_TV)).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: value.detach().double().cpu() for name, value in {"logits": logits_TV, **gradients}.items()}


def moved(model: models.Decoder, dtype: torch.dtype, device: str) -> models.Decoder:
    """The same weights on that device."""
    other = models.build(copy.deepcopy(model.shape), dtype=dtype, device=device)
    other.load_state_dict(model.state_dict(), strict=True)
    return other


def documents_of(model: models.Decoder) -> list[list[int]]:
    chance = torch.Generator().manual_seed(2)
    return [
        torch.randint(1, model.shape.vocab_size, (length,), generator=chance).tolist() for length in LENGTHS
    ]


def apart(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> dict[str, float]:
    """Per tensor the largest difference, of the largest value of all gradients (or of the logits)."""
    assert actual.keys() == expected.keys()
    largest = max(float(value.abs().max()) for name, value in expected.items() if name != "logits")
    scale = {"logits": float(expected["logits"].abs().max())}
    return {
        name: float((actual[name] - value).abs().max()) / scale.get(name, largest)
        for name, value in expected.items()
    }


def spread(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Norm of the differences of all gradients, of the gradients' norm."""
    off = sum(float((actual[name] - value).square().sum()) for name, value in expected.items())
    return (off / sum(float(value.square().sum()) for value in expected.values())) ** 0.5


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("name", CASES)
def test_float32_on_a_gpu_equals_the_cpu(name):
    model = ours(oracle(name), CASES[name])
    documents = documents_of(model)
    expected = results(model, documents, "cpu")
    actual = results(moved(model, torch.float32, "cuda"), documents, "cuda")
    worst = {key: value for key, value in apart(actual, expected).items() if not value < FLOAT32}
    assert not worst, worst


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("name", CASES)
def test_bfloat16_on_a_gpu_rounds_no_more_than_the_cpu(name):
    model = ours(oracle(name), CASES[name])
    documents = documents_of(model)
    expected = results(model, documents, "cpu")
    on_cpu = spread(results(moved(model, torch.bfloat16, "cpu"), documents, "cpu"), expected)
    on_gpu = spread(results(moved(model, torch.bfloat16, "cuda"), documents, "cuda"), expected)
    assert on_gpu < 2 * on_cpu + SLACK, (on_gpu, on_cpu)
