"""log p of tokens against torch's log_softmax in float64: values, and gradients under weights of any sign."""

from __future__ import annotations

import torch
from torch import nn

from unfreeze.core.batch import Batch
from unfreeze.objectives.log_p import log_probabilities, token_log_p, weighted_log_p

T, D, V = 96, 16, 211


def setting():
    torch.manual_seed(0)
    tokens, targets = torch.randint(0, V, (2, T))
    weights = (torch.rand(T) < 0.4) * (0.5 + torch.rand(T))
    batch = Batch(tokens, targets, weights, torch.arange(T), torch.tensor([0]))
    hidden = torch.randn(T, D, requires_grad=True)
    head = nn.Linear(D, V, bias=False)
    rows = batch.supervised()
    exact_hidden = hidden.detach().double().requires_grad_()
    logits = exact_hidden[rows] @ head.weight.detach().double().T
    log_p = logits.log_softmax(-1).gather(1, batch.targets_T[rows][:, None])[:, 0]
    return batch, hidden, head, rows, exact_hidden, log_p


def test_log_p_of_tokens_and_documents_is_float64_torchs():
    batch, hidden, head, rows, _, exact = setting()
    found = token_log_p(hidden, head, batch)
    assert found.dtype == torch.float64 and not found.requires_grad and len(rows) > 20
    torch.testing.assert_close(found, exact.detach(), rtol=1e-5, atol=1e-6)
    document = (exact.detach() * batch.weights_T[rows]).sum()
    torch.testing.assert_close(log_probabilities(hidden, head, batch)[0], document, rtol=1e-5, atol=1e-5)


def test_gradients_under_weights_of_both_signs_are_float64_torchs():
    batch, hidden, head, rows, exact_hidden, exact = setting()
    advantages = torch.randn(len(rows))
    assert advantages.min() < 0 < advantages.max()
    total, log_p = weighted_log_p(hidden, head, batch, advantages)
    (exact * advantages.double()).sum().backward()
    total.backward()
    assert not log_p.requires_grad and hidden.grad is not None and exact_hidden.grad is not None
    torch.testing.assert_close(log_p.double(), exact.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(hidden.grad.double(), exact_hidden.grad, rtol=1e-5, atol=1e-6)
    # control arm: without their sign the weights give another gradient
    other = torch.autograd.grad(weighted_log_p(hidden, head, batch, advantages.abs())[0], hidden)[0]
    assert not torch.allclose(other, hidden.grad, rtol=0.1)
