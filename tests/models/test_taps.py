"""Claims about taps: what is found is what transformers' eager attention sees, a gradient given to it arrives whatever
of a layer is computed again, it reaches only what lies before it, and nothing else is kept."""

from __future__ import annotations

import gc

import pytest
import torch
from family_cases import CASES, DOCUMENTS, batch_of, oracle, ours
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from unfreeze import models
from unfreeze.core.batch import Loss
from unfreeze.core.taps import TAP_NAMES, Tap
from unfreeze.kernels.attention import CAUSAL, DocumentLayout, attention_map
from unfreeze.kernels.packed_attention import packed_attention
from unfreeze.models import decoder, recompute
from unfreeze.models.blocks.taps import LayerTaps, Taps
from unfreeze.models.widths import tap_width
from unfreeze.objectives.cross_entropy import cross_entropy
from unfreeze.train.optim import AdamW
from unfreeze.train.step import forward_backward

# grouped heads with norms; latent; window and softcap; sinks; chunks and layers without rotation; one projection;
# values that are keys; a norm over all heads
FAMILIES = (
    "qwen3-tied",
    "deepseek-v3",
    "gemma2-window",
    "gpt-oss",
    "llama4-text",
    "phi3-partial-window",
    "gemma4-values-are-keys",
    "olmo2-gqa-biases",
)
CONFIG = {
    "model_type": "qwen3_moe",
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "mlp_only_layers": [0, 2],
    "norm_topk_prob": True,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.2,
}
RECOMPUTED = [name for name in models.RECOMPUTE if name != "nothing"]
UNTAPPED = ("divergence", "logit", "router")
ALL = [Tap(layer, name) for layer in (0, 1) for name in TAP_NAMES if name not in UNTAPPED]


def random_like(name: str, tensor: Tensor) -> Tensor:
    return torch.randn(tensor.shape, generator=torch.Generator().manual_seed(len(name)))


def step(
    model: models.Decoder, policy: str, asked: list[Tap], hidden: bool = True, documents=DOCUMENTS
) -> tuple[dict[Tap, Tensor], dict[str, Tensor]]:
    """What was found, and every gradient of a sum over it (read twice each) and the last hidden state."""
    model.zero_grad()
    taps = Taps(asked)
    hidden_TD = model.hidden(batch_of(documents), models.RECOMPUTE[policy], taps=taps)
    terms = [(str(tap), tensor) for tap, tensor in taps.found.items()] + [("hidden", hidden_TD)] * hidden
    total = sum((random_like(name, x) * x).sum() + x.pow(2).sum() / 3 for name, x in terms)
    assert isinstance(total, Tensor)
    total.backward()
    return taps.found, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@torch.no_grad()
def furthest(found: dict, wanted: dict) -> float:
    """|found - wanted| / |wanted| of the tensor where it is most."""
    assert found.keys() == wanted.keys()
    return max(float((found[n] - x).norm() / x.norm()) for n, x in wanted.items())


@torch.no_grad()
def of_all(found: dict, wanted: dict) -> float:
    """The same of all of them as one vector."""
    squares = [((found[n] - x).pow(2).sum(), x.pow(2).sum()) for n, x in wanted.items()]
    return float((sum(a for a, _ in squares) / sum(b for _, b in squares)) ** 0.5)


def bits(found: dict, wanted: dict) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[name], x) for name, x in wanted.items())


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_found_is_transformers_and_gradients_are_plains_whatever_is_computed_again(name: str):
    reference = oracle(name)
    model = ours(reference, CASES[name])
    found, expected = step(model, "nothing", ALL)
    compare_with_eager(reference, model, found)
    assert all(tensor[0].numel() == tap_width(model, tap) for tap, tensor in found.items())

    # the same bits: a tap's readers are summed before they meet what the layer gives back
    for policy in RECOMPUTED:
        again, gradients = step(model, policy, ALL)
        assert bits(again, found) and bits(gradients, expected), policy
    # documents in chunks are summed in another order: without any tap a tensor's gradient is up to 3.5e-6 off
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoder, "chunk_tokens", lambda *_: 8)
        for policy in RECOMPUTED:
            again, gradients = step(model, policy, ALL)
            assert furthest(again, found) <= 1e-6 and of_all(gradients, expected) <= 1e-6, policy
            assert furthest(gradients, expected) <= 5e-6, policy


