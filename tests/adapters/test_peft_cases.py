"""Adapters that peft writes, by each field of its LoraConfig: the same logits here, or one line that refuses.

The cases are those of peft's own tests (its LoRA on decoders, parameters, trainable tokens, tied weights),
on our tiny models.
"""

import warnings

import peft
import pytest
import torch

from unfreeze.adapters import LoraConfig, attach, load_adapter, save_adapter, verify_adapter
from unfreeze.adapters.files import read_files
from unfreeze.core.errors import AdapterError

QKVO = ["q_proj", "k_proj", "v_proj", "o_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
BOTH = {"embed_tokens": [5, 2], "lm_head": [5, 2]}
EQUAL = {
    "regex": {"target_modules": r".*\.0\.self_attn\.(q|v)_proj"},
    "all-linear": {"target_modules": "all-linear", "exclude_modules": ["down_proj"]},
    "excluded": {"exclude_modules": r".*\.1\..*"},
    "layer 0": {"layers_to_transform": 0, "layers_pattern": "layers"},
    "layers": {"layers_to_transform": [1]},
    "patterns": {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 3, "v_proj": 5}},
    "patterns by name": {
        "rank_pattern": {r"layers\.1\.self_attn\.[qk]_proj": 3, "model.layers.0.self_attn.v_proj": 2},
        "alpha_pattern": {r"^model\.layers\.1\..*": 7},
        "use_rslora": True,
    },
    "head whole": {"modules_to_save": ["lm_head"]},
    "both whole": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "norms whole": {"modules_to_save": ["norm", "input_layernorm"]},
    "tokens": {"trainable_token_indices": [0, 1, 3]},
    "tokens of both": {"trainable_token_indices": BOTH},
    "tokens of the head": {"trainable_token_indices": {"lm_head": [5, 2]}},
    "tokens that differ": {"trainable_token_indices": {"embed_tokens": [5, 2], "lm_head": [7]}},
    "tokens, tied": {"trainable_token_indices": BOTH, "ensure_weight_tying": True},
    "parameters": {
        "target_modules": ["v_proj"],
        "target_parameters": ["q_proj.weight", "o_proj.weight"],
        "rank_pattern": {"q_proj.weight": 2, "v_proj": 3},
        "alpha_pattern": {"self_attn.q_proj.weight": 5},
    },
    "pattern of another name": {"target_modules": ["v_proj"], "target_parameters": ["q_proj.weight"], "rank_pattern": {"q_proj": 2}},
    "head parameter": {"target_modules": ["v_proj"], "target_parameters": ["lm_head.weight"]},
    "experts": {"target_parameters": EXPERTS[::-1]},
    "down alone": {"target_modules": [], "target_parameters": EXPERTS[1:]},
    "experts of one layer each": {
        "target_parameters": [f"layers.{i}.{name}" for i, name in enumerate(EXPERTS)]
    },
    "experts, patterns": {
        "target_parameters": EXPERTS,
        "use_rslora": True,
        "rank_pattern": {"experts.gate_up_proj": 2},
        "alpha_pattern": {"experts.down_proj": 3},
    },
    "dora": {"use_dora": True, "use_rslora": True, "rank_pattern": {"q_proj": 2}},
    "dora, head": {"target_modules": [*QKVO, "lm_head"], "use_dora": True},
    "dora, whole": {"use_dora": True, "modules_to_save": ["lm_head"]},
    "dora, tokens": {"use_dora": True, "trainable_token_indices": [3, 1]},
    "embeddings": {
        "target_modules": [*QKVO, "embed_tokens"],
        "rank_pattern": {"embed_tokens": 2},
        "alpha_pattern": {"embed_tokens": 5},
        "use_rslora": True,
    },
    "embeddings alone": {"target_modules": ["embed_tokens"]},
    "embeddings and head": {"target_modules": ["embed_tokens", "lm_head"], "rank_pattern": {"lm_head": 2}},
    "embeddings, tied": {"target_modules": [*QKVO, "embed_tokens"], "ensure_weight_tying": True},
    "router whole": {"modules_to_save": ["mlp.gate"]},
    "not fan": {"fan_in_fan_out": True},  # peft itself sets it to false for a Linear
}  # fmt: skip
OF_EXPERTS = {"down alone", "experts", "experts of one layer each", "experts, patterns", "router whole"}
DAILY = {("layer 0", "llama"), ("patterns by name", "llama"), ("embeddings, tied", "qwen2"), ("dora, tokens", "qwen2"), ("experts, patterns", "qwen3-moe")}  # fmt: skip
REFUSED = {
    "bias": ({"bias": "lora_only"}, "bias = 'lora_only' is not built"),
    "lora_bias": ({"lora_bias": True}, "lora_bias = True"),
    "alora": ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
    "replication": ({"layer_replication": [[0, 2], [1, 2]]}, "layer_replication"),
    "olora": ({"init_lora_weights": "olora"}, "changed the base's weights too"),
    "dora on embeddings": (
        {"target_modules": [*QKVO, "embed_tokens"], "use_dora": True},
        "DoRA on the embeddings",
    ),
    "embeddings as a parameter": ({"target_parameters": ["embed_tokens.weight"]}, "embed_tokens"),
    "router": ({"target_modules": "all-linear"}, "adapt a router"),
    "experts whole": ({"modules_to_save": ["experts"]}, "no weight of a module that can train fully"),
    "nothing of that name": ({"modules_to_save": ["down_proj"]}, "down_proj has no weight in the file"),
}
ON = {
    (name, family)
    for name, config in EQUAL.items()
    for family in ("llama", "qwen2", "qwen3-moe")
    if (family == "qwen3-moe" or name not in OF_EXPERTS)
    and not (family == "qwen3-moe" and config.get("target_modules") == "all-linear")
}


