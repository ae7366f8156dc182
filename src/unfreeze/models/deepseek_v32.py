"""DeepSeek-V3.2: DeepSeek-V3 in which an indexer chooses the keys that a token sees.

GLM-5 (glm_moe_dsa.py) is the same with other rotation in the indexer, and choices that layers share.
Source: arXiv:2512.02556; transformers 5.23, models/deepseek_v32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from unfreeze.core.errors import CheckpointError
from unfreeze.models import deepseek_v3, llama, mla
from unfreeze.models.allowed import Config, Fields, names
from unfreeze.models.layer_types import dense_layers
from unfreeze.models.shape import Shape, require

if TYPE_CHECKING:
    from unfreeze.kernels.rotary import Pairing
    from unfreeze.models.blocks.sparse import Indexer
    from unfreeze.models.factory import Factory
    from unfreeze.models.layer import Layer

RULES = deepseek_v3.RULES
ignored = deepseek_v3.ignored
SPARSE = ("indexed_attention", "deepseek_sparse_attention")


def all_sparse(config: Config) -> list[str]:
    """The one value of layer_types that is built, in either spelling."""
    declared = config.get("layer_types")
    kind = declared[0] if isinstance(declared, list) and declared and declared[0] in SPARSE else SPARSE[0]
    return [kind] * int(config.get("num_hidden_layers") or 0)


ABSENT = {
    **{
        name: value
        for name, value in deepseek_v3.FIELDS.absent.items()
        if name not in ("rope_interleave", "num_nextn_predict_layers")
    },
    "max_position_embeddings": 163840,
    "n_routed_experts": 256,
    "moe_intermediate_size": 2048,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "index_topk": 2048,
    "index_head_dim": 128,
    "index_n_heads": 64,
}
ONLY = {
    **{name: built for name, built in deepseek_v3.FIELDS.only.items() if name != "head_dim"},
    "rope_interleave": lambda config: True,
    "layer_types": all_sparse,
    "num_experts": lambda config: config["n_routed_experts"],
}
FIELDS = Fields(
    absent=ABSENT,
    read=names("mlp_layer_types num_nextn_predict_layers num_mtp_layers"),
    null=names("q_lora_rank num_key_value_heads"),
    only=ONLY | {"indexer_rope_interleave": lambda config: False},
    never_null=names("norm_topk_prob"),
    # head_dim: transformers puts the rotary width in its place
    silent=names("auto_map head_dim moe_router_dtype"),
)


def shape(config: Mapping[str, Any]) -> Shape:
    """Sizes from config.json. Raises CheckpointError for an indexer narrower than its rotary part."""
    require(config, "q_lora_rank")
    width, rotary = int(config["index_head_dim"]), int(config["qk_rope_head_dim"])
    if width < rotary:
        raise CheckpointError(
            f"config.json: index_head_dim {width:,} is less than qk_rope_head_dim {rotary:,}, which rotates",
            next="get config.json from the model's publisher again",
        )
    sizes = deepseek_v3.shape({"num_nextn_predict_layers": 0, "rope_interleave": True, **config})
    assert sizes.moe is not None
    moe = replace(sizes.moe, dense_layers=dense_layers(config, int(config["first_k_dense_replace"])))
    return replace(sizes, family="deepseek_v32", moe=moe)


def layer(shape: Shape, index: int, make: Factory) -> Layer:
    """Decoder layer `index`."""
    from unfreeze.models.blocks.sparse import SparseMLA

    chooses, keys = indexer(shape, index, make, "halves"), int(shape.config["index_topk"])
    attention = mla.attention(shape, index, make, kind=SparseMLA, indexer=chooses, chosen_keys=keys)
    return llama.block(shape, attention, deepseek_v3.mlp(shape, index, make, deepseek_v3.router), make)


def indexer(shape: Shape, index: int, make: Factory, pairs: Pairing) -> Indexer:
    """The indexer of a layer, whose rotary part rotates in `pairs`."""
    from unfreeze.models.blocks.norm import LayerNorm
    from unfreeze.models.blocks.sparse import Indexer

    name, config, latent = f"model.layers.{index}.self_attn.indexer", shape.config, shape.mla
    assert latent is not None and latent.q_lora_rank is not None
    heads, width = int(config["index_n_heads"]), int(config["index_head_dim"])
    return Indexer(
        heads=heads,
        rope=latent.rope,
        pairs=pairs,
        wq_b=make.linear(f"{name}.wq_b", latent.q_lora_rank, heads * width),
        wk=make.linear(f"{name}.wk", shape.hidden_size, width),
        k_norm=LayerNorm(width, 1e-6, dtype=make.dtype, device=make.device),
        weights_proj=make.linear(f"{name}.weights_proj", shape.hidden_size, heads),
    )
