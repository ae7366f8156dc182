"""The hybrids, whose layers have a recurrent state: cases for test_families.py, a config.json for
test_config_fields.py."""

from cases_dense import QWEN_VISION
from family_case import COMMON, NESTED, YARN, Case

DELTA = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "num_hidden_layers": 4,
    # at .2, as elsewhere, transformers' float32 logits of 4 such layers are .005 from its float64 ones
    "initializer_range": 0.05,
}
EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 40,
}
DECAY = (("linear_attn.decay.", "linear_attn."),)
MROPE = {"mrope_section": [1, 1, 0], "mrope_interleaved": True}
QWEN_VISION_3_5 = {name: size for name, size in QWEN_VISION.items() if name != "deepstack_visual_indexes"}
ROTATION = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}

CASES = {
    "qwen3-next": Case("Qwen3Next", {**DELTA, **EXPERTS}, renamed=DECAY),
    "qwen3-next-mixed-yarn": Case(
        "Qwen3Next",
        {
            **DELTA,
            **EXPERTS,
            "mlp_only_layers": [1],
            "norm_topk_prob": False,
            "attention_bias": True,
            "linear_num_value_heads": 2,
            "linear_conv_kernel_dim": 3,
            "layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"],
            "rope_parameters": {**YARN, "partial_rotary_factor": 0.5},
        },
        renamed=DECAY,
    ),
    "qwen3.5": Case("Qwen3_5", DELTA, config="Qwen3_5TextConfig", renamed=DECAY),
    "qwen3.5-nested-tied": Case(
        "Qwen3_5",
        {
            "text_config": {
                **DELTA,
                "model_type": "qwen3_5_text",
                "tie_word_embeddings": True,
                "linear_num_key_heads": 4,
                "linear_key_head_dim": 12,
                "rope_parameters": {**ROTATION, **MROPE},
            },
            "vision_config": QWEN_VISION_3_5,
            "tie_word_embeddings": True,
        },
        model="Qwen3_5ForConditionalGeneration",
        renamed=(*DECAY, *NESTED),
    ),
    "qwen3.5-moe": Case("Qwen3_5Moe", {**DELTA, **EXPERTS}, config="Qwen3_5MoeTextConfig", renamed=DECAY),
    "qwen3.5-moe-nested": Case(
        "Qwen3_5Moe",
        {
            "text_config": {
                **DELTA,
                **EXPERTS,
                "model_type": "qwen3_5_moe_text",
                "tie_word_embeddings": False,
                "rope_parameters": {**ROTATION, **MROPE, "partial_rotary_factor": 0.5},
            },
            "vision_config": QWEN_VISION_3_5,
        },
        model="Qwen3_5MoeForConditionalGeneration",
        renamed=(*DECAY, *NESTED),
    ),
}

_SIZES = {
    "head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "full_attention_interval": 2,
    "partial_rotary_factor": 0.25,
}
_MANY = {
    "num_experts": 64,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
}
CONFIGS = {
    "qwen3_next": COMMON | _SIZES | _MANY | {"decoder_sparse_step": 1, "norm_topk_prob": True},
    "qwen3_5_text": COMMON | _SIZES | {"attn_output_gate": True},
    "qwen3_5_moe_text": COMMON | _SIZES | _MANY | {"attn_output_gate": True},
}
