"""Decoder: recomputation with a frozen embedding, and what prefill and step refuse. The arithmetic itself:
test_families.py."""

import builtins
from dataclasses import replace

import pytest
import torch
from torch.utils._pytree import tree_leaves

from unfreeze import models
from unfreeze.core.batch import Batch
from unfreeze.core.errors import UserError
from unfreeze.kernels.attention import sdpa
from unfreeze.kernels.expert_mlp import fused
from unfreeze.models import decoder, recompute
from unfreeze.parallel.plan.fastest import SAME_BITS

CONFIG = {
    "model_type": "qwen3_moe",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.2,
}


def made() -> models.Decoder:
    model = models.build(models.shape(CONFIG), dtype=torch.float32, device="cpu")
    models.initialize(model, 0)
    return model


def batch_of(*lengths: int) -> Batch:
    total = sum(lengths)
    tokens = torch.arange(total) * 7 % 61
    positions = torch.cat([torch.arange(length) for length in lengths])
    return Batch(
        tokens, tokens, torch.ones(total), positions, torch.tensor(lengths).cumsum(0) - torch.tensor(lengths)
    )


spans = decoder._spans


def gradients(frozen: str, recompute) -> dict[str, torch.Tensor | None]:
    model = made()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(frozen not in name)
    model.hidden(batch_of(5, 3), recompute).square().sum().backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("recompute", [models.keep_inputs, models.selective, models.elementwise])
@pytest.mark.parametrize("frozen", ["embed_tokens", "layers.0.", "nothing is called this"])
def test_recompute_gives_the_gradients_of_plain_whatever_is_frozen(frozen, recompute):
    """With a frozen embedding the first layer's input needs no gradient: autograd must come back to the layer
    all the same."""
    plain, recomputed = gradients(frozen, models.plain), gradients(frozen, recompute)
    for name, gradient in plain.items():
        if frozen in name:
            assert gradient is None and recomputed[name] is None
        elif gradient is None:
            assert recomputed[name] is None, name
        else:
            torch.testing.assert_close(recomputed[name], gradient, rtol=1e-5, atol=1e-5, msg=name)
    assert plain["model.layers.1.self_attn.q_proj.weight"] is not None


def in_chunks(
    monkeypatch, recompute, documents=(5, 3, 4, 9, 2), limit=6
) -> tuple[list[int], dict[str, torch.Tensor], list[torch.Tensor]]:
    """(tokens of each visit of a layer, gradients, tokens per expert) of a float32 model whose layers are
    visited in chunks of `limit` tokens."""
    monkeypatch.setattr(decoder, "chunk_tokens", lambda *_: limit)
    model, visits = made(), []
    forward = decoder.Layer.forward
    monkeypatch.setattr(
        decoder.Layer,
        "forward",
        lambda self, x_TD, run: (visits.append(len(x_TD)), forward(self, x_TD, run))[1],
    )
    hidden_TD = model.hidden(batch_of(*documents), recompute)
    (hidden_TD * torch.randn(hidden_TD.shape, generator=torch.Generator().manual_seed(0))).sum().backward()
    monkeypatch.undo()
    return (
        visits,
        {name: p.grad for name, p in model.named_parameters() if p.grad is not None},
        [m.counts_E for m in model.moe_layers().values()],
    )


@pytest.mark.parametrize("recompute", [models.keep_inputs, models.selective, models.elementwise])
def test_chunks_of_whole_documents_give_the_gradients_and_expert_counts_of_all_at_once(
    monkeypatch, recompute
):
    visits, cut, counts = in_chunks(monkeypatch, recompute)
    assert visits == [5, 3, 4, 9, 2] * 2 + [2, 9, 4, 3, 5] * 2  # two layers, forth and back
    whole_visits, whole, whole_counts = in_chunks(monkeypatch, recompute, limit=100)
    assert whole_visits == [23] * 4 and set(cut) == set(whole)
    for name, gradient in whole.items():
        torch.testing.assert_close(
            cut[name], gradient, rtol=1e-5, atol=1e-6 * float(gradient.abs().max()), msg=name
        )
    torch.testing.assert_close(counts, whole_counts)


def test_what_is_kept_changes_no_bit_of_a_gradient_where_layers_are_visited_in_pieces(monkeypatch):
    """So a run may go on with another of SAME_BITS (parallel/plan/fastest.py). "nothing" is none of them: it
    takes all documents at once, so its products have other shapes and its sums another order."""
    policies = [models.RECOMPUTE[name] for name in SAME_BITS]
    (visits, first, _), *others = [in_chunks(monkeypatch, policy) for policy in policies]
    assert len(visits) > 4 and first and in_chunks(monkeypatch, models.plain)[0] == [23] * 2
    for _, found, _ in others:
        assert found.keys() == first.keys()
        assert [name for name in first if not torch.equal(found[name], first[name])] == []