def written(tiny, family, fields, folder):
    """peft's model with random values, saved, and read again by peft -> its logits."""
    torch.manual_seed(1)
    config = peft.LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": QKVO, **fields})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = peft.get_peft_model(tiny.reference(family), config).eval()
        drawn = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, p in sorted(theirs.named_parameters()):
                if p.requires_grad and "magnitude" in name:
                    p.mul_(1 + 0.2 * torch.randn(p.shape, generator=drawn))
                elif p.requires_grad:
                    p.add_(0.1 * torch.randn(p.shape, generator=drawn))
        theirs.save_pretrained(folder)
        again = peft.PeftModel.from_pretrained(tiny.reference(family), folder).eval()
    logits = tiny.oracle_logits(theirs).detach()
    assert (tiny.oracle_logits(again) - logits).abs().max() < 1e-4
    return logits


@pytest.mark.parametrize(
    ("name", "family"),
    [pytest.param(*case, marks=[pytest.mark.nightly] * (case not in DAILY)) for case in sorted(ON)],
)
def test_what_peft_writes_has_the_same_logits_here(name, family, tiny, tmp_path):
    wanted = written(tiny, family, EQUAL[name], tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no tensor is called lost
        load_adapter(model := tiny.model(family), tmp_path)
    worst = (tiny.logits(model) - wanted).detach().abs().max()
    base = (tiny.logits(tiny.model(family)) - wanted).detach().abs().max()
    assert worst < 1e-5 * max(1.0, float(wanted.abs().max())) and base > 1e-2


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.nightly] * (n in ("replication", "lora_bias", "alora"))) for n in REFUSED],
)  # fmt: skip
def test_what_is_not_built_is_refused_in_one_line(name, tiny, tmp_path):
    fields, words = REFUSED[name]
    family = "qwen3-moe" if name in ("router", "experts whole", "nothing of that name") else "llama"
    written(tiny, family, fields, tmp_path)
    with pytest.raises(AdapterError, match=words) as refused:
        load_adapter(tiny.model(family), tmp_path)
    assert len(refused.value.message.replace(str(tmp_path), "DIR")) <= 140
    assert "\n" not in refused.value.message


OURS = {
    "pissa": ("qwen2", {"start": "pissa", "targets": ("attention", "embed_tokens", "lm_head")}),
    "dora and pissa": ("llama", {"start": "pissa", "dora": True, "train_too": ("embed_tokens",)}),
    "another rank": (
        "qwen3-moe",
        {"scaling": "alpha/sqrt(r)", "experts_rank": 2, "targets": ("all-linear", "embed_tokens")},
    ),
}


@pytest.mark.parametrize("name", OURS)
def test_embeddings_keep_their_own_rank_and_scale(name, tiny, tmp_path):
    family, fields = OURS[name]
    attach(model := tiny.model(family), LoraConfig(rank=4, alpha=8.0, **fields), 0)
    drawn = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in (p for p in model.parameters() if p.requires_grad):
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=drawn))
    save_adapter(model, tmp_path)
    verify_adapter(model, tmp_path)
    wanted = tiny.logits(model).detach()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = peft.PeftModel.from_pretrained(tiny.reference(family), tmp_path).eval()
    load_adapter(again := tiny.model(family), tmp_path)
    for logits in (tiny.oracle_logits(theirs), tiny.logits(again)):
        assert (logits - wanted).detach().abs().max() < 1e-5 * float(wanted.abs().max())


def test_another_scale_of_the_embeddings_is_noticed_after_a_save(tiny, tmp_path):
    """As a file that leaves out their pattern: the factors are equal, and the scale is not."""
    attach(model := tiny.model("qwen3-moe"), LoraConfig(rank=4, alpha=8.0, **OURS["another rank"][1]), 0)
    save_adapter(model, tmp_path)
    config, tensors = read_files(tmp_path)
    verify_adapter(model, tmp_path, files=(config, tensors))
    del config["alpha_pattern"]["embed_tokens"]
    with pytest.raises(AdapterError, match=r"embed_tokens: rank 4 and scale .* but the model has rank=4"):
        verify_adapter(model, tmp_path, files=(config, tensors))


def test_dora_of_the_embeddings_is_refused_before_work(tiny):
    with pytest.raises(AdapterError, match=r"lora\.dora is not built for the embeddings") as refused:
        attach(tiny.model("llama"), LoraConfig(rank=4, dora=True, targets=("attention", "embed_tokens")), 0)
    assert "--train-too embed_tokens" in refused.value.next