def compare_with_eager(reference, model: models.Decoder, found: dict[Tap, Tensor]) -> None:
    """Maps within 1e-5: sums of up to 32 terms and a softmax in float32 on both sides. Inputs within the 1e-4 that
    logits have in test_families.py."""
    begin = 0
    for document in DOCUMENTS:
        rows = slice(begin, begin := begin + len(document))
        with torch.no_grad():
            told = reference(torch.tensor([document]), output_attentions=True, output_hidden_states=True)
        for layer in (0, 1):
            q, k, v, x = (found[Tap(layer, of)][rows].detach() for of in ("q", "k", "v", "input"))
            attention = model.layers[layer].self_attn
            more = {
                "mask": getattr(attention, "mask", CAUSAL),
                "softcap": getattr(attention, "softcap", None),
                "sinks_H": getattr(attention, "sinks", None),
            }
            found_HLL = attention_map(q, k, torch.tensor([0]), attention.scale, **more)
            torch.testing.assert_close(found_HLL, told.attentions[layer][0], rtol=0, atol=1e-5)
            torch.testing.assert_close(x, told.hidden_states[layer][0], rtol=1e-4, atol=1e-4)
            # the map times v is what attention gives, which never holds the map
            o_THv = packed_attention(q, k, v, DocumentLayout.build([0], len(q)), attention.scale, **more)
            v_THv = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
            torch.testing.assert_close(
                torch.einsum("hts,shv->thv", found_HLL, v_THv), o_THv, rtol=1e-5, atol=1e-5
            )


def tiny() -> models.Decoder:
    """Three layers; the second has experts."""
    model = models.build(models.shape(CONFIG), dtype=torch.float32, device="cpu")
    models.initialize(model, 0)
    return model


@pytest.mark.parametrize("policy", models.RECOMPUTE)
@pytest.mark.parametrize("chunk", [8, None])
def test_a_gradient_reaches_what_lies_before_its_tap_and_nothing_else(monkeypatch, policy: str, chunk):
    """A loss of one tap only: neither the rest of its layer nor a layer behind it gets a gradient, not even zeros."""
    monkeypatch.setattr(decoder, "chunk_tokens", lambda *_: chunk)
    before = {f"model.layers.0.{name}" for name, _ in tiny().layers[0].named_parameters()}
    before |= {"model.embed_tokens.weight", "model.layers.1.input_layernorm.weight"}
    of = {"q": ("q_proj", "q_norm"), "k_plain": ("k_proj", "k_norm"), "v": ("v_proj",), "input": ()}
    for name, projections in of.items():
        _, gradients = step(tiny(), policy, [Tap(1, name)], hidden=False)
        inside = {f"model.layers.1.self_attn.{each}.weight" for each in projections}
        wanted = before | inside if inside else before - {"model.layers.1.input_layernorm.weight"}
        assert set(gradients) == wanted, name


def test_the_last_norms_input_is_behind_the_last_layer():
    model = tiny()
    found, _ = step(model, "layers", [Tap(3, "input")])
    x_TD = found[Tap(3, "input")]
    assert torch.equal(model.model.norm(x_TD), model.hidden(batch_of(DOCUMENTS)))


