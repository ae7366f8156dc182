"""GLM-5: DeepSeek-V3.2's attention. Its indexer rotates adjacent pairs; in GLM-5.2 layers share a choice.

Source: arXiv:2602.15763; for shared choices arXiv:2603.12201; transformers 5.23, models/glm_moe_dsa.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from unfreeze.core.errors import CheckpointError
from unfreeze.models import deepseek_v3, deepseek_v32, llama, mla
from unfreeze.models.allowed import Config, Fields, names
from unfreeze.models.fields import shown
from unfreeze.models.shape import Shape, require

if TYPE_CHECKING:
    from unfreeze.models.factory import Factory
    from unfreeze.models.layer import Layer

RULES = deepseek_v3.RULES
ignored = deepseek_v3.ignored
FULL, SHARED = "full", "shared"
LETTERS = {"F": FULL, "S": SHARED}
FIELDS = Fields(
    absent={
        **deepseek_v32.ABSENT,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 202752,
        "num_key_value_heads": 64,
        "q_lora_rank": 2048,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "n_group": 1,
        "topk_group": 1,
        "index_n_heads": 32,
    },
    read=deepseek_v32.FIELDS.read
    | names("indexer_types index_topk_pattern index_topk_freq index_skip_topk_offset"),
    null=deepseek_v32.FIELDS.null,
    only=deepseek_v32.ONLY | {"indexer_rope_interleave": lambda config: True},
    never_null=deepseek_v32.FIELDS.never_null,
    silent=deepseek_v32.FIELDS.silent | names("index_share_for_mtp_iteration"),
)


def indexer_types(config: Config) -> list[str]:
    """For each layer "full" (its indexer chooses) or "shared" (it uses the last full layer's choice).

    From indexer_types, else index_topk_pattern ("FSSF", or such a list), else index_topk_freq and
    index_skip_topk_offset. Raises CheckpointError for another entry, a wrong number of them, and a shared
    layer at the beginning.
    """
    layers = int(require(config, "num_hidden_layers"))
    name = "indexer_types" if "indexer_types" in config else "index_topk_pattern"
    if name in config:
        kinds = [LETTERS[kind] if kind in ("F", "S") else kind for kind in config[name]]
    else:
        freq = max(int(config.get("index_topk_freq", 1)), 1)
        offset = int(config.get("index_skip_topk_offset", 2))
        name = "index_topk_freq and index_skip_topk_offset"
        kinds = [FULL if max(i - offset + 1, 0) % freq == 0 else SHARED for i in range(layers)]
    again = "get config.json from the model's publisher again"
    if len(kinds) != layers:
        raise CheckpointError(
            f"config.json: {name} has {len(kinds):,} entries, num_hidden_layers is {layers:,}", next=again
        )
    if wrong := [kind for kind in kinds if kind not in (FULL, SHARED)]:
        raise CheckpointError(f"config.json: {name} holds {shown(wrong[0])}; built: full, shared", next=again)
    if kinds[0] == SHARED:
        raise CheckpointError(
            f"config.json: {name} begins with a shared layer, which has no earlier choice", next=again
        )
    return kinds


def shape(config: Mapping[str, Any]) -> Shape:
    """Sizes from config.json."""
    indexer_types(config)
    return replace(deepseek_v32.shape(config), family="glm_moe_dsa")


def layer(shape: Shape, index: int, make: Factory) -> Layer:
    """Decoder layer `index`."""
    from unfreeze.models.blocks.sparse import SparseMLA

    kinds = indexer_types(shape.config)
    full = kinds[index] == FULL
    attention = mla.attention(
        shape,
        index,
        make,
        kind=SparseMLA,
        chosen_keys=int(shape.config["index_topk"]),
        indexer=deepseek_v32.indexer(shape, index, make, "adjacent") if full else None,
        follows=None if full else max(i for i in range(index) if kinds[i] == FULL),
        followed=full and kinds[index + 1 : index + 2] == [SHARED],
    )
    return llama.block(shape, attention, deepseek_v3.mlp(shape, index, make, deepseek_v3.router), make)
