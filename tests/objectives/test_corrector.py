"""corrector against torch's softmax of all logits in float64; the ends of γ; what both together say of another
domain than the teacher's."""

from __future__ import annotations

import copy
import math
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from unfreeze import models
from unfreeze.core.batch import Batch
from unfreeze.data import Example, pack
from unfreeze.evaluate.perplexity import heldout
from unfreeze.models.blocks.head import Head
from unfreeze.objectives.corrector import corrector
from unfreeze.objectives.cross_entropy import cross_entropy

T, D, V = 40, 16, 61


def saying(logits_TV: Tensor, vocab: int | None = None):
    """A teacher that says these logits."""

    def teacher(batch: Batch):
        logits_NV = logits_TV[batch.supervised(), :vocab]
        return lambda rows, log_p_BV: logits_NV[rows].to(log_p_BV.dtype).log_softmax(-1)

    return teacher


def a_batch() -> Batch:
    generator = torch.Generator().manual_seed(0)
    tokens, targets = torch.randint(0, V - 5, (2, T), generator=generator)
    weights = (torch.rand(T, generator=generator) < 0.6) * (0.5 + torch.rand(T, generator=generator))
    return Batch(tokens, targets, weights.float(), torch.arange(T), torch.tensor([0]))


def a_head(kind: str, dtype: torch.dtype) -> nn.Module:
    if kind == "dense":
        return nn.Linear(D, V, bias=False, dtype=dtype)
    head = Head(D, V, factor=0.7, softcap=3.0, dtype=dtype, device="cpu")
    nn.init.normal_(head.weight)
    return head


