"""Small random vision-language models of transformers, and an image question for each."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import transformers
from family_case import NESTED, Case
from family_cases import CASES, randomized
from safetensors.torch import load_file, save_file

IMAGE, VIDEO, BEGIN, END = 1590, 1591, 1592, 1593
"""Ids above those of tiny-k2's tokenizer, whose files the folders get."""
TEXT = {
    "vocab_size": 1600,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "rms_norm_eps": 1e-5,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
}
TOWER = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "patch_size": 14,
    "image_size": 28,
}
QWEN_TOWER = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "depth": 2,
    "num_heads": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
    "patch_size": 4,
}
IDS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": BEGIN,
    "vision_end_token_id": END,
}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
MLA = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "head_dim": 8,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}


def grid(patches: int, values: int) -> Callable[[], dict[str, Any]]:
    """An image of patches x patches patches, of `values` numbers each."""

    def inputs() -> dict[str, Any]:
        return {
            "pixel_values": torch.randn(patches * patches, values),
            "image_grid_thw": torch.tensor([[1, patches, patches]]),
        }

    return inputs


def kimi() -> dict[str, Any]:
    return {"pixel_values": torch.randn(16, 3, 14, 14), "image_grid_thw": torch.tensor([[1, 4, 4]])}


def pixels(size: int, **more: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {"pixel_values": torch.randn(1, 3, size, size), **more}


def gemma4() -> dict[str, Any]:
    """36 patches of 16 x 16 x 3 at (column, row); 3 x 3 of them become a token."""
    places = torch.tensor([[[column, row] for row in range(6) for column in range(6)]])
    return {"pixel_values": torch.rand(1, 36, 768), "image_position_ids": places}


class Sighted(NamedTuple):
    """A vision-language model of transformers, and how its published releases name tensors.

    image   random inputs of an image that becomes four tokens
    types   the name of the input that marks those tokens; "": the class takes none
    prefix  before the names of the text model in a release
    beside  before those of everything else
    """

    case: Case
    image: Callable[[], dict[str, Any]]
    types: str
    prefix: str
    beside: tuple[str, ...]

    @property
    def model_class(self) -> Any:
        return getattr(transformers, self.case.model_class)

    def made(self) -> Any:
        torch.manual_seed(0)
        return randomized(self.model_class, self.case.made(TEXT))

    def question(self) -> dict[str, Any]:
        """The inputs of one row: text, an image, text."""
        torch.manual_seed(1)
        ids = torch.tensor([[5, 17, BEGIN, *[IMAGE] * 4, END, 88, 41, 2, 9]])
        more = {self.types: (ids == IMAGE).long()} if self.types else {}
        return {"input_ids": ids, **self.image(), **more}


def sighted(
    name: str,
    fields: dict[str, Any],
    image: Callable[[], dict[str, Any]],
    types: str,
    prefix: str,
    beside: tuple[str, ...],
    **more: Any,
) -> Sighted:
    case = Case(name, fields, **{"model": f"{name}ForConditionalGeneration", "renamed": NESTED, **more})
    return Sighted(case, image, types, prefix, beside)


LLAVA = ("vision_tower.", "multi_modal_projector.")
SIGHTED = {
    "qwen3_vl": sighted(
        "Qwen3VL",
        {
            "text_config": {"model_type": "qwen3_vl_text", "rope_parameters": MROPE},
            "vision_config": {**QWEN_TOWER, "deepstack_visual_indexes": [0, 1]},
            **IDS,
        },
        grid(4, 3 * 2 * 4 * 4),
        "mm_token_type_ids",
        "model.language_model.",
        ("model.visual.",),
    ),
    "qwen3_vl_moe": sighted(
        "Qwen3VLMoe",
        {
            "text_config": {
                "rope_parameters": MROPE,
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 24,
                "tie_word_embeddings": False,
            },
            "vision_config": {**QWEN_TOWER, "deepstack_visual_indexes": [0, 1]},
            **IDS,
        },
        grid(4, 3 * 2 * 4 * 4),
        "mm_token_type_ids",
        "model.language_model.",
        ("model.visual.",),
    ),
    "qwen3_5": sighted(
        "Qwen3_5",
        {
            "text_config": {
                "linear_num_value_heads": 4,
                "linear_num_key_heads": 2,
                "linear_key_head_dim": 8,
                "linear_value_head_dim": 8,
                "layer_types": ["linear_attention", "full_attention"],
            },
            "vision_config": QWEN_TOWER,
            **IDS,
        },
        grid(4, 3 * 2 * 4 * 4),
        "mm_token_type_ids",
        "model.language_model.",
        ("model.visual.",),
    ),
    "gemma3": sighted(
        "Gemma3",
        {
            "text_config": {"sliding_window": 8, "sliding_window_pattern": 2},
            "vision_config": TOWER,
            "mm_tokens_per_image": 4,
            "image_token_index": IMAGE,
            "boi_token_index": BEGIN,
            "eoi_token_index": END,
        },
        pixels(28),
        "token_type_ids",
        "language_model.model.",
        LLAVA,
    ),
    "gemma4": sighted(
        "Gemma4",
        {
            "text_config": {
                "global_head_dim": 16,
                "hidden_size_per_layer_input": 0,
                "num_kv_shared_layers": 0,
                "layer_types": ["sliding_attention", "full_attention"],
                "sliding_window": 8,
                "pad_token_id": 0,
            },
            "vision_config": {
                **{key: value for key, value in TOWER.items() if key not in ("patch_size", "image_size")},
                "num_key_value_heads": 2,
                "head_dim": 8,
                "position_embedding_size": 8,
            },
            "audio_config": None,
            "image_token_id": IMAGE,
        },
        gemma4,
        "mm_token_type_ids",
        "model.language_model.",
        ("model.vision_tower.", "model.embed_vision."),
    ),
    "mistral3": sighted(
        "Mistral3",
        {
            "text_config": {"model_type": "mistral", "sliding_window": None},
            "vision_config": {**TOWER, "model_type": "pixtral", "head_dim": 8, "image_size": 56},
            "image_token_index": IMAGE,
            "tie_word_embeddings": False,
        },
        pixels(56, image_sizes=torch.tensor([[56, 56]])),
        "",
        "language_model.model.",
        LLAVA,
    ),
    "llama4": sighted(
        "Llama4",
        {
            "text_config": {
                "intermediate_size_mlp": 64,
                "num_local_experts": 4,
                "attention_chunk_size": 8,
                "no_rope_layers": [1, 0],
            },
            "vision_config": {
                **TOWER,
                "image_size": 56,
                "intermediate_size": 64,
                "vision_output_dim": 16,
                "projector_input_dim": 16,
                "projector_output_dim": 16,
            },
            "image_token_index": IMAGE,
        },
        pixels(56),
        "",
        "language_model.model.",
        ("vision_model.", "multi_modal_projector."),
        renamed=CASES["llama4-nested"].renamed,
        transposed=True,
    ),
    "kimi_k25": sighted(
        "Kimi_K25",
        {
            "text_config": {**MLA, "model_type": "deepseek_v3"},
            "vision_config": {key: value for key, value in TOWER.items() if key != "image_size"}
            | {"pos_emb_height": 4, "pos_emb_width": 4},
            "projection_hidden_size": 16,
            "tie_word_embeddings": False,
            **IDS,
        },
        kimi,
        "",
        "language_model.model.",
        ("vision_tower.", "mm_projector."),
    ),
}


def released(case: Sighted, folder: Any) -> Any:
    """Write the case's model to `folder` under the names that its releases have; return it."""
    model = case.made()
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    # transformers 5.23 takes the tower's new names back in the text model's too
    repaired = {
        re.sub(r"^(language_model\.model\.)blocks\.", r"\1layers.", name).replace("model.mm_", "mm_"): tensor
        for name, tensor in tensors.items()
    }
    if repaired.keys() != tensors.keys():
        save_file(repaired, file, {"format": "pt"})
    return model
