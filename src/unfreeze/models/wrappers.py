"""Configs that wrap a text_config: a language model inside a multimodal release.

Only the language model is built. The other tensors are carried over unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass

from unfreeze.models.allowed import names

IDS = names("""
    text_config vision_config tie_word_embeddings image_token_id video_token_id vision_start_token_id
    vision_end_token_id
""")


@dataclass(frozen=True)
class Wrapper:
    """One model_type around a text_config.

    text     model_type of a text_config that names none
    silent   its fields without effect on the text model
    beside   regular expressions of tensor names that are not part of the text model
    inside   prefix that transformers puts before the text model's names in memory, which peft's files use, if
             it differs from the files'
    """

    text: str
    silent: frozenset[str]
    beside: tuple[str, ...]
    inside: str = ""


# published names, and those of checkpoints that transformers 4.52 to 4.57 wrote: with "model." before them
LLAVA = (r"(model\.)?(vision_tower|multi_modal_projector)\..*",)
QWEN = (r"model\.visual\..*",)
WRAPPERS = {
    "kimi_k25": Wrapper(
        "deepseek_v3",
        IDS
        | names("""
            auto_map ignore_index media_placeholder_token_id use_unified_vision_chunk video_placeholder
            projection_hidden_size projection_layer_norm_eps
        """),
        (r"(model\.)?(vision_tower|mm_projector)\..*",),
    ),
    "gemma3": Wrapper(
        "gemma3_text",
        IDS
        | names("""
            mm_tokens_per_image boi_token_index eoi_token_index image_token_index boi_token_id eoi_token_id
            initializer_range
        """),
        LLAVA,
        "model.language_model.",
    ),
    "gemma4": Wrapper(
        "gemma4_text",
        IDS
        | names("""
            audio_config audio_token_id boa_token_id boi_token_id eoa_token_id eoa_token_index eoi_token_id
            initializer_range vision_soft_tokens_per_image
        """),
        (r"model\.(vision_tower|audio_tower|embed_vision|embed_audio)\..*",),
    ),
    "mistral3": Wrapper(
        "mistral",
        IDS
        | names("""
            image_token_index projector_hidden_act vision_feature_layer multimodal_projector_bias
            spatial_merge_size
        """),
        LLAVA,
        "model.language_model.",
    ),
    "llama4": Wrapper(
        "llama4_text",
        IDS | names("boi_token_index eoi_token_index image_token_index"),
        (r"(vision_model|multi_modal_projector)\..*",),
    ),
    "qwen3_5": Wrapper("qwen3_5_text", IDS, QWEN),
    "qwen3_5_moe": Wrapper("qwen3_5_moe_text", IDS, QWEN),
    "qwen3_vl_moe": Wrapper("qwen3_vl_moe_text", IDS, QWEN),
    "qwen3_vl": Wrapper("qwen3_vl_text", IDS, QWEN),
}
