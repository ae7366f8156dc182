"""Every family against transformers: logits and gradients within 1e-4 in float32 on random small
configurations."""

import re
from pathlib import Path

import cases_hybrid
import cases_kimi_lfm2
import cases_mamba
import pytest
import torch
from family_case import YARN
from family_cases import CASES, DOCUMENTS, batch_of, difference, oracle, ours

from unfreeze import models
from unfreeze.core.errors import CheckpointError
from unfreeze.models.blocks.mlp import MLP


def compared(cases) -> set[str]:
    """The model_types that CASES compares with transformers."""
    return {case.model_type for case in cases.values()}


def not_compared(families, cases) -> list[str]:
    """Family files of which no model_type is compared. Those of this project have loops: test_chain.py."""
    theirs = {family for model_type, family in families.items() if model_type not in models.ONLY_HERE}
    missing = theirs - {families.get(model_type) for model_type in compared(cases)}
    return sorted(f"{family.__name__.replace('.', '/')}.py" for family in missing)


def test_every_family_is_compared_with_transformers():
    missing = not_compared(models.FAMILIES, CASES)
    assert not missing, (
        f"{missing} is compared with nothing: add a line to CASES in one of tests/models/cases_*.py"
    )


def test_control_arm_a_family_without_a_case_is_seen():
    rest = {name: case for name, case in CASES.items() if case.name != "Qwen2"}
    assert "unfreeze/models/qwen2.py" in not_compared(models.FAMILIES, rest)


ROOT = Path(__file__).resolve().parents[2]


def unlisted(page: str) -> list[str]:
    """The model types that have no row on the page of the families."""
    return [name for name in models.FAMILIES.keys() | models.WRAPPERS.keys() if f"`{name}`" not in page]


def test_the_page_of_the_families_and_the_readme_name_what_is_built():
    page = (ROOT / "docs" / "reference" / "families.md").read_text(encoding="utf-8")
    assert unlisted(page) == []
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"{len(models.FAMILIES.keys() | models.WRAPPERS.keys())} model types" in readme


def test_control_arm_a_family_that_the_page_forgets_is_seen():
    page = (ROOT / "docs" / "reference" / "families.md").read_text(encoding="utf-8")
    assert unlisted(page.replace("`qwen2`", "")) == ["qwen2"]


def test_an_error_that_points_to_contributing_names_a_section_that_is_there():
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    with pytest.raises(CheckpointError) as caught:
        models.shape({"model_type": "made_up"})
    section = re.search(r"CONTRIBUTING\.md, '(.*?)'", caught.value.next)
    assert section and f"\n## {section[1]}\n" in page


@pytest.mark.parametrize("name", CASES)
def test_logits_and_gradients_equal_transformers(name):
    logits, gradients = difference(name)
    assert logits <= 1e-4 and gradients <= 1e-4


@pytest.mark.parametrize("recompute", [models.plain, models.selective])
@pytest.mark.parametrize("name", [*cases_hybrid.CASES, *cases_kimi_lfm2.CASES, *cases_mamba.CASES])
def test_a_hybrid_equals_transformers_over_several_chunks(name, recompute):
    """Documents of several chunks and segments of the recurrence, and short ones beside them."""
    draw = torch.Generator().manual_seed(3)
    documents = [torch.randint(97, (length,), generator=draw).tolist() for length in (150, 1, 70, 3)]
    logits, gradients = difference(name, recompute, documents)
    assert logits <= 1e-4 and gradients <= 1e-4


@pytest.mark.parametrize("name", ["llama-gqa-tied", "qwen3-moe", "deepseek-v3-groups-yarn"])
def test_recomputed_layers_have_the_same_gradients(name):
    logits, gradients = difference(name, models.keep_inputs)
    assert logits <= 1e-4 and gradients <= 1e-4


# mixtures whose second visit needs what others leave out: a gate's product, a norm's input, scaled inputs
@pytest.mark.parametrize("recompute", [models.selective, models.elementwise])
@pytest.mark.parametrize("name", ["qwen2-moe", "gpt-oss", "llama4-text", "gemma4-experts"])
def test_what_a_recomputed_mixture_keeps_does_not_change_its_gradients(name, recompute):
    logits, gradients = difference(name, recompute)
    assert logits <= 1e-4 and gradients <= 1e-4


def test_control_a_shared_expert_whose_product_is_left_out_is_seen(monkeypatch):
    """Qwen2-MoE's gate has its gradient through that product: zeros in its place must not pass."""
    monkeypatch.setattr(MLP, "read", MLP.forward)
    _, gradients = difference("qwen2-moe", models.selective)
    assert gradients > 1e-2


def swap_pairing(model):
    """The planted bug: rotate halves where the family rotates adjacent pairs, or the other way round, by
    permuting q only."""
    for layer in model.layers:
        weight = layer.self_attn.q_b_proj.weight
        heads = weight.detach().unflatten(0, (4, -1))
        heads[:, -8:] = heads[:, -8:][:, [0, 2, 4, 6, 1, 3, 5, 7]]


def drop_selection_bias(model):
    for moe in model.moe_layers().values():
        moe.gate.e_score_correction_bias.zero_()


@pytest.mark.parametrize("bug", [swap_pairing, drop_selection_bias])
def test_the_comparison_sees_a_planted_bug(bug):
    logits, _ = difference("deepseek-v3-groups-yarn", change=lambda model: torch.no_grad()(bug)(model))
    assert logits > 1e-2


def test_both_spellings_of_config_give_the_same_rope():
    new = {**oracle("deepseek-v3-groups-yarn").config.to_dict()}
    old = {key: value for key, value in new.items() if key != "rope_parameters"}
    scaling = {
        "type": "yarn",
        **{key: value for key, value in YARN.items() if key not in ("rope_type", "rope_theta")},
    }
    old |= {"rope_theta": YARN["rope_theta"], "rope_scaling": scaling}
    assert models.shape(old).rope == models.shape(new).rope


def test_no_attention_across_documents():
    """The gradient of one document's logits with respect to another document's embeddings is exactly zero."""
    model = ours(oracle("deepseek-v3"), CASES["deepseek-v3"])
    batch = batch_of(DOCUMENTS)
    seen = {}
    model.model.embed_tokens.register_forward_hook(
        lambda _m, _i, out: seen.setdefault("x", out.detach().requires_grad_())
    )
    hidden = model.hidden(batch)
    (gradient,) = torch.autograd.grad(hidden[7:9].square().sum(), seen["x"])
    assert gradient[7:9].abs().max() > 0
    assert not gradient[:7].any() and not gradient[9:].any()


def test_expert_counts_count_each_token_once_even_when_recomputed():
    model = ours(oracle("deepseek-v3"), CASES["deepseek-v3"])
    batch = batch_of(DOCUMENTS)
    model.hidden(batch, models.keep_inputs).sum().backward()
    for moe in model.moe_layers().values():
        assert int(moe.counts_E.sum()) == batch.num_tokens * 2
