"""Every family against transformers: logits and gradients within 1e-4 in float32 on random small
configurations."""

import re
from pathlib import Path

import pytest
import torch
import transformers

from unfreeze import models
from unfreeze.core.batch import Batch
from unfreeze.core.errors import CheckpointError

YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "rope_theta": 50000.0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 10000.0,
}
SMALL = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "max_position_embeddings": 256,
}
MLA = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
}
QWEN_MOE = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
}

CASES = {
    "llama": ("Llama", {"num_attention_heads": 4, "num_key_value_heads": 4}),
    "llama-gqa-tied": (
        "Llama",
        {"num_attention_heads": 8, "num_key_value_heads": 2, "tie_word_embeddings": True},
    ),
    "llama-3-rope-biases": (
        "Llama",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 24,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": LLAMA3,
        },
    ),
    "llama-linear-rope": (
        "Llama",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 10000.0},
        },
    ),
    "qwen2-tied": (
        "Qwen2",
        {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True},
    ),
    "qwen2-untied-yarn": (
        "Qwen2",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "tie_word_embeddings": False,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "rope_theta": 1e6,
            },
        },
    ),
    "qwen3": ("Qwen3", {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24}),
    "qwen3-tied": (
        "Qwen3",
        {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16, "tie_word_embeddings": True},
    ),
    "qwen3-moe": ("Qwen3Moe", {**QWEN_MOE, "norm_topk_prob": True}),
    "qwen3-moe-mixed": ("Qwen3Moe", {**QWEN_MOE, "norm_topk_prob": False, "mlp_only_layers": [1]}),
    "qwen3-moe-sparse-step": ("Qwen3Moe", {**QWEN_MOE, "norm_topk_prob": True, "decoder_sparse_step": 2}),
    "deepseek-v3": ("DeepseekV3", {**MLA, "q_lora_rank": 40, "n_group": 1, "topk_group": 1}),
    "deepseek-v3-groups-yarn": (
        "DeepseekV3",
        {**MLA, "q_lora_rank": 40, "n_group": 4, "topk_group": 2, "rope_parameters": YARN},
    ),
    "deepseek-v3-no-q-latent": (
        "DeepseekV3",
        {
            **MLA,
            "q_lora_rank": None,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 2,
            "n_shared_experts": 2,
        },
    ),
    "deepseek-v3-biases": (
        "DeepseekV3",
        {
            **MLA,
            "q_lora_rank": 40,
            "n_group": 1,
            "topk_group": 1,
            "attention_bias": True,
            "norm_topk_prob": False,
        },
    ),
    "deepseek-v3-rotated-halves": (
        "DeepseekV3",
        {**MLA, "q_lora_rank": 40, "n_group": 1, "topk_group": 1, "rope_interleave": False},
    ),
}


def compared(cases) -> set[str]:
    """The model_types that CASES compares with transformers."""
    return {getattr(transformers, f"{family}Config").model_type for family, _ in cases.values()}


def not_compared(families, cases) -> list[str]:
    """Family files of which no model_type is compared."""
    missing = set(families.values()) - {families.get(model_type) for model_type in compared(cases)}
    return sorted(f"{family.__name__.replace('.', '/')}.py" for family in missing)


def test_every_family_is_compared_with_transformers():
    missing = not_compared(models.FAMILIES, CASES)
    assert not missing, (
        f"{missing} is compared with nothing: add a line to CASES in tests/models/test_families.py"
    )


def test_control_arm_a_family_without_a_case_is_seen():
    rest = {name: case for name, case in CASES.items() if case[0] != "Qwen2"}
    assert "unfreeze/models/qwen2.py" in not_compared(models.FAMILIES, rest)


ROOT = Path(__file__).resolve().parents[2]
LISTS = {  # page -> the words around its list of families
    "README.md": r"Built families: (.*?)\.\s",
    "docs/using.md": r"\| families \(`model_type`\) \| (.*?) \|",
}


def listed(page: str, pattern: str) -> set[str]:
    """The names between ` in a page's list of families."""
    found = re.search(pattern, page, flags=re.S)
    return set(re.findall(r"`(\w+)`", found[1])) - {"text_config"} if found else set()


@pytest.mark.parametrize("page", LISTS)
def test_the_pages_list_the_families(page):
    names = listed((ROOT / page).read_text(encoding="utf-8"), LISTS[page])
    assert names == models.FAMILIES.keys() | models.WRAPPERS.keys(), (
        f"{page}, in its list of families: write or remove"
        f" {sorted(names ^ (models.FAMILIES.keys() | models.WRAPPERS.keys()))}"
    )