def test_chunks_that_forget_where_documents_start_are_found_out(monkeypatch):
    """Control arm: the test above with a chunk's documents run together."""
    monkeypatch.setattr(decoder, "_spans", lambda groups: ((rows, [0]) for rows, _ in spans(groups)))
    _, cut, _ = in_chunks(monkeypatch, models.selective, limit=9)
    _, whole, _ = in_chunks(monkeypatch, models.selective, limit=100)
    with pytest.raises(AssertionError):
        for name, gradient in whole.items():
            torch.testing.assert_close(
                cut[name], gradient, rtol=1e-5, atol=1e-6 * float(gradient.abs().max()), msg=name
            )


def test_without_gradients_chunks_give_the_same_hidden_states(monkeypatch):
    model, batch = made(), batch_of(5, 3, 4, 9, 2)
    with torch.no_grad():
        whole = model.hidden(batch, models.selective)
        monkeypatch.setattr(decoder, "chunk_tokens", lambda *_: 6)
        torch.testing.assert_close(model.hidden(batch, models.selective), whole)


def test_weights_that_train_in_half_precision_are_visited_once(monkeypatch):
    """Their gradients would be summed over the chunks in bf16. Frozen ones beside float32 adapters are
    visited in chunks."""
    monkeypatch.setattr(decoder, "chunk_tokens", lambda *_: 6)
    model = made().to(torch.bfloat16)
    run = model.packed_pass(batch_of(5, 3))
    assert len(run.chunks) == 2 and len(recompute._chunks(model.layers[0], run)) == 1
    assert len(recompute._chunks(model.requires_grad_(False).layers[0], run)) == 2


def test_without_recomputes_own_start_of_the_graph_the_first_layer_would_learn_nothing():
    """Control arm: handing the frozen embedding's output to autograd as it is leaves layer 0 without
    gradients."""
    from unfreeze.models.recompute import _Recompute

    def broken(layer, x_TD, run):
        return _Recompute.apply(x_TD, layer, run, {})

    model = made()
    model.model.embed_tokens.requires_grad_(False)
    model.hidden(batch_of(5, 3), broken).square().sum().backward()
    assert model.model.layers[0].self_attn.q_proj.weight.grad is None


@pytest.mark.parametrize(
    ("rows", "capacity", "lengths", "filled"),
    [(1, 8, [4, 2], None), (3, 8, [4, 2], None), (2, 3, [4, 2], None), (2, 8, [4, 2], [0, 1])],
)
def test_prefill_refuses_a_cache_that_does_not_fit(rows, capacity, lengths, filled):
    model = made()
    cache = model.new_cache(rows, capacity)
    cache.lengths = filled or cache.lengths
    with pytest.raises(
        UserError, match=rf"prefill of 2 documents, longest 4, into a cache of {rows} rows of {capacity}"
    ):
        model.prefill(batch_of(*lengths), cache)


@pytest.mark.parametrize("rows", [[0], [0, 2], [1, 1], [0, -1]])
def test_prefill_of_rows_that_do_not_run_is_refused(rows):
    model = made()
    cache = model.new_cache(3, 8)
    cache.lengths = [3, 3]
    with pytest.raises(UserError, match=r"it needs one row per document, not \["):
        model.prefill(batch_of(4, 2), cache, rows)


@torch.no_grad()
def test_prefill_of_some_rows_leaves_the_others():
    """Rows 2 and 0 of a cache that runs are filled anew; a step then gives each what it gives alone."""
    model, caches = made(), [made().new_cache(3, 9) for _ in range(2)]
    model.prefill(batch_of(5, 3, 7), caches[0])
    model.prefill(batch_of(4, 2), caches[0], [2, 0])
    assert caches[0].lengths == [2, 3, 4]
    lengths, starts = (2, 3, 4), (4, 5, 0)  # tokens of batch_of, in the order of rows
    tokens = torch.cat(
        [(torch.arange(start, start + n) * 7 % 61) for start, n in zip(starts, lengths, strict=True)]
    )
    batch = batch_of(*lengths)
    model.prefill(replace(batch, tokens_T=tokens), caches[1])
    steps = [model.step(torch.tensor([1, 2, 3]), cache) for cache in caches]
    torch.testing.assert_close(*steps, rtol=1e-5, atol=1e-5)


def test_a_full_cache_is_refused_and_one_with_room_is_not():
    model = made()
    cache = model.new_cache(2, 5)
    with torch.no_grad():
        model.prefill(batch_of(4, 2), cache)
        model.step(torch.tensor([1, 2]), cache)
        assert cache.lengths == [5, 3]
        with pytest.raises(UserError, match="holds 5 positions and all are filled"):
            model.step(torch.tensor([1, 2]), cache)
        cache.keep([1])
        model.step(torch.tensor([2]), cache)
    assert cache.lengths == [4]


