"""Parts for attention against the families that have them; and what holds for every part: causal, packed."""

import json

import pytest
import torch
import transformers
from family_cases import DOCUMENTS, NO_IDS, batch_of
from part_case import BASE, built, config_of, entry, gradients

from unfreeze import models
from unfreeze.models.blocks.passes import PackedPass
from unfreeze.models.parts import PARTS

LONG = [[token % 89 + 1 for token in range(3 * seed, 3 * seed + 40)] for seed in range(2)]


def theirs_of(model, kind, **more):
    """transformers' model of that family with our weights."""
    config = transformers.AutoConfig.for_model(kind, **BASE, **NO_IDS, tie_word_embeddings=False, **more)
    config._attn_implementation = "eager"
    theirs = transformers.AutoModelForCausalLM.from_config(config).eval()
    theirs.load_state_dict(model.state_dict(), strict=True)
    return theirs


def apart(model, theirs, documents):
    """Largest difference of logits, and of gradients relative to the largest one of a tensor."""
    probe = torch.randn(97, generator=torch.Generator().manual_seed(1))
    wanted = torch.cat([theirs(torch.tensor([document])).logits[0] for document in documents])
    (wanted.log_softmax(-1) * probe).sum().div(len(wanted)).backward()
    expected = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    found = gradients(model, batch_of(documents))
    assert found.keys() == expected.keys()
    worst = max(float((found[name] - of).abs().max() / of.abs().max()) for name, of in expected.items())
    with torch.no_grad():
        logits = model.logits(model.hidden(batch_of(documents)))
    return float((logits - wanted).detach().abs().max()), worst


def test_a_window_is_mistrals():
    model = built(entry("sliding_window", window=7))
    logits, grads = apart(model, theirs_of(model, "mistral", sliding_window=7), LONG)
    assert logits <= 1e-4 and grads <= 1e-4
    # control arm: a window of one token more
    other = apart(model, theirs_of(model, "mistral", sliding_window=8), LONG)
    assert other[0] > 1e-2


def test_norms_of_queries_and_keys_are_qwen3s():
    model = built(entry("qk_norm"))
    logits, grads = apart(model, theirs_of(model, "qwen3"), DOCUMENTS)
    assert logits <= 1e-4 and grads <= 1e-4


def test_full_takes_a_window_away_and_changes_nothing_where_there_is_none():
    plain, full = built(), built(entry("full"))
    batch = batch_of(LONG)
    assert torch.equal(plain.hidden(batch), full.hidden(batch))
    mistral = built(entry("full"), base_model_type="mistral", sliding_window=4)
    logits, grads = apart(mistral, theirs_of(mistral, "mistral", sliding_window=None), LONG)
    assert logits <= 1e-4 and grads <= 1e-4


def test_norms_that_are_there_already_stay():
    model = models.from_config(config_of(entry("qk_norm"), base_model_type="qwen3"), torch.float32)
    plain = models.from_config(
        {**config_of(), "model_type": "qwen3", "base_model_type": None, "parts": None}, torch.float32
    )
    assert model.state_dict().keys() == plain.state_dict().keys()


def test_the_last_entry_of_a_place_holds():
    entries = [
        entry("post_norm"),
        {"at": "layers.1", "part": "sandwich_norm"},
        {"at": "layers.2", "part": "pre_norm"},
    ]
    layers = built(*entries, entry("sliding_window")).layers
    assert [type(layer).__name__ for layer in layers] == ["NormedSums", "NormedBranches", "Layer"]
    assert all(layer.self_attn.mask.window == 5 for layer in layers)


# --- every part of the registry


def changed(model, documents, place):
    """Gradient of the last document's token at `place` with respect to all embedded tokens, [T, D]."""
    seen: list[torch.Tensor] = []

    def keep(module, inputs, output):
        output = output.detach().requires_grad_()
        seen.append(output)
        return output

    handle = model.model.embed_tokens.register_forward_hook(keep)
    try:
        hidden = model.hidden(batch_of(documents))
        weights = torch.randn(hidden.shape[1], generator=torch.Generator().manual_seed(2))
        (hidden[place] * weights).sum().backward()
    finally:
        handle.remove()
    gradient = seen[0].grad
    assert gradient is not None
    return gradient


def outside(gradient, begin, place):
    """Largest gradient from tokens of other documents and from the future of `place`."""
    return float(torch.cat([gradient[:begin], gradient[place + 1 :]]).abs().max())


@pytest.mark.parametrize("name", PARTS)
def test_no_gradient_comes_from_the_future_or_another_document(name):
    model, documents = built(entry(name)), [LONG[0], LONG[1]]
    place = 40 + 20
    gradient = changed(model, documents, place)
    assert outside(gradient, 40, place) == 0.0
    assert float(gradient[place].abs().max()) > 0


@pytest.mark.parametrize("name", PARTS)
def test_documents_packed_together_are_as_alone(name):
    model = built(entry(name))
    with torch.no_grad():
        packed = model.hidden(batch_of(LONG + DOCUMENTS))
        alone = torch.cat([model.hidden(batch_of([document])) for document in LONG + DOCUMENTS])
    torch.testing.assert_close(packed, alone, atol=2e-5, rtol=1e-4)


def test_control_documents_that_see_each_other_are_seen(monkeypatch):
    """A layout of one document: the second one sees the first."""
    model = built(entry("post_norm"))
    real = model.packed_pass

    def joined(batch):
        run: PackedPass = real(batch)
        run.layout = type(run.layout).build([0], batch.num_tokens, model.device)
        return run

    monkeypatch.setattr(model, "packed_pass", joined)
    gradient = changed(model, [LONG[0], LONG[1]], 60)
    assert float(gradient[:40].abs().max()) > 0 and float(gradient[61:].abs().max()) == 0


# --- no other program loads it


def test_transformers_refuses_the_folder_and_would_load_the_familys(tmp_path):
    for name, config in (("parts", config_of(entry("post_norm"))), ("own", {**BASE, "model_type": "llama"})):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="unfreeze_parts"):
        transformers.AutoConfig.from_pretrained(tmp_path / "parts")
    with pytest.raises(ValueError, match="unfreeze_parts"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "parts")
    assert transformers.AutoConfig.from_pretrained(tmp_path / "own").model_type == "llama"  # control
