"""Sparse latent attention: with as many keys as tokens it is full attention; recomputed layers and chunks make the same
choice; an indexer that trains follows its layer's attention, and touches nothing else.

The oracle of the indexer's loss is written here, in float64, on what transformers' attention and indexer get.
"""

import copy

import pytest
import torch
import transformers
from family_cases import (
    CASES,
    DOCUMENTS,
    NO_IDS,
    SMALL,
    apart,
    batch_of,
    difference,
    oracle,
    ours,
    randomized,
)

from unfreeze import models
from unfreeze.adapters import LoraConfig, attach
from unfreeze.core.errors import AdapterError, ConfigError
from unfreeze.models import decoder
from unfreeze.models.blocks.sparse import Indexer
from unfreeze.models.indexers import indexers, train_indexers, trained_indexers
from unfreeze.objectives.cross_entropy import cross_entropy
from unfreeze.objectives.following import Following
from unfreeze.train.optim import AdamW
from unfreeze.train.step import forward_backward

SPARSE = ("deepseek-v32", "glm-moe-dsa", "glm-moe-dsa-shared")
POLICIES = [name for name in models.RECOMPUTE if name != "nothing"]


# ---- the choice


def with_keys(model: models.Decoder, keys: int) -> models.Decoder:
    for layer in model.layers:
        layer.self_attn.chosen_keys = keys
    return model


