"""The indexers' loss beside an objective: its gradient is the divergence's mean times the objective's count, and
the objective's own loss and gradient stay as they are. The divergence itself: tests/models/blocks/test_sparse.py."""

import torch

from unfreeze.core.batch import Batch
from unfreeze.core.taps import Tap
from unfreeze.objectives.cross_entropy import cross_entropy
from unfreeze.objectives.following import Following


def test_value_and_gradients_equal_a_sum_by_hand():
    torch.manual_seed(0)
    hidden_TD, head = torch.randn(12, 8, requires_grad=True), torch.nn.Linear(8, 31, bias=False)
    tokens_T, targets_T = torch.randint(0, 31, (2, 12))
    batch = Batch(tokens_T, targets_T, torch.rand(12), torch.arange(12), torch.tensor([0]))
    own = {Tap(layer, "divergence"): torch.rand(len(hidden_TD), requires_grad=True) for layer in (1, 3)}
    alone = cross_entropy(hidden_TD, head, batch)
    loss = Following(cross_entropy, [1, 3])(hidden_TD, head, batch, own)
    torch.testing.assert_close(loss.sum, alone.sum, rtol=0, atol=1e-6)  # what is reported is the objective's
    assert float(loss.count) == float(alone.count)
    (wanted,) = torch.autograd.grad(alone.sum, hidden_TD)
    found, *each = torch.autograd.grad(loss.sum, [hidden_TD, *own.values()])
    assert torch.equal(found, wanted)
    for gradient, values_T in zip(each, own.values(), strict=True):
        torch.testing.assert_close(gradient, torch.full_like(values_T, float(loss.count) / len(values_T)))
    mean = sum(float(values_T.mean()) for values_T in own.values()) / 2
    assert float(loss.metrics["indexer_divergence"]) == torch.tensor(mean * float(loss.count)).item()
