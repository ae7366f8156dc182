"""The allow-list of config.json: what each field does here, so that no field is ignored silently.

A field is one of four things. *Read*: the family computes with it, and `absent` holds its default. *Only*: it
changes the numbers, and only one value of it is implemented; any other value is refused by name. *Without
effect*: nothing in the model's arithmetic depends on it, at any value or at this one. Any other field is
named in a warning (`unknown`), because a program that knows it may compute something else.

The defaults of absent fields are those of the config classes of transformers 5 (tests/models/test_allowed.py
compares them). They are also those of the configuration files published with DeepSeek-V3 and Kimi-K2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from unfreeze.core.errors import CheckpointError
from unfreeze.models.fields import ROPE_FIELDS, ROPE_TABLES, rotary_tables, shown

Config = Mapping[str, Any]


@dataclass(frozen=True)
class Fields:
    """One family's table.

    absent   field -> its value if config.json lacks it (or holds null)
    read     further fields that the family computes with; the family handles their absence (an absent size
             is an error that names it)
    null     the fields of `absent` in which null is a value, not an absence (q_lora_rank null: no query
             latent)
    never_null  fields in which null is refused: it could mean false or the default
    only     field -> the one value that is implemented, computed from the config; a field of ONLY that is
             read may have any value
    silent   fields without effect on this family's numbers, at any value
    neutral  field -> its only value without effect in this family; others are warned about. Overrides NEUTRAL
    rope_silent  fields of the rotary table without effect on this family's numbers
    per_kind     kinds of layers that may have a table of their own in rope_parameters
    nested       sizes of the config class, which a text_config may leave out but a standalone config may not
    """

    absent: Mapping[str, object]
    read: frozenset[str] = frozenset()
    null: frozenset[str] = frozenset()
    never_null: frozenset[str] = frozenset()
    only: Mapping[str, Callable[[Config], object]] = field(default_factory=dict)
    silent: frozenset[str] = frozenset()
    neutral: Mapping[str, object] = field(default_factory=dict)
    rope_silent: frozenset[str] = frozenset()
    per_kind: tuple[str, ...] = ()
    nested: Mapping[str, object] = field(default_factory=dict)

    def completed(self, config: Config, present: Config, *, nested: bool) -> dict[str, Any]:
        """Fill the absent fields of `present` (config without its nulls); nested: config is a text_config.

        Raises CheckpointError for a null that could mean two things.
        """
        for name in self.never_null & config.keys():
            if config[name] is None:
                raise CheckpointError(
                    f"config.json: {name} is null, which programs read differently",
                    next="write true or false",
                )
        absent = {
            name: value for name, value in self.absent.items() if not (name in self.null and name in config)
        }
        return {**(self.nested if nested else {}), **absent, **present}


def names(words: str) -> frozenset[str]:
    """Split a text into field names at whitespace."""
    return frozenset(words.split())


READ = names("""
    model_type hidden_size intermediate_size num_hidden_layers num_attention_heads vocab_size rope_theta
    rope_scaling rope_parameters original_max_position_embeddings quantization_config
""")
"""Fields that every family reads beside `absent`. quantization_config has an allow-list of its own
(quant/formats.py)."""

SILENT = names("""
    _name_or_path name_or_path _commit_hash architectures transformers_version torch_dtype dtype
    unsloth_fixed unsloth_version _attn_implementation attn_implementation _attn_implementation_autoset
    _experts_implementation experts_implementation use_cache output_attentions
    output_hidden_states output_scores torchscript use_bfloat16 tf_legacy_loss chunk_size_feed_forward
    id2label label2id num_labels problem_type finetuning_task task_specific_params tokenizer_class prefix
    is_decoder cross_attention_hidden_size bos_token_id eos_token_id pad_token_id sep_token_id unk_token_id
    decoder_start_token_id forced_bos_token_id forced_eos_token_id max_length min_length max_new_tokens
    min_new_tokens do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k
    top_p min_p typical_p epsilon_cutoff eta_cutoff repetition_penalty encoder_repetition_penalty
    length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences
    return_dict_in_generate exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
    remove_invalid_values renormalize_logits guidance_scale penalty_alpha max_time forced_decoder_ids ep_size
    aux_loss_alpha seq_aux router_aux_loss_coef pretraining_tp is_composition
    keys_to_ignore_at_inference transformers.js_config is_llama_config is_qwen2_config _flash_attn_2_enabled
    use_memory_efficient_attention use_memorry_efficient_attention use_flash_attn use_flashattn
    gradient_checkpointing initializer_factor classifier_dropout neftune_noise_alpha max_sequence_length
    max_seq_len max_seq_length seq_length n_positions n_ctx model_max_length tokenizer_model_max_length
