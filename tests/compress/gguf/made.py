"""Tiny random models of every family that a GGUF holds, their tokenizers, and the file that is written of each."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers import models as kinds

from unfreeze import models
from unfreeze.checkpoint import open_checkpoint
from unfreeze.compress.deltas import NoChanges
from unfreeze.compress.gguf.families import Family, family_of, settings
from unfreeze.compress.gguf.file import write_gguf
from unfreeze.compress.gguf.tensors import planned
from unfreeze.compress.gguf.weights import Weights

ROWS = 400
SMALL = {
    "vocab_size": ROWS,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 10000.0,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e6}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.2, 1.5, 2.0, 3.0],
    "long_factor": [1.0, 2.0, 3.0, 5.0, 8.0, 13.0],
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 4, "tie_word_embeddings": True}
GEMMA4 = {
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 4,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 3.0,
    "layer_types": ["sliding_attention", "full_attention"],
}


class Made(NamedTuple):
    """A family of transformers ("Llama") and its fields beside SMALL. config: the class's name if it differs."""

    name: str
    fields: dict[str, Any]
    config: str = ""


MADE = {
    "llama": Made(
        "Llama", {"head_dim": 24, "rope_parameters": LLAMA3, "attention_bias": True, "mlp_bias": True}
    ),
    "llama-tied": Made("Llama", {"tie_word_embeddings": True}),
    "mistral": Made("Mistral", {"sliding_window": None, "head_dim": 24}),
    "qwen2": Made("Qwen2", {"rope_parameters": YARN}),
    "qwen2_moe": Made("Qwen2Moe", {**MOE, "shared_expert_intermediate_size": 96}),
    "qwen3": Made("Qwen3", {"head_dim": 24, "tie_word_embeddings": True}),
    "qwen3_moe": Made("Qwen3Moe", {**MOE, "head_dim": 24, "norm_topk_prob": True}),
    "phi3": Made("Phi3", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
    "phi3-longrope": Made("Phi3", {"original_max_position_embeddings": 8, "rope_parameters": LONG}),
    "gemma2": Made("Gemma2", {**GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}),
    "gemma3": Made("Gemma3", {**GEMMA, "sliding_window_pattern": 2}, "Gemma3TextConfig"),
    "gemma4": Made("Gemma4", GEMMA4, "Gemma4TextConfig"),
    "gemma4-experts": Made(
        "Gemma4",
        {
            **GEMMA4,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
        },
        "Gemma4TextConfig",
    ),
    "gpt_oss": Made(
        "GptOss",
        {
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 5,
            "rope_parameters": {**YARN, "truncate": True, "rope_theta": 150000.0},
        },
    ),
    "minimax_m2": Made(
        "MiniMaxM2", {"head_dim": 32, "rotary_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2}
    ),
}
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def checkpoint(name: str, folder: Path, **fields: Any) -> Path:
    """A random checkpoint in bf16 with a tokenizer; norms and biases are random too."""
    made = MADE[name]
    torch.manual_seed(0)
    config = getattr(transformers, made.config or f"{made.name}Config")(**{**SMALL, **made.fields, **fields})
    model = getattr(transformers, f"{made.name}ForCausalLM")(config)
    with torch.no_grad():
        for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "norm" in key or key.endswith(("router.scale", "per_expert_scale", "layer_scalar")):
                tensor.copy_(1 + 0.3 * torch.randn_like(tensor))
            elif key.endswith((".bias", "_bias", "sinks")):
                tensor.copy_(0.2 * torch.randn_like(tensor))
    model.bfloat16().save_pretrained(folder)
    byte_level(folder)
    return folder


def byte_level(folder: Path, rules: str = QWEN2, **settings: Any) -> Path:
    """A byte-level BPE tokenizer with Qwen 2's rules (or others), a few merges and ChatML."""
    vocab = {char: id for id, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [
        ("t", "h"),
        ("th", "e"),
        ("Ġ", "the"),
        ("i", "n"),
        ("Ġ", "1"),
        ("æ", "ĺ"),
        ("æĺ", "¯"),
        ("Ċ", "Ċ"),
    ]
    for first, second in merges:
        vocab[first + second] = len(vocab)
    tokenizer = Tokenizer(kinds.BPE(vocab=vocab, merges=merges))
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(rules), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    controls = [
        AddedToken(text, special=True, normalized=False)
        for text in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    ]
    tokenizer.add_special_tokens(controls)
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return written(tokenizer, folder, {"eos_token": "<|im_end|>", "chat_template": CHATML, **settings})


def written(tokenizer: Tokenizer, folder: Path, settings: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    table = {"tokenizer_class": "PreTrainedTokenizerFast", **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(table), encoding="utf-8")
    return folder


def weights_of(folder: Path, changes: Any = None) -> tuple[Weights, Family]:
    manifest = open_checkpoint(folder)
    shape = models.shape(manifest.config)
    model = models.meta_model(shape, manifest, torch.float32)
    return Weights(manifest, model, changes or NoChanges()), family_of(shape)


def gguf_of(folder: Path, to: str, name: str = "tiny") -> Path:
    """The GGUF of a checkpoint, without a vocabulary."""
    weights, family = weights_of(folder)
    table = {"general.name": name} | {
        f"{family.arch}.{key}": value for key, value in settings(weights.shape, family)
    }
    path = folder / f"{to}.gguf"
    write_gguf(path, family.arch, table, planned(weights, family, to))
    return path