def calls_of(monkeypatch, recompute) -> dict[str, int]:
    """How often attention and the experts are computed in a step of one layer each of which has both."""
    counts = {"attention": 0, "experts": 0}
    flash, experts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu, fused._forward

    def count(name, function):
        def counted(*args, **kwargs):
            counts[name] += 1
            return function(*args, **kwargs)

        return counted

    monkeypatch.setattr(fused, "_forward", count("experts", experts))
    monkeypatch.setattr(sdpa, "torch_attention", count("attention", sdpa.torch_attention))
    monkeypatch.setattr(
        torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", count("attention", flash)
    )
    model = made()
    model.hidden(batch_of(5, 3), recompute).square().sum().backward()
    monkeypatch.undo()
    return counts


def test_selective_computes_attention_and_experts_once_and_recompute_twice(monkeypatch):
    assert calls_of(monkeypatch, models.selective) == {"attention": 2, "experts": 2}  # two layers
    assert calls_of(monkeypatch, models.keep_inputs) == {"attention": 4, "experts": 4}
    assert calls_of(monkeypatch, models.plain) == {"attention": 2, "experts": 2}


def products_of(monkeypatch, recompute) -> int:
    """How often a dense model's linear layers multiply in a step's two forward visits."""
    counts, linear = [0], torch.nn.functional.linear

    def counted(*args, **kwargs):
        counts[0] += 1
        return linear(*args, **kwargs)

    config = {
        "model_type": "qwen2",
        "vocab_size": 512,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
    }
    model = models.build(models.shape(config), dtype=torch.float32, device="cpu")
    models.initialize(model, 0)
    monkeypatch.setattr(torch.nn.functional, "linear", counted)
    model.hidden(batch_of(5, 3), recompute).square().sum().backward()
    monkeypatch.undo()
    return counts[0]


def test_elementwise_multiplies_once_and_selective_twice_but_for_a_layers_last_product(monkeypatch):
    # two layers of seven
    assert products_of(monkeypatch, models.elementwise) == products_of(monkeypatch, models.plain) == 14
    assert products_of(monkeypatch, models.selective) == products_of(monkeypatch, models.keep_inputs) == 26


def held(recompute) -> int:
    """Bytes that the graph of a forward pass holds beside the parameters: what autograd saved, and what
    recomputation keeps for itself."""
    model, saved = made(), {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.setdefault(t.untyped_storage().data_ptr(), t), lambda t: t
    ):
        output = model.hidden(batch_of(50, 30), recompute)
    memos, todo, seen = 0, [output.grad_fn], set()
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            values = [kept.values for _, _, kept in getattr(node, "visits", ())]
            memos += sum(t.nbytes for t in tree_leaves(values) if isinstance(t, torch.Tensor))
            todo += [parent for parent, _ in node.next_functions]
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    return memos + sum(t.nbytes for pointer, t in saved.items() if pointer not in parameters)


def test_selective_keeps_less_than_plain_and_more_than_recompute():
    assert held(models.keep_inputs) < held(models.selective) < held(models.elementwise) < held(models.plain)


def keeping(count: int | None):
    """models.recompute_policy for a model that is made later and has two layers: they are known when they are
    visited."""
    visited = []

    def go(layer, x_TD, run):
        visited.append(layer)
        layers = [layer, object()] if len(visited) % 2 else [object(), layer]
        return models.recompute_policy("selective", layers, count)(layer, x_TD, run)  # type: ignore[arg-type]

    return go


@pytest.mark.parametrize("count", [0, 1, 2, None])
def test_a_model_of_which_some_layers_keep_has_the_gradients_of_plain(count):
    plain, mixed = (
        gradients("nothing is called this", models.plain),
        gradients("nothing is called this", keeping(count)),
    )
    for name, gradient in plain.items():
        torch.testing.assert_close(mixed[name], gradient, rtol=1e-5, atol=1e-5, msg=name)


def test_the_last_layers_keep_and_the_others_are_computed_twice(monkeypatch):
    assert (
        held(keeping(0))
        == held(models.keep_inputs)
        < held(keeping(1))
        < held(keeping(2))
        == held(keeping(None))
        == held(models.selective)
    )
    # two layers, the first of them twice
    assert calls_of(monkeypatch, keeping(1)) == {"attention": 3, "experts": 3}


def test_keep_layers_says_nothing_about_other_ways():
    assert all(
        models.recompute_policy(name, made().layers, 1) is models.RECOMPUTE[name]
        for name in ("layers", "nothing")
    )


def test_a_recomputed_layer_needs_no_sympy(monkeypatch):
    """torch.autograd.backward with a gradient imports it (control arm): a quarter of a second of step 1."""
    real, imported = builtins.__import__, []
    monkeypatch.setattr(
        builtins, "__import__", lambda name, *rest: imported.append(name) or real(name, *rest)
    )
    x, dy = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4)
    with torch.enable_grad():
        arriving = recompute._Arriving.apply(torch.sin(x), dy)
    arriving.backward()
    assert not any("symbolic_shapes" in name for name in imported)
    ours, x.grad = x.grad, None
    torch.autograd.backward(torch.sin(x), dy)
    assert any("symbolic_shapes" in name for name in imported)
    torch.testing.assert_close(ours, x.grad, rtol=0, atol=0)