""")
"""Fields that change neither the forward pass nor the loss of a fine-tuning run: names, sampling settings,
training lengths, other ways to compute the same (pretraining_tp: a product in slices) and pretraining
settings. auto_map is not among them: it names the publisher's own code, and a family must know what that
code computes."""

_NEUTRAL: dict[object, str] = {
    "swiglu": "activation",
    0: (
        """attention_dropout hidden_dropout hidden_dropout_prob attention_probs_dropout_prob resid_pdrop
          embd_pdrop
          attn_pdrop dropout
          router_jitter_noise shared_expert_intermediate_size attention_bias mlp_bias qkv_bias
          output_router_logits add_cross_attention tie_encoder_decoder use_qk_norm qk_norm qk_layernorm
          qk_layer_norms use_mrope rope_interleaved log_scale"""
    ),
    1: "logits_scaling logit_scale embedding_multiplier residual_multiplier mup_base_width return_dict",
}
NEUTRAL = {name: value for value, words in _NEUTRAL.items() for name in words.split()}
"""Fields without effect at this value (0 also means false, 1 true). At another value a warning names them,
unless the family reads them."""

ALIASES = {
    **dict.fromkeys(("num_layers", "n_layers", "n_layer"), "num_hidden_layers"),
    "sliding_window_size": "sliding_window",  # Gemma 2
}
"""Second names that some publishers write beside the field itself. If the two values differ, a warning names
the second name."""

ONLY: dict[str, Callable[[Config], object]] = {
    "hidden_act": lambda config: "silu",
    "is_causal": lambda config: True,
    "is_encoder_decoder": lambda config: False,
    "use_bidirectional_attention": lambda config: False,
    "use_sliding_window": lambda config: False,
    "layer_types": lambda config: ["full_attention"] * int(config.get("num_hidden_layers") or 0),
    "partial_rotary_factor": lambda config: 1,
    "per_layer_config": lambda config: {},
    "compression_config": lambda config: {},
    "quantization": lambda config: {},
}
"""Fields for which every family implements a single value. per_layer_config: sizes of single layers;
compression_config: an old name of quantization_config; quantization: MLX's."""

ROPE_SILENT = names("finetuned")


def refuse_unbuilt(config: Config, table: Fields) -> None:
    """Raise CheckpointError for a field whose value is not implemented; name both values.

    `config` has no nulls.
    """
    read = table.read | table.absent.keys()
    only = {name: built for name, built in ONLY.items() if name not in read} | dict(table.only)
    for name, built in only.items():
        if name in config and config[name] != built(config):
            raise CheckpointError(
                f"config.json: {name} {shown(config[name])} is not built for model_type "
                f"{config.get('model_type')!r}; built: {_short(built(config))}",
                next=(
                    "it changes the outputs: take a release without it, or open an issue with the model's"
                    " name"
                ),
            )
    for name in ROPE_TABLES:
        kinds = table.per_kind
        nested = [key for key, value in (config.get(name) or {}).items() if isinstance(value, Mapping)]
        if any(kind not in kinds for kind in nested):
            raise CheckpointError(
                f"config.json: {name} has a table per kind of layer ({', '.join(nested)}), which is not"
                f" built; built: {', '.join(kinds) or 'one for all'}"
            )
    for where, inner in rotary_tables(config):
        if "partial_rotary_factor" not in read and inner.get("partial_rotary_factor", 1) != 1:
            raise CheckpointError(
                f"config.json: {where}partial_rotary_factor {inner['partial_rotary_factor']!r} is not "
                "built; built: 1"
            )


def unknown(config: Config, table: Fields) -> list[str]:
    """List `field = value` for each field that is not followed and is not at its neutral value.

    A field is followed if it is read or known to have no effect.
    """
    known = READ | table.read | table.absent.keys() | SILENT | table.silent | ONLY.keys() | table.only.keys()
    unfollowed = [
        f"{name} = {shown(value)}"
        for name, value in config.items()
        if name not in known and not _neutral(name, value, config, table)
    ]
    known_there = ROPE_FIELDS.keys() | ROPE_SILENT | table.rope_silent | {"partial_rotary_factor"}
    unfollowed += [
        f"{where}{key} = {shown(value)}"
        for where, inner in rotary_tables(config)
        for key, value in inner.items()
        if key not in known_there and value is not None
    ]
    return unfollowed


def _neutral(name: str, value: object, config: Config, table: Fields) -> bool:
    neutral = {**NEUTRAL, **table.neutral}
    if name in ALIASES:
        return value is None or value == config.get(ALIASES[name])
    return value is None or value in ([], {}) or (name in neutral and value == neutral[name])


def _short(value: object) -> str:
    full = isinstance(value, list) and set(value) <= {"full_attention"}
    return "all 'full_attention', one per layer" if full else shown(value)