def oracle(
    hidden: Tensor, head: nn.Module, batch: Batch, teacher_TV: Tensor, gamma: float, vocab: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The definition, of all rows at once in float64: probabilities multiplied and normalised."""
    head64, hidden64 = copy.deepcopy(head).double(), hidden.detach().double().requires_grad_()
    p_S = head64(hidden64)[:, :vocab].softmax(-1)
    r = teacher_TV.double()[:, :vocab].softmax(-1) * p_S**gamma
    r = r / r.sum(-1, keepdim=True)
    loss = -(r.gather(1, batch.targets_T[:, None])[:, 0].log() * batch.weights_T.double()).sum()
    loss.backward()
    (weight,) = head64.parameters()
    assert hidden64.grad is not None and weight.grad is not None
    return loss, hidden64.grad, weight.grad


@pytest.mark.parametrize("kind", ["dense", "softcap"])
@pytest.mark.parametrize("gamma", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("dtype, limit", [(torch.float32, 2e-6), (torch.float64, 1e-12)])
def test_loss_and_gradients_equal_float64(kind, gamma, dtype, limit):
    torch.manual_seed(1)
    head, batch = a_head(kind, dtype), a_batch()
    hidden, teacher_TV = (
        torch.randn(T, D, dtype=dtype, requires_grad=True),
        2 * torch.randn(T, V, dtype=dtype),
    )
    vocab = V - 4
    expected, of_hidden, of_weight = oracle(hidden, head, batch, teacher_TV, gamma, vocab)
    loss = corrector(hidden, head, batch, saying(teacher_TV, vocab), gamma=gamma, vocab=vocab, block_rows=7)
    loss.sum.backward()
    assert loss.sum.item() == pytest.approx(expected.item(), rel=limit)
    (weight,) = head.parameters()
    torch.testing.assert_close(hidden.grad, of_hidden.to(dtype), rtol=10 * limit, atol=10 * limit)
    torch.testing.assert_close(weight.grad, of_weight.to(dtype), rtol=10 * limit, atol=20 * limit)


def test_gamma_0_is_the_teachers_loss_and_has_no_gradient():
    torch.manual_seed(2)
    head, batch, teacher_TV = nn.Linear(D, V), a_batch(), torch.randn(T, V)
    hidden = (100 * torch.randn(T, D)).requires_grad_()
    loss = corrector(hidden, head, batch, saying(teacher_TV), gamma=0.0, block_rows=16)
    loss.sum.backward()
    # the teacher's own loss, through the same blocks: its log p as hidden states under an identity
    head_of_teacher = nn.Linear(V, V, bias=False)
    nn.init.eye_(head_of_teacher.weight)
    own = cross_entropy(teacher_TV.log_softmax(-1), head_of_teacher, batch, block_rows=16, impl="reference")
    assert loss.sum.item() == own.sum.item()
    assert float(loss.metrics["teacher"]) == pytest.approx(own.sum.item(), rel=1e-6)
    assert hidden.grad is not None and not hidden.grad.any()
    assert head.weight.grad is not None and not head.weight.grad.any()


def test_a_teacher_that_knows_nothing_leaves_cross_entropy():
    torch.manual_seed(3)
    head, batch, hidden = nn.Linear(D, V), a_batch(), torch.randn(T, D)
    losses, gradients = [], []
    for objective in (partial(corrector, teacher=saying(torch.zeros(T, V))), cross_entropy):
        own = hidden.clone().requires_grad_()
        loss = objective(own, head, batch)
        loss.sum.backward()
        losses.append((loss.sum.item(), float(loss.metrics["correct"])))
        gradients.append(own.grad)
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6)


def test_padding_of_either_head_changes_nothing_and_gets_no_gradient():
    torch.manual_seed(4)
    batch, hidden, teacher_TV = a_batch(), torch.randn(T, D), torch.randn(T, V)
    narrow = nn.Linear(D, V, bias=False)
    wide = nn.Linear(D, V + 3, bias=False)
    with torch.no_grad():
        wide.weight.normal_(std=9).narrow(0, 0, V).copy_(narrow.weight)
    said = torch.cat([teacher_TV, 9 + torch.randn(T, 2)], 1)
    a = corrector(hidden, narrow, batch, saying(teacher_TV))
    b = corrector(hidden, wide, batch, saying(said, V), vocab=V)
    b.sum.backward()
    assert a.sum.item() == pytest.approx(b.sum.item(), rel=1e-6)
    assert wide.weight.grad is not None and not wide.weight.grad[V:].any() and wide.weight.grad[:V].any()
    control = corrector(hidden, wide, batch, saying(torch.cat([teacher_TV, 9 + torch.randn(T, 3)], 1)))
    assert abs(control.sum.item() - a.sum.item()) > 1


def test_a_target_that_the_teacher_rules_out_costs_everything():
    torch.manual_seed(5)
    batch, teacher_TV = a_batch(), torch.randn(T, V)
    row = int(batch.supervised()[0])
    teacher_TV[row, batch.targets_T[row]] = -math.inf
    assert corrector(torch.randn(T, D), nn.Linear(D, V), batch, saying(teacher_TV)).sum.item() == math.inf


WORDS = 24


def model_of(width: int, seed: int) -> models.Decoder:
    config = {
        "model_type": "qwen3",
        "vocab_size": WORDS,
        "hidden_size": width,
        "intermediate_size": width,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
    }
    model = models.build(models.shape(config), dtype=torch.float32, device="cpu")
    models.initialize(model, seed=seed)
    return model


def documents(table: Tensor, count: int, seed: int) -> list[Batch]:
    """Walks of 32 words through a Markov chain, eight of them a batch."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(0, WORDS, (count, 1), generator=generator)
    for _ in range(31):
        words = torch.cat([words, torch.multinomial(table[words[:, -1]], 1, generator=generator)], 1)
    examples = [Example(row, [0.0] + [1.0] * 31) for row in words.tolist()]
    return [pack(examples[i : i + 8]) for i in range(0, count, 8)]


def taught(model: models.Decoder, batches: list[Batch], objective=cross_entropy, rate: float = 1e-2) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    for batch in batches:
        loss = objective(model.hidden(batch), model.lm_head, batch)
        optimizer.zero_grad()
        (loss.sum / loss.count).backward()
        optimizer.step()


def test_both_together_know_a_shifted_domain_better_than_the_teacher_and_than_a_student_alone():
    """The teacher knows a chain; in the other domain four of its words are likelier, wherever they stand. A
    student of width 2 can say that, but it cannot hold the chain of 24 words itself."""
    chain = torch.randn(WORDS, WORDS, generator=torch.Generator().manual_seed(0)).mul(2).softmax(-1)
    shifted = chain * torch.tensor([12.0] * 4 + [1.0] * (WORDS - 4))
    shifted /= shifted.sum(-1, keepdim=True)

    def saying_chain(table: Tensor):
        def teacher(batch: Batch):
            log_q_NV = table.log()[batch.tokens_T[batch.supervised()]]
            return lambda rows, log_p_BV: log_q_NV[rows].clone()

        return partial(corrector, teacher=teacher)

    joint, seen, held = saying_chain(chain), documents(shifted, 640, seed=5), documents(shifted, 160, seed=3)
    student, alone = model_of(2, seed=4), model_of(2, seed=4)
    taught(student, seen, joint)
    taught(alone, seen)
    of_both = heldout(student, held, objective=joint).perplexity
    of_teacher = heldout(student, held, objective=partial(joint, gamma=0.0)).perplexity
    of_domain = heldout(student, held, objective=partial(saying_chain(shifted), gamma=0.0)).perplexity
    of_alone = heldout(alone, held).perplexity
    assert of_both < 0.75 * of_teacher and of_both < 0.75 * of_alone, (of_both, of_teacher, of_alone)
    # nothing knows the domain better than its own conditionals; in 80 steps most of the way is gone
    assert of_domain < of_both < of_domain + 0.15 * (of_teacher - of_domain), (of_domain, of_both, of_teacher)


def test_control_arm_a_product_that_is_not_normalised_is_seen():
    torch.manual_seed(6)
    head, batch, hidden, teacher_TV = (
        nn.Linear(D, V, bias=False),
        a_batch(),
        torch.randn(T, D),
        torch.randn(T, V),
    )
    right = oracle(hidden, head, batch, teacher_TV, 1.0, V)[0].item()
    both = teacher_TV.log_softmax(-1) + head(hidden).log_softmax(-1)
    wrong = -(both.gather(1, batch.targets_T[:, None])[:, 0] * batch.weights_T).sum().item()
    assert abs(wrong - right) > 1