@pytest.mark.parametrize("policy", models.RECOMPUTE)
def test_without_autograd_taps_are_found_and_nothing_has_a_graph(monkeypatch, policy: str):
    model, taps = tiny(), Taps(ALL)
    wanted, _ = step(model, policy, ALL)
    for chunk in (8, None):
        monkeypatch.setattr(decoder, "chunk_tokens", lambda *_, chunk=chunk: chunk)
        with torch.no_grad():
            model.hidden(batch_of(DOCUMENTS), models.RECOMPUTE[policy], taps=taps)
        assert not any(tensor.requires_grad for tensor in taps.found.values())
        assert furthest(taps.found, wanted) <= 1e-6


class Calls(TorchDispatchMode):
    """Every operation of torch, and the bytes it made."""

    def __init__(self):
        super().__init__()
        self.calls: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        made = sum(leaf.nbytes for leaf in tree_leaves(out) if isinstance(leaf, Tensor))
        self.calls.append((str(func), made))
        return out


@pytest.mark.parametrize("policy", models.RECOMPUTE)
def test_an_objective_without_taps_makes_the_same_calls_and_keeps_nothing(policy: str):
    """Of a step through train_step; control arm: one that asks for a single tensor makes other calls."""
    made: list[list[tuple[str, int]]] = []
    for asked in (None, (), [Tap(1, "v")]):
        objective = Reads(asked) if asked is not None else cross_entropy
        with Calls() as seen:
            forward_backward(
                model := tiny(),
                AdamW(model),
                [batch_of(DOCUMENTS)],
                objective,
                recompute=models.RECOMPUTE[policy],
            )
        made.append(seen.calls)
    assert made[0] == made[1] != made[2]


class Reads:
    """Cross entropy, and the sum of what it asks for."""

    def __init__(self, taps):
        self.taps = frozenset(taps)

    def __call__(self, hidden_TD, lm_head, batch, found=()) -> Loss:
        loss = cross_entropy(hidden_TD, lm_head, batch)
        return Loss(sum((found[tap].pow(2).sum() for tap in found), loss.sum), loss.count, loss.metrics)


@pytest.mark.parametrize("policy", RECOMPUTED)
def test_only_what_was_asked_for_is_kept(policy: str):
    """Bytes that live from forward to backward beside those of a pass without taps: the tapped tensors'."""

    def alive(asked: list[Tap]) -> int:
        model, taps, batch = tiny(), Taps(asked), batch_of(DOCUMENTS)
        gc.collect()
        before = held()
        hidden_TD = model.hidden(batch, models.RECOMPUTE[policy], taps=taps)
        assert hidden_TD.requires_grad and len(taps.found) == len(asked)
        gc.collect()
        return held() - before

    tokens = sum(map(len, DOCUMENTS))
    # q has 4 heads of 8 numbers, v 2; an input is there anyway, as what its layer is computed from
    asked = [Tap(1, "q"), Tap(1, "v"), Tap(1, "input")]
    values = 0 if policy == "elementwise" else 2 * 8  # which keeps v_proj's product already
    alive(asked)  # the first pass of a process makes tables that stay
    assert alive(asked) - alive([]) == 4 * tokens * (4 * 8 + values)


def held() -> int:
    """Bytes of all tensors that Python can see, each storage once."""
    tensors = [each for each in gc.get_objects() if type(each) is Tensor]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def test_control_arm_a_lost_gradient_and_a_chunks_wrong_rows_are_seen(monkeypatch):
    model = tiny()
    _, expected = step(model, "nothing", ALL)
    arriving = recompute._arriving
    monkeypatch.setattr(recompute, "_arriving", lambda ys, dys, rows: arriving(ys[:1], dys[:1], rows))
    assert furthest(step(model, "layers", ALL)[1], expected) > 1e-2
    monkeypatch.undo()
    monkeypatch.setattr(decoder, "chunk_tokens", lambda *_: 8)
    put_rows = LayerTaps.put_rows
    monkeypatch.setattr(
        LayerTaps,
        "put_rows",
        lambda self, rows, part, n: put_rows(self, slice(0, rows.stop - rows.start), part, n),
    )
    assert furthest(step(model, "layers", ALL)[0], step(model, "nothing", ALL)[0]) > 1e-2