@pytest.mark.parametrize("page", LISTS)
def test_control_arm_a_family_that_a_page_forgets_is_seen(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert "qwen2" not in listed(text.replace("`qwen2`", ""), LISTS[page])


def test_an_error_that_points_to_contributing_names_a_row_that_is_there():
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    with pytest.raises(CheckpointError) as caught:
        models.shape({"model_type": "made_up"})
    row = re.search(r"CONTRIBUTING\.md, row '(.*)'", caught.value.next)
    assert row and f"| **{row[1]}** |" in page


DOCUMENTS = [[5, 17, 3, 88, 41, 2, 9], [11, 7], [60, 61, 62, 63, 64, 65, 66, 67, 68, 69, 70, 71]]


def oracle(name: str):
    """A random transformers model; norms, biases and the selection bias are random too, so that each of them
    matters."""
    family, settings = CASES[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(
        **SMALL, **settings, rms_norm_eps=1e-5, initializer_range=0.2
    )
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "norm" in key:
                tensor.copy_(1 + 0.3 * torch.randn_like(tensor))
            elif key.endswith("e_score_correction_bias"):
                tensor.copy_(0.2 * torch.randn_like(tensor))
            elif key.endswith(".bias"):
                tensor.copy_(0.1 * torch.randn_like(tensor))
    return model


def ours(reference) -> models.Decoder:
    """Our model with the oracle's weights; in memory both stack the experts, so only a suffix differs."""
    shape = models.shape(reference.config.to_dict())
    model = models.build(shape, dtype=torch.float32, device="cpu")
    state = {
        key + ".weight" if key.endswith(("experts.gate_up_proj", "experts.down_proj")) else key: tensor
        for key, tensor in reference.state_dict().items()
    }
    model.load_state_dict(state, strict=True)
    return model


def batch_of(documents: list[list[int]]) -> Batch:
    starts, position = [], 0
    for document in documents:
        starts.append(position)
        position += len(document)
    tokens = torch.tensor([token for document in documents for token in document])
    positions = torch.cat([torch.arange(len(document)) for document in documents])
    return Batch(tokens, tokens.clone(), torch.ones(len(tokens)), positions, torch.tensor(starts))


def difference(name: str, recompute=models.plain, documents=DOCUMENTS, change=None) -> tuple[float, float]:
    """Largest absolute difference of logits and of every parameter's gradient (experts included), relative to
    the largest gradient."""
    reference = oracle(name)
    model = ours(reference)
    if change is not None:
        change(model)
    probe = torch.randn(SMALL["vocab_size"], generator=torch.Generator().manual_seed(1))
    expected = torch.cat([reference(torch.tensor([document])).logits[0] for document in documents])
    actual = model.logits(model.hidden(batch_of(documents), recompute))
    ((expected.log_softmax(-1) * probe).sum() / len(expected)).backward()
    ((actual.log_softmax(-1) * probe).sum() / len(actual)).backward()
    theirs = {key: p.grad for key, p in reference.named_parameters()}
    worst = 0.0
    for key, parameter in model.named_parameters():
        theirs_key = key.removesuffix(".weight") if ".experts." in key and "shared" not in key else key
        expected_grad = theirs[theirs_key]
        if expected_grad is None:  # an expert stack no token was sent to
            assert parameter.grad is None or not parameter.grad.any()
            continue
        worst = max(
            worst,
            float((parameter.grad - expected_grad).abs().max() / max(1.0, float(expected_grad.abs().max()))),
        )
    return float((actual - expected).detach().abs().max()), worst


@pytest.mark.parametrize("name", CASES)
def test_logits_and_gradients_equal_transformers(name):
    logits, gradients = difference(name)
    assert logits <= 1e-4 and gradients <= 1e-4


@pytest.mark.parametrize("name", ["llama-gqa-tied", "qwen3-moe", "deepseek-v3-groups-yarn"])
def test_recomputed_layers_have_the_same_gradients(name):
    logits, gradients = difference(name, models.keep_inputs)
    assert logits <= 1e-4 and gradients <= 1e-4


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
    model = ours(oracle("deepseek-v3"))
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
    model = ours(oracle("deepseek-v3"))
    batch = batch_of(DOCUMENTS)
    model.hidden(batch, models.keep_inputs).sum().backward()
    for moe in model.moe_layers().values():
        assert int(moe.counts_E.sum()) == batch.num_tokens * 2


@pytest.mark.parametrize("other", ["llama4", "deepseek_v32", "kimi_k3"])
def test_an_unknown_family_is_refused_and_no_other_is_suggested(other):
    with pytest.raises(
        CheckpointError, match=f"model_type '{other}' is not built; built: [a-z0-9_, ]*\n"
    ) as caught:
        models.shape({"model_type": other})
    assert "nearest" not in caught.value.message