def logits_and_gradients(model: models.Decoder, recompute=models.plain) -> list[torch.Tensor]:
    model.zero_grad()
    logits = model.logits(model.hidden(batch_of(DOCUMENTS), recompute))
    (logits.log_softmax(-1)[:, 3].sum()).backward()
    return [logits.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def test_as_many_keys_as_tokens_is_deepseek_v3_bit_by_bit():
    """The same weights in a model without an indexer; with a key less, the last token differs."""
    sparse = with_keys(ours(oracle("deepseek-v32"), CASES["deepseek-v32"]), 12)
    own = ("layer_types", "mlp_layer_types", "index_topk", "index_n_heads", "index_head_dim")
    config = {name: value for name, value in sparse.shape.config.items() if name not in own}
    config |= {"model_type": "deepseek_v3", "rope_interleave": True}
    plain = models.build(models.shape(config), dtype=torch.float32, device="cpu")
    state = {name: value for name, value in sparse.state_dict().items() if ".indexer." not in name}
    plain.load_state_dict(state)
    full = logits_and_gradients(plain)
    found = logits_and_gradients(sparse)
    assert len(found) == len(full) > 20 and all(map(torch.equal, found, full))
    differs = (logits_and_gradients(with_keys(sparse, 11))[0] - full[0]).abs().amax(1) > 1e-3
    assert differs.nonzero().flatten().tolist() == [len(differs) - 1]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", SPARSE)
def test_layers_computed_again_have_the_same_gradients(name, policy, monkeypatch):
    model = ours(oracle(name), CASES[name])
    expected = logits_and_gradients(model)
    again = logits_and_gradients(model, models.RECOMPUTE[policy])
    assert len(again) == len(expected) and all(map(torch.equal, again, expected))
    monkeypatch.setattr(decoder, "chunk_tokens", lambda *_: 9)  # documents in chunks, each with its choices
    again = logits_and_gradients(model, models.RECOMPUTE[policy])
    # summed in another order, as without a choice (tests/models/test_taps.py)
    assert all((a - b).norm() <= 5e-6 * b.norm() for a, b in zip(again, expected, strict=True))


def swap_pairs(model):
    """The planted bug: the rotation that the other family has in its indexer."""
    for indexer in indexers(model).values():
        indexer.pairs = "adjacent" if indexer.pairs == "halves" else "halves"


def ignore_weights(model):
    """The planted bug: all heads of the indexer count alike."""
    for indexer in indexers(model).values():
        indexer.weights_proj.weight.zero_()


def choose_less(model):
    with_keys(model, 3)


def own_choice(model):
    """The planted bug: a layer follows another one's choice."""
    model.layers[3].self_attn.follows = 0


@pytest.mark.parametrize("bug", [swap_pairs, ignore_weights, choose_less])
@pytest.mark.parametrize("name", SPARSE[:2])
def test_control_the_comparison_with_transformers_sees_a_wrong_choice(name, bug):
    logits, _ = difference(name, change=lambda model: torch.no_grad()(bug)(model))
    assert logits > 1e-3


def test_control_the_comparison_sees_another_layers_choice():
    logits, _ = difference("glm-moe-dsa-shared", change=own_choice)
    assert logits > 1e-3


def test_a_longer_document_equals_transformers():
    """300 tokens, 24 keys: several blocks of queries."""
    case = CASES["deepseek-v32"]
    torch.manual_seed(0)
    fields = copy.deepcopy(case.fields) | {"index_topk": 24, "max_position_embeddings": 512}
    wider = case._replace(fields=fields)
    config = wider.made({**SMALL, **NO_IDS, "rms_norm_eps": 1e-5, "initializer_range": 0.125})
    reference = randomized(transformers.DeepseekV32ForCausalLM, config)
    tokens = torch.randint(0, 90, (300,), generator=torch.Generator().manual_seed(3)).tolist()
    logits, gradients = apart(reference, wider, documents=[tokens, tokens[:50]])
    assert logits <= 1e-4 and gradients <= 1e-4


# ---- frozen


def test_the_indexer_is_frozen_and_no_target_but_its_own_name_reaches_it():
    model = ours(oracle("deepseek-v32"), CASES["deepseek-v32"])
    own = [name for name, _ in model.named_parameters() if ".indexer." in name]
    assert len(own) == 3 * 5 and trained_indexers(model) == []
    assert not {name for name, p in model.named_parameters() if p.requires_grad} & {*own}
    assert not {*AdamW(model).masters} & {*own}
    before = {name: model.get_parameter(name).clone() for name in own}
    logits_and_gradients(model, models.keep_inputs)
    assert all(model.get_parameter(name).grad is None for name in own)
    assert all(torch.equal(model.get_parameter(name), value) for name, value in before.items())
    adapted = {site.name for site in attach(model, LoraConfig(rank=2), seed=0)}
    assert adapted and not any(".indexer." in name for name in adapted)
    for target in (("indexer",), ("wk", "wq_b")):
        model = ours(oracle("deepseek-v32"), CASES["deepseek-v32"])
        groups = {site.group for site in attach(model, LoraConfig(rank=2, targets=target), seed=0)}
        assert groups == {"indexer"} and trained_indexers(model) == [0, 1, 2]


def test_a_model_without_an_indexer_says_so():
    model = ours(oracle("deepseek-v3"), CASES["deepseek-v3"])
    with pytest.raises(ConfigError, match="a deepseek_v3 model has no indexer that can train"):
        train_indexers(model)
    with pytest.raises(AdapterError, match="'indexer' matches nothing"):
        attach(model, LoraConfig(rank=2, targets=("indexer",)), seed=0)


# ---- trained


def oracle_divergence(reference, documents) -> tuple[float, dict[str, torch.Tensor]]:
    """Mean over tokens and layers of the report's loss, and the gradient of its sum over layers of the mean over
    tokens, by parameter of transformers' indexers. In float64."""
    seen = {}

    def note(module, arguments, keywords):
        names = ("hidden_states", "q_resid", "position_embeddings", "attention_mask", "position_ids")
        seen[module.layer_idx] = dict(zip(names, arguments, strict=False)) | keywords

    parts = {
        i: layer.self_attn.indexer
        for i, layer in enumerate(reference.model.layers)
        if layer.self_attn.indexer is not None
    }
    handles = [part.register_forward_pre_hook(note, with_kwargs=True) for part in parts.values()]
    weights = {
        f"model.layers.{i}.self_attn.indexer.{name}": p.detach().double().requires_grad_()
        for i, part in parts.items()
        for name, p in part.named_parameters()
    }
    total, adjacent = 0.0, reference.config.model_type == "glm_moe_dsa"
    for document in documents:
        out = reference(torch.tensor([document]), output_attentions=True)
        for i, part in parts.items():
            x, low = (seen[i][name][0].detach().double() for name in ("hidden_states", "q_resid"))
            cos, sin = (
                table[0].double()[:, : part.qk_rope_head_dim // 2] for table in seen[i]["position_embeddings"]
            )
            own = {
                name: weights[f"model.layers.{i}.self_attn.indexer.{name}"]
                for name, _ in part.named_parameters()
            }
            q = (low @ own["wq_b.weight"].T).unflatten(-1, (part.n_heads, part.head_dim))
            k = x @ own["wk.weight"].T
            k = (k - k.mean(-1, keepdim=True)) / (k.var(-1, unbiased=False, keepdim=True) + 1e-6).sqrt()
            k = k * own["k_norm.weight"] + own["k_norm.bias"]
            q, k = (turned(y, cos, sin, part.qk_rope_head_dim, adjacent) for y in (q, k[:, None]))
            w = x @ own["weights_proj.weight"].T
            scores = torch.einsum("tjd,sd->tjs", q, k[:, 0]).relu()
            index = torch.einsum("tj,tjs->ts", w, scores) * (part.n_heads * part.head_dim) ** -0.5
            p = out.attentions[i][0].detach().double().mean(0)
            log_q = index.masked_fill(p == 0, -torch.inf).log_softmax(-1)
            terms = p * (p.log() - log_q)
            total = total + terms[p > 0].sum()
    for handle in handles:
        handle.remove()
    tokens = sum(map(len, documents))
    gradients = torch.autograd.grad(total / tokens, [*weights.values()])
    return float(total) / tokens / len(parts), dict(zip(weights, gradients, strict=True))


def turned(x_Thd, cos_Tr, sin_Tr, width, adjacent):
    """The first `width` elements of a head rotated as complex numbers: neighbours, or the two halves."""
    first, rest = x_Thd[..., :width], x_Thd[..., width:]
    pairs = first.unflatten(-1, (-1, 2)) if adjacent else first.unflatten(-1, (2, -1)).transpose(-1, -2)
    numbers = torch.view_as_complex(pairs.contiguous())
    return torch.cat(
        (torch.view_as_real(numbers * torch.complex(cos_Tr, sin_Tr)[:, None]).flatten(-2), rest), -1
    )


def taught(model, policy, objective) -> tuple[float, dict[str, torch.Tensor]]:
    """A step's loss and gradients; and its metrics."""
    optimizer = AdamW(model)
    gradients = forward_backward(
        model, optimizer, [batch_of(DOCUMENTS)], objective, recompute=models.RECOMPUTE[policy]
    )
    return gradients, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("keys", [4, 12], ids=["chosen keys", "all keys"])
@pytest.mark.parametrize("name", ["deepseek-v32", "glm-moe-dsa-shared"])
def test_an_indexer_that_trains_has_the_gradient_of_the_reports_loss(name, keys):
    """And everything else has, bit by bit, the gradient that it has beside a frozen one."""
    reference = oracle(name)
    reference.config.index_topk = keys
    for layer in reference.model.layers:
        if layer.self_attn.indexer is not None:
            layer.self_attn.indexer.index_topk = keys
    mean, wanted = oracle_divergence(reference, DOCUMENTS)
    model = with_keys(ours(reference, CASES[name]), keys)
    plain, without = taught(model, "nothing", cross_entropy)
    train_indexers(model)
    layers = trained_indexers(model)
    for policy in models.RECOMPUTE:
        step, gradients = taught(model, policy, Following(cross_entropy, layers))
        assert step.loss == plain.loss
        assert step.metrics["indexer_divergence"] == pytest.approx(mean, rel=1e-4)
        assert {key for key in gradients if ".indexer." in key} == wanted.keys()
        for key, gradient in gradients.items():
            if key in wanted:
                scale = float(wanted[key].abs().max())
                assert scale > 1e-4
                torch.testing.assert_close(gradient.double(), wanted[key], atol=2e-4 * scale, rtol=1e-3)
            else:
                assert torch.equal(gradient, without[key]), key


def test_control_another_loss_is_seen(monkeypatch):
    """The planted bug: attention of one head instead of the mean over all."""
    from unfreeze.models.blocks import sparse

    divergence = sparse.index_divergence
    monkeypatch.setattr(
        sparse, "index_divergence", lambda index, q, k, *rest: divergence(index, q[:, :1], k[:, :1], *rest)
    )
    with pytest.raises(AssertionError):
        test_an_indexer_that_trains_has_the_gradient_of_the_reports_loss("deepseek-v32", 4)


def test_micro_batches_count_by_their_tokens():
    """Two equal micro-batches have the gradient of one."""
    model = ours(oracle("deepseek-v32"), CASES["deepseek-v32"])
    train_indexers(model)
    objective = Following(cross_entropy, trained_indexers(model))
    optimizer, found = AdamW(model), []
    for count in (1, 2):
        forward_backward(
            model, optimizer, [batch_of(DOCUMENTS)] * count, objective, recompute=models.keep_inputs
        )
        found.append({name: p.grad.clone() for name, p in model.named_parameters() if ".indexer." in name})
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-5, atol=1e-8)


def test_nothing_of_the_indexer_runs_where_nobody_reads_it(monkeypatch):
    """Documents of at most K tokens, nothing cached, nothing taught: today's attention alone."""
    model = with_keys(ours(oracle("deepseek-v32"), CASES["deepseek-v32"]), 12)
    calls, keys = [], Indexer.keys
    monkeypatch.setattr(Indexer, "keys", lambda *arguments: calls.append(1) or keys(*arguments))
    logits_and_gradients(model, models.selective)
    assert not calls
    logits_and_gradients(with_keys(model, 11))
    assert len(calls) == 3
